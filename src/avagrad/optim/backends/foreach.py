"""The delayed rule of :mod:`avagrad.optim.rules` for lists of tensors.

Many small tensors cost one launch per operation instead of one per tensor. The scalars come from ``rules``; only the
element-wise body is written again, and tests compare the two. To save passes over memory,
``1 / (sqrt(v / c) + eps)`` is written ``sqrt(c) / (sqrt(v) + eps sqrt(c))``, with c the bias correction.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from avagrad.optim.backends.loop import Loop, block_size, blocks, rounding_of, unscaled
from avagrad.optim.rounding import store
from avagrad.optim.rules import LARGEST, Delayed, Rule, Scalar, bias_correction_of, indicator, scalar_dtype

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Foreach"]

Steps = float | list[Tensor]  # the number of gradients before this step: one for all, or a tensor for each


class _Batch(NamedTuple):
    """Parameters of one group, device and dtype, or blocks of large ones; together about one block."""

    views: list[int]  # the index of each tensor's view,
    parts: list[int]  # and which block of the view it is
    steps: list[Tensor]
    ws: list[Tensor]
    ms: list[Tensor]
    vs: list[Tensor]
    numels: Tensor
    compensations: list[Tensor]  # one for each, or none

    def select(self, places: list[int]) -> "_Batch":
        if len(places) == len(self.ws):
            return self
        part = _Batch._make([each[i] for i in places] if len(each) else [] for each in self)
        return part._replace(numels=torch.stack([*part.numels]))


class Foreach(Loop):
    """Like :class:`Loop`, for many tensors at once."""

    def __init__(self, views: Sequence["ParamView"], rules: Sequence[Rule] = ()) -> None:
        super().__init__(views, rules)
        self._batches = list(_batches(views))
        self._split = {i for batch in self._batches for i, part in zip(batch.views, batch.parts, strict=True) if part}

    def _alike(self, views: Collection[int]) -> Iterator[tuple[int, list[int], _Batch, Steps]]:
        """Yield the parts of batches that contain these views and have the same number of gradients."""
        for number, batch in enumerate(self._batches):
            on_host, found = self.views[batch.views[0]].on_host, dict[float | None, list[int]]()
            for place, i in enumerate(batch.views):
                if i in views:
                    found.setdefault(batch.steps[place].item() if on_host else None, []).append(place)
            for count, places in found.items():
                part = batch.select(places)
                yield number, places, part, [self.views[i].step_value() for i in part.views] if count is None else count  # type: ignore[misc]

    def _move_all(self, grads: Mapping[int, Tensor], step: "Step") -> None:
        parts = {i: blocks(grads[i]) for i in self._split if i in grads}
        for _, _, batch, steps in self._alike(grads):
            view, device = self.views[batch.views[0]], batch.ws[0].device
            rule, dtype = step.rule(view.group, device), batch.ms[0].dtype
            assert isinstance(rule, Delayed)
            gs = [grads[i] for i in batch.views]
            if parts:
                gs = [parts.get(i, (g,))[k] for g, i, k in zip(gs, batch.views, batch.parts, strict=True)]
            if step.grad_scale is not None or any(g.dtype != dtype for g in gs):
                gs = [unscaled(g, step.grad_scale, dtype) for g in gs]
            ws = _delayed_step(batch, gs, steps, rule, step.gamma(device))
            if view.rounding != "nearest":
                for place, i in enumerate(batch.views):
                    compensation = batch.compensations[place] if batch.compensations else None
                    count = steps[place] if isinstance(steps, list) else steps
                    store(batch.ws[place], ws[place], compensation=compensation, **rounding_of(self.views[i], count))
            elif ws is not batch.ws:
                torch._foreach_copy_(batch.ws, ws)
        _count([self.views[i].step for i in grads])

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device the sums of eta^p and the counts, a row for each block."""
        found: dict[torch.device, list[tuple[tuple[int, int], Tensor]]] = {}
        for number, places, batch, steps in self._alike(range(len(self.views))):
            rule = rules[self.views[batch.views[0]].group]
            assert isinstance(rule, Delayed)
            rows = _totals(batch, steps, rule)
            split = [rows] if len(places) == len(self._batches[number].ws) else torch.split(rows, 1)
            found.setdefault(rows.device, []).extend(zip([(number, place) for place in places], split, strict=False))
        return {device: torch.cat([x for _, x in sorted(rows, key=itemgetter(0))]) for device, rows in found.items()}

    def views_of_rows(self) -> dict[torch.device, list[int]]:
        """Return for each device and row of the sums the index of its view."""
        rows: dict[torch.device, list[int]] = {}
        for batch in self._batches:
            rows.setdefault(batch.ws[0].device, []).extend(batch.views)
        return rows


