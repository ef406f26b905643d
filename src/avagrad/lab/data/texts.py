"""Reading text as characters: Penn Treebank's files in both formats, or any text file, of any size.

A text is never in memory as a whole: it is read twice in pieces, once for its alphabet and once for the tokens, which
take one byte each if the alphabet is small.
"""

import codecs
import functools
import gzip
import io
import operator
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing

from avagrad.files import write_atomic

__all__ = ["WANTED", "Texts", "download_penn_treebank", "python_documentation", "read_texts"]

PARTS = ("train", "valid", "test")
END_OF_LINE = "\n"  # Penn Treebank's <eos>
# Characters of the complete files, including line ends (both formats are the same text).
PENN_TREEBANK = {"train": 5_017_482, "valid": 393_042, "test": 442_423}
ADDRESS = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"

_PIECE = 1 << 22
WANTED = (
    "Expected: ptb.char.train.txt, ptb.char.valid.txt and ptb.char.test.txt (or the word-level ptb.train.txt, "
    "ptb.valid.txt and ptb.test.txt) in one folder, or one text file. Penn Treebank's files are in the archive "
    f"{ADDRESS} (its folder simple-examples/data); --download downloads them."
)

Tokens = numpy.typing.NDArray[numpy.integer]


class Texts(NamedTuple):
    """The three parts as tokens, which are indices into the alphabet.

    >>> from numpy import array
    >>> Texts("ab", {"train": array([0, 1])}, ()).alphabet
    'ab'
    """

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
    alphabet, tokens = _tokens([lambda: _pieces(path, encoding)])
    return Texts(alphabet, split(tokens[0]), ())


def split(tokens: Tokens) -> dict[str, Tokens]:
    """Split a text: nine tenths for training, then half of the rest for validation, the last half for the test.

    >>> {part: len(tokens) for part, tokens in split(numpy.zeros(100)).items()}
    {'train': 90, 'validation': 5, 'test': 5}
    """
    first, second = len(tokens) * 18 // 20, len(tokens) * 19 // 20
    return {"train": tokens[:first], "validation": tokens[first:second], "test": tokens[second:]}


def from_string(text: str) -> Texts:
    """Return the parts of a text that is in memory.

    >>> from_string("abca").alphabet
    'abc'
    """
    alphabet, tokens = _tokens([lambda: iter([text])])
    return Texts(alphabet, split(tokens[0]), ())


def python_documentation() -> Texts:
    """Return the documentation that comes with Python (``pydoc_data.topics``).

    >>> sum(len(tokens) for tokens in python_documentation().parts.values()) > 400_000
    True
    """
    from pydoc_data import topics

    return from_string("\n\n".join(topics.topics[name] for name in sorted(topics.topics)))


def _read_penn_treebank(folder: Path, encoding: str) -> Texts:
    missing: list[str] = []
    for form, read_line in {"ptb.char.{}.txt": _char_line, "ptb.{}.txt": _word_line}.items():
        files = [folder / form.format(part) for part in PARTS]
        found = [file for file in files if file.is_file()]
        if len(found) == len(files):
            sources = [functools.partial(_lines, file, encoding, read_line) for file in files]
            alphabet, tokens = _tokens(sources)
            remarks = tuple(
                f"{file.name} has {len(found):,} characters, but the complete file has {PENN_TREEBANK[part]:,}: "
                "it is another version, or truncated."
                for file, part, found in zip(files, PARTS, tokens, strict=True)
                if len(found) != PENN_TREEBANK[part]
            )
            return Texts(alphabet, dict(zip(("train", "validation", "test"), tokens, strict=True)), remarks)
        if found:
            missing += [file.name for file in files if file not in found]
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
    return "".join(" " if word == "_" else word for word in words) + END_OF_LINE


def _word_line(line: str) -> str:
    """Read "aer bank": normalise all white space to single spaces."""
    return " ".join(line.split()) + END_OF_LINE


