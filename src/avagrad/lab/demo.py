"""The demo: the paper's experiments at a small scale, on data that come with the packages.

:func:`jobs` lists the jobs; :func:`avagrad.lab.worker_pool.run_jobs` runs them in a few processes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avagrad.lab.config import Config, configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.folder import RunFolder
from avagrad.lab.methods import METHODS
from avagrad.lab.run import Callback
from avagrad.lab.synthetic_folder import run_into
from avagrad.lab.tasks import synthetic as toy
from avagrad.lab.train import train
from avagrad.lab.worker_pool import Job, OnProgress
from avagrad.tune.space import Point, Space, axis

__all__ = ["Grid", "Search", "Toy", "Training", "jobs"]

_REPORTS_EVERY = 0.2  # seconds


@dataclass(frozen=True, kw_only=True)
class Training(Job):
    """One training run.

    >>> Training(name="runs/a", cost=1.0, config=configure("digits")).config.optimizer
    'avagrad'
    """

    config: Config

    def run(self, out: Path, on_progress: OnProgress) -> None:
        """Train."""
        train(self.config, out, resume=True, callback=_Progress(on_progress))


@dataclass(frozen=True, kw_only=True)
class Grid(Job):
    """A training run at each point of a grid, all as one computation.

    >>> Grid(name="maps/a", cost=1.0, config=configure("digits"), points=(Point(0.1, 0.1, 0),)).points[0].key
    'lr=0.1 eps=0.1 seed=0'
    """

    config: Config
    points: tuple[Point, ...]

    def run(self, out: Path, on_progress: OnProgress) -> None:
        """Train all points."""
        train_ensemble(self.config, self.points, out, resume=True, callback=_Progress(on_progress))


@dataclass(frozen=True, kw_only=True)
class Search(Job):
    """A separable search over lr and eps, each of its stages as one computation.

    >>> Search(name="search/a", cost=1.0, config=configure("digits", "adam")).lr
    'paper'
    """

    config: Config
    lr: str = "paper"
    eps: str = "paper"

    def run(self, out: Path, on_progress: OnProgress) -> None:
        """Search, and write ``result.json``: a study itself does not record that it is finished."""
        from avagrad.lab.sweep import sweep

        options: dict[str, Any] = {"lr": axis(self.lr, "lr"), "eps": axis(self.eps, "eps"), "engine": "ensemble"}
        found = sweep(self.config, folder=out, watcher=lambda now: on_progress(now.done / now.total), **options)
        if found.failed:
            raise RuntimeError("; ".join(f"{key}: {why}" for key, why in found.failed.items()))
        RunFolder(out).write_result({"status": "finished", "trials": len(found.trials), "summary": found.summary()})


@dataclass(frozen=True, kw_only=True)
class Toy(Job):
    """The synthetic problem, from several starts.

    >>> Toy(name="synthetic", cost=1.0, runs=(toy.Settings(w1=0.0),), methods=("adam",)).runs[0].w1
    0.0
    """

    runs: tuple[toy.Settings, ...]
    methods: tuple[str, ...]

    def run(self, out: Path, on_progress: OnProgress) -> None:
        """Run the settings one by one."""

        def one(settings: toy.Settings, methods: Sequence[str]) -> dict[str, toy.Curve]:
            done, total = self.runs.index(settings), len(self.runs)
            return toy.run(settings, methods, lambda _, step, steps: on_progress((done + step / steps) / total))

        run_into(out, self.runs, self.methods, resume=True, run=one)


class _Progress(Callback):
    """Reports the fraction of a run's steps that is done."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.on_progress, self.total, self.last = on_progress, 1, 0.0

    def on_start(self, config: Config, done: int, total: int) -> None:
        self.total = total
        self.on_step(done)

    def on_step(self, done: int) -> None:
        if time.monotonic() - self.last > _REPORTS_EVERY:
            self.last = time.monotonic()
            self.on_progress(done / self.total)


# The same total distance as in the paper, 10^6 steps of 1e-5, in a tenth of the steps; noisier, but with the same
# outcome. SGD is left out: with one weight AvaGrad is SGD.
_TOY = {"lr": 1e-4, "steps": 100_000, "replicas": 20}
_TOY_METHODS = ("adam", "amsgrad", "delayed-adam", "avagrad")
_MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("adam", {}),
    "avagrad": ("avagrad", {}),
    "avastep": ("avastep", {"decoupled_weight_decay": False}),  # to decay as the others do
}
# A smaller network for one epoch. The learning rates were tuned for the longer run of the preset, not for this one,
# but all methods learn with them.
_SMALL_CHARS = {"embedding": 64, "hidden": 64, "batch_size": 64, "bptt": 32}
_SEEDS = (0, 1)


def jobs() -> list[Job]:
    """Return all jobs of the demo.

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