def _batches(views: Sequence["ParamView"]) -> Iterator[_Batch]:
    """Yield the parameters in batches."""
    kinds: dict[Any, list[tuple[Any, ...]]] = {}
    for i, view in enumerate(views):
        tensors = (blocks(x) for x in (view.w, *view.state, view.compensation) if x is not None)
        kind = kinds.setdefault((view.group, view.w.device, view.w.dtype, view.on_host), [])
        kind.extend((i, part, view.step, *pieces) for part, pieces in enumerate(zip(*tensors, strict=True)))
    for alike in kinds.values():
        first = size = 0
        most = block_size(alike[0][3].device)
        for k, (_, _, _, w, *_) in enumerate(alike):
            if size and size + w.numel() > most:
                yield _batch(alike[first:k])
                first, size = k, 0
            size += w.numel()
        yield _batch(alike[first:])


def _batch(pieces: list[tuple[Any, ...]]) -> _Batch:
    views, parts, steps, ws, ms, vs, *rests = (list(column) for column in zip(*pieces, strict=True))
    dtype = scalar_dtype(ws[0].device)
    numels = torch.stack([torch.full((), w.numel(), dtype=dtype, device=w.device) for w in ws])  # works in a CUDA graph
    return _Batch(views, parts, steps, ws, ms, vs, numels, *(rests or [[]]))


def _count(steps: list[Tensor]) -> None:
    """Add 1 to each step count."""
    if steps and steps[0].device.type == "cpu":
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # wraps the 1 once, not for each tensor
    elif steps:
        torch._foreach_add_(steps, 1)


# --- the rule, for a batch -------------------------------------------------------------------------------------------


def _each(of: Callable[[Any], Any], steps: Steps, dtype: torch.dtype) -> Any:
    """Apply a function to the counts: return one number or tensor for all, or a list of tensors."""
    values = [of(n) for n in (steps if isinstance(steps, list) else [steps])]
    values = [x.to(dtype) if isinstance(x, Tensor) else x for x in values]
    return values if isinstance(steps, list) and isinstance(values[0], Tensor) else values[0]


def _totals(batch: _Batch, steps: Steps, rule: Delayed) -> Tensor:
    """Return for each piece the sum of the powers of what gamma normalises, and how many count."""
    flags, vs, dtype = rule.flags, batch.vs, scalar_dtype(batch.vs[0].device)
    sizes, eps = list(torch._foreach_sqrt(vs)), _each(lambda n: rule.eps * rule.root(n), steps, vs[0].dtype)
    unit = max(1.0, rule.eps) if flags.norm_of_step else 1.0  # as in Delayed.sums
    if flags.norm_of_step:  # eta r, in which the roots cancel
        xs = list(torch._foreach_add(sizes, eps))
        if unit != 1:
            torch._foreach_div_(xs, unit)
        torch._foreach_div_(sizes, xs)
        xs = sizes
    else:
        xs = sizes
        torch._foreach_add_(xs, eps)
        torch._foreach_reciprocal_(xs)
        if flags.active_only:
            torch._foreach_mul_(xs, torch._foreach_sign(vs))
    known = _column(_each(lambda n: indicator(n > 0, n), steps, dtype) if flags.bias_correction else 1.0)
    roots = _column(1.0 if flags.norm_of_step else _each(rule.root, steps, dtype))
    totals = _power_sums(xs, flags.norm, dtype) * (roots / unit) ** flags.norm
    counts = _counts(vs, dtype) if flags.active_only else batch.numels
    return torch.stack([totals * known, counts * known], 1)


def _column(values: Any) -> Any:
    """Return a list of one tensor for each piece as one tensor; a number itself."""
    return torch.stack(values) if isinstance(values, list) else values


# On a CPU a norm adds sequentially, in float64 after a copy; a sum adds pairwise, and needs no more digits.


