"""The table of methods: the paper's, AvaStep, and its baselines.

A record has the class, its fixed arguments, its defaults, and the best known settings on each task. Every setting has
a source: ``paper`` ("Domain-independent Dominance of Adaptive Methods") or ``ours``. A setting without a source must be
given.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from avagrad.checks import is_number, require, require_like
from avagrad.create import OPTIMIZERS
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

    >>> METHODS["avagrad"].title, METHODS["avagrad"].settings["chars", "paper"]["lr"]
    ('AvaGrad', Sourced(value=200.0, source='paper'))
    """

    name: str
    title: str
    make: type[Optimizer]
    fixed: Mapping[str, Any]
    defaults: Settings
    settings: Mapping[tuple[str, str], Settings]
    paper_errors: Mapping[str, str]

    @property
    def has_eps(self) -> bool:
        """Whether the method has an epsilon.

        >>> METHODS["adam"].has_eps
        True
        """
        return "eps" in inspect.signature(self.make).parameters

    def _check_kind(self, name: str, value: Any) -> None:
        """Reject a value of another type than the class's own default: torch would read the string "False" as true."""
        parameter = inspect.signature(self.make).parameters[name]
        if isinstance(value, Tensor) or (value is None and "None" in str(parameter.annotation)):
            return
        default = parameter.default
        if type(default) is int and "float" in str(parameter.annotation):
            default = float(default)  # torch's momentum: float = 0
        if isinstance(default, tuple):
            fits = isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(is_number, value))
            require(fits, f"{self.name}: {name}", value, f"{len(default)} finite numbers, as {list(default)}")
        require_like(f"{self.name}: {name}", value, default)

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


# The best known settings: tasks and presets, methods, values. Those of the paper's presets are the paper's. It tuned on
# CIFAR-10 with a WRN-28-4, and reused the values for its other image tasks.
_VISION, _CHARS = "cifar/paper cifar/paper-search imagenet/paper", "chars/paper chars/paper-search"
_NO_DECAY, _GPT_BETAS = {"weight_decay": 0.0}, {"betas": (0.9, 0.95)}
_BEST: list[tuple[str, str, dict[str, Any]]] = [
    (_VISION, "sgd", {"lr": 0.1}),
    (_VISION, "adam amsgrad", {"lr": 0.1, "eps": 0.1}),
    (_VISION, "adamw", {"eps": 10.0}),
    (_VISION, "avagrad", {"lr": 1.0, "eps": 10.0}),
    (_VISION, "avagradw", {"eps": 0.1}),
    (_CHARS, "sgd", {"lr": 20.0}),
    (_CHARS, "adam amsgrad", {"lr": 0.002, "eps": 1e-8}),
    (_CHARS, "avagrad", {"lr": 200.0, "eps": 1e-8}),
    (_CHARS, "avagradw", {"lr": 200.0, "eps": 1e-5}),
    ("digits/quick", "sgd", {"lr": 0.1}),
    ("digits/quick", "adam amsgrad adashift adamw avastep adopt delayed-adam", {"lr": 0.01, "eps": 0.01}),
    ("digits/quick", "adabound", {"lr": 0.001, "eps": 1e-8}),
    ("digits/quick", "avagrad avagradw", {"lr": 0.5, "eps": 0.1}),
    ("chars/quick", "sgd", {"lr": 5.0}),
    ("chars/quick", "adam amsgrad adamw", {"lr": 0.01, "eps": 1e-8}),
    ("chars/quick", "adabound", {"lr": 0.1, "eps": 1e-8}),
    ("chars/quick", "adashift", {"lr": 0.1, "eps": 1e-3}),
    ("chars/quick", "avagrad avagradw", {"lr": 50.0, "eps": 1e-3}),
    ("chars/quick", "avastep", {"lr": 0.01, "eps": 1e-3}),
    ("chars/quick", "adopt", {"lr": 0.01, "eps": 1e-6}),
    ("chars/quick", "delayed-adam", {"lr": 0.01, "eps": 1e-5}),
    ("gpt/quick", "sgd", {"lr": 0.1} | _NO_DECAY),
    ("gpt/quick", "adam amsgrad", {"lr": 5e-3, "eps": 1e-8} | _NO_DECAY | _GPT_BETAS),
    ("gpt/quick", "adabound", {"lr": 1e-3, "eps": 1e-8} | _NO_DECAY),
    ("gpt/quick", "adashift", {"lr": 0.01, "eps": 1e-3} | _NO_DECAY),
    ("gpt/quick", "adamw avastep", {"lr": 5e-3, "eps": 1e-8} | _GPT_BETAS),
    ("gpt/small", "adamw avastep", {"lr": 2e-3, "eps": 1e-8} | _GPT_BETAS),
    ("gpt/base", "adamw avastep", {"lr": 1e-3, "eps": 1e-8} | _GPT_BETAS),
    ("gpt/quick", "avagrad avagradw", {"lr": 30.0, "eps": 1e-4} | _NO_DECAY | _GPT_BETAS),
    ("gpt/quick", "adopt", {"lr": 3e-3, "eps": 1e-6, "decoupled_weight_decay": True}),
    ("gpt/small", "adopt", {"lr": 5e-4, "eps": 1e-6, "decoupled_weight_decay": True}),
    ("gpt/quick", "delayed-adam", {"lr": 5e-3, "eps": 1e-5} | _NO_DECAY | _GPT_BETAS),
]
_TABLE_1 = ("CIFAR-10", "CIFAR-100", "ImageNet", "Penn Treebank")
_ADAM: dict[str, Any] = {"betas": (0.9, 0.999)}
_ADABOUND = _ADAM | {"final_lr": 0.1, "gamma": 1e-3}


