"""``python -m avagrad.lab.ensemble``: a grid of runs at once, with torch and numpy alone."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from avagrad.lab.command import DRY_RUN, FLAGS, OPTIONS, Lines, config_of, planned
from avagrad.lab.ensemble import RECORDS, train_ensemble
from avagrad.lab.ensemble.layers import CONVOLUTIONS
from avagrad.lab.stopping import Stopped
from avagrad.lab.sweep import default_axes
from avagrad.lab.tasks import TASKS, task_class
from avagrad.tune.space import Point, Space, axis

__all__ = ["main"]


def _asked(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser("python -m avagrad.lab.ensemble", allow_abbrev=False)
    parser.description = "Train a task at every lr and eps of a grid, all at once."
    parser.add_argument("task", help=f"one of {', '.join(TASKS)}")
    axes = "'paper', 'paper-chars', low:high:count, or numbers between commas; the paper's for the task, if not given"
    for name, (kind, what) in OPTIONS.items():
        if name in ("lr", "eps"):
            parser.add_argument(f"--{name}", help=f"{what}: {axes}")
        elif name != "seed":
            required = name == "out"
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=what, required=required)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds each point is run with")
    parser.add_argument("--members-at-once", type=int, help="how many points are trained together")
    parser.add_argument("--convolution", choices=CONVOLUTIONS, help="how a stack of convolutions is computed")
    for name, what in (("compile", "compile the step"), ("graph", "on a GPU, record the step as a graph")):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=what)
    parser.add_argument("-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="of the task")
    parser.add_argument("--optimizer-option", action="append", default=[], metavar="NAME=VALUE", help="of the method")
    for name, what in ({flag: FLAGS[flag] for flag in ("resume", "download")} | DRY_RUN).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=what)
    return vars(parser.parse_args(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    >>> main(["digits", "--out", "x", "--seeds", "0"])
    2
    """
    asked = _asked(arguments)
    try:
        if asked["seeds"] < 1:
            raise ValueError(f"seeds is {asked['seeds']}, but must be at least 1.")
        axes = default_axes(asked["task"], asked["optimizer"] or "avagrad")
        lr, eps = (axis(asked[name] or axes[name], name) for name in ("lr", "eps"))
        cells = Space(lr, eps).cells()
        points = [Point(*cell, seed) for seed in range(asked["seeds"]) for cell in cells]
        given = {
            **asked,
            "lr": points[0].lr,
            "eps": points[0].eps,
            "no_graph": asked["graph"] is False,
            "compile": False,
        }
        if asked["dry_run"]:
            print(f"{len(points)} points, {len(lr or [])} lr x {len(eps or [])} eps x {asked['seeds']} seeds, of")
            print(planned(asked["task"], given, asked["option"], asked["optimizer_option"]))
            return 0
        config = config_of(asked["task"], given, asked["option"], asked["optimizer_option"])
        passed = ("resume", "members_at_once", "convolution", "compile", "download")
        options = {name: asked[name] for name in passed}
        if asked["save_every"] is not None:
            options["save_every"] = asked["save_every"]
        records = train_ensemble(config, points, asked["out"], callback=Lines(), **options)
    except Stopped as stopped:
        print(f"stopped and saved; the same command with --out {stopped.folder} --resume goes on", file=sys.stderr)
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    best = min(records, key=lambda record: record.value)
    diverged = sum(record.diverged for record in records)
    unit = f" {task_class(config.task).unit}".rstrip()
    told = "all diverged" if best.diverged else f"best validation error {best.value:.4g}{unit} at {best.point.key}"
    seconds = sum(record.seconds or 0.0 for record in records)
    print(f"{told}; {len(records)} points, {diverged} diverged, {seconds:.1f} s; {Path(asked['out']) / RECORDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
