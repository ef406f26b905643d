"""A queue of runs, processed a part at a time: ``python -m avagrad.lab.queue FILE --minutes 9``.

Each line of the file is a run, with the arguments of ``avagrad train``::

    # CIFAR-10 by the paper's search protocol
    cifar --preset paper-search --optimizer sgd --data cifar-10 --device cuda
    cifar --preset paper-search --optimizer adam --eps 0.1 --data cifar-10 --device cuda

The next run that is not finished is started or resumed; when the time is over it is saved, and the same command
resumes it. A kill at any moment loses only the steps since the last checkpoint. Several processes may share one queue:
a run that another process has locked is skipped. A run that fails is reported, and the others go on. A finished run
keeps its settings, metrics and result, but no checkpoint.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from avagrad.checks import require
from avagrad.lab.command import EXPECTED, Lines, guarded
from avagrad.lab.config import Config
from avagrad.lab.folder import CHECKPOINT, RESULT, RunFolder
from avagrad.lab.options import OPTIONS, Option, add_options, config_from
from avagrad.lab.run import Callback, check_same_run
from avagrad.lab.train import train
from avagrad.stopping import Stopped

__all__ = ["read_queue", "run_queue"]

_EXCLUDED = ("resume", "save_every", "download", "dry_run")
QUEUE_OPTIONS = [
    Option("out", Path, "folder of all runs; default: the file's name without suffix"),
    Option("minutes", float, "save and stop after so many minutes; default: run to the end"),
    replace(OPTIONS["save_every"], default=30.0),
    OPTIONS["dry_run"],
]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def read_queue(file: str | Path) -> dict[str, Config]:
    r"""Return the runs of a file, by the names of their folders; an error names the number of the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = Path(place, "a").write_text("# two\ndigits --seed 1 --out first\ndigits --optimizer adam\n")
    ...     list(read_queue(Path(place, "a")))
    ['first', 'digits-adam-seed0-...']
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("task")
    add_options(parser, [option for option in OPTIONS.values() if option.name not in _EXCLUDED])
    configs: dict[str, Config] = {}
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        try:
            arguments = shlex.split(line, comments=True)
            if not arguments:
                continue
            given = vars(parser.parse_args(arguments))
            config = config_from(given["task"], given)
        except ValueError as error:
            raise ValueError(f"line {number} of {file}: {error}") from error
        name = os.path.normpath(given["out"] or _name(config))
        if name in configs:
            raise ValueError(
                f"line {number} of {file}: the run {name!r} appears twice, but must appear once; lines that differ "
                "only in --data or --threads need different --out."
            )
        configs[name] = config
    return configs


def _name(config: Config) -> str:
    """Return a name that is unique to these settings."""
    settings = {name: value for name, value in config.as_json().items() if name not in ("sources", "threads", "data")}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.task.replace(':', '-')}-{config.optimizer}-seed{config.seed}-{digest}"


def run_queue(
    configs: Mapping[str, Config],
    out: str | Path,
    *,
    minutes: float | None = None,
    save_every: float = 30.0,
    callback: Callback | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run what is not finished, until the time is over, and yield the name of each run with its result.

    A run that fails is yielded with the status "failed" and the ``error``, and the others go on.

    >>> list(run_queue({}, "nowhere", minutes=0.0))
    []
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    for name, config in configs.items():
        folder = Path(out, name)
        if deadline is not None and time.monotonic() >= deadline:
            return
        try:
            if _is_finished(config, folder):
                (folder / CHECKPOINT).unlink(missing_ok=True)  # left by a process that was killed just before this
                continue
            result = train(config, folder, resume=True, callback=callback, save_every=save_every, deadline=deadline)
        except BlockingIOError:  # another process is running it
            continue
        except Stopped:
            if deadline is not None and time.monotonic() >= deadline:
                return
            raise
        except Exception as error:  # as text: the error itself would keep the model
            text = str(error) if isinstance(error, EXPECTED) else traceback.format_exc()
            yield name, {"status": "failed", "error": text}
            continue
        (folder / CHECKPOINT).unlink(missing_ok=True)
        yield name, result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser("python -m avagrad.lab.queue", allow_abbrev=False)
    parser.description = "Process a queue of runs."
    parser.add_argument("file", type=Path, help="a run on each line, with the arguments of avagrad train")
    add_options(parser, QUEUE_OPTIONS)
    given = vars(parser.parse_args(arguments))
    return guarded(lambda: run_file(**given, callback=Lines()), again="")


def run_file(
    file: Path, out: Path | None, minutes: float | None, save_every: float, dry_run: bool, callback: Callback
) -> int:
    """Process a queue and print the results; return the exit code of the command."""
    require(minutes is None or minutes > 0, "minutes", minutes, "a number above 0")
    require(save_every >= 0, "save_every", save_every, "a number of seconds of at least 0")
    configs = read_queue(file)
    place = out or file.with_suffix("")
    require(out != file, "out", str(out), "another path than that of the queue's file")
    require(place != file, "out", out, f"given, since {file} has no suffix")
    failed = set()
    if not dry_run:
        for name, result in run_queue(configs, place, minutes=minutes, save_every=save_every, callback=callback):
            print(f"{name}: {result['status']}", flush=True)
            if result["status"] == "failed":
                failed.add(name)
                print(f"{name}: {result['error']}", file=sys.stderr)
    left = [name for name, config in configs.items() if name in failed or not _is_finished(config, place / name)]
    print(f"{len(configs) - len(left)} of {len(configs)} runs are finished in {place}")
    for name in left:
        print(f"left: {name}")
    return 1 if failed else 0


def _is_finished(config: Config, folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: the folder contains another run
        check_same_run(config, RunFolder(folder))
        return (folder / RESULT).exists()
    return False


if __name__ == "__main__":
    sys.exit(main())
