"""The fused path on a GPU: graphs, memory, synchronisation and bits."""

from typing import Any

import pytest
import torch
from problems import DELAYED, optimizer_class, parameters
from torch import Tensor

from avagrad import AvaGrad

pytestmark = pytest.mark.gpu


def on_device(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def test_fused_is_the_default_on_cuda() -> None:
    w = torch.nn.Parameter(torch.ones(3, device="cuda"))
    v = torch.nn.Parameter(torch.ones(3, device="cuda").double())
    for params, is_fused in (([w], True), ([v], False), ([w, v], False)):
        opt = AvaGrad(params)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
        assert (opt._plan is not None) == is_fused


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_fused_step_never_synchronises(tensor_lr: bool) -> None:
    params = on_device(parameters())
    lr = torch.tensor(0.1, device="cuda") if tensor_lr else 0.1
    opt = AvaGrad(params, lr=lr, fused=True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for t in range(8):
            for p in params:
                p.grad = torch.ones_like(p)
            if not tensor_lr:
                opt.param_groups[0]["lr"] = 0.1 / (t + 1)
            if t == 2:
                torch.cuda.set_sync_debug_mode("default")  # the tables are made once, and may wait
            opt.step()
            torch.cuda.set_sync_debug_mode("error" if t > 1 else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt._plan is not None


@pytest.mark.parametrize("name", DELAYED)
def test_a_cuda_graph_holds_the_fused_step(name: str) -> None:
    def start() -> tuple[list[torch.nn.Parameter], Any, Tensor]:
        params = on_device(parameters())
        lr = torch.tensor(0.05, device="cuda")
        opt = optimizer_class(name)(params, lr=lr, weight_decay=0.1, capturable=True, fused=True)
        for p in params:
            p.grad = torch.ones_like(p)
        return params, opt, lr

    eager, eager_opt, eager_lr = start()
    graphed, graphed_opt, graphed_lr = start()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for opt in (eager_opt, graphed_opt):
            for _ in range(3):
                opt.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p in graphed:
            p.grad = p.detach() * 0 + p.grad  # type: ignore[operator]  # a gradient of the graph's own, elsewhere in memory
        graphed_opt.step()
    assert graphed_opt._plan is not None
    for t in range(10):
        for lr in (eager_lr, graphed_lr):
            lr.fill_(0.05 / (t + 1))
        eager_opt.step()
        graph.replay()
    torch.cuda.synchronize()
    for p, q in zip(eager, graphed, strict=True):
        assert torch.equal(p, q)
    assert all(state["step"] == 13 for state in graphed_opt.state.values())


def test_a_fused_step_allocates_next_to_nothing() -> None:
    params = [torch.nn.Parameter(torch.randn(4096, 4096, device="cuda")) for _ in range(8)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = AvaGrad(params, fused=True)
    opt.step()
    opt.step()
    torch.cuda.synchronize()
    needed = 4 * sum(p.numel() * p.element_size() for p in params)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= needed * 1.001 + 2**20


def test_two_runs_are_the_same_to_the_bit() -> None:
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in (1_000_003, 77, 4096)]
        opt = AvaGrad(params, fused=True, eps=1e-6)
        for _ in range(20):
            for p in params:
                p.grad = torch.randn_like(p)
            opt.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))
