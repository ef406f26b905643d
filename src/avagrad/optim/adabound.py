"""AdaBound (Luo, Xiong, Liu, Sun, 2019): Adam between two bounds that converge to SGD's rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import ALLOWED, BOOL, Allowed, explain_unknown_keywords, is_finite
from avagrad.optim.baselines import FunctionRule, with_l2
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.params import Group
from avagrad.optim.rules import Scalar, bias_correction_of, indicator, sqrt

__all__ = ["AdaBound", "adabound_step"]


def adabound_step(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    v_max: Tensor | None,
    t: Scalar,
    *,
    lr: Scalar,
    base_lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    final_lr: Scalar,
    gamma: Scalar,
    weight_decay: Scalar = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one step of AdaBound, or AMSBound (``v_max`` given). Returns ``w, m, v, v_max`` (else ``v``).

    Adam's rate is clamped between two bounds that close in on ``final_lr`` as ``t`` grows, both
    scaled by ``lr / base_lr`` so that they follow a schedule.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> hyper = {"lr": 0.1, "base_lr": 0.1, "beta1": 0.0, "beta2": 0.0, "eps": 1e-8, "final_lr": 0.1, "gamma": 1.0}
    >>> adabound_step(one, one / 9, zero, zero, None, 1, **hyper)[0]  # Adam's rate, 0.9, is clamped to 0.2
    tensor([0.9778])
    """
    g = with_l2(w, g, weight_decay, maximize)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    v_max = v if v_max is None else torch.maximum(v_max, v)
    based = indicator(base_lr != 0, base_lr)  # at base_lr 0 the bounds do not follow lr
    final = final_lr * (based * lr + (1 - based)) / (base_lr + (1 - based))
    size = lr * bias_correction_of(beta2, t) ** 0.5 / bias_correction_of(beta1, t)
    rate = size / (sqrt(v_max) + eps)
    rate = rate.clamp(min=final * (1 - 1 / (gamma * t + 1)))
    rate = rate.clamp(max=final * (1 + 1 / (gamma * t)))
    return w - rate * m, m, v, v_max


@dataclass(frozen=True)
class _AdaBoundRule(FunctionRule):
    keys = ("base_lr", "eps", "final_lr", "gamma", "weight_decay", "maximize")
    flag_keys = ("amsbound",)

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the new ``w, m, v`` and, with amsbound, ``v_max``."""
        v_max = state[2] if len(state) == 3 else None
        return adabound_step(w, g, state[0], state[1], v_max, step + 1, lr=self.lr, **self.others)[: 1 + len(state)]


class AdaBound(RuleOptimizer):
    """AdaBound: Adam's rates, clamped between bounds that close in on ``final_lr``.

        rate    = lr sqrt(1 - beta2^t) / (1 - beta1^t) / (sqrt(v_t) + eps)
        f       = final_lr lr / base_lr
        w_{t+1} = w_t - m_t clamp(rate, f (1 - 1 / (gamma t + 1)), f (1 + 1 / (gamma t)))

    The other arguments are those of :class:`torch.optim.Adam`; there is one implementation.

    Args:
        lr: Adam's learning rate; a number or a tensor of one element. Its first value in each group is
            kept there as ``base_lr``, so that the bounds follow schedules.
        final_lr: the rate that the bounds close in on.
        gamma: how fast they do.
        amsbound: use the largest second moment so far, as AMSGrad.

    Reference: "Adaptive Gradient Methods with Dynamic Bound of Learning Rate".

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> w.grad = 2 * w.detach()
    >>> AdaBound([w], lr=0.01).step()
    >>> w.detach()
    tensor([ 0.9900, -1.9900])
    """

    _own_keys = ("base_lr", "final_lr", "gamma", "amsbound")
    _rule_class = _AdaBoundRule
    _allowed: ClassVar[Allowed] = {
        **ALLOWED,
        "final_lr": ("a finite number of at least 0", lambda x: is_finite(x) and x >= 0),
        "base_lr": ("a finite number of at least 0, or None", lambda x: x is None or (is_finite(x) and x >= 0)),
        "gamma": ("a number above 0 and at most 1", lambda x: is_finite(x) and 0 < x <= 1),
        "amsbound": BOOL,
    }

    @explain_unknown_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        final_lr: float = 0.1,
        gamma: float = 1e-3,
        amsbound: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: Group = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "base_lr": None, "final_lr": final_lr, "gamma": gamma, "amsbound": amsbound,
            "foreach": foreach, "capturable": capturable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; its first lr becomes its ``base_lr`` unless it has one."""
        super().add_param_group(param_group)
        if param_group["base_lr"] is None:
            param_group["base_lr"] = float(param_group["lr"])

    def _state_tensors(self, group: Group) -> dict[str, bool]:
        return {"exp_avg": True, "exp_avg_sq": True} | ({"max_exp_avg_sq": True} if group["amsbound"] else {})
