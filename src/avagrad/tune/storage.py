"""Storages of studies: a journal file, or any database that Optuna supports; and their error messages."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

# A process that is killed while it writes leaves its lock; after so many seconds other processes remove it.
GRACE = 3
# How long a database may not respond, for example during a restart, before a study gives up.
PATIENCE = 60.0

T = TypeVar("T")


class StorageError(RuntimeError):
    """The storage cannot be used; the message says which one, why, and what to do."""


class _AwayError(StorageError):
    """A database that does not respond, but may do so later."""


class _Journal(JournalFileBackend):
    """Optuna's journal file, made more robust.

    An incomplete line, left by a killed process or a full disk, is cut off before the next one is written. A file that
    has been removed is an error, and is not created again.
    """

    def __init__(self, path: Path) -> None:
        # An absolute path, and a separate lock file, whose age is the age of the lock.
        super().__init__(str(path), JournalFileOpenLock(str(path), grace_period=GRACE))
        self.path, self.inode = path, path.stat().st_ino

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        self._check(os.stat(self.path))
        yield from super().read_logs(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        self._lock.acquire()
        try:
            # Without O_CREAT: a removed file stays removed. O_APPEND: others may write if this process loses its lock.
            append = os.open(self.path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
            with FileIO(append, "r+b") as file:
                self._check(os.fstat(file.fileno()))
                _cut_half_line(file)
                while text:
                    text = text[file.write(text) :]
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(RuntimeError):  # another process has removed it, since this one was stalled
                self._lock.release()

    def _check(self, now: os.stat_result) -> None:
        # A new file may get the inode of the removed one, but it is shorter.
        read = next(reversed(self._log_number_offset.values()))
        if now.st_ino != self.inode or now.st_size < read:
            raise FileNotFoundError("it has been replaced by another file")


def _cut_half_line(file: FileIO) -> None:
    """Truncate after the last line break."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        file.seek(end - 1)
        if file.read(1) == b"\n":
            break
        end -= 1
    if end < size:
        file.truncate(end)


def is_url(storage: str | os.PathLike[str]) -> bool:
    """Return whether a storage is a database's URL; it is a journal file otherwise.

    >>> is_url("postgresql://host/db"), is_url("runs/mine.journal")
    (True, False)
    """
    return "://" in os.fspath(storage)


def described(storage: str | os.PathLike[str]) -> str:
    """Return a storage's name for messages, without its password.

    >>> described("postgresql://me:secret@host/db")
    'postgresql://me:***@host/db'
    """
    name = os.fspath(storage)
    if not is_url(name):
        return name
    try:
        name = sqlalchemy.engine.make_url(name).render_as_string(hide_password=True)
    except (sqlalchemy.exc.ArgumentError, ValueError):  # it is invalid, but may still contain a password
        name = re.sub("://.*@", "://***@", name)
    return re.sub("(pass[^=&]*=)[^&]*", r"\1***", name)


def open_storage(storage: str | os.PathLike[str], *, create: bool = True) -> BaseStorage:
    """Open or create a journal file or a database.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     len(open_storage(f"{place}/new/mine.journal").get_all_studies())
    0
    """
    with storage_errors(storage):
        if is_url(storage):
            return optuna.storages.get_storage(_open_database(os.fspath(storage)))
        path = Path(storage).expanduser().resolve()
        if path.is_dir():
            raise IsADirectoryError("it is a folder; choose a file, such as runs/mine.journal")
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.exists():
            raise FileNotFoundError("there is no such file")
        return JournalStorage(_Journal(path))


def _open_database(url: str) -> RDBStorage:
    # Replaces connections that the server has closed.
    options = {} if url.startswith("sqlite") else {"pool_pre_ping": True}
    try:
        sqlalchemy.engine.make_url(url)
    except ValueError as error:  # its port
        raise sqlalchemy.exc.ArgumentError(str(error)) from error
    for tries_left in reversed(range(5)):
        try:
            return RDBStorage(_with_driver(url), options)
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError):
            # If several processes find an empty database, one can create the tables; the others then find them.
            if not tries_left:
                raise
        except RuntimeError as error:
            raise StorageError(f"storage is {described(url)!r}, made by another Optuna version: {error}") from error
    raise AssertionError


def _with_driver(url: str) -> str:
    """Make plain postgresql:// use psycopg, which our extra installs; SQLAlchemy's default is psycopg2."""
    for scheme in ("postgresql://", "postgres://"):
        if url.startswith(scheme):
            return "postgresql+psycopg://" + url.removeprefix(scheme)
    return url


@contextlib.contextmanager
def storage_errors(storage: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of a storage into a :class:`StorageError` that names it.

    >>> with storage_errors("runs/mine.journal"):
    ...     raise FileNotFoundError(2, "No such file or directory")
    Traceback (most recent call last):
    ...
    avagrad.tune.storage.StorageError: storage is 'runs/mine.journal', which is missing: ...
    """
    name = described(storage)
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise StorageError(f"storage is {name!r}, which is missing: {error}.") from error
    except OSError as error:
        raise StorageError(f"storage is {name!r}, which cannot be read or written: {error}.") from error
    except ImportError as error:
        raise StorageError(
            f"storage is {name!r}, whose driver is not installed: {error}. pip install '.[cluster]' in avagrad's "
            "folder installs PostgreSQL's; install that of another database separately."
        ) from error
    except sqlalchemy.exc.ArgumentError as error:
        raise StorageError(f"storage is {name!r}, which is not a database URL: {error}.") from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        locked = "; another process has locked it: use a journal file or PostgreSQL for several workers"
        hint = locked if "locked" in cause else ""
        raise _AwayError(f"storage is {name!r}, which does not respond: {cause}{hint}.") from error
    except (KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
        if is_url(storage):
            raise
        why = f"({type(error).__name__}: {error})"
        if (line := _damaged_line(Path(storage))) > 1:
            raise StorageError(
                f"storage is {name!r}, whose line {line} is damaged {why}: repair or delete it."
            ) from error
        raise StorageError(
            f"storage is {name!r}, which is not an Optuna journal {why}; import records in JSON lines by "
            "`avagrad study import`."
        ) from error


def _damaged_line(path: Path) -> int:
    """Return the number of the first invalid line of a journal; 0 if there is none."""
    with contextlib.suppress(OSError):
        for number, line in enumerate(path.expanduser().read_bytes().split(b"\n")[:-1], 1):
            try:
                if "op_code" not in json.loads(line):
                    return number
            except (ValueError, TypeError, RecursionError):
                return number
    return 0


def patiently(act: Callable[[], T], *, patience: float | None = None) -> T:
    """Call a function on a storage; retry for a minute if it is a database that does not respond."""
    until = time.monotonic() + (PATIENCE if patience is None else patience)
    pause = 0.5
    while True:
        try:
            return act()
        except _AwayError:
            if time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
