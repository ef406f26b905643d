"""A list of runs that is worked off a part at a time: ``python -m avagrad.lab.queue FILE --minutes 9``.

Each line of the file is a run, in the words of ``avagrad train``::

    # CIFAR-10 by the paper's search protocol
    cifar --preset paper-search --optimizer sgd --data cifar-10 --device cuda
    cifar --preset paper-search --optimizer adam --eps 0.1 --data cifar-10 --device cuda

The next one that is not finished is run, or gone on with; when the time is over it is saved, and the same command goes
on with it. Killed at any moment, nothing is lost but the steps since the last checkpoint. Several processes may work on
one list: a run that another one is at is left to it. A finished run leaves its settings, metrics and result, and no
checkpoint.
"""

import argparse
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avagrad.lab.command import Lines, guarded
from avagrad.lab.config import Config
from avagrad.lab.folder import CHECKPOINT, RESULT
from avagrad.lab.options import OPTIONS, add_options, config_from
from avagrad.lab.run import Callback
from avagrad.lab.train import train
from avagrad.stopping import Stopped

__all__ = ["Entry", "main", "read_queue", "run_queue"]

_NOT_HERE = ("resume", "save_every", "tensorboard", "download", "dry_run")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


@dataclass(frozen=True)
class Entry:
    """A run of a list: its folder, below that of the list, and its settings.

    >>> Entry("a", None).is_finished(Path("nowhere"))
    False
    """

    name: str
    config: Config

    def is_finished(self, out: Path) -> bool:
        """Whether the run has ended."""
        return (out / self.name / RESULT).exists()


def read_queue(file: str | Path) -> list[Entry]:
    r"""Return the runs of a list, in its order; what is wrong with a line is said with its number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = Path(place, "a").write_text("# two\ndigits --seed 1 --out first\ndigits --optimizer adam\n")
    ...     [entry.name for entry in read_queue(Path(place, "a"))]
    ['first', 'digits-adam-seed0-...']
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("task")
    add_options(parser, [option for option in OPTIONS.values() if option.name not in _NOT_HERE])
    entries: dict[str, Entry] = {}
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            given = vars(parser.parse_args(words))
            config = config_from(given["task"], given)
        except ValueError as error:
            raise ValueError(f"line {number} of {file}: {error}") from error
        name = given["out"] or _name(config)
        if name in entries:
            raise ValueError(f"line {number} of {file}: the run {name!r} is there twice, but must be once.")
        entries[name] = Entry(name, config)
    return list(entries.values())


def _name(config: Config) -> str:
    """Return a name that only these settings have."""
    settings = {name: value for name, value in config.as_json().items() if name not in ("sources", "threads", "data")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.task.replace(':', '-')}-{config.optimizer}-seed{config.seed}-{digest}"


def run_queue(
    entries: Sequence[Entry],
    out: str | Path,
    *,
    minutes: float | None = None,
    save_every: float = 30.0,
    callback: Callback | None = None,
) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Run what is not finished, and give each run with its result; end when the time is over, or nothing is left.

    >>> list(run_queue([], "nowhere", minutes=0.0))
    []
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    place = Path(out)
    for entry in entries:
        folder = place / entry.name
        if entry.is_finished(place):
            (folder / CHECKPOINT).unlink(missing_ok=True)  # of a process that was killed just before it did so
            continue
        if deadline is not None and time.monotonic() >= deadline:
            return
        try:
            result = train(
                entry.config, folder, resume=True, callback=callback, save_every=save_every, deadline=deadline
            )
        except BlockingIOError:  # another process is at it
            continue
        except Stopped:
            if deadline is not None and time.monotonic() >= deadline:
                return
            raise
        (folder / CHECKPOINT).unlink(missing_ok=True)
        yield entry, result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    >>> main(["nowhere.txt"])
    2
    """
    parser = argparse.ArgumentParser("python -m avagrad.lab.queue", allow_abbrev=False)
    parser.description = "Work off a list of runs."
    parser.add_argument("file", type=Path, help="a run on each line, in the words of avagrad train")
    parser.add_argument("--out", type=Path, help="the folder of all runs; the file's name without its suffix")
    parser.add_argument("--minutes", type=float, help="stop then, and save; without, run to the end")
    parser.add_argument("--save-every", type=float, default=30.0, help=OPTIONS["save_every"].help)
    parser.add_argument("--dry-run", action="store_true", help=OPTIONS["dry_run"].help)
    given = parser.parse_args(arguments)
    return guarded(lambda: work_off(given.file, given.out, given.minutes, given.save_every, given.dry_run, Lines()))


def work_off(
    file: Path, out: Path | None, minutes: float | None, save_every: float, dry_run: bool, callback: Callback
) -> int:
    """Work off a list, and print what comes of it; return the exit code of the command."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes is {minutes!r}, but must be a number above 0.")
    entries = read_queue(file)
    place = out or file.with_suffix("")
    if not dry_run:
        for entry, result in run_queue(entries, place, minutes=minutes, save_every=save_every, callback=callback):
            print(f"{entry.name}: {result['status']}", flush=True)
    left = [entry.name for entry in entries if not entry.is_finished(place)]
    print(f"{len(entries) - len(left)} of {len(entries)} runs are finished in {place}")
    for name in left:
        print(f"left: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
