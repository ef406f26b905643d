"""What users of torch.optim take for granted: groups, gradients that come and go, hooks, schedulers, devices."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    ALL,
    DELAYED,
    PATHS,
    as_float64,
    gradients,
    optimizer_class,
    parameters,
)
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avagrad import AvaGrad
from avagrad.optim import foreach


def step_with(opt: Any, params: list[torch.nn.Parameter], grads: list[Tensor | None]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone()
    opt.step()


def twin(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


# --- groups and gradients that come and go -------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("active_only", [True, False])
def test_frozen_thawed_late_and_absent_parameters(path: str, bias_correction: bool, active_only: bool) -> None:
    """A parameter that starts frozen, one that is frozen later, one in a group added later, one that never has a
    gradient: the norm is the reference's at every step."""
    made = [torch.randn(3, generator=torch.Generator().manual_seed(i)).double() for i in range(5)]
    frozen, leaves, late, never, plain = (torch.nn.Parameter(x) for x in made)
    frozen.requires_grad_(False)
    options: dict[str, Any] = {"lr": 0.1, "eps": 0.01, **PATHS[path]}
    options |= {"bias_correction": bias_correction, "active_only": active_only}
    groups: list[dict[str, Any]] = [{"params": [frozen, leaves]}, {"params": [never, plain], "eps": 0.3}]
    opt = AvaGrad(groups, **options)

    def known(p: Tensor, eps: float, requires_grad: bool = True) -> reference.Param:
        return reference.Param(as_float64(p), 0.1, 0.9, 0.999, eps, 0.0, requires_grad=requires_grad)

    oracle = reference.DelayedFamily(
        [known(frozen, 0.01, False), known(leaves, 0.01), known(never, 0.3), known(plain, 0.3)],
        normalised=True,
        bias_correction=bias_correction,
        active_only=active_only,
    )
    params = [frozen, leaves, never, plain]
    rng = torch.Generator().manual_seed(9)
    for t in range(12):
        if t == 4:
            frozen.requires_grad_(True)
            oracle.params[0].requires_grad = True
        if t == 6:
            leaves.requires_grad_(False)
            oracle.params[1].requires_grad = False
        if t == 8:
            opt.add_param_group({"params": [late], "eps": 1e-4, "lr": 0.02})
            params.append(late)
            oracle.params.append(known(late, 1e-4))
            oracle.params[-1].lr = 0.02
        grads: list[Tensor | None] = [
            torch.randn(3, generator=rng).double()
            if p.requires_grad and p is not never and (p is not late or t > 9)
            else None
            for p in params
        ]
        step_with(opt, params, grads)
        oracle.step([None if g is None else as_float64(g) for g in grads])
        for p, want in zip(params, oracle.params, strict=True):
            torch.testing.assert_close(p.detach(), torch.from_numpy(want.w), rtol=1e-12, atol=1e-13)
    assert opt.diagnostics()["gamma"] == pytest.approx(oracle.gamma(), rel=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("path", PATHS)
def test_no_gradients_at_all(name: str, path: str) -> None:
    params = parameters()
    before = twin(params)
    opt = optimizer_class(name)([{"params": params[:2]}, {"params": params[2:]}, {"params": []}], **PATHS[path])
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert not opt.state
    step_with(opt, params, [None, torch.ones(()), *[None] * 4])
    step_with(opt, params, [None] * 6)
    assert opt.state[params[1]]["step"] == 1


@pytest.mark.parametrize("path", PATHS)
def test_the_norm_does_not_depend_on_who_has_a_gradient(path: str) -> None:
    """Theorem 2 needs gamma to be independent of the sample: the same state gives the same gamma."""
    gammas = []
    for second in (torch.ones(3), None):
        a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
        opt = AvaGrad([a, b], betas=(0.0, 0.9), lr=1.0, **PATHS[path])
        step_with(opt, [a, b], [torch.ones(3), torch.full((3,), 100.0)])
        step_with(opt, [a, b], [torch.ones(3), second])
        gammas.append(a.detach().clone())
    assert torch.equal(*gammas)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("path", PATHS)
def test_complex_parameters_are_pairs_of_reals(name: str, path: str) -> None:
    rng = torch.Generator().manual_seed(0)
    z = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex128, generator=rng))
    x = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
    other = [torch.nn.Parameter(torch.ones(2).double()) for _ in range(2)]
    options = {"weight_decay": 0.1, "bias_correction": False, **PATHS[path]}
    never = [torch.nn.Parameter(torch.zeros(5, dtype=torch.complex128)), torch.nn.Parameter(torch.zeros(5, 2).double())]
    complex_opt = optimizer_class(name)([z, other[0], never[0]], **options)
    real_opt = optimizer_class(name)([x, other[1], never[1]], **options)
    for t in range(8):
        g = torch.randn(4, 3, dtype=torch.complex128, generator=rng)
        z.grad = g.conj().conj() if t % 2 else torch.conj(torch.conj_physical(g))  # lazily conjugated, every other time
        x.grad = torch.view_as_real(g).clone()
        other[0].grad, other[1].grad = torch.ones(2).double(), torch.ones(2).double()
        complex_opt.step()
        real_opt.step()
    torch.testing.assert_close(torch.view_as_real(z.detach()), x.detach(), rtol=1e-13, atol=1e-14)
    assert complex_opt.state[z]["exp_avg_sq"].shape == z.shape


