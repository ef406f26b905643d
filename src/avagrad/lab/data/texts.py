"""Reading text as characters: Penn Treebank's files in both forms, or any text file."""

import codecs
import gzip
import io
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing

from avagrad.lab.data.download import download

PARTS = ("train", "valid", "test")
# Characters of the complete files, including line ends (both forms are the same text).
PENN_TREEBANK = {"train": 5_017_482, "valid": 393_042, "test": 442_423}
ADDRESS = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
WANTED = (
    "Expected: ptb.char.train.txt, ptb.char.valid.txt and ptb.char.test.txt (or the word-level ptb.train.txt, "
    "ptb.valid.txt and ptb.test.txt) in one folder, or one text file. Penn Treebank's files are in the archive "
    f"{ADDRESS} (its folder simple-examples/data); --download downloads them."
)

Tokens = numpy.typing.NDArray[numpy.integer]


class Texts(NamedTuple):
    """The three parts as tokens, which are indices into the alphabet."""

    alphabet: str
    parts: dict[str, Tokens]
    remarks: tuple[str, ...]  # on the data, for readers of the results


def read_texts(path: str | Path, encoding: str = "utf-8") -> Texts:
    r"""Read a folder of Penn Treebank files, or one text file, whose last tenth is split into validation and test.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text.txt").write_text("abc\n" * 10)
    ...     texts = read_texts(Path(folder, "text.txt"))
    >>> texts.alphabet, {part: len(tokens) for part, tokens in texts.parts.items()}
    ('\nabc', {'train': 36, 'validation': 2, 'test': 2})
    """
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


def python_documentation() -> Texts:
    """Return the documentation that comes with Python (``pydoc_data.topics``)."""
    from pydoc_data import topics

    return from_string("\n\n".join(topics.topics[name] for name in sorted(topics.topics)))


def _read_penn_treebank(folder: Path, encoding: str) -> Texts:
    missing: list[str] = []
    for form, read_line in {"ptb.char.{}.txt": _char_line, "ptb.{}.txt": _word_line}.items():
        files = [folder / form.format(part) for part in PARTS]
        lacking = [file.name for file in files if not file.is_file()]
        if not lacking:
            alphabet, tokens = _encode(["".join(map(read_line, _lines(_read(file, encoding)))) for file in files])
            remarks = tuple(
                f"{file.name} has {len(found):,} characters, but the complete file has {PENN_TREEBANK[part]:,}: "
                "it is another version, or truncated."
                for file, part, found in zip(files, PARTS, tokens, strict=True)
                if len(found) != PENN_TREEBANK[part]
            )
            return Texts(alphabet, dict(zip(("train", "validation", "test"), tokens, strict=True)), remarks)
        if len(lacking) < len(files):
            missing += lacking
    lacks = f"lacks {', '.join(missing)}" if missing else "has no file of Penn Treebank"
    raise FileNotFoundError(f"chars: the folder {str(folder)!r} {lacks}. {WANTED}")


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines if lines[-1].strip() else lines[:-1]


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
        is_utf_8 = codecs.lookup(encoding).name == "utf-8"
        with path.open(encoding=encoding, newline="") as file:
            text = file.read()
    except LookupError as error:
        raise ValueError(f"chars: encoding is {encoding!r}, which is not a text encoding of Python.") from error
    except UnicodeError as error:
        start, reason = getattr(error, "start", 0), getattr(error, "reason", error)
        raise ValueError(
            f"chars: {str(path)!r} cannot be read as {encoding} from byte {start:,} on ({reason}): it is truncated, "
            "not a text, or in another encoding (option encoding, such as encoding=latin-1)."
        ) from error
    return text.removeprefix("\ufeff") if is_utf_8 else text


def _encode(texts: list[str]) -> tuple[str, list[Tokens]]:
    """Return the alphabet of several texts, and their tokens."""
    alphabet = "".join(sorted(set().union(*texts)))
    dtype = numpy.min_scalar_type(max(len(alphabet) - 1, 0))
    token_of = numpy.zeros(0x110000, dtype)  # by code point
    token_of[_code_points(alphabet)] = numpy.arange(len(alphabet))
    return alphabet, [token_of[_code_points(text)] for text in texts]


def _code_points(text: str) -> numpy.typing.NDArray[numpy.uint32]:
    return numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=numpy.uint32)


def download_penn_treebank(folder: str | Path, address: str = ADDRESS) -> None:
    """Download the character-level files into a folder; existing files are not changed."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"chars: data is {str(folder)!r}, a file, but must be a folder for a download.")
    if not all((folder / f"ptb.char.{part}.txt").exists() for part in PARTS):
        download(address, folder, _unpack, "chars", WANTED)


def _unpack(archive: bytes) -> dict[str, bytes]:
    """Return the character-level files of the official archive."""
    unpacked = gzip.decompress(archive)  # checks the sum at the end, which tar does not read
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
        members = {Path(member.name).name: member for member in tar if member.isfile()}
        files = {part: tar.extractfile(members[f"ptb.char.{part}.txt"]) for part in PARTS}
        return {f"ptb.char.{part}.txt": file.read() for part, file in files.items() if file is not None}
