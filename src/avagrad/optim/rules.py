"""The update rules, as pure functions in the paper's symbols. Start reading here.

AvaGrad ("Domain-independent Dominance of Adaptive Methods", Algorithm 2), line by line::

    line 5   m_t   = beta1 m_{t-1} + (1 - beta1) g_t
    line 6   eta_t = 1 / (sqrt(v_{t-1}) + epsilon)                       rates()
    line 7   w_t+1 = w_t - alpha (eta_t / ||eta_t / sqrt(d)||_2) m_t     scale() is 1 / ||eta_t / sqrt(d)||
    line 8   v_t   = beta2 v_{t-1} + (1 - beta2) g_t^2

Lines 5, 7 and 8 are :func:`delayed_step`. Delayed Adam (Algorithm 1) is the same with ``gamma = 1``.
All three together, for a model that is one vector:

>>> w, m, v = torch.tensor([1.0, -2.0]), torch.zeros(2), torch.zeros(2)
>>> for t in (1, 2, 3):
...     g = 2 * w  # the gradient of |w|^2
...     eta = rates(v, t - 1, beta2=0.999, eps=0.1)
...     gamma = scale((eta**2).sum(), d=2)
...     w, m, v = delayed_step(w, g, m, v, t, eta, gamma, lr=0.1, beta1=0.9, beta2=0.999)
>>> w
tensor([ 0.5199, -1.4965])

Every function takes tensors and hyper-parameters and returns new tensors; nothing is changed in
place and nothing is remembered. A hyper-parameter is a number or a tensor that broadcasts against
the parameter, so the same lines serve one model, ``torch.func.vmap``, ``torch.compile``, and a
stack of models that each have their own ``lr`` and ``eps``. ``t`` counts a parameter's gradients
from 1; it, too, is a number or a tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Scalar",
    "adabound_step",
    "adam_step",
    "adashift_step",
    "bias_correction_of",
    "delayed_step",
    "rates",
    "scale",
    "sgd_step",
]

Scalar: TypeAlias = float | Tensor


# --- the delayed family: Delayed Adam, AvaGrad, AvaGradW -----------------------------------------


def rates(
    v: Tensor,
    past: Scalar,
    *,
    beta2: Scalar,
    eps: Scalar,
    bias_correction: bool = True,
    active_only: bool = False,
) -> Tensor:
    """Return ``eta_t``, the per-coordinate rates, from the past alone (line 6): this is the delay.

    ``v`` is ``v_{t-1}`` and ``past`` is ``t - 1``, the number of gradients that ``v`` has seen.
    With bias correction and no gradient seen there is no estimate yet: the rates are 0.

    >>> rates(torch.tensor([0.0, 9.0]), 1, beta2=0.0, eps=1.0)
    tensor([1.0000, 0.2500])
    >>> rates(torch.tensor([0.0, 9.0]), 1, beta2=0.0, eps=1.0, active_only=True)
    tensor([0.0000, 0.2500])
    """
    if bias_correction:
        known = past > 0
        at_least_one = past + (1 - _indicator(known, past))  # at past = 0 the quotient is 0/0, and not used
        v_hat = v / bias_correction_of(beta2, at_least_one)
        eta = 1 / (_sqrt(v_hat) + eps)
        if known is not True:
            eta = _where(known, eta, torch.zeros_like(v))
    else:
        eta = 1 / (_sqrt(v) + eps)
    if active_only:  # v exactly zero: this coordinate has never seen a gradient
        eta = torch.where(v == 0, 0.0, eta)
    return eta


def scale(total: Tensor, d: Scalar, *, norm: int = 2) -> Tensor:
    """Return ``gamma_t = d^(1/p) / ||eta_t||_p`` from ``total``, the sum of ``eta_t^p`` over ``d`` rates.

    The paper has ``p = norm = 2``. Where no rate counts, gamma is 1.

    >>> scale(torch.tensor(8.0), 2)
    tensor(0.5000)
    >>> scale(torch.tensor(0.0), 0)
    tensor(1.)
    """
    counts = total != 0  # a NaN stays one, to be seen
    gamma = d / torch.where(counts, total, 1.0)
    return torch.where(counts, _sqrt(gamma) if norm == 2 else gamma, 1.0)


def delayed_step(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: Scalar,
    eta: Tensor,
    gamma: Scalar,
    *,
    lr: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    weight_decay: Scalar = 0.0,
    decoupled: bool = False,
    bias_correction: bool = True,
    active_only: bool = False,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of Delayed Adam (``gamma = 1``), AvaGrad, or AvaGradW (``decoupled``).

    Returns ``w_{t+1}, m_t, v_t``. ``eta`` and ``gamma`` are :func:`rates` and :func:`scale` of
    ``v_{t-1}``: they were known before this gradient.

    >>> one = torch.ones(1)
    >>> delayed_step(one, one, one, one, 2, one / 2, 2.0, lr=0.1, beta1=0.5, beta2=0.5, bias_correction=False)[0]
    tensor([0.9000])
    """
    moves = t > 1 if bias_correction else True  # a first gradient only fills the moments
    if maximize:
        g = -g
    if _is_on(weight_decay):
        if decoupled:
            w = _where(moves, w * (1 - lr * weight_decay), w)
        elif active_only:  # decay alone does not make a coordinate active
            g = g + torch.where((v == 0) & (g == 0), 0.0, weight_decay * w)
        else:
            g = g + weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    m_hat = m / bias_correction_of(beta1, t) if bias_correction else m
    w = _where(moves, w - lr * gamma * eta * m_hat, w)
    v = beta2 * v + (1 - beta2) * g * g
    return w, m, v


