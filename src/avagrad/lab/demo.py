"""The demonstration: the paper's experiments in small, on data that come with the packages.

:func:`jobs` says what is run, :func:`run` runs it in a few processes. Each job has a folder of its own, goes on where
it was stopped, and is not run again when it is finished.
"""

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from avagrad.files import write_atomic
from avagrad.lab.config import Config, configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.folder import RESULT, RunFolder
from avagrad.lab.methods import METHODS
from avagrad.lab.run import Callback
from avagrad.lab.stopping import Stopped, catch_signals
from avagrad.lab.synthetic_folder import run_into
from avagrad.lab.tasks import synthetic as toy
from avagrad.lab.train import train
from avagrad.tune.space import Point, Space, axis

__all__ = ["Grid", "Job", "Search", "Toy", "Training", "jobs", "run"]

Tell = Callable[[float], None]  # is called with the share of a job that is done
_TELLS_EVERY = _LOOKS_EVERY = 0.2  # seconds
_SAVES_FOR = 10.0  # seconds that a worker has for saving, when it is told to stop
_SETTINGS = "job.json"  # in the folder of a finished job
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no other job could write either


# --- the jobs -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """Something to run. ``name`` is its folder, below the demonstration's; ``cost`` its seconds on one core, about.

    >>> Training(name="runs/a", cost=1.0, config=configure("digits")).is_done(Path("nowhere"))
    False
    """

    name: str
    cost: float

    def settings(self) -> str:
        """What is run, as JSON; the number of threads is the machine's."""
        settings = dataclasses.asdict(self)
        del settings["cost"]
        settings.get("config", {}).pop("threads", None)
        return json.dumps(settings, sort_keys=True, default=str)

    def is_done(self, below: Path) -> bool:
        """Whether it is finished, with these settings."""
        out = below / self.name
        done = (out / RESULT).exists() and (out / _SETTINGS).exists()
        return done and (out / _SETTINGS).read_text() == self.settings()

    @abstractmethod
    def run(self, out: Path, tell: Tell) -> None:
        """Run it, or go on with it, in this process and this folder; at its end there is a ``result.json``."""


@dataclass(frozen=True, kw_only=True)
class Training(Job):
    """One training run.

    >>> Training(name="runs/a", cost=1.0, config=configure("digits")).config.optimizer
    'avagrad'
    """

    config: Config

    def run(self, out: Path, tell: Tell) -> None:
        """Train."""
        train(self.config, out, resume=True, callback=_Tells(tell))


@dataclass(frozen=True, kw_only=True)
class Grid(Job):
    """A run at each point, all of them as one computation.

    >>> Grid(name="maps/a", cost=1.0, config=configure("digits"), points=(Point(0.1, 0.1, 0),)).points[0].key
    'lr=0.1 eps=0.1 seed=0'
    """

    config: Config
    points: tuple[Point, ...]

    def run(self, out: Path, tell: Tell) -> None:
        """Train them."""
        train_ensemble(self.config, self.points, out, resume=True, callback=_Tells(tell))


@dataclass(frozen=True, kw_only=True)
class Search(Job):
    """A separable search over lr and eps, each of its stages as one computation.

    >>> Search(name="search/a", cost=1.0, config=configure("digits", "adam")).lr
    'paper'
    """

    config: Config
    lr: str = "paper"
    eps: str = "paper"

    def run(self, out: Path, tell: Tell) -> None:
        """Search, and note in ``result.json`` what was found: a study by itself does not say that it is finished."""
        from avagrad.lab.sweep import sweep
        from avagrad.tune.tuner import Progress

        lr, eps = axis(self.lr, "lr"), axis(self.eps, "eps")

        def watch(progress: Progress) -> None:
            tell(progress.done / progress.total)

        found = sweep(self.config, lr=lr, eps=eps, folder=out, engine="ensemble", watcher=watch)
        if found.failed:
            raise RuntimeError("; ".join(f"{key}: {why}" for key, why in found.failed.items()))
        RunFolder(out).write_result({"status": "finished", "trials": len(found.trials), "told": found.told()})


