"""The table of methods: the paper's, AvaStep, and its baselines.

A record has the class, its fixed arguments, its defaults, and the best known settings on each task. Every setting has
a source: ``paper`` ("Domain-independent Dominance of Adaptive Methods"), ``release`` (the authors' code), or
``ours``. A setting without a source is missing, and must be given.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from avagrad.create import OPTIMIZERS
from avagrad.lab.checks import is_number, is_whole
from avagrad.lab.rms_adam import RmsAdam
from avagrad.names import look_up

__all__ = ["METHODS", "Method", "Sourced", "method"]


class Sourced(NamedTuple):
    """A value and its source.

    >>> Sourced(0.1, "paper").source
    'paper'
    """

    value: Any
    source: str


Settings = Mapping[str, Sourced]


@dataclass(frozen=True)
class Method:
    """One optimizer: its class, and its settings.

    ``settings`` is keyed by task and preset; ``paper_errors`` are the numbers of the paper's Table 1, by its columns.

    >>> METHODS["avagrad"].title, METHODS["sgd"].has_eps
    ('AvaGrad', False)
    """

    name: str
    title: str
    make: type[Optimizer]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Settings = field(default_factory=dict)
    settings: Mapping[tuple[str, str], Settings] = field(default_factory=dict)
    paper_errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_eps(self) -> bool:
        """Whether the method has an epsilon.

        >>> METHODS["adam"].has_eps
        True
        """
        return "eps" in inspect.signature(self.make).parameters

    def found(self, task: str, preset: str) -> Settings:
        """Return a preset's settings for this method on a task; empty if no source has any.

        >>> METHODS["avagrad"].found("chars", "paper")["lr"]
        Sourced(value=200.0, source='paper')
        >>> METHODS["adabound"].found("chars", "paper")
        {}
        """
        return self.settings.get((task, preset), {})

    def _check_kind(self, name: str, value: Any) -> None:
        """Reject a value of another type than the class's own default: torch would read the string "False" as true."""
        if isinstance(value, Tensor):
            return
        parameter = inspect.signature(self.make).parameters[name]
        if value is None and "None" in str(parameter.annotation):
            return
        default = parameter.default
        several = default if isinstance(default, tuple) else ()
        fits_several = isinstance(value, (tuple, list)) and len(value) == len(several) and all(map(is_number, value))
        kinds = {
            bool: ("true or false", isinstance(value, bool)),
            tuple: (f"{len(several)} finite numbers, as {list(several)}", fits_several),
            float: ("a finite number", is_number(value)),
            int: ("a whole number", is_whole(value)),
        }
        is_float = type(default) is int and "float" in str(parameter.annotation)  # torch's momentum: float = 0
        kind = float if is_float else type(default)
        allowed, fits = kinds.get(kind, ("", True))
        if not fits:
            raise ValueError(f"{self.name}: {name} is {value!r}, but must be {allowed}.")

    def build(self, params: ParamsT, options: Mapping[str, Any], *, on_cuda: bool = False) -> Optimizer:
        """Make the optimizer; the error about an unknown option names the nearest known one.

        On CUDA it is fused, if the class supports that, and capturable.

        >>> from torch import zeros
        >>> METHODS["amsgrad"].build([zeros(1)], {"lr": 0.1}).defaults["amsgrad"]
        True
        """
        known = [name for name in inspect.signature(self.make).parameters if name not in ("self", "params")]
        for_cuda: dict[str, Any] = {
            "fused": True if self.make.__module__.startswith("torch.") else None,
            "capturable": True,
        }
        for name, value in options.items():
            if name in self.fixed:
                raise ValueError(f"optimizer option {name} is fixed at {self.fixed[name]!r} for {self.name}.")
            look_up(f"{self.name}: an optimizer option", name, dict.fromkeys(known))
            self._check_kind(name, value)
        extra = {name: value for name, value in for_cuda.items() if on_cuda and name in known and name not in options}
        return self.make(params, **self.fixed, **options, **extra)


