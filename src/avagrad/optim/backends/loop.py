"""The interface of backends, and the simplest one: a loop over parameters that calls :mod:`avagrad.optim.rules`."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from avagrad.optim.rounding import store
from avagrad.optim.rules import Delayed, Rule, Scalar, scalar_dtype

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Backend", "Loop"]

BLOCK = 2**24  # coordinates per block: bounds the memory of temporaries, and the length of a float32 sum
CPU_BLOCK = 2**20  # on a CPU: temporaries stay in its caches


def block_size(device: torch.device) -> int:
    """Return how many coordinates a block has on a device."""
    return CPU_BLOCK if device.type == "cpu" else BLOCK


def batch_size(device: torch.device) -> int:
    """Return how many coordinates the parameters have that foreach joins, each at most a quarter of them."""
    return -(-CPU_BLOCK // 8) if device.type == "cpu" else BLOCK  # or each temporary is new memory, beyond the caches


def blocks(x: Tensor, size: int | None = None) -> Sequence[Tensor]:
    """Return views that cover ``x``, none much larger than ``size``, by default that of its device."""
    size = size or block_size(x.device)
    if x.numel() <= size:
        return (x,)
    longest = max(range(x.dim()), key=lambda dim: x.shape[dim])
    others = x.numel() // x.shape[longest]
    pieces = torch.split(x, max(size // others, 1), dim=longest)
    return pieces if others <= size else [b for piece in pieces for b in blocks(piece, size)]


def layouts(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return the layouts of tensors, to be compared with earlier ones.

    A list of one property of all tensors is faster to make and compare than tensors one by one, and strides are read
    only for tensors that are not contiguous.
    """
    flat = list(map(Tensor.is_contiguous, tensors))
    strides = [] if all(flat) else [None if is_flat else x.stride() for x, is_flat in zip(tensors, flat, strict=True)]
    others = Tensor.numel, Tensor.get_device, attrgetter("dtype")
    return flat, strides, *(list(map(of, tensors)) for of in others)


def unscaled(g: Tensor, grad_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a gradient in the dtype of the moments, without a GradScaler's scale: in float16 it might be 0."""
    g = g.to(dtype)
    return g if grad_scale is None else g / grad_scale.to(g.device)


def rounding_of(view: "ParamView", step: Scalar) -> dict[str, Any]:
    """Return the keyword arguments of :func:`avagrad.optim.rounding.store` for a parameter."""
    origin = view.w.storage_offset()
    return {"rounding": view.rounding, "seed": view.seed, "t": step + 1, "param_id": view.param_id, "origin": origin}


class Backend:
    """Base class of backends, which move parameters. Its tables and caches belong to one snapshot."""

    is_kernel = False  # checks found_inf on the device, and keeps its sums between steps

    def __init__(self, views: Sequence["ParamView"], rules: Sequence[Rule] = ()) -> None:
        self.views = views
        self.params = [view.param for view in views]
        self._shapes = [p.shape for p in self.params]
        self._tensors = [view.w for view in views]
        self._layouts = layouts(self._tensors)

    def fits(self) -> bool:
        """Return whether the parameters still have the layout that the backend was made for."""
        return [p.shape for p in self.params] == self._shapes and layouts(self._tensors) == self._layouts

    def prepare(self, grads: Sequence[Tensor | None]) -> Any:
        """Return the gradients, one for each view, as :meth:`move` takes them; None if they cannot be read."""
        return grads

    def move(self, grads: Any, step: "Step") -> list[Tensor]:
        """Move every parameter that has a gradient, and count it; return those whose writes autograd has not seen."""
        raise NotImplementedError

    def begin_backward(self, step: "Step") -> None:
        """Begin a step in which :meth:`move_one` moves parameters one by one."""

    def move_one(self, i: int, g: Tensor, step: "Step") -> bool:
        """Move the parameter of one view; if its gradient cannot be read, do nothing and return False."""
        raise NotImplementedError

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device sums of eta^p and counts, a row for each block, computed from the current state."""
        raise NotImplementedError

    def next_sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return the same after a step, which may have computed it already."""
        return self.sums(rules)

    def views_of_rows(self) -> dict[torch.device, list[int]]:
        """Return for each device and row of the sums the index of its view."""
        raise NotImplementedError


class Loop(Backend):
    """A backend for every rule, dtype and device, without tables."""

    def move(self, grads: Sequence[Tensor | None], step: "Step") -> list[Tensor]:
        """Move every parameter that has a gradient, one by one."""
        moving = {i: g for i, g in enumerate(grads) if g is not None}
        self._move_all(moving, step)
        return [view.param for view in map(self.views.__getitem__, moving) if view.w is not view.param]

    def move_one(self, i: int, g: Tensor, step: "Step") -> bool:
        """Move the parameter of one view."""
        self._move_all({i: g}, step)
        return True

    def _move_all(self, grads: Mapping[int, Tensor], step: "Step") -> None:
        for i, g in grads.items():
            self._move(self.views[i], g, step)

    def _move(self, view: "ParamView", g: Tensor, step: "Step") -> None:
        device, steps = view.w.device, view.step_value()
        dtype = view.state[-1].dtype
        w = view.w.to(dtype)
        if view.compensation is not None:
            w = w + view.compensation
        g = unscaled(g, step.grad_scale, dtype)
        rule, gamma = step.rule(view.group, device), step.gamma(device)
        w, *state = rule.apply(view.param, w, g, view.state, steps, gamma)
        if view.rounding == "nearest":
            view.w.copy_(w)
        else:
            store(view.w, w, compensation=view.compensation, **rounding_of(view, steps))
        for old, new in zip(view.state, state, strict=True):
            old.copy_(new)
        view.step.add_(1)

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device the sums of eta^p and the counts, a row for each block.

        A block is summed in the dtype of the moments, pairwise; blocks are added up in float64.
        """
        rows: dict[torch.device, list[tuple[Tensor, Scalar]]] = {}
        for view in self.views:
            rule = rules[view.group]
            assert isinstance(rule, Delayed)
            step = view.step_value()
            rows.setdefault(view.w.device, []).extend(rule.sums(block, step) for block in blocks(view.state[1]))
        return {device: stacked(pairs, device) for device, pairs in rows.items()}

    def views_of_rows(self) -> dict[torch.device, list[int]]:
        """Return for each device and row of the sums the index of its view."""
        rows: dict[torch.device, list[int]] = {}
        for i, view in enumerate(self.views):
            rows.setdefault(view.w.device, []).extend([i] * len(blocks(view.state[1])))
        return rows


def stacked(pairs: Sequence[tuple[Tensor, Scalar]], device: torch.device) -> Tensor:
    """Return sums and counts as two columns, in float64 if the device has it."""
    dtype = scalar_dtype(device)
    totals = torch.stack([total.to(dtype) for total, _ in pairs])
    counts = [d for _, d in pairs]
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or any(isinstance(d, Tensor) for d in counts):
        column = torch.stack([d.to(dtype) if isinstance(d, Tensor) else totals.new_full((), d) for d in counts])
    else:
        column = torch.tensor(counts, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")  # not waited for
    return torch.stack([totals, column.to(device, non_blocking=True)], 1)