def test_a_group_may_hold_anything_of_the_users_own() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    own = {"weights": torch.ones(3), "tags": ("a", torch.ones(2)), "initial_lr": 0.3}
    opt = AvaGrad([{"params": [w], **own}])
    w.grad = torch.ones(2)
    opt.step()
    assert all(opt.param_groups[0][key] is value for key, value in own.items())


def test_named_parameters_and_a_name_of_ones_own() -> None:
    model = torch.nn.Linear(2, 2)
    opt = AvaGrad(model.named_parameters())
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("name", ALL)
def test_splitting_off_a_no_decay_group_keeps_one_gamma(name: str) -> None:
    """Per-group norms would change the algorithm by factors of hundreds."""
    one, two = parameters(torch.float64), parameters(torch.float64)
    whole = optimizer_class(name)(one)
    split = optimizer_class(name)([{"params": two[:1]}, {"params": two[1:4]}, {"params": two[4:]}])
    for grads in gradients(one, 15):
        step_with(whole, one, grads)
        step_with(split, two, grads)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


# --- lr, schedulers, closures, hooks -------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_lr_as_a_tensor(name: str, path: str, shape: tuple[int, ...]) -> None:
    one, two = parameters(torch.float64), parameters(torch.float64)
    number = optimizer_class(name)(one, lr=0.03, weight_decay=0.1, **PATHS[path])
    lr = torch.full(shape, 0.03, dtype=torch.float64)
    tensor = optimizer_class(name)(two, lr=lr, weight_decay=0.1, **PATHS[path])
    for t, grads in enumerate(gradients(one, 15)):
        if t == 12:
            number.param_groups[0]["lr"] = 0.01
            lr.fill_(0.01)
        step_with(number, one, grads)
        step_with(tensor, two, grads)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda t: t / 5),  # starts at 0
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda t: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [3, 6]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 8),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.001, 0.1, step_size_up=3),  # cycles betas
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20),  # cycles betas
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [4]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 0.01, anneal_epochs=4),
}


def test_the_list_of_schedulers_is_torchs() -> None:
    every = {name for name in lr_scheduler.__all__ if name != "LRScheduler"} | {"SWALR"}
    assert set(SCHEDULERS) == every