def method(name: str) -> Method:
    """Return the record of a method, or raise an error that lists all.

    >>> method("avagradw").title
    'AvaGradW'
    >>> method("avagard")
    Traceback (most recent call last):
    ...
    ValueError: optimizer is 'avagard', which is not known; did you mean 'avagrad'? Choose from: sgd, ...
    """
    return look_up("optimizer", name, METHODS)


def _from(source: str, **values: Any) -> dict[str, Sourced]:
    return {name: Sourced(value, source) for name, value in values.items()}


def _found(source: str, task: str, *presets: str, **values: Any) -> dict[tuple[str, str], Settings]:
    return {(task, preset): _from(source, **values) for preset in presets}


def _vision(**values: Any) -> dict[tuple[str, str], Settings]:
    """Settings tuned on CIFAR-10 with a WRN-28-4, which the paper reuses for its other image tasks."""
    return {
        **_found("paper", "cifar", "paper", "paper-search", **values),
        **_found("paper", "imagenet", "paper", **values),
    }


def _chars(**values: Any) -> dict[tuple[str, str], Settings]:
    return _found("paper", "chars", "paper", "paper-search", **values)


def _quick(task: str, **values: Any) -> dict[tuple[str, str], Settings]:
    return _found("ours", task, "quick", **values)


def _gpt(quick: float, small: float, base: float, **values: Any) -> dict[tuple[str, str], Settings]:
    """Settings of transformers: a learning rate for each size, and shared values."""
    sizes = {"quick": quick, "small": small, "base": base}
    return {key: x for preset, lr in sizes.items() for key, x in _found("ours", "gpt", preset, lr=lr, **values).items()}


def _table_1(cifar10: str, cifar100: str, imagenet: str, chars: str) -> dict[str, str]:
    return {"CIFAR-10": cifar10, "CIFAR-100": cifar100, "ImageNet": imagenet, "Penn Treebank": chars}


_ADAM = _from("paper", betas=(0.9, 0.999))
_LIKE_ADAMW = _gpt(quick=5e-3, small=2e-3, base=1e-3, eps=1e-8, betas=(0.9, 0.95))

