"""The paper's two theorems as numbers to compare a run with. A run that violates one of them has a bug.

**Theorem 1**: on :class:`Problem` Adam leaves the minimiser and drifts to ``w = 1``. :func:`adam_drift` is its expected
step, :func:`drift_bound` the proof's lower bound on it, :func:`smallest_c` the ``C`` from which on that is positive.

**Theorem 2**: for ``w_{t+1} = w_t - alpha_t eta_t m_t`` with ``alpha_t``, ``eta_t`` independent of the sample ``s_t``::

    E sum_t p(t) |grad f(w_t)|^2  <=  E (D + G2^2 sum_t alpha_t beta1_t max_i eta_t
                                           + M Ginf^2 sum_t alpha_t^2 |eta_t|^2 / 2) / (Z (1 - beta1))

    p(t) = alpha_t min_i eta_t / Z        Z = sum_t alpha_t min_i eta_t        beta1 = max_t beta1_t

The left side is measured with :func:`iterate_weights`, the right side is :func:`recorded_bound`. The theorem's own
choice of ``alpha_t`` is :func:`theorem_alpha`, and its bound for that choice is :func:`theorem_bound`.

Sequences have time first: ``(T,)``, or ``(T, ...)`` with replicas after it, and ``eta`` its ``d`` coordinates last. A
sequence of shape ``(T,)`` applies to every replica, a number also to every step. Everything is computed in float64.
Results have one entry per replica: the theorem is about the mean over them.

The theorem assumes bounded gradients on all of R^d, which no quadratic has. Steps that are clamped to a box also work
if f is convex and separable with its minimiser in the box: clamping then never raises f, and the proof still holds.
"""

# ruff: noqa: N803 (the paper's symbols)

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "Constants",
    "Problem",
    "Rates",
    "adam_drift",
    "bound_from_sums",
    "decaying_beta1",
    "drift_bound",
    "iterate_weights",
    "rate_bounds",
    "recorded_bound",
    "slack",
    "smallest_c",
    "step_bounds",
    "theorem_alpha",
    "theorem_bound",
]

_Scalar = TypeVar("_Scalar", float, Tensor)


# --- problems and constants ----------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The constants of a problem in Theorem 2.

    ``D >= f(w_1) - f(w*)``, ``f`` is ``M``-smooth, no sample's gradient has an entry above ``Ginf`` or a norm above
    ``G2``, and ``d`` is the dimension. A ``G2`` above ``sqrt(d) Ginf`` is rejected: the proof excludes it.

    >>> Constants(D=0.5, M=2.0, Ginf=3.0, G2=6.0, d=4).G2
    6.0
    """

    D: float
    M: float
    Ginf: float
    G2: float
    d: int = 1

    def __post_init__(self) -> None:
        _require("D", self.D, 0 <= self.D < math.inf, "be at least 0 and finite")
        _require("M", self.M, 0 < self.M < math.inf, "be above 0 and finite")
        _require("Ginf", self.Ginf, 0 < self.Ginf < math.inf, "be above 0 and finite")
        _require("d", self.d, self.d >= 1, "be at least 1")
        most = math.sqrt(self.d) * self.Ginf
        _require("G2", self.G2, 0 < self.G2 <= most * (1 + 1e-9), f"be above 0 and at most sqrt(d) Ginf = {most:g}")


@dataclass(frozen=True)
class Problem:
    """Theorem 1's problem: ``f_s(w) = C w^2 / 2`` with probability ``p``, else ``-w``, for ``w`` in [0, 1].

    >>> problem = Problem(C=999, delta=1)
    >>> problem.p, round(problem.minimiser, 4), round(problem.gradient(1.0), 4)
    (0.002, 0.4995, 1.0)
    """

    C: float
    delta: float

    def __post_init__(self) -> None:
        _require("delta", self.delta, 0 < self.delta < math.inf, "be above 0 and finite")  # at 0, w* = 1 is a corner
        _require("C", self.C, self.delta < self.C < math.inf, f"be finite and above delta = {self.delta:g}, for p < 1")

    @property
    def p(self) -> float:
        """The probability of the rare sample, ``(1 + delta) / (C + 1)``."""
        return (1 + self.delta) / (self.C + 1)

    @property
    def minimiser(self) -> float:
        """``w* = (1 - p) / (C p)``, always in [0, 1]."""
        return (self.C - self.delta) / (self.C * (1 + self.delta))

    @property
    def smoothness(self) -> float:
        """``M = f'' = p C``."""
        return self.p * self.C

    @property
    def gradient_bound(self) -> float:
        """``G``: no sample's gradient is larger on [0, 1]. In one dimension Ginf and G2 are the same."""
        return max(self.C, 1.0)

    @property
    def largest_gradient(self) -> float:
        """The largest ``|f'|`` on [0, 1]; a bound on ``|f'|^2`` that is not below its square is vacuous."""
        return max(1 - self.p, self.delta)

    def value(self, w: _Scalar) -> _Scalar:
        """Return ``f(w)``."""
        return self.p * self.C * w * w / 2 - (1 - self.p) * w

    def gradient(self, w: _Scalar) -> _Scalar:
        """Return ``f'(w)``."""
        return self.p * self.C * w - (1 - self.p)

    def sample_gradient(self, w: Tensor, rare: Tensor) -> Tensor:
        """Return ``f_s'(w)``: ``C w`` for the rare sample, else -1."""
        return torch.where(rare, self.C * w, -1.0)

    def distance(self, w: _Scalar) -> _Scalar:
        """Return ``f(w) - f(w*)``: Theorem 2's ``D`` for a start at ``w``."""
        gap = w - self.minimiser  # not the difference of two values: it would cancel near w*
        return self.smoothness * gap * gap / 2

    def constants(self, w1: float) -> Constants:
        """Return the constants of Theorem 2 for a start at ``w1``."""
        _require("w1", w1, 0 <= w1 <= 1, "lie in [0, 1]")
        return Constants(self.distance(float(w1)), self.smoothness, self.gradient_bound, self.gradient_bound)


