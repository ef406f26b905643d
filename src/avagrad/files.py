"""Writing files so that nobody ever sees a part of one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["name_file", "write_atomic"]


def write_atomic(path: Path, write: Callable[[IO[bytes]], object], *, shared: bool = False) -> None:
    """Replace a file as a whole: written beside, synced, renamed. After a crash it is the old one or the new one.

    Where ``shared``, several processes may write it at once, each beside it under a name of its own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder, "a"), lambda file: file.write(b"all"))
    ...     Path(folder, "a").read_bytes(), sorted(os.listdir(folder))
    (b'all', ['a'])
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new" if shared else f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        name_file(error, path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, has to survive
    finally:
        os.close(folder)


def name_file(error: BaseException, path: Path) -> None:
    """Have an error of the system say which file it is about: that of a full disk does not.

    >>> error = OSError(28, "No space left on device")
    >>> name_file(error, Path("a"))
    >>> str(error)
    "[Errno 28] No space left on device: 'a'"
    """
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)
