"""The delayed rule of :mod:`avagrad.optim.rules` for many tensors at once.

An operation on a list of tensors takes the host's time for each, most of all to allocate results. So the small tensors
of a batch are joined, and copied back when they have changed. A large one is a batch of its own, and changes in place.

The scalars come from ``rules``; only the element-wise body is written again, and tests compare the two. To save passes
over memory, ``1 / (sqrt(v / c) + eps)`` is written ``sqrt(c) / (sqrt(v) + eps sqrt(c))``, with c the bias correction.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from avagrad.optim.backends.loop import Loop, batch_size, blocks, rounding_of, unscaled
from avagrad.optim.rounding import store
from avagrad.optim.rules import LARGEST, Delayed, Rule, Scalar, bias_correction_of, indicator, scalar_dtype
from avagrad.optim.sharding import PLAIN

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Foreach"]


class _Piece(NamedTuple):
    """The state of a small parameter, flat; or of a large one, or a block of it, as it is."""

    view: int  # its index
    block: int  # which block of the parameter
    numel: Tensor  # on the device
    step: Tensor
    m: Tensor
    v: Tensor
    compensation: Tensor | None = None


class _Batch:
    """What is moved together: small parameters of one group, device, dtype and placement, joined; or one piece."""

    def __init__(self, pieces: list[_Piece], *, is_joined: bool) -> None:
        self.pieces, self.is_joined = pieces, is_joined
        self.steps, self.ms, self.vs = ([getattr(x, name) for x in pieces] for name in ("step", "m", "v"))
        self.compensations = [x.compensation for x in pieces if x.compensation is not None]
        self.numels = [m.numel() for m in self.ms]
        self.repeats = torch.stack([x.numel for x in pieces])  # the same, on the device; works in a CUDA graph

    def select(self, places: list[int]) -> "_Batch":
        if len(places) == len(self.pieces):
            return self
        return _Batch([self.pieces[i] for i in places], is_joined=self.is_joined)

    def split(self, x: Tensor) -> list[Tensor]:
        return list(torch.split(x, self.numels)) if len(self.numels) > 1 else [x]

    def write(self, xs: list[Tensor], x: Tensor) -> None:
        """Copy a joined tensor back, unless it is the tensor itself."""
        if x is not xs[0]:
            torch._foreach_copy_(xs, self.split(x))

    def spread(self, x: Scalar) -> Scalar:
        """Return a number for each parameter as one for each coordinate, in the dtype of the state."""
        if not isinstance(x, Tensor):
            return x
        x = x.to(self.ms[0].dtype)
        return torch.repeat_interleave(x, self.repeats, output_size=sum(self.numels)) if x.dim() else x


class Foreach(Loop):
    """A backend for the delayed rule that moves all parameters of a kind together."""

    def __init__(self, views: Sequence["ParamView"], rules: Sequence[Rule] = ()) -> None:
        super().__init__(views, rules)
        self._batches = _batches(views)
        self._places: list[list[tuple[int, int]]] = [[] for _ in views]  # of each view: a batch, and the place there
        for number, batch in enumerate(self._batches):
            for place, piece in enumerate(batch.pieces):
                self._places[piece.view].append((number, place))

    def move_one(self, i: int, g: Tensor, step: "Step") -> bool:
        """Move the parameter of one view; return False if it is not flat any more: a hook may change it."""
        is_joined = self._batches[self._places[i][0][0]].is_joined
        return (not is_joined or self._tensors[i].is_contiguous()) and super().move_one(i, g, step)

    def _alike(self, views: Iterable[int]) -> Iterator[tuple[int, _Batch, Scalar]]:
        """Yield the parts of batches that contain these views, and their number of gradients: a tensor if not read."""
        found: dict[tuple[int, float | None], list[int]] = {}
        for i in views:
            count = self.views[i].step.item() if self.views[i].on_host else None
            for number, place in self._places[i]:
                found.setdefault((number, count), []).append(place)
        for (number, count), places in found.items():
            part = self._batches[number].select(places)
            device = part.ms[0].device
            yield number, part, _joined(part.steps).to(device, scalar_dtype(device)) if count is None else count

    def _move_all(self, grads: Mapping[int, Tensor], step: "Step") -> None:
        split: dict[int, Sequence[Sequence[Tensor]]] = {}  # the blocks of large parameters and gradients
        for _, batch, steps in self._alike(grads):
            views = [piece.view for piece in batch.pieces]
            view, device, dtype = self.views[views[0]], batch.ms[0].device, batch.ms[0].dtype
            rule = step.rule(view.group, device)
            assert isinstance(rule, Delayed)
            if batch.is_joined:
                ws, gs = [self._tensors[i].flatten() for i in views], [grads[i].flatten() for i in views]
            else:
                i = views[0]
                if i not in split:
                    split[i] = blocks(self._tensors[i]), blocks(grads[i])
                ws, gs = ([of[batch.pieces[0].block]] for of in split[i])
            w = _joined(ws).to(dtype)
            if batch.compensations:
                w.add_(_joined(batch.compensations))
            _delayed_step(batch, w, unscaled(_joined(gs), step.grad_scale, dtype), steps, rule, step.gamma(device))
            if view.rounding == "nearest":
                batch.write(ws, w)
                continue
            for piece, x, wide in zip(batch.pieces, ws, batch.split(w), strict=True):
                how = rounding_of(self.views[piece.view], self.views[piece.view].step_value())
                store(x, wide, compensation=piece.compensation, **how)
        _count([self.views[i].step for i in grads])

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device the sums of eta^p and the counts, a row for each batch."""
        found: dict[torch.device, dict[int, Tensor]] = {}
        for number, batch, steps in self._alike(range(len(self.views))):
            rule = rules[self.views[batch.pieces[0].view].group]
            assert isinstance(rule, Delayed)
            row = _totals(batch, steps, rule)
            rows = found.setdefault(row.device, {})
            rows[number] = rows[number] + row if number in rows else row
        return {device: torch.stack([rows[number] for number in sorted(rows)]) for device, rows in found.items()}

    def views_of_rows(self) -> dict[torch.device, list[int]]:
        """Return for each device and row of the sums the index of one of its views: they have the same placement."""
        rows: dict[torch.device, list[int]] = {}
        for batch in self._batches:
            rows.setdefault(batch.ms[0].device, []).append(batch.pieces[0].view)
        return rows


