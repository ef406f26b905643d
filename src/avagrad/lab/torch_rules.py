"""The rules of torch's SGD, Adam, AdamW and AMSGrad as pure functions, for many models at once.

They give the numbers of torch.optim (tested), in the style of :mod:`avagrad.optim.rules`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avagrad.optim.baselines import FunctionRule, with_l2
from avagrad.optim.rules import Rule, Scalar, bias_correction_of, sqrt, where


def sgd_step(
    w: Tensor,
    g: Tensor,
    buffer: Tensor,
    t: Scalar,
    *,
    lr: Scalar,
    momentum: Scalar = 0.0,
    nesterov: bool = False,
    weight_decay: Scalar = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Take one step of SGD with (Nesterov) momentum, as torch.optim.SGD. Returns ``w, buffer``."""
    g = with_l2(w, g, weight_decay, maximize)
    buffer = where(t > 1, momentum * buffer, torch.zeros_like(buffer)) + g
    return w - lr * (g + momentum * buffer if nesterov else buffer), buffer


def adam_step(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    v_max: Tensor | None,
    t: Scalar,
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    weight_decay: Scalar = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one step of Adam, AdamW (``decoupled``) or AMSGrad (``v_max`` given), as torch.optim.

    Returns ``w, m, v, v_max``, where ``v_max`` is ``v`` if none was given.
    """
    if decoupled:
        g = -g if maximize else g
        w = w * (1 - lr * weight_decay)
    else:
        g = with_l2(w, g, weight_decay, maximize)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    v_max = v if v_max is None else torch.maximum(v_max, v)
    v_hat = v_max / bias_correction_of(beta2, t)
    return w - lr * (m / bias_correction_of(beta1, t) / (sqrt(v_hat) + eps)), m, v, v_max


@dataclass(frozen=True)
class SgdRule(Rule):
    """The rule of torch.optim.SGD, with the settings of one parameter group."""

    arguments: dict[str, Any]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "SgdRule":
        """Return the rule for a parameter group."""
        return cls({name: group[name] for name in ("lr", "momentum", "nesterov", "weight_decay", "maximize")})

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the new ``w`` and momentum."""
        return sgd_step(w, g, state[0], step + 1, **self.arguments)


@dataclass(frozen=True)
class AdamRule(FunctionRule):
    """The rule of torch.optim.Adam and AdamW, with the settings of one parameter group."""

    keys = ("eps", "weight_decay", "maximize")
    flag_keys = ("decoupled_weight_decay",)

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the new ``w, m, v`` and, with amsgrad, ``v_max``."""
        v_max = state[2] if len(state) == 3 else None
        moved = adam_step(w, g, state[0], state[1], v_max, step + 1, lr=self.lr, decoupled=self.flags[0], **self.others)
        return moved[: 1 + len(state)]
