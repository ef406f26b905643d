"""The delayed rule of :mod:`avagrad.optim.rules`, restated for lists of tensors.

Many small tensors cost one launch an operation instead of one a tensor. The scalars come from ``rules`` as well; only
the element-wise body is written again, and held to the same numbers by the tests. To save passes over memory,
``1 / (sqrt(v / c) + eps)`` is written ``sqrt(c) / (sqrt(v) + eps sqrt(c))``, with c the bias correction.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from avagrad.optim.backends.loop import Loop, block_size, blocks, rounding_of, stacked, unscaled
from avagrad.optim.rounding import store
from avagrad.optim.rules import LARGEST, Delayed, Rule, Scalar, bias_correction_of, indicator

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Foreach"]


class _Piece(NamedTuple):
    """A parameter, or a block of a large one."""

    view: "ParamView"
    seen: Scalar  # the number of gradients before this step
    w: Tensor
    m: Tensor
    v: Tensor
    g: Tensor
    compensation: Tensor | None


class Foreach(Loop):
    """The loop's work, done for many tensors at once."""

    def _move_all(self, moving: Sequence[tuple["ParamView", Tensor]], step: "Step") -> None:
        for batch in _batches(_pieces(moving)):
            view, w = batch[0].view, batch[0].w
            rule = step.rule(view.group, w.device)
            assert isinstance(rule, Delayed)
            _delayed_step(batch, rule, step.gamma(w.device), step.grad_scale)
        count_gradients([view.step for view, _ in moving])

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device the sums of eta^p and the counts, a row for each block."""
        pieces = list(_pieces((view, view.w) for view in self.views))
        rows: dict[int, tuple[Tensor, Scalar]] = {}
        for batch in _batches(pieces):
            rule = rules[batch[0].view.group]
            assert isinstance(rule, Delayed)
            rows.update(zip(map(id, batch), _totals(batch, rule), strict=True))
        found: dict[torch.device, list[tuple[Tensor, Scalar]]] = {}
        for piece in pieces:
            found.setdefault(piece.w.device, []).append(rows[id(piece)])
        return {device: stacked(pairs, device) for device, pairs in found.items()}


def _pieces(moving: Iterable[tuple["ParamView", Tensor]]) -> Iterator[_Piece]:
    """Return the blocks of parameters with their gradients."""
    for view, gradient in moving:
        count = view.step_value()
        rests: Iterable[Any] = itertools.repeat(None) if view.compensation is None else blocks(view.compensation)
        tensors = (blocks(x) for x in (view.w, *view.state, gradient))
        for w, m, v, g, rest in zip(*tensors, rests, strict=False):
            yield _Piece(view, count, w, m, v, g, rest)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Return pieces of one group, device, dtype and count, together of about a block's coordinates."""
    kinds: dict[Any, list[_Piece]] = {}
    for piece in pieces:
        count = None if isinstance(piece.seen, Tensor) else piece.seen
        kinds.setdefault((piece.view.group, piece.w.device, piece.w.dtype, count), []).append(piece)
    for alike in kinds.values():
        first = size = 0
        most = block_size(alike[0].w.device)
        for i, piece in enumerate(alike):
            if size and size + piece.w.numel() > most:
                yield alike[first:i]
                first, size = i, 0
            size += piece.w.numel()
        yield alike[first:]


def count_gradients(steps: list[Tensor]) -> None:
    """Add 1 to each step count."""
    if steps and steps[0].device.type == "cpu":
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # wraps the 1 once, not for each
    elif steps:
        torch._foreach_add_(steps, 1)


# --- the rule, for a batch -------------------------------------------------------------------------------------------


def _each(of: Callable[[Any], Any], batch: Sequence[_Piece]) -> Any:
    """Return a function of the counts of a batch: a number, or a list of tensors where counts are tensors."""
    found = [of(piece.seen) for piece in (batch if isinstance(batch[0].seen, Tensor) else batch[:1])]
    values = [x.to(batch[0].m.dtype) if isinstance(x, Tensor) else x for x in found]
    return values if isinstance(batch[0].seen, Tensor) and isinstance(values[0], Tensor) else values[0]


