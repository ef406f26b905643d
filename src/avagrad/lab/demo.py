"""The demo: the paper's experiments at a small scale, on data that come with the packages.

:func:`jobs` lists the jobs; :func:`avagrad.lab.worker_pool.run_jobs` runs them in a few processes.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from avagrad.lab.config import Config, configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.folder import RunFolder
from avagrad.lab.methods import METHODS
from avagrad.lab.run import Callback
from avagrad.lab.tasks import synthetic as toy
from avagrad.lab.train import train
from avagrad.lab.worker_pool import Job, OnProgress
from avagrad.tune.space import Point, Space, axis

_REPORTS_EVERY = 0.2  # seconds


def train_one(out: Path, on_progress: OnProgress, config: Config) -> None:
    """Train one model."""
    train(config, out, resume=True, callback=_Progress(on_progress))


def train_grid(out: Path, on_progress: OnProgress, config: Config, points: Sequence[Point]) -> None:
    """Train a model at each point of a grid, all as one computation."""
    train_ensemble(config, points, out, resume=True, callback=_Progress(on_progress))


def search(out: Path, on_progress: OnProgress, config: Config, lr: str = "paper", eps: str = "paper") -> None:
    """Search over lr and eps, each stage as one computation; write ``result.json``, which a study does not have."""
    from avagrad.lab.sweep import sweep

    options: dict[str, Any] = {"lr": axis(lr, "lr"), "eps": axis(eps, "eps"), "engine": "ensemble"}
    found = sweep(config, folder=out, watcher=lambda now: on_progress(now.done / now.total), **options)
    if found.failed:
        raise RuntimeError("; ".join(f"{key}: {why}" for key, why in found.failed.items()))
    RunFolder(out).write_result({"status": "finished", "trials": len(found.trials), "summary": found.summary()})


def run_synthetic(out: Path, on_progress: OnProgress, runs: Sequence[toy.Settings], methods: Sequence[str]) -> None:
    """Run the synthetic problem with each of the settings, one after the other."""

    def one(settings: toy.Settings, methods: Sequence[str]) -> dict[str, toy.Curve]:
        done = runs.index(settings)
        return toy.run(settings, methods, lambda step: on_progress((done + step / settings.steps) / len(runs)))

    toy.run_into(out, runs, methods, resume=True, run=one)


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
_RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "digits": (0.7, {}),
    "chars": (2.0, {"epochs": 1, "task_options": _SMALL_CHARS}),
}
_SEEDS = (0, 1)


def jobs() -> list[Job]:
    """Return all jobs of the demo.

    >>> found = jobs()
    >>> len(found), [job.name for job in found[:6]]
    (49, ['synthetic', 'maps/adam', 'maps/avagrad', 'maps/avastep', 'search/avagrad', 'runs/digits/sgd-0'])
    """
    points = [Point(*cell, 0) for cell in Space(axis("paper", "lr"), axis("paper", "eps")).cells()]
    starts = [toy.Settings(w1=w1, **_TOY) for w1 in (0.5, 0.0)]  # type: ignore[arg-type]
    found = [Job("synthetic", 45.0, run_synthetic, {"runs": starts, "methods": _TOY_METHODS})]
    for name, (method, options) in _MAPS.items():
        config = configure("digits", method, optimizer_options=options)
        found.append(Job(f"maps/{name}", 35.0, train_grid, {"config": config, "points": points}))
    found.append(Job("search/avagrad", 7.0, search, {"config": configure("digits", "avagrad")}))
    for task, (cost, settings) in _RUNS.items():
        for method in METHODS:
            for seed in _SEEDS:
                config = configure(task, method, seed=seed, **settings)
                found.append(Job(f"runs/{task}/{method}-{seed}", cost, train_one, {"config": config}))
    return found
