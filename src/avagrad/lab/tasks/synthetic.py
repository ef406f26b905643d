"""The problem of Theorem 1 and Figure 1, on which Adam converges to the wrong end and Delayed Adam does not.

One weight in [0, 1], two samples: ``f_s(w) = C w^2 / 2`` with a small probability, else ``-w``. Many replicas run in
parallel as one vector, each a separate model with its own norm (d = 1). All methods get the same samples.

>>> curves = run(Settings(steps=100, replicas=3, lr=0.01, compile=False), ("adam", "delayed-adam"))
>>> curves["adam"].mean_w.shape  # (steps that were recorded, replicas)
torch.Size([100, 3])
>>> curves["adam"].mean_w[0]  # the first mean is w_1
tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)

The updates are those of :mod:`avagrad.optim.rules`; one compiled function takes a step of all methods. ``beta1`` is
0, as in the theorem.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avagrad.files import write_atomic
from avagrad.lab.checks import is_number, is_whole, require
from avagrad.lab.environment import about
from avagrad.lab.folder import RunFolder, plain
from avagrad.lab.torch_rules import adam_step, sgd_step
from avagrad.names import look_up
from avagrad.optim.rules import LARGEST, Clips, delayed_step, gradient_sizes, rates, scale
from avagrad.theory import Problem, bound_from_sums

__all__ = ["METHODS", "Curve", "Settings", "run", "run_into", "samples"]

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

_RECORDED = 200  # steps that are recorded
_DRAWN = 4096  # samples are drawn for so many steps at a time
_FLOAT64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}

_State = dict[str, Tensor]  # of one method; each tensor has an entry per replica
_States = dict[str, _State]  # of all methods


# --- settings and results ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; the defaults are the paper's, with 100 replicas.

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
    bias_correction: bool = True  # of Delayed Adam and AvaGrad; Adam and AMSGrad always have it
    compile: bool = True

    def __post_init__(self) -> None:
        for name in ("C", "delta"):
            self._require(name, is_number(getattr(self, name)), "a finite number")
        _ = self.problem  # has its own checks
        self._require("lr", is_number(self.lr) and self.lr >= 0, "a finite number of at least 0")
        self._require("beta2", is_number(self.beta2) and 0 <= self.beta2 < 1, "a number from 0 up to, not including, 1")
        self._require("eps", is_number(self.eps) and self.eps > 0, "a finite number above 0")
        self._require("w1", is_number(self.w1) and 0 <= self.w1 <= 1, "a number from 0 to 1")
        for name in ("steps", "replicas"):
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
        """The steps that are recorded: the first, and up to 200 that are evenly spaced, to the last.

        >>> Settings(steps=1000).recorded[:4]
        [1, 5, 10, 15]
        """
        count = min(_RECORDED, self.steps)
        return sorted({1} | {round(k * self.steps / count) for k in range(1, count + 1)})


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

    def rows(self, settings: Settings | None = None) -> list[dict[str, Any]]:
        """Return a row per recorded step, ready for JSON: for each quantity its mean and quantiles over replicas.

        With the ``settings`` of the run the rows include Theorem 2's ``bound``, if the method has one. Infinite values
        are None, since JSON has no infinity.

        >>> run(Settings(steps=1, replicas=2, compile=False), ("sgd",))["sgd"].rows()
        [{'method': 'sgd', 'step': 1, 'replicas': 2, 'w': {'mean': 0.50001, 'q10': 0.50001, ...}, ...}]
        """
        columns = {name: getattr(self, name) for name in ("w", "mean_w", "mean_squared_gradient", *_BOUND)}
        columns["bound"] = None if settings is None else self.bound(settings)
        rows = [
            {"method": self.method, "step": step, "replicas": self.w.shape[1]}
            | {name: _summary(column[i]) for name, column in columns.items() if column is not None}
            for i, step in enumerate(self.steps.tolist())
        ]
        return [plain(row) for row in rows]


def _summary(x: Tensor) -> dict[str, float]:
    quantiles = {f"q{100 * q:g}": x.quantile(q).item() for q in (0.1, 0.5, 0.9)}
    return {"mean": x.mean().item(), **quantiles}


# --- the run -------------------------------------------------------------------------------------


@torch.no_grad()
def run(
    settings: Settings | None = None,
    methods: Sequence[str] = tuple(METHODS),
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Curve]:
    """Run the methods on the same samples. Returns their curves by name.

    ``progress`` is called a few times a second with the number of steps done.

    >>> run(Settings(), ["delayed_adma"])
    Traceback (most recent call last):
    ...
    ValueError: synthetic: a method is 'delayed_adma', which is not known; did you mean 'delayed-adam'? Choose from: ...
    """
    settings = Settings() if settings is None else settings
    require(not isinstance(methods, str), "synthetic: methods", methods, "a list of names")
    names = {name: look_up("synthetic: a method", name, METHODS) for name in methods}
    if not names:
        raise ValueError("synthetic: methods is empty, but must name at least one method.")

    states = {
        name: {key: torch.full((settings.replicas,), settings.w1 if key == "w" else 0.0, **_FLOAT64) for key in keys}
        for name, keys in names.items()
    }
    hyper = _Hyper.of(settings)
    step = _compiled_step(states, hyper) if settings.compile else _step
    recorded, history = set(settings.recorded), []
    t = 0
    for drawn in samples(settings):
        progress(t)
        for rare in drawn:
            t += 1
            states = step(states, rare, torch.tensor(t, **_FLOAT64), hyper)
            if t in recorded:
                history.append(states)
    progress(t)
    return {name: _curve(name, settings, [states[name] for states in history]) for name in names}


def samples(settings: Settings) -> Iterator[Tensor]:
    """Yield the samples of a run, a few thousand steps at a time: ``(T, R)``, True is the rare sample.

    The samples are a function of ``seed``, ``replicas`` and the problem: a longer run starts with the samples of a
    shorter one.

    >>> [rare.shape for rare in samples(Settings(steps=5000, replicas=2))]
    [torch.Size([4096, 2]), torch.Size([904, 2])]
    """
    rng = torch.Generator(device="cpu").manual_seed(settings.seed)
    for start in range(0, settings.steps, _DRAWN):
        shape = min(_DRAWN, settings.steps - start), settings.replicas
        yield torch.rand(shape, generator=rng, **_FLOAT64) < settings.problem.p


def _curve(name: str, settings: Settings, history: Sequence[_State]) -> Curve:
    found = {key: torch.stack([state[key] for state in history]) for key in METHODS[name]}
    steps = torch.tensor(settings.recorded)
    t = steps.double()[:, None]
    return Curve(
        method=name,
        steps=steps,
        w=found["w"],
        mean_w=found["sum_w"] / t,
        mean_squared_gradient=found["sum_squared_gradient"] / t,
        **{key: found[key] for key in _BOUND if key in found},
    )


def run_into(
    out: str | Path,
    runs: Sequence[Settings],
    methods: Sequence[str],
    *,
    resume: bool = False,
    run: Callable[[Settings, Sequence[str]], dict[str, Curve]] = run,
) -> dict[str, Any]:
    """Run the methods with each of the settings, write a folder, and return the content of its ``result.json``.

    With ``resume`` a finished folder is not run again, and an unfinished one is started again. ``run`` runs the
    methods with one of the settings; pass another function to show progress.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result = run_into(place, [Settings(steps=2, replicas=2, compile=False)], ["sgd"])
    ...     sorted(path.name for path in Path(place).iterdir())
    ['config.json', 'curves.jsonl', 'result.json']
    >>> result["last"][0]["w1"], result["last"][0]["step"]
    (0.5, 2)
    """
    config = {"task": "synthetic", "methods": list(methods), "runs": [asdict(settings) for settings in runs]}
    with RunFolder.claim(out, config, about(), resume=resume) as folder:
        if (result := folder.read_result()) is not None:
            return result
        rows = [
            {"w1": settings.w1} | row
            for settings in runs
            for curve in run(settings, methods).values()
            for row in curve.rows(settings)
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        write_atomic(folder.path / "curves.jsonl", lambda file: file.write(lines.encode()))
        last = {settings.w1: settings.steps for settings in runs}
        result = {"status": "finished", "last": [row for row in rows if row["step"] == last[row["w1"]]]}
        folder.write_result(result)
        return result


# --- the steps -----------------------------------------------------------------------------------


class _Hyper(NamedTuple):
    """Hyper-parameters; numbers are tensors, so that one compiled program works for all values."""

    problem: Problem
    lr: Tensor
    beta2: Tensor
    eps: Tensor
    bias_correction: bool

    @classmethod
    def of(cls, settings: Settings) -> "_Hyper":
        numbers = settings.C, settings.delta, settings.lr, settings.beta2, settings.eps
        C, delta, lr, beta2, eps = torch.tensor(numbers, **_FLOAT64)
        return cls(Problem(C, delta), lr, beta2, eps, settings.bias_correction)


def _step(states: _States, rare: Tensor, t: Tensor, hyper: _Hyper) -> _States:
    """Return the states after one step of each method, for all replicas."""
    return {name: _step_of(name, state, rare, t, hyper) for name, state in states.items()}


def _compiled_step(states: _States, hyper: _Hyper) -> Callable[[_States, Tensor, Tensor, _Hyper], _States]:
    """Return the step, compiled by a first call, or as it is where that does not work."""
    try:
        # One thread: a step is a few microseconds of work, and synchronising threads would take many times as long.
        compiled = torch.compile(_step, fullgraph=True, options={"cpp.threads": 1})
        rare = torch.zeros_like(next(iter(states.values()))["w"], dtype=torch.bool)
        compiled(states, rare, torch.tensor(1, **_FLOAT64), hyper)
    except Exception as error:  # for example without a C++ compiler
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"synthetic: torch.compile does not work here, so the steps run one by one, and slowly ({why}). "
            "Set compile=False to silence this warning.",
            stacklevel=4,  # the caller of run, which is decorated
        )
        return _step
    return compiled


def _step_of(name: str, state: _State, rare: Tensor, t: Tensor, hyper: _Hyper) -> _State:
    problem, lr, beta2, eps, bias_correction = hyper
    w = state["w"]
    g = problem.sample_gradient(w, rare)
    slope = problem.gradient(w)
    squared = slope * slope
    new = {"sum_w": state["sum_w"] + w, "sum_squared_gradient": state["sum_squared_gradient"] + squared}
    m = torch.zeros_like(w)  # beta1 is 0: there is no momentum
    rate = torch.zeros_like(w)  # of a method to which Theorem 2 applies
    if name in ("adam", "amsgrad"):
        v, v_max = state["v"], state.get("v_max")
        w, _, new["v"], new["v_max"] = adam_step(w, g, m, v, v_max, t, lr=lr, beta1=0.0, beta2=beta2, eps=eps)
    elif name == "sgd":
        rate = lr.expand_as(w)
        w, _ = sgd_step(w, g, m, t, lr=lr)
    else:
        v, norm_of_step = state["v"], name.startswith("avastep")
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
    if "sum_rate" in state:
        new["sum_rate"] = state["sum_rate"] + rate
        new["sum_squared_rate"] = state["sum_squared_rate"] + rate * rate
        new["sum_rate_squared_gradient"] = state["sum_rate_squared_gradient"] + rate * squared
    return {key: new[key] for key in state}