# --- the methods that the paper compares with ----------------------------------------------------


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
    """Take one step of SGD with (Nesterov) momentum, as torch.optim.SGD. Returns ``w, buffer``.

    >>> one = torch.ones(1)
    >>> sgd_step(one, one, one, 2, lr=0.1, momentum=0.9)
    (tensor([0.8100]), tensor([1.9000]))
    """
    g = _l2(w, g, weight_decay, maximize)
    buffer = _where(t > 1, momentum * buffer, torch.zeros_like(buffer)) + g
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

    Returns ``w, m, v, v_max``, the last being ``v`` where none was given.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> adam_step(one, 4 * one, zero, zero, None, 1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)[0]
    tensor([0.9000])
    """
    if decoupled:
        g = -g if maximize else g
        w = w * (1 - lr * weight_decay)
    else:
        g = _l2(w, g, weight_decay, maximize)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    v_max = v if v_max is None else torch.maximum(v_max, v)
    v_hat = v_max / bias_correction_of(beta2, t)
    w = w - lr * (m / bias_correction_of(beta1, t)) / (_sqrt(v_hat) + eps)
    return w, m, v, v_max


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
    """Take one step of AdaBound, or AMSBound (``v_max`` given). Returns ``w, m, v, v_max``, as adam_step.

    Adam's rate is clamped between two bounds that close in on ``final_lr`` as ``t`` grows, both
    scaled by ``lr / base_lr`` so that a schedule moves them along.

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> hyper = {"lr": 0.1, "base_lr": 0.1, "beta1": 0.0, "beta2": 0.0, "eps": 1e-8, "final_lr": 0.1, "gamma": 1.0}
    >>> adabound_step(one, one / 9, zero, zero, None, 1, **hyper)[0]  # Adam's rate, 0.9, is clamped to 0.2
    tensor([0.9778])
    """
    g = _l2(w, g, weight_decay, maximize)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    v_max = v if v_max is None else torch.maximum(v_max, v)
    based = _indicator(base_lr != 0, base_lr)  # at base_lr 0 the bounds do not follow lr
    final = final_lr * (based * lr + 1 - based) / (base_lr + 1 - based)
    size = lr * bias_correction_of(beta2, t) ** 0.5 / bias_correction_of(beta1, t)
    rate = size / (_sqrt(v_max) + eps)
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
    g = _l2(w, g, weight_decay, maximize)
    slot = (t - 1) % n
    oldest = kept[0]
    for i in range(1, n):
        oldest = _where(slot == i, kept[i], oldest)
    kept = [_where(slot == i, g, kept[i]) for i in range(n)]
    weights = [_power(beta1, (slot - i) % n) for i in range(n)]  # beta1^age, the newest first
    m = sum((a * x for a, x in zip(weights, kept, strict=True)), torch.zeros_like(g)) / sum(weights)

    squared = oldest * oldest
    if reduce == "max":
        squared = (largest or _largest)(squared)
    started = t > n
    v = _where(started, beta2 * v + (1 - beta2) * squared, v)
    v_hat = v / bias_correction_of(beta2, 1 + (t - n - 1) * _indicator(started, t))
    return _where(started, w - lr * m / (_sqrt(v_hat) + eps), w), kept, v


def _largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.sum()


# --- arithmetic that numbers and tensors share ---------------------------------------------------


def bias_correction_of(beta: Scalar, t: Scalar) -> Scalar:
    """Return ``1 - beta^t`` for ``t >= 1``, to the last digit also in float32.

    >>> bias_correction_of(0.5, 2)
    0.75
    >>> bias_correction_of(0.0, torch.tensor(3.0))
    tensor(1.)
    """
    if isinstance(beta, Tensor):
        return -torch.expm1(t * torch.log(beta))
    if isinstance(t, Tensor):
        # beta - 1 survives float32, beta does not; and torch.compile keeps it symbolic where beta changes.
        return -torch.expm1(t * torch.log1p(torch.full_like(t, beta - 1)))
    return -math.expm1(t * math.log(beta)) if beta > 0 else 1.0


def _l2(w: Tensor, g: Tensor, weight_decay: Scalar, maximize: bool) -> Tensor:
    g = -g if maximize else g
    return g + weight_decay * w if _is_on(weight_decay) else g


def _is_on(x: Scalar) -> bool:
    return isinstance(x, Tensor) or x != 0


def _power(base: Scalar, exponent: Scalar) -> Scalar:
    return torch.pow(base, exponent) if isinstance(exponent, Tensor) else base**exponent


def _where(condition: bool | Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Choose between tensors; a condition that is a plain bool costs nothing."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _indicator(condition: bool | Tensor, t: Scalar) -> Scalar:
    """Return 1 where the condition holds and 0 elsewhere, in the precision of ``t``."""
    if isinstance(condition, Tensor):
        return condition.to(t.dtype) if isinstance(t, Tensor) else condition.float()
    return 1.0 if condition else 0.0


def _sqrt(x: Tensor) -> Tensor:
    """Take the root; at 0 its derivative is infinite, and autograd is given 0 instead."""
    if not x.requires_grad:
        return x.sqrt()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), x)
