"""The fused path on a GPU: graphs, memory, synchronisation and bits."""

import contextlib

import pytest
import torch
from problems import is_fused, parameters

from avagrad import AvaGrad

pytestmark = pytest.mark.gpu


def on_device(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def test_fused_is_the_default_on_cuda() -> None:
    w = torch.nn.Parameter(torch.ones(3, device="cuda"))
    v = torch.nn.Parameter(torch.ones(3, device="cuda").double())
    for params, fused in (([w], True), ([v], False), ([w, v], False)):
        opt = AvaGrad(params)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
        assert is_fused(opt) == fused


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
            torch.cuda.set_sync_debug_mode("default" if t < 3 else "error")  # the tables are made once, and may wait
            opt.step()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_fused(opt)


def test_a_fused_step_allocates_next_to_nothing() -> None:
    before = torch.cuda.memory_allocated()  # what earlier tests have left
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
    assert torch.cuda.max_memory_allocated() - before <= needed * 1.001 + 2**20


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


def layers(n: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(n))).cuda()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_stepping_in_backward_leaves_no_gradients_and_never_synchronises() -> None:
    model = layers()
    opt = AvaGrad(model.parameters(), fused=True)
    x = torch.ones(2, 1024, device="cuda")
    left = []
    with opt.step_in_backward():
        for t in range(5):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            try:
                torch.cuda.set_sync_debug_mode("default" if t < 3 else "error")
                model(x).sum().backward()
                left.append(torch.cuda.memory_allocated() - before)
                opt.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert is_fused(opt)
    assert left[-1] <= 2**20


def test_a_cuda_graph_holds_a_whole_training_step_with_stepping_in_backward() -> None:
    x = torch.ones(2, 1024, device="cuda")
    ends = []
    for graphed in (False, True):
        model = layers(3)
        lr = torch.tensor(0.05, device="cuda")
        opt = AvaGrad(model.parameters(), lr=lr, capturable=True, fused=True)

        def train() -> None:
            with opt.step_in_backward() if graphed else contextlib.nullcontext():  # noqa: B023
                model(x).square().mean().backward()  # noqa: B023
                opt.step()  # noqa: B023
            opt.zero_grad()  # noqa: B023

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                train()
        for t in range(6):
            lr.fill_(0.05 / (t + 1))
            graph.replay() if graphed else train()
        torch.cuda.synchronize()
        ends.append([*model.parameters(), *(state["step"] for state in opt.state.values())])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))
