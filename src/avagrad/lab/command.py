"""The command lines of the lab: ``python -m avagrad.lab.train``, which is the same as ``avagrad train``."""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from avagrad.lab.config import Config
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.folder import CONFIG, RunFolder
from avagrad.lab.options import OPTIONS, add_options, config_from, describe
from avagrad.lab.run import Callback
from avagrad.lab.tasks import TASKS, task_class
from avagrad.lab.train import train
from avagrad.stopping import Stopped
from avagrad.tune.space import Point

EXPECTED = (ValueError, TypeError, OSError, ImportError)  # errors of the user, whose message is enough


def _free_folder(config: Config) -> Path:
    """Create a new folder under runs/; other commands may do so at the same time."""
    base = f"{config.task.rpartition(':')[2].lower()}-{config.optimizer}-seed{config.seed}"
    for name in itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            Path("runs", name).mkdir(parents=True)
            return Path("runs", name)
    raise AssertionError("there are infinitely many names")


def run(task: str, given: Mapping[str, Any], callback: Callback | None = None) -> tuple[dict[str, Any], Path]:
    """Run a training from command-line options; return the result and its folder. ``given`` has names of OPTIONS."""
    if given.get("resume") and given.get("out") is None:
        raise ValueError("resume is given without out: name the folder of the run to resume.")
    config = config_from(task, given)
    out = Path(given["out"]) if given.get("out") is not None else _free_folder(config)
    options: dict[str, Any] = {name: bool(given.get(name)) for name in ("resume", "download")}
    if given.get("save_every") is not None:
        options["save_every"] = given["save_every"]
    try:
        result = train(config, out, callback=callback, **options)
    except BaseException:
        if given.get("out") is None:
            with contextlib.suppress(OSError):  # it is empty if the run did not begin
                out.rmdir()
        raise
    return result, out


def resume_run(folder: str | Path, callback: Callback | None = None) -> dict[str, Any]:
    """Resume the training or the ensemble in a folder, and return the content of its ``result.json``."""
    place = RunFolder(Path(folder))
    if not (place.path / CONFIG).is_file():
        raise ValueError(f"{str(folder)!r} has no {CONFIG}, so there is no run in it to resume.")
    written = place.read_json(CONFIG).get("config")
    if not isinstance(written, dict) or "optimizer" not in written:
        raise ValueError(f"{place.path / CONFIG} is not from a training or an ensemble, and cannot be resumed.")
    if "points" not in written:
        return train(Config.from_json(written), place.path, resume=True, callback=callback)
    points = [Point.from_key(key) for key in written["points"]]
    config = Config.from_json({**points[0]._asdict(), **written, "compile": False})
    train_ensemble(config, points, place.path, resume=True, callback=callback, compile=written["compile"])
    return place.read_result() or {}


class Lines(Callback):
    """Prints a line for each record, to the standard error."""

    def on_start(self, config: Config, done: int, total: int) -> None:
        """Print the task and the method."""
        at = f", from step {done}" if done else ""
        self._print(f"{config.task} with {config.optimizer}: {total} steps{at}")

    def on_record(self, row: dict[str, Any]) -> None:
        """Print a record."""
        numbers = "  ".join(f"{name} {row[name]:.5g}" for name in ("loss", "error", "lr") if row[name] is not None)
        line = f"epoch {row['epoch']}  step {row['step']}  {numbers}  {row['seconds']:.1f} s"
        self._print(line + ("  diverged" if row.get("diverged") else ""))

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a closed stream must not end the run
            print(line, file=sys.stderr, flush=True)


def summary(result: Mapping[str, Any], unit: str) -> str:
    """Return the result of a run, or of an ensemble, in one line.

    >>> summary({"status": "diverged", "diverged_at": 7}, "%")
    'diverged at step 7: the loss is not a finite number'
    """
    if "points" in result:
        return f"{result['points']} points, {result['diverged']} diverged, in {result['seconds']:.1f} s"
    if result["status"] == "diverged":
        return f"diverged at step {result['diverged_at']}: the loss is not a finite number"
    test, validation = result["test"]["error"], result["validation"]["error"]
    unit = f" {unit}" if unit else ""
    return f"test error {test:.4g}{unit}, validation error {validation:.4g}{unit}, in {result['seconds']:.1f} s"


def guarded(work: Callable[[], int], again: str = " with --out {} --resume") -> int:
    """Run a command and return its exit code, 2 after an error. To resume, ``again`` is added; {} is the folder."""
    try:
        return work()
    except Stopped as stopped:
        print(f"stopped and saved; to resume, run it again{again.format(stopped.folder)}", file=sys.stderr)
        return stopped.exit_code
    except EXPECTED as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser("python -m avagrad.lab.train", description="Train a model.", allow_abbrev=False)
    parser.add_argument("task", help=f"one of {', '.join(TASKS)}, or module:Class")
    add_options(parser, OPTIONS.values())
    given = vars(parser.parse_args(arguments))
    return guarded(lambda: _train(given))


def _train(given: dict[str, Any]) -> int:
    began = time.monotonic()
    if given["dry_run"]:
        print(describe(config_from(given["task"], given)))
        return 0
    result, out = run(given["task"], given, Lines())
    for remark in result["remarks"]:
        print(f"note: {remark}", file=sys.stderr)
    line = summary(result, task_class(given["task"]).unit)
    print(f"{line} ({time.monotonic() - began:.0f} s in total); {out}")
    return 0
