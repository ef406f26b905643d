"""Foreach joins small tensors: layouts that differ, counts that differ, and what a step costs."""

import contextlib
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from problems import DELAYED, is_fused, optimizer_class, own_options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avagrad import AvaGrad, AvaGradW, AvaStep
from avagrad.optim.backends.foreach import Foreach
from avagrad.optim.backends.fused import Fused
from avagrad.optim.backends.loop import blocks

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


def test_frozen_parameters_between_small_ones_do_not_keep_them_apart() -> None:
    counts = []
    for frozen in (0, 2**18):
        params = []
        for _ in range(20):
            params += [torch.nn.Parameter(torch.empty(frozen), requires_grad=False)] * bool(frozen)
            params.append(torch.nn.Parameter(torch.ones(5)))
        opt = AvaStep(params, foreach=True)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p) if p.requires_grad else None
            with NewTensors() as made:
                opt.step()
        counts.append(made.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("path", ["loop", "foreach", "foreach joined", "fused"])
def test_a_gradient_that_is_the_weight_itself(path: str) -> None:
    """That of |w|^2 / 2. Decay must not reach it before it is read."""
    how: dict[str, Any] = {"loop": {"foreach": False}, "fused": {}}.get(path, {"foreach": True})
    params = [torch.nn.Parameter(torch.tensor([1.0, 2.0]).double()) for _ in range(1 + (path == "foreach joined"))]
    other = torch.nn.Parameter(torch.tensor([1.0, 2.0]).double())
    opt, expected = (AvaGradW(ps, lr=0.1, weight_decay=0.5, **how) for ps in (params, [other]))
    for _ in range(3):
        for p in params:
            p.grad = p.data
        other.grad = other.detach().clone()
        opt.step()
        expected.step()
    torch.testing.assert_close(params[0].detach(), other.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("starts", [(0, 0), (0, 2), (0, 4), (2, 4, 0)], ids=str)
def test_parameters_that_share_memory_all_move(name: str, starts: tuple[int, ...]) -> None:
    """The same memory, parts of it, and neighbours: each update counts, as in the loop."""
    ends = []
    for foreach in (True, False):
        base = torch.linspace(1, 2, 8, dtype=torch.float64)
        params = [torch.nn.Parameter(base[start : start + 4]) for start in starts]
        opt = optimizer_class(name)(params, lr=0.1, foreach=foreach, fused=False)
        for t in range(4):
            for p in params:
                p.grad = torch.full_like(p, t + 1.0)
            opt.step()
        ends.append(base)
    assert (ends[0] != torch.linspace(1, 2, 8, dtype=torch.float64)).any()
    torch.testing.assert_close(*ends, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("place", [0, 15_999, 16_000])
def test_kernels_do_not_move_parameters_that_share_memory(
    options: dict[str, Any], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their threads would write to it at the same time; neighbours in one storage are apart."""
    base = torch.ones(16_001)
    a, b = torch.nn.Parameter(base[:16_000]), torch.nn.Parameter(base[place : place + 1])
    opt = AvaGrad([a, b], **options)
    with monkeypatch.context() as patch:
        if place < 16_000:
            patch.delattr(Fused, "move")
        for _ in range(2):
            a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
            opt.step()
    assert is_fused(opt)  # a copy, in which each has memory of its own


def test_only_the_groups_that_share_memory_go_without_kernels() -> None:
    base, plain = torch.ones(8), torch.nn.Parameter(torch.ones(8))
    a, b = torch.nn.Parameter(base[:6]), torch.nn.Parameter(base[4:])
    opt = AvaGrad([{"params": [plain]}, {"params": [a]}, {"params": [b]}])
    for p in (plain, a, b):
        p.grad = torch.ones_like(p)
    opt.step()
    assert opt._params is not None
    assert [(type(each), len(each.views)) for each in opt._params.backends] == [(Fused, 1), (Foreach, 2)]


@pytest.mark.parametrize("moved", [lambda x: x.clone(), lambda x: x.t().contiguous().t()], ids=["memory", "layout"])
@pytest.mark.parametrize("numel", [12, 2**20 + 12], ids=["joined", "in blocks"])
def test_a_hook_may_move_a_parameter_inside_backward(moved: Any, numel: int) -> None:
    ends = []
    for foreach in (True, False):
        a, b = (torch.nn.Parameter(torch.linspace(1, 2, numel, dtype=torch.float64).view(4, -1)) for _ in range(2))
        opt = AvaGrad([a, b], lr=0.1, foreach=foreach, fused=False)

        def move(g: Tensor, a: Tensor = a) -> None:
            a.data = moved(a.data)

        with opt.step_in_backward():
            for t in range(4):
                if t == 2:
                    a.register_hook(move)  # type: ignore[no-untyped-call]
                (a * a + b * b).sum().backward()  # type: ignore[no-untyped-call]
                opt.step()
        ends.append((a.detach(), b.detach()))
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=0)


def gamma_after_step(opt: Any, loss: Tensor, in_backward: bool) -> float:
    with opt.step_in_backward() if in_backward else contextlib.nullcontext():
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.zero_grad()
    return float(opt.gamma())


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("options", [{}, {"active_only": True, "norm": 1}], ids=str)
@pytest.mark.parametrize("unused", [0, 7, 12])
def test_inside_backward_the_bits_are_the_same_with_an_unused_parameter(
    capturable: bool, options: dict[str, Any], unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a state inside backward and none otherwise; the others are joined, and added up, as without it."""
    monkeypatch.setattr("avagrad.optim.backends.loop.CPU_BLOCK", 2**11)
    sizes = [40, 900, 30, 50, 2500, 60, 7, 33, 64, 20, 11, 62, 58, 41]
    ends = []
    for in_backward in (False, True):
        rng = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(n, generator=rng)) for n in sizes]
        groups: list[dict[str, Any]] = [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.1}]
        opt = AvaGrad(groups, lr=0.1, foreach=True, capturable=capturable, **options)
        gammas = []
        for _ in range(8):
            factors = [torch.randn(n, generator=rng) for n in sizes]
            pairs = [(p, f) for i, (p, f) in enumerate(zip(params, factors, strict=True)) if i != unused]
            loss: Any = sum(((p * f).sin() * f).sum() for p, f in pairs)
            gammas.append(gamma_after_step(opt, loss, in_backward))
        ends.append(([p.detach() for p in params], gammas))
    assert all(torch.equal(x, y) for x, y in zip(ends[0][0], ends[1][0], strict=True))
    assert ends[0][1] == ends[1][1]


def test_inside_backward_the_bits_are_the_same_if_an_unused_parameter_shares_memory() -> None:
    ends = []
    for in_backward in (False, True):
        rng = torch.Generator().manual_seed(0)
        base = torch.randn(300, generator=rng)
        used, unused = torch.nn.Parameter(base[:200]), torch.nn.Parameter(base[100:])
        others = [torch.nn.Parameter(torch.randn(n, generator=rng)) for n in (177, 91)]
        opt, gammas = AvaGrad([used, unused, *others], lr=0.1, foreach=True), []
        for _ in range(8):
            loss: Any = sum((p * torch.randn(p.shape, generator=rng)).sin().sum() for p in (used, *others))
            gammas.append(gamma_after_step(opt, loss, in_backward))
        ends.append(gammas)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("numel", [100, 2**20 + 1], ids=["joined", "in blocks"])
def test_memory_of_weights_that_are_replaced_is_freed(numel: int) -> None:
    memory = np.ones(numel, dtype=np.float32)
    p, q = torch.nn.Parameter(torch.from_numpy(memory)), torch.nn.Parameter(torch.ones(3))
    freed = weakref.ref(memory)
    del memory
    opt = AvaGrad([p, q], foreach=True)
    for _ in range(3):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        opt.step()
    assert freed() is not None
    p.data = torch.empty(0)
    assert freed() is None


def test_large_tensors_are_split_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for count in (8, 32):
        with monkeypatch.context() as patch:
            patch.setattr("avagrad.optim.backends.loop.CPU_BLOCK", 16)
            p = torch.nn.Parameter(torch.ones(16 * count))
            p.grad = torch.ones_like(p)
            opt = AvaGrad([p], foreach=True)
            for _ in range(2):
                opt.step()
            made: list[int] = []
            patch.setattr("avagrad.optim.backends.foreach.blocks", lambda x, made=made: made.append(1) or blocks(x))
            opt.step()
            calls.append(len(made))
    assert calls[0] == calls[1] == 2


def test_kahan_with_a_parameter_that_became_half() -> None:
    a, b = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(3))
    gammas = []
    for foreach in (True, False):
        a.data, b.data = torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
        opt = AvaGrad([a, b], rounding="kahan", foreach=foreach, fused=False)
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        opt.step()
        b.grad = None
        b.data = b.data.bfloat16()
        gammas.append(opt.gamma())
    assert gammas[0] == pytest.approx(gammas[1], rel=1e-6)


