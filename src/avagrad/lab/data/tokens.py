"""Token files: ``train.bin`` and ``val.bin``, each token a 16-bit unsigned integer, as in nanoGPT."""

from pathlib import Path

import numpy
import numpy.typing

__all__ = ["has_token_files", "read_tokens"]

NAMES = ("train.bin", "val.bin")
Tokens = numpy.typing.NDArray[numpy.uint16]


def has_token_files(folder: str | Path) -> bool:
    """Return whether a folder has one of the two files.

    >>> has_token_files("/nowhere")
    False
    """
    return any(Path(folder, name).is_file() for name in NAMES)


def read_tokens(folder: str | Path) -> dict[str, Tokens]:
    """Map the files into memory; the second half of ``val.bin`` is the test part.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in NAMES:
    ...         numpy.arange(10, dtype=numpy.uint16).tofile(Path(folder, name))
    ...     {part: tokens.tolist() for part, tokens in read_tokens(folder).items() if part != "train"}
    {'validation': [0, 1, 2, 3, 4], 'test': [5, 6, 7, 8, 9]}
    """
    train, held_out = (_mapped(Path(folder, name)) for name in NAMES)
    middle = len(held_out) // 2
    return {"train": train, "validation": held_out[:middle], "test": held_out[middle:]}


def _mapped(path: Path) -> Tokens:
    if not path.is_file():
        raise FileNotFoundError(f"gpt: {str(path)!r} does not exist, but {' and '.join(NAMES)} must both exist.")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ValueError(
            f"gpt: {str(path)!r} has {size} bytes, but must have two for each token and at least one token: "
            "it is empty, truncated, or of another type than uint16."
        )
    return numpy.memmap(path, dtype="<u2", mode="c")  # copy on write: the file is never changed
