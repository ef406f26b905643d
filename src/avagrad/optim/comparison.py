"""What the rules of the methods of comparison share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from avagrad.optim.rules import Rule, Scalar, is_on

__all__ = ["FunctionRule", "with_l2"]

_F = TypeVar("_F", bound="FunctionRule")


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A rule that is one function of a parameter and its state: a subclass says which, and with which arguments."""

    keys: ClassVar[tuple[str, ...]]  # of a group, which are arguments of the function beside lr and betas
    state_keys: ClassVar[tuple[str, ...]]  # of a group, which say what the state holds

    lr: Scalar
    others: dict[str, Any]
    flags: tuple[Any, ...]

    @classmethod
    def of(cls: type[_F], group: Mapping[str, Any]) -> _F:
        """Return the rule that a parameter group sets."""
        beta1, beta2 = group["betas"]
        others = {"beta1": beta1, "beta2": beta2, **{key: group[key] for key in cls.keys}}
        return cls(group["lr"], others, tuple(group[key] for key in cls.state_keys))


def with_l2(w: Tensor, g: Tensor, weight_decay: Scalar, maximize: bool) -> Tensor:
    """Return the gradient to go down by, weight decay added."""
    g = -g if maximize else g
    return g + weight_decay * w if is_on(weight_decay) else g