def sourced(source: str, values: Mapping[str, Any]) -> dict[str, Sourced]:
    return {name: Sourced(value, source) for name, value in values.items()}


def _method(name: str, title: str, defaults: Mapping[str, Any], *paper_errors: str, source: str = "paper") -> Method:
    make, fixed = OPTIMIZERS[name]
    settings = {
        (task, preset): sourced("paper" if preset.startswith("paper") else "ours", values)
        for places, names, values in _BEST
        for task, preset in (place.split("/") for place in places.split())
        if name in names.split()
    }
    errors = dict(zip(_TABLE_1, paper_errors, strict=bool(paper_errors)))
    return Method(name, title, make, fixed, sourced(source, defaults), settings, errors)


METHODS: dict[str, Method] = {
    record.name: record
    for record in (
        _method("sgd", "SGD", {"momentum": 0.9}, "3.86 (0.08)", "19.05 (0.24)", "24.01", "1.238"),
        _method("adam", "Adam", _ADAM, "3.64 (0.06)", "18.96 (0.21)", "23.45", "1.182"),
        _method("amsgrad", "AMSGrad", _ADAM, "3.90 (0.17)", "18.97 (0.09)", "23.46", "1.187"),
        _method("adabound", "AdaBound", _ADABOUND, "5.40 (0.24)", "22.76 (0.17)", "27.99", "2.863"),
        _method("adashift", "AdaShift", _ADAM | {"keep": 10}, "4.08 (0.11)", "18.88 (0.06)", "N/A", "1.274"),
        _method("adamw", "AdamW", _ADAM, "4.11 (0.17)", "20.13 (0.22)", "27.10", "1.230"),
        _method("avagrad", "AvaGrad", _ADAM, "3.80 (0.02)", "18.76 (0.20)", "23.58", "1.179"),
        _method("avagradw", "AvaGradW", _ADAM, "3.97 (0.02)", "19.04 (0.37)", "23.49", "1.175"),
        _method("avastep", "AvaStep", _ADAM, source="ours"),
        _method("adopt", "ADOPT", {"betas": (0.9, 0.9999)}, source="ours"),
        _method("delayed-adam", "Delayed Adam", _ADAM),
    )
}