# --- Theorem 1: Adam does not converge -----------------------------------------------------------


def adam_drift(problem: Problem, w: float | Tensor, v: float | Tensor, *, beta2: float, eps: float) -> Tensor:
    """Return ``E[w_{t+1} - w_t] / alpha`` of Adam, exactly: over the sample, at ``w = w_t`` and ``v = v_{t-1}``.

    As in the proof, ``beta1 = 0``, without bias correction and clamping.

    >>> adam_drift(Problem(C=3, delta=1), 1.0, 0.0, beta2=0.0, eps=1.0)  # 1/2 of -3/4 and 1/2 of 1/2
    tensor(-0.1250, dtype=torch.float64)
    """
    _check_adam(beta2, eps)
    w, v = torch.as_tensor(w, dtype=torch.float64), torch.as_tensor(v, dtype=torch.float64)
    rare, common = problem.C * w, torch.full_like(w, -1.0)
    up = [-g / ((beta2 * v + (1 - beta2) * g * g).sqrt() + eps) for g in (rare, common)]
    at_rest = torch.where(rare == 0, 0.0, up[0])  # 0/0 at w = v = eps = 0
    return problem.p * at_rest + (1 - problem.p) * up[1]


def drift_bound(problem: Problem, *, beta2: float, eps: float) -> float:
    """Return the proof's lower bound on the mean of :func:`adam_drift` over the states that Adam visits.

    The appendix bounds ``E[v]`` by ``(1 + delta) C^2`` in one line and by ``(1 + delta) C`` in the next. The second is
    right, and it matters: the first would not prove divergence at the paper's own setting.

    >>> round(drift_bound(Problem(C=999, delta=1), beta2=0.99, eps=1e-8), 4)
    0.0024
    """
    _check_adam(beta2, eps)
    down = 1 / math.sqrt(1 - beta2)
    up = 1 / (math.sqrt(beta2 * (1 + problem.delta) * problem.C + 1 - beta2) + eps)
    return (1 - problem.p) * up - problem.p * down


