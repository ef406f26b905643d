"""Every class, path and dtype against the float64 reference, on parameters and state."""

import itertools
from typing import Any

import numpy as np
import pytest
import reference
import torch
from problems import (
    DELAYED,
    FUSED,
    FUSED_PATHS,
    PATHS,
    TOLERANCES,
    as_float64,
    assert_close,
    gradients,
    is_fused,
    laid_out_as,
    optimizer_class,
    parameters,
    reference_params,
    take_fused_path,
)

from avagrad.optim.backends import fused as fused_backend

STEPS, RELOAD_AT, LR_CHANGES_AT = 24, 11, 7


def settings_of_groups(grouped: bool, several: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """Return each parameter's settings: all the first ones, or the three taken in turn."""
    return [several[i % len(several)] if grouped else several[0] for i in range(n)]


def make(name: str, params: list[torch.nn.Parameter], hyper: list[dict[str, Any]], **options: Any) -> Any:
    """Return an optimizer with one group for each distinct setting."""
    groups: list[dict[str, Any]] = []
    for p, h in zip(params, hyper, strict=True):
        for group in groups:
            if group["hyper"] is h:
                group["params"].append(p)
                break
        else:
            groups.append({"params": [p], "hyper": h, **h})
    for group in groups:
        del group["hyper"]
    return optimizer_class(name)(groups, **options)


def run_both(
    name: str,
    oracle: Any,
    params: list[torch.nn.Parameter],
    hyper: list[dict[str, Any]],
    states: dict[str, str],
    **options: Any,
) -> None:
    """Step ours and the oracle side by side; compare after every step; reload in the middle."""
    opt = make(name, params, hyper, **options)
    half = params[0].dtype in (torch.bfloat16, torch.float16)
    sizes: dict[tuple[str, int], float] = {}

    def size(key: str, i: int, value: Any) -> float:
        """Return the largest number there so far: what cancels later was rounded at this size."""
        sizes[key, i] = max(sizes.get((key, i), 0.0), np.abs(value).max(initial=0.0))
        return sizes[key, i]

    for t, grads in enumerate(gradients(params, STEPS)):
        if t == RELOAD_AT:
            saved = opt.state_dict()
            opt = make(name, params, hyper, **options)
            opt.load_state_dict(saved)
        if t == LR_CHANGES_AT:
            for group in opt.param_groups:
                group["lr"] *= 0.5
            for p in oracle.params:
                p.lr *= 0.5
        if options.get("fused"):
            grads = [laid_out_as(p, g) for p, g in zip(params, grads, strict=True)]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        kept = [None if g is None else g.clone() for g in grads]
        opt.step()
        oracle.step([None if g is None else as_float64(g) for g in grads])

        tolerance = TOLERANCES[params[0].dtype]
        for i, (p, want, g, before) in enumerate(zip(params, oracle.params, grads, kept, strict=True)):
            where = f"step {t}, parameter {i}"
            if g is not None and before is not None:
                assert p.grad is g
                assert torch.equal(g, before), f"{where}: the gradient was written to"
            single = TOLERANCES[torch.float32].param / tolerance.param if half else 1.0
            assert_close(f"{where}: w", p, want.w, tolerance.param, single * size("w", i, want.w))
            state = opt.state.get(p, {})
            if want.t:
                assert state["step"].item() == want.t
                for key, attribute in states.items():
                    value = getattr(want, attribute)
                    assert_close(f"{where}: {key}", state[key], value, tolerance.state, size(key, i, value))
            if half:
                want.w = as_float64(p)
    if options.get("fused"):
        assert is_fused(opt)  # or another path has been tested


SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.02, "betas": (0.9, 0.99), "eps": 0.1, "weight_decay": 0.1},
    {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 0.01, "betas": (0.0, 0.999), "eps": 2.0, "weight_decay": 0.3},
]


