"""The loop of a search: queue the next points, wait for workers, read the results, until it is done."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT
from typing import Any

from avagrad.stopping import Stopped, interrupt_on_sigterm
from avagrad.tune.leases import Watch
from avagrad.tune.methods import is_best_at_end
from avagrad.tune.optuna_trials import DIED, LOST, Snapshot, faults
from avagrad.tune.records import Record, write_records
from avagrad.tune.result import Best, Progress, Result, Verdict
from avagrad.tune.scores import Score, mean, scores
from avagrad.tune.search import Plan, plan, replay
from avagrad.tune.separability import Separability, separability, verdict
from avagrad.tune.space import NAMES, Cell, Point, Space, shown
from avagrad.tune.storage import StorageError, described, is_url
from avagrad.tune.study import Study
from avagrad.tune.workers.base import WorkerError, WorkerPool


class TuningError(RuntimeError):
    """A search cannot continue; the message says why, and that finished points are kept."""


class SearchLoop:
    """A running search: made by :func:`avagrad.tune.tune`, run once."""

    def __init__(
        self,
        study: Study,
        pool: WorkerPool,
        space: Space,
        start: Cell,
        method: str,
        *,
        seeds: tuple[int, ...],
        retries: int,
        margin: float,
        lease: float,
        extend: bool,
    ) -> None:
        self.study, self.pool, self.space, self.start, self.method = study, pool, space, start, method
        self.seeds, self.retries, self.margin, self.extend = seeds, retries, margin, extend
        self.watch = Watch(lease)
        self.began = time.monotonic()
        self.snapshot = Snapshot()
        self.before: dict[str, int] = {}  # failures of earlier calls, which no longer count

    def run(self, watcher: Callable[[Progress], object]) -> Result:
        """Run the search to its end."""
        try:
            with interrupt_on_sigterm() as stop:
                return self._run(watcher)
        except KeyboardInterrupt as error:
            self.study.patience = 0.0
            with contextlib.suppress(StorageError):
                self.snapshot = self.study.snapshot()
            # A training in this process catches SIGTERM itself.
            number = stop.signal or (error.exit_code - 128 if isinstance(error, Stopped) else SIGINT)
            raise Stopped(f"stopped: {self._kept()}; run it again to resume.", number=number) from None
        except (StorageError, WorkerError) as error:  # a worker may be the first to notice that the storage is gone
            kind = WorkerError if isinstance(error, WorkerError) else StorageError
            raise kind(f"{error}{self._rescued()}") from error.__cause__
        finally:
            self.study.close()
            watcher_done = getattr(watcher, "done", None)
            if watcher_done is not None:
                watcher_done()

    def _run(self, watcher: Callable[[Progress], object]) -> Result:
        self.snapshot = self.study.snapshot()
        self.before = {key: len(reasons) for key, reasons in self.snapshot.failures.items()}
        self.finished_before = {record.point.key for record in self.snapshot.records}
        self.study.note_search(self._facts())
        now = self._plan()
        self.study.withdraw({point.key for point in self._wanted(now)})
        try:
            if not now.done:
                self.pool.start()
            pause = 0.05
            while not now.done:
                self.pool.check(self.snapshot)
                self.study.reclaim(self.snapshot, self.watch)
                self._raise_if_nothing_works()
                queued = self.study.queue(self._wanted(now), self.snapshot)
                watcher(self._progress(now))
                self.pool.wait(pause)
                before = self.snapshot.records
                self.snapshot = self.study.snapshot()
                now = self._plan()
                pause = 0.05 if queued or self.snapshot.records != before else min(1.5 * pause, 0.5)
            self._raise_if_nothing_works()
            self.study.withdraw()
            self.study.note_search(self._facts())
            watcher(self._progress(now))
        finally:
            self.pool.stop()
        return self._result(now)

    # --- known scores, and the next points ---

    def _records(self, seeds: tuple[int, ...]) -> list[Record]:
        return [record for record in self.snapshot.records if record.seed in seeds]

    def _known(self, seeds: tuple[int, ...]) -> dict[Cell, Score]:
        """Return the scores of cells that have all of these seeds, including those that failed permanently.

        The study may have more cells than the search has: its axes may have been others before.
        """
        records = self._records(seeds)
        done = {record.point.key for record in records}
        failed = [Point.from_key(key) for key in self.snapshot.failures if key not in done and self._has_failed(key)]
        records += [Record(*point, value=self.study.worst) for point in failed if point.seed in seeds]
        return scores(records, direction=self.study.direction, seeds=len(seeds))

    def _search(self) -> dict[str, Any]:
        """Return the arguments of the search, with the scores known now."""
        known = {"known": self._known(self.seeds), "by_first_seed": self._known(self.seeds[:1])}
        options = {"start": self.start, "margin": self.margin, "extend": self.extend}
        return {"method": self.method, "space": self.space} | known | options

    def _facts(self) -> dict[str, Any]:
        """Return what a search is, as JSON can hold it."""
        axes = {name: list(line.values) for name in NAMES if (line := getattr(self.space, name)) is not None}
        options = {"margin": self.margin, "extend": self.extend, "seeds": list(self.seeds)}
        failed = [key for key in self.snapshot.failures if self._has_failed(key)]
        facts = {"method": self.method, **axes, "start": list(self.start), **options}
        return facts | ({"failed": failed} if failed else {})

    def _plan(self) -> Plan:
        return plan(**self._search())

    def _wanted(self, now: Plan) -> list[Point]:
        done = {record.point.key for record in self.snapshot.records}
        points = (Point(*cell, seed) for cell in now.cells for seed in self.seeds[: 1 if now.coarse else None])
        return [point for point in points if point.key not in done and not self._has_failed(point.key)]

    # --- failures ---

    def _failures(self, key: str) -> list[str]:
        """Return the reasons of a point's failures in this call that are, or may be, its own fault."""
        return faults(self.snapshot.failures.get(key, ())[self.before.get(key, 0) :])

    def _has_failed(self, key: str) -> bool:
        """Return whether a point is given up. Deaths of workers count less, since they are rarely the point's fault."""
        reasons = self._failures(key)
        deaths = sum(reason.startswith((DIED, LOST)) for reason in reasons)
        return len(reasons) - deaths > self.retries or deaths > 3 * (self.retries + 1)

    def _raise_if_nothing_works(self) -> None:
        """Give up if no point has ever given a result: then the objective is wrong, not the point."""
        if self.snapshot.records or any(not self._failures(key) for key, _ in self.snapshot.running.values()):
            return  # one may still give a result
        for key in self.snapshot.failures:
            if self._has_failed(key):
                reasons = self._failures(key)
                raise TuningError(
                    f"{reasons[-1]}: at {key}, {len(reasons)} of {len(reasons)} times, and no point has given a result "
                    f"yet; {self._kept()}."
                )

    # --- messages, progress and the result ---

    def _kept(self) -> str:
        done = len(self.snapshot.records)
        points = "point is" if done == 1 else "points are"
        return f"{done} finished {points} kept in {described(self.study.location)}"

    def _rescued(self) -> str:
        """Save the known records next to a storage file that is gone."""
        if is_url(self.study.location) or not self.snapshot.records or Path(self.study.location).exists():
            return ""
        rescued = Path(f"{self.study.location}.rescued.jsonl")
        with contextlib.suppress(OSError):
            rescued.parent.mkdir(parents=True, exist_ok=True)
            write_records(rescued, self.snapshot.records)
            return (
                f" The {len(self.snapshot.records)} known points are saved in {rescued}: "
                "`avagrad study import` makes a study of them."
            )
        return ""

    def _progress(self, now: Plan) -> Progress:
        records = [record for record in self._records(self.seeds) if record.point.cell in now.asked]
        done = len(records)
        total = done if now.done else max(now.at_most * len(self.seeds), done)  # coarse cells may need one seed only
        times = [record.seconds for record in records if record.seconds is not None]
        busy = max(1, len(self.snapshot.running))
        left = sum(times) / len(times) * (total - done) / busy if times else None
        best = self._best(now.pick)
        at, value = (now.pick, best.value) if best else (None, None)
        return Progress(done, total, len(self.snapshot.running), now.stage, at, value, left)

    def _best(self, cell: Cell | None) -> Best | None:
        if cell is None:
            return None
        found = {record.seed: record.value for record in self._records(self.seeds) if record.point.cell == cell}
        values = tuple(found[seed] for seed in self.seeds if seed in found)
        return Best(*cell, mean(values), values) if values and all(map(math.isfinite, values)) else None

    def _result(self, now: Plan) -> Result:
        best = self._best(now.pick)
        found: Separability | Verdict | None = None
        if best is not None and self.space.lr is not None and self.space.eps is not None:
            if self.method == "grid" and min(self.space.shape) > 1:
                known = {cell: score for cell, score in self._known(self.seeds).items() if cell in self.space}
                found = separability(self.space, known, start=self.start, margin=self.margin)
            else:
                found = Verdict(now.confirmed, now.rings, verdict(now))
        keys = dict.fromkeys(Point(*cell, seed).key for cell in now.space.cells() for seed in self.seeds)
        # The study may have more points than this search has evaluated.
        evaluated = set(replay(**self._search()).order)
        trials = tuple(record for record in self._records(self.seeds) if record.point.cell in evaluated)
        return Result(
            best,
            trials,
            found,
            failed={key: self._failures(key)[-1] for key in keys if self._has_failed(key)},
            path=now.path,
            at_ends=self._at_ends(now),
            extended=_extended(self.space, now.space),
            new=sum(record.point.key not in self.finished_before for record in trials),
            stage=now.stage,
        )

    def _at_ends(self, now: Plan) -> tuple[str, ...]:
        """Return the axes that have the pick at an end, beyond which values may be better still."""
        if now.pick is None:
            return ()
        long = [line.name for line in now.space.axes if len(line) > 2]
        known = self._known(self.seeds)
        return tuple(name for name in long if is_best_at_end(now.space, name, now.pick, known, self.margin))


def _extended(before: Space, after: Space) -> tuple[str, ...]:
    """Return how far each axis was extended."""
    found = []
    for old, new in zip(before.axes, after.axes, strict=True):
        found += [f"{new.name} to {shown(end)}" for end in (new.values[0], new.values[-1]) if end not in old.values]
    return tuple(found)
