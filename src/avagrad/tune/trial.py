"""The argument of an objective, and the evaluation of one."""

import math
import operator
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError

from avagrad.checks import require_json
from avagrad.names import place_of
from avagrad.stopping import Stopped
from avagrad.tune.held import Held
from avagrad.tune.optuna_trials import DIED, GIVEN_BACK, Pruned
from avagrad.tune.records import check_facts
from avagrad.tune.storage import StorageError

__all__ = ["Diverged", "Objective", "Trial", "evaluate"]

# Seconds between two writes of intermediate values, if no pruner reads them.
_REPORT_EVERY = 0.2
_LAST_STEP = 2**31 - 1  # databases have no larger integers
# The exit codes of a process that was asked to stop.
_STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


class Diverged(Exception):  # noqa: N818  # it is a result, not an error
    """The training has diverged: a valid result, the worst one. An objective may raise it.

    >>> str(Diverged(120))
    'diverged at step 120'
    """

    def __init__(self, step: int | None = None) -> None:
        self.step = None if step is None else _step(step)
        super().__init__("diverged" if step is None else f"diverged at step {step}")

    def __reduce__(self) -> tuple[type["Diverged"], tuple[int | None]]:
        return type(self), (self.step,)


class _Reclaimed(BaseException):
    """Another process has reclaimed the point, since this one seemed dead: continuing is useless."""


class Trial:
    """A point to evaluate: ``lr``, ``eps`` (None for an absent axis) and ``seed``.

    >>> def objective(trial):
    ...     for step in range(3):
    ...         trial.report(step, (trial.lr - 1) ** 2)
    ...     trial.note(parameters=10)
    ...     return (trial.lr - 1) ** 2
    """

    def __init__(self, held: Held, *, prunes: bool = False) -> None:
        self._held, self._prunes = held, prunes
        self.lr, self.eps, self.seed = held.point
        self.key, self.number = held.point.key, held.number
        self.facts: dict[str, Any] = {}
        self._optuna: Any = None
        self._last: tuple[int, float] | None = None
        self._written: tuple[int, float] | None = None
        self._wrote_at = -math.inf

    def __repr__(self) -> str:
        return f"Trial({self.key})"

    @property
    def optuna(self) -> Any:
        """The Optuna trial, for suggestions of other parameters than these two."""
        if self._optuna is None:
            self._optuna = self._held.study.optuna_trial(self._held.trial_id)
        return self._optuna

    def report(self, step: int, value: float) -> None:
        """Record an intermediate value after so many steps or epochs: for pruning, and for the dashboard.

        A value that is not finite ends the trial as diverged. A pruner may also end the trial here.
        """
        if self._held.is_lost:
            raise _Reclaimed
        step = _step(step)
        number = _number(value, f"the value reported at step {step} is")
        if not math.isfinite(number):
            raise Diverged(step)
        self._last = step, number
        now = time.monotonic()
        if self._prunes or now - self._wrote_at >= _REPORT_EVERY:
            self._wrote_at = now
            self._flush()
        if self._prunes and self._held.should_prune():
            raise Pruned

    def note(self, **facts: Any) -> None:
        """Store further facts with the result, such as a test error: any valid JSON."""
        facts = self.facts | facts
        check_facts(facts)
        require_json("facts", facts, shown=_short)
        self.facts = facts

    def _flush(self) -> None:
        if self._last is not None and self._last != self._written:
            self._held.report(*self._last)
            self._written = self._last


Objective = Callable[[Trial], Any]


def evaluate(objective: Objective, held: Held, *, prunes: bool = False, may_end: bool = True) -> bool:
    """Run an objective at a held point, and record the outcome; return whether it is a result.

    Ctrl-C here, or the exit code of a signal, releases the point and ends the process; without ``may_end`` Ctrl-C is a
    failure. Any other ``sys.exit()`` of the objective is an error like others.

    >>> import tempfile
    >>> from avagrad.tune.space import Point
    >>> from avagrad.tune.study import Study
    >>> with tempfile.TemporaryDirectory() as place:
    ...     study = Study(f"{place}/a.journal", "a", direction="minimize")
    ...     _ = study.queue([Point(0.1, None, 0)])
    ...     evaluate(lambda trial: float("nan"), study.take("me"))
    ...     study.snapshot().records[0].value
    True
    inf
    """
    trial = Trial(held, prunes=prunes)
    worst, pid = held.study.worst, os.getpid()
    try:
        returned = objective(trial)
        trial._flush()
    except Diverged as diverged:
        trial._flush()
        return held.finish(worst, diverged_at=diverged.step, facts=trial.facts)
    except Pruned:
        trial._flush()
        if trial._last is None:
            return not held.fail("objective was pruned before it had reported a value")
        return held.finish(trial._last[1], facts=trial.facts, pruned=True)
    except (_Reclaimed, UpdateFinishedTrialError):
        return False
    except StorageError:
        raise
    except StorageInternalError:  # from Optuna's own trial, which does not wait for a storage that does not respond
        traceback.print_exc(file=sys.stderr)
        held.fail(f"{GIVEN_BACK}: the storage did not respond")
        return False
    except BaseException as error:
        if os.getpid() != pid:  # a process forked by the objective ends: it does not hold the point
            raise
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            error = error.__context__  # Lightning, for one, makes an exit of Ctrl-C
        asked = isinstance(error, Stopped) or (isinstance(error, SystemExit) and error.code in _STOP_CODES)
        if isinstance(error, (Exception, SystemExit)) and not asked:
            return _fail(held, _described(error), traceback.format_exc())
        held.fail(f"{GIVEN_BACK}: stopped" if may_end or asked else f"{DIED}: {_described(error)}")
        raise error
    try:
        value = _number(returned, "objective returned")
    except TypeError as error:
        return _fail(held, str(error).rstrip("."), f"{error}\n")
    if math.isfinite(value):
        return held.finish(value, facts=trial.facts)
    return held.finish(worst, diverged_at=trial._last[0] if trial._last else None, facts=trial.facts)


def _fail(held: Held, reason: str, printed: str) -> bool:
    """End a point without a result, and print the error; return False."""
    if reason not in held.study.printed_errors:  # a retry would only repeat it
        held.study.printed_errors.add(reason)
        sys.stderr.write(printed)
    held.fail(reason)
    return False


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= _LAST_STEP:
        raise ValueError(f"step is {_short(step)}, but must be a whole number from 0 to {_LAST_STEP}.")
    return number


def _number(value: Any, what: str) -> float:
    """Read a number: Python's, numpy's, or a tensor of one element."""
    why = ""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value.detach() if hasattr(value, "detach") else value)
    except TypeError:
        pass
    except Exception as error:  # such as one of a GPU, which the objective has caused before
        why = f" ({_one_line(error)})"
    raise TypeError(f"{what} {_short(value)}, but must be a number{why}.")


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = ""
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if message else ''}{message[:500]}"


def _described(error: BaseException) -> str:
    """Return an error as one line, with the file and line where it was raised."""
    return f"objective raised {_one_line(error)} ({place_of(error)})"
