"""Several devices, fake ones, CUDA graphs, and which path is chosen where."""

import itertools
from typing import Any

import pytest
import torch
from problems import (
    ALL,
    DELAYED,
    PATHS,
    gradients,
    optimizer_class,
    own_options,
    parameters,
    step_with,
)
from torch import Tensor

from avagrad import AvaGrad


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("use_foreach", [None, False, True])
@pytest.mark.parametrize("active_only", [False, True])
def test_parameters_on_several_devices(name: str, use_foreach: bool | None, active_only: bool) -> None:
    """Fake tensors refuse to mix devices and have no values to read; "lazy" ones need no GPU to pretend."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    options: dict[str, Any] = own_options(name, active_only=active_only) if name in DELAYED else {}
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
@pytest.mark.parametrize(
    ("name", "path"), [*itertools.product(ALL, ["loop", "foreach"]), *itertools.product(DELAYED, ["fused"])]
)
def test_a_cuda_graph_holds_the_step(name: str, path: str) -> None:
    dtype = torch.float32 if path == "fused" else torch.float64

    def start() -> tuple[list[torch.nn.Parameter], list[Tensor], Any, Tensor]:
        params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(dtype)]
        lr = torch.tensor(0.05, dtype=dtype, device="cuda")
        how = {"fused": True} if path == "fused" else {"foreach": path == "foreach"}
        opt = optimizer_class(name)(params, lr=lr, weight_decay=0.1, capturable=True, **how)
        grads = [torch.ones_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        return params, grads, opt, lr

    eager, eager_grads, eager_opt, eager_lr = start()
    graphed, graphed_grads, graphed_opt, graphed_lr = start()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for opt in (eager_opt, graphed_opt):
            opt.step()
            opt.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p, g in zip(graphed, graphed_grads, strict=True):
            p.grad = g * 1  # a gradient of the graph's own, elsewhere in memory
        graphed_opt.step()
    rng = torch.Generator().manual_seed(0)
    for t in range(14):
        for mine, theirs in zip(eager_grads, graphed_grads, strict=True):
            g = torch.randn(mine.shape, generator=rng, dtype=dtype).cuda()
            mine.copy_(g)
            theirs.copy_(g)
        for lr in (eager_lr, graphed_lr):
            lr.fill_(0.05 / (t + 1))
        eager_opt.step()
        graph.replay()
    torch.cuda.synchronize()
    for p, q in zip(eager, graphed, strict=True):
        tolerance = 0.0 if path == "fused" else 1e-12
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    assert all(state["step"] == 16 for state in graphed_opt.state.values())


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
def test_capturing_host_scalars_is_rejected() -> None:
    w = torch.nn.Parameter(torch.ones(2, device="cuda"))
    w.grad = torch.ones_like(w)
    opt = AvaGrad([w])
    opt.step()
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step()


def test_foreach_is_chosen_as_torch_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from avagrad.optim.backends import choose

    group = {"foreach": None, "fused": None}
    params: list[Tensor] = [torch.nn.Parameter(torch.ones(2))]
    assert choose.prefers_foreach(group, params) is False  # torch: the loop, on a CPU
    monkeypatch.setattr(choose, "_default_to_fused_or_foreach", lambda params, differentiable, use_fused: (False, True))
    assert choose.prefers_foreach(group, params) is True
    assert choose.prefers_foreach({**group, "foreach": False}, params) is False
    assert choose.prefers_foreach({**group, "fused": False}, params) is False
