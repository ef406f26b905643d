"""AvaStep: what its step is bounded by, what its lr and eps mean, and what a bad gradient does."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import EVERY_PATH, FUSED_PATHS, as_float64, take_fused_path
from torch import Tensor

from avagrad import ADOPT, AvaGrad, AvaStep, DelayedAdam
from avagrad.theory import step_bounds

paths = st.sampled_from(list(EVERY_PATH.values()))
seeds = st.integers(0, 10**6)
any_eps = st.floats(-8, 8).map(lambda x: 10.0**x)
STEPS = 12


def heavy_tailed(seed: int, n: int = 9, steps: int = STEPS) -> list[Tensor]:
    """Return gradients whose sizes differ between coordinates, and between steps without bound."""
    rng = torch.Generator().manual_seed(seed)
    scales = torch.exp(3 * torch.randn(n, generator=rng, dtype=torch.float64))
    tails = [torch.randn(n, generator=rng, dtype=torch.float64).tan() for _ in range(steps)]
    return [scales * tail for tail in tails]


def run(make: Any, grads: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the parameter before each step and after the last."""
    w = torch.nn.Parameter(torch.zeros_like(grads[0]))
    opt = make([w], **options)
    seen = [w.detach().clone()]
    for g in grads:
        w.grad = g.clone()
        opt.step()
        seen.append(w.detach().clone())
    return seen


# --- what lr and eps mean ------------------------------------------------------------------------


@given(seed=seeds, path=paths)
def test_with_a_tiny_eps_and_no_clamp_it_is_delayed_adam(seed: int, path: Any) -> None:
    grads = heavy_tailed(seed)
    ours = run(AvaStep, grads, lr=0.1, eps=1e-15, clip_update=None, **path)
    delayed = run(DelayedAdam, grads, lr=0.1, eps=1e-15, active_only=True, **path)
    torch.testing.assert_close(ours[-1], delayed[-1], rtol=1e-9, atol=1e-12)


@given(seed=seeds, path=paths)
def test_with_a_huge_eps_and_no_clamp_it_is_sgd_with_a_scale(seed: int, path: Any) -> None:
    """The scale is the RMS of the gradients' usual sizes: with gradients of one size, that size."""
    rng = torch.Generator().manual_seed(seed)
    signs = [(torch.randint(0, 2, (6,), generator=rng) * 2 - 1).double() for _ in range(STEPS)]
    ours = run(AvaStep, [7 * s for s in signs], lr=0.1, eps=1e15, clip_update=None, **path)
    w, m = torch.zeros(6).double(), torch.zeros(6).double()
    for t, g in enumerate(signs, 1):
        m = 0.9 * m + 0.1 * g
        if t > 1:
            w = w - 0.1 * m / (1 - 0.9**t)
    torch.testing.assert_close(ours[-1], w, rtol=1e-9, atol=1e-12)


@given(seed=seeds, eps=any_eps, scale=st.floats(-6, 6).map(lambda x: 10.0**x), norm=st.sampled_from([1, 2]), path=paths)
def test_gradients_and_eps_scaled_by_the_same_number_change_nothing(
    seed: int, eps: float, scale: float, norm: int, path: Any
) -> None:
    grads, options = heavy_tailed(seed), {"norm": norm, "clip_moment": 5.0, "weight_decay": 0.1, **path}
    one = run(AvaStep, grads, lr=0.1, eps=eps, **options)
    two = run(AvaStep, [scale * g for g in grads], lr=0.1, eps=eps * scale, **options)
    torch.testing.assert_close(one[-1], two[-1], rtol=1e-9, atol=1e-12)


@given(
    seed=seeds,
    eps=any_eps,
    clip=st.sampled_from([0.5, 1.0, 3.0]),
    moment=st.sampled_from([None, 4.0]),
    norm=st.sampled_from([1, 2]),
    path=paths,
)
def test_a_step_is_bounded_whatever_the_gradient(
    seed: int, eps: float, clip: float, moment: float | None, norm: int, path: Any
) -> None:
    """The root mean square of a step is at most c lr; a coordinate moves by at most sqrt(d) c lr."""
    grads, lr = heavy_tailed(seed), 0.03
    bounds = step_bounds(lr, len(grads[0]), clip_update=clip, norm=norm)
    options = {"clip_update": clip, "clip_moment": moment, "norm": norm, **path}
    seen = run(AvaStep, grads, lr=lr, eps=eps, **options)
    assert torch.equal(seen[1], seen[0])  # a first gradient only fills the moments
    for before, after in itertools.pairwise(seen[1:]):
        move = after - before
        assert move.square().mean().sqrt().item() <= bounds[0] * (1 + 1e-9)
        assert move.abs().max().item() <= bounds[1] * (1 + 1e-9)


