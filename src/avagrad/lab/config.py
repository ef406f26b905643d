"""The configuration of a run: every value, and its source."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch

from avagrad.checks import is_number, is_whole, require
from avagrad.lab.methods import Sourced, method, sourced
from avagrad.lab.presets import OWN, PRESETS, default_preset
from avagrad.lab.stepping import PRECISIONS
from avagrad.lab.tasks import task_class
from avagrad.names import look_up
from avagrad.optim.arguments import plain_number

__all__ = ["SETTINGS", "Config", "configure"]


@dataclass(frozen=True)
class Config:
    """A complete run: on a CPU, with the same data and versions, the same Config gives the same numbers.

    >>> configure("digits", "sgd").lr
    0.1
    """

    task: str
    optimizer: str
    preset: str
    lr: float
    eps: float | None  # SGD has none
    weight_decay: float
    epochs: int
    milestones: tuple[int, ...]  # epochs at which lr is multiplied by factor
    factor: float
    clip: float | None  # maximum norm of all gradients together
    seed: int
    device: str
    threads: int
    precision: str = "float32"  # or tf32 (matrix products on CUDA), or bf16 (autocast)
    graph: bool = False  # on CUDA: the whole step as one graph
    compile: bool = False  # the model, by torch.compile
    deterministic: bool = False  # on CUDA: the same bits in every run; always so on a CPU
    schedule: str = "milestones"  # or cosine: down to end_factor * lr at the end of the run
    warmup: int = 0  # steps over which lr rises from 0, in either schedule
    end_factor: float = 0.0  # fraction of lr at the end of cosine
    data: str | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # paper, awd, ours, default or given

    def lr_at(self, epoch: int, step: int = 0, steps_per_epoch: int = 1) -> float:
        """Return the learning rate of a step of an epoch, both counted from 0.

        >>> config = configure("digits", "sgd", lr=1.0, epochs=4, milestones=(1, 3), factor=0.1)
        >>> [round(config.lr_at(epoch), 6) for epoch in range(4)]
        [1.0, 0.1, 0.1, 0.01]
        >>> config = configure("digits", "sgd", lr=1.0, epochs=3, schedule="cosine", warmup=2)
        >>> [round(config.lr_at(*divmod(step, 2), steps_per_epoch=2), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        done = epoch * steps_per_epoch + step
        if done < self.warmup:
            return self.lr * (done + 1) / self.warmup
        if self.schedule == "cosine":
            share = (done - self.warmup) / max(1, self.epochs * steps_per_epoch - self.warmup)
            height = (1 + math.cos(math.pi * min(1.0, share))) / 2
            return self.lr * (self.end_factor + (1 - self.end_factor) * height)
        return self.lr * self.factor ** sum(epoch >= milestone for milestone in self.milestones)

    def at(self, lr: float | None, eps: float | None, seed: int) -> "Config":
        """Return the Config of a point of a search; None leaves lr or eps unchanged.

        >>> configure("digits", "sgd").at(0.5, None, 3).lr
        0.5
        """
        point: dict[str, Any] = {name: x for name, x in (("lr", lr), ("eps", eps)) if x is not None}
        sources = {**self.sources, **dict.fromkeys(point, "given")}
        return dataclasses.replace(self, **point, seed=seed, sources=sources)

    @property
    def lr_changes_within_epochs(self) -> bool:
        """Whether the learning rate is set before each step instead of each epoch."""
        return self.warmup > 0 or self.schedule == "cosine"

    def as_json(self) -> dict[str, Any]:
        """Return the Config as it is written to config.json.

        >>> configure("digits", "sgd").as_json()["milestones"]
        [10, 20, 25]
        """
        plain = dataclasses.asdict(self)
        plain["milestones"] = list(self.milestones)
        plain["task_options"], plain["optimizer_options"], plain["sources"] = (
            dict(sorted(part.items())) for part in (self.task_options, self.optimizer_options, self.sources)
        )
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Config":
        """Return the Config that :meth:`as_json` was called on.

        >>> config = configure("chars", "avagrad")
        >>> Config.from_json(config.as_json()) == config
        True
        """
        names = [item.name for item in dataclasses.fields(cls)]
        values = {name: plain[name] for name in names if name in plain}
        values["milestones"] = tuple(values["milestones"])
        values |= {options: _with_tuples(values[options]) for options in ("task_options", "optimizer_options")}
        return cls(**values)


def _with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


_SCHEDULE = {"schedule": "milestones", "warmup": 0, "end_factor": 0.0}
# The names of values that come from a preset or from the caller.
SETTINGS = ("lr", "eps", "weight_decay", "epochs", "milestones", "factor", "clip", "threads", *_SCHEDULE)
_SET_ELSEWHERE = dict.fromkeys(("lr", "eps", "weight_decay"), "must be a separate setting")
_SET_ELSEWHERE["capturable"] = "is set by the trainer"
_SCHEDULES = ("milestones", "cosine")


def configure(
    task: str,
    optimizer: str = "avagrad",
    *,
    preset: str | None = None,
    seed: int = 0,
    data: str | PathLike[str] | None = None,
    device: str = "cpu",
    task_options: Mapping[str, Any] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    no_clipping: bool = False,
    precision: str | None = None,
    graph: bool | None = None,
    compile: bool = False,
    deterministic: bool = False,
    **given: Any,
) -> Config:
    """Return the Config of a run: given values first, then the preset's for this method and task, then defaults.

    ``given`` may have lr, eps, weight_decay, epochs, milestones, factor, clip, threads, schedule ("milestones" or
    "cosine"), warmup (steps) and end_factor; None means not given. ``no_clipping`` turns a preset's clipping off. On
    CUDA ``precision`` is by default the task's (tf32 for ``chars``, bf16 for larger models), and the step is recorded
    as a graph if the task allows it.

    >>> config = configure("chars", "adam", preset="paper", data="ptb", seed=3)
    >>> config.lr, config.eps, config.task_options["hidden"], config.sources["lr"]
    (0.002, 1e-08, 1000, 'paper')
    >>> configure("chars", "adabound", preset="paper", eps=1e-8)
    Traceback (most recent call last):
    ...
    ValueError: lr is not given, but no source has one for adabound on chars with the preset 'paper': pass it.
    """
    cls, record = task_class(task), method(optimizer)
    preset = preset or default_preset(task)
    protocol = look_up(f"{task}: preset", preset, PRESETS.get(task, OWN))
    for name in given:
        look_up("a setting of a run", name, dict.fromkeys(SETTINGS))
    chosen = {name: Sourced(plain_number(value), "given") for name, value in given.items() if value is not None}
    if no_clipping:
        chosen["clip"] = Sourced(None, "given")
    found = record.settings.get((task, preset), {})
    values = sourced("default", {"threads": torch.get_num_threads()} | _SCHEDULE) | {**protocol, **found, **chosen}

    options = sourced("default", cls.options())
    options |= {name: value for name, value in protocol.items() if name not in SETTINGS}
    cls.check_options(dict(task_options or {}))
    options |= sourced("given", task_options or {})
    for name in optimizer_options or {}:
        if (where := _SET_ELSEWHERE.get(name)) is not None:
            raise ValueError(f"{name} is given as an option of the optimizer, but {where}.")
    hyper = dict(record.defaults) | {name: value for name, value in found.items() if name not in SETTINGS}
    hyper |= {name: Sourced(plain_number(value), "given") for name, value in (optimizer_options or {}).items()}

    if not record.has_eps:
        if "eps" in chosen:
            raise ValueError(f"eps is {chosen['eps'].value}, but {record.name} has no eps.")
        values["eps"] = Sourced(None, "default")
    for name in ("eps", "lr", "epochs"):
        if name not in values:
            where = f"{record.name} on {task} with the preset {preset!r}"
            raise ValueError(f"{name} is not given, but no source has one for {where}: pass it.")
    on_cuda = device.startswith("cuda")
    config = Config(
        precision=precision or (cls.precision_on_cuda if on_cuda else "float32"),
        graph=(on_cuda and cls.fits_a_graph) if graph is None else graph,
        compile=compile,
        deterministic=deterministic,
        task=task,
        optimizer=optimizer,
        preset=preset,
        seed=seed,
        device=device,
        data=None if data is None else str(data),
        task_options=_with_tuples({name: value.value for name, value in options.items()}),
        optimizer_options=_with_tuples({name: value.value for name, value in hyper.items()}),
        sources={name: value.source for name, value in (values | options | hyper).items()},
        **{name: values[name].value for name in SETTINGS},
    )
    _check(config)
    if preset.startswith("paper") and config.data is None and cls.data_wanted:
        raise ValueError(f"data is not given, but the preset {preset!r} is the paper's, on its data. {cls.data_wanted}")
    # Build the optimizer once, so that invalid values are rejected before anything is written.
    record.build([torch.zeros(1)], optimizer_arguments(config))
    return config


def optimizer_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of the optimizer's class.

    >>> optimizer_arguments(configure("digits", "sgd"))
    {'momentum': 0.9, 'lr': 0.1, 'weight_decay': 0.0005}
    """
    arguments = dict(config.optimizer_options) | {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.eps is not None:
        arguments["eps"] = config.eps
    return arguments


def _check(config: Config) -> None:
    def check(name: str, fits: bool, allowed: str) -> None:
        require(fits, name, getattr(config, name), allowed)

    for name in ("lr", "weight_decay"):
        value = getattr(config, name)
        check(name, is_number(value) and value >= 0, "a finite number of at least 0")
    check("epochs", is_whole(config.epochs, 1), "a whole number of at least 1")
    check("threads", is_whole(config.threads, 1) and config.threads <= 4096, "a whole number from 1 to 4096")
    check("eps", config.eps is None or (is_number(config.eps) and config.eps >= 0), "a finite number of at least 0")
    check("seed", is_whole(config.seed, 0), "a whole number of at least 0")
    check("factor", is_number(config.factor) and config.factor > 0, "a finite number above 0")
    clips = config.clip is None or (is_number(config.clip) and config.clip > 0)
    check("clip", clips, "a finite number above 0, or left out")
    whole = isinstance(config.milestones, tuple) and all(is_whole(milestone, 1) for milestone in config.milestones)
    rises = whole and sorted(set(config.milestones)) == list(config.milestones)
    check("milestones", rises, "epochs in ascending order, each a whole number of at least 1")
    within = config.sources.get("milestones") != "given" or all(m < config.epochs for m in config.milestones)
    check("milestones", within, f"epochs before the end, which is at {config.epochs}")
    check("schedule", config.schedule in _SCHEDULES, f"one of {', '.join(_SCHEDULES)}")
    check("warmup", is_whole(config.warmup, 0), "a whole number of steps of at least 0")
    check("end_factor", is_number(config.end_factor) and 0 <= config.end_factor <= 1, "a number from 0 to 1")
    check("precision", config.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
    on_cuda = config.device.startswith("cuda")
    check("precision", on_cuda or config.precision == "float32", "float32 on a device other than CUDA")
    check("graph", on_cuda or not config.graph, "False on a device other than CUDA")
    check("graph", not config.graph or task_class(config.task).fits_a_graph, f"False for {config.task}")
    try:
        torch.empty(1, device=config.device).cpu()
    except Exception as error:
        raise ValueError(f"device is {config.device!r}, which torch cannot use here ({error}).") from error
