"""Half-precision parameters: rounding that is right on average, or that keeps what it cuts off."""

import copy
import itertools
from typing import Any

import pytest
import torch
from problems import DELAYED, FUSED_PATHS, is_fused, optimizer_class, take_fused_path
from torch import Tensor

from avagrad import AvaGrad, DelayedAdam
from avagrad.optim.backends import loop
from avagrad.optim.rounding import random_bits, rounded_at_random, store

HALF = (torch.bfloat16, torch.float16)
PATHS = ("loop", "foreach", *FUSED_PATHS)
COMPILED = PATHS if torch.cuda.is_available() else PATHS[:-1]  # Triton's interpreter takes 50 ms a step
INF, NAN = float("inf"), float("nan")


def options_of(path: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Return the device and the arguments that lead to a path."""
    if path in FUSED_PATHS:
        return take_fused_path(path, monkeypatch), {"fused": True}
    return "cpu", {"foreach": path == "foreach"}


def test_random_bits_depend_on_each_of_their_four_sources() -> None:
    element = torch.arange(4096)
    drawn = [random_bits(*key, element) for key in itertools.product((0, 1, 2**32 - 1), (1, 2, 3), (0, 1))]
    for one, two in itertools.combinations(drawn, 2):
        assert (one != two).float().mean() > 0.99
    together = torch.stack(drawn)
    assert together.min() >= 0
    assert together.max() < 2**32
    for bit in range(32):
        share = ((together >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / together.numel() ** 0.5
    neighbours = torch.corrcoef(torch.stack([together[:, 1:].flatten(), together[:, :-1].flatten()]).double())[0, 1]
    assert neighbours.abs() < 5 / together.numel() ** 0.5
    assert torch.equal(random_bits(3, torch.tensor(7.0), 5, element), random_bits(3, 7, 5, element))


VALUES = [1.0 + 2**-9, -1.001, 3.14159, 1e-3, 123.456, 2.0**-14 * 1.3, 2.0**-15 * 1.1, -(2.0**-20), 2.0**-25]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("value", VALUES)
def test_stochastic_rounding_is_right_on_average(dtype: torch.dtype, value: float) -> None:
    n = 40_000
    x = torch.full((n,), value)
    got = rounded_at_random(x, dtype, random_bits(1, 2, 3, torch.arange(n))).double()
    exact = x[0].double().item()
    ends = torch.unique(got).tolist()
    assert len(ends) <= 2
    low, high = ends[0], ends[-1]
    assert low <= exact <= high
    nearest = x.to(dtype)[0].double().item()
    assert nearest in ends or low == high  # one of the two neighbours
    if low < high:
        up = (exact - low) / (high - low)
        five_sigma = 5 * (up * (1 - up) / n) ** 0.5
        assert abs((got == high).double().mean().item() - up) <= five_sigma + 2**-12


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_needs_no_rounding_is_left_as_it_is(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, INF, -INF, NAN, 2.0**-14, 65280.0])
    bits = torch.full((9,), 2**32 - 1)
    got = rounded_at_random(x, dtype, bits)
    torch.testing.assert_close(got.float(), x, rtol=0, atol=0, equal_nan=True)
    rest = torch.zeros(9, dtype=dtype)
    w = torch.zeros(9, dtype=dtype)
    store(w, x, rounding="kahan", compensation=rest)
    torch.testing.assert_close(w.float(), x, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rest, torch.zeros(9, dtype=dtype))


def run(
    path_options: tuple[str, dict[str, Any]],
    start: Tensor,
    grads: list[Tensor],
    name: str = "AvaGrad",
    **options: Any,
) -> tuple[Any, torch.nn.Parameter]:
    device, of_path = path_options
    w = torch.nn.Parameter(start.to(device, copy=True))
    opt = optimizer_class(name)([w], **options, **of_path)
    for g in grads:
        w.grad = torch.empty_like(w).copy_(g)
        opt.step()
    return opt, w


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_all_paths_round_alike(name: str, dtype: torch.dtype, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(150, 40, generator=rng).to(dtype).t()  # not contiguous: places are those in memory
    start = start * torch.logspace(-6, 0, 150).to(dtype)  # float16's small numbers, too
    grads = [torch.randn(40, 150, generator=rng).to(dtype) for _ in range(2)]
    ends = {}
    for path in PATHS:
        options: dict[str, Any] = {"rounding": rounding, "rounding_seed": 9, "weight_decay": 0.1, "lr": 0.003}
        opt, w = run(options_of(path, monkeypatch), start, grads, name, **options)
        rest = opt.state[w].get("compensation", torch.zeros_like(w))
        assert rest.dtype == dtype
        ends[path] = (w.detach().cpu().float(), rest.cpu().float())
        if path in FUSED_PATHS:
            assert is_fused(opt)
    for path in PATHS[1:]:
        # The last digits of float32 differ between paths, and now and then tip the balance.
        for mine, theirs in zip(ends["loop"], ends[path], strict=True):
            share = 0.998 if rounding == "stochastic" or mine is ends["loop"][0] else 0.9
            assert (mine == theirs).float().mean() > share, path
        torch.testing.assert_close(
            sum(ends["loop"]), sum(ends[path]), rtol=2**-7 if rounding == "stochastic" else 2**-15, atol=2**-24
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_training_in_half_precision_stalls_with_nearest_and_continues_with_the_others(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk of many steps, each a tenth of half a unit in the last place of the weights."""
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    steps, size = 600 if path in COMPILED else 60, unit / 20
    start, g = torch.full((400,), 2.0 - 2 * unit), torch.ones(400)
    want = 2.0 - 2 * unit - size * steps
    ends = {}
    for rounding in ("nearest", "stochastic", "kahan"):
        device, of_path = options_of(path, monkeypatch)
        w = torch.nn.Parameter(start.to(dtype).to(device))
        opt = DelayedAdam([w], lr=size * 2.0, eps=1.0, betas=(0.0, 0.5), rounding=rounding, **of_path)
        w.grad = g.to(dtype).to(device)
        for _ in range(steps + 1):
            opt.step()
        ends[rounding] = w.detach().cpu().double()
    assert torch.equal(ends["nearest"], start.to(dtype).double())  # it has not moved at all
    assert (ends["kahan"] - want).abs().max() <= unit
    walked = unit * (steps * 0.05 * 0.95) ** 0.5  # the standard deviation of one walk
    assert abs(ends["stochastic"].mean().item() - want) < 5 * walked / 400**0.5
    assert (ends["stochastic"] - want).abs().max() < 6 * walked


@pytest.mark.parametrize("path", COMPILED)
def test_a_quadratic_in_pure_bfloat16(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, weights and all: with nearest the distance stops shrinking, with the other two it does not."""
    device, of_path = options_of(path, monkeypatch)
    rng = torch.Generator().manual_seed(0)
    target = torch.randn(200, generator=rng).to(device)
    left = {}
    for rounding in ("float32", "nearest", "stochastic", "kahan"):
        dtype = torch.float32 if rounding == "float32" else torch.bfloat16
        w = torch.nn.Parameter(torch.ones(200, device=device, dtype=dtype))
        how = "nearest" if rounding == "float32" else rounding
        opt = AvaGrad([w], lr=2e-3, eps=1.0, rounding=how, **of_path)
        for _ in range(700):
            opt.zero_grad()
            (w.float() - target).square().sum().mul(0.5).backward()  # type: ignore[no-untyped-call]
            opt.step()
        left[rounding] = (w.detach().float() - target).abs().mean().item()
    assert left["nearest"] > 1.8 * left["float32"]
    assert left["stochastic"] < 1.03 * left["float32"]
    assert left["kahan"] < 1.01 * left["float32"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_resume_is_exact_to_the_bit(path: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = options_of(path, monkeypatch)
    rng = torch.Generator().manual_seed(0)
    grads = [torch.randn(300, generator=rng) for _ in range(12)]
    start = torch.randn(300, generator=rng).to(torch.bfloat16)
    opt, w = run(where, start, grads[:6], rounding=rounding, rounding_seed=5)
    resumed = torch.nn.Parameter(w.detach().clone())
    other = AvaGrad([resumed], **where[1])
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert other.param_groups[0]["rounding_seed"] == 5
    for g in grads[6:]:
        for p, o in ((w, opt), (resumed, other)):
            p.grad = g.to(p.device, p.dtype)
            o.step()
    assert torch.equal(w, resumed)
    rests = [o.state[p].get("compensation") for p, o in ((w, opt), (resumed, other))]
    assert rests[0] is None or torch.equal(rests[0], rests[1])
    _, same = run(where, start, grads, rounding=rounding, rounding_seed=5)
    assert torch.equal(w, same)
    _, differs = run(where, start, grads, rounding=rounding, rounding_seed=6)
    assert torch.equal(w, differs) == (rounding == "kahan")


def test_kahan_keeps_twice_the_digits() -> None:
    rng = torch.Generator().manual_seed(0)
    grads = [torch.randn(500, generator=rng).to(torch.bfloat16) for _ in range(200)]
    start = torch.randn(500, generator=rng).to(torch.bfloat16)
    opt, w = run(("cpu", {"foreach": False}), start, grads, lr=0.01, rounding="kahan")
    _, exact = run(("cpu", {"foreach": False}), start.float(), [g.float() for g in grads], lr=0.01)
    _, nearest = run(("cpu", {"foreach": False}), start, grads, lr=0.01)
    kept = w.detach().float() + opt.state[w]["compensation"].float()
    assert (kept - exact).abs().max() < 1e-2 * (nearest.detach().float() - exact).abs().max()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_foreach_rounds_a_large_tensor_block_by_block(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(30, 70, generator=rng).to(torch.bfloat16).t()
    grads = [torch.randn(70, 30, generator=rng) for _ in range(4)]
    _, whole = run(("cpu", {"foreach": True}), start, grads, rounding=rounding)
    monkeypatch.setattr(loop, "CPU_BLOCK", 500)
    _, parts = run(("cpu", {"foreach": True}), start, grads, rounding=rounding)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("path", PATHS)
def test_rounding_does_nothing_to_float32(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = options_of(path, monkeypatch)
    grads = [torch.linspace(-1, 1, 50) * t for t in range(5)]
    ends = [run(where, torch.ones(50), grads, rounding=how) for how in ("nearest", "stochastic", "kahan")]
    for opt, w in ends:
        assert torch.equal(w, ends[0][1])
        assert "compensation" not in opt.state[w]


@pytest.mark.parametrize("path", PATHS)
def test_rounding_may_change_in_mid_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = options_of(path, monkeypatch)
    grads = [torch.ones(50) for _ in range(4)]
    opt, w = run(where, torch.ones(50).to(torch.bfloat16), grads, lr=1e-4)
    assert torch.equal(w, torch.ones_like(w))
    opt.param_groups[0]["rounding"] = "kahan"
    for _ in range(60):
        opt.step()
    assert (w < 1).all()
    assert opt.state[w]["compensation"].dtype == torch.bfloat16


def test_a_compensation_of_another_shape_is_rejected() -> None:
    opt, _ = run(("cpu", {}), torch.ones(5).to(torch.bfloat16), [torch.ones(5)], rounding="kahan")
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["compensation"] = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"loaded compensation has the shape \(4,\), but must have \(5,\)"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("name", DELAYED)
def test_bad_values_are_rejected(name: str) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="rounding is 'up', but must be 'nearest', 'stochastic' or 'kahan'"):
        optimizer_class(name)([w], rounding="up")
    for seed in (-1, 2**32, 0.5, True):
        with pytest.raises(ValueError, match=r"rounding_seed is .*, but must be a whole number from 0 to 2\^32 - 1"):
            optimizer_class(name)([w], rounding_seed=seed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_parameter_without_dimensions(
    path: str, rounding: str, tensor_lr: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    grads = [torch.tensor(1.0) for _ in range(3)]
    for name in DELAYED:
        where = options_of(path, monkeypatch)
        opt, w = run(where, torch.tensor(1.0).to(torch.bfloat16), grads, name, lr=lr, rounding=rounding)
        assert opt.state[w]["step"] == 3
        assert w < 1


@pytest.mark.parametrize("path", PATHS)
def test_what_was_cut_off_is_forgotten_when_it_no_longer_belongs_there(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = options_of(path, monkeypatch)
    grads = [torch.randn(50, generator=torch.Generator().manual_seed(t)) for t in range(4)]
    opt, w = run(where, torch.ones(50).to(torch.bfloat16), grads, lr=1e-3, rounding="kahan")
    assert opt.state[w]["compensation"].any()
    wider = torch.nn.Parameter(w.detach().float())
    other = AvaGrad([wider], rounding="kahan", **where[1])
    other.load_state_dict(opt.state_dict())
    other.param_groups[0]["lr"] = 0.0
    start = wider.detach().clone()
    for g in grads:
        wider.grad = g.to(wider.device)
        other.step()
    assert torch.equal(wider, start)
    opt.param_groups[0]["lr"] = 0.0
    for how in ("nearest", "kahan"):
        opt.param_groups[0]["rounding"] = how
        with torch.no_grad():
            w.fill_(1e-3)
        opt.step()
        assert torch.equal(w, torch.full_like(w, 1e-3))


@pytest.mark.parametrize("path", PATHS)
def test_bad_values_in_a_group_are_rejected_when_a_step_is_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opt, w = run(options_of(path, monkeypatch), torch.ones(4).to(torch.bfloat16), [torch.ones(4)] * 2)
    before = w.detach().clone()
    for key, value in (("rounding", "Stochastic"), ("rounding_seed", -1), ("norm", "x")):
        kept, opt.param_groups[0][key] = opt.param_groups[0][key], value
        with pytest.raises(ValueError, match=f"AvaGrad: {key} is {value!r}, but must be"):
            opt.step()
        opt.param_groups[0][key] = kept
    assert torch.equal(w, before)
