"""Figure 1's problem: equal to the optimizer classes, and to a simulation in C.

The oracle is :func:`trained`, which steps real optimizers, and for long runs a few lines of C; neither shares code with
the task. Compiled tests use the same program (:data:`BASE`), so that it is compiled once.
"""

import ctypes
import functools
import inspect
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

import avagrad
from avagrad.lab.tasks.synthetic import METHODS, Curve, Settings, run, samples
from avagrad.theory import slack, theorem_alpha

# Steps that hit both ends of [0, 1], and averages that move: a learning rate of 1e-5 does little in a short run.
BASE = Settings(lr=1e-3, replicas=6, steps=10_000)
# Everything is float64, with roots and quotients correctly rounded. Torch takes a bias correction as 1 - beta^t, which
# loses two digits at first, and each of 10^4 steps may add a rounding of its own: 1e-16 * 10^4 at most.
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}
SUMS = ("sum_rate", "sum_squared_rate", "sum_rate_squared_gradient")

CLASSES: dict[str, Callable[..., Any]] = {
    "adam": lambda p, s: torch.optim.Adam(p, lr=s.lr, betas=(0.0, s.beta2), eps=s.eps),
    "amsgrad": lambda p, s: torch.optim.Adam(p, lr=s.lr, betas=(0.0, s.beta2), eps=s.eps, amsgrad=True),
    "sgd": lambda p, s: torch.optim.SGD(p, lr=s.lr),
    "delayed-adam": lambda p, s: avagrad.DelayedAdam(
        p, lr=s.lr, betas=(0.0, s.beta2), eps=s.eps, bias_correction=s.bias_correction
    ),
    "avastep": lambda p, s: avagrad.AvaStep(p, lr=s.lr, betas=(0.0, s.beta2), eps=s.eps),
    "avastep-free": lambda p, s: avagrad.AvaStep(p, lr=s.lr, betas=(0.0, s.beta2), eps=s.eps, clip_update=None),
    "avagrad": lambda p, s: avagrad.AvaGrad(
        p, lr=s.lr, betas=(0.0, s.beta2), eps=s.eps, bias_correction=s.bias_correction
    ),
}


def all_samples(settings: Settings) -> Tensor:
    return torch.cat(list(samples(settings)))


def trained(name: str, settings: Settings, replicas: int) -> Tensor:
    """Return ``w_1 .. w_{T+1}`` of the first replicas, (T + 1, R), from the optimizer class."""
    # A norm runs over a whole model, so a replica needs an optimizer of its own; the others are element-wise.
    sizes = [1] * replicas if name.startswith("ava") else [replicas]
    params = [torch.nn.Parameter(torch.full((n,), settings.w1, dtype=torch.float64)) for n in sizes]
    optimizers = [CLASSES[name]([p], settings) for p in params]
    path = [torch.cat([p.detach() for p in params])]
    for rare in all_samples(settings)[:, :replicas]:
        for p, opt, seen in zip(params, optimizers, torch.split(rare, sizes), strict=True):
            p.grad = torch.where(seen, settings.C * p.detach(), -1.0)
            opt.step()
            with torch.no_grad():
                p.clamp_(0, 1)
        path.append(torch.cat([p.detach() for p in params]))
    return torch.stack(path)


def expect_curve(curve: Curve, path: Tensor, settings: Settings) -> None:
    """Compare a curve with the iterates that it should have come from."""
    replicas = path.shape[1]
    p = (1 + settings.delta) / (settings.C + 1)
    squared = (p * settings.C * path - (1 - p)) ** 2
    for i, t in enumerate(curve.steps.tolist()):
        torch.testing.assert_close(curve.w[i, :replicas], path[t], **CLOSE)
        torch.testing.assert_close(curve.mean_w[i, :replicas], path[:t].mean(0), **CLOSE)
        torch.testing.assert_close(curve.mean_squared_gradient[i, :replicas], squared[:t].mean(0), **CLOSE)


