"""The problem of Theorem 1 and Figure 1, on which Adam converges to the wrong end and Delayed Adam does not.

One weight in [0, 1], two samples: ``f_s(w) = C w^2 / 2`` with a small probability, else ``-w``. Many replicas run in
parallel as one vector, each a separate model with its own norm (d = 1). All methods get the same samples.

One compiled function takes a step of all methods, with :mod:`avagrad.optim.rules`; ``beta1`` is 0, as in the theorem.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avagrad.checks import is_number, is_whole, require
from avagrad.files import plain, write_atomic
from avagrad.lab.environment import about
from avagrad.lab.folder import RunFolder
from avagrad.lab.torch_rules import adam_step, sgd_step
from avagrad.names import look_up
from avagrad.optim.rules import LARGEST, Clips, delayed_step, gradient_sizes, rates, scale
from avagrad.theory import Problem, bound_from_sums

__all__ = ["METHODS", "Curve", "Settings", "run", "run_into", "samples"]

# name: whether Theorem 2 applies. It does not if a step depends on the current sample in more than its gradient, as
# Adam's rates and AvaStep's clamp do. "avastep-free" is AvaStep without its clamp.
METHODS = {
    "adam": False,
    "amsgrad": False,
    "delayed-adam": True,
    "avagrad": True,
    "sgd": True,
    "avastep": False,
    "avastep-free": True,
}

_SUMS_OF_RATES = ("sum_rate", "sum_squared_rate", "sum_rate_squared_gradient")
_ROWS = 8  # of a method's state: w, v, v_max, sum_w, sum_squared_gradient, and the sums of rates
_DRAWN = 4096  # samples are drawn for so many steps at a time
_FLOAT64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
_Hyper = tuple[Problem, Tensor, Tensor, Tensor, bool]  # problem, lr, beta2, eps, bias_correction


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; the defaults are the paper's, with 100 replicas.

    >>> Settings().problem
    Problem(C=999.0, delta=1.0)
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
    bias_correction: bool = True  # of Delayed Adam and AvaGrad; Adam, AMSGrad and AvaStep always have it
    compile: bool = True

    def __post_init__(self) -> None:
        allowed = {
            "C": (is_number(self.C), "a finite number"),
            "delta": (is_number(self.delta), "a finite number"),
            "lr": (is_number(self.lr) and self.lr >= 0, "a finite number of at least 0"),
            "beta2": (is_number(self.beta2) and 0 <= self.beta2 < 1, "a number from 0 up to, not including, 1"),
            "eps": (is_number(self.eps) and self.eps > 0, "a finite number above 0"),
            "w1": (is_number(self.w1) and 0 <= self.w1 <= 1, "a number from 0 to 1"),
            "steps": (is_whole(self.steps, 1), "a whole number of at least 1"),
            "replicas": (is_whole(self.replicas, 1), "a whole number of at least 1"),
            "seed": (is_whole(self.seed, 0) and self.seed < 2**63, "a whole number from 0 to 2^63 - 1"),
            "bias_correction": (isinstance(self.bias_correction, bool), "True or False"),
            "compile": (isinstance(self.compile, bool), "True or False"),
        }
        for name, (fits, what) in allowed.items():
            require(fits, f"synthetic: {name}", getattr(self, name), what)
        _ = self.problem  # has its own checks

    @property
    def problem(self) -> Problem:
        """The problem, with its minimiser and its gradient."""
        return Problem(C=float(self.C), delta=float(self.delta))

    @property
    def recorded(self) -> list[int]:
        """The steps that are recorded: the first, and up to 200 that are evenly spaced, to the last."""
        count = min(200, self.steps)
        return sorted({1} | {round(k * self.steps / count) for k in range(1, count + 1)})


@dataclass(frozen=True, eq=False)
class Curve:
    """The results of one method: ``steps`` is ``(P,)``, all others ``(P, R)``, a column per replica, in float64.

    The means at step ``t`` are over ``w_1 .. w_t``, the iterates before each of the ``t`` steps; ``w`` is ``w_{t+1}``.
    The sums up to ``t`` are the terms of Theorem 2's bound, and None if the theorem does not apply: of the whole
    factor of the gradient, ``r_t = alpha_t eta_t``, gamma included; of ``r_t^2``; and of ``r_t |f'(w_t)|^2``.

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

        None if the theorem does not apply. It is infinite before the first step that moves the weight.
        """
        if self.sum_rate is None or self.sum_squared_rate is None:
            return None
        constants = settings.problem.constants(settings.w1)
        return bound_from_sums(self.sum_rate, self.sum_squared_rate, constants)

    def rows(self, settings: Settings | None = None) -> list[dict[str, Any]]:
        """Return a row per recorded step, ready for JSON: for each quantity its mean and quantiles over replicas.

        With the ``settings`` of the run the rows include the bound, if there is one. Infinite values are None, since
        JSON has no infinity.
        """
        columns = {name: getattr(self, name) for name in ("w", "mean_w", "mean_squared_gradient", *_SUMS_OF_RATES)}
        columns["bound"] = None if settings is None else self.bound(settings)
        return [
            {"method": self.method, "step": step, "replicas": self.w.shape[1]}
            | {name: plain(_summary(column[i])) for name, column in columns.items() if column is not None}
            for i, step in enumerate(self.steps.tolist())
        ]


def _summary(x: Tensor) -> dict[str, float]:
    quantiles = {f"q{100 * q:g}": x.quantile(q).item() for q in (0.1, 0.5, 0.9)}
    return {"mean": x.mean().item(), **quantiles}


@torch.no_grad()
def run(
    settings: Settings, methods: Sequence[str] = tuple(METHODS), progress: Callable[[int], None] = lambda done: None
) -> dict[str, Curve]:
    """Run the methods on the same samples. Returns their curves by name.

    ``progress`` is called a few times a second with the number of steps done.

    >>> curves = run(Settings(steps=100, replicas=3, lr=0.01, compile=False), ("adam", "delayed-adam"))
    >>> curves["adam"].mean_w.shape  # (steps that were recorded, replicas)
    torch.Size([100, 3])
    """
    require(not isinstance(methods, str), "synthetic: methods", methods, "a list of names")
    have_bound = {name: look_up("synthetic: a method", name, METHODS) for name in methods}
    if not have_bound:
        raise ValueError("synthetic: methods is empty, but must name at least one method.")

    start = torch.zeros(_ROWS, settings.replicas, **_FLOAT64)
    start[0] = settings.w1
    states = {name: start.clone() for name in have_bound}
    numbers = settings.C, settings.delta, settings.lr, settings.beta2, settings.eps
    C, delta, lr, beta2, eps = torch.tensor(numbers, **_FLOAT64)  # so that one compiled program works for all values
    hyper = Problem(C, delta), lr, beta2, eps, settings.bias_correction
    step = _compiled_step(states, next(samples(settings))[0], hyper) if settings.compile else _step
    recorded, history, t = set(settings.recorded), [], 0
    for drawn in samples(settings):
        progress(t)
        for rare in drawn:
            t += 1
            states = step(states, rare, torch.tensor(t, **_FLOAT64), hyper)
            if t in recorded:
                history.append(states)
    progress(t)

    curves, steps = {}, torch.tensor(settings.recorded)
    for name, has_bound in have_bound.items():
        w, _, _, sum_w, sum_squared_gradient, *sums = torch.stack([states[name] for states in history], dim=1)
        means = sum_w / steps[:, None], sum_squared_gradient / steps[:, None]
        curves[name] = Curve(name, steps, w, *means, *(sums if has_bound else ()))
    return curves


def samples(settings: Settings) -> Iterator[Tensor]:
    """Yield the samples of a run, a few thousand steps at a time: ``(T, R)``, True is the rare sample.

    They do not depend on ``steps``: a longer run starts with the samples of a shorter one.

    >>> [rare.shape for rare in samples(Settings(steps=5000, replicas=2))]
    [torch.Size([4096, 2]), torch.Size([904, 2])]
    """
    rng = torch.Generator(device="cpu").manual_seed(settings.seed)
    for start in range(0, settings.steps, _DRAWN):
        shape = min(_DRAWN, settings.steps - start), settings.replicas
        yield torch.rand(shape, generator=rng, **_FLOAT64) < settings.problem.p


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
        rows, last = [], []
        for settings in runs:
            for curve in run(settings, methods).values():
                rows += [{"w1": settings.w1} | row for row in curve.rows(settings)]
                last.append(rows[-1])
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        write_atomic(folder.path / "curves.jsonl", lambda file: file.write(lines.encode()))
        result = {"status": "finished", "last": last}
        folder.write_result(result)
        return result


def _compiled_step(states: dict[str, Tensor], rare: Tensor, hyper: _Hyper) -> Callable[..., dict[str, Tensor]]:
    """Return the step, compiled by a first call, or as it is where that does not work."""
    try:
        # One thread: a step is a few microseconds of work, and synchronising threads would take many times as long.
        own = "recompile_limit" in inspect.signature(torch.compile).parameters  # else 8: later settings run eagerly
        more: dict[str, Any] = {"recompile_limit": 64} if own else {}
        compiled: Callable[..., dict[str, Tensor]] = torch.compile(
            _step, fullgraph=True, options={"cpp.threads": 1}, **more
        )
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


def _step(states: dict[str, Tensor], rare: Tensor, t: Tensor, hyper: _Hyper) -> dict[str, Tensor]:
    """Take step ``t`` of each method. A state is ``(_ROWS, R)``."""
    return {name: _step_of(name, state, rare, t, hyper) for name, state in states.items()}


def _step_of(name: str, state: Tensor, rare: Tensor, t: Tensor, hyper: _Hyper) -> Tensor:
    problem, lr, beta2, eps, bias_correction = hyper
    w, v, v_max, *sums = state
    g, slope = problem.sample_gradient(w, rare), problem.gradient(w)
    m = torch.zeros_like(w)  # beta1 is 0: there is no momentum
    rate = torch.zeros_like(w)  # stays 0 for Adam and AMSGrad: Theorem 2 does not apply to them
    if name in ("adam", "amsgrad"):
        largest = v_max if name == "amsgrad" else None
        new_w, _, v, v_max = adam_step(w, g, m, v, largest, t, lr=lr, beta1=0.0, beta2=beta2, eps=eps)
    elif name == "sgd":
        rate = lr.expand_as(w)
        new_w, _ = sgd_step(w, g, m, t, lr=lr)
    else:
        is_avastep = name.startswith("avastep")
        forms = {"bias_correction": bias_correction or is_avastep, "active_only": is_avastep}
        r = gradient_sizes(v, t - 1, beta2=beta2, bias_correction=forms["bias_correction"])
        eta = rates(r, t - 1, eps=eps, **forms)
        clips = Clips(r, update=1.0 if name == "avastep" else None, largest=LARGEST) if is_avastep else Clips()
        normalised = {"delayed-adam": torch.ones_like(eta), "avagrad": eta}.get(name, eta * r)
        gamma = scale(normalised**2, 1)
        rate = lr * gamma * eta
        new_w, _, v = delayed_step(w, g, m, v, t, eta, gamma, lr=lr, beta1=0.0, beta2=beta2, clips=clips, **forms)
    squared = slope * slope
    terms = w, squared, rate, rate * rate, rate * squared
    new_sums = [total + term for total, term in zip(sums, terms, strict=True)]
    return torch.stack([new_w.clamp(0.0, 1.0), v, v_max, *new_sums])
