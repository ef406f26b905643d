"""Atomic writes of files, and values as valid JSON."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["name_file", "plain", "write_atomic"]


def write_atomic(path: Path, write: Callable[[IO[bytes]], object], *, shared: bool = False) -> None:
    """Replace a file atomically: write a temporary file, sync, rename. After a crash it is the old or the new one.

    With ``shared`` several processes may write it at once, each to its own temporary file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder, "a"), lambda file: file.write(b"all"))
    ...     Path(folder, "a").read_bytes(), sorted(os.listdir(folder))
    (b'all', ['a'])
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new" if shared else f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename must also survive a crash
    finally:
        os.close(folder)


def name_file(error: BaseException, path: Path) -> None:
    """Add the file name to an OSError: that of a full disk has none.

    >>> error = OSError(28, "No space left on device")
    >>> name_file(error, Path("a"))
    >>> str(error)
    "[Errno 28] No space left on device: 'a'"
    """
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def plain(value: Any) -> Any:
    """Return a value as valid JSON: numbers that are not finite become null.

    >>> plain({"loss": math.nan, "lr": 0.1, "milestones": (1, 2)})
    {'loss': None, 'lr': 0.1, 'milestones': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