def _batches(views: Sequence["ParamView"]) -> list[_Batch]:
    """Return the parameters in batches.

    Which parameters are joined, and the order of batches, do not depend on which parameters have a state so far. So a
    step inside backward, which makes a state for all, has the bits of an ordinary one.
    """
    found: dict[tuple[int, int, int, int, str], list[_Piece]] = {}
    for i, view in enumerate(views):
        tensors = [x for x in (view.w, *view.state, view.compensation) if x is not None]
        place = view.group, view.offset // batch_size(view.w.device)
        if view.is_small and all(type(x) in PLAIN and x.is_contiguous() for x in tensors):
            placement = getattr(view.param, "device_mesh", None), getattr(view.param, "placements", None)
            kind = view.w.device, view.w.dtype, view.step.device, len(tensors), placement
            found.setdefault((*place, -1, 0, str(kind)), []).append(_piece(i, 0, view, [x.flatten() for x in tensors]))
        else:
            for block, parts in enumerate(zip(*map(blocks, tensors), strict=True)):
                found[*place, view.param_id, block, ""] = [_piece(i, block, view, parts)]
    return [_Batch(found[key], is_joined=key[2] < 0) for key in sorted(found)]


def _piece(i: int, block: int, view: "ParamView", parts: Sequence[Tensor]) -> _Piece:
    w, *state = parts
    return _Piece(i, block, torch.full((), w.numel(), device=w.device), view.step, *state)


def _joined(xs: list[Tensor]) -> Tensor:
    """Return tensors as one, which is a copy; a single tensor itself."""
    return xs[0] if len(xs) == 1 else torch.cat(xs) if xs[0].dim() else torch.stack(xs)


def _count(steps: list[Tensor]) -> None:
    """Add 1 to each step count."""
    if steps and steps[0].device.type == "cpu":
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)  # wraps the 1 once, not for each tensor
    elif steps:
        torch._foreach_add_(steps, 1)


# --- the rule, for a batch -------------------------------------------------------------------------------------------