def _totals(batch: list[_Piece], rule: Delayed) -> list[tuple[Tensor, Scalar]]:
    """Return for each piece the sum of the powers of what gamma normalises, and how many count."""
    flags, root_of, vs = rule.flags, _root_of(rule), [piece.v for piece in batch]
    sizes = list(torch._foreach_sqrt(vs))
    xs = list(torch._foreach_add(sizes, _each(lambda n: rule.eps * root_of(n), batch)))
    unit = max(1.0, rule.eps) if flags.of_step else 1.0  # as in Delayed.sums
    if unit != 1:
        torch._foreach_div_(xs, unit)
    if flags.of_step:  # eta r, in which the roots cancel
        xs = list(torch._foreach_div(sizes, xs))
    elif flags.active_only:
        xs = list(torch._foreach_div(torch._foreach_sign(vs), xs))
    else:
        torch._foreach_reciprocal_(xs)
    known = _column(_each(lambda n: indicator(n > 0, n), batch) if flags.bias_correction else 1.0)
    roots = _column(1.0 if flags.of_step else _each(root_of, batch))
    totals = _power_sums(xs, flags.norm) * (roots / unit) ** flags.norm * known
    if flags.active_only:
        counts: Sequence[Scalar] = (_counts(vs) * known).unbind()
    else:  # no copy to the device: a CUDA graph may be recorded
        each = known.unbind() if isinstance(known, Tensor) else [known] * len(vs)
        counts = [v.numel() * n for v, n in zip(vs, each, strict=True)]
    return list(zip(totals.unbind(), counts, strict=True))


# On a CPU a norm adds up in sequence, in float64 after a copy; a sum does not, and needs no more digits.


def _power_sums(xs: list[Tensor], norm: int) -> Tensor:
    """Return the sum of ``x^norm`` for each ``x >= 0``; ``xs`` are used up."""
    if xs[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(xs, norm, dtype=torch.float64)) ** norm
    if norm == 2:
        torch._foreach_mul_(xs, xs)
    return torch.stack([x.sum() for x in xs]).double()


def _counts(vs: list[Tensor]) -> Tensor:
    """Return how many elements of each ``v`` are not 0."""
    if vs[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(torch._foreach_sign(vs), 1, dtype=torch.float64))
    return torch.stack([torch.count_nonzero(v) for v in vs]).double()


def _column(values: Any) -> Any:
    """Return what there is one of for each piece as one tensor; a number as it is."""
    return torch.stack(values).double() if isinstance(values, list) else values


def _root_of(rule: Delayed) -> Callable[[Scalar], Scalar]:
    """Return the function from the number of gradients to the root of the bias correction of ``v``."""

    def root_of(count: Scalar) -> Scalar:
        at_least_one = count + (1 - indicator(count > 0, count))  # before the first gradient it is not used
        return bias_correction_of(rule.beta2, at_least_one) ** 0.5

    return root_of if rule.flags.bias_correction else lambda count: 1.0


def _delayed_step(batch: list[_Piece], rule: Delayed, gamma: Scalar, grad_scale: Tensor | None) -> None:
    """As :func:`avagrad.optim.rules.delayed_step`, in place. Gradients are not written to."""
    flags, dtype, stored = rule.flags, batch[0].m.dtype, [piece.w for piece in batch]
    ms, vs = [piece.m for piece in batch], [piece.v for piece in batch]
    gs = [unscaled(piece.g, grad_scale, dtype) for piece in batch]
    ws = stored if stored[0].dtype == dtype else [w.to(dtype) for w in stored]
    if batch[0].compensation is not None:
        torch._foreach_add_(ws, [piece.compensation.to(dtype) for piece in batch if piece.compensation is not None])
    if flags.maximize:
        gs = list(torch._foreach_neg(gs))
    gs = _decay(ws, gs, vs, batch, rule)
    sizes = list(torch._foreach_sqrt(vs))
    if flags.of_step:
        gs = _bounded(gs, sizes, batch, rule)
    torch._foreach_lerp_(ms, gs, 1 - rule.beta1)
    if not flags.bias_correction or isinstance(batch[0].seen, Tensor) or batch[0].seen > 0:
        _move(ws, ms, vs, sizes, batch, rule, gamma)
    torch._foreach_mul_(vs, rule.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - rule.beta2)
    if batch[0].view.rounding != "nearest":
        for piece, wide in zip(batch, ws, strict=True):
            store(piece.w, wide, compensation=piece.compensation, **rounding_of(piece.view, piece.seen))
    elif ws is not stored:
        torch._foreach_copy_(stored, ws)


