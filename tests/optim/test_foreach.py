"""Foreach joins small tensors: layouts that differ, counts that differ, and what a step costs."""

from typing import Any

import pytest
import torch
from problems import DELAYED, optimizer_class, own_options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avagrad import AvaGrad, AvaStep

INF = torch.inf


def tensors_of_every_layout(rng: torch.Generator) -> list[Tensor]:
    """Return tensors that can be joined: contiguous, channels last, transposed; and with gaps, which cannot."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    last = normal(3, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    return [normal(4, 3), last, normal(2, 5).t(), normal(), normal(6, 4)[::2], normal(0, 2), normal(3, 1, 2), normal(7)]


def laid_out_otherwise(x: Tensor) -> Tensor:
    """Return a tensor with the same values and other strides."""
    return torch.stack([x, x], -1)[..., 0] if x.dim() < 2 else x.mT.contiguous().mT


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "active_only": True, "maximize": True}], ids=str)
def test_layouts_do_not_matter(name: str, dtype: torch.dtype, capturable: bool, options: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(0)
    options = own_options(name, **options)
    starts = [x.to(dtype) for x in tensors_of_every_layout(rng)]
    joined, alone = ([torch.nn.Parameter(x.clone()) for x in starts] for _ in range(2))
    gaps = torch.zeros(6, 4, dtype=dtype)
    joined[4] = torch.nn.Parameter(gaps[::2])
    joined[4].data.copy_(starts[4])
    assert joined[1].is_contiguous(memory_format=torch.channels_last)
    assert joined[3].dim() == 0
    assert not joined[4].is_contiguous()
    one = optimizer_class(name)(joined, lr=0.05, foreach=True, capturable=capturable, **options)
    two = optimizer_class(name)(alone, lr=0.05, foreach=False, **options)
    for t in range(9):
        for i, (p, q) in enumerate(zip(joined, alone, strict=True)):
            g = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(dtype)
            q.grad = None if i == t % 5 and t else g
            p.grad = None if q.grad is None else laid_out_otherwise(g) if t % 2 else torch.empty_like(p).copy_(g)
        kept = [None if p.grad is None else p.grad.clone() for p in joined]
        one.step()
        two.step()
        for p, before in zip(joined, kept, strict=True):
            assert before is None or (p.grad is not None and torch.equal(p.grad, before))
        close: dict[str, Any] = (
            {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2**-7, "atol": 1e-4}
        )
        for p, q in zip(joined, alone, strict=True):
            torch.testing.assert_close(p, q, **close)
            if dtype == torch.bfloat16:
                q.data.copy_(p.data)  # what is compared is one rounding
            else:
                assert_same_state(one.state[p], two.state[q])
    assert not gaps[1::2].any()  # what lies between is not ours


def assert_same_state(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    for key, value in two.items():
        torch.testing.assert_close(one[key], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounding_does_not_depend_on_what_is_joined(rounding: str) -> None:
    """The random bits come from the position in the parameter's own memory."""
    starts = [x.bfloat16() for x in tensors_of_every_layout(torch.Generator().manual_seed(0))]
    ends = []
    for joined in (False, True):
        params = [torch.nn.Parameter(x.clone()) for x in starts]
        groups = [{"params": params}] if joined else [{"params": [p]} for p in params]
        opt = avagrad_with_gamma_1(groups, foreach=True, rounding=rounding)
        rng = torch.Generator().manual_seed(1)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=rng).bfloat16()
            opt.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def avagrad_with_gamma_1(groups: list[dict[str, Any]], **options: Any) -> Any:
    return optimizer_class("DelayedAdam")(groups, lr=0.01, betas=(0.5, 0.999), **options)


def test_a_square_parameter_that_is_transposed_in_its_memory() -> None:
    """Its address and shape stay the same, but the order in which it is flat does not."""
    params = [[torch.nn.Parameter(torch.arange(9.0).reshape(3, 3)), torch.nn.Parameter(torch.ones(2))] for _ in "12"]
    optimizers = [AvaGrad(ps, lr=0.1, foreach=how) for ps, how in zip(params, (True, False), strict=True)]
    for t in range(6):
        for opt, (w, other) in zip(optimizers, params, strict=True):
            if t == 3:
                w.data = w.data.t()
            w.grad, other.grad = torch.arange(9.0).reshape(3, 3) - t, torch.ones(2)
            opt.step()
    torch.testing.assert_close(*[w for w, _ in params])


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", [INF, torch.nan])
@pytest.mark.parametrize("name", DELAYED)
def test_a_bad_first_gradient_moves_nothing(name: str, bad: float, capturable: bool) -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    opt = optimizer_class(name)([a, b, c], lr=0.1, foreach=True, capturable=capturable)
    for t in range(4):
        a.grad, b.grad, c.grad = torch.ones(2), None, torch.ones(2)
        if t == 3:
            b.grad = torch.tensor([1.0, bad])
        before = a.detach().clone()
        opt.step()
    assert torch.equal(b, torch.ones(2))
    assert (a < before).all()
    assert torch.equal(a, c)


def test_gradients_too_small_for_the_count_of_steps_that_are_not_0() -> None:
    """The squares of such steps are 0 in float32, but their coordinates are active."""
    gammas = []
    for foreach in (True, False):
        p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
        opt = AvaStep([p, q], eps=1e15, foreach=foreach)
        for _ in range(3):
            p.grad, q.grad = torch.tensor([1e-20, 0.0, 1.0]), torch.tensor([0.0, 1e-19])
            opt.step()
        assert opt.state[p]["exp_avg_sq"][0] > 0
        gammas.append(opt.diagnostics()["gamma"])
    assert gammas[0] == pytest.approx(gammas[1], rel=1e-6)
    assert gammas[0] > 1e14


class NewTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors that are made with memory of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = {x.untyped_storage()._cdata for x in tree_leaves(out) if isinstance(x, Tensor)}
        self.count += len(made - known)
        return out


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_allocates_as_much_for_few_tensors_as_for_many(name: str, dtype: torch.dtype) -> None:
    counts = []
    for n in (3, 60):
        params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(n)]
        opt = optimizer_class(name)(params, foreach=True, weight_decay=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            with NewTensors() as made:
                opt.step()
        counts.append(made.count)
    assert 5 < counts[0] == counts[1]
