"""Who evaluates points: this process, processes on this machine, or a Ray cluster.

All of them do the same: take a point from the study, run the objective, record what comes out, take the next. Nobody
hands points out, so any number of machines can join. Whoever started a worker looks after it: it is replaced when it
dies, killed when a point takes too long, and ends when the one who started it does.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import cloudpickle
import torch

from avagrad.tune.leases import LEASE
from avagrad.tune.storage import patiently
from avagrad.tune.study import GIVEN_BACK, Seen, Study
from avagrad.tune.trial import Objective, evaluate

__all__ = ["Job", "WorkerError", "device_slots", "work_on_one"]

DIED = "its worker died"
_CANNOT = 3  # the exit code of a worker that cannot work at all, and has said why
_MAY_DIE_IDLE = 3  # times in a row, before the study gives up on starting workers
_SAVES_FOR = 5.0  # seconds that a worker has for saving, when it is told to stop


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


def work_on_one(study: Study, objective: Objective, worker: str, *, lease: float = LEASE, prunes: bool = False) -> bool:
    """Take a point and run it; tell whether there was one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     work_on_one(Study(f"{place}/a.journal", "a", direction="minimize"), lambda trial: trial.lr, "me")
    False
    """
    held = patiently(lambda: study.take(worker))
    if held is not None:
        held.keep(lease)
        evaluate(objective, held, prunes=prunes)
    return held is not None


def work(job: Job, worker: str) -> None:
    """Take points and run them, on and on, until the process is ended."""
    objective = job.objective()
    study = Study(job.storage, job.name, create=False, pruner=job.pruner)
    pause = 0.02
    while True:
        if work_on_one(study, objective, worker, lease=job.lease, prunes=job.pruner is not None):
            pause = 0.02
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)


class Crew(ABC):
    """Those who work on a study, and who looks after them.

    >>> Crew.__abstractmethods__ >= {"start", "stop"}
    True
    """

    def __init__(self, study: Study, *, timeout: float | None = None) -> None:
        self.study, self.timeout = study, timeout
        self.since: dict[int, float] = {}  # when a point that one of ours holds was first seen

    @abstractmethod
    def start(self) -> None:
        """Have everybody work."""

    @abstractmethod
    def stop(self) -> None:
        """Have everybody end; what they hold is given back."""

    def look_after(self, seen: Seen) -> None:  # noqa: B027  # nothing to do where this process works
        """Replace who has died, and kill who has been at a point for too long."""

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


class Here(Crew):
    """This process, one point after the other."""

    def __init__(
        self, objective: Objective, study: Study, *, lease: float, prunes: bool, timeout: float | None = None
    ) -> None:
        super().__init__(study, timeout=timeout)
        self.objective, self.lease, self.prunes = objective, lease, prunes

    def start(self) -> None:
        """Refuse what this process cannot do to itself."""
        if self.timeout is not None:
            raise ValueError(
                f"timeout is {self.timeout!r} with workers=0, but a process cannot kill itself: pass workers=1 or more."
            )
        self.worker = _new_name()

    def wait(self, seconds: float) -> None:
        """Work on one point, if there is one."""
        if not work_on_one(self.study, self.objective, self.worker, lease=self.lease, prunes=self.prunes):
            time.sleep(seconds)

    def stop(self) -> None:
        """Do nothing: what this process held, it has ended."""


class _Process:
    """A worker process: its own session, so that it can be killed with all that it has started."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.name = _new_name()
        read, write = os.pipe()
        code = f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop({_PATH!r}))\n"
        code += "from avagrad.tune.workers import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(write)],
            stdin=subprocess.PIPE,
            pass_fds=[write],
            start_new_session=True,
            env={**os.environ, **environment, _PATH: json.dumps(list(sys.path))},
        )
        os.close(write)
        self.said = os.fdopen(read, "rb")
        with contextlib.suppress(BrokenPipeError):  # it has died already, which will be seen
            assert self.process.stdin is not None
            packed = cloudpickle.dumps((job, self.name))
            self.process.stdin.write(len(packed).to_bytes(8, "little") + packed)
            self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.said):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def last_words(self) -> str:
        ready, _, _ = select.select([self.said], [], [], 0)
        return self.said.read().decode() if ready else ""


class LocalProcesses(Crew):
    """Processes on this machine, one for each slot; a slot is what a worker's environment says beyond ours."""

    def __init__(
        self, job: Job, study: Study, slots: Sequence[dict[str, str]], *, timeout: float | None = None
    ) -> None:
        super().__init__(study, timeout=timeout)
        self.job = job
        self.slots = list(slots)
        self.processes: list[_Process] = []
        self.died_idle = 0

    def start(self) -> None:
        """Start a process for each slot."""
        self.processes = [_Process(self.job, slot) for slot in self.slots]

    def look_after(self, seen: Seen) -> None:
        """Replace who has died, and kill who has been at a point for too long."""
        for i, worker in enumerate(self.processes):
            code = worker.process.poll()
            late = self._too_long(worker.name, seen) if code is None else []
            if code is None and not late:
                continue
            if code == _CANNOT:
                raise WorkerError(worker.last_words())
            worker.close()
            self._fail_for_time(late)
            if code is not None:
                self._bury(worker, code)
            self.processes[i] = _Process(self.job, self.slots[i])

    def _bury(self, worker: _Process, code: int) -> None:
        held = self._held_by(worker.name, self.study.look())
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        for trial in held:
            self.study.fail(trial, f"{DIED} ({how})")
        self.died_idle = 0 if held or code < 0 else self.died_idle + 1
        if self.died_idle >= _MAY_DIE_IDLE:
            raise WorkerError(f"workers end as soon as they are started ({how}); what they printed says why.")

    def stop(self) -> None:
        """Tell everybody to stop, wait a little for those that save, and give back what they held."""
        for worker in self.processes:
            worker.kill(signal.SIGTERM)
        until = time.monotonic() + _SAVES_FOR
        for worker in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - time.monotonic()))
            worker.close()
        names = [worker.name for worker in self.processes]
        self.processes = []
        self._give_back(names, f"{GIVEN_BACK}: stopped")


class RayTasks(Crew):
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

    def look_after(self, seen: Seen) -> None:
        """Replace who has died, with its node or alone, and cancel who has been at a point for too long."""
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
        self._give_back([name for name, _ in self.tasks], f"{GIVEN_BACK}: stopped")
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


# --- the worker process ---

_PATH = "AVAGRAD_WORKER_PATH"


def _end_at_once_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, be it held up in code that lets no thread run."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone can
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def _end_with_parent(stream: BinaryIO) -> None:
    """End this process and all that it has started, when whoever started it closes the pipe or is killed."""
    with contextlib.suppress(OSError):
        while stream.read(4096):
            pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Be a worker process: the job comes through stdin, and whoever sent it keeps that open.

    >>> main.__module__
    'avagrad.tune.workers'
    """
    _end_at_once_with_parent()
    stream = sys.stdin.buffer
    length = int.from_bytes(stream.read(8), "little")
    job, name = cloudpickle.loads(stream.read(length))
    threading.Thread(target=_end_with_parent, args=(stream,), daemon=True).start()
    sys.stdin = open(os.devnull)  # noqa: SIM115  # nothing for the objective to read there
    try:
        work(job, name)
    except Exception as error:
        with open(int(sys.argv[1]), "w") as parent:
            parent.write(str(error))
        sys.exit(_CANNOT)
