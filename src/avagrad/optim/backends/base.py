"""What a backend is: the object that moves some parameters of an optimizer in a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from avagrad.optim.rules import Rule

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Backend"]


class Backend:
    """What moves some parameters. Its tables belong to one snapshot, and it keeps nothing else between steps."""

    is_kernel = False  # skips by found_inf itself, keeps its sums between steps, and autograd does not see its writes

    def __init__(self, views: Sequence["ParamView"], rules: Sequence[Rule] = ()) -> None:
        self.views = views

    def prepare(self, grads: Sequence[Tensor | None]) -> Any:
        """Return the gradients, one for each view, as :meth:`move` takes them; None if they cannot be read."""
        return grads

    def move(self, grads: Any, step: "Step") -> None:
        """Move every parameter that has a gradient, and count it in its ``step``."""
        raise NotImplementedError

    def begin_backward(self, step: "Step") -> None:
        """Begin a step in which :meth:`move_one` moves one parameter after the other."""

    def move_one(self, i: int, g: Tensor, step: "Step") -> bool:
        """Move the parameter of one view; False if its gradient cannot be read, and nothing is done."""
        raise NotImplementedError

    def end_backward(self) -> None:
        """End such a step."""

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device sums of eta^p and counts, a row for each block of a tensor, from the state as it is."""
        raise NotImplementedError

    def next_sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return the same after a step, where it was taken before."""
        return self.sums(rules)

    def views_of_rows(self) -> dict[torch.device, list[int]]:
        """Return for each device and row of the sums the index of its view."""
        raise NotImplementedError
