"""What the tests of training runs share: a small task, a signal at a step, and what two runs must agree on."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from avagrad.lab.folder import read_metrics
from avagrad.lab.run import Callback

SMALL_CHARS = {"batch_size": 8, "bptt": 16, "embedding": 12, "hidden": 16, "layers": 2, "weight_drop": 0.2}
SMALL_CHARS |= {"dropout_outside": 0.1, "dropout_between": 0.1, "dropout_embedding": 0.1}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A short text in which the next letter can be learnt."""
    path = tmp_path / "text.txt"
    rng = random.Random(0)
    path.write_text(" ".join(rng.choice(["the", "cat", "sat", "on", "mat", "dog"]) for _ in range(1500)))
    return str(path)


def timeless(value: Any) -> Any:
    """Everything but what a clock says."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def left_behind(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    result = json.loads((folder / "result.json").read_text())
    return timeless(result), timeless(read_metrics(folder)), torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same(one: Path, other: Path) -> None:
    """Results, metrics, weights and moments are equal to the bit."""
    (result, metrics, state), (result_, metrics_, state_) = left_behind(one), left_behind(other)
    assert result == result_
    assert metrics == metrics_
    assert state["step"] == state_["step"]
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, state_["model"][name]), name
    for key, entry in state["optimizer"]["state"].items():
        for name, value in entry.items():
            there = state_["optimizer"]["state"][key][name]
            assert torch.equal(value, there) if isinstance(value, torch.Tensor) else value == there, (key, name)
    assert torch.equal(state["generators"]["noise"], state_["generators"]["noise"])
    assert torch.equal(state["generators"]["torch"], state_["generators"]["torch"])


class StopAt(Callback):
    """Sends this process a signal after some steps."""

    def __init__(self, *steps: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.steps, self.number = set(steps), number

    def on_step(self, done: int) -> None:
        if done in self.steps:
            self.steps.remove(done)
            os.kill(os.getpid(), self.number)