class OwnParameter(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("numel", [100, 2**20 + 1], ids=["small", "in blocks"])
def test_a_parameter_of_another_class_may_get_other_memory(numel: int) -> None:
    p = OwnParameter(torch.ones(numel))
    opt = AvaGrad([p], lr=0.1, foreach=True)
    for t in range(4):
        if t == 2:
            p.data = p.data.clone()
        p.grad = torch.ones(numel)
        opt.step()
    torch.testing.assert_close(p.detach(), torch.full((numel,), 0.7))  # a first step does not move


def test_tensors_of_a_large_module_can_be_swapped() -> None:
    module = torch.nn.Linear(1100, 1100)
    opt = AvaGrad(module.parameters(), foreach=True)
    for _ in range(3):
        module(torch.ones(2, 1100)).sum().backward()
        opt.step()
        opt.zero_grad()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("path", [{"foreach": True}, {"foreach": True, "capturable": True}, {"fused": False}], ids=str)
def test_a_first_gradient_moves_nothing_even_if_gamma_is_nan(path: dict[str, Any]) -> None:
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    opt = AvaGrad([a, b], **path)
    for g in (1.0, torch.nan):
        a.grad = torch.full_like(a, g)
        opt.step()
    b.grad = torch.ones_like(b)
    opt.step()
    assert a.isnan().all()
    assert torch.equal(b, torch.ones(3))