def _pieces(path: Path, encoding: str) -> Iterator[str]:
    """Yield a file's text, a few megabytes at a time, without a byte-order mark."""
    try:
        codec = codecs.lookup(encoding)
        if not codec._is_text_encoding:  # base64 and the like
            raise LookupError
        decoder = codecs.getincrementaldecoder(encoding)()
    except (LookupError, TypeError) as error:
        raise ValueError(f"chars: encoding is {encoding!r}, which is not a text encoding of Python.") from error
    with path.open("rb") as file:
        has_mark = codec.name == "utf-8" and file.read(3) == codecs.BOM_UTF8
        done = file.seek(len(codecs.BOM_UTF8) if has_mark else 0)
        while True:
            raw = file.read(_PIECE)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeError as error:
                at = done - pending + getattr(error, "start", 0)
                cut = "it ends in the middle of a character: it is truncated" if not raw else "it is not all text"
                raise ValueError(
                    f"chars: {str(path)!r} cannot be read as {encoding} from byte {at:,} on: {cut}, "
                    "or is in another encoding (option encoding, such as encoding=latin-1)."
                ) from error
            if text:
                yield text
            if not raw:
                return
            done += len(raw)


def _lines(path: Path, encoding: str, read_line: Callable[[str], str]) -> Iterator[str]:
    """Yield a file's lines as characters, many at a time."""
    begun: list[str] = []  # the pieces of an incomplete line: joined once, however many they are
    for piece in _pieces(path, encoding):
        first, *others = piece.split("\n")
        begun.append(first)
        if others:
            *lines, last = "".join(begun), *others
            yield "".join(map(read_line, lines))
            begun = [last]
    if (rest := "".join(begun)).strip():
        yield read_line(rest)


def _tokens(sources: Sequence[Callable[[], Iterator[str]]]) -> tuple[str, list[Tokens]]:
    """Encode several texts by one alphabet."""
    seen = numpy.zeros(0x110000, dtype=bool)
    sizes = []
    for source in sources:
        size = 0
        for text in source():
            codes = _codes(text)
            seen[codes] = True
            size += len(codes)
        sizes.append(size)
    letters = numpy.flatnonzero(seen)
    dtype = numpy.min_scalar_type(max(len(letters) - 1, 0))
    number = numpy.zeros(len(seen), dtype=dtype)
    number[letters] = numpy.arange(len(letters), dtype=dtype)
    texts = []
    for source, size in zip(sources, sizes, strict=True):
        tokens = numpy.empty(size, dtype=dtype)
        at = 0
        for text in source():
            codes = _codes(text)
            if at + len(codes) > size:
                break
            tokens[at : at + len(codes)] = number[codes]
            at += len(codes)
        if at != size:
            raise OSError("chars: a text changed while it was being read; start again when it is complete.")
        texts.append(tokens)
    return "".join(map(chr, letters)), texts


def _codes(text: str) -> numpy.typing.NDArray[numpy.uint32]:
    return numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=numpy.uint32)


def download_penn_treebank(folder: str | Path, address: str = ADDRESS) -> None:
    """Download the character-level files into a folder; existing files are not changed.

    >>> download_penn_treebank("/tmp", "ftp-of-old://nowhere")
    Traceback (most recent call last):
    ...
    OSError: chars: 'ftp-of-old://nowhere' could not be downloaded (...); put the files into '/tmp' manually...
    """
    folder = Path(folder)
    names = [f"ptb.char.{part}.txt" for part in PARTS]
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"chars: data is {str(folder)!r}, a file, but must be a folder for a download.")
    if all((folder / name).exists() for name in names):
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            unpacked = gzip.decompress(response.read())  # checks the sum at the end, which tar does not read
        with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
            members = {Path(member.name).name: member for member in tar if member.isfile()}
            files = {name: tar.extractfile(members[name]) for name in names}
            content = {name: file.read() for name, file in files.items() if file is not None}
    except (OSError, ValueError, KeyError, EOFError, zlib.error, tarfile.TarError, HTTPException) as error:
        manually = f"put the files into {str(folder)!r} manually"
        raise OSError(f"chars: {address!r} could not be downloaded ({error}); {manually}. {WANTED}") from error
    for name, raw in content.items():
        if not (folder / name).exists():
            write_atomic(folder / name, operator.methodcaller("write", raw), shared=True)
