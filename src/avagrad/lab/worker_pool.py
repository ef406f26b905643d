"""A pool of processes that runs jobs, each in its own folder.

When the pool is asked to stop, the workers save their jobs. A stopped job is resumed, and a finished one is not run
again. A worker that has died is replaced.
"""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from avagrad.files import write_atomic
from avagrad.lab.checks import is_whole, require
from avagrad.lab.folder import RESULT
from avagrad.stopping import Stopped, catch_signals
from avagrad.worker_process import WorkerProcess, stop_all

__all__ = ["Job", "OnProgress", "run_jobs"]

OnProgress = Callable[[float], None]  # called with the fraction of a job that is done
_CHECKS_EVERY = 0.2  # seconds
_STOP_SECONDS = 10.0  # that a worker has for saving when it is asked to stop
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_SETTINGS = "job.json"  # in the folder of a finished job
_FATAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no other job could write either


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """A job. ``name`` is its folder, relative to that of all jobs; ``cost`` its approximate seconds on one core.

    >>> sorted(Job.__abstractmethods__)
    ['run']
    """

    name: str
    cost: float

    def settings(self) -> str:
        """Return the settings as JSON, without the number of threads, which depends on the machine."""
        settings = dataclasses.asdict(self)
        del settings["cost"]
        settings.get("config", {}).pop("threads", None)
        return json.dumps(settings, sort_keys=True, default=str)

    def is_done(self, below: Path) -> bool:
        """Return whether it is finished with these settings."""
        out = below / self.name
        done = (out / RESULT).exists() and (out / _SETTINGS).exists()
        return done and (out / _SETTINGS).read_text() == self.settings()

    @abstractmethod
    def run(self, out: Path, on_progress: OnProgress) -> None:
        """Start or resume it in this process and this folder; at its end there is a ``result.json``."""


def run_jobs(
    jobs: Sequence[Job],
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    on_progress: Callable[[str, float], None] | None = None,
) -> dict[str, str]:
    """Run the jobs that are not finished, the longest first, and return the names and reasons of those that failed.

    A worker is a process with one thread; it ends when this process ends, for whatever reason. On Ctrl-C or SIGTERM
    the workers save their jobs, and :class:`avagrad.stopping.Stopped` is raised.

    Args:
        jobs: the jobs to run.
        out: the parent of their folders.
        workers: the number of processes.
        on_progress: called many times a second with a job's name and the fraction that is done, 1.0 at its end.

    >>> run_jobs([], "nowhere", workers=0)
    Traceback (most recent call last):
    ...
    ValueError: workers is 0, but must be a whole number of at least 1.
    """
    require(is_whole(workers, 1), "workers", workers, "a whole number of at least 1")
    place = Path(out)
    left = sorted((job for job in jobs if not job.is_done(place)), key=lambda job: job.cost)  # the next is the last
    if not left:
        return {}
    pool = _WorkerPool(place, left, on_progress or (lambda name, share: None))
    try:  # once, instead of in each job
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise OSError(f"out is {str(place)!r}, where nothing can be written ({error}).") from error
    with catch_signals() as stop:
        try:
            for _ in range(min(workers, len(left))):
                pool.start_one()
            while pool.workers:
                if stop.signal is not None:
                    message = "stopped; finished work is saved: run it again to resume"
                    raise Stopped(message, number=stop.signal, folder=place)
                pool.check(_CHECKS_EVERY)
        finally:
            stop_all([worker.process for worker in pool.workers], _STOP_SECONDS)
    return pool.failed


@dataclass
class _Worker:
    """A process and its current job."""

    process: WorkerProcess
    job: Job
    share: float = 0.0  # the fraction of the job that is done


@dataclass
class _WorkerPool:
    """The workers. One that has finished a job gets the next; a dead one is replaced; one without a job is stopped."""

    folder: Path
    left: list[Job]
    on_progress: Callable[[str, float], None]
    workers: list[_Worker] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def start_one(self) -> None:
        worker = _Worker(WorkerProcess(_work, self.folder, environment=_ONE_THREAD), self.left.pop())
        self.workers.append(worker)
        self._send(worker)

    def _send(self, worker: _Worker) -> None:
        worker.share = 0.0
        self.on_progress(worker.job.name, worker.share)
        with contextlib.suppress(BrokenPipeError):  # check() will notice that it has died
            worker.process.connection.send(worker.job)

    def check(self, seconds: float) -> None:
        """Wait until a worker has sent something, and act on it."""
        ready = wait([worker.process.connection for worker in self.workers], seconds)
        if not ready:  # keeps a displayed clock running
            for worker in self.workers:
                self.on_progress(worker.job.name, worker.share)
        for worker in [worker for worker in self.workers if worker.process.connection in ready]:
            try:
                message = worker.process.connection.recv()
            except (EOFError, OSError):
                self._replace_dead(worker)
                continue
            if isinstance(message, float):
                worker.share = min(message, 0.999)
                self.on_progress(worker.job.name, worker.share)
            else:
                self._end(worker.job, *message)
                self._next(worker)

    def _end(self, job: Job, why: str | None, number: int | None) -> None:
        if number in _FATAL_ERRORS:
            raise OSError(why)
        if why is not None:
            self.failed[job.name] = why
        self.on_progress(job.name, 1.0)

    def _next(self, worker: _Worker) -> None:
        if self.left:
            worker.job = self.left.pop()
            self._send(worker)
        else:
            self.workers.remove(worker)
            worker.process.close()

    def _replace_dead(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        code = worker.process.process.wait()
        worker.process.close()
        how = f"was killed: {signal.strsignal(-code)}" if code < 0 else f"exited with code {code}"
        self._end(worker.job, f"its process {how}", None)
        if self.left:
            self.start_one()


def _work(connection: Connection, folder: Path) -> None:
    """The main function of a worker: run the jobs it receives until the connection is closed."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job: Job = connection.recv()
            connection.send(_outcome(job, folder, connection.send))


def _outcome(job: Job, folder: Path, on_progress: OnProgress) -> tuple[str | None, int | None]:
    """Run a job; return why it failed, if it did, and the errno."""
    out = folder / job.name
    try:
        if (out / RESULT).exists():  # with other settings
            shutil.rmtree(out)
        job.run(out, on_progress)
        write_atomic(out / _SETTINGS, lambda file: file.write(job.settings().encode()))
    except BrokenPipeError:
        raise  # the parent is gone
    except KeyboardInterrupt:  # it was asked to stop, and has saved
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        return str(error) or type(error).__name__, getattr(error, "errno", None)
    return None, None