@dataclass(frozen=True, kw_only=True)
class Toy(Job):
    """The synthetic problem, from several starts.

    >>> Toy(name="synthetic", cost=1.0, runs=(toy.Settings(w1=0.0),), methods=("adam",)).runs[0].w1
    0.0
    """

    runs: tuple[toy.Settings, ...]
    methods: tuple[str, ...]

    def run(self, out: Path, tell: Tell) -> None:
        """Run them one after the other."""
        done = 0

        def one(settings: toy.Settings, methods: Sequence[str]) -> dict[str, toy.Curve]:
            nonlocal done
            curves = toy.run(settings, methods, lambda _, step, steps: tell((done + step / steps) / len(self.runs)))
            done += 1
            return curves

        run_into(out, self.runs, self.methods, resume=True, run=one)


class _Tells(Callback):
    """Tells now and then which share of a run's steps is done."""

    def __init__(self, tell: Tell) -> None:
        self.tell, self.total, self.last = tell, 1, 0.0

    def on_start(self, config: Config, done: int, total: int) -> None:
        self.total = total
        self.on_step(done)

    def on_step(self, done: int) -> None:
        if time.monotonic() - self.last > _TELLS_EVERY:
            self.last = time.monotonic()
            self.tell(done / self.total)


# As long a way as in the paper, 10^6 steps of 1e-5, in a tenth of the steps; noisier, but to the same ends. SGD is left
# out: with one weight AvaGrad is SGD.
_TOY = {"lr": 1e-4, "steps": 100_000, "replicas": 20}
_TOY_METHODS = ("adam", "amsgrad", "delayed-adam", "avagrad")
_MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {}),
    "avagrad": ("avagrad", {}),
    "avastep": ("avastep", {"decoupled_weight_decay": False}),  # as the others decay
}
# A smaller network for one epoch. The learning rates are those that were found for the longer run of the preset, not
# searched for this one: all methods learn with them.
_SMALL_CHARS = {"embedding": 64, "hidden": 64, "batch_size": 64, "bptt": 32}
_SEEDS = (0, 1)


def jobs() -> list[Job]:
    """Return all that the demonstration runs.

    >>> found = jobs()
    >>> len(found), [job.name for job in found[:6]]
    (53, ['synthetic', 'maps/adam', 'maps/avagrad', 'maps/avastep', 'search/avagrad', 'runs/digits/sgd-0'])
    """
    space = Space(axis("paper", "lr"), axis("paper", "eps"))
    points = tuple(Point(cell.lr, cell.eps, 0) for cell in space.cells())
    starts = tuple(toy.Settings(w1=w1, **_TOY) for w1 in (0.5, 0.0))  # type: ignore[arg-type]
    return [
        Toy(name="synthetic", cost=45.0, runs=starts, methods=_TOY_METHODS),
        *(
            Grid(
                name=f"maps/{name}",
                cost=35.0,
                config=configure("digits", method, optimizer_options=options),
                points=points,
            )
            for name, (method, options) in _MAPS.items()
        ),
        Search(name="search/avagrad", cost=7.0, config=configure("digits", "avagrad")),
        *(
            Training(name=f"runs/digits/{method}-{seed}", cost=0.7, config=configure("digits", method, seed=seed))
            for method in METHODS
            for seed in _SEEDS
        ),
        *(
            Training(
                name=f"runs/chars/{method}-{seed}",
                cost=2.0,
                config=configure("chars", method, seed=seed, epochs=1, task_options=_SMALL_CHARS),
            )
            for method in METHODS
            for seed in _SEEDS
        ),
    ]


# --- who runs them ------------------------------------------------------------------------------


def run(
    jobs: Sequence[Job],
    folder: str | os.PathLike[str],
    *,
    workers: int = 2,
    tell: Callable[[str, float], None] | None = None,
) -> dict[str, str]:
    """Run what is not finished yet, the longest first, and return what has failed: names, and why.

    A worker is a process that computes with one thread; it ends with this one, however that ends. Told to stop (Ctrl-C,
    SIGTERM), the workers save what they have, and :class:`avagrad.lab.stopping.Stopped` is raised.

    Args:
        jobs: from :func:`jobs`.
        folder: where their folders are.
        workers: how many processes.
        tell: is called, many times a second, with a job's name and the share of it that is done: 1.0 when it has ended.

    >>> run([], "nowhere", workers=0)
    Traceback (most recent call last):
    ...
    ValueError: workers is 0, but must be a whole number of at least 1.
    """
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers is {workers!r}, but must be a whole number of at least 1.")
    place = Path(folder)
    left = sorted((job for job in jobs if not job.is_done(place)), key=lambda job: job.cost)  # the next is the last
    crew = _Crew(place, left, tell or (lambda name, share: None))
    if not left:
        return {}
    place.mkdir(parents=True, exist_ok=True)
    with catch_signals() as stop:
        try:
            crew.start(min(workers, len(left)))
            while crew.workers:
                if stop.signal is not None:
                    raise Stopped(stop.signal, place)
                crew.look(_LOOKS_EVERY)
        finally:
            crew.stop()
    return crew.failed


