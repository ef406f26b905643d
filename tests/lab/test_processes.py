"""Several processes that share a run: ImageNet's task under torchrun, with gloo, on a tiny generated folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from short_runs import assert_same

pytestmark = pytest.mark.slow
Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import functools, json, os, sys
import torch
from short_runs import StopAt
from avagrad.lab.config import configure
from avagrad.lab.models.resnet import ResNet
from avagrad.lab.tasks import imagenet
from avagrad.lab.train import Stopped, train

out, stops, data, optimizer = sys.argv[1:5]
imagenet._MODELS["resnet50"] = functools.partial(ResNet, layers=(1, 1, 1, 1), width=8)
options = {"size": 32, "batch_size": 8, "workers": 0}
settings = {"epochs": 3, "milestones": (1,), "lr": 0.1, "eps": 0.1, "threads": 1}
config = configure("imagenet", optimizer, data=data, task_options=options, **settings)
# The second process is told to stop: all of them must.
callback = StopAt(*map(int, stops.split(","))) if stops else None
if callback is not None:
    from avagrad.lab import run
    if os.environ["RANK"] == "1":
        step = run.Callback.on_step
        run.Callback.on_step = lambda self, done: callback.on_step(done)
try:
    train(config, out, resume=True)
except Stopped:
    print("stopped")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root, noise = tmp_path / "images", numpy.random.default_rng(0)
    for part, count in (("train", 13), ("val", 5)):
        for label in ("ant", "bee"):
            (root / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = noise.integers(0, 128, (40 + i, 50, 3)) + (100 if label == "bee" else 0)
                Image.fromarray(pixels.astype(numpy.uint8)).save(root / part / label / f"{i}.png")
    return root


def torchrun(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "lab")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_shared_run_stops_together_and_goes_on_to_the_same_numbers(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun("script.py", "whole", "", str(folder), "avagrad", cwd=tmp_path)
    assert torchrun("script.py", "parts", "4", str(folder), "avagrad", cwd=tmp_path).count("stopped") == 2
    assert not (tmp_path / "parts" / "result.json").exists()
    torchrun("script.py", "parts", "", str(folder), "avagrad", cwd=tmp_path)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["steps"] == 9


def test_the_trainers_command_runs_under_torchrun(tmp_path: Path, folder: Path) -> None:
    """With the real ResNet-50, for one epoch; the first process alone writes and speaks."""
    run = ["-m", "avagrad.lab.train", "imagenet", "--data", str(folder), "--optimizer", "sgd", "--epochs", "1"]
    run += ["--lr", "0.01", "--threads", "1", "--out", "run"]
    run += ["--option", "size=32", "--option", "batch_size=12", "--option", "workers=0"]
    told = torchrun(*run, cwd=tmp_path)
    assert told.count("test error") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"], result["parameters"]) == ("finished", 2, 23_512_130)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_mistake_is_said_once(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    run = ["-m", "avagrad.lab.train", "imagenet", "--data", str(folder), "--optimizer", "sgd", "--lr", "1"]
    with pytest.raises(AssertionError, match=r"already contains mine\.txt"):
        torchrun(*run, "--out", "run", "--option", "batch_size=8", "--option", "workers=0", cwd=tmp_path)
    assert os.listdir(tmp_path / "run") == ["mine.txt"]
