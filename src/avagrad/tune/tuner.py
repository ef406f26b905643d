"""The search, carried out: queue what it wants, have it run, look at what came out, until it knows."""

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from avagrad.stopping import Stopped, interrupt_on_sigterm
from avagrad.tune.leases import LEASE, Watch
from avagrad.tune.records import Record, write_records
from avagrad.tune.search import METHODS, Plan, Score, plan, replay, scores
from avagrad.tune.separability import Separability, separability, verdict
from avagrad.tune.space import Axis, Cell, Point, Space, axis
from avagrad.tune.storage import StorageError, described, is_url
from avagrad.tune.study import DIED, DIRECTIONS, DUPLICATE, GIVEN_BACK, LOST, Seen, Study, pruner_named
from avagrad.tune.trial import Objective
from avagrad.tune.workers import (
    Batched,
    InProcess,
    Job,
    LocalProcesses,
    RayTasks,
    RunTogether,
    WorkerError,
    WorkerPool,
    device_slots,
)

__all__ = ["Best", "Progress", "Result", "Stopped", "TuningError", "Verdict", "tune"]

Values = Axis | float | str | Iterable[float] | None


class TuningError(RuntimeError):
    """A search cannot go on; the message says why, and that what is finished is kept.

    >>> issubclass(TuningError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class Progress:
    """How far a search is.

    >>> Progress(3, 47, 1, "line over lr at eps 0.1", Cell(1.0, 0.1), 0.25, 88.0).told()
    'line over lr at eps 0.1: 3 of 47 done, best 0.25 at lr 1, eps 0.1, 1 under way, 1:28 left'
    """

    done: int
    total: int
    held: int
    stage: str
    at: Cell | None
    best: float | None
    seconds_left: float | None

    def told(self) -> str:
        """Return it in one line."""
        parts = [f"{self.done} of {self.total} done"]
        if self.at is not None:
            parts.append(f"best {self.best:.4g} at {self.at}")
        if self.held:
            parts.append(f"{self.held} under way")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
        return f"{self.stage}: {', '.join(parts)}"


@dataclass(frozen=True)
class Best:
    """The point that a search has picked; ``value`` is the mean over its seeds.

    >>> Best(1.0, 0.1, 0.25, (0.2, 0.3)).lr
    1.0
    """

    lr: float | None
    eps: float | None
    value: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """What the neighbours of a pick say, where there is no grid to measure on.

    >>> Verdict(True, 1, "No neighbour is better.").told()
    'No neighbour is better.'
    """

    confirmed: bool | None
    rings: int  # how many were needed; lr and eps part where the first one confirms
    words: str

    def told(self) -> str:
        """Return it in a sentence."""
        return self.words


@dataclass(frozen=True)
class Result:
    """What a search has found.

    ``best`` is None if every point diverged or failed; ``trials`` are the records of this search's axes and seeds;
    ``failed`` has the points that did not give a result, with what went wrong.

    >>> Result(None, (), None, {}, ()).told()
    'No point has given a finite value.'
    """

    best: Best | None
    trials: tuple[Record, ...]
    separability: Separability | Verdict | None
    failed: dict[str, str]
    path: tuple[Cell, ...]
    at_ends: tuple[str, ...] = ()  # the axes at an end of which the pick is
    new: int | None = field(default=None, compare=False)  # how many of the trials were run in this call
    stage: str = ""  # how the search ended

    def told(self) -> str:
        """Say in a few sentences what was found."""
        if self.best is None:
            return f"No point has given a finite value{f': {self.stage}' if self.stage else ''}."
        cell, count = Cell(self.best.lr, self.best.eps), len(self.trials)
        before = f" ({count - self.new} were there already)" if self.new is not None and self.new < count else ""
        parts = [
            f"Best: {cell}, with {self.best.value:.6g}, after {count} {'trial' if count == 1 else 'trials'}{before}."
        ]
        if self.separability is not None:
            parts.append(self.separability.told())
        if self.at_ends:
            parts.append(f"It is at an end of the {' and the '.join(self.at_ends)} axis: try a wider one.")
        if self.failed:
            parts.append(f"Without a result: {'; '.join(f'{key} ({why})' for key, why in self.failed.items())}.")
        return " ".join(parts)


def tune(
    objective: Objective,
    *,
    lr: Values = None,
    eps: Values = None,
    method: Literal["separable", "cross", "grid"] = "separable",
    direction: Literal["minimize", "maximize"] = "minimize",
    storage: str | os.PathLike[str] | None = None,
    workers: int | None = 0,
    seeds: int | Sequence[int] = 1,
    start_lr: float | None = None,
    start_eps: float | None = None,
    timeout: float | None = None,
    retries: int = 2,
    margin: float = 0.0,
    pruner: Literal["median", "halving"] | None = None,
    slots_per_gpu: int = 1,
    ray: str | None = None,
    name: str | None = None,
    about: dict[str, Any] | None = None,
    lease: float = LEASE,
    together: RunTogether | None = None,
    watcher: Callable[[Progress], object] | None = None,
) -> Result:
    """Find the best lr and eps for an objective, in 42 to 47 trials where a grid has 441.

    Interrupted or killed, the same call goes on where it stopped: finished points are never run again, those that were
    under way or have failed are. Any number of processes may make the same call on the same storage, and share the
    work.

    Args:
        objective: a function of a :class:`~avagrad.tune.Trial`; it trains with ``trial.lr``, ``trial.eps`` and
            ``trial.seed`` and returns a number. NaN and infinity mean that the training diverged. It may call
            ``trial.report(step, value)`` on the way, and take further parameters from ``trial.optuna``.
        lr: the values of the learning rate: ``"1e-4:1e3:15"``, ``"paper"``, or a list. None: there is no such axis.
        eps: the values of epsilon, likewise.
        method: ``"separable"`` (a line over lr, a line over eps at its best, the neighbours of the pick), ``"cross"``
            (both lines at once), or ``"grid"`` (all points).
        direction: ``"minimize"`` or ``"maximize"``.
        storage: where the record is kept: a file, or a URL of a database. By default a file in ``runs/``.
        workers: how many processes work; 0 is this one alone; None is one for each slot of each GPU.
        seeds: how many seeds each point is run with (0, 1, ...), or the seeds themselves.
        start_lr: where the line over eps is drawn by ``"cross"``; by default the middle of the axis.
        start_eps: where the first line over lr is drawn; by default 0.1 if it is on the axis, else its middle.
        timeout: seconds after which a trial is killed and counts as failed; needs ``workers``.
        retries: how often a failed point is run again.
        margin: a neighbour of the pick must be better by more than this for the search to move there.
        pruner: end trials early by the values that they report: ``"median"`` or ``"halving"``.
        slots_per_gpu: how many workers share a GPU.
        ray: the address of a Ray cluster, on which the workers are placed.
        name: of the study; by default the objective's. A database may hold many.
        about: what must be the same for results to be comparable; another call with other values is refused.
        lease: seconds without a sign of life after which a worker's point is given to another.
        together: a function that takes all points that are to be run at a time, and returns a record for each: it works
            instead of the objective.
        watcher: is called with a :class:`Progress` now and then; by default a line on a terminal shows it.

    >>> import tempfile
    >>> def objective(trial):
    ...     return (math.log10(trial.lr) - 1) ** 2 + (math.log10(trial.eps) + 3) ** 2
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result = tune(objective, lr="1e-4:1e3:8", eps="1e-8:100:11", storage=f"{place}/mine.journal")
    >>> result.best.lr, result.best.eps, result.best.value, len(result.trials)
    (10.0, 0.001, 0.0, 24)
    """
    space = Space(axis(lr, "lr"), axis(eps, "eps"))
    start = space.start(start_lr, start_eps)
    _check(objective, method, direction, workers, timeout, retries, margin, slots_per_gpu, lease)
    pruner_named(pruner)
    seeds = _seeds(seeds)
    if timeout is not None and workers == 0 and ray is None:
        raise ValueError(f"timeout is {timeout!r} with workers=0, but a process cannot kill itself: pass workers=1.")
    called = name or _name_of(objective)
    if storage is None:
        storage = Path("runs", re.sub(r"[^\w.-]+", "-", called) + ".journal")
    if not isinstance(storage, (str, os.PathLike)):
        raise TypeError(f"storage is {storage!r}, but must be a file, or a URL of a database.")
    if str(storage).startswith("sqlite") and (workers != 0 or ray is not None):
        raise ValueError(
            f"storage is {str(storage)!r} with workers={workers!r}, but SQLite lets two workers take the same "
            "point: use a journal file or PostgreSQL, or workers=0."
        )
    where = storage if is_url(storage) else Path(storage).expanduser().resolve()
    about = {"objective": _name_of(objective).rpartition(":")[2]} if about is None else about
    try:
        json.dumps(about)
    except (TypeError, ValueError) as error:
        raise TypeError(f"about is {about!r}, which JSON cannot hold: {error}.") from None
    job = None
    if workers != 0 or ray is not None:  # say so before anything is made
        job = Job.of(objective, os.fspath(where), called, pruner=pruner, lease=lease)
    study = Study(where, called, direction=direction, about=about, pruner=pruner)
    pool: WorkerPool
    if together is not None:
        pool = Batched(together, study, lease=lease)
    elif job is None:
        pool = InProcess(objective, study, lease=lease, prunes=pruner is not None)
    elif ray is not None:
        pool = RayTasks(job, study, ray, workers or None, slots_per_gpu=slots_per_gpu, timeout=timeout)
    else:
        pool = LocalProcesses(job, study, device_slots(workers, slots_per_gpu), timeout=timeout)
    search = _Search(study, pool, space, start, method, seeds, retries, margin, lease)
    return search.to_its_end(watcher or _line_on_a_terminal())


def _check(
    objective: object,
    method: str,
    direction: str,
    workers: int | None,
    timeout: float | None,
    retries: int,
    margin: float,
    slots_per_gpu: int,
    lease: float,
) -> None:
    if not callable(objective):
        raise TypeError(f"objective is {objective!r}, but must be a function of a trial.")
    for name, value, allowed in (("method", method, METHODS), ("direction", direction, DIRECTIONS)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}.")
    for name, whole, least in (("workers", workers, 0), ("retries", retries, 0), ("slots_per_gpu", slots_per_gpu, 1)):
        if name == "workers" and whole is None:
            continue
        if not isinstance(whole, int) or isinstance(whole, bool) or whole < least:
            raise ValueError(f"{name} is {whole!r}, but must be a whole number of at least {least}.")
    for name, seconds in (("timeout", timeout), ("lease", lease)):
        if name == "timeout" and seconds is None:
            continue
        if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ValueError(f"{name} is {seconds!r}, but must be a number of seconds above 0.")
    if not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
        raise ValueError(f"margin is {margin!r}, but must be a finite number of at least 0.")


def _seeds(given: int | Sequence[int]) -> tuple[int, ...]:
    seeds = tuple(range(given)) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(seeds, Sequence) or isinstance(seeds, (str, bytes)) or not seeds:
        raise ValueError(f"seeds is {given!r}, but must be a whole number of at least 1, or a list of seeds.")
    if len(set(seeds)) != len(seeds) or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"seeds is {given!r}, but must be different whole numbers.")
    return tuple(seeds)


def _name_of(objective: object) -> str:
    """Return what an objective is called: its module, or the script that is run, and its name there."""
    named = objective if hasattr(objective, "__qualname__") else type(objective)
    module = getattr(named, "__module__", None) or "__main__"
    if module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        module = Path(script).stem if script and script != "<stdin>" else "main"
    return f"{module}:{getattr(named, '__qualname__', 'objective')}"


class _Search:
    """A search under way."""

    def __init__(
        self,
        study: Study,
        pool: WorkerPool,
        space: Space,
        start: Cell,
        method: str,
        seeds: tuple[int, ...],
        retries: int,
        margin: float,
        lease: float,
    ) -> None:
        self.study, self.pool, self.space, self.start, self.method = study, pool, space, start, method
        self.seeds, self.retries, self.margin = seeds, retries, margin
        self.watch = Watch(lease)
        self.began = time.monotonic()
        self.seen = Seen()
        self.before: dict[str, int] = {}  # failures of earlier calls, which have been forgiven

    def to_its_end(self, watcher: Callable[[Progress], object]) -> Result:
        try:
            with interrupt_on_sigterm():
                return self._run(watcher)
        except KeyboardInterrupt:
            self.study.patience = 0.0
            with contextlib.suppress(StorageError):
                self.seen = self.study.look()
            raise Stopped(f"stopped: {self._kept()}; the same command goes on.") from None
        except (StorageError, WorkerError) as error:  # a worker may be the first to see that the storage is gone
            kind = WorkerError if isinstance(error, WorkerError) else StorageError
            raise kind(f"{error}{self._rescued()}") from error.__cause__
        finally:
            self.study.close()
            watcher_done = getattr(watcher, "done", None)
            if watcher_done is not None:
                watcher_done()

    def _run(self, watcher: Callable[[Progress], object]) -> Result:
        self.seen = self.study.look()
        self.before = {key: len(reasons) for key, reasons in self.seen.failures.items()}
        self.there = {record.point.key for record in self.seen.records}
        now = self._plan()
        self.study.withdraw({point.key for point in self._wanted(now)})
        try:
            if not now.done:
                self.pool.start()
            pause = 0.05
            while not now.done:
                self.pool.check(self.seen)
                self.study.take_back(self.seen, self.watch)
                self._refuse_what_never_works()
                queued = self.study.queue(self._wanted(now), self.seen)
                watcher(self._progress(now))
                self.pool.wait(pause)
                before = self.seen.records
                self.seen = self.study.look()
                now = self._plan()
                pause = 0.05 if queued or self.seen.records != before else min(1.5 * pause, 0.5)
            self.study.withdraw()
            watcher(self._progress(now))
        finally:
            self.pool.stop()
        return self._result(now)

    # --- what is known, and what is wanted ---

    def _records(self) -> list[Record]:
        return [record for record in self.seen.records if record.seed in self.seeds and record.point.cell in self.space]

    def _known(self) -> dict[Cell, Score]:
        """Return what the search may know: cells with all their seeds, those that failed for good included."""
        records = self._records()
        done = {record.point.key for record in records}
        worst = self.study.worst
        for cell in self.space.cells():
            for seed in self.seeds:
                point = Point(*cell, seed)
                if point.key not in done and self._has_failed(point.key):
                    records.append(Record(*cell, seed, value=worst))
        return scores(records, direction=self.study.direction, seeds=len(self.seeds))

    def _plan(self) -> Plan:
        return plan(self.method, self.space, self._known(), start=self.start, margin=self.margin)

    def _wanted(self, now: Plan) -> list[Point]:
        done = {record.point.key for record in self.seen.records}
        points = (Point(*cell, seed) for cell in now.cells for seed in self.seeds)
        return [point for point in points if point.key not in done and not self._has_failed(point.key)]

    # --- what has failed ---

    def _failures(self, key: str) -> list[str]:
        """Return what went wrong with a point in this call, where it was the point's own fault or may have been."""
        new = self.seen.failures.get(key, ())[self.before.get(key, 0) :]
        return [reason for reason in new if not reason.startswith((GIVEN_BACK, DUPLICATE))]

    def _has_failed(self, key: str) -> bool:
        """Tell whether a point is given up. Machines die more often than a point is to blame for it."""
        reasons = self._failures(key)
        deaths = sum(reason.startswith((DIED, LOST)) for reason in reasons)
        return len(reasons) - deaths > self.retries or deaths > 3 * (self.retries + 1)

    def _refuse_what_never_works(self) -> None:
        """Give up where no point has ever given a result: then the objective is wrong, and not the point."""
        if self.seen.records or any(not self._failures(key) for key, _ in self.seen.held.values()):
            return  # or may yet give one
        for key in self.seen.failures:
            if self._has_failed(key):
                reasons = self._failures(key)
                raise TuningError(
                    f"{reasons[-1]}: at {key}, {len(reasons)} times of {len(reasons)}, and no point has given a result "
                    f"yet; {self._kept()}."
                )

    # --- what is told ---

    def _kept(self) -> str:
        done = len(self.seen.records)
        points = "point is" if done == 1 else "points are"
        return f"{done} finished {points} kept in {described(self.study.place)}"

    def _rescued(self) -> str:
        """Keep what this process knows beside a file that is gone."""
        if is_url(self.study.place) or not self.seen.records or Path(self.study.place).exists():
            return ""
        rescued = Path(f"{self.study.place}.rescued.jsonl")
        with contextlib.suppress(OSError):
            rescued.parent.mkdir(parents=True, exist_ok=True)
            write_records(rescued, self.seen.records)
            return (
                f" What was known, {len(self.seen.records)} points, is in {rescued}: "
                "`avagrad study import` makes a study of it."
            )
        return ""

    def _progress(self, now: Plan) -> Progress:
        total = max(now.at_most * len(self.seeds), len(self._records()))
        done = len(self._records())
        times = [record.seconds for record in self._records() if record.seconds is not None]
        busy = max(1, len(self.seen.held))
        left = sum(times) / len(times) * (total - done) / busy if times else None
        best = self._best(now.pick)
        at, value = (now.pick, best.value) if best else (None, None)
        return Progress(done, total, len(self.seen.held), now.stage, at, value, left)

    def _best(self, cell: Cell | None) -> Best | None:
        if cell is None:
            return None
        values = tuple(record.value for record in self._records() if record.point.cell == cell)
        return Best(*cell, sum(values) / len(values), values) if values and all(map(math.isfinite, values)) else None

    def _result(self, now: Plan) -> Result:
        best = self._best(now.pick)
        known = self._known()
        found: Separability | Verdict | None = None
        if best is not None and self.space.lr is not None and self.space.eps is not None:
            if self.method == "grid" and min(self.space.shape) > 1:
                found = separability(self.space, known, start=self.start, margin=self.margin)
            else:
                found = Verdict(now.confirmed, now.rings, verdict(now))
        keys = dict.fromkeys(Point(*cell, seed).key for cell in self.space.cells() for seed in self.seeds)
        failed = {key: self._failures(key)[-1] for key in keys if self._has_failed(key)}
        # The study may hold more than this search has asked for.
        asked = set(replay(self.method, self.space, known, start=self.start, margin=self.margin).order)
        trials = tuple(record for record in self._records() if record.point.cell in asked)
        new = sum(record.point.key not in self.there for record in trials)
        return Result(best, trials, found, failed, now.path, self._at_ends(now.pick), new, now.stage)

    def _at_ends(self, cell: Cell | None) -> tuple[str, ...]:
        """Return the axes at an end of which the pick is: it may be better still beyond."""
        axes = (self.space.lr, self.space.eps)
        ends = [(line, line.values[0], line.values[-1]) for line in axes if line is not None and len(line) > 2]
        if cell is None:
            return ()
        return tuple(line.name for line, low, high in ends if getattr(cell, line.name) in (low, high))


def _line_on_a_terminal() -> Callable[[Progress], object]:
    return _Line() if sys.stderr.isatty() else lambda _: None


class _Line:
    """Shows progress in one line of a terminal."""

    def __init__(self) -> None:
        self.width = 0

    def __call__(self, progress: Progress) -> None:
        text = progress.told()
        sys.stderr.write(f"\r{text.ljust(self.width)}")
        sys.stderr.flush()
        self.width = len(text)

    def done(self) -> None:
        if self.width:
            sys.stderr.write("\n")
