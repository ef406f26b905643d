"""The trainer on a GPU: the graph computes what single operations do, and goes on to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import SMALL_CHARS, StopAt, assert_same, left_behind, text, timeless

from avagrad.lab.config import Config, configure
from avagrad.lab.folder import read_metrics
from avagrad.lab.methods import METHODS
from avagrad.lab.train import Stopped, train

pytestmark = pytest.mark.gpu


__all__ = ["text"]  # a fixture


def chars(text: str, optimizer: str = "avagrad", **settings: Any) -> Config:
    defaults: dict[str, Any] = {"epochs": 2, "precision": "float32", "deterministic": True}
    return configure("chars", optimizer, data=text, device="cuda", task_options=SMALL_CHARS, **defaults | settings)


@pytest.mark.parametrize("optimizer", METHODS)
def test_a_graph_computes_what_single_operations_do(tmp_path: Path, text: str, optimizer: str) -> None:
    """For every method; the last piece of the text is shorter, and taken beside the graph."""
    for graph in (False, True):
        config = chars(text, optimizer, graph=graph, milestones=(1,), factor=0.1)
        assert train(config, tmp_path / str(graph))["status"] == "finished"
    one, other = (read_metrics(tmp_path / name) for name in ("False", "True"))
    assert [row["lr"] for row in one] == [row["lr"] for row in other]
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["error"] == pytest.approx(b["error"], rel=1e-4)
    weights = [left_behind(tmp_path / name)[2]["model"] for name in ("False", "True")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("task", ["chars", "digits"])
def test_deterministic_runs_and_resumes_are_equal_to_the_bit(tmp_path: Path, text: str, task: str, graph: bool) -> None:
    if task == "chars":
        config = chars(text, graph=graph)
    else:
        pytest.importorskip("sklearn")
        config = configure("digits", epochs=3, device="cuda", graph=graph, deterministic=True)
    for name in ("one", "same"):
        train(config, tmp_path / name)
    assert_same(tmp_path / "one", tmp_path / "same")
    callback = StopAt(3, 31)
    while True:
        try:
            train(config, tmp_path / "parts", resume=True, callback=callback)
            break
        except Stopped:
            pass
    assert not callback.steps
    assert_same(tmp_path / "one", tmp_path / "parts")


@pytest.mark.parametrize("graph", [False, True])
def test_divergence_is_seen_at_its_step(tmp_path: Path, graph: bool) -> None:
    pytest.importorskip("sklearn")
    config = configure("digits", "sgd", lr=1e30, epochs=8, device="cuda", graph=graph)
    result = train(config, tmp_path / "run")
    assert (result["status"], result["diverged_at"]) == ("diverged", 2)


def test_a_gpu_learns_the_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    config = configure("digits", device="cuda", precision="bf16")
    assert config.graph
    assert train(config, tmp_path / "run")["test"]["error"] <= 4


def test_compiled_models_learn_the_same(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    results = []
    for compiled in (False, True):
        config = configure("digits", device="cuda", epochs=3, compile=compiled, deterministic=True)
        results.append(timeless(train(config, tmp_path / str(compiled))))
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-2)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # float32 is what the test wants
@pytest.mark.parametrize("compiled", [False, True])
def test_the_transformer_in_a_graph_is_the_one_without(tmp_path: Path, text: str, compiled: bool) -> None:
    sizes = {"batch_size": 8, "context": 16, "layers": 2, "heads": 2, "width": 32, "steps": 20, "eval_tokens": 256}
    results = []
    for graph in (False, True):
        common: dict[str, Any] = {"data": text, "device": "cuda", "task_options": sizes, "warmup": 4, "epochs": 2}
        config = configure("gpt", "avastep", graph=graph, compile=compiled, precision="float32", **common)
        results.append(train(config, tmp_path / str(graph)))
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-3)
    assert results[0]["test"]["error"] == pytest.approx(results[1]["test"]["error"], rel=1e-3)