@pytest.mark.filterwarnings("ignore:Detected call of")  # reading the scheduler's warning is not our subject
@pytest.mark.parametrize("name", ["AvaGrad", "AvaGradW", "AdaBound"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler(name: str, scheduler: str, tensor_lr: bool) -> None:
    """Ours follows what the scheduler does to lr and betas: the same as setting both by hand."""
    one, two = parameters(torch.float64), parameters(torch.float64)
    opt = optimizer_class(name)(one, lr=torch.tensor(0.05, dtype=torch.float64) if tensor_lr else 0.05)
    by_hand = optimizer_class(name)(two, lr=0.05)
    follow = SCHEDULERS[scheduler](opt)
    for grads in gradients(one, 12):
        for key in ("lr", "betas"):
            value = opt.param_groups[0][key]
            by_hand.param_groups[0][key] = value.item() if isinstance(value, Tensor) else value
        step_with(opt, one, grads)
        step_with(by_hand, two, grads)
        follow.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
        assert p.isfinite().all()


def test_adabound_follows_a_schedule_from_its_base_lr() -> None:
    """base_lr is the group's first lr: it survives schedulers, checkpoints and late groups."""
    a, b = parameters()[0], parameters()[4]
    opt = optimizer_class("AdaBound")([a], lr=0.01)
    lr_scheduler.LambdaLR(opt, lambda t: 0.5)
    assert opt.param_groups[0]["lr"] == 0.005
    opt.add_param_group({"params": [b], "lr": torch.tensor(0.25)})
    assert [group["base_lr"] for group in opt.param_groups] == [0.01, 0.25]
    again = optimizer_class("AdaBound")([{"params": [a]}, {"params": [b]}], lr=1.0)
    again.load_state_dict(opt.state_dict())
    assert [group["base_lr"] for group in again.param_groups] == [0.01, 0.25]
    zero = optimizer_class("AdaBound")([a], lr=0.0)
    zero.param_groups[0]["lr"] = 0.01
    a.grad = torch.ones_like(a)
    zero.step()
    assert a.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_closure_hooks_and_zero_grad(name: str) -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    opt = optimizer_class(name)([w])
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = w.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        calls.append("closure")
        return loss

    with torch.no_grad():
        assert opt.step(closure) == 5
    assert calls == ["pre", "closure", "post"]
    opt.zero_grad(set_to_none=False)
    assert torch.equal(w.grad, torch.zeros(2))  # type: ignore[arg-type]
    opt.zero_grad()
    assert w.grad is None


@pytest.mark.parametrize("name", ALL)
def test_the_first_step_is_dead_only_with_bias_correction(name: str) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = optimizer_class(name)([w], weight_decay=0.1)
    w.grad = torch.ones(3)
    opt.step()
    moved = not torch.equal(w, torch.ones(3))
    assert moved == (name == "AdaBound")
    if name in DELAYED:
        v = torch.nn.Parameter(torch.ones(3).double())
        opt = optimizer_class(name)([v], lr=0.5, eps=0.1, bias_correction=False)
        v.grad = torch.ones(3).double()
        opt.step()
        gamma_eta = 10.0 if name == "DelayedAdam" else 1.0
        torch.testing.assert_close(v.detach(), torch.full_like(v, 1 - 0.5 * gamma_eta * 0.1))


# --- what a step costs beside arithmetic ---------------------------------------------------------


class CountsReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts host reads of anything but the tensors that are allowed to be read."""

    def __init__(self, allowed: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed = {x.data_ptr() for x in allowed}
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].data_ptr() not in self.allowed:
            self.reads += 1
        return func(*args, **(kwargs or {}))


def test_the_count_of_reads_can_fail() -> None:
    with CountsReads([]) as counter:
        torch.ones(()).item()
    assert counter.reads == 1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"active_only": True, "norm": 1}, {"bias_correction": False}], ids=str)
def test_a_step_reads_nothing_but_steps_and_lr_on_the_host(name: str, path: str, options: dict[str, Any]) -> None:
    if options and name not in ("AvaGrad", "AvaGradW"):
        options = {}
    params = parameters()
    lr = torch.tensor(0.1)
    opt = optimizer_class(name)(params, lr=lr, weight_decay=0.1, **options, **PATHS[path])
    capturable = PATHS[path].get("capturable", False)
    for t, grads in enumerate(gradients(params, 14)):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        if t < 5:  # until every parameter has its state
            opt.step()
            continue
        # With capturable nothing at all is read on the host; without it steps and lr live there.
        with CountsReads([] if capturable else [lr, *(state["step"] for state in opt.state.values())]) as counter:
            opt.step()
        assert counter.reads == 0


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of all storages that were made under it, and remembers their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = self.seen | {x.untyped_storage()._cdata for x in inputs}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self.seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(x, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "active_only": True, "maximize": True}], ids=str)
def test_foreach_makes_no_second_copy_of_the_parameters(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 2**14
    monkeypatch.setattr(foreach, "BLOCK", block)
    params = [torch.nn.Parameter(torch.zeros(block // 2 + 1, dtype=dtype)) for _ in range(8)]
    params.append(torch.nn.Parameter(torch.zeros(6, block, dtype=dtype)))  # one that is larger than a block
    opt = AvaGrad(params, foreach=True, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    gc.collect()
    with LiveBytes() as memory:
        opt.step()
    assert memory.peak >= 4 * block  # or it measures nothing
    assert memory.peak <= 8 * 4 * block  # temporaries of some blocks, however many blocks the parameters have


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = parameters(torch.float64), parameters(torch.float64)
    whole = AvaGrad(one, weight_decay=0.1, active_only=True, foreach=True)
    pieces = AvaGrad(two, weight_decay=0.1, active_only=True, foreach=True)
    for grads in gradients(one, 15):
        step_with(whole, one, grads)
        with monkeypatch.context() as patch:
            patch.setattr(foreach, "BLOCK", 4)
            step_with(pieces, two, grads)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)


@given(shape=st.lists(st.integers(0, 7), max_size=4), size=st.integers(1, 9))
def test_blocks_cover_a_tensor_once(shape: list[int], size: int) -> None:
    x = torch.zeros(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreach, "BLOCK", size)
        pieces = foreach.blocks(x)
    for piece in pieces:
        piece += 1
    assert torch.equal(x, torch.ones(shape))
    assert all(piece.numel() <= size for piece in pieces)


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("use_foreach", [None, False, True])
@pytest.mark.parametrize("active_only", [False, True])
def test_parameters_on_several_devices(name: str, use_foreach: bool | None, active_only: bool) -> None:
    """Fake tensors refuse to mix devices and have no values to read; "lazy" ones need no GPU to pretend."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    options: dict[str, Any] = {"active_only": active_only} if name in DELAYED else {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [torch.nn.Parameter(torch.ones(3, 2, device=f"lazy:{i % 2}")) for i in range(5)]
        opt = optimizer_class(name)(
            [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}],
            lr=0.1,
            weight_decay=0.1,
            capturable=True,
            foreach=use_foreach,
            **options,
        )
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
        assert {state["step"].device.index for state in opt.state.values()} == {0, 1}
        assert all(state["exp_avg_sq"].device == p.device for p, state in opt.state.items())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("use_foreach", [False, True])
def test_tools_may_run_steps_on_fake_tensors(name: str, use_foreach: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        w = torch.nn.Parameter(torch.ones(3, 2))
        opt = optimizer_class(name)([w], foreach=use_foreach)
        for _ in range(3):
            w.grad = torch.ones_like(w)
            opt.step()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("path", PATHS)
def test_cpu_and_cuda_parameters_share_one_gamma(name: str, path: str) -> None:
    one, two = parameters(torch.float64), parameters(torch.float64)
    mixed = [torch.nn.Parameter(p.detach().cuda() if i % 2 else p.detach()) for i, p in enumerate(two)]
    here = optimizer_class(name)(one, lr=0.05, **PATHS[path])
    there = optimizer_class(name)(mixed, lr=0.05, **PATHS[path])
    for grads in gradients(one, 15):
        step_with(here, one, grads)
        step_with(there, mixed, [None if g is None else g.to(p.device) for g, p in zip(grads, mixed, strict=True)])
    for p, q in zip(one, mixed, strict=True):
        torch.testing.assert_close(p.detach(), q.detach().cpu(), rtol=1e-12, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("use_foreach", [False, True])
def test_a_cuda_graph_holds_the_step(name: str, use_foreach: bool) -> None:
    def start() -> tuple[list[torch.nn.Parameter], Any, Tensor]:
        params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(torch.float64)]
        lr = torch.tensor(0.05, dtype=torch.float64, device="cuda")
        opt = optimizer_class(name)(params, lr=lr, weight_decay=0.1, capturable=True, foreach=use_foreach)
        for p in params:
            p.grad = torch.ones_like(p)
        return params, opt, lr

    eager, eager_opt, eager_lr = start()
    graphed, graphed_opt, graphed_lr = start()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for opt in (eager_opt, graphed_opt):
            opt.step()
            opt.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed_opt.step()
    rng = torch.Generator().manual_seed(0)
    for t in range(14):
        for p, q in zip(eager, graphed, strict=True):
            g = torch.randn(p.shape, generator=rng, dtype=torch.float64).cuda()
            p.grad.copy_(g)  # type: ignore[union-attr]
            q.grad.copy_(g)  # type: ignore[union-attr]
        for lr in (eager_lr, graphed_lr):
            lr.fill_(0.05 / (t + 1))
        eager_opt.step()
        graph.replay()
    torch.cuda.synchronize()
    for p, q in zip(eager, graphed, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_cuda_step_never_synchronises(name: str, path: str, tensor_lr: bool) -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    lr = torch.tensor(0.1, device="cuda") if tensor_lr else 0.1
    opt = optimizer_class(name)(params, lr=lr, weight_decay=0.1, **PATHS[path])
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(13):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_a_cuda_lr_has_arrived_when_cpu_parameters_need_it(name: str) -> None:
    one, two = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.0, device="cuda")
    here, there = optimizer_class(name)([one], lr=0.1), optimizer_class(name)([two], lr=lr)
    there.param_groups[0]["base_lr"] = 0.1
    for t in range(1, 16):
        one.grad, two.grad = torch.ones(3), torch.ones(3)
        here.param_groups[0]["lr"] = 0.1 / t
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # the new value is still on its way when the step begins
        lr.fill_(0.1 / t)
        here.step()
        there.step()
    torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capturing_host_scalars_is_refused() -> None:
    w = torch.nn.Parameter(torch.ones(2, device="cuda"))
    w.grad = torch.ones_like(w)
    opt = AvaGrad([w])
    opt.step()
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


def test_foreach_is_chosen_as_torch_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from avagrad.optim import entries

    group = {"foreach": None, "fused": None, "differentiable": False}
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(2))]
    assert entries.prefers_foreach(group, params) is False  # torch: the loop, on a CPU
    monkeypatch.setattr(
        entries, "_default_to_fused_or_foreach", lambda params, differentiable, use_fused: (False, True)
    )
    assert entries.prefers_foreach(group, params) is True
    assert entries.prefers_foreach({**group, "foreach": False}, params) is False
    assert entries.prefers_foreach({**group, "fused": False}, params) is False
