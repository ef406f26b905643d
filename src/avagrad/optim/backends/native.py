"""The extension of ``native.c``: built with the package, and selected by processor."""

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from avagrad.optim.backends.fused import Launch

__all__ = ["NUMBERS", "go_over", "load", "prepare"]

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "kahan": 2}
NUMBERS = 7  # columns of the table of groups: lr, beta1, beta2, eps, weight_decay, clip_update, clip_moment


@functools.cache
def load() -> tuple[Any, str | None]:
    """Return the extension module for this processor and None; or None, and why it is missing.

    torch is imported by now, so the module finds the OpenMP runtime that torch has loaded.
    """
    reason = (
        "avagrad was built without its native code for CPUs; install it from a wheel, or with a C compiler and "
        "Python's headers"
    )
    names = {"AVX2": ("_native_avx2",), "AVX512": ("_native_avx512", "_native_avx2")}
    for name in (*names.get(torch.backends.cpu.get_cpu_capability(), ()), "_native"):
        try:
            return importlib.import_module(f"avagrad.optim.backends.{name}"), None
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            reason = f"the native code for CPUs cannot be loaded ({error}); install avagrad again"
    return None, reason


def prepare(
    launch: "Launch", numbers: Tensor, totals: Any, scale: Any, found_inf: Any, *, rebuild: bool, counts: bool
) -> None:
    """Compute what the coordinates of each tensor share in a step; with ``counts`` update the step counts."""
    _call(launch, (numbers, totals, scale, found_inf), 0, 0, rebuild=rebuild, gradient=0, counts=counts)


def go_over(launch: "Launch", first: int, last: int, *, rebuild: bool = False, gradient: int = 0) -> None:
    """Move some blocks, all by the gradient at an address if there is one; or only sum their rates."""
    _call(launch, (None,) * 4, first, last, rebuild=rebuild, gradient=gradient, counts=False)


def _call(launch: "Launch", given: Any, first: int, last: int, *, rebuild: bool, gradient: int, counts: bool) -> None:
    """Call ``step`` of native.c, which moves blocks, or prepares if there are none."""
    tables = launch.tensors, launch.grads, launch.shared, launch.blocks, launch.sums, *given
    addresses = [0 if x is None else x.data_ptr() for x in tables]
    flags = _DTYPES[launch.dtype], launch.block, _ROUNDINGS[launch.rounding], rebuild, counts, *launch.flags
    load()[0].step(*addresses, gradient, len(launch.grads), first, last, torch.get_num_threads(), *flags)