@dataclass
class _Worker:
    """A process, the pipe to it, and what it is at."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    job: Job
    share: float = 0.0  # of the job, that is done


@dataclass
class _Crew:
    """All workers: who is done with a job gets the next, who has died is replaced, who finds none left goes home."""

    folder: Path
    left: list[Job]
    tell: Callable[[str, float], None]
    workers: list[_Worker] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def start(self, count: int) -> None:
        for _ in range(count):
            self._start_one()

    def _start_one(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # A daemon, so that this process can end without it in any case.
        process = context.Process(target=_work, args=(theirs, self.folder), daemon=True)
        with _environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1"):
            process.start()
        theirs.close()
        worker = _Worker(process, ours, self.left.pop())
        self.workers.append(worker)
        self._send(worker)

    def _send(self, worker: _Worker) -> None:
        worker.share = 0.0
        self.tell(worker.job.name, worker.share)
        with contextlib.suppress(BrokenPipeError):  # one that has died already will be seen
            worker.pipe.send(worker.job)

    def look(self, seconds: float) -> None:
        """Wait until somebody has something to say, and hear it."""
        ready = wait([worker.pipe for worker in self.workers], seconds)
        if not ready:  # whoever shows a clock wants to be called now and then
            for worker in self.workers:
                self.tell(worker.job.name, worker.share)
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            try:
                said = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            if isinstance(said, float):
                worker.share = min(said, 0.999)
                self.tell(worker.job.name, worker.share)
            else:
                self._end(worker.job, *said)
                self._next(worker)

    def _end(self, job: Job, why: str | None, number: int | None) -> None:
        if number in _HOPELESS:
            raise OSError(why)
        if why is not None:
            self.failed[job.name] = why
        self.tell(job.name, 1.0)

    def _next(self, worker: _Worker) -> None:
        if self.left:
            worker.job = self.left.pop()
            self._send(worker)
        else:
            self.workers.remove(worker)
            worker.pipe.close()  # which tells it to end
            worker.process.join()

    def _bury(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.pipe.close()
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"was ended: {signal.strsignal(-code)}" if code < 0 else f"ended with code {code}"
        self._end(worker.job, f"its process {how}", None)
        if self.left:
            self._start_one()

    def stop(self) -> None:
        """Have all of them save and end; who takes too long is killed, with all that it has started."""
        until = time.monotonic() + _SAVES_FOR
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            wait([worker.process.sentinel], max(0.0, until - time.monotonic()))
            assert worker.process.pid is not None
            # Before it is joined: until then its number is nobody else's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.workers = []


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(pipe: Connection, folder: Path) -> None:
    """Be a worker: run what comes through the pipe, until it is closed."""
    os.setsid()  # Ctrl-C is for the one that started it, and it can be killed with all that it starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # where nothing hears it, to save first
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job: Job = pipe.recv()
            pipe.send(_outcome(job, folder, pipe.send))


def _outcome(job: Job, folder: Path, tell: Tell) -> tuple[str | None, int | None]:
    """Run a job; return why it failed, if it did, and the system's number for that."""
    out = folder / job.name
    try:
        if (out / RESULT).exists():  # of other settings
            shutil.rmtree(out)
        job.run(out, tell)
        write_atomic(out / _SETTINGS, lambda file: file.write(job.settings().encode()))
    except BrokenPipeError:
        raise  # there is nobody left to tell
    except KeyboardInterrupt:  # how a search is told to stop
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        return str(error) or type(error).__name__, getattr(error, "errno", None)
    return None, None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
