"""ADOPT (Taniguchi, Harada, Minegishi, Oshima, Jeong, Nagahara, Iiyama, Suzuki, Iwasawa, Matsuo, 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import ALLOWED, BOOL, Allowed, explain_unknown_keywords
from avagrad.optim.baselines import FunctionRule, with_l2
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.params import Group
from avagrad.optim.rules import Scalar, sqrt, where

__all__ = ["ADOPT", "adopt_step"]


def adopt_step(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: Scalar,
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    weight_decay: Scalar = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of ADOPT. Returns ``w, m, v``.

    The gradient is divided by the root of the previous second moment and clamped, and then enters the momentum. The
    first gradient only fills ``v``.

    >>> one = torch.ones(1)
    >>> adopt_step(one, one, 0 * one, one, 2, lr=0.1, beta1=0.5, beta2=0.5, eps=1e-6)[0]
    tensor([0.9500])
    """
    started = t > 1
    shrunk = w * (1 - lr * weight_decay) if decoupled else w
    g = with_l2(w, g, 0.0 if decoupled else weight_decay, maximize)
    most = (t - 1) ** 0.25
    m_next = beta1 * m + (1 - beta1) * torch.clamp(g / sqrt(v).clamp(min=eps), -most, most)
    v_next = beta2 * v + (1 - beta2) * g * g
    return where(started, shrunk - lr * m_next, w), where(started, m_next, m), where(started, v_next, g * g)


@dataclass(frozen=True)
class _AdoptRule(FunctionRule):
    keys = ("eps", "weight_decay", "maximize")
    flag_keys = ("decoupled_weight_decay",)

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the new ``w, m, v``."""
        m, v = state
        return adopt_step(w, g, m, v, step + 1, lr=self.lr, decoupled=self.flags[0], **self.others)


class ADOPT(RuleOptimizer):
    """ADOPT: Adam whose second moment is one step old, and whose momentum is that of the scaled gradients.

        m_t     = beta1 m_{t-1} + (1 - beta1) clamp(g_t / max(sqrt(v_{t-1}), eps), +-(t - 1)^(1/4))
        w_{t+1} = w_t - lr m_t
        v_t     = beta2 v_{t-1} + (1 - beta2) g_t^2

    with v_1 = g_1^2; the first gradient of a parameter moves nothing. It is a baseline: the method
    closest to :class:`avagrad.DelayedAdam` with a clamp.

    Reference: "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate".

    The other arguments are those of :class:`torch.optim.Adam`; there is one implementation.

    Args:
        betas: the decay of the momentum and of the second moment.
        eps: the least root of the second moment.
        decoupled_weight_decay: shrink the parameter by lr * weight_decay instead, as AdamW does.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = ADOPT([w], lr=0.01)
    >>> for _ in range(2):
    ...     w.grad = 2 * w.detach()
    ...     opt.step()
    >>> w.detach()
    tensor([ 0.9990, -1.9990])
    """

    _own_keys = ("decoupled_weight_decay",)
    _rule_class = _AdoptRule
    _allowed: ClassVar[Allowed] = {**ALLOWED, "decoupled_weight_decay": BOOL}

    @explain_unknown_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: Group = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "foreach": foreach, "capturable": capturable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _state_tensors(self, group: Group) -> dict[str, bool]:
        # Not exp_avg, which averages plain gradients: so Adam's state does not fit, and is rejected.
        return {"exp_avg_scaled": True, "exp_avg_sq": True}
