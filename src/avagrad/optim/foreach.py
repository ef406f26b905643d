"""The delayed rule of :mod:`avagrad.optim.rules`, restated for lists of tensors.

Many small tensors cost one launch an operation instead of one a tensor. The scalars come from
``rules`` as well, as lists of numbers or of tensors; only the element-wise body is written again,
and held to the same numbers by the tests. All lists are of one device and one dtype.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from avagrad.optim.rounding import store
from avagrad.optim.rules import Scalar, bias_correction_of

__all__ = ["BLOCK", "blocks", "count_gradients", "foreach_delayed_step", "foreach_rates", "in_batches"]

_T = TypeVar("_T")

BLOCK = 2**24  # coordinates taken at a time: bounds the memory of temporaries, and the length of a float32 sum


def blocks(x: Tensor) -> Sequence[Tensor]:
    """Return views that cover ``x``, none much larger than ``BLOCK``.

    >>> [tuple(b.shape) for b in blocks(torch.empty(3, 2**24, device="meta"))]
    [(3, 5592405), (3, 5592405), (3, 5592405), (3, 1)]
    """
    if x.numel() <= BLOCK or torch.compiler.is_compiling():
        return (x,)
    longest = max(range(x.dim()), key=lambda dim: x.shape[dim])
    others = x.numel() // x.shape[longest]
    pieces = torch.split(x, max(BLOCK // others, 1), dim=longest)
    return pieces if others <= BLOCK else [b for piece in pieces for b in blocks(piece)]


def in_batches(items: Iterable[_T], *, key: Callable[[_T], Tensor]) -> Iterator[list[_T]]:
    """Yield the items in batches of one device and dtype (those of ``key(item)``) and of about ``BLOCK`` coordinates.

    >>> [len(batch) for batch in in_batches([torch.ones(3), torch.ones(2).double(), torch.ones(1)], key=lambda x: x)]
    [2, 1]
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[_T]] = {}
    for item in items:
        x = key(item)
        kinds.setdefault((x.device, x.dtype), []).append(item)
    for alike in kinds.values():
        batch: list[_T] = []
        size = 0
        for item in alike:
            n = key(item).numel()
            if batch and size + n > BLOCK and not torch.compiler.is_compiling():
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += n
        yield batch


def foreach_rates(
    vs: list[Tensor],
    pasts: Sequence[Scalar],
    *,
    beta2: Scalar,
    eps: Scalar,
    bias_correction: bool,
    active_only: bool,
) -> list[Tensor]:
    """As :func:`avagrad.optim.rules.rates`, for each ``v`` and the number of gradients it has seen."""
    if bias_correction:
        known: Any = [_known(past) for past in pasts]
        seen = [past + (1 - k) for past, k in zip(pasts, known, strict=True)]
        corrections: Any = _bias_corrections(beta2, seen)
        etas = list(torch._foreach_div(vs, corrections))
        torch._foreach_sqrt_(etas)
    else:
        etas = list(torch._foreach_sqrt(vs))
    torch._foreach_add_(etas, [eps] * len(etas) if isinstance(eps, Tensor) else eps)
    torch._foreach_reciprocal_(etas)
    if bias_correction and any(isinstance(past, Tensor) or past == 0 for past in pasts):
        torch._foreach_mul_(etas, known)
    if active_only:
        torch._foreach_mul_(etas, list(torch._foreach_sign(vs)))
    return etas


