"""The delayed rule of :mod:`avagrad.optim.rules`, restated for lists of tensors.

Many small tensors cost one launch an operation instead of one a tensor. The scalars come from ``rules`` as well; only
the element-wise body is written again, and held to the same numbers by the tests. To save passes over memory,
``1 / (sqrt(v / c) + eps)`` is written ``sqrt(c) / (sqrt(v) + eps sqrt(c))``, with c the bias correction.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from avagrad.optim.backends import loop
from avagrad.optim.backends.loop import Loop, blocks, rounding_of, stacked, unscaled
from avagrad.optim.rounding import store
from avagrad.optim.rules import Delayed, Rule, Scalar, bias_correction_of, indicator

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
        """Return on each device the sums of eta^p and the counts, a row for each block.

        The norm of foreach adds up in sequence on a CPU, where a float32 sum loses digits, so it uses float64.
        """
        pieces = list(_pieces((view, view.w) for view in self.views))
        rows: dict[int, tuple[Tensor, Scalar]] = {}
        for batch in _batches(pieces):
            rule = rules[batch[0].view.group]
            assert isinstance(rule, Delayed)
            norm, counts = rule.flags.norm, [piece.seen for piece in batch]
            etas, roots = _denominators([piece.v for piece in batch], counts, rule)
            torch._foreach_reciprocal_(etas)
            totals = torch.stack(torch._foreach_norm(etas, norm, dtype=torch.float64)).unbind()
            for i, (piece, total) in enumerate(zip(batch, totals, strict=True)):
                d: Scalar = (piece.v != 0).sum() if rule.flags.active_only else piece.v.numel()
                known = indicator(piece.seen > 0, piece.seen) if rule.flags.bias_correction else 1.0
                root = roots[i] if isinstance(roots, list) else roots
                rows[id(piece)] = (total * root) ** norm * known, d * known
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
    """Return pieces of one group, device, dtype and count, together of about ``BLOCK`` coordinates."""
    kinds: dict[Any, list[_Piece]] = {}
    for piece in pieces:
        count = None if isinstance(piece.seen, Tensor) else piece.seen
        kinds.setdefault((piece.view.group, piece.w.device, piece.w.dtype, count), []).append(piece)
    for alike in kinds.values():
        first = size = 0
        for i, piece in enumerate(alike):
            if size and size + piece.w.numel() > loop.BLOCK:
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


def _each(of: Callable[[Any], Any], counts: Sequence[Scalar]) -> Any:
    """Return a function of the counts of a batch: one number, or a list of tensors where counts are tensors."""
    return [of(count) for count in counts] if isinstance(counts[0], Tensor) else of(counts[0])


def _denominators(vs: list[Tensor], counts: Sequence[Scalar], rule: Delayed) -> tuple[list[Tensor], Any]:
    """Return ``sqrt(v) + eps sqrt(c)`` for each ``v``, and ``sqrt(c)``: their quotient is rules.rates."""

    def root_of(count: Scalar) -> Scalar:
        at_least_one = count + (1 - indicator(count > 0, count))  # before the first gradient it is not used
        return bias_correction_of(rule.beta2, at_least_one) ** 0.5

    roots = _each(root_of, counts) if rule.flags.bias_correction else 1.0
    found = list(torch._foreach_sqrt(vs))
    torch._foreach_add_(found, [rule.eps * root for root in roots] if isinstance(roots, list) else rule.eps * roots)
    if rule.flags.active_only:
        torch._foreach_div_(found, list(torch._foreach_sign(vs)))  # infinite, so that the rate is 0
    return found, roots


def _delayed_step(batch: list[_Piece], rule: Delayed, gamma: Scalar, grad_scale: Tensor | None) -> None:
    """As :func:`avagrad.optim.rules.delayed_step`, in place. Gradients are not written to."""
    flags, dtype = rule.flags, batch[0].m.dtype
    counts, stored = [piece.seen for piece in batch], [piece.w for piece in batch]
    ms, vs = [piece.m for piece in batch], [piece.v for piece in batch]
    gs = [unscaled(piece.g, grad_scale, dtype) for piece in batch]
    ws = stored if stored[0].dtype == dtype else [w.to(dtype) for w in stored]
    if batch[0].compensation is not None:
        torch._foreach_add_(ws, [piece.compensation.to(dtype) for piece in batch if piece.compensation is not None])
    moves: Any = _each(lambda count: indicator(count > 0, count), counts) if flags.bias_correction else 1.0
    if flags.maximize:
        gs = list(torch._foreach_neg(gs))
    gs = _decay(ws, gs, vs, moves, rule)
    torch._foreach_mul_(ms, rule.beta1)
    torch._foreach_add_(ms, gs, alpha=1 - rule.beta1)
    if moves != 0.0:  # a first gradient only fills the moments
        corrections = _each(lambda t: bias_correction_of(rule.beta1, t + 1), counts) if flags.bias_correction else 1.0
        denominators, roots = _denominators(vs, counts, rule)
        torch._foreach_div_(denominators, _alpha(rule.lr * gamma, roots, corrections, dtype))
        moments = ms
        if isinstance(moves, list):  # so that an infinity times 0 does not reach w
            moments = [torch.where(move > 0, m, 0.0) for move, m in zip(moves, ms, strict=True)]
        torch._foreach_addcdiv_(ws, moments, denominators, value=-1)
    torch._foreach_mul_(vs, rule.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - rule.beta2)
    if batch[0].view.rounding != "nearest":
        for piece, wide in zip(batch, ws, strict=True):
            store(piece.w, wide, compensation=piece.compensation, **rounding_of(piece.view, piece.seen))
    elif ws is not stored:
        torch._foreach_copy_(stored, ws)


def _alpha(size: Scalar, roots: Any, corrections: Any, dtype: torch.dtype) -> Any:
    """Return what the quotients of moments and denominators are multiplied with."""
    if isinstance(roots, list):
        return [(size * root / c).to(dtype) for root, c in zip(roots, corrections, strict=True)]
    alpha = size * roots / corrections
    return alpha.to(dtype) if isinstance(alpha, Tensor) else alpha


def _decay(ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], moves: Any, rule: Delayed) -> list[Tensor]:
    """Decay the weights in place, or return gradients with the decay added."""
    if not rule.flags.decays:
        return gs
    if rule.flags.decoupled:
        decay = rule.lr * rule.weight_decay
        torch._foreach_mul_(ws, [1 - decay * move for move in moves] if isinstance(moves, list) else 1 - decay * moves)
        return gs
    decays = list(torch._foreach_mul(ws, rule.weight_decay))
    if rule.flags.active_only:  # decay alone does not make a coordinate active
        seen = list(torch._foreach_abs(gs))
        torch._foreach_add_(seen, vs)
        torch._foreach_mul_(decays, list(torch._foreach_sign(seen)))
    return list(torch._foreach_add(gs, decays))
