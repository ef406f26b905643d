"""A point that a process is evaluating: it is held by a lease, and finished or failed."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from avagrad.tune.leases import LEASE, renew_after
from avagrad.tune.optuna_trials import DIVERGED, FACTS, KEY, LEASE_KEY, SECONDS
from avagrad.tune.space import Point
from avagrad.tune.storage import StorageError, patiently, storage_errors

if TYPE_CHECKING:
    from avagrad.tune.study import Study


class Held:
    """A point that this process holds: renew its lease, then finish or fail it.

    >>> import tempfile
    >>> from avagrad.tune.study import Study
    >>> with tempfile.TemporaryDirectory() as place:
    ...     study = Study(f"{place}/a.journal", "a", direction="minimize")
    ...     _ = study.queue([Point(0.1, None, 0)])
    ...     held = study.take("me")
    ...     study.fail(held.trial_id, "its worker showed no sign of life")
    ...     held.finish(0.25)  # too late: the result is dropped
    True
    False
    """

    def __init__(self, study: "Study", trial: FrozenTrial, signature: dict[str, Any]) -> None:
        self.study, self.number, self.trial_id = study, trial.number, trial._trial_id
        self.point = Point.from_key(trial.user_attrs[KEY])
        self.signature, self.beats = signature, 0
        self.began = time.monotonic()
        self.is_lost = False  # reclaimed by another process: the result will be dropped
        self._ended = threading.Event()

    def renew(self, every: float = 0.0) -> bool:
        """Renew the lease, and record when it is renewed next; return False if the point was reclaimed."""
        self.beats += 1
        lease = {**self.signature, "beat": self.beats, "every": every}
        return self._write(lambda: self.study.storage.set_trial_system_attr(self.trial_id, LEASE_KEY, lease))

    def keep(self, lease: float = LEASE) -> None:
        """Keep renewing in a thread until the point has ended."""
        keep_all([self], lease, self._ended)

    def stop_renewing(self) -> None:
        """Stop renewing the lease. If the point has not ended, it will be reclaimed."""
        self._ended.set()

    def report(self, step: int, value: float) -> None:
        """Record an intermediate value."""
        self._write(lambda: self.study.storage.set_trial_intermediate_value(self.trial_id, step, value))

    def should_prune(self) -> bool:
        """Return whether the study's pruner ends the trial."""
        pruned = False

        def ask() -> None:
            nonlocal pruned
            pruned = self.study.optuna_trial(self.trial_id).should_prune()

        self._write(ask)  # a pruner also writes
        return pruned

    def finish(
        self,
        value: float,
        *,
        diverged_at: int | None = None,
        facts: Mapping[str, Any] | None = None,
        pruned: bool = False,
        seconds: float | None = None,
    ) -> bool:
        """End with a result; return False if the point was reclaimed meanwhile, and the result is dropped.

        ``seconds`` is the duration; by default the time since the point was taken.
        """
        storage, seconds = self.study.storage, time.monotonic() - self.began if seconds is None else seconds
        attributes = {SECONDS: round(seconds, 3), DIVERGED: diverged_at, FACTS: dict(facts or {})}
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        try:
            for name, content in attributes.items():
                if content not in (None, {}):
                    self._write(partial(storage.set_trial_user_attr, self.trial_id, name, content))
            return self._write(lambda: storage.set_trial_state_values(self.trial_id, state, [value]))
        except StorageError as error:
            raise StorageError(f"{error} The result of {self.point.key} could not be saved: {value:g}.") from error
        finally:
            self._ended.set()

    def fail(self, reason: str) -> bool:
        """End without a result; return False if the point was reclaimed before."""
        self._ended.set()
        return self.study.fail(self.trial_id, reason)

    def _write(self, write: Callable[[], object]) -> bool:
        """Write, waiting for a database that does not respond; return False if another process has ended the trial."""

        def act() -> bool:
            with storage_errors(self.study.location):
                try:
                    write()
                except UpdateFinishedTrialError:
                    self.is_lost = True
                    return False
            return True

        return not self.is_lost and patiently(act, patience=self.study.patience)


def keep_all(points: Sequence[Held], lease: float, ended: threading.Event) -> None:
    """Keep renewing the leases of points in a thread, until ``ended`` is set or all of them were reclaimed."""

    def beat() -> None:
        began, every = time.monotonic(), renew_after(lease, 0.0)
        while not ended.wait(every):
            every = renew_after(lease, time.monotonic() - began)
            for held in points:
                # A storage that does not respond now may do so next time; if not, the point is reclaimed.
                with contextlib.suppress(StorageError):
                    held.renew(every)
            if all(held.is_lost for held in points):
                return

    threading.Thread(target=beat, name="leases", daemon=True).start()
