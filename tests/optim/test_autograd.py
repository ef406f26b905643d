"""Gradients flow through the rules, and are finite. GradScaler: a skipped step changes nothing."""

import copy
from typing import Any

import pytest
import torch
from problems import ALL, DELAYED, EVERY_PATH, NAMES_AND_PATHS, optimizer_class
from torch import Tensor

from avagrad.optim import rules
from avagrad.optim.adabound import adabound_step
from avagrad.optim.adashift import adashift_step
from avagrad.optim.adopt import adopt_step

OPTIONS: dict[str, list[dict[str, Any]]] = {
    **{
        name: [{}, {"bias_correction": False, "eps": 0.1}, {"active_only": True, "weight_decay": 0.1}]
        for name in DELAYED
        if name != "AvaStep"
    },
    "AvaStep": [{}, {"clip_update": None, "eps": 0.1}, {"clip_moment": 3.0, "decoupled_weight_decay": False}],
    "AdaBound": [{}, {"amsbound": True, "weight_decay": 0.1}],
    "ADOPT": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdaShift": [{"keep": 1}, {"keep": 2, "reduce": None}],
}


def unrolled(name: str, w: Tensor, gs: list[Tensor], lr: Tensor, tensor_t: bool = False, **options: Any) -> Tensor:
    """Return what some steps of a rule make of w, as a function that autograd can follow."""
    group = optimizer_class(name)([torch.nn.Parameter(w.detach())], **options).param_groups[0]
    hyper = {"lr": lr, "beta1": group["betas"][0], "beta2": group["betas"][1], "weight_decay": group["weight_decay"]}
    m, v, kept = torch.zeros_like(w), torch.zeros_like(w), [torch.zeros_like(w)] * group.get("keep", 0)
    largest = v if group.get("amsbound") else None
    if group.get("reduce") == "max":
        v = torch.zeros((), dtype=w.dtype)
    for n, g in enumerate(gs):
        t: Any = torch.tensor(n + 1.0, dtype=torch.float64) if tensor_t else n + 1
        if name in DELAYED:
            forms = {key: group.get(key, True) for key in ("bias_correction", "active_only")}
            r = rules.gradient_sizes(v, t - 1, beta2=hyper["beta2"], bias_correction=forms["bias_correction"])
            eta = rules.rates(r, t - 1, eps=group["eps"], **forms)
            gamma: Any = 1.0
            clips = rules.Clips()
            if name == "AvaStep":
                r = rules.gradient_sizes(v, t - 1, beta2=hyper["beta2"])
                clips = rules.Clips(r, group["clip_update"], group["clip_moment"], rules.LARGEST)
                gamma = rules.scale(*rules.power_sum(eta * r, v, t - 1, norm=2, **forms))
            elif "norm" in group:
                gamma = rules.scale(*rules.power_sum(eta, v, t - 1, norm=2, **forms))
            decoupled = group["decoupled_weight_decay"]
            w, m, v = rules.delayed_step(w, g, m, v, t, eta, gamma, decoupled=decoupled, clips=clips, **forms, **hyper)
        elif name == "ADOPT":
            decoupled = group["decoupled_weight_decay"]
            w, m, v = adopt_step(w, g, m, v, t, eps=group["eps"], decoupled=decoupled, **hyper)
        elif name == "AdaBound":
            own = {key: group[key] for key in ("eps", "final_lr", "gamma")} | {"base_lr": lr.detach()}
            w, m, v, new = adabound_step(w, g, m, v, largest, t, **own, **hyper)
            largest = new if largest is not None else None
        else:
            own = {key: group[key] for key in ("eps", "reduce")}
            w, kept, v = adashift_step(w, g, kept, v, t, **own, **hyper)
    return w


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tensor_t", [False, True])
def test_gradients_flow_through_steps(name: str, tensor_t: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    w, *gs = (torch.randn(3, generator=rng, dtype=torch.float64) for _ in range(5))
    lr = torch.tensor(0.03, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (w, *gs, lr)]
    for options in OPTIONS[name]:

        def run(w: Tensor, *rest: Tensor, options: dict[str, Any] = options) -> Tensor:
            *gs, lr = rest
            return unrolled(name, w, gs, lr, tensor_t=tensor_t, **options)

        assert torch.autograd.gradcheck(run, inputs, eps=1e-7, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_finite_where_a_gradient_is_exactly_zero(name: str) -> None:
    for options in OPTIONS[name]:
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        gs = [
            torch.tensor(x, dtype=torch.float64, requires_grad=True)
            for x in ([0.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0] * 3)
        ]
        unrolled(name, w, [*gs, *gs], lr, **options).square().sum().backward()  # type: ignore[no-untyped-call]
        for x in (w, lr, *gs):
            assert x.grad is not None
            assert x.grad.isfinite().all()
        assert lr.grad is not None
        assert lr.grad != 0


@pytest.mark.parametrize("name", ALL)
def test_a_rule_has_the_numbers_of_its_class(name: str) -> None:
    gs = [torch.randn(4, generator=torch.Generator().manual_seed(i)).double() for i in range(14)]
    lr = torch.tensor(0.03, dtype=torch.float64)
    follow = unrolled(name, torch.ones(4).double(), gs, lr)
    plain = torch.nn.Parameter(torch.ones(4).double())
    opt = optimizer_class(name)([plain], lr=0.03)
    for g in gs:
        plain.grad = g
        opt.step()
    torch.testing.assert_close(follow, plain.detach(), rtol=1e-13, atol=1e-14)


# --- GradScaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DELAYED)
def test_a_scaler_without_any_gradient(name: str) -> None:
    """It passes the number 0 instead of a tensor. The next step is an ordinary one."""
    w = torch.nn.Parameter(torch.ones(3))
    opt = optimizer_class(name)([w], fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(opt)
    assert not opt.state
    w.grad = torch.ones(3)
    opt.step()
    assert opt.state[w]["step"] == 1


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_the_scaler_skips_changes_nothing(name: str, path: str, first: bool) -> None:
    """Skipped at the very first step, or in mid-run: state, parameters and what follows are as without it."""
    ends = []
    for skip in (True, False):
        w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        opt = optimizer_class(name)([w], weight_decay=0.1, **EVERY_PATH[path])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6)

        def step(factor: float, w: Tensor = w, opt: Any = opt, scaler: Any = scaler) -> None:
            opt.zero_grad()
            scaler.scale((factor * w).square().sum()).backward()
            scaler.step(opt)
            scaler.update()

        for t in range(14):
            if skip and t == (0 if first else 7):
                before = copy.deepcopy((w.detach(), opt.state_dict()))
                step(float("inf"))
                assert str((w.detach(), opt.state_dict())) == str(before)
            step(1.0 + t)
        ends.append(w.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("path", EVERY_PATH)
def test_an_infinite_first_gradient_does_not_move_a_parameter(name: str, path: str) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = optimizer_class(name)([w], weight_decay=0.1, **EVERY_PATH[path])
    w.grad = torch.tensor([1.0, float("inf"), float("nan")])
    opt.step()
    assert torch.equal(w, torch.ones(3))


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
def test_a_half_precision_lr_does_not_round_the_decay_away(name: str, path: str) -> None:
    """1 - 0.1 * 0.01 is 1 in bfloat16."""
    ends = []
    for lr in (torch.tensor(0.1, dtype=torch.bfloat16), float(torch.tensor(0.1, dtype=torch.bfloat16))):
        w = torch.nn.Parameter(torch.ones(2))
        opt = optimizer_class(name)([w], lr=lr, weight_decay=0.01, **EVERY_PATH[path])
        for _ in range(30):
            w.grad = torch.zeros(2)
            opt.step()
        ends.append(w.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=0)
    assert (ends[0] < 1).all()


def test_a_step_in_inference_mode() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    opt = optimizer_class("AvaGrad")([w])
    for _ in range(3):
        w.grad = torch.ones(2)
        with torch.inference_mode():
            opt.step()
    assert (w < 1).all()
