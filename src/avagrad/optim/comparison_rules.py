"""The rules of AdaBound and AdaShift, as pure functions; see :mod:`avagrad.optim.rules`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from avagrad.optim.rules import Scalar, bias_correction_of, indicator, is_on, sqrt, where

__all__ = ["adabound_step", "adashift_step"]


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
    scaled by ``lr / base_lr`` so that a schedule moves them along.

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
    enters ``v`` now and gives its place to ``g_t``. Nothing moves before ``t = n + 1``. With
    ``reduce="max"`` the tensor shares one second moment and ``v`` is 0-dimensional; for a stack of
    models use ``torch.func.vmap``. ``largest`` finds the maximum where the tensor is a part of a larger one.

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
    weights = [_power(beta1, (slot - i) % n) for i in range(n)]  # beta1^age, the newest first
    m = sum((a * x for a, x in zip(weights, kept, strict=True)), torch.zeros_like(g)) / sum(weights)

    squared = oldest * oldest
    if reduce == "max":
        squared = (largest or _largest)(squared)
    started = t > n
    v = where(started, beta2 * v + (1 - beta2) * squared, v)
    v_hat = v / bias_correction_of(beta2, 1 + (t - n - 1) * indicator(started, t))
    return where(started, w - lr * m / (sqrt(v_hat) + eps), w), kept, v


def _largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.sum()


def with_l2(w: Tensor, g: Tensor, weight_decay: Scalar, maximize: bool) -> Tensor:
    """Return the gradient to go down by, weight decay added."""
    g = -g if maximize else g
    return g + weight_decay * w if is_on(weight_decay) else g


def _power(base: Scalar, exponent: Scalar) -> Scalar:
    return torch.pow(base, exponent) if isinstance(exponent, Tensor) else base**exponent
