"""``python -m avagrad.lab.ensemble``: a grid of runs at once; it needs only torch and numpy."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from avagrad.checks import require
from avagrad.lab.command import Lines, guarded
from avagrad.lab.ensemble.run import RECORDS, train_ensemble
from avagrad.lab.options import OPTIONS, add_options, config_from, describe
from avagrad.lab.sweep import default_axes
from avagrad.lab.tasks import TASKS, task_class
from avagrad.tune.space import Point, Space, axis

_AXES = "'paper', 'paper-chars', low:high:count, or comma-separated numbers; default: the paper's for the task"
_EXCLUDED = ("seed", "no_graph", "compile", "deterministic")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser("python -m avagrad.lab.ensemble", allow_abbrev=False)
    parser.description = "Train a task at every lr and eps of a grid, all at once."
    parser.add_argument("task", help=f"one of {', '.join(TASKS)}")
    axes = [replace(OPTIONS[name], kind=str, help=f"{OPTIONS[name].help}: {_AXES}") for name in ("lr", "eps")]
    add_options(parser, [*axes, *(x for x in OPTIONS.values() if x.name not in ("lr", "eps", *_EXCLUDED))])
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds per cell")
    parser.add_argument("--members-at-once", type=int, help="number of points that are trained together")
    for name, what in (("compile", "compile the step"), ("graph", "on a GPU, record the step as a graph")):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=what)
    given = vars(parser.parse_args(arguments))
    return guarded(lambda: _train(given))


def _train(given: dict[str, Any]) -> int:
    require(given["seeds"] >= 1, "seeds", given["seeds"], "at least 1")
    if given["out"] is None:
        raise ValueError("out is not given, but must be the folder of the ensemble.")
    axes = default_axes(given["task"], given["optimizer"] or "avagrad")
    lr, eps = (axis(given[name] or axes[name], name) for name in ("lr", "eps"))
    cells = Space(lr, eps).cells()
    points = [Point(*cell, seed) for seed in range(given["seeds"]) for cell in cells]
    first = {"lr": points[0].lr, "eps": points[0].eps, "no_graph": given["graph"] is False, "compile": False}
    config = config_from(given["task"], given | first)
    if given["dry_run"]:
        print(f"{len(points)} points, {len(lr or [])} lr x {len(eps or [])} eps x {given['seeds']} seeds, of")
        print(describe(config))
        return 0
    options = {name: given[name] for name in ("resume", "members_at_once", "compile", "download")}
    if given["save_every"] is not None:
        options["save_every"] = given["save_every"]
    records = train_ensemble(config, points, given["out"], callback=Lines(), **options)
    best = min(records, key=lambda record: record.value)
    diverged = sum(record.diverged for record in records)
    unit = f" {task_class(config.task).unit}".rstrip()
    line = "all diverged" if best.diverged else f"best validation error {best.value:.4g}{unit} at {best.point.key}"
    seconds = sum(record.seconds or 0.0 for record in records)
    print(f"{line}; {len(records)} points, {diverged} diverged, {seconds:.1f} s; {Path(given['out']) / RECORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