def smallest_c(delta: float, *, beta2: float, eps: float) -> float:
    """Return the ``C`` above which :func:`drift_bound` is positive (it is 0 there, and negative below).

    The proof starts from ``(1-p)/p > 1 + eps / (w_1 sqrt(1 - beta2))``, which is not enough: at the paper's setting
    that is ``C > 3``.

    >>> round(smallest_c(1, beta2=0.99, eps=1e-8), 1)  # the paper's 999 is not far above
    794.0
    """
    _check_adam(beta2, eps)
    _require("delta", delta, 0 < delta < math.inf, "be above 0 and finite")
    # C - delta = k (u + eps) with u = sqrt(a C + 1 - beta2): inserted in u^2, a quadratic with one positive root.
    k, a = (1 + delta) / math.sqrt(1 - beta2), beta2 * (1 + delta)
    u = (a * k + math.sqrt((a * k) ** 2 + 4 * (1 - beta2 + a * delta + a * k * eps))) / 2
    return delta + k * (u + eps)


# --- Theorem 2: delayed methods converge ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rates:
    """The statistics of the rates ``eta_t`` in the theorem: ``min_i``, ``max_i`` and ``|eta_t|^2``, each ``(T, ...)``.

    >>> rates = Rates.of(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))  # T = 2, d = 2
    >>> rates.low.tolist(), rates.high.tolist(), rates.square.tolist()
    ([1.0, 2.0], [3.0, 2.0], [10.0, 8.0])
    """

    low: Tensor
    high: Tensor
    square: Tensor

    def __post_init__(self) -> None:
        for name in ("low", "high", "square"):
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name), dtype=torch.float64))
        _require("low", self.low, self.low >= 0, "be at least 0")
        _require("high", self.high, (self.high >= self.low) & self.high.isfinite(), "be finite and at least low")
        rounding = 1 - 1e-5  # the three may have been recorded in float32
        _require("square", self.square, self.square >= rounding * self.high**2, "be at least high squared")

    @classmethod
    def of(cls, eta: Tensor) -> "Rates":
        """Reduce rates of shape ``(T, ..., d)``."""
        _require("the number of dimensions of eta", eta.dim(), eta.dim() >= 2, "be at least 2: (T, ..., d)")
        eta = eta.double()
        return cls(eta.amin(-1), eta.amax(-1), eta.square().sum(-1))

    @classmethod
    def between(cls, L: float, H: float, d: int) -> "Rates":
        """Return the worst case of ``d`` rates in [L, H], at every step."""
        _require("L", L, 0 < L <= H < math.inf, f"be above 0 and at most H = {H}, which must be finite")
        return cls(*(torch.tensor(x, dtype=torch.float64) for x in (L, H, d * H * H)))


def iterate_weights(alpha: float | Tensor, rates: Rates) -> Tensor:
    """Return ``p(t)``, the weights of the steps in the theorem's mean. They sum to 1 over time.

    ``alpha`` is the whole global learning rate: ``lr * gamma_t`` for AvaGrad.

    >>> squared_gradients = torch.tensor([4.0, 2.0])
    >>> p = iterate_weights(0.1, Rates.of(torch.tensor([[1.0, 9.0], [3.0, 3.0]])))
    >>> (p * squared_gradients).sum()  # the theorem's left side
    tensor(2.5000, dtype=torch.float64)
    """
    alpha, low, _, _ = _aligned(rates, alpha=alpha)
    return alpha * low / _total(alpha * low)


def recorded_bound(alpha: float | Tensor, rates: Rates, constants: Constants, beta1: float | Tensor = 0.0) -> Tensor:
    """Return Theorem 2's right side for a recorded run, with any ``alpha_t`` and ``beta1_t``.

    >>> rates = Rates.of(torch.full((100, 1), 2.0))
    >>> recorded_bound(0.05, rates, Constants(D=1.0, M=1.0, Ginf=1.0, G2=1.0))  # (1 + 0.5) / 10
    tensor(0.1500, dtype=torch.float64)
    """
    alpha, beta1, low, high, square = _aligned(rates, alpha=alpha, beta1=beta1)
    _require("beta1", beta1, (beta1 >= 0) & (beta1 < 1), "lie in [0, 1)")
    squared, momentum = (alpha.square() * square).sum(0), (alpha * beta1 * high).sum(0)
    return bound_from_sums(_total(alpha * low), squared, constants, momentum, beta1.amax(0))


