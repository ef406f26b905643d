"""The rules as pure functions: against torch.optim, under vmap, compile, and for stacks of models."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from avagrad.lab import torch_rules
from avagrad.optim import rules
from avagrad.optim.adabound import adabound_step
from avagrad.optim.adashift import adashift_step
from avagrad.optim.rules import bias_correction_of

STEPS = 30


def random_like(w: Tensor, t: int) -> Tensor:
    return torch.randn(w.shape, generator=torch.Generator().manual_seed(t), dtype=w.dtype)


def run_rule(step: Callable[..., tuple[Tensor, ...]], w: Tensor, states: int, **hyper: Any) -> Tensor:
    """Run a rule whose arguments are (w, g, *states, t)."""
    state = [torch.zeros_like(w) for _ in range(states)]
    for t in range(1, STEPS + 1):
        w, *state = step(w, random_like(w, t), *state, t, **hyper)
    return w


def run_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer], w: Tensor) -> Tensor:
    w = w.clone()
    opt = make([w])
    for t in range(1, STEPS + 1):
        w.grad = random_like(w, t)
        opt.step()
    return w


def adam(v_max_given: bool) -> Callable[..., tuple[Tensor, ...]]:
    def step(w: Tensor, g: Tensor, m: Tensor, v: Tensor, v_max: Tensor, t: int, **hyper: Any) -> tuple[Tensor, ...]:
        return torch_rules.adam_step(w, g, m, v, v_max if v_max_given else None, t, **hyper)

    return step


ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
TORCH_ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_adamw_and_amsgrad_are_torchs(decoupled: bool, amsgrad: bool, maximize: bool) -> None:
    w = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = run_rule(adam(amsgrad), w, 3, decoupled=decoupled, maximize=maximize, **ADAM)
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = run_torch(lambda p: make(p, amsgrad=amsgrad, maximize=maximize, **TORCH_ADAM), w)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum: float, nesterov: bool, maximize: bool) -> None:
    w = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hyper: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.01}
    ours = run_rule(torch_rules.sgd_step, w, 1, maximize=maximize, **hyper)
    theirs = run_torch(lambda p: torch.optim.SGD(p, maximize=maximize, **hyper), w)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


# --- one signature for all nine methods: (w, g, state, t, lr, eps) -> w, state -------------------


def delayed(normalised: bool, decoupled: bool, per_member: bool = False, **options: Any) -> Callable[..., Any]:
    def step(w: Tensor, g: Tensor, state: list[Tensor], t: Any, lr: Any, eps: Any) -> tuple[Tensor, list[Tensor]]:
        m, v = state
        r = rules.gradient_sizes(v, t - 1, beta2=0.99, bias_correction=options.get("bias_correction", True))
        eta = rules.rates(r, t - 1, eps=eps, **options)
        gamma: Any = 1.0
        if normalised:
            dims = tuple(range(1 if per_member else 0, w.dim()))
            total = (eta * eta).sum(dims, keepdim=True)
            gamma = rules.scale(total, w.numel() // (len(w) if per_member else 1))
        w, m, v = rules.delayed_step(
            w, g, m, v, t, eta, gamma, lr=lr, beta1=0.9, beta2=0.99, weight_decay=0.1, decoupled=decoupled, **options
        )
        return w, [m, v]

    return step


def method(name: str, per_member: bool = False) -> tuple[Callable[..., Any], Callable[[Tensor], list[Tensor]]]:
    """Return a step of the common signature, and what its state starts from."""
    betas: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99}

    def zeros(n: int) -> Callable[[Tensor], list[Tensor]]:
        return lambda w: [torch.zeros_like(w) for _ in range(n)]

    if name == "sgd":

        def sgd(w: Tensor, g: Tensor, state: list[Tensor], t: Any, lr: Any, eps: Any) -> Any:
            w, buffer = torch_rules.sgd_step(w, g, state[0], t, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1)
            return w, [buffer]

        return sgd, zeros(1)
    if name in ("adam", "adamw", "amsgrad"):

        def adam(w: Tensor, g: Tensor, state: list[Tensor], t: Any, lr: Any, eps: Any) -> Any:
            m, v, v_max = state
            hyper: Any = {"lr": lr, "eps": eps, "weight_decay": 0.1, "decoupled": name == "adamw", **betas}
            w, *state = torch_rules.adam_step(w, g, m, v, v_max if name == "amsgrad" else None, t, **hyper)
            return w, state

        return adam, zeros(3)
    if name == "adabound":

        def adabound(w: Tensor, g: Tensor, state: list[Tensor], t: Any, lr: Any, eps: Any) -> Any:
            hyper: Any = {"lr": lr, "base_lr": lr, "eps": eps, "final_lr": 0.1, "gamma": 1e-3, **betas}
            m, v, v_max = state
            w, *state = adabound_step(w, g, m, v, v_max, t, **hyper)
            return w, state

        return adabound, zeros(3)
    if name == "adashift":
        reduce = None if per_member else "max"

        def adashift(w: Tensor, g: Tensor, state: list[Tensor], t: Any, lr: Any, eps: Any) -> Any:
            w, kept, v = adashift_step(w, g, state[1:], state[0], t, lr=lr, eps=eps, reduce=reduce, **betas)
            return w, [v, *kept]

        def start(w: Tensor) -> list[Tensor]:
            return [w.new_zeros(()) if reduce else torch.zeros_like(w), *(torch.zeros_like(w) for _ in range(3))]

        return adashift, start
    return delayed(name != "delayed-adam", name == "avagradw", per_member), zeros(2)


NINE = ["sgd", "adam", "amsgrad", "adamw", "adabound", "adashift", "delayed-adam", "avagrad", "avagradw"]
LRS = torch.tensor([0.003, 0.01, 0.1], dtype=torch.float64)
EPSS = torch.tensor([1e-8, 1e-2, 1.0], dtype=torch.float64)


def one_by_one(name: str, ws: Tensor, reduce_none: bool = False) -> Tensor:
    """Train each member of a stack alone, with plain numbers."""
    step, start = method(name, per_member=False)
    ends = []
    for w, lr, eps in zip(ws, LRS.tolist(), EPSS.tolist(), strict=True):
        if reduce_none:
            step, start = method(name, per_member=True)
        state = start(w)
        for t in range(1, STEPS + 1):
            w, state = step(w, random_like(w, t), state, t, lr, eps)
        ends.append(w)
    return torch.stack(ends)


def stack() -> Tensor:
    return torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", NINE)
def test_vmap_over_members_with_their_own_lr_and_eps(name: str) -> None:
    step, start = method(name)
    ws = stack()
    state = [x.expand(3, *x.shape).clone() for x in start(ws[0])]
    for t in range(1, STEPS + 1):
        g = random_like(ws[0], t)
        ws, state = torch.func.vmap(step, in_dims=(0, None, 0, None, 0, 0))(ws, g, state, t, LRS, EPSS)
    torch.testing.assert_close(ws, one_by_one(name, stack()), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", NINE)
def test_a_stack_of_models_by_broadcasting(name: str) -> None:
    step, start = method(name, per_member=True)
    ws = stack()
    state = start(ws)
    shape = (3, 1, 1)
    for t in range(1, STEPS + 1):
        g = random_like(ws[0], t).expand_as(ws)
        ws, state = step(ws, g, state, t, LRS.reshape(shape), EPSS.reshape(shape))
    alone = one_by_one(name, stack(), reduce_none=name == "adashift")
    torch.testing.assert_close(ws, alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", NINE)
def test_t_as_a_tensor_and_nothing_in_place(name: str) -> None:
    step, start = method(name)
    w = stack()[0]
    state = start(w)
    by_number, by_tensor = (w, state), (w, state)
    for t in range(1, STEPS + 1):
        g = random_like(w, t)
        inputs = [by_number[0], g, *by_number[1]]
        before = [x.clone() for x in inputs]
        by_number = step(by_number[0], g, by_number[1], t, 0.01, 1e-3)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
        by_tensor = step(by_tensor[0], g, by_tensor[1], torch.tensor(float(t), dtype=torch.float64), 0.01, 1e-3)
    torch.testing.assert_close(by_number, by_tensor, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", NINE)
def test_rules_compile_without_a_break(name: str) -> None:
    step, start = method(name)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    w, lr = stack()[0], torch.tensor(0.01, dtype=torch.float64)
    plain, traced = (w, start(w)), (w, start(w))
    for t in range(1, 6):
        g, now = random_like(w, t), torch.tensor(float(t), dtype=torch.float64)
        plain = step(plain[0], g, plain[1], now, lr, 1e-3)
        traced = compiled(traced[0], g, traced[1], now, lr, 1e-3)
    torch.testing.assert_close(plain, traced, rtol=1e-12, atol=1e-13)


def test_bias_corrections_keep_their_digits_in_float32() -> None:
    """1 - beta^t from its definition in float32 is off by 5e-5 at t = 1; ours must not be."""
    for t in (1, 2, 1000):
        exact = 1 - 0.999**t
        got = bias_correction_of(0.999, torch.tensor(float(t)))
        assert isinstance(got, Tensor)
        assert got.item() == pytest.approx(exact, rel=3e-7)
        assert bias_correction_of(0.999, t) == pytest.approx(exact, rel=1e-12)
    assert bias_correction_of(0.0, 5) == 1


def test_the_rule_of_avagrad_is_one_short_function() -> None:
    lines = inspect.getsource(rules.delayed_step).splitlines()
    assert len(lines) <= 45
