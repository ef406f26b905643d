"""Atomic writes of files, some lines of long ones, and values as valid JSON."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["name_file", "plain", "thinned_lines", "write_atomic"]


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


def thinned_lines(path: Path, most: int) -> tuple[list[tuple[int, bytes]], int]:
    r"""Return about ``most`` lines of a file with their numbers, evenly spaced, the last among them; and the spacing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a")
    ...     _ = path.write_bytes(b"1\n2\n3\n4\n")
    ...     thinned_lines(path, 2)
    ([(1, b'1\n'), (3, b'3\n'), (4, b'4\n')], 2)
    """
    kept: list[tuple[int, bytes]] = []
    every, last = 1, None
    with path.open("rb") as file:
        for i, line in enumerate(file):
            last = (i + 1, line)
            if i % every == 0:
                kept.append(last)
                if len(kept) > most:
                    kept, every = kept[::2], 2 * every
    if last is not None and kept[-1] != last:
        kept.append(last)
    return kept, every