@given(seed=seeds, eps=any_eps, cut=st.integers(1, 8), path=paths)
def test_groups_order_and_shapes_change_nothing(seed: int, eps: float, cut: int, path: Any) -> None:
    grads = heavy_tailed(seed)
    whole = run(AvaStep, grads, lr=0.1, eps=eps, weight_decay=0.1, **path)[-1]
    parts = [torch.nn.Parameter(torch.zeros(9 - cut).double()), torch.nn.Parameter(torch.zeros(cut, 1).double())]
    opt = AvaStep([{"params": [p]} for p in parts], lr=0.1, eps=eps, weight_decay=0.1, **path)
    for g in grads:
        parts[0].grad, parts[1].grad = g[cut:].clone(), g[:cut, None].clone()
        opt.step()
    got = torch.cat([parts[1].detach().flatten(), parts[0].detach()])
    torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", [*EVERY_PATH, "triton"])
@pytest.mark.parametrize("eps", [1e-15, 1e-8, 1.0, 1e8, 1e15])
@pytest.mark.parametrize("norm", [1, 2])
def test_the_whole_range_of_eps_in_float32(path: str, eps: float, norm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64: the square of r / eps would be 0 in float32."""
    device = take_fused_path(path, monkeypatch) if path in FUSED_PATHS else "cpu"
    options: dict[str, Any] = EVERY_PATH["fused" if path == "triton" else path]
    rng = torch.Generator().manual_seed(0)
    grads = [1e-3 * torch.randn(40, generator=rng) for _ in range(6)]
    w = torch.nn.Parameter(torch.zeros(40, device=device))
    opt = AvaStep([w], lr=0.1, eps=eps, norm=norm, **options)
    known = reference.Param(np.zeros(40), 0.1, 0.9, 0.999, eps, 0.0)
    oracle = reference.DelayedFamily(
        [known], True, True, norm=norm, active_only=True, norm_of_step=True, clip_update=1.0
    )
    for g in grads:
        w.grad = g.to(device)
        opt.step()
        oracle.step([as_float64(g)])
    np.testing.assert_allclose(as_float64(w), known.w, rtol=2e-5, atol=1e-7)
    assert opt.gamma() == pytest.approx(oracle.gamma(), rel=1e-5)


# --- bad gradients -------------------------------------------------------------------------------


BAD = {"1e30": 1e30, "infinite": math.inf, "minus infinite": -math.inf}


@pytest.mark.parametrize("path", [*EVERY_PATH, pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 1, 10], ids=["first", "second", "late"])
@pytest.mark.parametrize("clip_moment", [None, 10.0])
def test_a_huge_element_does_no_harm_then_or_later(
    path: str, bad: str, at: int, clip_moment: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on a step holds in that step and in the 100 after it, and the other coordinates go on."""
    device = take_fused_path(path, monkeypatch) if path in FUSED_PATHS else "cpu"
    options: dict[str, Any] = EVERY_PATH["fused" if path == "triton" else path]
    rng = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.zeros(8, device=device))
    opt = AvaStep([w], lr=0.01, clip_moment=clip_moment, **options)
    for t in range(at + 101):
        g = 1 + torch.randn(8, generator=rng)
        if t == at:
            g[3] = BAD[bad]
        before = w.detach().clone()
        w.grad = g.to(device)
        opt.step()
        assert (w.detach() - before).square().mean().sqrt().item() <= 0.01 * (1 + 1e-5)
    state = opt.state[w]
    assert all(x.isfinite().all() for x in (w, state["exp_avg"], state["exp_avg_sq"]))
    assert 0.5 < opt.gamma() < 2
    others = torch.arange(8, device=device) != 3
    assert (w.detach()[others] < -0.1).all()
    if clip_moment is not None and at == 10:  # the coordinate itself goes on, too
        assert state["exp_avg_sq"][3] < 100


def test_clip_moment_takes_the_second_moment_of_rare_coordinates() -> None:
    """What the documents warn of: a gradient in one of 400 steps is cut to 10 times an estimate that has decayed."""
    found = {}
    for clip_moment in (None, 10.0):
        w = torch.nn.Parameter(torch.zeros(2).double())
        opt = AvaStep([w], clip_moment=clip_moment)
        for t in range(4001):
            w.grad = torch.tensor([1.0, float(t % 400 == 0)]).double()
            opt.step()
        found[clip_moment] = opt.state[w]["exp_avg_sq"].tolist()
    assert found[10.0][0] == pytest.approx(found[None][0])  # a coordinate that always has one is left alone
    assert found[10.0][1] < 0.1 * found[None][1]


