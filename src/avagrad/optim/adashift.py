"""AdaShift (Zhou, Zhang, Lu, Wang, Zhang, Yu, 2019): second moments from gradients n steps ago."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import ALLOWED, Allowed, explain_unknown_keywords
from avagrad.optim.baselines import FunctionRule, with_l2
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.params import Group
from avagrad.optim.rules import Scalar, bias_correction_of, indicator, sqrt, where
from avagrad.optim.sharding import global_max, is_dtensor

__all__ = ["AdaShift", "adashift_step"]


def adashift_step(
    w: Tensor,
    g: Tensor,
    kept: Sequence[Tensor],
    v: Tensor,
    t: Scalar,
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    eps: Scalar,
    reduce: str | None = "max",
    largest: Callable[[Tensor], Tensor] | None = None,
    weight_decay: Scalar = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Take one step of AdaShift. Returns ``w, kept, v``.

    ``kept`` is a ring of the last n gradients: slot ``(t - 1) mod n`` holds ``g_{t-n}``, which
    enters ``v`` now and is replaced by ``g_t``. Nothing moves before ``t = n + 1``. With
    ``reduce="max"`` the tensor shares one second moment and ``v`` is 0-dimensional; for a stack of
    models use ``torch.func.vmap``. ``largest`` finds the maximum if the tensor is a part of a larger one.

    >>> w, g, older = torch.ones(2), torch.ones(2), torch.tensor([2.0, 4.0])
    >>> adashift_step(w, g, [older], torch.zeros(()), 2, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)[0]
    tensor([0.9750, 0.9750])
    """
    n = len(kept)
    g = with_l2(w, g, weight_decay, maximize)
    slot = (t - 1) % n
    oldest = kept[0]
    for i in range(1, n):
        oldest = where(slot == i, kept[i], oldest)
    kept = [where(slot == i, g, kept[i]) for i in range(n)]
    weights = [beta1 ** ((slot - i) % n) for i in range(n)]  # beta1^age, the newest first
    m = sum((a * x for a, x in zip(weights, kept, strict=True)), torch.zeros_like(g)) / sum(weights)

    squared = oldest * oldest
    if reduce == "max":
        squared = largest(squared) if largest is not None else squared.amax() if squared.numel() else squared.sum()
    started = t > n
    v = where(started, beta2 * v + (1 - beta2) * squared, v)
    v_hat = v / bias_correction_of(beta2, 1 + (t - n - 1) * indicator(started, t))
    return where(started, w - lr * m / (sqrt(v_hat) + eps), w), kept, v


@dataclass(frozen=True)
class _AdaShiftRule(FunctionRule):
    keys = ("eps", "reduce", "weight_decay", "maximize")
    flag_keys = ("keep", "reduce")

    def apply(
        self, p: Tensor, w: Tensor, g: Tensor, state: Sequence[Tensor], step: Scalar, gamma: Scalar
    ) -> tuple[Tensor, ...]:
        """Return the new ``w, v`` and the kept gradients."""
        largest = partial(global_max, p) if is_dtensor(p) else None
        w, kept, v = adashift_step(w, g, state[1:], state[0], step + 1, lr=self.lr, largest=largest, **self.others)
        return w, v, *kept


class AdaShift(RuleOptimizer):
    """AdaShift: the second moment is computed from gradients that are ``keep`` steps old.

        m_t     = sum_{i<n} beta1^i g_{t-i} / sum_{i<n} beta1^i
        v_t     = beta2 v_{t-1} + (1 - beta2) phi(g_{t-n}^2)
        w_{t+1} = w_t - lr m_t / (sqrt(v_t / (1 - beta2^(t-n))) + eps)

    with n = ``keep``; the first move is made at t = n + 1. The state holds n gradients, so it is large.

    The other arguments are those of :class:`torch.optim.Adam`; there is one implementation.

    Args:
        betas: the weights of the kept gradients, and the decay of the second moment.
        keep: how many gradients are kept.
        reduce: phi; "max" for the maximum over the tensor, None for element-wise second moments.

    Reference: "AdaShift: Decorrelation and Convergence of Adaptive Learning Rate Methods".

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AdaShift([w], lr=0.01, keep=1)
    >>> for _ in range(2):
    ...     w.grad = 2 * w.detach()
    ...     opt.step()
    >>> w.detach()
    tensor([ 0.9950, -1.9900])
    """

    _own_keys = ("keep", "reduce")
    _rule_class = _AdaShiftRule
    _allowed: ClassVar[Allowed] = {
        **ALLOWED,
        "keep": ("a whole number of at least 1", lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 1),
        "reduce": ("'max' or None", lambda x: x is None or x == "max"),
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
        keep: int = 10,
        reduce: str | None = "max",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults: Group = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "keep": keep, "reduce": reduce, "foreach": foreach, "capturable": capturable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_params(self, group: Group) -> None:
        super()._check_params(group)
        if group["reduce"] == "max" and any(getattr(p, "_fsdp_flattened", False) for p in group["params"]):
            raise ValueError(
                "AdaShift: a parameter is a part of a FlatParameter of FullyShardedDataParallel, but reduce is 'max', "
                "which runs over whole tensors: use fully_shard, or reduce=None."
            )

    def _state_tensors(self, group: Group) -> dict[str, bool]:
        kept = {f"grad_{i}": True for i in range(group["keep"])}
        return {"exp_avg_sq": group["reduce"] is None} | kept
