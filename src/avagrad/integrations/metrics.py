"""The numbers that the callbacks log."""

from typing import Any

from avagrad.optim.avagrad import DelayedOptimizer

__all__ = ["check_every", "metrics_of"]

_LOGGED = ("gamma", "step_rms", "step_rms_predicted", "inactive_share", "clipped_share")


def metrics_of(optimizer: Any, prefix: str = "optimizer/") -> dict[str, float]:
    """Return the numbers to log for an optimizer, which a framework may have wrapped; none for other classes.

    >>> import torch
    >>> from avagrad import AvaStep
    >>> optimizer = AvaStep([torch.nn.Parameter(torch.ones(2))])
    >>> sorted(metrics_of(optimizer))
    ['optimizer/clipped_share', 'optimizer/gamma', 'optimizer/inactive_share', 'optimizer/step_rms', ...]
    >>> metrics_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
    {}
    """
    while not isinstance(optimizer, DelayedOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, DelayedOptimizer):
        return {}
    found = optimizer.diagnostics()
    return {f"{prefix}{name}": found[name] for name in _LOGGED}


def check_every(every: int) -> int:
    """Return a number of steps, or raise an error.

    >>> check_every(0)
    Traceback (most recent call last):
    ...
    ValueError: every is 0, but must be a whole number of steps of at least 1.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every is {every!r}, but must be a whole number of steps of at least 1.")
    return every