PATHS_AND_DTYPES = [
    *itertools.product(PATHS, TOLERANCES),
    *itertools.product(["native"], TOLERANCES),
    *(
        pytest.param("triton", dtype, marks=pytest.mark.slow)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
]


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize(("path", "dtype"), PATHS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "groups"])
def test_delayed_family_is_the_reference(
    name: str, path: str, dtype: torch.dtype, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fused_backend, "BLOCK", 16
    )  # so that tensors have several blocks, and the interpreter less to do
    monkeypatch.setattr(fused_backend, "CPU_BLOCK", 16)
    by_kernels = path in FUSED_PATHS
    device = take_fused_path(path, monkeypatch) if by_kernels else "cpu"
    for one, other, norm in itertools.product([True, False], [True, False], [2] if name == "DelayedAdam" else [1, 2]):
        if path == "triton" and dtype != torch.float32 and norm == 1 + (one == other):
            continue  # each dtype meets each option; the interpreter is slow
        options: dict[str, Any] = {"maximize": other == grouped}  # both values meet every other choice
        if name == "AvaStep":
            options |= {"decoupled_weight_decay": one, "clip_moment": 3.0 if other else None}
            options["clip_update"] = {(True, 2): 1.0, (False, 1): 0.5}.get((one == other, norm))
        else:
            clips = one and norm == 2
            options |= {"bias_correction": one, "active_only": other, "clip_update": 0.7 if clips else None}
        params = parameters(dtype, device)
        hyper = settings_of_groups(grouped, SETTINGS, len(params))
        oracle = reference.DelayedFamily(
            reference_params(params, hyper),
            normalised=name != "DelayedAdam",
            decoupled=options.get("decoupled_weight_decay", name == "AvaGradW"),
            bias_correction=options.get("bias_correction", True),
            norm=norm,
            active_only=options.get("active_only", True),
            maximize=options["maximize"],
            norm_of_step=name == "AvaStep",
            clip_update=options["clip_update"],
            clip_moment=options.get("clip_moment"),
        )
        if name != "DelayedAdam":
            options["norm"] = norm
        states = {"exp_avg": "m", "exp_avg_sq": "v"}
        run_both(name, oracle, params, hyper, states, **options, **(FUSED if by_kernels else PATHS[path]))


ADAM_SETTINGS = [{**s, "eps": eps, "lr": s["lr"] / 10} for s, eps in zip(SETTINGS, [1e-8, 1e-3, 1e-6], strict=True)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("amsbound", [False, True])
def test_adabound_is_its_paper(path: str, dtype: torch.dtype, grouped: bool, amsbound: bool) -> None:
    maximize = amsbound == grouped
    params = parameters(dtype)
    hyper = settings_of_groups(grouped, ADAM_SETTINGS, len(params))
    oracle = reference.AdaBound(
        reference_params(params, hyper),
        base_lrs=[h["lr"] for h in hyper],
        final_lr=0.05,
        gamma=0.1,
        amsbound=amsbound,
        maximize=maximize,
    )
    states = {"exp_avg": "m", "exp_avg_sq": "v"} | ({"max_exp_avg_sq": "v_max"} if amsbound else {})
    options = {"final_lr": 0.05, "gamma": 0.1, "amsbound": amsbound, "maximize": maximize}
    run_both("AdaBound", oracle, params, hyper, states, **options, **PATHS[path])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("reduce", ["max", None])
@pytest.mark.parametrize("keep", [1, 4])
def test_adashift_is_its_paper(path: str, dtype: torch.dtype, grouped: bool, reduce: str | None, keep: int) -> None:
    params = parameters(dtype)
    hyper = settings_of_groups(grouped, ADAM_SETTINGS, len(params))
    oracle = reference.AdaShift(reference_params(params, hyper), keep=keep, reduce=reduce)
    states = {} if reduce else {"exp_avg_sq": "v"}
    run_both("AdaShift", oracle, params, hyper, states, keep=keep, reduce=reduce, **PATHS[path])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["one-group", "groups"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adopt_is_its_paper(path: str, dtype: torch.dtype, grouped: bool, decoupled: bool) -> None:
    params = parameters(dtype)
    hyper = settings_of_groups(grouped, ADAM_SETTINGS, len(params))
    maximize = decoupled == grouped
    oracle = reference.ADOPT(reference_params(params, hyper), decoupled=decoupled, maximize=maximize)
    options = {"decoupled_weight_decay": decoupled, "maximize": maximize}
    run_both("ADOPT", oracle, params, hyper, {"exp_avg_scaled": "m", "exp_avg_sq": "v"}, **options, **PATHS[path])


@pytest.mark.parametrize("name", ["AdaBound", "AdaShift", "ADOPT"])
def test_defaults_stay_finite(name: str) -> None:
    params = parameters()
    opt = optimizer_class(name)(params)
    for grads in gradients(params, 30):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()
        assert all(p.isfinite().all() for p in params)
