"""The oracle: every method once more, in float64 NumPy, written from the papers for reading.

It shares no code with src/. Each class holds a list of parameters and takes one gradient for each,
or None. Loops run over parameters and nothing is clever.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Param:
    """A parameter, its state, and the hyper-parameters of its group."""

    w: Array
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    requires_grad: bool = True
    t: int = 0  # gradients so far
    m: Array = field(init=False)
    v: Array = field(init=False)
    v_max: Array = field(init=False)
    history: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.v_max = np.zeros_like(self.w)


@dataclass
class DelayedFamily:
    """Algorithms 1 and 2 of "Domain-independent Dominance of Adaptive Methods", their variants, and AvaStep."""

    params: list[Param]
    normalised: bool  # AvaGrad, AvaStep; else Delayed Adam
    decoupled: bool = False  # the W form
    bias_correction: bool = True
    norm: int = 2
    active_only: bool = False
    maximize: bool = False
    norm_of_step: bool = False  # AvaStep: gamma normalises eta r instead of eta; with active_only and bias_correction
    clip_update: float | None = None
    clip_moment: float | None = None

    def size(self, p: Param) -> Array:
        """r: the usual size of each coordinate's gradient, as the next step knows it."""
        if self.bias_correction:
            return np.sqrt(p.v / (1 - p.beta2**p.t)) if p.t else np.zeros_like(p.v)
        return np.sqrt(p.v)

    def eta(self, p: Param) -> Array:
        """Line 6, for the next step; the coordinates that do not count are NaN."""
        v = p.v
        eta = np.full_like(p.w, np.nan)
        if self.bias_correction:
            if p.t == 0:
                return eta
            v = p.v / (1 - p.beta2**p.t)
        elif p.t == 0 and not p.requires_grad:
            return eta
        eta = 1 / (np.sqrt(v) + p.eps)
        return np.where(p.v == 0, np.nan, eta) if self.active_only else eta

    def gamma(self) -> float:
        """The factor of line 7: sqrt(d) / ||eta||, over all parameters."""
        if not self.normalised:
            return 1.0
        every = np.concatenate(
            [(self.eta(p) * (self.size(p) if self.norm_of_step else 1)).ravel() for p in self.params]
        )
        counted = every[~np.isnan(every)]
        d = len(counted)
        if d == 0:
            return 1.0
        if self.norm == 1:
            return float(d / counted.sum())
        return float(np.sqrt(d) / np.sqrt((counted**2).sum()))

    def step(self, grads: list[Array | None]) -> None:
        gamma = self.gamma()
        for p, gradient in zip(self.params, grads, strict=True):
            if gradient is None:
                continue
            g = -gradient if self.maximize else gradient.copy()
            eta, r = np.nan_to_num(self.eta(p), nan=0.0), self.size(p)
            first = p.t == 0
            p.t += 1
            if self.decoupled:
                if not (self.bias_correction and first):
                    p.w = p.w * (1 - p.lr * p.weight_decay)
            else:
                decays = (p.v != 0) | (g != 0) if self.active_only else True
                g = g + np.where(decays, p.weight_decay * p.w, 0)
            if self.norm_of_step:
                most = np.full_like(r, 1e18)
                if self.clip_moment is not None:
                    most[r > 0] = np.minimum(self.clip_moment * r[r > 0], 1e18)
                g = np.clip(g, -most, most)
            p.m = p.beta1 * p.m + (1 - p.beta1) * g
            m = p.m / (1 - p.beta1**p.t) if self.bias_correction else p.m
            if self.clip_update is not None:
                m = np.clip(m, -self.clip_update * r, self.clip_update * r)
            p.w = p.w - p.lr * gamma * eta * m
            p.v = p.beta2 * p.v + (1 - p.beta2) * g**2


@dataclass
class AdaBound:
    """Luo et al. 2019."""

    params: list[Param]
    base_lrs: list[float]
    final_lr: float = 0.1
    gamma: float = 1e-3
    amsbound: bool = False
    maximize: bool = False

    def step(self, grads: list[Array | None]) -> None:
        for p, base_lr, gradient in zip(self.params, self.base_lrs, grads, strict=True):
            if gradient is None:
                continue
            g = -gradient if self.maximize else gradient
            g = g + p.weight_decay * p.w
            p.t += 1
            p.m = p.beta1 * p.m + (1 - p.beta1) * g
            p.v = p.beta2 * p.v + (1 - p.beta2) * g**2
            p.v_max = np.maximum(p.v_max, p.v)
            f = self.final_lr * p.lr / base_lr if base_lr else self.final_lr
            lower = f * (1 - 1 / (self.gamma * p.t + 1))
            upper = f * (1 + 1 / (self.gamma * p.t))
            size = p.lr * np.sqrt(1 - p.beta2**p.t) / (1 - p.beta1**p.t)
            rate = np.clip(size / (np.sqrt(p.v_max if self.amsbound else p.v) + p.eps), lower, upper)
            p.w = p.w - rate * p.m


@dataclass
class AdaShift:
    """Zhou et al. 2019."""

    params: list[Param]
    keep: int = 10
    reduce: str | None = "max"
    maximize: bool = False

    def step(self, grads: list[Array | None]) -> None:
        n = self.keep
        for p, gradient in zip(self.params, grads, strict=True):
            if gradient is None:
                continue
            g = -gradient if self.maximize else gradient
            p.history.append(g + p.weight_decay * p.w)
            p.t += 1
            if p.t <= n:
                continue
            squared = p.history[-1 - n] ** 2
            if self.reduce == "max" and squared.size:
                squared = np.full_like(squared, squared.max())
            p.v = p.beta2 * p.v + (1 - p.beta2) * squared
            weights = p.beta1 ** np.arange(n)
            m: Any = sum(weight * p.history[-1 - age] for age, weight in enumerate(weights)) / weights.sum()
            p.w = p.w - p.lr * m / (np.sqrt(p.v / (1 - p.beta2 ** (p.t - n))) + p.eps)


@dataclass
class ADOPT:
    """Taniguchi et al. 2024, Algorithm 2, with the clipping of their implementation."""

    params: list[Param]
    decoupled: bool = False
    maximize: bool = False

    def step(self, grads: list[Array | None]) -> None:
        for p, gradient in zip(self.params, grads, strict=True):
            if gradient is None:
                continue
            g = -gradient if self.maximize else gradient
            if not self.decoupled:
                g = g + p.weight_decay * p.w
            p.t += 1
            if p.t == 1:
                p.v = g**2
                continue
            if self.decoupled:
                p.w = p.w * (1 - p.lr * p.weight_decay)
            most = (p.t - 1) ** 0.25
            p.m = p.beta1 * p.m + (1 - p.beta1) * np.clip(g / np.maximum(np.sqrt(p.v), p.eps), -most, most)
            p.w = p.w - p.lr * p.m
            p.v = p.beta2 * p.v + (1 - p.beta2) * g**2
