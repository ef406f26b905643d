"""``python -m avagrad.lab.train``: a training run with torch and numpy alone.

The command ``avagrad train`` has the same options, and hands them to the same :func:`run`.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from avagrad.lab.config import Config, configure
from avagrad.lab.run import Callback
from avagrad.lab.tasks import TASKS, task_class
from avagrad.lab.train import Stopped, train

__all__ = ["OPTIONS", "config_of", "main", "parse_settings", "planned", "run"]

# One table for both command lines: name, type, what it is.
OPTIONS: dict[str, tuple[type, str]] = {
    "optimizer": (str, "the method, by name"),
    "lr": (float, "learning rate"),
    "eps": (float, "epsilon"),
    "weight_decay": (float, "weight decay"),
    "epochs": (int, "how many epochs"),
    "milestones": (str, "epochs at which the learning rate drops, such as 60,120,160; 'none' for a constant one"),
    "factor": (float, "what it is multiplied by then"),
    "schedule": (str, "of the learning rate: milestones, or cosine, down to 0 at the end"),
    "warmup": (int, "steps over which the learning rate rises from 0"),
    "clip": (float, "the largest norm of all gradients together; 0 for no clipping"),
    "preset": (str, "a protocol: settings with their sources"),
    "data": (str, "where the task's data are"),
    "seed": (int, "fixes everything that is random"),
    "device": (str, "cpu, cuda, ..."),
    "threads": (int, "how many threads torch computes with"),
    "precision": (str, "float32, tf32 or bf16; on a GPU the task's own, if not given"),
    "out": (str, "the folder of the run"),
    "save_every": (float, "seconds between checkpoints"),
}


_PYTHONS = {"True": "true", "False": "false", "None": "null"}


def parse_settings(pairs: Sequence[str], what: str) -> dict[str, Any]:
    """Read ``name=value`` pairs; a value is JSON where it can be (or Python's True, False, None), else a word.

    >>> parse_settings(["model=conv", "width=32", "full=true", "nesterov=False"], "option")
    {'model': 'conv', 'width': 32, 'full': True, 'nesterov': False}
    >>> parse_settings(["model"], "option")
    Traceback (most recent call last):
    ...
    ValueError: option is 'model', but must be name=value.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"{what} is {pair!r}, but must be name=value.")
        try:
            read = json.loads(_PYTHONS.get(value, value))
        except ValueError:
            read = value
        settings[name.replace("-", "_")] = tuple(read) if isinstance(read, list) else read
    return settings


def _milestones(text: str) -> tuple[int, ...]:
    if text in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"milestones is {text!r}, but must be epochs with commas between them, or 'none'.") from None


def config_of(task: str, given: dict[str, Any], options: Sequence[str], optimizer_options: Sequence[str]) -> Config:
    """Put together the run that a command line asks for; ``given`` has the keys of OPTIONS.

    >>> config_of("digits", dict.fromkeys(OPTIONS) | {"milestones": "2,4"}, ["model=conv"], []).milestones
    (2, 4)
    """
    names = ("lr", "eps", "weight_decay", "epochs", "factor", "clip", "threads", "schedule", "warmup")
    settings = {name: given.get(name) for name in names}
    if given.get("milestones") is not None:
        settings["milestones"] = _milestones(given["milestones"])
    no_clipping = settings["clip"] == 0
    if no_clipping:
        settings["clip"] = None
    return configure(
        task,
        given.get("optimizer") or "avagrad",
        preset=given.get("preset"),
        seed=given.get("seed") or 0,
        data=given.get("data"),
        device=given.get("device") or "cpu",
        task_options=parse_settings(options, "option"),
        optimizer_options=parse_settings(optimizer_options, "optimizer-option"),
        no_clipping=no_clipping,
        precision=given.get("precision"),
        graph=False if given.get("no_graph") else None,
        compile=bool(given.get("compile")),
        deterministic=bool(given.get("deterministic")),
        **settings,
    )


def planned(
    task: str, given: dict[str, Any], options: Sequence[str] = (), optimizer_options: Sequence[str] = ()
) -> str:
    """Say what a command line would run: each setting, with its source. Nothing is run, and no data are looked at.

    >>> print(planned("digits", {"epochs": 5}, ["model=conv"]))
    digits, avagrad, preset quick, seed 0, on cpu
    lr: 0.5 (ours)
    ...
    epochs: 5 (given)
    ...
    model: conv (given)
    ...
    """
    config = config_of(task, {name: given.get(name) for name in (*OPTIONS, *SETTINGS)}, options, optimizer_options)
    settings = config.as_json()
    nested = {**settings.pop("task_options"), **settings.pop("optimizer_options")}
    lines = [f"{task}, {config.optimizer}, preset {config.preset}, seed {config.seed}, on {config.device}"]
    for name, value in (settings | nested).items():
        if name not in ("task", "optimizer", "preset", "seed", "device", "sources"):
            source = config.sources.get(name)
            lines.append(f"{name}: {value}" + (f" ({source})" if source else ""))
    return "\n".join(lines)


