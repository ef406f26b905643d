"""Adam with its step divided by the step's own root mean square: a baseline for AvaStep.

The size of a step is lr at every eps here, too; but the norm is known only after all gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from avagrad.lab.torch_rules import adam_direction
from avagrad.optim.baselines import FunctionRule, with_l2
from avagrad.optim.rules import Scalar


@dataclass(frozen=True)
class RmsAdamRule(FunctionRule):
    """Adam's direction, without the scale that comes from all parameters (:func:`rms_scale`)."""

    keys = ("eps", "weight_decay", "maximize")
    state_keys = ()

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the direction, and the new ``m, v``."""
        others = dict(self.others)
        g = with_l2(w, g, others.pop("weight_decay"), others.pop("maximize"))
        m, v = state
        return adam_direction(g, m, v, None, step + 1, **others)[:3]


def rms_scale(directions: Sequence[Tensor]) -> Tensor:
    """Return the inverse of the root mean square over all directions."""
    total = torch.stack([u.double().square().sum() for u in directions]).sum()
    return torch.where(total > 0, (sum(u.numel() for u in directions) / total).sqrt(), 1.0)


class RmsAdam(Optimizer):
    """Adam with each step divided by its root mean square over all parameters that have a gradient; L2 decay.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = RmsAdam([w], lr=0.1, eps=10.0)
    >>> w.grad = torch.tensor([1.0, 7.0])
    >>> opt.step()
    >>> ((w.detach() - torch.tensor([1.0, -2.0])).square().mean().sqrt() * 10).round()
    tensor(1.)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"maximize": maximize, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            (group, p, self._direction(group, p))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if moving:
            scale = rms_scale([u for _, _, u in moving])
            for group, p, u in moving:
                p.sub_(group["lr"] * (scale * u).to(p.dtype))
        return loss

    def _direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            device = p.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        step = state["step"].double() if group["capturable"] else state["step"].item()
        assert p.grad is not None
        moments = state["exp_avg"], state["exp_avg_sq"]
        u, *new = RmsAdamRule.of(group).apply(p, p, p.grad, moments, step, 1.0)
        state["step"] += 1
        torch._foreach_copy_(moments, new)
        return u.to(p.dtype)
