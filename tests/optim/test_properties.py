"""What follows from the rule, as properties of random problems."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import DELAYED, EVERY_PATH, PATHS, gradients, optimizer_class, parameters
from torch import Tensor

from avagrad import AvaGrad, DelayedAdam
from avagrad.optim.backends import loop
from avagrad.optim.rules import Delayed

STEPS = 12
seeds = st.integers(0, 2**31)
positive = st.floats(1e-3, 1e3)
paths = st.sampled_from([PATHS["loop"], PATHS["foreach"]])
normalised = st.sampled_from(["AvaGrad", "AvaGradW"])


def random_gradients(shape: tuple[int, ...], seed: int, steps: int = STEPS) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    scales = torch.exp(2 * torch.randn(shape, generator=rng, dtype=torch.float64))
    return [scales * torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(steps)]


def train(opt: Any, params: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    for now in grads:
        for p, g in zip(params, now, strict=True):
            p.grad = g.clone()
        opt.step()
    return [p.detach().clone() for p in params]


def run(name: str, grads: list[Tensor], **options: Any) -> Tensor:
    w = torch.nn.Parameter(torch.ones_like(grads[0]))
    return train(optimizer_class(name)([w], **options), [w], [[g] for g in grads])[0]


def averaged_sgd(grads: list[Tensor], lr: float, beta1: float) -> Tensor:
    """SGD with averaged momentum: m corrected like AvaGrad's, first step dead."""
    w, m = torch.ones_like(grads[0]), torch.zeros_like(grads[0])
    for t, g in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * g
        if t > 1:
            w = w - lr * m / (1 - beta1**t)
    return w


@given(seed=seeds, lr=positive, eps=positive, norm=st.sampled_from([1, 2]), path=paths)
def test_in_one_dimension_avagrad_is_sgd(seed: int, lr: float, eps: float, norm: int, path: Any) -> None:
    grads = random_gradients((1,), seed)
    got = run("AvaGrad", grads, lr=lr, eps=eps, norm=norm, **path)
    torch.testing.assert_close(got, averaged_sgd(grads, lr, 0.9), rtol=1e-10, atol=1e-10 * (1 + lr))


@given(seed=seeds, lr=positive, path=paths)
def test_with_a_huge_eps_avagrad_is_sgd(seed: int, lr: float, path: Any) -> None:
    grads = random_gradients((6,), seed)
    want = averaged_sgd(grads, lr, 0.9)
    errors = [(run("AvaGrad", grads, lr=lr, eps=eps, **path) - want).abs().max() for eps in (1e6, 1e9)]
    size = (want - 1).abs().max()
    assert errors[0] <= 1e-3 * size
    assert errors[1] <= 1e-6 * size


@given(seed=seeds, c=positive, eps=positive, name=normalised, path=paths)
def test_gradients_and_eps_scaled_scale_the_step(seed: int, c: float, eps: float, name: str, path: Any) -> None:
    grads = random_gradients((5,), seed)
    step = run(name, grads, eps=eps, **path) - 1
    scaled = run(name, [c * g for g in grads], eps=c * eps, **path) - 1
    torch.testing.assert_close(scaled, c * step, rtol=1e-9, atol=1e-9 * c)


@given(seed=seeds, c=st.floats(1e-2, 1e2), name=normalised)
def test_gradients_alone_scaled_nearly_scale_the_step_when_eps_is_small(seed: int, c: float, name: str) -> None:
    grads = random_gradients((5,), seed)
    step = run(name, grads, eps=1e-12) - 1
    scaled = run(name, [c * g for g in grads], eps=1e-12) - 1
    torch.testing.assert_close(scaled, c * step, rtol=1e-6, atol=1e-6 * c)