def _totals(batch: _Batch, steps: Scalar, rule: Delayed) -> Tensor:
    """Return the sum of the powers of what gamma normalises, and how many count."""
    flags, v = rule.flags, _joined(batch.vs)
    dtype = scalar_dtype(v.device)
    if flags.bias_correction and not isinstance(steps, Tensor) and steps == 0:
        return torch.zeros(2, dtype=dtype, device=v.device)
    size, eps = v.sqrt(), batch.spread(rule.eps * rule.root(steps))
    unit = max(1.0, rule.eps) if flags.norm_of_step else 1.0  # as in Delayed.sums
    if flags.norm_of_step:  # eta r, in which the roots cancel
        x = size + eps
        if unit != 1:
            x.div_(unit)
        x = size.div_(x)
    else:
        x = size.add_(eps).reciprocal_()
        if flags.active_only:
            x.mul_(v.sign())
    root = 1.0 if flags.norm_of_step else rule.root(steps)
    split = batch.split if isinstance(steps, Tensor) else lambda x: [x]  # one number for all, or one for each
    totals = _power_sums(split(x), flags.norm, dtype) * (root / unit) ** flags.norm
    counts = _power_sums(split(torch.sign(v, out=x)), 1, dtype) if flags.active_only else batch.repeats.to(dtype)
    if flags.bias_correction and isinstance(steps, Tensor):
        totals, counts = (torch.where(steps > 0, each, 0.0) for each in (totals, counts))
    return torch.stack([totals.cumsum(0)[-1], counts.sum()])  # one by one, so that a 0 changes no bit


def _power_sums(xs: list[Tensor], norm: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``x^norm`` for each ``x >= 0``, which is overwritten.

    On a CPU a norm adds sequentially, in float64 after a copy; a sum adds pairwise, and needs no more digits.
    """
    if xs[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(xs, norm, dtype=dtype)) ** norm
    return torch.stack([(x.mul_(x) if norm == 2 else x).sum() for x in xs]).to(dtype)


def _delayed_step(batch: _Batch, w: Tensor, g: Tensor, steps: Scalar, rule: Delayed, gamma: Scalar) -> None:
    """As :func:`avagrad.optim.rules.delayed_step`, with the weights and the state in place; ``g`` is only read."""
    flags, m, v = rule.flags, _joined(batch.ms), _joined(batch.vs)
    if flags.maximize:
        g = -g
    size = v.sqrt()
    if flags.decays and not flags.decoupled:
        added = w * rule.weight_decay
        if flags.active_only:  # decay alone does not make a coordinate active
            added = torch.where((size == 0) & (g == 0), 0.0, added)
        g = g + added
    if flags.norm_of_step:
        g = _bounded(batch, g, size, steps, rule)
    if rule.beta1 > 0.5:
        m.lerp_(g, 1 - rule.beta1)
    else:  # lerp would take an infinite gradient from itself
        m.mul_(rule.beta1).add_(g, alpha=1 - rule.beta1)
    v.mul_(rule.beta2).addcmul_(g, g, value=1 - rule.beta2)
    batch.write(batch.ms, m)
    batch.write(batch.vs, v)
    del g, v  # their memory is used again
    if not flags.bias_correction or isinstance(steps, Tensor) or steps > 0:
        _move(batch, w, m, size, steps, rule, gamma)


def _move(batch: _Batch, w: Tensor, m: Tensor, size: Tensor, steps: Scalar, rule: Delayed, gamma: Scalar) -> None:
    """Move the weights; ``size`` is ``sqrt(v)`` and is overwritten."""
    flags, root = rule.flags, rule.root(steps)
    correction = bias_correction_of(rule.beta1, steps + 1) if flags.bias_correction else 1.0
    active = size.sign() if flags.active_only and not flags.clips_update else None  # a clamp makes the momentum 0
    if flags.bias_correction and isinstance(known := batch.spread(steps), Tensor):
        m = torch.where(known > 0, m, 0.0)  # a first gradient, maybe infinite, moves nothing
    if rule.clip_update is not None:
        bound = size * batch.spread(rule.clip_update * correction / root)
        m = torch.clamp(m, -bound, bound, out=bound)
    size.add_(batch.spread(rule.eps * root))
    if active is not None:
        size.div_(active)  # infinite, so that the rate is 0
    scale = rule.lr * gamma * root / correction
    if flags.decays and flags.decoupled:  # after the gradient is read, which may be the parameter itself
        decay = rule.lr * rule.weight_decay * (indicator(steps > 0, steps) if flags.bias_correction else 1.0)
        w.mul_(batch.spread(1 - decay))
    if flags.bias_correction and isinstance(steps, Tensor):
        scale = torch.where(steps > 0, scale, 1.0)  # nor does a gamma that is NaN
    w.addcdiv_(m, size.div_(batch.spread(scale)), value=-1)


def _bounded(batch: _Batch, g: Tensor, size: Tensor, steps: Scalar, rule: Delayed) -> Tensor:
    """Return gradients of at most ``clip_moment`` times their typical size, and of at most ``LARGEST``."""
    g, k = g.clamp(-LARGEST, LARGEST), rule.clip_moment
    if k is None:
        return g
    most = torch.where(size > 0, size * batch.spread(k / rule.root(steps)), math.inf)
    return torch.clamp(g, -most, most, out=most)
