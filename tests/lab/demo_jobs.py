"""Jobs for the tests of the demonstration: quick ones, and some that wait, fail or die."""

import os
import signal
import sys
import time
from pathlib import Path

from avagrad.lab.config import configure
from avagrad.lab.demo import run_synthetic, search, train_grid, train_one
from avagrad.lab.folder import RunFolder
from avagrad.lab.tasks import synthetic as toy
from avagrad.lab.worker_pool import Job, OnProgress, run_jobs
from avagrad.tune.space import Point

SETTINGS = toy.Settings(steps=20, replicas=2, compile=False)


def wait_for_go(out: Path, on_progress: OnProgress) -> None:
    """Hold the folder until there is a file ``go`` beside it."""
    with RunFolder.claim(out, {}, {}, resume=True) as folder:
        while not (out.parent / "go").exists():
            time.sleep(0.02)
        folder.write_result({"status": "finished"})


def fail(out: Path, on_progress: OnProgress, dies: bool) -> None:
    """Fail, or die, unless there is a file ``go`` beside the folder."""
    if not (out.parent / "go").exists():
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("there is no go")
    out.mkdir()
    RunFolder(out).write_result({"status": "finished"})


def waiting() -> Job:
    return Job("waiting", 2.0, wait_for_go, {})


def training(name: str = "runs/digits/sgd-0", optimizer: str = "sgd") -> Job:
    return Job(name, 1.0, train_one, {"config": configure("digits", optimizer, epochs=1)})


def tiny_jobs() -> list[Job]:
    """One of each kind, as small as can be."""
    adam = configure("digits", "adam", epochs=1)
    points = [Point(lr, eps, 0) for lr in (0.1, 1.0) for eps in (0.1, 1.0)]
    return [
        Job("synthetic", 1.0, run_synthetic, {"runs": [SETTINGS], "methods": ("adam", "delayed-adam")}),
        Job("maps/adam", 3.0, train_grid, {"config": adam, "points": points}),
        Job("search/adam", 2.0, search, {"config": adam, "lr": "0.01,0.1,1", "eps": "0.1,1"}),
        training(),
    ]


if __name__ == "__main__":  # to be killed
    import demo_jobs  # under its own name, so that a worker finds the functions

    run_jobs([demo_jobs.training(), demo_jobs.waiting()], sys.argv[1])