def bound_from_sums(
    moved: Tensor, squared: Tensor, constants: Constants, momentum: float | Tensor = 0.0, beta1: float | Tensor = 0.0
) -> Tensor:
    """Return Theorem 2's right side from its sums over time, for runs that are too long to record every step.

    ``moved`` is ``Z``, the sum of ``alpha_t min_i eta_t``; ``squared`` that of ``alpha_t^2 |eta_t|^2``; and
    ``momentum`` that of ``alpha_t beta1_t max_i eta_t``, where ``beta1`` is the largest ``beta1_t``. The bound is
    infinite as long as nothing has moved.

    >>> constants = Constants(D=1.0, M=1.0, Ginf=1.0, G2=1.0)
    >>> bound_from_sums(torch.tensor(10.0), torch.tensor(1.0), constants)  # (1 + 0.5) / 10
    tensor(0.1500)
    """
    k = constants
    top = k.D + k.G2**2 * momentum + k.M * k.Ginf**2 * squared / 2
    return torch.where(moved == 0, math.inf, top / (moved * (1 - beta1)))


def theorem_alpha(gamma: _Scalar, steps: int, constants: Constants) -> _Scalar:
    """Return the theorem's choice ``alpha_t = gamma_t sqrt(2 D / (T M Ginf^2))`` for a run of ``steps`` = T.

    >>> theorem_alpha(0.5, 100, Constants(D=2.0, M=1.0, Ginf=1.0, G2=1.0))
    0.1
    """
    _require("steps", steps, steps >= 1, "be at least 1")
    _require("D", constants.D, constants.D > 0, "be above 0 for the theorem's learning rate, else nothing moves")
    return gamma * math.sqrt(2 * constants.D / (steps * constants.M * constants.Ginf**2))


def decaying_beta1(beta1: float, steps: int) -> Tensor:
    """Return ``beta1_t = beta1 / sqrt(t)``, the momentum for which the theorem's rate still holds.

    >>> decaying_beta1(0.5, 4)
    tensor([0.5000, 0.3536, 0.2887, 0.2500], dtype=torch.float64)
    """
    return beta1 / torch.arange(1, steps + 1, dtype=torch.float64).sqrt()


def theorem_bound(gamma: float | Tensor, rates: Rates, constants: Constants, beta1: float = 0.0) -> Tensor:
    """Return the paper's bound for :func:`theorem_alpha`: its rate, or the appendix's with :func:`decaying_beta1`.

    Without momentum this equals :func:`recorded_bound`; with momentum it is a little larger. With
    :meth:`Rates.between` it is the appendix's unconditional bound, for steps weighted by ``gamma_t / sum gamma_t``. It
    needs no run, but a ``gamma`` fixed beforehand: it is for Delayed Adam, not for AvaGrad.

    >>> theorem_bound(0.5, Rates.of(torch.full((100, 1), 2.0)), Constants(D=2.0, M=1.0, Ginf=1.0, G2=1.0))
    tensor(0.2000, dtype=torch.float64)
    """
    _require("beta1", beta1, 0 <= beta1 < 1, "lie in [0, 1)")
    gamma, low, high, square = _aligned(rates, gamma=gamma)
    k, T = constants, len(low)
    total = (1 + gamma.square() * square).sum(0)
    if beta1 > 0:
        _require("D", k.D, k.D > 0, "be above 0 with momentum")
        total = total + 2 * T * beta1 * math.sqrt(2 * k.d * k.G2**2 / (k.M * k.D)) * (gamma * high).amax(0)
    return math.sqrt(k.M * k.D * k.Ginf**2 / (2 * T)) * total / (_total(gamma * low) * (1 - beta1))


def rate_bounds(G2: float, eps: float) -> tuple[float, float]:
    """Return ``L`` and ``H``, the bounds on Delayed Adam's rates: ``1 / (G2 + eps)`` and ``1 / eps``.

    >>> rate_bounds(9.0, 1.0)
    (0.1, 1.0)
    """
    _require("G2", G2, 0 < G2 < math.inf, "be above 0 and finite")
    _require("eps", eps, 0 < eps < math.inf, "be above 0 and finite")
    return 1 / (G2 + eps), 1 / eps  # in one place of section 5 the paper has G2 + eps for the first


