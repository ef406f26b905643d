"""Jobs for the tests of the demonstration: quick ones, and some that wait, fail or die."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from avagrad.lab.config import configure
from avagrad.lab.demo import Grid, Search, Toy, Training
from avagrad.lab.folder import RunFolder
from avagrad.lab.tasks import synthetic as toy
from avagrad.lab.worker_pool import Job, OnProgress, run_jobs
from avagrad.tune.space import Point

SETTINGS = toy.Settings(steps=20, replicas=2, compile=False)


@dataclass(frozen=True, kw_only=True)
class Waiting(Job):
    """Holds its folder until there is a file ``go`` beside it."""

    def run(self, out: Path, on_progress: OnProgress) -> None:
        with RunFolder.claim(out, {}, {}, resume=True) as folder:
            while not (out.parent / "go").exists():
                time.sleep(0.02)
            folder.write_result({"status": "finished"})


@dataclass(frozen=True, kw_only=True)
class Failing(Job):
    """Fails, or dies, unless there is a file ``go`` beside it."""

    dies: bool

    def run(self, out: Path, on_progress: OnProgress) -> None:
        if not (out.parent / "go").exists():
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("there is no go")
        out.mkdir()
        RunFolder(out).write_result({"status": "finished"})


def training(name: str = "runs/digits/sgd-0", optimizer: str = "sgd") -> Training:
    return Training(name=name, cost=1.0, config=configure("digits", optimizer, epochs=1))


def tiny_jobs() -> list[Job]:
    """One of each kind, as small as can be."""
    adam = configure("digits", "adam", epochs=1)
    points = tuple(Point(lr, eps, 0) for lr in (0.1, 1.0) for eps in (0.1, 1.0))
    return [
        Toy(name="synthetic", cost=1.0, runs=(SETTINGS,), methods=("adam", "delayed-adam")),
        Grid(name="maps/adam", cost=3.0, config=adam, points=points),
        Search(name="search/adam", cost=2.0, config=adam, lr="0.01,0.1,1", eps="0.1,1"),
        training(),
    ]  # fmt: skip


if __name__ == "__main__":  # to be killed
    import demo_jobs  # under its own name, so that a worker finds the classes

    run_jobs([demo_jobs.training(), demo_jobs.Waiting(name="waiting", cost=2.0)], sys.argv[1])
