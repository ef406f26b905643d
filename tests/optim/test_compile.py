"""torch.compile and a step: it is called as it is, nothing is compiled again and again, the numbers are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import ALL, DELAYED, EVERY_PATH, optimizer_class
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

STEPS = 30
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: LambdaLR(opt, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=0.2, total_steps=STEPS + 5),
    "from zero": lambda opt: LambdaLR(opt, lambda t: t / STEPS),
}


def train(name: str, schedule: str, backend: Any, **options: Any) -> tuple[list[Tensor], list[int]]:
    """Return the trained parameters, and the number of compilations after each step."""
    torch._dynamo.reset()
    rng = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in [(4, 3), (5,), (2,), ()]]
    groups = [{"params": params[:2]}, {"params": params[2:], "eps": 0.5, "weight_decay": 0.1}]
    opt = optimizer_class(name)(groups, lr=torch.tensor(0.1), **options)
    scheduler = SCHEDULES[schedule](opt)

    def step(grads: list[Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g * 1
        if grads[0].sum() > 0:  # gradients that come and go
            params[1].grad = None
        opt.step()

    run: Any = step if backend is None else torch.compile(step, backend=backend)
    counts = []
    for _ in range(STEPS):
        run([torch.randn(p.shape, generator=rng) for p in params])
        scheduler.step()
        counts.append(getattr(backend, "frame_count", 0))
    return [p.detach() for p in params], counts


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "schedule", "path"),
    [
        *[(name, schedule, "loop") for name in ALL for schedule in ("LambdaLR", "OneCycleLR")],
        *[(name, "OneCycleLR", path) for name in DELAYED for path in ("foreach", "fused")],
        ("AvaGrad", "from zero", "loop"),
        ("AvaGradW", "from zero", "foreach"),
    ],
)
def test_a_compiled_training_step_is_not_compiled_again(name: str, schedule: str, path: str) -> None:
    compiled, counts = train(name, schedule, CompileCounter(), **EVERY_PATH[path])
    assert counts[0] > 0  # something was compiled
    assert counts[-1] == counts[4], counts
    eager, _ = train(name, schedule, None, **EVERY_PATH[path])
    assert all(torch.equal(p, q) for p, q in zip(compiled, eager, strict=True))


@pytest.mark.parametrize("path", EVERY_PATH)
def test_compiled_and_plain_steps_can_be_mixed(path: str) -> None:
    ends = []
    for mixed in (False, True):
        torch._dynamo.reset()
        rng = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, generator=rng)) for _ in range(2)]
        opt = optimizer_class("AvaGrad")(params, lr=torch.tensor(0.1), **EVERY_PATH[path])
        compiled = torch.compile(opt.step, backend="eager")
        for t in range(9):
            for p in params:
                p.grad = torch.randn(p.shape, generator=rng)
            for key, value in {"eps": 0.1 * (t + 1), "weight_decay": 0.1 / (t + 1)}.items():
                opt.param_groups[0][key] = value
            (compiled if mixed and t % 3 == 1 else opt.step)()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))
