"""avagrad.optax takes the steps of the torch classes, in float64, and is a good citizen of optax and JAX."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import avagrad as torch_side

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import avagrad.optax as ours  # noqa: E402

STEPS = 50
LATE = 7  # the step at which the late leaf has its first gradient
SHAPES = {"b": (5,), "late": (3, 2), "rare": (4,), "s": (), "w": (6, 3)}
DECAYS = {"b": False, "late": True, "rare": True, "s": False, "w": True}
CLASSES = {
    "avagrad": torch_side.AvaGrad,
    "avagradw": torch_side.AvaGradW,
    "delayed_adam": torch_side.DelayedAdam,
    "avastep": torch_side.AvaStep,
}
HYPER: dict[str, Any] = {"b1": 0.8, "b2": 0.97, "eps": 0.03, "weight_decay": 0.07}
LR = {"avagrad": 0.3, "avagradw": 0.3, "delayed_adam": 0.02, "avastep": 0.02}

Leaves = dict[str, Any]
Gradients = Sequence[Leaves]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def start() -> Leaves:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def gradients(*, missing: bool = True, steps: int = STEPS) -> list[Leaves]:
    """Return gradients of very different sizes; some coordinates have none but 0 for long, or ever."""
    rng = np.random.default_rng(1)
    sizes = {name: np.exp(2 * rng.normal(size=shape)) for name, shape in SHAPES.items()}
    every = []
    for t in range(steps):
        grads: Leaves = {name: sizes[name] * rng.standard_t(3, size=shape) for name, shape in SHAPES.items()}
        grads["w"][0] = 0.0
        grads["w"][1] *= t >= 20
        grads["b"] = grads["b"] * (t != 11)
        if missing:
            grads["late"] = grads["late"] if t >= LATE else None
            grads["rare"] = grads["rare"] if t % 3 == 0 else None
        every.append(grads)
    return every


# --- the two sides -------------------------------------------------------------------------------


class Torch:
    """The oracle: a torch class, its readable loop, in float64. A group for what decays, and one for what does not."""

    def __init__(self, name: str, names: Sequence[str] = tuple(SHAPES), **options: Any) -> None:
        arguments = {"lr": LR[name], **HYPER, **options}
        arguments["betas"] = (arguments.pop("b1"), arguments.pop("b2"))
        self.params = {key: torch.nn.Parameter(torch.tensor(start()[key], dtype=torch.float64)) for key in names}
        groups = [
            {"params": [p for key, p in self.params.items() if DECAYS[key]]},
            {"params": [p for key, p in self.params.items() if not DECAYS[key]], "weight_decay": 0.0},
        ]
        self.opt = CLASSES[name](groups, foreach=False, fused=False, **arguments)

    def step(self, grads: Leaves) -> Leaves:
        for key, p in self.params.items():
            p.grad = None if grads[key] is None else torch.tensor(grads[key], dtype=torch.float64)
        self.opt.step()
        return {key: p.detach().numpy().copy() for key, p in self.params.items()}

    def run(self, every: Gradients) -> list[Leaves]:
        return [self.step(grads) for grads in every]


def run(opt: Any, every: Gradients, *, jit: bool = False, between: Any = lambda t, state: state) -> Any:
    """Return the parameters after each step, and the last state."""
    params = jax.tree.map(jnp.asarray, start())
    state = opt.init(params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    take, seen = jax.jit(step) if jit else step, []
    for t, grads in enumerate(every):
        params, state = take(params, between(t, state), jax.tree.map(jnp.asarray, grads))
        seen.append(jax.tree.map(np.asarray, params))
    return seen, state


def distance(found: Sequence[Leaves], expected: Sequence[Leaves]) -> float:
    """Return the largest difference of any coordinate at any step, relative to 1 and to its size."""
    assert len(found) == len(expected)
    assert all(one.keys() == other.keys() for one, other in zip(found, expected, strict=True))
    pairs = [(a[key], b[key]) for a, b in zip(found, expected, strict=True) for key in b]
    return max(float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b)))) for a, b in pairs)


def assert_same(found: Sequence[Leaves], expected: Sequence[Leaves], tolerance: float = 1e-12) -> None:
    began = {key: start()[key] for key in expected[0]}
    assert distance(expected, [began] * len(expected)) > 1e-3  # something has moved
    assert distance(found, expected) <= tolerance


def make(name: str, **options: Any) -> Any:
    return getattr(ours, name)(**{"learning_rate": LR[name], **HYPER, "mask": DECAYS, **options})


# --- the same steps as torch's -------------------------------------------------------------------

FAMILY = [
    {"bias_correction": corrected, "active_only": active, **({} if clip is None else {"clip_update": clip})}
    for corrected, active, clip in [(True, False, None), (True, True, 0.7), (False, False, None), (False, True, None)]
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [("delayed_adam", options) for options in FAMILY]
VARIANTS += [("delayed_adam", {"b1": 0.0, "b2": 0.0})]
VARIANTS += [("avagrad", {"norm": norm, **options}) for norm in (1, 2) for options in FAMILY]
VARIANTS += [("avagradw", {"norm": norm, **options}) for norm, options in zip((2, 1, 1, 2), FAMILY, strict=True)]
VARIANTS += [
    ("avastep", {}),
    ("avastep", {"norm": 1, "clip_moment": 2.0}),
    ("avastep", {"clip_update": None, "decoupled_weight_decay": False}),
    ("avastep", {"clip_update": 0.5, "clip_moment": 3.0, "decoupled_weight_decay": False, "eps": 30.0}),
]


def label(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(f"{key}={x}" for key, x in value.items())


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=label)
def test_parameters_and_state_are_those_of_torch(name: str, options: dict[str, Any]) -> None:
    """With decay, a leaf whose gradients start late, and one that often has none."""
    oracle = Torch(name, **options)
    expected = oracle.run(gradients())
    found, (state, _) = run(make(name, **options), gradients())
    assert_same(found, expected)
    saved = {key: oracle.opt.state[p] for key, p in oracle.params.items()}
    assert state.count.tolist() == [saved[key]["step"].item() for key in SHAPES]
    for key in SHAPES:
        np.testing.assert_allclose(state.mu[key], saved[key]["exp_avg"].numpy(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(state.nu[key], saved[key]["exp_avg_sq"].numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CLASSES)
def test_compiled_and_with_all_defaults(name: str) -> None:
    every = gradients(missing=name == "avastep", steps=20)  # a pattern of missing leaves takes a compilation
    oracle = CLASSES[name]([torch.nn.Parameter(torch.zeros(0))])
    defaults = {key: oracle.defaults[key] for key in ("lr", "eps", "weight_decay", "clip_update")}
    defaults |= dict(zip(("b1", "b2"), oracle.defaults["betas"], strict=True))
    expected = Torch(name, **defaults).run(every)
    assert_same(run(getattr(ours, name)(), every, jit=True)[0], expected)


def test_going_up_is_a_chain() -> None:
    expected = Torch("avagrad", maximize=True).run(gradients())
    assert_same(run(optax.chain(optax.scale(-1.0), make("avagrad")), gradients())[0], expected)


def test_the_decay_mask_may_be_a_function_or_a_prefix_or_left_out() -> None:
    every = gradients(steps=5)
    tree, _ = run(make("avagradw"), every)
    function, _ = run(make("avagradw", mask=lambda params: {key: DECAYS[key] for key in params}), every)
    assert_same(function, tree, 0)
    everything, _ = run(make("avagradw", mask=True), every)
    assert_same(run(make("avagradw", mask=None), every)[0], everything, 0)
    assert distance(everything, tree) > 1e-3


# --- together with what optax has ----------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_inject_hyperparams_changes_them_without_compiling_again(name: str) -> None:
    """All numbers are traced then, also those left at their defaults: norm, clip_update."""
    every, oracle, traces = gradients(missing=False), Torch(name), []
    changes = {9: {"learning_rate": 2 * LR[name]}, 20: {"eps": 1.5, "weight_decay": 0.02}, 30: {"b1": 0.9, "b2": 0.9}}
    changes[40] = {"b1": 0.0}
    expected = []
    for t, grads in enumerate(every):
        for key, value in changes.get(t, {}).items():
            for i, group in enumerate(oracle.opt.param_groups):
                b1, b2 = group["betas"]
                group |= {"lr": value} if key == "learning_rate" else {}
                group |= {"eps": value} if key == "eps" else {}
                group |= {"weight_decay": value} if key == "weight_decay" and i == 0 else {}
                group["betas"] = {"b1": (value, b2), "b2": (b1, value)}.get(key, (b1, b2))
        expected.append(oracle.step(grads))
    opt = optax.inject_hyperparams(getattr(ours, name))(learning_rate=LR[name], **HYPER, mask=DECAYS)

    def update(*args: Any) -> Any:
        traces.append(args)
        return opt.update(*args)

    def between(t: int, state: Any) -> Any:
        new = {key: jnp.asarray(value, jnp.float64) for key, value in changes.get(t, {}).items()}
        return state._replace(hyperparams={**state.hyperparams, **new})

    found, _ = run(optax.GradientTransformation(opt.init, update), every, jit=True, between=between)
    assert_same(found, expected)
    assert len(traces) == 1


def test_inject_hyperparams_takes_the_norm_and_schedules() -> None:
    """A schedule of eps, and a norm that is traced."""
    every = gradients(missing=False, steps=20)
    oracle, expected = Torch("avagrad", norm=1), []
    for t, grads in enumerate(every):
        for group in oracle.opt.param_groups:
            group["eps"] = 0.1 + 0.05 * t
        expected.append(oracle.step(grads))
    arguments = {"learning_rate": LR["avagrad"], **HYPER, "eps": lambda t: 0.1 + 0.05 * t, "norm": 1}
    mask = {"mask": lambda params: DECAYS}
    opt = optax.inject_hyperparams(ours.avagrad, static_args="mask")(**arguments, **mask)
    assert_same(run(opt, every, jit=True)[0], expected)


@pytest.mark.parametrize("name", ["avagradw", "avastep"])
def test_a_schedule_is_torchs_scheduler(name: str) -> None:
    """A warm-up that starts at 0: the first gradient counts all the same."""
    oracle = Torch(name)
    scheduler = torch.optim.lr_scheduler.LambdaLR(oracle.opt, lambda t: min(t / 10, 1.0))
    expected = []
    for grads in gradients():
        expected.append(oracle.step(grads))
        scheduler.step()
    opt = make(name, learning_rate=lambda t: LR[name] * jnp.minimum(t.astype(float) / 10, 1.0))
    assert_same(run(opt, gradients())[0], expected)


@pytest.mark.parametrize("name", CLASSES)
def test_multi_steps_is_a_step_by_the_mean_gradient(name: str) -> None:
    every = gradients(missing=False, steps=2 * STEPS)
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *every[i : i + 2]) for i in range(0, len(every), 2)]
    wide = {"accumulator_dtype": jnp.float64} if "accumulator_dtype" in signature(optax.MultiSteps).parameters else {}
    found, state = run(optax.MultiSteps(make(name), 2, **wide), every, jit=True)
    assert_same(found[1::2], Torch(name).run(means))
    assert state.inner_opt_state[0].count.tolist() == [STEPS] * len(SHAPES)


@pytest.mark.parametrize("name", CLASSES)
def test_apply_if_finite_leaves_out_a_bad_step(name: str) -> None:
    every = gradients(missing=False)
    bad = {key: g + (math.nan if key == "b" else 0.0) for key, g in every[0].items()}
    expected = Torch(name).run(every)
    found, _ = run(optax.apply_if_finite(make(name), 3), [bad, *every[:20], bad, bad, *every[20:]], jit=True)
    assert_same([*found[1:21], *found[23:]], expected)


def test_masked_leaves_have_no_state_and_do_not_count() -> None:
    names = ["b", "late", "w"]
    mask = {key: key in names for key in SHAPES}
    rest = {key: key not in names for key in SHAPES}
    opt = optax.chain(optax.masked(make("avagrad"), mask), optax.masked(optax.set_to_zero(), rest))
    every = gradients(missing=False)
    found, state = run(opt, every)
    assert_same([{key: leaves[key] for key in names} for leaves in found], Torch("avagrad", names).run(every))
    assert all((leaves["rare"] == start()["rare"]).all() for leaves in found)
    assert isinstance(state[0].inner_state[0].nu["rare"], optax.MaskedNode)


def test_a_leaf_that_is_missing_in_the_parameters_stays_missing() -> None:
    params = {"a": jnp.ones(2), "none": None, "masked": optax.MaskedNode()}
    opt = make("avagradw", mask=None)
    state = opt.init(params)
    for _ in range(2):
        updates, state = opt.update({**params, "a": jnp.array([1.0, 2.0])}, state, params)
    assert updates["none"] is None
    assert updates["masked"] == optax.MaskedNode()
    assert (updates["a"] != 0).all()
    with pytest.raises(ValueError, match=r"avagradw: updates\['none'\] is given, but must be missing"):
        opt.update({**params, "none": jnp.ones(1)}, state, params)


def test_a_missing_gradient_gives_zeros_and_keeps_the_state() -> None:
    opt = make("avastep", mask=None)
    params = {"a": jnp.ones(2), "b": jnp.ones(3, jnp.bfloat16)}
    _, state = opt.update(params, opt.init(params), params)
    for missing in (None, optax.MaskedNode()):
        updates, (after, _) = opt.update({"a": jnp.ones(2), "b": missing}, state, params)
        assert updates["b"].tolist() == [0.0] * 3
        assert updates["b"].dtype == jnp.bfloat16
        assert after.count.tolist() == [2, 1]
        assert (after.nu["b"] == state[0].nu["b"]).all()
        assert (after.mu["b"] == state[0].mu["b"]).all()


def test_labels_have_a_norm_each_or_one_norm_and_an_lr_each() -> None:
    labels = {key: "one" if key in ("b", "w") else "two" for key in SHAPES}
    every, lrs = gradients(missing=False), {"one": 0.3, "two": 0.1}
    parts = {label: [key for key in SHAPES if labels[key] == label] for label in lrs}

    alone = {label: Torch("avagradw", names, lr=lrs[label]).run(every) for label, names in parts.items()}
    expected = [{**one, **two} for one, two in zip(*alone.values(), strict=True)]
    transforms = {label: make("avagradw", learning_rate=lr, mask=lambda p: DECAYS) for label, lr in lrs.items()}
    a_norm_each, _ = run(optax.multi_transform(transforms, labels), every)
    assert_same(a_norm_each, expected)

    oracle = Torch("avagradw")
    groups = oracle.opt.param_groups
    groups[:] = [
        {**groups[0], "params": [oracle.params[key]], "lr": lrs[labels[key]], "weight_decay": 0.07 * DECAYS[key]}
        for key in SHAPES
    ]
    scaled = ours.scale_by_avagrad(**HYPER, decoupled_weight_decay=True, mask=DECAYS)
    rates = optax.multi_transform({label: optax.scale(-lr) for label, lr in lrs.items()}, labels)
    one_norm, _ = run(optax.chain(scaled, rates), every)
    assert_same(one_norm, oracle.run(every))
    assert distance(one_norm, a_norm_each) > 1e-3


@pytest.mark.parametrize("name", CLASSES)
def test_scale_by_is_the_method_without_the_learning_rate(name: str) -> None:
    scaled = getattr(ours, f"scale_by_{name.removesuffix('w')}")
    decoupled = {"decoupled_weight_decay": True} if name == "avagradw" else {}
    opt = optax.chain(scaled(**HYPER, **decoupled, mask=DECAYS), optax.scale(-LR[name]))
    assert_same(run(opt, gradients(steps=10))[0], run(make(name), gradients(steps=10))[0], 0)


def test_map_params_sees_the_moments_and_not_the_counts() -> None:
    opt = make("avagrad")
    state = opt.init(start())
    mapped, _ = optax.tree_utils.tree_map_params(opt, lambda leaf, key: key, state, {key: key for key in SHAPES})
    assert mapped.mu == mapped.nu == {key: key for key in SHAPES}
    assert mapped.count.tolist() == [0] * len(SHAPES)


def test_a_stack_of_models_has_its_own_hyper_parameters() -> None:
    """Under vmap each model has its own lr and eps, and its own norm."""
    every = gradients(missing=False, steps=10)
    lrs, epsilons = [0.1, 0.3], [0.03, 3.0]

    def train(lr: Any, eps: Any) -> Any:
        opt = make("avastep", learning_rate=lr, eps=eps)

        def step(carry: Any, grads: Any) -> Any:
            updates, state = opt.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        params = jax.tree.map(jnp.asarray, start())
        stacked = jax.tree.map(lambda *g: jnp.stack(g), *every)
        return jax.lax.scan(step, (params, opt.init(params)), stacked)[0][0]

    stack = jax.jit(jax.vmap(train))(jnp.array(lrs), jnp.array(epsilons))
    for i, (lr, eps) in enumerate(zip(lrs, epsilons, strict=True)):
        one = jax.tree.map(lambda x, i=i: np.asarray(x[i]), stack)
        assert_same([one], Torch("avastep", lr=lr, eps=eps).run(every)[-1:])


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-15, 1e-8, 1.0, 1e8, 1e15])
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("name", ["avagrad", "avastep"])
def test_the_whole_range_of_eps_in_float32(name: str, norm: int, eps: float) -> None:
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"eps": eps, "norm": norm, **({"active_only": True} if name == "avagrad" else {})}
    betas = 0.9, 0.99999  # 1 - b2 has few digits in float32
    w = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
    oracle = CLASSES[name]([w], lr=0.1, betas=betas, foreach=False, fused=False, **options)
    with jax.enable_x64(False):
        opt = getattr(ours, name)(0.1, *betas, **options)
        params = jnp.zeros(40)
        state = opt.init(params)
        for _ in range(6):
            g = (1e-3 * rng.normal(size=40)).astype(np.float32)
            w.grad = torch.tensor(g, dtype=torch.float64)
            oracle.step()
            updates, state = opt.update(jnp.asarray(g), state)
            params = optax.apply_updates(params, updates)
    assert params.dtype == jnp.float32
    np.testing.assert_allclose(params, w.detach().numpy(), rtol=2e-5, atol=2e-5 * np.abs(w.detach().numpy()).max())


def test_the_sum_of_many_large_rates_fits_into_float32() -> None:
    """Half a billion rates of 1e15, which the compiler never holds in memory."""
    opt = ours.scale_by_avagrad(eps=1e-15, bias_correction=False)

    def move(one: Any) -> Any:
        w = jnp.broadcast_to(one, (2**29,))
        return opt.update(w, opt.init(w))[0][0]

    with jax.enable_x64(False):
        assert float(jax.jit(move)(jnp.float32(1.0))) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(("name", "dtype"), [("avagradw", "bfloat16"), ("avastep", "float16")])
def test_half_precision_has_wide_moments_and_updates_of_its_own_dtype(name: str, dtype: str) -> None:
    opt = optax.apply_if_finite(make(name, mask=None), 1)  # which insists on the dtype
    params = {"a": jnp.ones(3, dtype)}
    state = opt.init(params)
    for _ in range(2):
        updates, state = opt.update({"a": jnp.array([1.0, -2.0, 0.5], dtype)}, state, params)
    rule = state.inner_state[0]
    assert rule.mu["a"].dtype == rule.nu["a"].dtype == jnp.float32
    assert updates["a"].dtype == dtype
    assert (updates["a"] != 0).all()


def test_the_first_moment_may_be_narrow() -> None:
    opt = make("avagrad", mu_dtype=jnp.bfloat16)
    found, (state, _) = run(opt, gradients())
    assert state.mu["w"].dtype == jnp.bfloat16
    assert state.nu["w"].dtype == jnp.float64
    assert 1e-6 < distance(found, run(make("avagrad"), gradients())[0]) < 0.1


@pytest.mark.parametrize("name", CLASSES)
def test_a_nan_stays_one_to_be_seen(name: str) -> None:
    opt = make(name, mask=None)
    w = jnp.ones(5)
    _, state = opt.update(w, opt.init(w), w)
    updates, _ = opt.update(jnp.array([1.0, math.nan, 1.0, 1.0, 1.0]), state, w)
    assert jnp.isnan(updates).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("bad", [1e30, math.inf, -math.inf])
def test_a_huge_gradient_does_avastep_no_harm(bad: float) -> None:
    with jax.enable_x64(False):
        opt, w = ours.avastep(0.1), jnp.zeros(8)
        state = opt.init(w)
        for t in range(20):
            updates, state = opt.update(jnp.ones(8).at[3].set(bad if t == 2 else 1.0), state)
            assert float(jnp.sqrt(jnp.mean(updates**2))) <= 0.1 * (1 + 1e-5)
            w = w + updates
    assert jnp.isfinite(w).all()


# --- several devices -----------------------------------------------------------------------------


def test_four_devices_take_the_steps_of_one() -> None:
    script = Path(__file__).with_name("four_devices.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"avagradw", "avastep"}
    for how in found.values():
        assert how["devices"] == 4
        assert how["jit"] < 1e-12
        assert how["shard_map"] < 1e-12
        assert how["pmap"] < 1e-12
        assert how["shard_map, without axis_name"] > 1e-3


# --- what is refused -----------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "learning_rate": (
        lambda: ours.avagrad(-1.0),
        "avagrad: learning_rate is -1.0, but must be a finite number of at least 0, or a schedule.",
    ),
    "no learning_rate": (lambda: ours.avastep(None), "avastep: learning_rate is None, but must be a finite"),
    "b1": (
        lambda: ours.avagradw(b1=1.0),
        "avagradw: b1 is 1.0, but must be a number from 0 up to, but not including, 1",
    ),
    "b2": (lambda: ours.scale_by_avastep(b2=-0.1), "scale_by_avastep: b2 is -0.1, but must be a number from 0"),
    "eps": (lambda: ours.delayed_adam(eps=0.0), "delayed_adam: eps is 0.0, but must be a number from 1e-15 to 1e+15"),
    "an array": (lambda: ours.avagrad(eps=jnp.array(0.0)), "avagrad: eps is 0.0, but must be a number from 1e-15"),
    "weight_decay": (lambda: ours.avagrad(weight_decay=math.nan), "avagrad: weight_decay is nan, but must be a finite"),
    "norm": (lambda: ours.avagrad(norm=3), "avagrad: norm is 3, but must be 1 or 2."),
    "no norm": (lambda: ours.avastep(norm=None), "avastep: norm is None, but must be 1 or 2."),
    "clip_update": (lambda: ours.avastep(clip_update=0), "avastep: clip_update is 0, but must be a number above 0"),
    "clip_moment": (lambda: ours.avastep(clip_moment=1), "avastep: clip_moment is 1, but must be a number above 1"),
    "active_only": (lambda: make("avagrad", active_only=1), "avagrad: active_only is 1, but must be True or False."),
    "mu_dtype": (lambda: ours.avagrad(mu_dtype="int8"), "avagrad: mu_dtype is 'int8', but must be a dtype of real"),
    "no dtype": (lambda: ours.avagrad(mu_dtype="half-ish"), "avagrad: mu_dtype is 'half-ish', but must be a dtype"),
    "two": (
        lambda: ours.avagrad(clip_update=1.0, bias_correction=False),
        "avagrad: clip_update is 1.0 and bias_correction is False, but clip_update must be None then",
    ),
    "integers": (
        lambda: ours.avagrad().init({"a": [jnp.ones(2, int)]}),
        "avagrad: params['a'][0] is int64, but must be of real floating-point numbers.",
    ),
    "no params": (
        lambda: (opt := ours.avagrad(weight_decay=0.1)).update(jnp.ones(2), opt.init(jnp.ones(2))),
        "avagrad: weight_decay is 0.1, so params must be given: update(..., params).",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_gets_a_sentence(bad: str) -> None:
    make_it, sentence = BAD[bad]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make_it()
    assert str(caught.value).startswith(sentence)


def test_without_weight_decay_no_params_are_needed() -> None:
    opt = ours.avastep()
    assert opt.update(jnp.ones(2), opt.init(jnp.ones(2)))[0].tolist() == [0.0, 0.0]


SCRIPT = """
import sys
import avagrad
for name in ("jax", "optax"):
    sys.modules[name] = None
    try:
        import avagrad.optax
    except ImportError as error:
        print(error)
    del sys.modules[name]
"""


def test_where_jax_is_not_installed_the_import_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (
        done.stdout.splitlines() == ["avagrad.optax needs jax and optax: pip install '.[jax]' in avagrad's folder."] * 2
    ), done.stderr
