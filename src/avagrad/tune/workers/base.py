"""The loop of all workers: take a point from the study, run the objective, record the outcome."""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle

from avagrad.tune.leases import LEASE
from avagrad.tune.optuna_trials import GIVEN_BACK, Snapshot
from avagrad.tune.storage import StorageError, patiently
from avagrad.tune.study import Study
from avagrad.tune.trial import Objective, evaluate


class WorkerError(RuntimeError):
    """Workers cannot run; the message says why."""


@dataclass(frozen=True)
class Job:
    """The input of a worker. The objective is pickled by value if it is not in an importable module.

    >>> job = Job.of(lambda trial: trial.lr, "runs/mine.journal", "mine")
    >>> job.objective()(None)
    Traceback (most recent call last):
    ...
    AttributeError: 'NoneType' object has no attribute 'lr'
    """

    pickled: bytes
    storage: str
    name: str
    pruner: str | None = None
    lease: float = LEASE
    path: tuple[str, ...] = ()
    folder: str = ""

    @classmethod
    def of(
        cls, objective: Objective, storage: str, name: str, *, pruner: str | None = None, lease: float = LEASE
    ) -> "Job":
        """Pickle an objective, or raise an error that says why it cannot be sent."""
        try:
            pickled = cloudpickle.dumps(objective)
        except Exception as error:
            raise TypeError(
                f"objective is {objective!r}, which cannot be sent to a worker process ({type(error).__name__}: "
                f"{error}): create the objects that it holds inside the function, or pass workers=0."
            ) from error
        return cls(pickled, storage, name, pruner, lease, tuple(sys.path), os.getcwd())

    def objective(self) -> Objective:
        """Unpickle the objective, or raise an error that says why it cannot be loaded."""
        for entry in self.path:
            if entry not in sys.path:
                sys.path.append(entry)
        try:
            unpacked: Objective = cloudpickle.loads(self.pickled)
        except Exception as error:
            raise WorkerError(
                f"objective could not be loaded in a worker ({type(error).__name__}: {error}): it must be importable "
                "there, and so must the objects that it holds."
            ) from error
        return unpacked


def work_on_one(
    study: Study,
    objective: Objective,
    worker: str,
    *,
    lease: float = LEASE,
    prunes: bool = False,
    may_end: bool = True,
) -> bool:
    """Take a point and evaluate it; return whether there was one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     work_on_one(Study(f"{place}/a.journal", "a", direction="minimize"), lambda trial: trial.lr, "me")
    False
    """
    held = patiently(lambda: study.take(worker))
    if held is not None:
        held.keep(lease)
        try:
            evaluate(objective, held, prunes=prunes, may_end=may_end)
        finally:
            held.stop_renewing()
    return held is not None


def work(job: Job, worker: str) -> None:
    """Take points and evaluate them until the process ends."""
    objective = job.objective()
    study = patiently(lambda: Study(job.storage, job.name, create=False, pruner=job.pruner))
    prunes, pause = job.pruner is not None, 0.02
    while True:
        if work_on_one(study, objective, worker, lease=job.lease, prunes=prunes, may_end=False):
            pause = 0.02
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)


class WorkerPool:
    """The workers of a study: it starts them, replaces those that die, and stops them.

    A pool that works in this process, while it waits, has nothing to start, check or stop.
    """

    def __init__(self, study: Study, *, timeout: float | None = None) -> None:
        self.study, self.timeout = study, timeout
        self.since: dict[int, float] = {}  # when a point held by one of our workers was first seen

    def start(self) -> None:
        """Start the workers."""

    def stop(self) -> None:
        """Stop all workers and release their points."""

    def check(self, snapshot: Snapshot) -> None:
        """Replace workers that have died, and kill those that take too long for a point."""

    def wait(self, seconds: float) -> None:
        """Wait while the workers work."""
        time.sleep(seconds)

    def _held_by(self, worker: str, snapshot: Snapshot) -> list[int]:
        running = snapshot.running.items()
        return [trial for trial, (_, lease) in running if lease is not None and lease["worker"] == worker]

    def _release(self, workers: Sequence[str], reason: str) -> None:
        snapshot = self.study.snapshot()
        for worker in workers:
            for trial in self._held_by(worker, snapshot):
                self.study.fail(trial, reason)

    def _release_all(self, workers: Sequence[str]) -> None:
        """Release the points of these workers; without a storage they are reclaimed when their leases expire."""
        self.study.patience = 0.0
        with contextlib.suppress(StorageError):
            self._release(workers, f"{GIVEN_BACK}: stopped")

    def _too_long(self, worker: str, snapshot: Snapshot) -> list[int]:
        """Return the trials that a worker has held for longer than the timeout."""
        if self.timeout is None:
            return []
        now = time.monotonic()
        held = self._held_by(worker, snapshot)
        return [trial for trial in held if now - self.since.setdefault(trial, now) > self.timeout]

    def _fail_late(self, trials: Sequence[int]) -> None:
        for trial in trials:
            self.study.fail(trial, f"objective took longer than the timeout of {self.timeout:g} s, and was killed")


def new_name() -> str:
    """Return a name for a worker."""
    return uuid.uuid4().hex[:12]
