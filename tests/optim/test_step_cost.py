"""What a step costs beside arithmetic: host reads, and memory for temporaries."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    EVERY_PATH,
    NAMES_AND_PATHS,
    gradients,
    optimizer_class,
    parameters,
    step_with,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avagrad import AvaGrad
from avagrad.optim.backends import loop


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


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
@pytest.mark.parametrize("options", [{}, {"active_only": True, "norm": 1}, {"bias_correction": False}], ids=str)
def test_a_step_reads_nothing_but_steps_and_lr_on_the_host(name: str, path: str, options: dict[str, Any]) -> None:
    if options and name not in ("AvaGrad", "AvaGradW"):
        options = {}
    params = parameters()
    lr = torch.tensor(0.1)
    opt = optimizer_class(name)(params, lr=lr, weight_decay=0.1, **options, **EVERY_PATH[path])
    capturable = EVERY_PATH[path].get("capturable", False)
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
    monkeypatch.setattr(loop, "CPU_BLOCK", block)
    params = [torch.nn.Parameter(torch.zeros(block // 2 + 1, dtype=dtype)) for _ in range(8)]
    params.append(torch.nn.Parameter(torch.zeros(6, block, dtype=dtype)))  # one that is larger than a block
    params += [torch.nn.Parameter(torch.zeros(block // 128, dtype=dtype)) for _ in range(300)]  # and many small ones
    opt = AvaGrad(params, foreach=True, **options)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    gc.collect()
    with LiveBytes() as memory:
        opt.step()
    assert memory.peak >= 4 * block  # or it measures nothing
    assert memory.peak <= 8 * 4 * block  # temporaries of some blocks, however many blocks the parameters have


@pytest.mark.parametrize("name", ["AvaGrad", "AvaStep"])
def test_diagnostics_take_little_memory(name: str) -> None:
    """However many parameters there are: 64 MB are less than a copy of these."""
    w = torch.nn.Parameter(torch.zeros(2**25))
    opt = optimizer_class(name)([w])
    for _ in range(2):
        w.grad = torch.ones_like(w)
        opt.step()
    w.grad = None
    gc.collect()
    with LiveBytes() as memory:
        opt.diagnostics()
    assert 2**22 <= memory.peak <= 64 * 10**6


# Prints by how many kB diagnostics raise the largest memory that this process has had.
GROWTH = """
import resource, torch
from avagrad import AvaStep

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

w = torch.nn.Parameter(torch.ones(2**26))
w.grad = torch.ones_like(w)
opt = AvaStep([w])
for _ in range(2):
    opt.step()
before = most()
for _ in range(3):
    opt.diagnostics()
print(most() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is the system's")
def test_diagnostics_leave_no_gaps_in_memory() -> None:
    """Memory is more than what tensors have: a small result between two blocks keeps the allocator from using it."""
    grown = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(grown.stdout) * 1024 <= 64 * 10**6


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = parameters(torch.float64), parameters(torch.float64)
    whole = AvaGrad(one, weight_decay=0.1, active_only=True, foreach=True)
    pieces = AvaGrad(two, weight_decay=0.1, active_only=True, foreach=True)
    for grads in gradients(one, 15):
        step_with(whole, one, grads)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "CPU_BLOCK", 4)
            step_with(pieces, two, grads)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-14)


@given(shape=st.lists(st.integers(0, 7), max_size=4), size=st.integers(1, 9))
def test_blocks_cover_a_tensor_once(shape: list[int], size: int) -> None:
    x = torch.zeros(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CPU_BLOCK", size)
        pieces = loop.blocks(x)
    for piece in pieces:
        piece += 1
    assert torch.equal(x, torch.ones(shape))
    assert all(piece.numel() <= size for piece in pieces)
