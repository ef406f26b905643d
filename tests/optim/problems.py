"""Parameters, gradients and comparisons that the tests of the optimizers share."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import avagrad
from avagrad.optim.backends import fused

DELAYED = ("DelayedAdam", "AvaGrad", "AvaGradW", "AvaStep")
ALL = (*DELAYED, "AdaBound", "AdaShift", "ADOPT")
PATHS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "loop-capturable": {"foreach": False, "capturable": True},
    "foreach-capturable": {"foreach": True, "capturable": True},
}
FUSED: dict[str, Any] = {"fused": True}
EVERY_PATH = PATHS | {"fused": FUSED}
# Every class by every path that it has.
NAMES_AND_PATHS = [(name, path) for name in ALL for path in EVERY_PATH if path != "fused" or name in DELAYED]
FUSED_PATHS = ("native", "triton")


def take_fused_path(path: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device for a fused path: Triton's without a GPU is run by its interpreter, on the CPU."""
    on_gpu = path == "triton" and torch.cuda.is_available()
    monkeypatch.setattr(fused, "INTERPRET", path == "triton" and not on_gpu)
    return "cuda" if on_gpu else "cpu"


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def is_fused(opt: Any) -> bool:
    """Tell whether a step is taken by kernels: a copy steps without torch's roots of the second moments."""
    twin = copy.deepcopy(opt)
    for p in (p for group in twin.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    with _Operations() as operations:
        twin.step()
    return not any("sqrt" in name for name in operations.names)


def laid_out_as(p: Tensor, g: Tensor | None) -> Tensor | None:
    """Return a gradient with the strides of its parameter, as autograd gives it: the fused kernel asks for that."""
    return None if g is None else torch.empty_like(p, requires_grad=False).copy_(g)


@dataclass(frozen=True)
class Tolerance:
    """Relative errors that rounding explains: of a parameter, and of its state."""

    param: float
    state: float


# Half-precision parameters are compared after each single step, so theirs is the error of one rounding.
TOLERANCES = {
    torch.float64: Tolerance(param=1e-12, state=1e-13),
    torch.float32: Tolerance(param=2e-6, state=2e-6),
    torch.bfloat16: Tolerance(param=2**-8 * 1.01, state=2e-6),
    torch.float16: Tolerance(param=2**-11 * 1.01, state=2e-6),
}


def own_options(name: str, **options: Any) -> dict[str, Any]:
    """Return the options without those that AvaStep does not have, since they are always on."""
    fixed = ("bias_correction", "active_only") if name == "AvaStep" else ()
    return {key: value for key, value in options.items() if key not in fixed}


def optimizer_class(name: str) -> Callable[..., Any]:
    return getattr(avagrad, name)  # type: ignore[no-any-return]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.nn.Parameter]:
    """Return parameters of every awkward kind: 0-dimensional, empty, not contiguous, one element."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

    tensors = [normal(4, 3), normal(), normal(0, 2), normal(2, 5).t(), normal(7), normal(1, 1)]
    return [torch.nn.Parameter(x.to(device)) for x in tensors]


def gradients(params: list[torch.nn.Parameter], steps: int, seed: int = 1) -> Iterator[list[Tensor | None]]:
    """Yield gradients for each step, with what real training has: constant pixels, rare rows, absent parameters."""
    rng = torch.Generator().manual_seed(seed)
    for t in range(steps):
        grads: list[Tensor | None] = []
        for i, p in enumerate(params):
            shape = torch.randn(p.shape, generator=rng, dtype=torch.float64)
            g = (shape * 10.0 ** (i - 2)).to(p)
            if i == 0:
                g[0] = 0  # never sees a gradient
                if t < 5:
                    g[1] = 0  # sees its first one late
            absent = (i == 4 and t % 3 == 1) or (i == 3 and t < 4)
            grads.append(None if absent else g)
        yield grads


def step_with(opt: Any, params: list[torch.nn.Parameter], grads: list[Tensor | None]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone()
    opt.step()


def as_float64(x: Tensor) -> NDArray[np.float64]:
    return x.detach().cpu().double().numpy().copy()


def reference_params(params: list[torch.nn.Parameter], hyper: list[dict[str, Any]]) -> list[reference.Param]:
    return [
        reference.Param(
            as_float64(p),
            lr=h["lr"],
            beta1=h["betas"][0],
            beta2=h["betas"][1],
            eps=h["eps"],
            weight_decay=h["weight_decay"],
        )
        for p, h in zip(params, hyper, strict=True)
    ]


def assert_close(name: str, got: Tensor, want: NDArray[np.float64], rtol: float, scale: float = 1.0) -> None:
    """Compare, with an absolute term for what cancels: ``scale`` is the size of the numbers that were added."""
    if (np.abs(as_float64(got) - want) <= rtol * (np.abs(want) + scale)).all():
        return  # the quick way; the slow one below says what is wrong
    np.testing.assert_allclose(as_float64(got), want, rtol=rtol, atol=rtol * scale, err_msg=name)
