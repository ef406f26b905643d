"""The tables of options of runs and searches, from which all command lines are made."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avagrad.lab.config import SETTINGS, Config, configure


@dataclass(frozen=True)
class Option:
    """An option of a command: a bool is a flag, with --no-NAME if it is on by default; a list may be repeated."""

    name: str
    kind: type
    help: str
    short: str | None = None
    default: Any = None  # None is False for a bool, and an empty list for a list

    @property
    def flags(self) -> tuple[str, ...]:
        """The option's names on the command line."""
        long = f"--{self.name.lower().replace('_', '-')}"
        return (long,) if self.short is None else (long, self.short)


_TABLE = [
    Option("optimizer", str, "name of the method; default: avagrad"),
    Option("lr", float, "learning rate"),
    Option("eps", float, "epsilon"),
    Option("weight_decay", float, "weight decay"),
    Option("preset", str, "name of a preset: settings with their sources"),
    Option("data", str, "path of the task's data"),
    Option("seed", int, "random seed; default: 0"),
    Option("out", str, "folder of the run"),
    Option("resume", bool, "resume the run in --out"),
    Option("epochs", int, "number of epochs"),
    Option("milestones", str, "epochs at which the learning rate drops, such as 60,120,160; 'none' for a constant one"),
    Option("factor", float, "factor of the learning rate at each milestone"),
    Option("schedule", str, "learning rate schedule: milestones or cosine"),
    Option("warmup", int, "steps over which the learning rate rises from 0"),
    Option("end_factor", float, "fraction of the learning rate at the end of cosine; default: 0"),
    Option("clip", float, "maximum norm of all gradients together; 0 for no clipping"),
    Option("option", list, "an option of the task: NAME=VALUE", "-o"),
    Option("optimizer_option", list, "an option of the method: NAME=VALUE"),
    Option("device", str, "cpu, cuda, ...; default: cpu"),
    Option("threads", int, "number of torch's threads"),
    Option("precision", str, "float32, tf32 or bf16; default on a GPU: the task's own"),
    Option("no_graph", bool, "on a GPU, do not record the step as a graph"),
    Option("compile", bool, "compile the model (torch.compile)"),
    Option("deterministic", bool, "on a GPU, compute the same bits in every run"),
    Option("save_every", float, "seconds between checkpoints; default: 30"),
    Option("download", bool, "allow the task to download its data"),
    Option("dry_run", bool, "print what would be run, and run nothing"),
]
OPTIONS = {option.name: option for option in _TABLE}

# The names are those of the arguments of avagrad.tune.tune.
_SEARCH_TABLE = [
    Option("method", str, "one of lines, separable, grid", default="lines"),
    Option("storage", str, "a file or a database URL; default: a file in runs/"),
    Option("workers", int, "number of worker processes; 0 for this process", default=0),
    Option("seeds", int, "number of seeds per cell", default=1),
    Option("start_lr", float, "the value from which coarse ones are counted"),
    Option(
        "start_eps", float, "the eps of the first line over lr; default: 1e-8 for adam, adamw and avastep, else 0.1"
    ),
    Option("timeout", float, "seconds after which a trial is killed; needs --workers"),
    Option("retries", int, "number of retries of a failed point", default=2),
    Option("margin", float, "by how much a neighbour must be better for the search to move there", default=0.0),
    Option("extend", bool, "extend an axis if the best point is at its end", default=True),
    Option("pruner", str, "one of median, halving"),
    Option("slots_per_gpu", int, "number of workers per GPU", default=1),
    Option("ray", str, "address of a Ray cluster to run workers on"),
    Option("name", str, "name of the study; a database may have many studies"),
]
SEARCH_OPTIONS = {option.name: option for option in _SEARCH_TABLE}


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options to a parser."""
    for option in options:
        if option.kind is bool:
            action = argparse.BooleanOptionalAction if option.default else "store_true"
            parser.add_argument(*option.flags, action=action, default=bool(option.default), help=option.help)
        elif option.kind is list:
            parser.add_argument(*option.flags, action="append", default=[], metavar="NAME=VALUE", help=option.help)
        else:
            parser.add_argument(*option.flags, type=option.kind, default=option.default, help=option.help)


_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


def parse_settings(pairs: Sequence[str], what: str) -> dict[str, Any]:
    """Parse ``name=value`` pairs; a value is JSON (or Python's True, False, None) if it can be, else a string.

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
            read = json.loads(_PYTHON_LITERALS.get(value, value))
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
        raise ValueError(f"milestones is {text!r}, but must be comma-separated epochs, or 'none'.") from None


def config_from(task: str, given: Mapping[str, Any]) -> Config:
    """Return the Config of command-line options; ``given`` has names of OPTIONS, None for one that is not given."""
    others = ("optimizer", "preset", "seed", "data", "device", "precision", "compile", "deterministic")
    settings = {name: given[name] for name in (*SETTINGS, *others) if given.get(name) is not None}
    if "milestones" in settings:
        settings["milestones"] = _milestones(settings["milestones"])
    if no_clipping := settings.get("clip") == 0:
        del settings["clip"]
    return configure(
        task,
        task_options=parse_settings(given.get("option") or (), "option"),
        optimizer_options=parse_settings(given.get("optimizer_option") or (), "optimizer-option"),
        no_clipping=no_clipping,
        graph=False if given.get("no_graph") else None,
        **settings,
    )


def describe(config: Config) -> str:
    """Return each setting of a run with its source."""
    settings = config.as_json()
    nested = {**settings.pop("task_options"), **settings.pop("optimizer_options")}
    lines = [f"{config.task}, {config.optimizer}, preset {config.preset}, seed {config.seed}, on {config.device}"]
    for name, value in (settings | nested).items():
        if name not in ("task", "optimizer", "preset", "seed", "device", "sources"):
            source = config.sources.get(name)
            lines.append(f"{name}: {value}" + (f" ({source})" if source else ""))
    return "\n".join(lines)
