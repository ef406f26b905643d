"""NaN, infinities, and sizes beyond a block: every path does what the loop does."""

import itertools
import math
from typing import Any

import pytest
import torch
from problems import DELAYED, EVERY_PATH, FUSED_PATHS, optimizer_class, take_fused_path
from torch import Tensor

NAN, INF = math.nan, math.inf
OTHERS = ("foreach", *FUSED_PATHS)


def run(
    name: str, w: Tensor, grads: list[Tensor], path: str, device: str = "cpu", **options: Any
) -> tuple[Any, torch.nn.Parameter]:
    p = torch.nn.Parameter(w.to(device, copy=True))
    opt = optimizer_class(name)([p], **options, **EVERY_PATH["fused" if path in FUSED_PATHS else path])
    for g in grads:
        p.grad = g.to(device, copy=True)
        opt.step()
    return opt, p


def assert_as_the_loop(name: str, w: Tensor, grads: list[Tensor], path: str, device: str, **options: Any) -> None:
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}
    if w.dtype == torch.float64:
        close |= {"rtol": 1e-9, "atol": 1e-12}
    if w.dtype == torch.bfloat16:
        close |= {"rtol": 2e-2, "atol": 1e-2}
    (one, p), (two, q) = (run(name, w, grads, way, device, **options) for way in (path, "loop"))
    torch.testing.assert_close(p, q, **close)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(one.state[p][key], two.state[q][key], **close)


@pytest.mark.parametrize("path", OTHERS)
def test_a_gamma_that_is_nan_reaches_coordinates_without_a_gradient(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = take_fused_path(path, monkeypatch) if path in FUSED_PATHS else "cpu"
    grads = [torch.tensor(g) for g in ([1.0, 1.0, 0.0], [NAN, 1.0, 0.0], [1.0, 1.0, 0.0])]
    assert_as_the_loop("AvaGrad", torch.ones(3), grads, path, device, active_only=True)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_an_infinite_gradient_that_the_clamp_bounds(beta1: float) -> None:
    grads = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([INF, 1.0])]
    for way in ("foreach", "native"):
        options: dict[str, Any] = {"betas": (beta1, 0.999), "clip_update": 1.0, "lr": 0.1}
        assert_as_the_loop("AvaGrad", torch.ones(2), grads, way, "cpu", **options)
        _, p = run("AvaGrad", torch.ones(2), grads, way, **options)
        assert p.isfinite().all()


def test_diagnostics_with_an_infinite_second_moment() -> None:
    opt, p = run("DelayedAdam", torch.ones(3), [torch.ones(3)] * 2, "loop", lr=0.1)
    opt.state[p]["exp_avg_sq"][0] = INF
    opt.refresh()
    found = opt.diagnostics()
    assert found["rate_max"] == pytest.approx(0.1, rel=0.01)
    assert found["rate_min"] == pytest.approx(0.1, rel=0.01)


@pytest.fixture(params=OTHERS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(path: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return take_fused_path(path, monkeypatch) if path in FUSED_PATHS else "cpu"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at infinities
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", DELAYED)
def test_a_bad_gradient_of_a_coordinate_that_had_none(name: str, bad: float, path: str, device: str) -> None:
    if path == "foreach" and math.isinf(bad) and name != "AvaStep":
        bad = NAN  # lerp makes a NaN of an infinite moment, as in torch's foreach Adam
    options = {} if name == "AvaStep" else {"active_only": True}
    for values in ([0.0, bad], [bad, 1.0], [0.0, 0.0, bad]):
        grads = [torch.tensor([value, 1.0]) for value in values]
        assert_as_the_loop(name, torch.ones(2), grads, path, device, lr=0.1, **options)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", DELAYED)
def test_an_infinite_weight_without_gradients_stays(name: str, decay: float, path: str, device: str) -> None:
    options: dict[str, Any] = {"active_only": True}
    if name == "AvaStep":
        options = {"decoupled_weight_decay": False}
    grads = [torch.tensor([0.0, 1.0])] * 3
    w = torch.tensor([-INF, 1.0])
    assert_as_the_loop(name, w, grads, path, device, lr=0.1, weight_decay=decay, **options)
    _, p = run(name, w, grads, path, device, lr=0.1, weight_decay=decay, **options)
    assert p[0] == -INF
    assert p[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DELAYED)
def test_tensors_of_many_chunks_and_blocks(name: str, dtype: torch.dtype) -> None:
    """Chunks of native.c have 512 coordinates, vectors 4 to 16, blocks 16384: whole ones, and tails of each."""
    rng = torch.Generator().manual_seed(0)
    choices = [527, 16384 + 1101], [0.0, 0.1], [False, True], [False, True]
    for size, decay, first, second in itertools.product(*choices):
        w = torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)
        grads = [torch.randn(size, generator=rng, dtype=torch.float64).to(dtype) for _ in range(3)]
        for g in grads:
            g[: size // 3] = 0
        options: dict[str, Any] = {"active_only": first, "clip_update": 0.7 if second else None}
        if name == "AvaStep":
            options = {"decoupled_weight_decay": first, "clip_moment": 3.0 if second else None}
        if name != "DelayedAdam":
            options["norm"] = 1 + (first == second)
        assert_as_the_loop(name, w, grads, "native", "cpu", lr=0.01, eps=1e-3, weight_decay=decay, **options)


@pytest.mark.parametrize("way", FUSED_PATHS)
@pytest.mark.parametrize("wide", [torch.float16, torch.float64], ids=str)
def test_a_gradient_scale_of_another_dtype(wide: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = take_fused_path(way, monkeypatch)
    plain, scaled = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    optimizers = [optimizer_class("AvaStep")([p], lr=0.1, fused=True) for p in (plain, scaled)]
    optimizers[1].grad_scale = torch.tensor(8.0, dtype=wide, device=device)
    optimizers[1].found_inf = torch.tensor(0.0, dtype=wide, device=device)
    for t in range(3):
        plain.grad = torch.tensor([1.0, 2.0 + t, 3.0 - t], device=device)
        scaled.grad = 8 * plain.grad
        for opt in optimizers:
            opt.step()
    torch.testing.assert_close(plain, scaled)
    assert (plain < 1).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at infinities
@pytest.mark.parametrize("way", ["loop", *OTHERS])
def test_a_weight_that_overflows_stays_infinite_with_kahan(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = take_fused_path(way, monkeypatch) if way in FUSED_PATHS else "cpu"
    w = torch.full((2,), 65504.0, dtype=torch.float16)
    grads = [torch.tensor([-1.0, 0.0], dtype=torch.float16)] * 4
    _, p = run("DelayedAdam", w, grads, way, device, lr=100.0, rounding="kahan", eps=1.0)
    assert p.tolist() == [INF, 65504.0]