# --- the oracle: the optimizer classes -----------------------------------------------------------


@pytest.fixture(scope="module")
def curves() -> dict[str, Curve]:
    return run(BASE)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_compiled_steps_are_those_of_the_optimizer_class(name: str, curves: dict[str, Curve]) -> None:
    path = trained(name, BASE, 2 if name == "avagrad" else BASE.replicas)
    assert curves[name].steps[-1] == BASE.steps
    assert path.std() > 0.01  # it went somewhere
    expect_curve(curves[name], path, BASE)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias_correction": False}, {"C": 20.0, "delta": 0.5, "beta2": 0.5, "eps": 0.1, "w1": 0.0}, {"beta2": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("name", METHODS)
def test_eager_steps_are_those_of_the_optimizer_class(name: str, options: dict[str, Any]) -> None:
    settings = Settings(**{"lr": 1e-2, "replicas": 3, "steps": 300, "compile": False} | options)
    expect_curve(run(settings, [name])[name], trained(name, settings, 3), settings)


def test_without_bias_correction_the_first_step_of_delayed_adam_is_lr_over_eps() -> None:
    settings = Settings(steps=1, replicas=2, bias_correction=False, compile=False)
    curve = run(settings, ["delayed-adam"])["delayed-adam"]
    assert curve.w.tolist() == [[1.0, 1.0]]  # a thousand, clamped
    torch.testing.assert_close(curve.sum_rate, torch.full((1, 2), 1e-5 / 1e-8, dtype=torch.float64))


@pytest.mark.parametrize("bias_correction", [True, False])
def test_sums_of_rates(bias_correction: bool) -> None:
    settings = Settings(lr=1e-2, C=20.0, replicas=4, steps=200, compile=False, bias_correction=bias_correction)
    curves, rare = run(settings), all_samples(settings)
    for name in ("delayed-adam", "avagrad", "sgd"):
        path = trained(name, settings, 4)[:-1]
        g = torch.where(rare, settings.C * path, -1.0)
        rate = torch.full_like(path, settings.lr)  # in one dimension AvaGrad's gamma takes eta away again
        if name == "delayed-adam":
            v = torch.zeros(4, dtype=torch.float64)
            for t in range(200):
                v_hat = v / (1 - settings.beta2**t) if bias_correction and t else v
                rate[t] = settings.lr / (v_hat.sqrt() + settings.eps)
                v = settings.beta2 * v + (1 - settings.beta2) * g[t] ** 2
        if name != "sgd" and bias_correction:
            rate[0] = 0  # there is no estimate of the second moment yet
        at = curves[name].steps - 1
        slope = settings.problem.gradient(path)
        for key, terms in zip(SUMS, (rate, rate**2, rate * slope**2), strict=True):
            torch.testing.assert_close(getattr(curves[name], key), terms.cumsum(0)[at], **CLOSE)
    for name in ("adam", "amsgrad"):
        assert all(getattr(curves[name], key) is None for key in SUMS)


# --- Theorem 2, where it says something ----------------------------------------------------------


@pytest.mark.slow
def test_the_bound_holds_and_is_small() -> None:
    """At C = 9 and the theorem's learning rate; the paper's own C = 999 has a bound above all possible values."""
    base = replace(BASE, C=9.0, eps=0.1, w1=0.0, steps=250_000)
    constants = base.problem.constants(base.w1)
    settings = replace(base, lr=theorem_alpha(1.0, base.steps, constants))
    found = run(settings)
    slacks = {}
    for name in ("delayed-adam", "avagrad", "sgd"):
        curve = found[name]
        bound = curve.bound(settings)
        assert bound is not None
        assert curve.sum_rate is not None
        assert curve.sum_rate_squared_gradient is not None
        assert 0.007 < bound[-1].mean() < 0.02
        slacks[name] = slack(bound[-1], (curve.sum_rate_squared_gradient / curve.sum_rate)[-1])
    # In one dimension AvaGrad is SGD, to its dead first step.
    measured = {"delayed-adam": 1.230, "avagrad": 1.897, "sgd": 1.897}
    assert slacks == {name: pytest.approx(value, rel=0.05) for name, value in measured.items()}
    assert found["adam"].bound(settings) is None
    at_the_papers = BASE.problem.constants(BASE.w1)
    hopeless = replace(BASE, w1=0.0)
    bound = run(hopeless)["sgd"].bound(hopeless)
    assert bound is not None
    assert bound[-1].mean() > hopeless.problem.largest_gradient**2
    assert at_the_papers.Ginf == 999