METHODS: dict[str, Method] = {
    record.name: record
    for record in (
        Method(
            "sgd",
            "SGD",
            *OPTIMIZERS["sgd"],
            defaults=_from("paper", momentum=0.9),
            settings={
                **_vision(lr=0.1),
                **_chars(lr=20.0),
                **_quick("digits", lr=0.1),
                **_quick("chars", lr=5.0),
                **_quick("gpt", lr=0.1, weight_decay=0.0),
            },
            paper_errors=_table_1("3.86 (0.08)", "19.05 (0.24)", "24.01", "1.238"),
        ),
        Method(
            "adam",
            "Adam",
            *OPTIMIZERS["adam"],
            defaults=_ADAM,
            settings={
                **_vision(lr=0.1, eps=0.1),
                **_chars(lr=0.002, eps=1e-8),
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-8),
                **_quick("gpt", lr=5e-3, eps=1e-8, weight_decay=0.0, betas=(0.9, 0.95)),
            },
            paper_errors=_table_1("3.64 (0.06)", "18.96 (0.21)", "23.45", "1.182"),
        ),
        Method(
            "amsgrad",
            "AMSGrad",
            *OPTIMIZERS["amsgrad"],
            defaults=_ADAM,
            settings={
                **_vision(lr=0.1, eps=0.1),
                **_chars(lr=0.002, eps=1e-8),
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-8),
                **_quick("gpt", lr=5e-3, eps=1e-8, weight_decay=0.0, betas=(0.9, 0.95)),
            },
            paper_errors=_table_1("3.90 (0.17)", "18.97 (0.09)", "23.46", "1.187"),
        ),
        Method(
            "adabound",
            "AdaBound",
            *OPTIMIZERS["adabound"],
            defaults=_ADAM | _from("paper", final_lr=0.1, gamma=1e-3),
            settings={
                **_quick("digits", lr=0.001, eps=1e-8),
                **_quick("chars", lr=0.1, eps=1e-8),
                **_quick("gpt", lr=1e-3, eps=1e-8, weight_decay=0.0),
            },
            paper_errors=_table_1("5.40 (0.24)", "22.76 (0.17)", "27.99", "2.863"),
        ),
        Method(
            "adashift",
            "AdaShift",
            *OPTIMIZERS["adashift"],
            defaults=_ADAM | _from("paper", keep=10),
            settings={
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.1, eps=1e-3),
                **_quick("gpt", lr=0.01, eps=1e-3, weight_decay=0.0),
            },
            paper_errors=_table_1("4.08 (0.11)", "18.88 (0.06)", "N/A", "1.274"),
        ),
        Method(
            "adamw",
            "AdamW",
            *OPTIMIZERS["adamw"],
            defaults=_ADAM,
            settings={
                **_vision(eps=10.0),
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-8),
                **_LIKE_ADAMW,
            },
            paper_errors=_table_1("4.11 (0.17)", "20.13 (0.22)", "27.10", "1.230"),
        ),
        Method(
            "avagrad",
            "AvaGrad",
            *OPTIMIZERS["avagrad"],
            defaults=_ADAM,
            settings={
                **_vision(lr=1.0, eps=10.0),
                **_chars(lr=200.0, eps=1e-8),
                **_quick("digits", lr=0.5, eps=0.1),
                **_quick("chars", lr=50.0, eps=1e-3),
                **_quick("gpt", lr=30.0, eps=1e-4, weight_decay=0.0, betas=(0.9, 0.95)),
            },
            paper_errors=_table_1("3.80 (0.02)", "18.76 (0.20)", "23.58", "1.179"),
        ),
        Method(
            "avagradw",
            "AvaGradW",
            *OPTIMIZERS["avagradw"],
            defaults=_ADAM,
            settings={
                **_vision(eps=0.1),
                **_chars(lr=200.0, eps=1e-5),
                **_quick("digits", lr=0.5, eps=0.1),
                **_quick("chars", lr=50.0, eps=1e-3),
                **_quick("gpt", lr=30.0, eps=1e-4, weight_decay=0.0, betas=(0.9, 0.95)),
            },
            paper_errors=_table_1("3.97 (0.02)", "19.04 (0.37)", "23.49", "1.175"),
        ),
        Method(
            "avastep",
            "AvaStep",
            *OPTIMIZERS["avastep"],
            defaults=_from("ours", betas=(0.9, 0.999)),
            settings={
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-3),
                **_LIKE_ADAMW,
            },
        ),
        Method(
            "adopt",
            "ADOPT",
            *OPTIMIZERS["adopt"],
            defaults=_from("ours", betas=(0.9, 0.9999)),
            settings={
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-6),
                **_quick("gpt", lr=3e-3, eps=1e-6, decoupled_weight_decay=True),
                **_found("ours", "gpt", "small", lr=5e-4, eps=1e-6, decoupled_weight_decay=True),
            },
        ),
        Method(
            "rms-adam",
            "Adam by its RMS",
            RmsAdam,
            defaults=_ADAM,
            settings={
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-8),
                **_quick("gpt", lr=1e-3, eps=1e-8, weight_decay=0.0, betas=(0.9, 0.95)),
            },
        ),
        Method(
            "delayed-adam",
            "Delayed Adam",
            *OPTIMIZERS["delayed-adam"],
            defaults=_ADAM,
            settings={
                **_quick("digits", lr=0.01, eps=0.01),
                **_quick("chars", lr=0.01, eps=1e-5),
                **_quick("gpt", lr=5e-3, eps=1e-5, weight_decay=0.0, betas=(0.9, 0.95)),
            },
        ),
    )
}