def _free_folder(config: Config) -> Path:
    """Make a folder under runs/ that was not there, also not for another command that starts now."""
    base = f"{config.task.rpartition(':')[2].lower()}-{config.optimizer}-seed{config.seed}"
    for name in itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            Path("runs", name).mkdir(parents=True)
            return Path("runs", name)
    raise AssertionError("there are infinitely many names")


def run(
    task: str,
    given: dict[str, Any],
    *,
    options: Sequence[str] = (),
    optimizer_options: Sequence[str] = (),
    resume: bool = False,
    tensorboard: bool = False,
    download: bool = False,
    callback: Callback | None = None,
) -> tuple[dict[str, Any], Path]:
    """Run what a command line asks for; return the result and its folder. ``given`` has the keys of OPTIONS.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result, folder = run("digits", {"epochs": 1, "out": place}, options=["model=mlp"])
    >>> result["steps"]
    15
    """
    given = {name: given.get(name) for name in (*OPTIONS, *SETTINGS)}
    if resume and given["out"] is None:
        raise ValueError("resume is asked for without out: name the folder of the run that is to go on.")
    config = config_of(task, given, options, optimizer_options)
    out = Path(given["out"]) if given["out"] is not None else _free_folder(config)
    save_every = 30.0 if given["save_every"] is None else given["save_every"]
    try:
        result = train(
            config,
            out,
            resume=resume,
            callback=callback,
            save_every=save_every,
            tensorboard=tensorboard,
            download=download,
        )
    except BaseException:
        if given["out"] is None:
            with contextlib.suppress(OSError):  # it is empty, if nothing came of the run
                out.rmdir()
        raise
    return result, out


class Lines(Callback):
    """Prints a line for each record.

    >>> Lines(sys.stdout).on_record({"step": 9, "epoch": 1, "loss": 0.5, "error": 2.0, "lr": 0.1, "seconds": 3.0})
    epoch 1  step 9  loss 0.5  error 2  lr 0.1  3.0 s
    """

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream or sys.stderr

    def on_start(self, config: Config, done: int, total: int) -> None:
        """Say what runs."""
        at = f", from step {done}" if done else ""
        self._print(f"{config.task} with {config.optimizer}: {total} steps{at}")

    def on_record(self, row: dict[str, Any]) -> None:
        """Print a record."""
        numbers = "  ".join(f"{name} {row[name]:.5g}" for name in ("loss", "error", "lr") if row[name] is not None)
        told = f"epoch {row['epoch']}  step {row['step']}  {numbers}  {row['seconds']:.1f} s"
        self._print(told + ("  diverged" if row.get("diverged") else ""))

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads on: the run is worth more than its lines
            print(line, file=self.stream, flush=True)


def summary(result: dict[str, Any], unit: str) -> str:
    """Say in one line what came out.

    >>> summary({"status": "diverged", "diverged_at": 7}, "%")
    'diverged at step 7: the loss is not a finite number'
    """
    if result["status"] == "diverged":
        return f"diverged at step {result['diverged_at']}: the loss is not a finite number"
    test, validation = result["test"]["error"], result["validation"]["error"]
    unit = f" {unit}" if unit else ""
    return f"test error {test:.4g}{unit}, validation error {validation:.4g}{unit}, in {result['seconds']:.1f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    >>> main(["digits", "--epochs", "0"])
    2
    """
    parser = argparse.ArgumentParser("python -m avagrad.lab.train", description=__doc__, allow_abbrev=False)
    parser.add_argument("task", help=f"one of {', '.join(TASKS)}")
    for name, (kind, what) in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=what)
    parser.add_argument(
        "-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the task"
    )
    parser.add_argument("--optimizer-option", action="append", default=[], metavar="NAME=VALUE", help="of the method")
    for flag, what in (FLAGS | SETTINGS | DRY_RUN).items():
        parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=what)
    asked = vars(parser.parse_args(arguments))
    began = time.monotonic()
    try:
        if asked["dry_run"]:
            print(planned(asked["task"], asked, asked["option"], asked["optimizer_option"]))
            return 0
        result, out = run(
            asked["task"],
            asked,
            options=asked["option"],
            optimizer_options=asked["optimizer_option"],
            callback=Lines(),
            **{flag: asked[flag] for flag in FLAGS},
        )
    except Stopped as stopped:
        print(f"stopped and saved; the same command with --out {stopped.folder} --resume goes on", file=sys.stderr)
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
        return 0
    told = summary(result, task_class(asked["task"]).unit)
    for remark in result["remarks"]:
        print(f"note: {remark}", file=sys.stderr)
    print(f"{told} ({time.monotonic() - began:.0f} s in all); {out}")
    return 0


SETTINGS = {
    "no_graph": "on a GPU, do not record the step as a graph",
    "compile": "compile the model (torch.compile)",
    "deterministic": "on a GPU, compute the same bits in every run",
}
FLAGS = {
    "resume": "go on with the run in --out",
    "tensorboard": "also write events for TensorBoard",
    "download": "the task may fetch its data",
}
DRY_RUN = {"dry_run": "say what would be run, and run nothing"}
