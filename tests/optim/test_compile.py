"""torch.compile(opt.step): few recompilations, the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import ALL, DELAYED, optimizer_class
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

STEPS = 50
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: LambdaLR(opt, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=0.2, total_steps=STEPS + 5),
    "from zero": lambda opt: LambdaLR(opt, lambda t: t / STEPS),
}


def train(
    name: str, schedule: str, backend: Any, steps: int = STEPS, absent: bool = False, **options: Any
) -> tuple[list[Tensor], list[int]]:
    """Return the trained parameters, and the number of compilations after each step."""
    torch._dynamo.reset()
    rng = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in [(4, 3), (5,), (2,), ()]]
    groups = [{"params": params[:2]}, {"params": params[2:], "eps": 0.5, "weight_decay": 0.1}]
    opt = optimizer_class(name)(groups, lr=torch.tensor(0.1), **options)
    scheduler = SCHEDULES[schedule](opt)
    step = opt.step if backend is None else torch.compile(opt.step, backend=backend)
    counts = []
    for t in range(steps):
        for i, p in enumerate(params):
            g = torch.randn(p.shape, generator=rng)
            p.grad = None if absent and i == 1 and t % 3 == 2 else g
        step()
        scheduler.step()
        counts.append(getattr(backend, "frame_count", 0))
    return [p.detach() for p in params], counts


@pytest.mark.parametrize(
    ("name", "schedule", "use_foreach"),
    [
        *[(name, schedule, False) for name in ALL for schedule in ("LambdaLR", "OneCycleLR")],
        *[(name, schedule, True) for name in DELAYED for schedule in ("LambdaLR", "OneCycleLR")],
        ("AvaGrad", "from zero", False),
        ("AvaGradW", "from zero", True),
    ],
)
def test_one_recompilation_at_most(name: str, schedule: str, use_foreach: bool) -> None:
    compiled, counts = train(name, schedule, CompileCounter(), foreach=use_foreach)
    assert counts[0] > 0  # something was compiled
    assert counts[-1] - counts[1] <= 1, counts
    eager, _ = train(name, schedule, None, foreach=use_foreach)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"bias_correction": False}, {"active_only": True, "norm": 1}], ids=str)
def test_gradients_that_come_and_go_under_compile(options: dict[str, Any]) -> None:
    compiled, counts = train("AvaGrad", "LambdaLR", CompileCounter(), 15, absent=True, **options)
    assert counts[-1] <= 3
    eager, _ = train("AvaGrad", "LambdaLR", None, 15, absent=True, **options)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_freezing_what_never_had_a_gradient_is_seen_by_a_compiled_step() -> None:
    """Without bias correction it counts in the norm until it is frozen."""
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        opt = optimizer_class("AvaGrad")([a, b], lr=torch.tensor(0.1), eps=0.01, bias_correction=False)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        a.grad = torch.ones(2)
        for t in range(4):
            b.requires_grad_(t < 2)
            step()
        ends.append(a.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=0)


def test_numbers_that_change_by_hand_are_seen_by_a_compiled_step() -> None:
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        opt = optimizer_class("AvaGradW")([w], lr=0.1, weight_decay=0.1)  # lr a number
        counter = CompileCounter()
        step = torch.compile(opt.step, backend=counter) if compiled else opt.step
        for t in range(12):
            w.grad = torch.tensor([1.0, 0.1 * t])
            for key, value in {"lr": 0.1 / (t + 1), "eps": 0.1 * (t + 1), "weight_decay": 0.1 / (t + 1)}.items():
                opt.param_groups[0][key] = value
            step()
        assert counter.frame_count <= 3
        ends.append(w.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=0)


def test_compiled_and_plain_steps_can_be_mixed() -> None:
    """What the norm keeps between plain steps must not survive a compiled one."""
    ends = []
    for mixed in (False, True):
        torch._dynamo.reset()
        rng = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, generator=rng)) for _ in range(2)]
        opt = optimizer_class("AvaGrad")(params, lr=torch.tensor(0.1))
        compiled = torch.compile(opt.step, backend="inductor")
        for t in range(9):
            for p in params:
                p.grad = torch.randn(p.shape, generator=rng)
            (compiled if mixed and t % 3 == 1 else opt.step)()
        ends.append([p.detach() for p in params])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_foreach", [False, True])
def test_inductor_gives_the_same_numbers(use_foreach: bool) -> None:
    backend = CompileCounterWithBackend("inductor")
    options: dict[str, Any] = {"foreach": use_foreach, "active_only": True}
    compiled, counts = train("AvaGradW", "OneCycleLR", backend, 12, **options)
    assert counts[-1] - counts[1] <= 1
    eager, _ = train("AvaGradW", "OneCycleLR", None, 12, **options)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
