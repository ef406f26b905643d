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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from avagrad.checks import is_whole, require
from avagrad.files import write_atomic
from avagrad.lab.folder import RESULT
from avagrad.stopping import Stopped, catch_signals
from avagrad.worker_process import WorkerProcess, stop_all

OnProgress = Callable[[float], None]  # called with the fraction of a job that is done
_CHECKS_EVERY = 0.2  # seconds
_STOP_SECONDS = 10.0  # that a worker has for saving when it is asked to stop
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_SETTINGS = "job.json"  # in the folder of a finished job
_FATAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no other job could write either


@dataclass(frozen=True)
class Job:
    """A job: ``function(out, on_progress, **arguments)``, which starts or resumes it, and writes a ``result.json``."""

    name: str  # its folder, relative to that of all jobs
    cost: float  # approximate seconds on one core
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def settings(self) -> str:
        """Return the arguments as JSON, without the number of threads, which depends on the machine."""

        def plain(value: Any) -> Any:
            if not dataclasses.is_dataclass(value) or isinstance(value, type):
                return str(value)
            return {name: x for name, x in dataclasses.asdict(value).items() if name != "threads"}

        return json.dumps(dict(self.arguments), sort_keys=True, default=plain)

    def is_done(self, below: Path) -> bool:
        """Return whether it is finished with these settings."""
        out = below / self.name
        done = (out / RESULT).exists() and (out / _SETTINGS).exists()
        return done and (out / _SETTINGS).read_text() == self.settings()


def run_jobs(
    jobs: Sequence[Job],
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    on_progress: Callable[[str, float], None] = lambda name, share: None,
) -> dict[str, str]:
    """Run the jobs that are not finished, the longest first, and return the names and reasons of those that failed.

    A worker is a process with one thread; it ends when this process ends, for whatever reason. On Ctrl-C or SIGTERM
    the workers save their jobs, and :class:`avagrad.stopping.Stopped` is raised. ``on_progress`` is called with a job's
    name and the fraction that is done, 1.0 at its end.
    """
    require(is_whole(workers, 1), "workers", workers, "a whole number of at least 1")
    place = Path(out)
    left = sorted((job for job in jobs if not job.is_done(place)), key=lambda job: job.cost)  # the next is the last
    if not left:
        return {}
    try:  # once, instead of in each job
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise OSError(f"out is {str(place)!r}, where nothing can be written ({error}).") from error
    idle: list[WorkerProcess] = []
    running: dict[Any, tuple[WorkerProcess, Job]] = {}  # by connection
    failed: dict[str, str] = {}
    with catch_signals() as stop:
        try:
            while left or running:
                if stop.signal is not None:
                    how = "stopped; finished work is saved: run it again to resume"
                    raise Stopped(how, number=stop.signal, folder=place)
                while left and len(running) < workers:
                    job = left.pop()
                    worker = idle.pop() if idle else WorkerProcess(_work, place, environment=_ONE_THREAD)
                    running[worker.connection] = worker, job
                    on_progress(job.name, 0.0)
                    with contextlib.suppress(BrokenPipeError):  # it has died, which is noticed below
                        worker.connection.send(job)
                for connection in wait(list(running), _CHECKS_EVERY):
                    worker, job = running[connection]
                    message = _message_from(worker)
                    if isinstance(message, float):
                        on_progress(job.name, min(message, 0.999))
                        continue
                    del running[connection]
                    if not worker.connection.closed:
                        idle.append(worker)
                    why, number = message
                    if number in _FATAL_ERRORS:
                        raise OSError(why)
                    if why is not None:
                        failed[job.name] = why
                    on_progress(job.name, 1.0)
        finally:
            stop_all([*idle, *(worker for worker, _ in running.values())], _STOP_SECONDS)
    return failed


def _message_from(worker: WorkerProcess) -> Any:
    """Return what a worker has sent: the fraction that is done, or an outcome. That of a dead one is how it died."""
    try:
        return worker.connection.recv()
    except (EOFError, OSError):
        code = worker.process.wait()
        worker.close()
        how = f"was killed: {signal.strsignal(-code)}" if code < 0 else f"exited with code {code}"
        return f"its process {how}", None


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
        job.function(out, on_progress, **job.arguments)
        write_atomic(out / _SETTINGS, lambda file: file.write(job.settings().encode()))
    except BrokenPipeError:
        raise  # the parent is gone
    except KeyboardInterrupt:  # it was asked to stop, and has saved
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        return str(error) or type(error).__name__, getattr(error, "errno", None)
    return None, None