@given(seed=seeds, name=st.sampled_from(DELAYED), path=paths, cut=st.integers(1, 5), data=st.data())
def test_groups_shapes_and_order_change_nothing(seed: int, name: str, path: Any, cut: int, data: Any) -> None:
    grads = random_gradients((6, 4), seed)
    whole = run(name, grads, weight_decay=0.1, **path)
    order = data.draw(st.permutations([0, 1]))
    parts = [torch.nn.Parameter(torch.ones(cut, 4).double()), torch.nn.Parameter(torch.ones(4 * (6 - cut)).double())]
    opt = optimizer_class(name)([{"params": [parts[i]]} for i in order], weight_decay=0.1, **path)
    top, bottom = train(opt, list(parts), [[g[:cut], g[cut:].flatten()] for g in grads])
    torch.testing.assert_close(torch.cat([top, bottom.reshape(-1, 4)]), whole, rtol=1e-10, atol=1e-12)


@given(seed=seeds, eps=positive, bias_correction=st.booleans(), active_only=st.booleans())
def test_with_gamma_one_avagrad_is_delayed_adam(
    seed: int, eps: float, bias_correction: bool, active_only: bool
) -> None:
    grads = random_gradients((5,), seed)
    options: dict[str, Any] = {"eps": eps, "bias_correction": bias_correction, "active_only": active_only}
    want = run("DelayedAdam", grads, lr=0.1, **options)
    w = torch.nn.Parameter(torch.ones(5).double())
    opt = AvaGrad([w], lr=0.1, foreach=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Delayed, "gamma", lambda rule, total: torch.ones(()).double())
        got = train(opt, [w], [[g] for g in grads])[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@given(seed=seeds, size=positive)
def test_on_constant_magnitudes_delayed_adam_moves_as_adam(seed: int, size: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (STEPS, 4), generator=rng).double() * 2 - 1
    ours, theirs = (torch.nn.Parameter(torch.zeros(4).double()) for _ in range(2))
    opt = DelayedAdam([ours], lr=0.01)
    adam = torch.optim.Adam([theirs], lr=0.01)
    for t, g in enumerate(size * signs):
        before = ours.detach().clone(), theirs.detach().clone()
        ours.grad, theirs.grad = g.clone(), g.clone()
        opt.step()
        adam.step()
        moves = ours.detach() - before[0], theirs.detach() - before[1]
        if t == 0:
            assert torch.count_nonzero(moves[0]) == 0
        else:
            torch.testing.assert_close(*moves, rtol=1e-9, atol=1e-14)


@given(seed=seeds, name=st.sampled_from(DELAYED[:3]), norm=st.sampled_from([1, 2]), path=paths)
def test_active_only_changes_nothing_for_dense_gradients(seed: int, name: str, norm: int, path: Any) -> None:
    grads = random_gradients((7,), seed)
    options = {"weight_decay": 0.1, **path} | ({"norm": norm} if name != "DelayedAdam" else {})
    plain, active = run(name, grads, **options), run(name, grads, active_only=True, **options)
    assert torch.equal(plain, active)


@given(seed=seeds, eps=st.floats(1e-15, 1e15), name=normalised, norm=st.sampled_from([1, 2]))
def test_normalised_rates_have_mean_one(seed: int, eps: float, name: str, norm: int) -> None:
    """The mean of (gamma eta)^p over all coordinates is 1, whatever eps and the gradients are."""
    w = torch.nn.Parameter(torch.zeros(9).double())
    opt = optimizer_class(name)([w], lr=1.0, eps=eps, norm=norm)
    train(opt, [w], [[g] for g in random_gradients((9,), seed, 3)])
    v_hat = opt.state[w]["exp_avg_sq"] / (1 - 0.999**3)
    effective = opt.diagnostics()["gamma"] / (v_hat.sqrt() + eps)
    assert (effective**norm).mean().item() == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("name", DELAYED)
def test_the_delay_is_one_step_and_not_two(name: str) -> None:
    """By hand, for two coordinates: the second move knows the first two gradients and no third."""
    w = torch.nn.Parameter(torch.zeros(2).double())
    options = {"clip_update": None} if name == "AvaStep" else {}
    opt = optimizer_class(name)([w], lr=1.0, betas=(0.0, 0.5), eps=1.0, **options)
    gradients_by_hand = [[1.0, 3.0], [2.0, 0.0], [1.0, 1.0]]
    moves = []
    for g in gradients_by_hand:
        before = w.detach().clone()
        w.grad = torch.tensor(g).double()
        opt.step()
        moves.append(w.detach() - before)
    assert torch.equal(moves[0], torch.zeros(2).double())
    eta_2 = torch.tensor([1 / (1 + 1), 1 / (3 + 1)]).double()  # v_1 / (1 - 0.5) = g_1^2
    v_hat = torch.tensor([(0.25 * 1 + 0.5 * 4) / 0.75, 0.25 * 9 / 0.75]).double()
    eta_3 = 1 / (v_hat.sqrt() + 1)
    for move, g, eta in zip(moves[1:], gradients_by_hand[1:], (eta_2, eta_3), strict=True):
        normalised = eta * (1 / eta - 1) if name == "AvaStep" else eta  # r = 1 / eta - eps
        gamma = 1 if name == "DelayedAdam" else (2 / (normalised**2).sum()) ** 0.5
        torch.testing.assert_close(move, -gamma * eta * torch.tensor(g).double(), rtol=1e-12, atol=0)


def test_the_paper_s_grid_in_float32_has_no_nan_of_our_making() -> None:
    """All 441 points on an ill-conditioned quadratic: a NaN may only come after an infinity."""
    epss = [c * 10.0**k for k in range(-8, 3) for c in (1, 2)][:21]
    lrs = [c * 10.0**k for k in range(-7, 4) for c in (1, 5)][1:]
    assert (len(epss), len(lrs)) == (21, 21)
    assert (epss[0], epss[-1], lrs[0], lrs[-1]) == (1e-8, 100, 5e-7, 5000)
    curvature = torch.logspace(-6, 3, 8)
    for name in ("DelayedAdam", "AvaGrad"):
        for use_foreach in (False, True):
            for eps in epss:
                members = [torch.nn.Parameter(torch.ones(8)) for _ in lrs]
                opts = [
                    optimizer_class(name)([w], lr=lr, eps=eps, foreach=use_foreach)
                    for w, lr in zip(members, lrs, strict=True)
                ]
                for _ in range(8):
                    for w, opt in zip(members, opts, strict=True):
                        g = curvature * w.detach()
                        if not g.isfinite().all():
                            continue  # it has diverged, and that is lr's doing
                        w.grad = g
                        opt.step()
                        assert not w.isnan().any(), (name, use_foreach, eps, opt.param_groups[0]["lr"])
                        assert not opt.state[w]["exp_avg_sq"].isnan().any()


def test_second_moments_that_overflow_stop_a_coordinate_and_nothing_else() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    opt = AvaGrad([w], lr=0.1)
    for _ in range(4):
        w.grad = torch.tensor([1e30, 1.0])
        opt.step()
    assert w[0] == 1
    assert 0 < w[1] < 1


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("eps", [1e-15, 1e15])
def test_the_ends_of_the_range_of_eps(path: str, eps: float) -> None:
    params = parameters()
    opt = AvaGrad(params, eps=eps, **EVERY_PATH[path])
    for grads in gradients(params, 5):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("path", EVERY_PATH)
def test_the_norm_of_many_parameters_keeps_its_digits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a block, at the smallest eps; gamma against float64."""
    monkeypatch.setattr(loop, "CPU_BLOCK", 2**20)
    big = torch.nn.Parameter(torch.zeros(3, 500_001))
    small = torch.nn.Parameter(torch.zeros(1000))
    opt = AvaGrad([big, small], eps=1e-15, **EVERY_PATH[path])
    rng = torch.Generator().manual_seed(0)
    grads = [torch.randn(p.shape, generator=rng) for p in (big, small)]
    big.grad, small.grad = grads
    opt.step()
    eta = torch.cat([1 / (g.double().abs().flatten() + 1e-15) for g in grads])
    want = (eta.numel() / (eta**2).sum()).sqrt().item()
    assert opt.diagnostics()["gamma"] == pytest.approx(want, rel=1e-6)