def _power_sums(xs: list[Tensor], norm: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``x^norm`` for each ``x >= 0``; ``xs`` are overwritten."""
    if xs[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(xs, norm, dtype=dtype)) ** norm
    if norm == 2:
        torch._foreach_mul_(xs, xs)
    return torch.stack([x.sum() for x in xs]).to(dtype)


def _counts(vs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return how many elements of each ``v`` are not 0."""
    if vs[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(torch._foreach_sign(vs), 1, dtype=dtype))
    return torch.stack([torch.count_nonzero(v) for v in vs]).to(dtype)


def _delayed_step(batch: _Batch, gs: list[Tensor], steps: Steps, rule: Delayed, gamma: Scalar) -> list[Tensor]:
    """As :func:`avagrad.optim.rules.delayed_step`, with the state in place; return the weights in the state's dtype."""
    flags, ms, vs = rule.flags, batch.ms, batch.vs
    dtype = ms[0].dtype
    ws = batch.ws if batch.ws[0].dtype == dtype else [w.to(dtype) for w in batch.ws]
    if batch.compensations:
        torch._foreach_add_(ws, [compensation.to(dtype) for compensation in batch.compensations])
    if flags.maximize:
        gs = list(torch._foreach_neg(gs))
    gs = _decay(ws, gs, vs, steps, rule)
    sizes = list(torch._foreach_sqrt(vs))
    if flags.norm_of_step:
        gs = _bounded(gs, sizes, steps, rule)
    if rule.beta1 > 0.5:
        torch._foreach_lerp_(ms, gs, 1 - rule.beta1)
    else:  # lerp would take an infinite gradient from itself
        torch._foreach_mul_(ms, rule.beta1)
        torch._foreach_add_(ms, gs, alpha=1 - rule.beta1)
    if not flags.bias_correction or isinstance(steps, list) or steps > 0:
        _move(ws, ms, vs, sizes, steps, rule, gamma)
    torch._foreach_mul_(vs, rule.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - rule.beta2)
    return ws


def _move(
    ws: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    sizes: list[Tensor],
    steps: Steps,
    rule: Delayed,
    gamma: Scalar,
) -> None:
    """Move the weights; ``sizes`` are ``sqrt(v)`` and are overwritten."""
    flags, dtype = rule.flags, vs[0].dtype

    def m_correction(n: Scalar) -> Scalar:
        return bias_correction_of(rule.beta1, n + 1) if flags.bias_correction else 1.0

    if flags.bias_correction:  # a first gradient, maybe infinite, moves nothing
        ms = [torch.where(n > 0, m, 0.0) for n, m in zip(steps, ms, strict=True)] if isinstance(steps, list) else ms
    if (c := rule.clip_update) is not None:
        bound = _each(lambda n: c * m_correction(n) / rule.root(n), steps, dtype)
        ms = _clamped(ms, list(torch._foreach_mul(sizes, bound)))
    torch._foreach_add_(sizes, _each(lambda n: rule.eps * rule.root(n), steps, dtype))
    if flags.active_only and not flags.clips_update:  # a clamp has made the momentum 0 already
        torch._foreach_div_(sizes, list(torch._foreach_sign(vs)))  # infinite, so that the rate is 0
    torch._foreach_div_(sizes, _each(lambda n: rule.lr * gamma * rule.root(n) / m_correction(n), steps, dtype))
    torch._foreach_addcdiv_(ws, ms, sizes, value=-1)


def _bounded(gs: list[Tensor], sizes: list[Tensor], steps: Steps, rule: Delayed) -> list[Tensor]:
    """Return gradients of at most ``clip_moment`` times their typical size, and of at most ``LARGEST``."""
    gs = list(torch._foreach_clamp_max(gs, LARGEST))
    torch._foreach_clamp_min_(gs, -LARGEST)
    k = rule.clip_moment
    if k is None:
        return gs
    most = torch._foreach_mul(sizes, _each(lambda n: k / rule.root(n), steps, gs[0].dtype))
    return _clamped(gs, [torch.where(x > 0, x, math.inf) for x in most])


def _clamped(xs: list[Tensor], most: list[Tensor]) -> list[Tensor]:
    """Clamp each ``x`` to between ``-most`` and ``most``; ``most`` is overwritten."""
    xs = list(torch._foreach_minimum(xs, most))
    torch._foreach_neg_(most)
    torch._foreach_maximum_(xs, most)
    return xs


def _decay(ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], steps: Steps, rule: Delayed) -> list[Tensor]:
    """Decay the weights in place, or return gradients with the decay added."""
    if not rule.flags.decays:
        return gs
    if rule.flags.decoupled:
        decay, corrected = rule.lr * rule.weight_decay, rule.flags.bias_correction
        shrink = _each(lambda n: 1 - decay * (indicator(n > 0, n) if corrected else 1.0), steps, ws[0].dtype)
        torch._foreach_mul_(ws, shrink)
        return gs
    decays = list(torch._foreach_mul(ws, rule.weight_decay))
    if rule.flags.active_only:  # decay alone does not make a coordinate active
        decays = [torch.where((v == 0) & (g == 0), 0.0, x) for x, g, v in zip(decays, gs, vs, strict=True)]
    return list(torch._foreach_add(gs, decays))