def _move(
    ws: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    sizes: list[Tensor],
    batch: list[_Piece],
    rule: Delayed,
    gamma: Scalar,
) -> None:
    """Move the weights; ``sizes`` are ``sqrt(v)`` and are used up."""
    flags, root_of = rule.flags, _root_of(rule)

    def correction_of(count: Scalar) -> Scalar:
        return bias_correction_of(rule.beta1, count + 1) if flags.bias_correction else 1.0

    if flags.bias_correction:  # a first gradient, maybe infinite, moves nothing
        counts = [piece.seen for piece in batch if isinstance(piece.seen, Tensor)]
        ms = [torch.where(n > 0, m, 0.0) for n, m in zip(counts, ms, strict=True)] if counts else ms
    if (c := rule.clip_update) is not None:
        ms = _clamped(ms, list(torch._foreach_mul(sizes, _each(lambda n: c * correction_of(n) / root_of(n), batch))))
    torch._foreach_add_(sizes, _each(lambda n: rule.eps * root_of(n), batch))
    if flags.active_only and not flags.clips:  # a clamp has made the momentum 0 already
        torch._foreach_div_(sizes, list(torch._foreach_sign(vs)))  # infinite, so that the rate is 0
    torch._foreach_div_(sizes, _each(lambda n: rule.lr * gamma * root_of(n) / correction_of(n), batch))
    torch._foreach_addcdiv_(ws, ms, sizes, value=-1)


def _bounded(gs: list[Tensor], sizes: list[Tensor], batch: list[_Piece], rule: Delayed) -> list[Tensor]:
    """Return gradients of at most ``clip_moment`` times their usual size, and of at most ``LARGEST``."""
    gs = list(torch._foreach_clamp_max(gs, LARGEST))
    torch._foreach_clamp_min_(gs, -LARGEST)
    k, root_of = rule.clip_moment, _root_of(rule)
    if k is None:
        return gs
    most = torch._foreach_mul(sizes, _each(lambda n: k / root_of(n), batch))
    return _clamped(gs, [torch.where(x > 0, x, math.inf) for x in most])


def _clamped(xs: list[Tensor], most: list[Tensor]) -> list[Tensor]:
    """Return each ``x`` between ``-most`` and ``most``; ``most`` is used up."""
    xs = list(torch._foreach_minimum(xs, most))
    torch._foreach_neg_(most)
    torch._foreach_maximum_(xs, most)
    return xs


def _decay(ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], batch: list[_Piece], rule: Delayed) -> list[Tensor]:
    """Decay the weights in place, or return gradients with the decay added."""
    if not rule.flags.decays:
        return gs
    if rule.flags.decoupled:
        decay, corrected = rule.lr * rule.weight_decay, rule.flags.bias_correction
        torch._foreach_mul_(ws, _each(lambda n: 1 - decay * (indicator(n > 0, n) if corrected else 1.0), batch))
        return gs
    decays = list(torch._foreach_mul(ws, rule.weight_decay))
    if rule.flags.active_only:  # decay alone does not make a coordinate active
        seen = list(torch._foreach_abs(gs))
        torch._foreach_add_(seen, vs)
        torch._foreach_mul_(decays, list(torch._foreach_sign(seen)))
    return list(torch._foreach_add(gs, decays))