@pytest.mark.parametrize("path", [*EVERY_PATH, "triton"])
@pytest.mark.parametrize("clip_moment", [None, 10.0])
def test_a_nan_is_to_be_seen(path: str, clip_moment: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = take_fused_path(path, monkeypatch) if path in FUSED_PATHS else "cpu"
    options: dict[str, Any] = EVERY_PATH["fused" if path == "triton" else path]
    w = torch.nn.Parameter(torch.zeros(4, device=device))
    opt = AvaStep([w], clip_moment=clip_moment, **options)
    for t in range(4):
        w.grad = torch.ones(4, device=device)
        if t == 2:
            w.grad[1] = math.nan
        opt.step()
    assert opt.state[w]["exp_avg"].isnan().any()
    assert w.isnan().any()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_first_gradient_that_comes_late_moves_nothing(path: str) -> None:
    """Of a coordinate, after 50 steps: its size is not known yet. Its second one moves it by at most c lr gamma."""
    w = torch.nn.Parameter(torch.zeros(3))
    opt = AvaStep([w], lr=0.01, **EVERY_PATH[path])
    for t in range(54):
        w.grad = torch.tensor([1.0, -1.0, 100.0 if t >= 50 else 0.0])
        before = w.detach().clone()
        opt.step()
        move = (w.detach() - before)[2].abs().item()
        assert move == 0 if t <= 50 else 0 < move <= 0.01 * opt.gamma() * 1.01


@pytest.mark.parametrize("path", EVERY_PATH)
def test_clip_update_bounds_delayed_adams_second_step(path: str) -> None:
    """Rates from the past meet a gradient that is 1e6 times larger: 437 lr is what a training has shown."""
    grads = [torch.tensor([1e-6, 1.0]), torch.tensor([1.0, 1.0])]
    free = run(DelayedAdam, grads, lr=1e-3, **EVERY_PATH[path])[-1]
    held = run(DelayedAdam, grads, lr=1e-3, clip_update=1.0, **EVERY_PATH[path])[-1]
    assert free.abs().max().item() > 100
    assert held.abs().max().item() <= 1e-3 * (1 + 1e-6)


def test_a_state_that_is_moved_away_and_back() -> None:
    ends = []
    for moved in (False, True):
        w = torch.nn.Parameter(torch.ones(5))
        opt = AvaStep([w], lr=0.1)
        for t in range(6):
            w.grad = torch.arange(5.0) - t
            opt.step()
            if moved:
                for key, value in opt.state[w].items():
                    opt.state[w][key] = value.to("cpu", copy=True)
        ends.append(w.detach())
    assert torch.equal(*ends)


# --- what is refused, and what is taken over ------------------------------------------------------


def test_clip_update_needs_bias_correction() -> None:
    with pytest.raises(ValueError, match=r"clip_update is 1\.0 and bias_correction is False, but clip_update must be"):
        AvaGrad([torch.nn.Parameter(torch.ones(2))], clip_update=1.0, bias_correction=False)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_what_adam_means_is_taken_over(make: Any) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    adam = make([w], lr=0.3, betas=(0.8, 0.9), weight_decay=0.05, eps=1e-4)
    w.grad = torch.ones(2)
    adam.step()
    opt = AvaStep([w])
    with pytest.warns(
        UserWarning, match=r"counts, lr=0.3, betas=\(0.8, 0.9\), eps=0.0001, weight_decay=0.05, .* are loaded"
    ):
        opt.load_state_dict(adam.state_dict())
    group = opt.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.3, (0.8, 0.9), 1e-4, 0.05)
    assert group["decoupled_weight_decay"] == (make is torch.optim.AdamW)
    assert group["clip_update"] == 1.0
    opt.step()


