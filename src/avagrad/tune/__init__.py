"""Tuning of lr and eps for any objective: two lines of trials instead of a grid.

>>> from avagrad.tune import tune
"""

from typing import TYPE_CHECKING, Any

from avagrad.stopping import Stopped

# Modules that need Optuna are imported lazily: axes, records and searches work without it.
if TYPE_CHECKING:
    from avagrad.tune.result import Result
    from avagrad.tune.trial import Diverged, Trial
    from avagrad.tune.tuner import tune

__all__ = ["Diverged", "Result", "Stopped", "Trial", "tune"]

_MODULES = {"Diverged": "trial", "Trial": "trial", "Result": "result", "tune": "tuner"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(f"avagrad.tune.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
