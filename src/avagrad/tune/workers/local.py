"""Workers on this machine: this process, or worker processes, one for each slot of a device."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from avagrad.tune.optuna_trials import DIED, Snapshot
from avagrad.tune.study import Study
from avagrad.tune.trial import Objective
from avagrad.tune.workers.base import Job, WorkerError, WorkerPool, new_name, work, work_on_one
from avagrad.worker_process import WorkerProcess, stop_all

# How often workers may exit, or each be killed, without having taken a point, before the search gives up.
_MAX_IDLE_EXITS, _MAX_IDLE_KILLS = 3, 10
_STOP_SECONDS = 5.0  # that a worker has for saving when it is asked to stop


class InProcess(WorkerPool):
    """Runs points in this process, one by one."""

    def __init__(self, objective: Objective, study: Study, *, lease: float, prunes: bool) -> None:
        super().__init__(study)
        self.objective, self.lease, self.prunes = objective, lease, prunes
        self.worker = new_name()

    def wait(self, seconds: float) -> None:
        """Evaluate one point, if there is one."""
        if not work_on_one(self.study, self.objective, self.worker, lease=self.lease, prunes=self.prunes):
            time.sleep(seconds)


class _Process:
    """A worker process, and its name in the study."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.name = new_name()
        folder = job.folder if os.path.isdir(job.folder) else None
        self.process = WorkerProcess(_work_here, job, self.name, environment=environment, folder=folder)

    def close(self) -> str:
        """Kill it and all its subprocesses; return why it could not work, if it has sent a reason."""
        try:
            return str(self.process.connection.recv()) if self.process.connection.poll() else ""
        except (EOFError, OSError):
            return ""
        finally:
            self.process.close()


def _work_here(connection: Connection, job: Job, worker: str) -> None:
    """The main function of a worker process; sends the reason if it cannot work."""
    try:
        work(job, worker)
    except KeyboardInterrupt:  # it was asked to stop, and has saved
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        connection.send(str(error)[:10_000])
        sys.exit(1)


class LocalProcesses(WorkerPool):
    """Worker processes on this machine, one for each slot; a slot is a worker's additional environment variables."""

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

    def check(self, snapshot: Snapshot) -> None:
        """Replace processes that have died, and kill those that take too long for a point."""
        so_far = len(snapshot.records), sum(map(len, snapshot.failures.values()))
        if so_far != self.so_far or any(self._held_by(worker.name, snapshot) for worker in self.processes):
            self.so_far, self.died_idle = so_far, 0
        for i, worker in enumerate(self.processes):
            code = worker.process.process.poll()
            late = self._too_long(worker.name, snapshot) if code is None else []
            if code is None and not late:
                continue
            reason = worker.close()
            self._fail_late(late)
            if code is not None:
                self._record_death(worker, code, reason)
            self.processes[i] = _Process(self.job, self.slots[i])

    def _record_death(self, worker: _Process, code: int, reason: str) -> None:
        if reason:
            raise WorkerError(reason)
        held = self._held_by(worker.name, self.study.snapshot())
        how = f"killed by {_signal(-code)}" if code < 0 else f"exit code {code}"
        for trial in held:
            self.study.fail(trial, f"{DIED} ({how})")
        self.died_idle = 0 if held else self.died_idle + 1
        # A user may kill workers repeatedly, while all of them are still starting.
        if self.died_idle >= (_MAX_IDLE_KILLS * len(self.slots) if code < 0 else _MAX_IDLE_EXITS):
            raise WorkerError(f"workers exit as soon as they are started ({how}); see their output for the reason.")

    def stop(self) -> None:
        """Ask all of them to stop, wait a little for those that save, and release their points."""
        names = [worker.name for worker in self.processes]
        try:
            stop_all([worker.process for worker in self.processes], _STOP_SECONDS)
        finally:
            self.processes = []
        self._release_all(names)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one without a name
        return f"signal {number}"


def device_slots(workers: int | None, slots_per_gpu: int = 1) -> list[dict[str, str]]:
    """Return the environment variables of each worker on this machine: its GPU, or its share of the cores.

    ``workers`` None is one for each slot of each GPU, or one worker without a GPU.

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
