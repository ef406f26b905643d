"""What all workers do: take a point from the study, run the objective, record what comes out, take the next."""

import contextlib
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle

from avagrad.tune.leases import LEASE
from avagrad.tune.optuna_trials import GIVEN_BACK, Snapshot
from avagrad.tune.storage import StorageError, patiently
from avagrad.tune.study import Study
from avagrad.tune.trial import Objective, evaluate

__all__ = ["Job", "WorkerError", "WorkerPool", "new_name", "work_on_one"]


class WorkerError(RuntimeError):
    """Workers cannot work; the message says why.

    >>> issubclass(WorkerError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know. The objective is pickled by value where it is not in an importable module.

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
        """Pack an objective up, or say why it cannot be sent."""
        try:
            pickled = cloudpickle.dumps(objective)
        except Exception as error:
            raise TypeError(
                f"objective is {objective!r}, which cannot be sent to a worker process ({type(error).__name__}: "
                f"{error}): make what it holds inside of it, or pass workers=0."
            ) from error
        return cls(pickled, storage, name, pruner, lease, tuple(sys.path), os.getcwd())

    def objective(self) -> Objective:
        """Unpack the objective, or say why it cannot be done here."""
        for entry in self.path:
            if entry not in sys.path:
                sys.path.append(entry)
        try:
            unpacked: Objective = cloudpickle.loads(self.pickled)
        except Exception as error:
            raise WorkerError(
                f"objective could not be unpacked in a worker ({type(error).__name__}: {error}): it must be importable "
                "there, and what it holds too."
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
    """Take a point and run it; tell whether there was one.

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
            held.let_go()
    return held is not None


def work(job: Job, worker: str) -> None:
    """Take points and run them, on and on, until the process is ended."""
    objective = job.objective()
    study = patiently(lambda: Study(job.storage, job.name, create=False, pruner=job.pruner))
    prunes, pause = job.pruner is not None, 0.02
    while True:
        if work_on_one(study, objective, worker, lease=job.lease, prunes=prunes, may_end=False):
            pause = 0.02
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)


class WorkerPool(ABC):
    """The workers of a study: starts them, replaces those that die, and ends them.

    >>> WorkerPool.__abstractmethods__ >= {"start", "stop"}
    True
    """

    def __init__(self, study: Study, *, timeout: float | None = None) -> None:
        self.study, self.timeout = study, timeout
        self.since: dict[int, float] = {}  # when a point that one of ours holds was first seen

    @abstractmethod
    def start(self) -> None:
        """Start the workers."""

    @abstractmethod
    def stop(self) -> None:
        """End all workers; what they hold is given back."""

    def check(self, snapshot: Snapshot) -> None:  # noqa: B027  # nothing to do where this process works
        """Replace workers that have died, and kill those that have been at a point for too long."""

    def wait(self, seconds: float) -> None:
        """Let some time pass in which others work."""
        time.sleep(seconds)

    def _held_by(self, worker: str, snapshot: Snapshot) -> list[int]:
        return [trial for trial, (_, lease) in snapshot.held.items() if lease is not None and lease["worker"] == worker]

    def _give_back(self, workers: Sequence[str], reason: str) -> None:
        snapshot = self.study.snapshot()
        for worker in workers:
            for trial in self._held_by(worker, snapshot):
                self.study.fail(trial, reason)

    def _give_back_at_the_end(self, workers: Sequence[str]) -> None:
        """Give back what they held, if the storage is there; else it is taken back when the leases have run out."""
        self.study.patience = 0.0
        with contextlib.suppress(StorageError):
            self._give_back(workers, f"{GIVEN_BACK}: stopped")

    def _too_long(self, worker: str, snapshot: Snapshot) -> list[int]:
        """Return the trials that a worker has held for longer than the timeout."""
        if self.timeout is None:
            return []
        now = time.monotonic()
        held = self._held_by(worker, snapshot)
        return [trial for trial in held if now - self.since.setdefault(trial, now) > self.timeout]

    def _fail_for_time(self, trials: Sequence[int]) -> None:
        for trial in trials:
            self.study.fail(trial, f"objective took longer than the timeout of {self.timeout:g} s, and was killed")


def new_name() -> str:
    """Return a name for a worker.

    >>> len(new_name())
    12
    """
    return uuid.uuid4().hex[:12]
