"""AdaBound (Luo, Xiong, Liu, Sun, 2019): Adam between two bounds that become SGD's rate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import ALLOWED, BOOL, Allowed, explain_unknown_keywords, is_finite
from avagrad.optim.comparison_rules import adabound_step
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.params import Group
from avagrad.optim.rules import Rule, Scalar

__all__ = ["AdaBound"]


@dataclass(frozen=True)
class _AdaBoundRule(Rule):
    lr: Scalar
    others: dict[str, Any]  # the other keyword arguments of adabound_step
    flags: bool  # amsbound: what the state holds

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "_AdaBoundRule":
        """Return the rule that a parameter group sets."""
        same = {key: group[key] for key in ("base_lr", "eps", "final_lr", "gamma", "weight_decay", "maximize")}
        return cls(group["lr"], {"beta1": group["betas"][0], "beta2": group["betas"][1], **same}, group["amsbound"])

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the new ``w, m, v`` and, with amsbound, ``v_max``."""
        v_max = state[2] if len(state) == 3 else None
        return adabound_step(w, g, state[0], state[1], v_max, step + 1, lr=self.lr, **self.others)[: 1 + len(state)]


class AdaBound(RuleOptimizer):
    r"""AdaBound: Adam's rates, clamped between bounds that close in on ``final_lr``.

    .. math::
        w_{t+1} = w_t - m_t \, \mathrm{clamp}\Bigl(
            \frac{\alpha \sqrt{1-\beta_2^t} / (1-\beta_1^t)}{\sqrt{v_t} + \epsilon},\;
            f \bigl(1 - \tfrac{1}{\gamma t + 1}\bigr),\; f \bigl(1 + \tfrac{1}{\gamma t}\bigr)\Bigr),
        \qquad f = \texttt{final\_lr} \cdot \alpha / \alpha_{\mathrm{base}}

    Args:
        params: parameters or named parameters to optimize, or dicts that define parameter groups.
        lr: Adam's learning rate; a number or a tensor of one element. Its first value in each group is
            kept there as ``base_lr``, so that schedules move the bounds along.
        betas: the decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, times the parameter (L2).
        final_lr: the rate that the bounds close in on.
        gamma: how fast they do.
        amsbound: use the largest second moment so far, as AMSGrad.
        maximize: go up instead of down.
        foreach: accepted; there is one implementation.
        capturable: keep ``step`` on the device, so that a CUDA graph can hold the step.
        fused: accepted; True is refused.

    >>> import torch
    >>> from avagrad import AdaBound
    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AdaBound([w], lr=0.01)
    >>> w.square().sum().backward()
    >>> opt.step()
    >>> w
    Parameter containing:
    tensor([ 0.9900, -1.9900], requires_grad=True)

    Reference: "Adaptive Gradient Methods with Dynamic Bound of Learning Rate".
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
        numbers: Group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        bounds: Group = {"base_lr": None, "final_lr": final_lr, "gamma": gamma}  # base_lr: each group's first lr
        forms: Group = {"amsbound": amsbound, "maximize": maximize}
        paths: Group = {"foreach": foreach, "capturable": capturable, "fused": fused}
        super().__init__(params, numbers | bounds | forms | paths)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; its first lr is its ``base_lr`` unless it brings one."""
        super().add_param_group(param_group)
        if param_group["base_lr"] is None:
            lr = param_group["lr"]
            param_group["base_lr"] = lr.item() if isinstance(lr, Tensor) else lr

    def _state_tensors(self, group: Group) -> dict[str, bool]:
        return {"exp_avg": True, "exp_avg_sq": True} | ({"max_exp_avg_sq": True} if group["amsbound"] else {})
