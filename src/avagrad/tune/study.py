"""The record of a search: an Optuna study in which every point is finished exactly once.

A point is a trial. It is queued (WAITING) under a key made of its values, held (RUNNING) by a worker that renews a
lease, and finished (COMPLETE, or PRUNED) or failed (FAIL). Any number of processes on any number of machines may queue,
take, renew, finish and reclaim points at any moment, and may be killed at any moment, because of four rules:

- Only one process can turn a waiting trial into a running one, and no process can write to an ended one. The storage
  guarantees both.
- Two processes may queue the same point at the same time. So a process that has taken a trial checks again: it runs
  only if no other trial of that key is finished, and none with a smaller number is waiting or running. Numbers are in
  the order of creation, so all processes agree on the one to run, and at most one trial of a key is ever finished.
- A trial whose lease has expired is failed by the first process that notices. If its holder comes back, it finds an
  ended trial, and its result is dropped.
- A point that is not queued, held or finished is queued again. There is no other state.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from avagrad.checks import require_json
from avagrad.tune.held import Held
from avagrad.tune.identity import with_code
from avagrad.tune.leases import Watch, holder
from avagrad.tune.optuna_trials import (
    ABOUT,
    CODE,
    DIVERGED,
    DUPLICATE,
    FACTS,
    FAILED,
    FINISHED,
    GIVEN_BACK,
    KEY,
    LOST,
    SEARCH,
    SECONDS,
    Snapshot,
    is_first,
    new_trial,
    snapshot_of,
    to_run,
)
from avagrad.tune.records import Record, worst
from avagrad.tune.space import Point
from avagrad.tune.storage import StorageError, described, is_url, open_storage, patiently, storage_errors

__all__ = ["DIRECTIONS", "PRUNERS", "Study", "pruner_named"]

T = TypeVar("T")
DIRECTIONS = ("minimize", "maximize")
PRUNERS = ("median", "halving")


def pruner_named(name: str | None) -> optuna.pruners.BasePruner:
    """Return an Optuna pruner by name.

    >>> type(pruner_named("median")).__name__
    'MedianPruner'
    >>> pruner_named("meidan")
    Traceback (most recent call last):
    ...
    ValueError: pruner is 'meidan', but must be one of median, halving, or None.
    """
    if name is None:
        return optuna.pruners.NopPruner()
    if name not in PRUNERS:
        raise ValueError(f"pruner is {name!r}, but must be one of {', '.join(PRUNERS)}, or None.")
    return optuna.pruners.MedianPruner() if name == "median" else optuna.pruners.SuccessiveHalvingPruner()


class Study:
    """An open study: queue points, take them, read the results. With None as its name, the only one of the storage.

    >>> import tempfile
    >>> place = tempfile.TemporaryDirectory()
    >>> study = Study(f"{place.name}/mine.journal", "mine", direction="minimize", about={"objective": "f"})
    >>> study.queue([Point(0.1, None, 0), Point(1.0, None, 0), Point(0.1, None, 0)])
    2
    >>> held = study.take("me")
    >>> held.finish(0.25)
    True
    >>> [(record.lr, record.value) for record in study.snapshot().records]
    [(0.1, 0.25)]
    >>> place.cleanup()
    """

    def __init__(
        self,
        storage: str | os.PathLike[str],
        name: str | None,
        *,
        direction: str | None = None,
        about: Mapping[str, Any] | None = None,
        create: bool = True,
        pruner: str | None = None,
    ) -> None:
        self.location = os.fspath(storage)
        self.patience: float | None = None  # seconds to wait for a database that does not respond; None for the default
        self.printed_errors: set[str] = set()  # of objectives, by this process
        self.storage: BaseStorage = open_storage(storage, create=create)
        try:
            self._join(name, direction, json.loads(json.dumps(dict(about or {}))), create, pruner)
        except BaseException:
            self.close()
            raise

    def _join(
        self, name: str | None, direction: str | None, about: dict[str, Any], create: bool, pruner: str | None
    ) -> None:
        with self._errors():
            known = [study.study_name for study in self.storage.get_all_studies()]
        if name is None and len(known) != 1:
            raise ValueError(f"name is not given, but {described(self.location)!r} has {len(known)} studies: {known}.")
        self.name = name = known[0] if name is None else name
        if name not in known:
            self._check_may_create(known, create)
            if direction not in DIRECTIONS:
                raise ValueError(f"direction is {direction!r}, but must be one of {', '.join(DIRECTIONS)}.")
        with self._errors():
            self.optuna = optuna.create_study(
                storage=self.storage,
                study_name=name,
                direction=None if direction is None else StudyDirection[direction.upper()],
                load_if_exists=True,
                pruner=pruner_named(pruner),
            )
            self.id = self.optuna._study_id
        self._check_about(direction, about)

    def _check_may_create(self, known: list[str], create: bool) -> None:
        """Raise an error if the study must exist already, or if the file has another one."""
        where = f"storage is {described(self.location)!r}, which has"
        if not create:
            raise StorageError(f"{where} {_these(known)}, and not {self.name!r}.")
        if known and not is_url(self.location):
            raise StorageError(
                f"{where} {_these(known)}, and not {self.name!r}: choose another storage, or the study that it has "
                f"(name={known[0]!r}, --name {known[0]})."
            )

    def _check_about(self, direction: str | None, about: dict[str, Any]) -> None:
        with self._errors():
            now = self.storage.get_study_directions(self.id)[0].name.lower()
            # In this order: the process that creates the study writes ``about`` before there are trials.
            empty = not self.storage.get_all_trials(self.id, deepcopy=False)
            stored = self.storage.get_study_user_attrs(self.id).get(ABOUT)
            if stored is None and empty:
                stored = {"format": 1, **about}
                self.storage.set_study_user_attr(self.id, ABOUT, stored)
        where = f"storage is {described(self.location)!r}, whose study {self.name!r}"
        if stored is None:
            raise StorageError(f"{where} was not made by avagrad: choose another name, or another storage.")
        if direction is not None and direction != now:
            raise StorageError(f"{where} has the direction {now!r}, but direction is {direction!r}.")
        for key, value in about.items():
            if key in stored and stored[key] != value:
                was, wanted = _difference(stored[key], value)
                raise StorageError(
                    f"{where} was made with {key} {was}, and now it is {wanted}: its points would not be comparable. "
                    "Choose another name, or another storage."
                )
        if missing := {key: value for key, value in about.items() if key not in stored}:
            with self._errors():
                self.storage.set_study_user_attr(self.id, ABOUT, stored | missing)
        self.direction, self.about = now, stored | missing

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with storage_errors(self.location):
            yield

    def close(self) -> None:
        """Close the connections to a database.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     Study(f"{place}/a.journal", "a", direction="minimize").close()
        """
        backend = getattr(self.storage, "_backend", None)
        if isinstance(backend, optuna.storages.RDBStorage):
            backend.engine.dispose()

    @property
    def worst(self) -> float:
        """The value of a diverged point.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     Study(f"{place}/a.journal", "a", direction="maximize").worst
        -inf
        """
        return worst(self.direction)

    # --- reading ---

    def trials(self) -> list[FrozenTrial]:
        """Return all trials of points, in the order of their numbers."""

        def read() -> list[FrozenTrial]:
            with self._errors():
                return self.storage.get_all_trials(self.id, deepcopy=False)

        return [trial for trial in self._patiently(read) if KEY in trial.user_attrs]

    def snapshot(self) -> Snapshot:
        """Return the finished, waiting, running and failed points now."""
        return snapshot_of(self.trials(), self.worst)

    @property
    def search(self) -> dict[str, Any]:
        """The axes, the start and the options of the latest search on this study; empty if there was none.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     study = Study(f"{place}/a.journal", "a", direction="minimize")
        ...     study.note_search({"method": "lines", "lr": [0.1, 1.0]})
        ...     study.search
        {'method': 'lines', 'lr': [0.1, 1.0]}
        """
        with self._errors():
            return dict(self.storage.get_study_user_attrs(self.id).get(SEARCH, {}))

    def note_search(self, search: Mapping[str, Any]) -> None:
        """Write down what a search is: a report draws its path from that and the records."""

        def write() -> None:
            with self._errors():
                if self.search != search:
                    self.storage.set_study_user_attr(self.id, SEARCH, dict(search))

        self._patiently(write)

    def note_code(self, digest: str) -> tuple[int, int]:
        """Write down the code of the objective; return how many results are of other code, and how many there are."""
        count, others = len(self.snapshot().records), 0

        def write() -> None:
            nonlocal others
            with self._errors():
                stored = self.storage.get_study_user_attrs(self.id).get(CODE, [])
                known = [(code, start) for code, start in stored]
                history, others = with_code(known, digest, count)
                if history != known:
                    self.storage.set_study_user_attr(self.id, CODE, history)

        self._patiently(write)
        return others, count

    # --- queueing ---

    def queue(self, points: Iterable[Point], snapshot: Snapshot | None = None) -> int:
        """Queue the points that are not queued, held or finished; return their number.

        Pass the snapshot that the points were chosen by: points that have failed since then are not queued.
        """
        snapshot = self.snapshot() if snapshot is None else snapshot
        taken = (
            {record.point.key for record in snapshot.records}
            | set(snapshot.waiting)
            | {key for key, _ in snapshot.running.values()}
        )
        count = 0
        for point in points:
            if point.key not in taken:
                taken.add(point.key)
                self._create(point, state=TrialState.WAITING)
                count += 1
        return count

    def add(self, records: Iterable[Record]) -> int:
        """Add records from elsewhere; points that are finished here are skipped. Return the number of new ones."""
        finished = {trial.user_attrs[KEY] for trial in self.trials() if trial.state in FINISHED}
        count = 0
        for record in records:
            if record.point.key in finished:
                continue
            finished.add(record.point.key)
            require_json(f"facts of {record.point.key}", dict(record.facts))
            attributes = {SECONDS: record.seconds, FACTS: dict(record.facts), DIVERGED: record.diverged_at}
            state = TrialState.PRUNED if record.pruned else TrialState.COMPLETE
            value = self.worst if record.diverged else record.value
            self._create(record.point, state=state, value=value, attributes=attributes)
            count += 1
        return count

    def _create(
        self,
        point: Point,
        *,
        state: TrialState,
        value: float | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        template = new_trial(point, state, value, attributes or {})

        def create() -> None:
            with self._errors():
                self.storage.create_new_trial(self.id, template)

        self._patiently(create)

    # --- working ---

    def take(self, worker: str) -> Held | None:
        """Take a waiting point; None if there is none."""
        trials = self.trials()
        firsts = to_run(trials)
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING and is_first(trial, firsts)]
        if not any(trial.state in FINISHED for trial in trials):
            # Nothing has worked so far. If nothing ever will, retrying the same point shows that soonest.
            failed = Counter(trial.user_attrs[KEY] for trial in trials if trial.state == TrialState.FAIL)
            waiting.sort(key=lambda trial: -failed[trial.user_attrs[KEY]])
        for trial in waiting:
            with contextlib.suppress(UpdateFinishedTrialError), self._errors():
                if not self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                    continue
                held = Held(self, trial, holder(worker))
                if held.renew() and is_first(trial, to_run(self.trials())):
                    return held
                held.fail(DUPLICATE)
        return None

    def optuna_trial(self, trial_id: int) -> optuna.trial.Trial:
        """Return a held trial as an Optuna trial."""

        def read() -> optuna.trial.Trial:
            with self._errors():
                return optuna.trial.Trial(self.optuna, trial_id)

        return self._patiently(read)

    def fail(self, trial_id: int, reason: str) -> bool:
        """End a trial without a result, whichever process holds it; return False if it has ended already."""

        def end() -> bool:
            with self._errors():
                try:
                    self.storage.set_trial_user_attr(trial_id, FAILED, reason)
                    self.storage.set_trial_state_values(trial_id, TrialState.FAIL)
                except UpdateFinishedTrialError:
                    return False
            return True

        return self._patiently(end)

    def reclaim(self, snapshot: Snapshot, watch: Watch) -> int:
        """Fail the trials whose leases have expired; return their number."""
        watch.keep_only(set(snapshot.running))
        lost = [trial for trial, (_, lease) in snapshot.running.items() if watch.has_expired(trial, lease)]
        return sum(self.fail(trial, LOST) for trial in lost)

    def withdraw(self, wanted: "set[str] | None" = None) -> None:
        """End waiting trials that will not be run: duplicates, and those that are not wanted."""
        trials = self.trials()
        firsts = to_run(trials)
        for trial in trials:
            if trial.state == TrialState.WAITING:
                if not is_first(trial, firsts):
                    self._withdraw(trial._trial_id, DUPLICATE)
                elif wanted is not None and trial.user_attrs[KEY] not in wanted:
                    self._withdraw(trial._trial_id, f"{GIVEN_BACK}: another search does not need it")

    def _withdraw(self, trial_id: int, reason: str) -> None:
        """End a waiting trial. It is taken first, so that no other process runs it."""

        def take() -> bool:
            with self._errors():
                try:
                    return self.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
                except UpdateFinishedTrialError:
                    return False

        if self._patiently(take):
            self.fail(trial_id, reason)

    def _patiently(self, act: Callable[[], T]) -> T:
        return patiently(act, patience=self.patience)


def _these(names: list[str]) -> str:
    return f"the study {names[0]!r}" if len(names) == 1 else f"the studies {names}" if names else "no study"


def _difference(was: Any, now: Any) -> tuple[str, str]:
    """Return two values, or only what differs between two dicts."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
        return repr({key: was.get(key) for key in keys}), repr({key: now.get(key) for key in keys})
    return repr(was), repr(now)
