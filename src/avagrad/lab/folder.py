"""The folder of a run.

- ``config.json``: every setting with its source, versions, commit; written once, when the run begins
- ``metrics.jsonl``: a line for each record
- ``checkpoint.pt``: the state to resume from
- ``result.json``: written last; a run with this file is finished

Files are replaced atomically, so a run that is killed at any moment leaves either the old or the new one. When a run
is resumed, lines of metrics.jsonl that are newer than the checkpoint are cut off.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avagrad.files import name_file, plain, write_atomic

__all__ = ["RunFolder", "read_metrics"]

CONFIG, METRICS, CHECKPOINT, RESULT = "config.json", "metrics.jsonl", "checkpoint.pt", "result.json"
# Temporary files of a process that was killed while it wrote.
_UNFINISHED = {f".{name}.new" for name in (CONFIG, CHECKPOINT, RESULT)}


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    r"""Return the records of a run, without an incomplete last line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, METRICS).write_text('{"step": 1}\n{"st')
    ...     read_metrics(folder)
    [{'step': 1}]
    """
    path = Path(folder, METRICS)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, to which one process at a time may write.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, RunFolder.claim(Path(place, "x"), {"lr": 1}, {}) as folder:
    ...     folder.append({"step": 1})
    ...     folder.read_result() is None
    True
    """

    path: Path

    @classmethod
    @contextlib.contextmanager
    def claim(
        cls,
        path: str | Path,
        config: dict[str, Any],
        about: dict[str, Any],
        *,
        resume: bool = False,
        may_differ: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> Iterator["RunFolder"]:
        """Lock a folder for a run, as a context manager.

        Without ``resume`` the folder must be new or empty. With it, it may also contain this same run, begun or
        finished; anything else is rejected and not changed. ``config`` identifies the run, except for the keys in
        ``may_differ``; ``about`` is written with it (versions, commit). ``defaults`` are the values of keys that a
        folder of an earlier version does not have.
        """
        folder = cls(Path(path))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(f"out is {str(path)!r}, which cannot be created ({error}).") from error
        with _locked(folder.path):
            files = sorted(set(os.listdir(folder.path)) - _UNFINISHED)
            if files and not resume:
                raise FileExistsError(
                    f"out is {str(path)!r}, which already contains {_some(files)}: choose another folder, "
                    "or resume the run in it (resume, --resume)."
                )
            try:
                if files:
                    folder.check_same_run(config, may_differ=may_differ, defaults=defaults or {})
                else:
                    folder.write_json(CONFIG, {"config": config, "about": about})
                yield folder
            except BaseException:
                if not files and set(os.listdir(folder.path)) - _UNFINISHED == {CONFIG}:
                    (folder.path / CONFIG).unlink()  # nothing else was written: the folder is free again
                raise

    def check_same_run(
        self, config: dict[str, Any], *, may_differ: Collection[str], defaults: Mapping[str, Any]
    ) -> None:
        """Raise an error if the folder contains something else than this run; the arguments are those of ``claim``."""
        if not (self.path / CONFIG).exists():
            files = sorted(set(os.listdir(self.path)) - _UNFINISHED)
            raise FileExistsError(
                f"out is {str(self.path)!r}, which contains {_some(files)} but no {CONFIG}: it is not a run's folder."
            )
        written = self.read_json(CONFIG)
        saved = written.get("config")
        if not isinstance(saved, dict) or not isinstance(written.get("about"), dict):
            raise ValueError(f"{self.path / CONFIG} was not written by a run: 'config' or 'about' is missing.")
        saved = {**{key: value for key, value in defaults.items() if key in config}, **saved}
        keys = sorted((config.keys() | saved.keys()) - set(may_differ))
        differs = [key for key in keys if plain(config.get(key)) != saved.get(key)]
        if differs:
            listed = "; ".join(f"{key} is {saved.get(key)!r} there and {config.get(key)!r} here" for key in differs)
            raise ValueError(
                f"out is {str(self.path)!r}, which contains another run: {listed}. "
                "(To resume it, repeat the settings with which it was begun.)"
            )

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one of the folder's JSON files."""
        try:
            read = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / name} cannot be read ({error}).") from error
        if not isinstance(read, dict):
            raise ValueError(f"{self.path / name} cannot be read (it is not an object).")
        return read

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one of the folder's JSON files atomically."""
        text = json.dumps(plain(content), indent=1, allow_nan=False) + "\n"
        write_atomic(self.path / name, lambda file: file.write(text.encode()))

    def check_data(self, digest: str, data: str | None) -> dict[str, Any]:
        """Return the content of config.json, or raise an error if the run was begun on other data."""
        written = self.read_json(CONFIG)
        if written["about"].get("data") != digest:
            here = repr(data) if data else "the task's own"
            raise ValueError(f"out is {str(self.path)!r}, whose run was begun on other data than {here}.")
        return written

    def read_result(self) -> dict[str, Any] | None:
        """Return the result, if the run is finished."""
        if not (self.path / RESULT).exists():
            return None
        result = self.read_json(RESULT)
        if result.get("status") not in ("finished", "diverged"):
            raise ValueError(f"{self.path / RESULT} was not written by a run: its status is missing.")
        return result

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result; the run is finished then."""
        self.write_json(RESULT, result)

    def append(self, row: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        line = json.dumps(plain(row), allow_nan=False).encode() + b"\n"
        try:
            with (self.path / METRICS).open("ab") as file:
                file.write(line)
        except OSError as error:
            name_file(error, self.path / METRICS)
            raise

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; it includes the length of the metrics file."""
        metrics = self.path / METRICS
        length = 0
        if metrics.exists():
            with metrics.open("rb+") as file:
                length = file.seek(0, os.SEEK_END)
                os.fsync(file.fileno())
        write_atomic(self.path / CHECKPOINT, lambda file: torch.save(state | {"metrics_bytes": length}, file))

    def load(self) -> dict[str, Any] | None:
        """Return the checkpoint, if there is one, and truncate the metrics to its length."""
        path = self.path / CHECKPOINT
        state: dict[str, Any] | None = None
        if path.exists():
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ValueError(
                    f"{path} cannot be read ({why}); to start the run again from its beginning, remove this file."
                ) from error
        metrics, length = self.path / METRICS, 0 if state is None else state["metrics_bytes"]
        if length > (metrics.stat().st_size if metrics.exists() else 0):
            raise ValueError(f"{metrics} is shorter than when the checkpoint was taken: it was changed.")
        if metrics.exists():
            os.truncate(metrics, length)
        return state


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a folder; the system releases the lock when the process ends."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(lock)
            raise BlockingIOError(
                f"out is {str(path)!r}, which another process is using now: wait for it, or choose another folder."
            ) from error  # other errors: a file system without locks
    try:
        yield
    finally:
        os.close(lock)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