def step_bounds(lr: float, d: int, *, clip_update: float = 1.0, norm: int = 2) -> tuple[float, float]:
    """Return bounds on a step of AvaStep, for any gradient: on its root mean square, and on its largest coordinate.

    They are for ``d`` coordinates that count, without weight decay. A coordinate moves by at most
    ``lr gamma c eta_i r_i``; with norm 2 the root mean square of ``gamma eta r`` is 1, with norm 1 its mean is 1. With
    ``clip_update=None`` a step has no bound, but Theorem 2 holds; with the clamp it does not.

    >>> step_bounds(0.001, 10_000)
    (0.001, 0.1)
    """
    _require("lr", lr, 0 <= lr < math.inf, "be at least 0 and finite")
    _require("d", d, d >= 1, "be at least 1")
    _require("clip_update", clip_update, 0 < clip_update < math.inf, "be above 0 and finite")
    _require("norm", norm, norm in (1, 2), "be 1 or 2")
    root = math.sqrt(d)
    return (clip_update * lr, clip_update * lr * root) if norm == 2 else (clip_update * lr * root, clip_update * lr * d)


def slack(bound: float | Tensor, measured: float | Tensor) -> float:
    """Return bound / measured, using means over replicas if they are tensors.

    At 1 the bound is tight; at 100 it is loose. If it is below 1 by more than chance over replicas explains, the
    theorem does not apply to the run: its rates depend on the current sample, a constant is wrong, or there is a bug.

    >>> slack(torch.tensor([0.2, 0.4]), torch.tensor([0.1, 0.2]))
    2.0
    """
    above = torch.as_tensor(bound, dtype=torch.float64).mean().item()
    below = torch.as_tensor(measured, dtype=torch.float64).mean().item()
    _require("bound", above, 0 <= above < math.inf, "be at least 0 and finite, on the mean")
    _require("measured", below, 0 < below < math.inf, "be above 0 and finite, on the mean")
    return above / below


# --- checks and shapes ---------------------------------------------------------------------------


def _require(name: str, value: float | Tensor, allowed: bool | Tensor, what: str) -> None:
    if not (allowed.all() if isinstance(allowed, Tensor) else allowed):
        if isinstance(value, Tensor) and isinstance(allowed, Tensor):
            name, value = f"{name} (the first that is rejected)", value.expand_as(allowed)[~allowed][0].item()
        raise ValueError(f"theory: {name} is {value}, but must {what}.")


def _check_adam(beta2: float, eps: float) -> None:
    _require("beta2", beta2, 0 <= beta2 < 1, "lie in [0, 1)")
    _require("eps", eps, 0 <= eps < math.inf, "be at least 0 and finite")


def _aligned(rates: Rates, **sequences: float | Tensor) -> Sequence[Tensor]:
    """Broadcast sequences and rates to ``(T, ...)``: replicas come after time, so dimensions are added at the end."""
    found = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in (sequences | vars(rates)).items()}
    lengths = {name: len(x) for name, x in found.items() if x.dim()}
    if len(set(lengths.values())) != 1:
        found_lengths = ", ".join(f"{name} has {n}" for name, n in lengths.items()) or "all are single numbers"
        raise ValueError(f"theory: sequences must have the same number of steps T, but {found_lengths}.")
    for name in found.keys() & {"alpha", "gamma"}:
        _require(name, found[name], (found[name] >= 0) & found[name].isfinite(), "be at least 0 and finite")
    most = max(x.dim() for x in found.values())
    padded = [x.reshape(x.shape + (1,) * (most - x.dim())) for x in found.values()]
    return torch.broadcast_tensors(*padded)  # type: ignore[no-untyped-call, no-any-return]


def _total(weights: Tensor) -> Tensor:
    total = weights.sum(0)
    _require("Z, the sum of alpha_t min_i eta_t,", total, total > 0, "be above 0: a step must have moved something")
    return total
