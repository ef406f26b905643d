"""Who evaluates points: this process, one after the other or all at once; processes on this machine; a Ray cluster.

All of them do the same: take a point from the study, run the objective, record what comes out, take the next. Nobody
hands points out, so any number of machines can join. Whoever started a worker looks after it: it is replaced when it
dies, killed when a point takes too long, and ends when the one who started it does.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from avagrad.tune.leases import LEASE, renew_after
from avagrad.tune.records import Record
from avagrad.tune.space import Point
from avagrad.tune.storage import StorageError, patiently
from avagrad.tune.study import DIED, GIVEN_BACK, Held, Seen, Study
from avagrad.tune.trial import Objective, evaluate
from avagrad.worker_process import WorkerProcess, stop_all

__all__ = ["Job", "WorkerError", "device_slots", "work_on_one"]

RunTogether = Callable[[list[Point]], list[Record]]
# How often workers may end, or each be killed, without having worked, before the study gives up on starting them.
_MAY_END_IDLE, _MAY_BE_KILLED_IDLE = 3, 10
_SAVES_FOR = 5.0  # seconds that a worker has for saving, when it is asked to stop


class WorkerError(RuntimeError):
    """Workers cannot work; the message says why.

    >>> issubclass(WorkerError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know. The objective is pickled by value where it is not in an importable module.

    >>> job = Job.of(lambda trial: trial.lr, "runs/mine.journal", "mine")
    >>> job.objective()(torch.nn.Parameter) is None
    Traceback (most recent call last):
    ...
    AttributeError: type object 'Parameter' has no attribute 'lr'
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

    def check(self, seen: Seen) -> None:  # noqa: B027  # nothing to do where this process works
        """Replace workers that have died, and kill those that have been at a point for too long."""

    def wait(self, seconds: float) -> None:
        """Let some time pass in which others work."""
        time.sleep(seconds)

    def _held_by(self, worker: str, seen: Seen) -> list[int]:
        return [trial for trial, (_, lease) in seen.held.items() if lease is not None and lease["worker"] == worker]

    def _give_back(self, workers: Sequence[str], reason: str) -> None:
        seen = self.study.look()
        for worker in workers:
            for trial in self._held_by(worker, seen):
                self.study.fail(trial, reason)

    def _give_back_at_the_end(self, workers: Sequence[str]) -> None:
        """Give back what they held, if the storage is there; else it is taken back when the leases have run out."""
        self.study.patience = 0.0
        with contextlib.suppress(StorageError):
            self._give_back(workers, f"{GIVEN_BACK}: stopped")

    def _too_long(self, worker: str, seen: Seen) -> list[int]:
        """Return the trials that a worker has held for longer than the timeout."""
        if self.timeout is None:
            return []
        now = time.monotonic()
        held = self._held_by(worker, seen)
        return [trial for trial in held if now - self.since.setdefault(trial, now) > self.timeout]

    def _fail_for_time(self, trials: Sequence[int]) -> None:
        for trial in trials:
            self.study.fail(trial, f"objective took longer than the timeout of {self.timeout:g} s, and was killed")


class InProcess(WorkerPool):
    """This process, one point after the other."""

    def __init__(self, objective: Objective, study: Study, *, lease: float, prunes: bool) -> None:
        super().__init__(study)
        self.objective, self.lease, self.prunes = objective, lease, prunes
        self.worker = _new_name()

    def start(self) -> None:
        """Do nothing: this process works while it waits."""

    def wait(self, seconds: float) -> None:
        """Work on one point, if there is one."""
        if not work_on_one(self.study, self.objective, self.worker, lease=self.lease, prunes=self.prunes):
            time.sleep(seconds)

    def stop(self) -> None:
        """Do nothing: what this process held, it has ended."""


class Batched(WorkerPool):
    """This process, with all points at once: they are handed to a function that runs them together."""

    def __init__(self, run: RunTogether, study: Study, *, lease: float) -> None:
        super().__init__(study)
        self.run, self.lease, self.worker = run, lease, _new_name()

    def start(self) -> None:
        """Do nothing: this process works while it waits."""

    def wait(self, seconds: float) -> None:
        """Work on all points that there are."""
        held: list[Held] = []
        while (one := patiently(lambda: self.study.take(self.worker))) is not None:
            held.append(one)
        if not held:
            time.sleep(seconds)
            return
        ended, began = threading.Event(), time.monotonic()

        def renew() -> None:
            every = renew_after(self.lease, 0.0)
            while not ended.wait(every):
                every = renew_after(self.lease, time.monotonic() - began)
                for one in held:
                    with contextlib.suppress(StorageError):
                        one.renew(every)

        threading.Thread(target=renew, name="leases", daemon=True).start()
        try:
            found = self._records([one.point for one in held])
        except BaseException:
            ended.set()
            for one in held:
                one.fail(f"{GIVEN_BACK}: stopped")
            raise
        ended.set()
        for one in held:
            record = found[one.point.key]
            worst, facts = self.study.worst, record.facts
            value = worst if record.diverged else record.value
            one.finish(value, diverged_at=record.diverged_at, facts=facts, seconds=record.seconds)

    def stop(self) -> None:
        """Do nothing: what this process held, it has ended."""

    def _records(self, points: list[Point]) -> dict[str, Record]:
        """Run the points, and return a record for each."""
        made = self.run(points)
        if not isinstance(made, Sequence) or not all(isinstance(record, Record) for record in made):
            raise TypeError(f"together returned {made!r}, but must return a list of records.")
        found = {record.point.key: record for record in made}
        if lacking := [point.key for point in points if point.key not in found]:
            has = f"has {len(made)} records for {len(points)} points"
            raise ValueError(
                f"together returned a list that {has}, but must have one for each: {lacking[0]} is missing."
            )
        return found


class _Process:
    """A worker process, and its name in the study."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.name = _new_name()
        folder = job.folder if os.path.isdir(job.folder) else None
        self.process = WorkerProcess(_work_here, job, self.name, environment=environment, folder=folder)

    def close(self) -> str:
        """Kill it, with all that it has started, and return why it could not work, if it has said so."""
        try:
            return str(self.process.connection.recv()) if self.process.connection.poll() else ""
        except (EOFError, OSError):
            return ""
        finally:
            self.process.close()


def _work_here(connection: Connection, job: Job, worker: str) -> None:
    """Be a worker process; send why it cannot work, if it cannot."""
    try:
        work(job, worker)
    except Exception as error:
        connection.send(str(error)[:10_000])
        sys.exit(1)


class LocalProcesses(WorkerPool):
    """Processes on this machine, one for each slot; a slot is what a worker's environment says beyond ours."""

    def __init__(
        self, job: Job, study: Study, slots: Sequence[dict[str, str]], *, timeout: float | None = None
    ) -> None:
        super().__init__(study, timeout=timeout)
        self.job = job
        self.slots = list(slots)
        self.processes: list[_Process] = []
        self.died_idle = 0
        self.so_far = (0, 0)

    def start(self) -> None:
        """Start a process for each slot."""
        if not hasattr(os, "fork"):
            raise WorkerError(
                f"workers is {len(self.slots)}, but worker processes need Linux or macOS: pass workers=0, or ray."
            )
        for slot in self.slots:
            self.processes.append(_Process(self.job, slot))

    def check(self, seen: Seen) -> None:
        """Replace processes that have died, and kill those that have been at a point for too long."""
        so_far = len(seen.records), sum(map(len, seen.failures.values()))
        if so_far != self.so_far or any(self._held_by(worker.name, seen) for worker in self.processes):
            self.so_far, self.died_idle = so_far, 0
        for i, worker in enumerate(self.processes):
            code = worker.process.process.poll()
            late = self._too_long(worker.name, seen) if code is None else []
            if code is None and not late:
                continue
            reason = worker.close()
            self._fail_for_time(late)
            if code is not None:
                self._record_death(worker, code, reason)
            self.processes[i] = _Process(self.job, self.slots[i])

    def _record_death(self, worker: _Process, code: int, reason: str) -> None:
        if reason:
            raise WorkerError(reason)
        held = self._held_by(worker.name, self.study.look())
        how = f"killed by {_signal(-code)}" if code < 0 else f"exit code {code}"
        for trial in held:
            self.study.fail(trial, f"{DIED} ({how})")
        self.died_idle = 0 if held else self.died_idle + 1
        # Whoever kills workers from outside may do so again and again, while all of them are still starting.
        if self.died_idle >= (_MAY_BE_KILLED_IDLE * len(self.slots) if code < 0 else _MAY_END_IDLE):
            raise WorkerError(f"workers end as soon as they are started ({how}); what they printed says why.")

    def stop(self) -> None:
        """Ask all of them to stop, wait a little for those that save, and give back what they held."""
        names = [worker.name for worker in self.processes]
        try:
            stop_all([worker.process for worker in self.processes], _SAVES_FOR)
        finally:
            self.processes = []
        self._give_back_at_the_end(names)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one without a name
        return f"signal {number}"


class RayTasks(WorkerPool):
    """Tasks on a Ray cluster, each of which works until it is cancelled. The storage must be in reach of every node."""

    def __init__(
        self,
        job: Job,
        study: Study,
        address: str,
        count: int | None,
        *,
        slots_per_gpu: int = 1,
        timeout: float | None = None,
    ) -> None:
        super().__init__(study, timeout=timeout)
        self.job = job
        self.address, self.count, self.slots_per_gpu = address, count, slots_per_gpu
        self.tasks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Join the cluster and place the tasks; those for which there is no room wait for it."""
        try:
            import ray
        except ImportError as error:
            raise WorkerError(
                f"ray is {self.address!r}, but Ray is not installed: pip install 'avagrad[cluster]'."
            ) from error
        self.ray, self.joined = ray, not ray.is_initialized()
        if self.joined:
            try:
                ray.init(address=self.address, log_to_driver=True, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise WorkerError(f"ray is {self.address!r}, where no cluster answers: {error}.") from error
        resources = ray.cluster_resources()
        gpus = resources.get("GPU", 0)
        count = self.count or int(gpus * self.slots_per_gpu or resources.get("CPU", 1))
        share = {"num_gpus": 1 / self.slots_per_gpu} if gpus else {}
        # A task that dies is replaced by us, once its point has been given back.
        self.task = ray.remote(_work_on_ray).options(num_cpus=1, max_retries=0, **share)
        self.tasks = [self._place() for _ in range(count)]

    def _place(self) -> tuple[str, Any]:
        name = _new_name()
        return name, self.task.remote(self.job, name)

    def check(self, seen: Seen) -> None:
        """Replace workers that have died, with their node or alone, and cancel those that take too long for a point."""
        ray = self.ray
        for i, (name, task) in enumerate(self.tasks):
            if late := self._too_long(name, seen):
                ray.cancel(task, force=True)
                self._fail_for_time(late)
                self.tasks[i] = self._place()
                continue
            ready, _ = ray.wait([task], timeout=0)
            if not ready:
                continue
            try:
                ray.get(task)
            except ray.exceptions.RayTaskError as error:  # raised by our own code: it cannot work at all
                raise WorkerError(str(error.cause or error)) from error
            except ray.exceptions.RayError as error:
                self._give_back([name], f"{DIED} ({type(error).__name__})")
            self.tasks[i] = self._place()

    def stop(self) -> None:
        """Cancel all tasks, give back what they held, and leave the cluster."""
        if not hasattr(self, "ray"):
            return
        for _, task in self.tasks:
            with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.cancel(task, force=True)
        self._give_back_at_the_end([name for name, _ in self.tasks])
        self.tasks = []
        if self.joined:
            self.ray.shutdown()


def _work_on_ray(job: Job, worker: str) -> None:
    if os.path.isdir(job.folder):  # relative paths mean what they meant where the study was started
        os.chdir(job.folder)
    work(job, worker)


def device_slots(workers: int | None, slots_per_gpu: int = 1) -> list[dict[str, str]]:
    """Return the environment of each worker on this machine: its GPU, or its share of the cores.

    ``workers`` None is one for each slot of each GPU, or one alone where there is none.

    >>> [slot["OMP_NUM_THREADS"] for slot in device_slots(2)] if not torch.cuda.is_available() else ["1", "1"]
    ['...', '...']
    """
    if slots_per_gpu < 1:
        raise ValueError(f"slots_per_gpu is {slots_per_gpu!r}, but must be at least 1.")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())]
    if visible is not None and names:
        names = [name.strip() for name in visible.split(",")][: len(names)]
    slots = [{"CUDA_VISIBLE_DEVICES": name} for name in names for _ in range(slots_per_gpu)]
    count = len(slots) or 1 if workers is None else workers
    if slots:
        return [slots[i % len(slots)] for i in range(count)]
    share = max(1, (os.cpu_count() or 1) // max(1, count))
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))} for _ in range(count)]


def _new_name() -> str:
    return uuid.uuid4().hex[:12]