# --- the oracle: a simulation in C, and Figure 1 -------------------------------------------------

SOURCE = r"""
#include <math.h>
#include <stdint.h>
/* method 0: Adam, 1: AMSGrad, 2: Delayed Adam. Means over w_1 .. w_T of w and of the squared gradient. */
void simulate(int method, const uint8_t *rare, long T, long R, double w1, double C, double p, double lr, double beta2,
              double eps, double *mean_w, double *mean_squared) {
    for (long r = 0; r < R; r++) {
        double w = w1, v = 0, largest = 0, sum_w = 0, sum_squared = 0, power = 1;
        for (long t = 1; t <= T; t++) {
            double slope = p * C * w - (1 - p), g = rare[(t - 1) * R + r] ? C * w : -1.0;
            sum_w += w;
            sum_squared += slope * slope;
            double before = v, before_correction = 1 - power;
            v = beta2 * v + (1 - beta2) * g * g;
            largest = fmax(largest, v);
            power *= beta2;
            if (method == 2) {
                if (t > 1) w -= lr * g / (sqrt(before / before_correction) + eps);
            } else
                w -= lr * g / (sqrt((method ? largest : v) / (1 - power)) + eps);
            w = fmin(fmax(w, 0), 1);
        }
        mean_w[r] = sum_w / T;
        mean_squared[r] = sum_squared / T;
    }
}
"""
IN_C = ("adam", "amsgrad", "delayed-adam")
Simulate = Callable[[str, Settings], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder: Path = tmp_path_factory.mktemp("simulation")
    (folder / "simulate.c").write_text(SOURCE)
    library = folder / "simulate.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, folder / "simulate.c", "-lm"], check=True)
    function = ctypes.CDLL(str(library)).simulate

    def call(name: str, s: Settings) -> tuple[Tensor, Tensor]:
        rare = all_samples(s).to(torch.uint8).contiguous()
        means = torch.zeros(2, s.replicas, dtype=torch.float64)
        numbers = (s.w1, s.C, (1 + s.delta) / (s.C + 1), s.lr, s.beta2, s.eps)
        function(
            IN_C.index(name),
            ctypes.c_void_p(rare.data_ptr()),
            ctypes.c_long(s.steps),
            ctypes.c_long(s.replicas),
            *(ctypes.c_double(x) for x in numbers),
            ctypes.c_void_p(means[0].data_ptr()),
            ctypes.c_void_p(means[1].data_ptr()),
        )
        return means[0], means[1]

    return call


# The average squared gradient after 10^6 steps, in thousandths, between which the mean over replicas lies.
FIGURE_1 = {
    0.5: {"adam": (800, 930), "amsgrad": (0, 20), "delayed-adam": (0, 20)},
    0.0: {"adam": (700, 820), "amsgrad": (300, 420), "delayed-adam": (30, 80)},
}


@pytest.mark.parametrize("w1", FIGURE_1)
def test_figure_1(w1: float, simulate: Simulate) -> None:
    """The simulation has the figure's shape after all 10^6 steps; the task equals it over the first 10^5."""
    full = Settings(w1=w1, replicas=BASE.replicas)
    for name, (low, high) in FIGURE_1[w1].items():
        _, squared = simulate(name, full)
        assert low < 1000 * squared.mean() < high, (name, squared.mean())
    part = replace(full, steps=100_000)
    found = run(part)  # with all methods: this program is compiled
    for name in IN_C:
        mean_w, squared = simulate(name, part)
        # C's powers are products, and its sums, as ours, of 10^5 terms, each with a rounding.
        torch.testing.assert_close(found[name].mean_w[-1], mean_w, rtol=1e-10, atol=0)
        torch.testing.assert_close(found[name].mean_squared_gradient[-1], squared, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
def test_avasteps_clamp_gives_the_theorem_up_and_without_it_it_holds() -> None:
    """By default AvaStep goes to the wrong end, as Adam does; without its clamp it converges, as Delayed Adam does."""
    settings = Settings(w1=0.5, replicas=6, steps=300_000, lr=1e-4)
    found = run(settings, ["adam", "avastep", "avastep-free", "delayed-adam"])
    last = {name: float(curve.mean_w[-1].mean()) for name, curve in found.items()}
    assert last["adam"] > 0.9
    assert last["avastep"] > 0.9
    assert last["avastep-free"] == pytest.approx(0.4995, abs=0.05)
    assert last["delayed-adam"] == pytest.approx(0.4995, abs=0.05)
    bound = found["avastep-free"].bound(settings)
    assert bound is not None
    assert (found["avastep-free"].mean_squared_gradient[-1] <= bound[-1]).all()
    assert found["avastep"].bound(settings) is None


def test_in_one_dimension_avagrad_is_sgd_after_its_first_step(curves: dict[str, Curve]) -> None:
    ours, sgd = curves["avagrad"].sum_rate, curves["sgd"].sum_rate
    assert ours is not None
    assert sgd is not None
    torch.testing.assert_close(ours, sgd - BASE.lr, **CLOSE)


# --- settings, seeds and samples -----------------------------------------------------------------


@pytest.mark.usefixtures("curves")  # they are compiled
def test_other_numbers_are_not_compiled_again() -> None:
    """They are tensors; were one of them baked into the programs, the results would be those of another setting."""
    other = replace(BASE, C=20.0, delta=0.5, lr=0.01, beta2=0.8, eps=0.1, w1=0.9, steps=500)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled, eager = run(other), run(replace(other, compile=False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    for name in METHODS:
        for key in ("w", "mean_w", "mean_squared_gradient", *SUMS):
            torch.testing.assert_close(getattr(compiled[name], key), getattr(eager[name], key), **CLOSE)


def test_a_method_does_not_depend_on_the_others() -> None:
    settings = replace(BASE, steps=500, compile=False)
    alone, together = run(settings, ["delayed-adam"]), run(settings)
    assert list(alone) == ["delayed-adam"]
    assert torch.equal(alone["delayed-adam"].mean_w, together["delayed-adam"].mean_w)


def test_recorded_steps() -> None:
    assert Settings(steps=1_000_000).recorded == [1, *range(5000, 1_000_001, 5000)]
    assert Settings(steps=7).recorded == [1, 2, 3, 4, 5, 6, 7]
    assert Settings(steps=1).recorded == [1]


def test_seeds() -> None:
    settings = replace(BASE, steps=400)
    one, same, other = run(settings), run(settings), run(replace(settings, seed=1))
    for name in METHODS:
        assert torch.equal(one[name].mean_w, same[name].mean_w)
        assert not torch.equal(one[name].mean_w, other[name].mean_w)


def test_samples() -> None:
    settings = Settings(steps=50_000, replicas=10)
    rare = all_samples(settings)
    assert rare.double().mean().item() == pytest.approx(0.002, rel=0.2)  # six standard deviations
    assert torch.equal(rare[:9000], all_samples(replace(settings, steps=9000)))
    assert (rare.sum(0) > 0).all()
    assert not torch.equal(rare[:, 0], rare[:, 1])


# --- manners -------------------------------------------------------------------------------------


def test_rows_are_json(curves: dict[str, Curve]) -> None:
    curve = curves["delayed-adam"]
    rows = curve.rows()
    assert json.loads(json.dumps(rows)) == rows
    assert [row["step"] for row in rows] == curve.steps.tolist()
    last = rows[-1]["mean_w"]
    assert list(last) == ["mean", "q10", "q50", "q90"]
    assert last["mean"] == pytest.approx(curve.mean_w[-1].mean().item())
    assert last["q90"] == curve.mean_w[-1].quantile(0.9).item()
    assert "sum_rate" in rows[0]
    assert "sum_rate" not in curves["adam"].rows()[0]


def test_progress() -> None:
    steps_done: list[int] = []
    run(Settings(steps=5000, replicas=1, compile=False), ["sgd"], steps_done.append)
    assert steps_done == [0, 4096, 5000]


@pytest.mark.filterwarnings("error")
def test_more_variants_than_torch_compiles_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.compile
    if "recompile_limit" not in inspect.signature(original).parameters:
        pytest.skip("this torch has one limit for all")

    @functools.wraps(original)
    def quickly(function: Any, *, options: Any, **more: Any) -> Any:
        return original(function, backend="eager", **more)

    monkeypatch.setattr(torch, "compile", quickly)
    for name in METHODS:
        for bias_correction in (True, False):
            run(Settings(steps=2, replicas=3, bias_correction=bias_correction), [name])


def test_where_nothing_can_be_compiled_it_says_so_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(steps=50, replicas=7, lr=0.01)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nand a long story")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.warns(UserWarning, match=r"torch.compile does not work here.*\(No working C\+\+ compiler found\)"):
        found = run(settings, ["adam"])
    assert torch.equal(found["adam"].w, run(replace(settings, compile=False), ["adam"])["adam"].w)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"w1": 1.5}, "synthetic: w1 is 1.5, but must be a number from 0 to 1."),
        ({"lr": float("nan")}, "synthetic: lr is nan, but must be a finite number of at least 0."),
        ({"eps": 0.0}, "synthetic: eps is 0.0, but must be a finite number above 0."),
        ({"beta2": 1.0}, "synthetic: beta2 is 1.0, but must be a number from 0 up to, not including, 1."),
        ({"beta2": "0.9"}, "synthetic: beta2 is '0.9', but must be a number from 0 up to, not including, 1."),
        ({"steps": 0}, "synthetic: steps is 0, but must be a whole number of at least 1."),
        ({"replicas": 2.0}, "synthetic: replicas is 2.0, but must be a whole number of at least 1."),
        ({"steps": True}, "synthetic: steps is True, but must be a whole number of at least 1."),
        ({"replicas": -1}, "synthetic: replicas is -1, but must be a whole number of at least 1."),
        ({"seed": -1}, "synthetic: seed is -1, but must be a whole number from 0 to 2^63 - 1."),
        ({"compile": 1}, "synthetic: compile is 1, but must be True or False."),
        ({"C": None}, "synthetic: C is None, but must be a finite number."),
        ({"C": 0.5}, "C is 0.5, but must be finite and above delta = 1"),
        ({"delta": -1.0}, "delta is -1.0, but must be above 0"),
    ],
    ids=str,
)
def test_rejected_settings(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the sentence is compared below)
        Settings(**options)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (["adma"], "a method is 'adma', which is not known; did you mean 'adam'? Choose from: adam, amsgrad, "),
        (["sgd", "delayed_adam"], "did you mean 'delayed-adam'?"),
        ([], "synthetic: methods is empty, but must name at least one method."),
        ("adam", "synthetic: methods is 'adam', but must be a list of names."),
    ],
)
def test_rejected_methods(methods: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the sentence is compared below)
        run(Settings(steps=1), methods)
    assert sentence in str(refused.value)
