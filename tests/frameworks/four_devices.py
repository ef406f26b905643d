"""Run by test_optax.py in a process of its own: optimizers of avagrad.optax on four CPU devices, compared with one."""

import functools
import json
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import avagrad.optax as ours  # noqa: E402

STEPS = 50
LR = {"avagradw": 0.3, "avastep": 0.02}


def train(opt: Any, params: Any, every: Any) -> Any:
    """Take all steps; the gradients are stacked."""

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = opt.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, opt.init(params)), every)[0][0]


def distance(found: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def main() -> None:
    rng = np.random.default_rng(0)
    shapes = {"b": (8,), "w": (4, 6)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    # Each device's part has gradients of another size: so a norm of a part is not the norm of the whole.
    sizes = {"b": np.repeat([1, 3, 9, 27], 2), "w": np.array([[1.0], [5.0], [25.0], [125.0]])}
    every = {name: sizes[name] * rng.normal(size=(STEPS, *shape)) for name, shape in shapes.items()}
    mesh, P = jax.sharding.Mesh(np.array(jax.devices()), ("x",)), jax.sharding.PartitionSpec
    rows, steps = jax.sharding.NamedSharding(mesh, P("x")), jax.sharding.NamedSharding(mesh, P(None, "x"))
    spread, spread_steps = jax.device_put(params, rows), jax.device_put(every, steps)

    found = {}
    for name, lr in LR.items():
        method: Any = getattr(ours, name)
        options: dict[str, Any] = {"learning_rate": lr, "eps": 0.03, "weight_decay": 0.05}
        plain, summed = (functools.partial(train, method(**options, **more)) for more in ({}, {"axis_name": "x"}))
        one, four = jax.jit(plain)(params, every), jax.jit(plain)(spread, spread_steps)
        specs = {"mesh": mesh, "in_specs": (P("x"), P(None, "x")), "out_specs": P("x")}
        parts, alone = (jax.jit(jax.shard_map(run, **specs))(params, every) for run in (summed, plain))
        in_four = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), params)
        steps_in_four = jax.tree.map(lambda x: x.reshape(STEPS, 4, -1, *x.shape[2:]), every)
        mapped = jax.pmap(summed, axis_name="x", in_axes=(0, 1))(in_four, steps_in_four)
        found[name] = {
            "devices": len(four["w"].sharding.device_set),
            "jit": distance(four, one),
            "shard_map": distance(parts, one),
            "pmap": distance(jax.tree.map(lambda x, like: x.reshape(like.shape), mapped, one), one),
            "shard_map, without axis_name": distance(alone, one),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
