"""Reading text: Penn Treebank's files in both forms or any text file, as characters; or files of tokens."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing

from avagrad.lab.data.download import download, unpack

# Characters of the complete files, including line ends (both forms are the same text).
PENN_TREEBANK = {"train": 5_017_482, "valid": 393_042, "test": 442_423}
ADDRESS = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
WANTED = (
    "Expected: ptb.char.train.txt, ptb.char.valid.txt and ptb.char.test.txt (or the word-level ptb.train.txt, "
    "ptb.valid.txt and ptb.test.txt) in one folder, or one text file. Penn Treebank's files are in the archive "
    f"{ADDRESS} (its folder simple-examples/data); --download downloads them."
)

TOKEN_FILES = ("train.bin", "val.bin")  # each token a 16-bit unsigned integer, as in nanoGPT

_PIECE = 2**20  # characters that are encoded at a time

Tokens = numpy.typing.NDArray[numpy.integer]


class Texts(NamedTuple):
    """The three parts as tokens, which are indices into the alphabet."""

    alphabet: str
    parts: dict[str, Tokens]
    remarks: tuple[str, ...]  # on the data, for readers of the results


def read_texts(path: str | Path | None, encoding: str = "utf-8") -> Texts:
    """Read a folder of Penn Treebank files, or one text file; by default the documentation that comes with Python."""
    if path is None:
        from pydoc_data.topics import topics

        return from_string("\n\n".join(topics[name] for name in sorted(topics)))
    path = Path(path)
    if path.is_dir():
        return _read_penn_treebank(path, encoding)
    if not path.exists():
        raise FileNotFoundError(f"chars: data is {str(path)!r}, which does not exist. {WANTED}")
    return from_string(_read(path, encoding))


def from_string(text: str) -> Texts:
    """Split a text: nine tenths for training, then half of the rest for validation, the last half for the test."""
    alphabet, (tokens,) = _encode([text])
    first, second = len(tokens) * 18 // 20, len(tokens) * 19 // 20
    parts = {"train": tokens[:first], "validation": tokens[first:second], "test": tokens[second:]}
    return Texts(alphabet, parts, ())


def _read_penn_treebank(folder: Path, encoding: str) -> Texts:
    missing: list[str] = []
    for form, read_line in {"ptb.char.{}.txt": _char_line, "ptb.{}.txt": _word_line}.items():
        files = [folder / form.format(part) for part in PENN_TREEBANK]
        lacking = [file.name for file in files if not file.is_file()]
        if not lacking:
            texts = [_read(file, encoding).removesuffix("\n").split("\n") for file in files]
            alphabet, tokens = _encode(["".join(map(read_line, lines)) for lines in texts])
            remarks = tuple(
                f"{file.name} has {len(found):,} characters, but the complete file has {complete:,}: "
                "it is another version, or truncated."
                for file, found, complete in zip(files, tokens, PENN_TREEBANK.values(), strict=True)
                if len(found) != complete
            )
            return Texts(alphabet, dict(zip(("train", "validation", "test"), tokens, strict=True)), remarks)
        if len(lacking) < len(files):
            missing += lacking
    lacks = f"lacks {', '.join(missing)}" if missing else "has no file of Penn Treebank"
    raise FileNotFoundError(f"chars: the folder {str(folder)!r} {lacks}. {WANTED}")


def _char_line(line: str) -> str:
    """Read "a e r _ b a n k": characters are separated by spaces, and a space is written as an underscore."""
    words = line.split()
    if long := next((word for word in words if len(word) > 1 and not word.startswith("<")), None):
        raise ValueError(
            f"chars: a ptb.char file has the word {long[:40]!r}, but must have single characters separated by spaces: "
            "word-level files are called ptb.train.txt, ptb.valid.txt and ptb.test.txt."
        )
    return "".join(" " if word == "_" else word for word in words) + "\n"


def _word_line(line: str) -> str:
    """Read "aer bank": normalise all white space to single spaces."""
    return " ".join(line.split()) + "\n"


def _read(path: Path, encoding: str) -> str:
    """Return the text of a file, without a byte-order mark."""
    try:
        with path.open(encoding=encoding, newline="") as file:
            return file.read().removeprefix("\ufeff")
    except LookupError as error:
        raise ValueError(f"chars: encoding is {encoding!r}, which is not a text encoding of Python.") from error
    except UnicodeError as error:
        start, reason = getattr(error, "start", 0), getattr(error, "reason", error)
        raise ValueError(
            f"chars: {str(path)!r} cannot be read as {encoding} from byte {start:,} on ({reason}): it is truncated, "
            "not a text, or in another encoding (option encoding, such as encoding=latin-1)."
        ) from error


def _encode(texts: list[str]) -> tuple[str, list[Tokens]]:
    """Return the alphabet of several texts, and their tokens."""
    occurs = numpy.zeros(0x110000, bool)
    for points in itertools.chain(*map(_code_points, texts)):
        occurs[points] = True
    alphabet = numpy.flatnonzero(occurs)
    dtype = numpy.min_scalar_type(max(len(alphabet) - 1, 0))
    token_of = (occurs.cumsum() - 1).astype(dtype)  # by code point
    return "".join(map(chr, alphabet)), [
        numpy.concatenate([token_of[points] for points in _code_points(text)]) for text in texts
    ]


def _code_points(text: str) -> Iterator[Tokens]:
    """Yield the code points of a text, in pieces: all of them would need several times its memory."""
    for start in range(0, max(1, len(text)), _PIECE):
        yield numpy.frombuffer(text[start : start + _PIECE].encode("utf-32-le", "surrogatepass"), numpy.uint32)


def read_tokens(folder: str | Path) -> dict[str, Tokens] | None:
    """Map files of tokens into memory; the second half of ``val.bin`` is the test part. None if there is no file."""
    files = [Path(folder, name) for name in TOKEN_FILES]
    if not any(file.is_file() for file in files):
        return None
    for file in files:
        if not file.is_file():
            both = " and ".join(TOKEN_FILES)
            raise FileNotFoundError(f"gpt: {str(file)!r} does not exist, but {both} must both exist.")
        size = file.stat().st_size
        if size == 0 or size % 2:
            raise ValueError(
                f"gpt: {str(file)!r} has {size} bytes, but must have two for each token and at least one token: "
                "it is empty, truncated, or of another type than uint16."
            )
    # Copy on write: the files are never changed.
    train, held_out = (numpy.memmap(file, dtype="<u2", mode="c") for file in files)
    middle = len(held_out) // 2
    return {"train": train, "validation": held_out[:middle], "test": held_out[middle:]}


def download_penn_treebank(folder: str | Path, address: str = ADDRESS) -> None:
    """Download the character-level files into a folder; existing files are not changed."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"chars: data is {str(folder)!r}, a file, but must be a folder for a download.")
    if not all((folder / f"ptb.char.{part}.txt").exists() for part in PENN_TREEBANK):
        download(address, folder, _unpack, "chars", WANTED)


def _unpack(archive: bytes) -> dict[str, bytes]:
    """Return the character-level files of the official archive."""
    # A character and a space have two bytes; twice that is allowed.
    largest = {f"ptb.char.{part}.txt": 4 * characters for part, characters in PENN_TREEBANK.items()}
    found = {file.name: content for file, content in unpack(io.BytesIO(archive), largest, 1_000_000_000).items()}
    if missing := sorted(largest.keys() - found.keys()):
        raise ValueError(f"it lacks {', '.join(missing)}")
    return found