def test_adams_default_eps_is_not_taken_over() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([w], lr=0.3)
    w.grad = torch.ones(2)
    adam.step()
    opt = AvaStep([w], eps=0.1)
    with pytest.warns(UserWarning, match="from another optimizer"):
        opt.load_state_dict(adam.state_dict())
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["eps"]) == (0.3, 0.1)


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (AvaStep, "active_only", False),
        (AvaStep, "bias_correction", False),
        (AvaGrad, "clip_moment", 2.0),
        (AvaGrad, "norm_of", "step"),
        (DelayedAdam, "norm", 2),
    ],
)
def test_a_key_that_a_class_does_not_have_is_the_users_own(path: str, make: Any, key: str, value: Any) -> None:
    ends = []
    for own in ({}, {key: value}):
        w = torch.nn.Parameter(torch.zeros(3))
        opt = make([{"params": [w], **own}], lr=0.1, **EVERY_PATH[path])
        for g in ([1.0, 0.0, 2.0], [5.0, 0.0, -1.0], [9.0, 1.0, -1.0], [1.0, 2.0, -1.0]):
            w.grad = torch.tensor(g)
            opt.step()
        ends.append((w.tolist(), opt.gamma(), opt.diagnostics()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("clip_update", -1.0, "a number above 0 and up to 1e15, or None"),
        ("clip_update", math.nan, "a number above 0 and up to 1e15, or None"),
        ("clip_update", 1e40, "a number above 0 and up to 1e15, or None"),
        ("clip_moment", 0.5, "a number above 1 and up to 1e15, or None"),
        ("norm_of", "rates", "'step'"),
        ("decoupled_weight_decay", "no", "True or False"),
    ],
)
def test_a_bad_value_in_a_group_is_rejected_at_the_next_step(key: str, value: Any, allowed: str) -> None:
    w = torch.nn.Parameter(torch.zeros(3))
    opt = AvaStep([w], clip_moment=2.0)
    for t in range(3):
        w.grad = torch.ones(3)
        if t == 2:
            opt.param_groups[0][key] = value
            with pytest.raises(ValueError, match=f"AvaStep: {key} is .*, but must be {allowed}"):
                opt.step()
            return
        opt.step()


def test_clip_update_cannot_join_without_bias_correction() -> None:
    w = torch.nn.Parameter(torch.zeros(3))
    opt = AvaGrad([w], bias_correction=False)
    w.grad = torch.ones(3)
    opt.step()
    opt.param_groups[0]["clip_update"] = 1.0
    with pytest.raises(ValueError, match=r"clip_update is 1\.0 and bias_correction is False"):
        opt.step()


def test_an_infinite_second_moment_is_rejected_by_name() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([w])
    w.grad = torch.tensor([1e25, 1.0, 1.0])
    adam.step()
    opt = AvaStep([w])
    with pytest.raises(ValueError, match=r"the loaded exp_avg_sq .* holds an infinity"):
        opt.load_state_dict(adam.state_dict())
    assert not opt.state


def test_a_schedule_continues_after_adams_state_is_loaded() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([w], lr=0.4)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5)
    w.grad = torch.ones(3)
    adam.step()
    schedule.step()
    opt = AvaStep([w])
    with pytest.warns(UserWarning, match=r"lr=0.2, initial_lr=0.4, betas=\(0.9, 0.999\), weight_decay=0.01"):
        opt.load_state_dict(adam.state_dict())
    again = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5, last_epoch=1)
    assert opt.param_groups[0]["initial_lr"] == 0.4
    assert again.get_last_lr() == [0.1]


def test_values_of_adams_that_are_not_allowed_here_are_left_there() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([w], eps=0.0)
    w.grad = torch.ones(3)
    adam.step()
    opt = AvaStep([w], eps=0.5)
    with pytest.warns(UserWarning, match=r"lr=0.001, betas=\(0.9, 0.999\), weight_decay=0"):
        opt.load_state_dict(adam.state_dict())
    assert opt.param_groups[0]["eps"] == 0.5


@pytest.mark.parametrize("make", [AvaGrad, DelayedAdam])
def test_an_optimizer_that_was_pickled_before_clip_update_was_there(make: Any) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = make([w])
    w.grad = torch.ones(3)
    opt.step()
    for older in (opt.defaults, *opt.param_groups):
        del older["clip_update"]
    again = pickle.loads(pickle.dumps(opt))
    (p,) = again.param_groups[0]["params"]
    p.grad = torch.ones(3)
    again.step()
    assert again.state[p]["step"] == 2


def test_adopts_moments_are_not_adams() -> None:
    """Its momentum is of scaled gradients: neither can go on with the other's."""
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    adam, adopt = torch.optim.Adam([w]), ADOPT([w])
    for opt in (adam, adopt):
        opt.step()
    with pytest.raises(ValueError, match="has no exp_avg_scaled"):
        ADOPT([w]).load_state_dict(adam.state_dict() | {"param_groups": [{"params": [0]}]})
    with pytest.raises(ValueError, match="has no exp_avg, but must have"):
        DelayedAdam([w]).load_state_dict(adopt.state_dict())


def test_groups_say_what_is_normalised() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    saved = AvaGrad([w], lr=3.0, weight_decay=0.5)
    saved.step()
    opt = AvaStep([w], lr=0.1)
    with pytest.warns(UserWarning, match=r"from another optimizer \(its groups have no norm_of, clip_moment\)"):
        opt.load_state_dict(saved.state_dict())
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]) == (0.1, 0.0)
    with pytest.raises(ValueError, match="AvaStep: norm_of is 'rates', but must be 'step'"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "norm_of": "rates"})
