"""Find lr and eps: two lines of trials instead of a grid, on any objective.

>>> from avagrad.tune import tune
"""

from typing import TYPE_CHECKING, Any

from avagrad.stopping import Stopped

# What needs Optuna is imported when it is asked for: axes, records and searches do without.
if TYPE_CHECKING:
    from avagrad.tune.result import Result
    from avagrad.tune.trial import Diverged, Trial
    from avagrad.tune.tuner import tune

__all__ = ["Diverged", "Result", "Stopped", "Trial", "tune"]

_HOMES = {"Diverged": "trial", "Trial": "trial", "Result": "result", "tune": "tuner"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"avagrad.tune.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
