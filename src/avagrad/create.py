"""Optimizers by name, for scripts and frameworks that read one from a configuration."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from avagrad.names import look_up
from avagrad.optim import ADOPT, AdaBound, AdaShift, AvaGrad, AvaGradW, AvaStep, DelayedAdam, no_decay_groups

__all__ = ["OPTIMIZERS", "create_optimizer", "optimizers"]


class Named(NamedTuple):
    """The class behind a name, and the arguments that the name fixes."""

    make: type[Optimizer]
    fixed: dict[str, Any]


OPTIMIZERS: dict[str, Named] = {
    "sgd": Named(torch.optim.SGD, {}),
    "adam": Named(torch.optim.Adam, {}),
    "amsgrad": Named(torch.optim.Adam, {"amsgrad": True}),
    "adabound": Named(AdaBound, {}),
    "adashift": Named(AdaShift, {}),
    "adamw": Named(torch.optim.AdamW, {}),
    "avagrad": Named(AvaGrad, {}),
    "avagradw": Named(AvaGradW, {}),
    "avastep": Named(AvaStep, {}),
    "adopt": Named(ADOPT, {}),
    "delayed-adam": Named(DelayedAdam, {}),
}


def optimizers() -> list[str]:
    """Return the names for :func:`create_optimizer`: our classes, and torch's from the paper's comparison.

    >>> "avastep" in optimizers(), "adamw" in optimizers()
    (True, True)
    """
    return list(OPTIMIZERS)


def create_optimizer(
    model_or_params: nn.Module | ParamsT,
    name: str,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    **options: Any,
) -> Optimizer:
    """Make an optimizer by its name.

    Args:
        model_or_params: a model, of which biases and the parameters of normalisation layers do not decay
            (:func:`avagrad.optim.no_decay_groups`); or parameters or groups, which are used unchanged.
        name: one of :func:`optimizers`; case, ``_`` and ``-`` do not matter.
        lr: the learning rate; None for the class's default.
        weight_decay: the weight decay; None for the class's default.
        options: all other arguments of the class.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    >>> optimizer = create_optimizer(model, "avastep", lr=3e-4, weight_decay=0.1)
    >>> type(optimizer).__name__, [group["weight_decay"] for group in optimizer.param_groups]
    ('AvaStep', [0.1, 0.0])
    >>> create_optimizer(model, "avasteep")
    Traceback (most recent call last):
    ...
    ValueError: name is 'avasteep', which is not known; did you mean 'avastep'? Choose from: sgd, ...
    """
    bare = {known.replace("-", ""): value for known, value in OPTIMIZERS.items()}
    wanted = str(name).lower().replace("-", "").replace("_", "")
    make, fixed = bare[wanted] if wanted in bare else look_up("name", name, OPTIMIZERS)
    for key in options:
        if key in fixed:
            raise ValueError(f"{key} is {options[key]!r}, but is fixed at {fixed[key]!r} for {name}.")
    given = {"lr": lr, "weight_decay": weight_decay}
    arguments = {key: value for key, value in given.items() if value is not None} | options | fixed
    if not isinstance(model_or_params, nn.Module):
        return make(model_or_params, **arguments)
    default = inspect.signature(make).parameters["weight_decay"].default  # AdamW's is not 0
    if weight_decay is None and default == 0:
        return make(model_or_params.parameters(), **arguments)
    decay = default if weight_decay is None else weight_decay
    return make(no_decay_groups(model_or_params, weight_decay=decay), **arguments)
