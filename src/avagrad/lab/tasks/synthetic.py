"""The problem of Theorem 1 and Figure 1, on which Adam converges to the wrong end and Delayed Adam does not.

One weight in [0, 1], two samples: ``f_s(w) = C w^2 / 2`` with a small probability, else ``-w``. Many replicas run in
parallel as one vector, each a separate model with its own norm (d = 1). All methods get the same samples.

>>> curves = run(Settings(steps=100, replicas=3, lr=0.01, compile=False), ("adam", "delayed-adam"))
>>> curves["adam"].mean_w.shape  # (steps that were recorded, replicas)
torch.Size([100, 3])
>>> curves["adam"].mean_w[0]  # the first mean is w_1
tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)

The updates are those of :mod:`avagrad.optim.rules`, a few steps at a time under ``torch.compile``: a step is so small
that the call itself costs far more. ``beta1`` is 0, as in the theorem.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from avagrad.lab.checks import is_number, is_whole, require
from avagrad.lab.torch_rules import adam_step, sgd_step
from avagrad.names import look_up
from avagrad.optim.rules import LARGEST, Clips, Scalar, delayed_step, gradient_sizes, rates, scale
from avagrad.theory import Problem, bound_from_sums

__all__ = ["METHODS", "Curve", "Settings", "run", "samples"]

_MOMENTS = ("w", "v")
_MEANS = ("sum_w", "sum_squared_gradient")
_BOUND = ("sum_rate", "sum_squared_rate", "sum_rate_squared_gradient")

# name: the state of a replica. Adam's rates and AvaStep's clamp depend on the current sample: Theorem 2 does not apply
# to them. "avastep-free" is AvaStep without its clamp.
METHODS: dict[str, tuple[str, ...]] = {
    "adam": (*_MOMENTS, *_MEANS),
    "amsgrad": (*_MOMENTS, "v_max", *_MEANS),
    "delayed-adam": (*_MOMENTS, *_MEANS, *_BOUND),
    "avagrad": (*_MOMENTS, *_MEANS, *_BOUND),
    "sgd": ("w", *_MEANS, *_BOUND),
    "avastep": (*_MOMENTS, *_MEANS),
    "avastep-free": (*_MOMENTS, *_MEANS, *_BOUND),
}

_DRAWN = 4096  # samples are drawn for so many steps at a time

Progress = Callable[[str, int, int], None]
_Advance = Callable[[Tensor, Tensor, Tensor, "_Hyper"], None]


# --- settings and results ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; the defaults are the paper's, with 100 replicas.

    ``points`` is the approximate number of recorded steps, evenly spaced (including the first and the last). ``block``,
    the number of steps per call, and ``points`` do not change a result.

    >>> Settings().problem
    Problem(C=999.0, delta=1.0)
    >>> Settings(w1=2.0)
    Traceback (most recent call last):
    ...
    ValueError: synthetic: w1 is 2.0, but must be a number from 0 to 1.
    """

    C: float = 999.0
    delta: float = 1.0
    lr: float = 1e-5
    beta2: float = 0.99
    eps: float = 1e-8
    w1: float = 0.5
    steps: int = 1_000_000
    replicas: int = 100
    seed: int = 0
    points: int = 200
    bias_correction: bool = True  # of Delayed Adam and AvaGrad; Adam and AMSGrad always have it
    block: int = 4
    compile: bool = True

    def __post_init__(self) -> None:
        for name in ("C", "delta"):
            self._require(name, is_number(getattr(self, name)), "a finite number")
        _ = self.problem  # has its own checks
        self._require("lr", is_number(self.lr) and self.lr >= 0, "a finite number of at least 0")
        self._require("beta2", is_number(self.beta2) and 0 <= self.beta2 < 1, "a number from 0 up to, not including, 1")
        self._require("eps", is_number(self.eps) and self.eps > 0, "a finite number above 0")
        self._require("w1", is_number(self.w1) and 0 <= self.w1 <= 1, "a number from 0 to 1")
        for name in ("steps", "replicas", "points", "block"):
            self._require(name, is_whole(getattr(self, name), 1), "a whole number of at least 1")
        self._require("seed", is_whole(self.seed, 0) and self.seed < 2**63, "a whole number from 0 to 2^63 - 1")
        for name in ("bias_correction", "compile"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")

    def _require(self, name: str, fits: bool, allowed: str) -> None:
        require(fits, f"synthetic: {name}", getattr(self, name), allowed)

    @property
    def problem(self) -> Problem:
        """The problem, with its minimiser and its gradient.

        >>> round(Settings().problem.minimiser, 4)
        0.4995
        """
        return Problem(C=float(self.C), delta=float(self.delta))

    @property
    def recorded(self) -> list[int]:
        """The steps that are recorded.

        >>> Settings(steps=10, points=3).recorded
        [1, 3, 7, 10]
        """
        points = min(self.points, self.steps)
        return sorted({1} | {round(k * self.steps / points) for k in range(1, points + 1)})


@dataclass(frozen=True, eq=False)
class Curve:
    """The results of one method: ``steps`` is ``(P,)``, all others ``(P, R)``, a column per replica, in float64.

    The means at step ``t`` are over ``w_1 .. w_t``, the iterates before each of the ``t`` steps; ``w`` is ``w_{t+1}``.
    With ``r_t = alpha_t eta_t``, the whole factor of the gradient, gamma included, ``sum_rate`` is the sum of ``r_t``
    up to ``t``, ``sum_squared_rate`` of ``r_t^2``, and ``sum_rate_squared_gradient`` of ``r_t |f'(w_t)|^2``: the
    terms of Theorem 2's bound. Adam and AMSGrad have none of the three.

    >>> curve = run(Settings(steps=4, replicas=2, compile=False), ("sgd",))["sgd"]
    >>> curve.steps, curve.sum_rate[-1]
    (tensor([1, 2, 3, 4]), tensor([4.0000e-05, 4.0000e-05], dtype=torch.float64))
    """

    method: str
    steps: Tensor
    w: Tensor
    mean_w: Tensor
    mean_squared_gradient: Tensor
    sum_rate: Tensor | None = None
    sum_squared_rate: Tensor | None = None
    sum_rate_squared_gradient: Tensor | None = None

    def bound(self, settings: Settings) -> Tensor | None:
        """Return Theorem 2's bound on the mean of the squared gradients, weighted by ``r_t``: ``(P, R)``.

        None for Adam and AMSGrad, whose rates depend on the current sample. It is infinite before the first step that
        moves the weight.

        >>> settings = Settings(C=9.0, lr=1e-2, steps=1000, replicas=2, compile=False)
        >>> run(settings, ("sgd",))["sgd"].bound(settings)[-1]
        tensor([0.7293, 0.7293], dtype=torch.float64)
        """
        if self.sum_rate is None or self.sum_squared_rate is None:
            return None
        moved = self.sum_rate > 0
        rates, constants = torch.where(moved, self.sum_rate, 1.0), settings.problem.constants(settings.w1)
        bound = bound_from_sums(rates, self.sum_squared_rate, constants=constants)
        return torch.where(moved, bound, torch.inf)

    def rows(
        self, quantiles: Sequence[float] = (0.1, 0.5, 0.9), settings: Settings | None = None
    ) -> list[dict[str, Any]]:
        """Return a row per recorded step, ready for JSON: for each quantity its mean and quantiles over replicas.

        With the ``settings`` of the run the rows include Theorem 2's ``bound``, if the method has one. Infinite values
        are None, since JSON has no infinity.

        >>> run(Settings(steps=1, replicas=2, compile=False), ("sgd",))["sgd"].rows(quantiles=(0.5,))
        [{'method': 'sgd', 'step': 1, 'replicas': 2, 'w': {'mean': 0.50001, 'q50': 0.50001}, ...}]
        """
        for q in quantiles:
            require(is_number(q) and 0 <= q <= 1, "synthetic: a quantile", q, "a number from 0 to 1")
        names = ("w", "mean_w", "mean_squared_gradient", *_BOUND)
        kept = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        bound = None if settings is None else self.bound(settings)
        if bound is not None:
            kept["bound"] = bound
        summaries = {name: _summary(x, quantiles) for name, x in kept.items()}
        return [
            {"method": self.method, "step": step, "replicas": self.w.shape[1]}
            | {name: {key: column[i] for key, column in columns.items()} for name, columns in summaries.items()}
            for i, step in enumerate(self.steps.tolist())
        ]


def _summary(x: Tensor, quantiles: Sequence[float]) -> dict[str, list[float | None]]:
    columns = {"mean": x.mean(1)}
    for q in quantiles:
        columns[f"q{100 * q:g}"] = torch.quantile(x, q, dim=1)
    return {
        name: [value if math.isfinite(value) else None for value in column.tolist()] for name, column in columns.items()
    }


# --- the run -------------------------------------------------------------------------------------


@torch.no_grad()
def run(
    settings: Settings | None = None, methods: Sequence[str] = tuple(METHODS), progress: Progress | None = None
) -> dict[str, Curve]:
    """Run the methods on the same samples. Returns their curves by name.

    ``progress`` is called with the stage ("compile" or "run"), the number of steps done, and their total.

    >>> run(Settings(), ["delayed_adma"])
    Traceback (most recent call last):
    ...
    ValueError: synthetic: a method is 'delayed_adma', which is not known; did you mean 'delayed-adam'? Choose from: ...
    """
    settings = Settings() if settings is None else settings
    report = progress or (lambda stage, done, total: None)
    require(not isinstance(methods, str), "synthetic: methods", methods, "a list of names")
    names = tuple(dict.fromkeys(methods))
    fields = [(name, kept) for name in names for kept in look_up("synthetic: a method", name, METHODS)]
    if not names:
        raise ValueError("synthetic: methods is empty, but must name at least one method.")

    first = [[settings.w1 if kept == "w" else 0.0] for _, kept in fields]
    state = torch.tensor(first, dtype=torch.float64, device="cpu").repeat(1, settings.replicas)
    hyper = _hyper(settings)

    report("compile", 0, settings.steps)
    one, many = _programs(settings, names)
    late = _first_uncorrected(settings.beta2)
    stops = settings.recorded
    kept_states: list[Tensor] = []
    t = 0  # steps taken so far
    report("run", t, settings.steps)
    for start, rare in samples(settings):
        while t < start + len(rare):
            stop = min(stops[len(kept_states)], start + len(rare))
            while t < stop:
                # A block must be entirely late: t is not known inside it.
                length = settings.block if t + 1 >= late and t + settings.block <= stop else 1
                at = t - start
                step = torch.tensor(t + 1, dtype=torch.float64, device="cpu")
                (one if length == 1 else many)(state, rare[at : at + length], step, hyper)
                t += length
            if t == stops[len(kept_states)]:
                kept_states.append(state.clone())
        report("run", t, settings.steps)
    return _curves(names, fields, torch.tensor(stops), torch.stack(kept_states))


def samples(settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """Yield the samples of a run, a few thousand steps at a time: the number of steps before, and a ``(T, R)`` tensor.

    True is the rare sample. The samples are a function of ``seed``, ``replicas`` and the problem: a longer run starts
    with the samples of a shorter one.

    >>> [(start, rare.shape) for start, rare in samples(Settings(steps=5000, replicas=2))]
    [(0, torch.Size([4096, 2])), (4096, torch.Size([904, 2]))]
    """
    rng = torch.Generator(device="cpu").manual_seed(settings.seed)
    for start in range(0, settings.steps, _DRAWN):
        shape = min(_DRAWN, settings.steps - start), settings.replicas
        yield start, torch.rand(shape, generator=rng, dtype=torch.float64, device="cpu") < settings.problem.p


def _curves(names: tuple[str, ...], fields: list[tuple[str, str]], steps: Tensor, states: Tensor) -> dict[str, Curve]:
    found = dict(zip(fields, states.unbind(1), strict=True))
    t = steps.double()[:, None]
    return {
        name: Curve(
            method=name,
            steps=steps,
            w=found[name, "w"],
            mean_w=found[name, "sum_w"] / t,
            mean_squared_gradient=found[name, "sum_squared_gradient"] / t,
            **{kept: found[name, kept] for kept in _BOUND if (name, kept) in found},
        )
        for name in names
    }


# --- the steps -----------------------------------------------------------------------------------


class _Hyper(NamedTuple):
    """Hyper-parameters as tensors, so that one compiled program works for all values."""

    problem: Problem
    lr: Tensor
    beta2: Tensor
    eps: Tensor


def _hyper(settings: Settings) -> _Hyper:
    def tensor(x: float) -> Any:
        return torch.tensor(x, dtype=torch.float64, device="cpu")

    problem = Problem(C=tensor(settings.C), delta=tensor(settings.delta))
    return _Hyper(problem, tensor(settings.lr), tensor(settings.beta2), tensor(settings.eps))


def _step(
    name: str, kept: dict[str, Tensor], rare: Tensor, t: Scalar, hyper: _Hyper, bias_correction: bool
) -> dict[str, Tensor]:
    """Take one step of one method, for all replicas. Returns the new state, in the same order."""
    problem, lr, beta2, eps = hyper
    w = kept["w"]
    g = problem.sample_gradient(w, rare)
    slope = problem.gradient(w)
    squared = slope * slope
    new = {"sum_w": kept["sum_w"] + w, "sum_squared_gradient": kept["sum_squared_gradient"] + squared}
    m = torch.zeros_like(w)  # beta1 is 0: there is no momentum
    rate: Tensor | None = None
    if name in ("adam", "amsgrad"):
        given = kept.get("v_max")
        w, _, v, v_max = adam_step(w, g, m, kept["v"], given, t, lr=lr, beta1=0.0, beta2=beta2, eps=eps)
        new |= {"v": v, "v_max": v_max}
    elif name == "sgd":
        rate = lr.expand_as(w)
        w, _ = sgd_step(w, g, m, t, lr=lr)
    else:
        v, norm_of_step = kept["v"], name.startswith("avastep")
        forms = {"bias_correction": bias_correction or norm_of_step, "active_only": norm_of_step}
        r = gradient_sizes(v, t - 1, beta2=beta2, bias_correction=forms["bias_correction"])
        eta, clips = rates(r, t - 1, eps=eps, **forms), Clips()
        normalised = eta if name == "avagrad" else torch.ones_like(eta)
        if norm_of_step:
            normalised, clips = eta * r, Clips(r, update=1.0 if name == "avastep" else None, largest=LARGEST)
        gamma = scale(normalised**2, 1)
        rate = lr * gamma * eta
        w, _, new["v"] = delayed_step(w, g, m, v, t, eta, gamma, lr=lr, beta1=0.0, beta2=beta2, clips=clips, **forms)
    new["w"] = w.clamp(0.0, 1.0)
    if rate is not None and "sum_rate" in kept:
        new["sum_rate"] = kept["sum_rate"] + rate
        new["sum_squared_rate"] = kept["sum_squared_rate"] + rate * rate
        new["sum_rate_squared_gradient"] = kept["sum_rate_squared_gradient"] + rate * squared
    return {key: new[key] for key in kept}


def _program(names: tuple[str, ...], bias_correction: bool, length: int) -> _Advance:
    """Return a function that advances a state, in place, by one step for each row of samples.

    For more than one step bias corrections must have reached 1: they are computed at ``t = inf``, and cost nothing.
    """

    def advance(state: Tensor, rare: Tensor, t: Tensor, hyper: _Hyper) -> None:
        rows = iter(state.unbind(0))
        all_kept = {name: {key: next(rows) for key in METHODS[name]} for name in names}
        for k in range(length):
            now: Scalar = t if length == 1 else math.inf
            all_kept = {n: _step(n, kept, rare[k], now, hyper, bias_correction) for n, kept in all_kept.items()}
        state.copy_(torch.stack([row for kept in all_kept.values() for row in kept.values()]))

    return advance


def _first_uncorrected(beta2: float) -> int:
    """Return the first ``t`` from which on ``1 - beta2^(t-1)`` is exactly 1 in float64, with a margin."""
    return 2 if beta2 == 0 else 2 + math.ceil(64 * math.log(2) / -math.log(beta2))


def _programs(settings: Settings, names: tuple[str, ...]) -> list[_Advance]:
    """Return the programs for one step and for a block."""
    lengths = (1, settings.block)
    if settings.compile:
        try:
            return [_compiled(names, settings.bias_correction, n, settings.replicas) for n in lengths]
        except (RuntimeError, OSError) as error:  # raised by torch.compile, for example without a C++ compiler
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(
                f"synthetic: torch.compile does not work here, so the steps run one by one, and slowly ({why}). "
                "Set compile=False to silence this warning.",
                stacklevel=4,  # the caller of run, which is decorated
            )
    return [_program(names, settings.bias_correction, n) for n in lengths]


@functools.cache
def _compiled(names: tuple[str, ...], bias_correction: bool, length: int, replicas: int) -> _Advance:
    """Compile a program by running it once, on a temporary state."""
    # Each program has its own cache, if torch supports that: else all would count against one limit.
    own = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if own else {}
    # One thread: a step is a few microseconds of work, and synchronising threads would take many times as long.
    options["options"] = {"cpp.threads": 1}
    program = _program(names, bias_correction, length)
    compiled = cast(_Advance, torch.compile(program, fullgraph=True, dynamic=False, **options))
    state = torch.zeros(sum(len(METHODS[n]) for n in names), replicas, dtype=torch.float64, device="cpu")
    rare = torch.zeros(length, replicas, dtype=torch.bool, device="cpu")
    compiled(state, rare, torch.tensor(1.0, dtype=torch.float64, device="cpu"), _hyper(Settings()))
    return compiled
