"""What the rules of the baselines share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from avagrad.optim.rules import Rule, Scalar, is_on

__all__ = ["FunctionRule", "with_l2"]

_F = TypeVar("_F", bound="FunctionRule")


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A rule that is one function of a parameter and its state. A subclass sets the function and its arguments."""

    keys: ClassVar[tuple[str, ...]]  # keys of a group that are arguments of the function, besides lr and betas
    flag_keys: ClassVar[tuple[str, ...]]  # keys of a group that are the rule's flags: a change takes a new snapshot

    lr: Scalar
    others: dict[str, Any]
    flags: tuple[Any, ...]

    @classmethod
    def of(cls: type[_F], group: Mapping[str, Any]) -> _F:
        """Return the rule for a parameter group."""
        beta1, beta2 = group["betas"]
        others = {"beta1": beta1, "beta2": beta2, **{key: group[key] for key in cls.keys}}
        return cls(group["lr"], others, tuple(group[key] for key in cls.flag_keys))


def with_l2(w: Tensor, g: Tensor, weight_decay: Scalar, maximize: bool) -> Tensor:
    """Return the gradient to descend along, with weight decay added."""
    g = -g if maximize else g
    return g + weight_decay * w if is_on(weight_decay) else g
