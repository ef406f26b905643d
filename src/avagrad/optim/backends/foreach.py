"""The delayed rule of :mod:`avagrad.optim.rules`, restated for lists of tensors.

Many small tensors cost one launch an operation instead of one a tensor. The scalars come from
``rules`` as well, as lists of numbers or of tensors; only the element-wise body is written again,
and held to the same numbers by the tests.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from avagrad.optim.backends import loop
from avagrad.optim.backends.loop import Loop, blocks, rounding_of, stacked, unscaled
from avagrad.optim.rounding import store
from avagrad.optim.rules import Delayed, Rule, Scalar, bias_correction_of

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Foreach"]

_T = TypeVar("_T")


class Foreach(Loop):
    """The loop's work, done for many tensors at once."""

    def _move_all(self, moving: Sequence[tuple["ParamView", Tensor]], step: "Step") -> None:
        items: list[tuple[Tensor, Tensor, Tensor, Tensor, Scalar, int, dict[str, Any]]] = []
        for view, g in moving:
            count = view.step_value()
            rounding = {} if view.rounding == "nearest" else rounding_of(view, count)
            tensors = [view.w, g, *view.state] + ([] if view.compensation is None else [view.compensation])
            for w, g, m, v, *rest in zip(*map(blocks, tensors), strict=True):
                items.append((w, g, m, v, count, view.group, rounding | ({"compensation": rest[0]} if rest else {})))
        for batch in in_batches(items, key=lambda item: (item[5], item[0])):
            ws, gs, ms, vs, counts, groups, roundings = (list(column) for column in zip(*batch, strict=True))
            device = ws[0].device
            rule = step.rule(groups[0], device)
            assert isinstance(rule, Delayed)
            gs = [unscaled(g, step.grad_scale, ms[0].dtype) for g in gs]
            _delayed_step(ws, gs, ms, vs, counts, roundings, rule, step.gamma(device))
        count_gradients([view.step for view, _ in moving])

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device the sums of eta^p and the counts, a row for each block.

        The norm of foreach adds up in sequence on a CPU, where a float32 sum loses digits, so it uses float64.
        """
        items = [(view, view.step_value(), block) for view in self.views for block in blocks(view.state[1])]
        rows: list[Any] = [None] * len(items)
        for batch in in_batches(list(enumerate(items)), key=lambda item: (item[1][0].group, item[1][2])):
            vs = [v for _, (_, _, v) in batch]
            steps = [step for _, (_, step, _) in batch]
            rule = rules[batch[0][1][0].group]
            assert isinstance(rule, Delayed)
            etas = _rates(vs, steps, rule)
            totals = torch.stack(torch._foreach_norm(etas, rule.flags.norm, dtype=torch.float64)) ** rule.flags.norm
            for (at, (_, step, v)), total in zip(batch, totals.unbind(), strict=True):
                d: Scalar = (v != 0).sum() if rule.flags.active_only else v.numel()
                rows[at] = (total, d * _known(step) if rule.flags.bias_correction else d)
        found: dict[torch.device, list[tuple[Tensor, Scalar]]] = {}
        for (view, _, _), row in zip(items, rows, strict=True):
            found.setdefault(view.w.device, []).append(row)
        return {device: stacked(pairs, device) for device, pairs in found.items()}

    next_sums = sums


def in_batches(items: Iterable[_T], *, key: Callable[[_T], tuple[int, Tensor]]) -> Iterator[list[_T]]:
    """Yield the items in batches of one group, device and dtype and of about ``BLOCK`` coordinates.

    ``key`` returns the group of an item and its tensor.
    """
    kinds: dict[tuple[int, torch.device, torch.dtype], list[tuple[_T, int]]] = {}
    for item in items:
        group, x = key(item)
        kinds.setdefault((group, x.device, x.dtype), []).append((item, x.numel()))
    for alike in kinds.values():
        batch: list[_T] = []
        size = 0
        for item, n in alike:
            if batch and size + n > loop.BLOCK:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += n
        yield batch


def count_gradients(steps: list[Tensor]) -> None:
    """Add 1 to each step count."""
    if steps and steps[0].device.type == "cpu":
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # wraps the 1 once, not for each
    elif steps:
        torch._foreach_add_(steps, 1)


# --- the rule, for lists of tensors of one device and one dtype ------------------------------------------------------


def _rates(vs: list[Tensor], steps: Sequence[Scalar], rule: Delayed) -> list[Tensor]:
    """As :func:`avagrad.optim.rules.rates`, for each ``v`` and the number of gradients it has seen."""
    if rule.flags.bias_correction:
        known: Any = [_known(step) for step in steps]
        seen = [step + (1 - k) for step, k in zip(steps, known, strict=True)]
        corrections: Any = _bias_corrections(rule.beta2, seen)
        etas = list(torch._foreach_div(vs, corrections))
        torch._foreach_sqrt_(etas)
    else:
        etas = list(torch._foreach_sqrt(vs))
    torch._foreach_add_(etas, rule.eps)
    torch._foreach_reciprocal_(etas)
    if rule.flags.bias_correction and any(isinstance(step, Tensor) or step == 0 for step in steps):
        torch._foreach_mul_(etas, known)
    if rule.flags.active_only:
        torch._foreach_mul_(etas, list(torch._foreach_sign(vs)))
    return etas


def _delayed_step(
    ws: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    steps: Sequence[Scalar],
    roundings: Sequence[dict[str, Any]],
    rule: Delayed,
    gamma: Scalar,
) -> None:
    """As :func:`avagrad.optim.rules.delayed_step`, in place. ``gs`` is not written to.

    ``roundings`` are the keyword arguments of :func:`avagrad.optim.rounding.store` for each tensor.
    """
    dtype, stored = ms[0].dtype, ws
    ws = _as(dtype, ws)
    if "compensation" in roundings[0]:
        torch._foreach_add_(ws, _as(dtype, [rounding["compensation"] for rounding in roundings]))
    etas = _rates(vs, steps, rule)
    if rule.flags.maximize:
        gs = list(torch._foreach_neg(gs))
    gs = _decay(ws, gs, vs, steps, rule)
    torch._foreach_mul_(ms, rule.beta1)
    torch._foreach_add_(ms, gs, alpha=1 - rule.beta1)

    alpha = rule.lr * gamma
    torch._foreach_mul_(etas, alpha.to(dtype) if isinstance(alpha, Tensor) else alpha)
    if rule.flags.bias_correction:
        corrections: Any = _bias_corrections(rule.beta1, [step + 1 for step in steps])
        torch._foreach_div_(etas, corrections)
    torch._foreach_mul_(etas, ms)
    if rule.flags.bias_correction:  # a first gradient only fills the moments: infinity times 0 is not to reach w
        etas = [_where_known(step, eta) for step, eta in zip(steps, etas, strict=True)]
    torch._foreach_sub_(ws, etas)

    torch._foreach_mul_(vs, rule.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - rule.beta2)
    if "rounding" in roundings[0]:
        for w, wide, rounding in zip(stored, ws, roundings, strict=True):
            store(w, wide, **rounding)
    elif stored[0].dtype != dtype:
        torch._foreach_copy_(stored, ws)


def _decay(
    ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], steps: Sequence[Scalar], rule: Delayed
) -> list[Tensor]:
    """Decay the weights in place, or return gradients with the decay added."""
    if rule.weight_decay == 0:
        return gs
    if rule.flags.decoupled:
        started = [_known(step) if rule.flags.bias_correction else 1.0 for step in steps]
        shrink: Any = [1 - rule.lr * rule.weight_decay * s for s in started]
        torch._foreach_mul_(ws, shrink)
        return gs
    if rule.flags.active_only:  # decay alone does not make a coordinate active
        decays = list(torch._foreach_abs(gs))
        torch._foreach_add_(decays, vs)
        torch._foreach_sign_(decays)
        torch._foreach_mul_(decays, ws)
        torch._foreach_mul_(decays, rule.weight_decay)
    else:
        decays = list(torch._foreach_mul(ws, rule.weight_decay))
    return list(torch._foreach_add(gs, decays))


def _bias_corrections(beta: float, counts: list[Scalar]) -> list[Scalar]:
    """Return the bias correction for each count; most tensors have the same."""
    if any(isinstance(t, Tensor) for t in counts):
        return [bias_correction_of(beta, t) for t in counts]
    distinct = {t: bias_correction_of(beta, t) for t in set(counts)}
    return [distinct[t] for t in counts]


def _as(dtype: torch.dtype, xs: list[Tensor]) -> list[Tensor]:
    """Return copies in another dtype, for half precision; else the tensors themselves."""
    return xs if xs[0].dtype == dtype else [x.to(dtype) for x in xs]


def _where_known(step: Scalar, x: Tensor) -> Tensor:
    if isinstance(step, Tensor):
        return torch.where(step > 0, x, 0.0)
    return x if step > 0 else torch.zeros_like(x)


def _known(step: Scalar) -> Scalar:
    return (step > 0).to(step.dtype) if isinstance(step, Tensor) else float(step > 0)
