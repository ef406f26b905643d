"""What a step works with: parameters, gradients and state as real tensors, and a group's numbers where they are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from avagrad.optim.rounding import store
from avagrad.optim.rules import Scalar

__all__ = [
    "Batch",
    "Entry",
    "Group",
    "as_real",
    "by_device",
    "count",
    "host_or_device",
    "hyper_of_rates",
    "moment_dtype",
    "prefers_foreach",
    "scalar_dtype",
]

Group = dict[str, Any]

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class Entry(NamedTuple):
    """A parameter in a step, as real tensors: a complex one is a pair of reals in the last dimension."""

    param: Tensor  # as the user gave it
    w: Tensor
    g: Tensor | None  # None: no gradient in this step
    step: Tensor
    past: Scalar  # the value of step before this step: t - 1
    state: list[Tensor]  # in the order of _state_tensors
    place: int = 0  # among all parameters of the optimizer
    compensation: Tensor | None = None  # what rounding has cut off so far

    def values(self, group: Group) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return ``w, g, state`` for a rule to work with, all in the dtype of the moments."""
        assert self.g is not None
        dtype = moment_dtype(self.w.dtype)
        w, g, state = self.w.to(dtype), self.g.to(dtype), self.state
        if self.compensation is not None:
            w = w + self.compensation
        if group["differentiable"]:  # autograd may come back for what take() overwrites
            w, state = w.clone(), [x.clone() for x in state]
        return w, g, state

    def rounding(self, group: Group) -> dict[str, Any]:
        """Return the keyword arguments for :func:`avagrad.optim.rounding.store`."""
        if group.get("rounding", "nearest") == "nearest":
            return {}
        return {
            "rounding": group["rounding"],
            "seed": group["rounding_seed"],
            "t": self.past + 1,
            "place": self.place,
            "origin": self.w.storage_offset(),
        }

    def written(self) -> list[Tensor]:
        """Return all tensors that a step writes to."""
        rest = [] if self.compensation is None else [self.compensation]
        return [self.w, self.step, *self.state, *rest]

    def take(self, group: Group, w: Tensor, *state: Tensor) -> None:
        """Write a rule's results into place, and count the gradient."""
        store(self.w, w, compensation=self.compensation, **self.rounding(group))
        for old, new in zip(self.state, state, strict=True):
            old.copy_(new)
        self.step.add_(1)


class Batch(NamedTuple):
    """A group in a step: its values, what takes part, and what has no state yet and no gradient either."""

    group: Group  # our own keys alone, without the parameters
    entries: list[Entry]
    unseen: Scalar  # coordinates that require a gradient and have never had one


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's moments: float32 for half precision, else the parameter's."""
    return _WIDER.get(dtype, dtype)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which a device works out the few numbers that all coordinates share."""
    return torch.float32 if device.type == "mps" else torch.float64


def host_or_device(step: Tensor, group: Group) -> Scalar:
    """Return a step count as a number, or as a tensor where nothing may be read on the host."""
    if step.device.type != "cpu" or group["capturable"] or torch.compiler.is_compiling():
        return step.to(scalar_dtype(step.device))
    return step.item()


def by_device(group: Group, entries: Sequence[Entry]) -> dict[torch.device, Group]:
    """Return for each device of the entries the group, its tensors ready to meet tensors of any shape there.

    The tensors are lr, where it is one, and under torch.compile all numbers.
    """

    def moved(value: Any, device: torch.device) -> Any:
        if isinstance(value, Tensor):
            # A copy to the CPU must have arrived when it is read. Wide, since 1 - lr * weight_decay is 1 in bfloat16.
            dtype, non_blocking = scalar_dtype(device), device.type != "cpu"
            return value.reshape(()).to(device=device, dtype=dtype, non_blocking=non_blocking)
        return tuple(moved(x, device) for x in value) if isinstance(value, tuple) else value

    return {
        device: {key: moved(value, device) for key, value in group.items()}
        for device in dict.fromkeys(entry.w.device for entry in entries)
    }


def hyper_of_rates(group: Group, entries: Sequence[Entry]) -> dict[torch.device, Group]:
    """Return the keyword arguments for :func:`avagrad.optim.rules.rates`, on each device of the entries."""
    return {
        device: {
            "beta2": here["betas"][1],
            "eps": here["eps"],
            "bias_correction": here["bias_correction"],
            "active_only": here["active_only"],
        }
        for device, here in by_device(group, entries).items()
    }


def prefers_foreach(group: Group, params: list[Tensor]) -> bool:
    """Choose between foreach and the loop, as torch does."""
    if group["foreach"] is None and group["fused"] is None:
        return _default_to_fused_or_foreach(params, group["differentiable"], use_fused=False)[1]
    return bool(group["foreach"])


def count(p: Tensor) -> int:
    """Return how many real numbers a parameter has, over all ranks that share it."""
    return p.numel() * (2 if p.is_complex() else 1)


def as_real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals, any other as it is."""
    return torch.view_as_real(x) if x.is_complex() else x
