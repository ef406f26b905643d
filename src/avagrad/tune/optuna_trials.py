"""How points are stored as Optuna trials: their attributes and states."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from avagrad.tune.records import Record
from avagrad.tune.space import Point

Pruned = optuna.TrialPruned
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
LIVE = (TrialState.WAITING, TrialState.RUNNING)
# Attributes of the study and of its trials.
ABOUT, KEY, FAILED, DIVERGED, SECONDS, FACTS = "avagrad", "key", "failed", "diverged_at", "seconds", "facts"
LEASE_KEY = "avagrad:lease"
SEARCH, CODE = "avagrad:search", "avagrad:code"
# The reasons of a failed trial: first those that are not the point's fault, then those that may be.
GIVEN_BACK, DUPLICATE = "given back", "duplicate"
DIED, LOST = "its worker died", "its worker showed no sign of life"

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Snapshot:
    """A study at one moment."""

    records: tuple[Record, ...] = ()
    waiting: tuple[str, ...] = ()  # keys
    running: Mapping[int, tuple[str, Mapping[str, Any] | None]] = field(default_factory=dict)  # trial: key and lease
    failures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # key: the reason of each failure

    def without_result(self) -> dict[str, str]:
        """Return the points that have failed and are neither finished nor to be run again, with the last reason."""
        others = {record.point.key for record in self.records}.union(
            self.waiting, (x for x, _ in self.running.values())
        )
        failed = {key: faults(reasons) for key, reasons in self.failures.items() if key not in others}
        return {key: reasons[-1] for key, reasons in failed.items() if reasons}


def snapshot_of(trials: list[FrozenTrial], worst: float) -> Snapshot:
    """Return the finished, waiting, running and failed points among these trials."""
    records: dict[str, Record] = {}
    waiting, running = [], {}
    failures: dict[str, tuple[str, ...]] = {}
    for trial in trials:
        key = trial.user_attrs[KEY]
        if trial.state in FINISHED:
            # There are two if one was added by `add` while the other was running: the first one counts.
            records.setdefault(key, record_of(trial, worst))
        elif trial.state == TrialState.WAITING:
            waiting.append(key)
        elif trial.state == TrialState.RUNNING:
            running[trial._trial_id] = key, trial.system_attrs.get(LEASE_KEY)
        else:
            failures[key] = (*failures.get(key, ()), trial.user_attrs.get(FAILED, "failed"))
    return Snapshot(tuple(records.values()), tuple(waiting), running, failures)


def new_trial(point: Point, state: TrialState, value: float | None, attributes: Mapping[str, Any]) -> FrozenTrial:
    """Return a trial of a point, for a storage."""
    axes = {name: x for name, x in (("lr", point.lr), ("eps", point.eps)) if x is not None}
    # The range has no meaning, since points come from an axis. Optuna needs one, the same for all trials.
    anything = FloatDistribution(1e-300, 1e300, log=True)
    kept = {name: x for name, x in attributes.items() if x not in (None, {})}
    given = {"seed": point.seed} if state == TrialState.WAITING else {"seed": point.seed, **kept}
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=axes,
        distributions=dict.fromkeys(axes, anything),
        user_attrs={KEY: point.key, **given},
    )


def to_run(trials: list[FrozenTrial]) -> dict[str, int]:
    """Return, for each point that is not finished, the number of the one trial that runs or is to be run."""
    finished = {trial.user_attrs[KEY] for trial in trials if trial.state in FINISHED}
    firsts: dict[str, int] = {}
    for trial in trials:
        if trial.state in LIVE and trial.user_attrs[KEY] not in finished:
            firsts.setdefault(trial.user_attrs[KEY], trial.number)
    return firsts


def is_first(trial: FrozenTrial, firsts: dict[str, int]) -> bool:
    """Return whether a trial is the one to run for its point."""
    return firsts.get(trial.user_attrs[KEY]) == trial.number


def record_of(trial: FrozenTrial, worst: float) -> Record:
    """Return the record of a finished trial."""
    attributes = trial.user_attrs
    point = Point.from_key(attributes[KEY])
    value = trial.values[0] if trial.values else worst
    return Record(
        lr=point.lr,
        eps=point.eps,
        seed=point.seed,
        value=worst if math.isnan(value) else value,
        diverged_at=attributes.get(DIVERGED),
        pruned=trial.state == TrialState.PRUNED,
        seconds=attributes.get(SECONDS),
        facts=attributes.get(FACTS, {}),
    )


def faults(reasons: Iterable[str]) -> list[str]:
    """Return the reasons that are, or may be, the point's own fault."""
    return [reason for reason in reasons if not reason.startswith((GIVEN_BACK, DUPLICATE))]