def foreach_delayed_step(
    ws: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    pasts: Sequence[Scalar],
    roundings: Sequence[dict[str, Any]],
    gamma: Scalar,
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    weight_decay: Scalar,
    decoupled: bool,
    bias_correction: bool,
    active_only: bool,
    maximize: bool,
) -> None:
    """As :func:`avagrad.optim.rules.delayed_step`, in place. ``gs`` is not written to.

    ``roundings`` are the keyword arguments of :func:`avagrad.optim.rounding.store` for each tensor.
    """
    dtype = torch.promote_types(ws[0].dtype, ms[0].dtype)
    stored = ws
    ws, gs = _as(dtype, ws), _as(dtype, gs)
    if (rests := [rounding["compensation"] for rounding in roundings])[0] is not None:
        torch._foreach_add_(ws, _as(dtype, rests))
    etas = foreach_rates(vs, pasts, beta2=beta2, eps=eps, bias_correction=bias_correction, active_only=active_only)
    etas = _as(dtype, etas)
    if maximize:
        gs = list(torch._foreach_neg(gs))
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        if decoupled:
            started = [_known(past) if bias_correction else 1.0 for past in pasts]
            shrink: Any = [1 - lr * weight_decay * s for s in started]
            torch._foreach_mul_(ws, shrink)
        elif active_only:
            decays = list(torch._foreach_abs(gs))
            torch._foreach_add_(decays, vs)
            torch._foreach_sign_(decays)
            torch._foreach_mul_(decays, ws)
            torch._foreach_mul_(decays, weight_decay)
        else:
            decays = list(torch._foreach_mul(ws, weight_decay))
        if not decoupled:
            gs = list(torch._foreach_add(gs, decays))
    torch._foreach_mul_(ms, beta1)
    _add_scaled_(ms, gs, 1 - beta1)

    alpha = lr * gamma
    torch._foreach_mul_(etas, alpha.to(dtype) if isinstance(alpha, Tensor) else alpha)
    if bias_correction:
        corrections: Any = _bias_corrections(beta1, [past + 1 for past in pasts])
        torch._foreach_div_(etas, corrections)
    torch._foreach_mul_(etas, ms)
    if bias_correction:  # a first gradient only fills the moments: infinity times 0 is not to reach w
        etas = [_where_known(past, eta) for past, eta in zip(pasts, etas, strict=True)]
    torch._foreach_sub_(ws, etas)

    torch._foreach_mul_(vs, beta2)
    if isinstance(beta2, Tensor):
        _add_scaled_(vs, list(torch._foreach_mul(gs, gs)), 1 - beta2)
    else:
        torch._foreach_addcmul_(vs, gs, gs, value=1 - beta2)
    if stored[0].dtype != dtype and "rounding" in roundings[0]:
        for w, wide, rounding in zip(stored, ws, roundings, strict=True):
            store(w, wide, **rounding)
    elif stored[0].dtype != dtype:
        torch._foreach_copy_(stored, ws)


def count_gradients(steps: list[Tensor]) -> None:
    """Add 1 to each step count."""
    if steps[0].device.type == "cpu" and not torch.compiler.is_compiling():
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # wraps the 1 once, not for each
    else:
        torch._foreach_add_(steps, 1)


def _bias_corrections(beta: Scalar, counts: list[Scalar]) -> list[Scalar]:
    """Return the bias correction for each count; most tensors have the same."""
    if isinstance(beta, Tensor) or any(isinstance(t, Tensor) for t in counts):
        return [bias_correction_of(beta, t) for t in counts]
    distinct = {t: bias_correction_of(beta, t) for t in set(counts)}
    return [distinct[t] for t in counts]


def _as(dtype: torch.dtype, xs: list[Tensor]) -> list[Tensor]:
    """Return copies in another dtype, for half precision; else the tensors themselves."""
    return xs if all(x.dtype == dtype for x in xs) else [x.to(dtype) for x in xs]


def _add_scaled_(xs: list[Tensor], ys: list[Tensor], factor: Scalar) -> None:
    if isinstance(factor, Tensor):
        torch._foreach_add_(xs, list(torch._foreach_mul(ys, factor)))
    else:
        torch._foreach_add_(xs, ys, alpha=factor)


def _where_known(past: Scalar, x: Tensor) -> Tensor:
    if isinstance(past, Tensor):
        return torch.where(past > 0, x, 0.0)
    return x if past > 0 else torch.zeros_like(x)


def _known(past: Scalar) -> Scalar:
    return (past > 0).to(past.dtype) if isinstance(past, Tensor) else float(past > 0)
