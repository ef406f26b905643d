"""AvaGrad, AvaGradW, Delayed Adam and AvaStep for JAX, as gradient transformations of optax.

They take the same steps as the classes of :mod:`avagrad.optim`: in float64 the numbers agree to 1e-12. Each method has
an alias, such as :func:`avastep`, and a transformation without the learning rate, such as :func:`scale_by_avastep`.

>>> params = {"w": jnp.array([1.0, -2.0])}
>>> opt = avastep(learning_rate=0.01)
>>> state = opt.init(params)
>>> for _ in range(3):
...     gradients = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
...     updates, state = opt.update(gradients, state, params)
...     params = optax.apply_updates(params, updates)
>>> [round(x, 4) for x in params["w"].tolist()]
[0.98, -1.98]

**The first gradient** of a leaf only fills its moments, since there is no earlier one to take rates from: the leaf is
not moved and not decayed. Because of this the decay is an argument of the ``scale_by`` functions:
``optax.add_decayed_weights`` would also decay in that step.

**A leaf without a gradient** is ``None`` (or ``optax.MaskedNode()``) in the updates. It is not moved and not decayed,
its update is zeros, and its state does not change. Each leaf counts its own gradients, so its first gradient may come
late. A gradient of zeros is a gradient. Under ``jit`` each pattern of missing leaves is compiled once. A leaf that is
also missing in the parameters has no state.

**The norm** runs over all leaves that the transformation sees, whether or not they have a gradient in this step.
``optax.multi_transform`` and ``optax.partition`` pass each label only its own leaves, so each label has its own norm.
For one norm, scale all leaves together, and vary the learning rate afterwards:

>>> by_label = {"slow": optax.scale(-0.01), "fast": optax.scale(-0.1)}
>>> opt = optax.chain(scale_by_avagrad(), optax.multi_transform(by_label, {"w": "slow", "b": "fast"}))

**Several devices.** Under ``jit`` with sharded parameters there is nothing to do. Inside ``jax.shard_map`` and
``jax.pmap`` a device sees only its own part: if parameters are sharded over an axis, pass it as ``axis_name``, and two
numbers are summed over it. All leaves must then be sharded over that axis. Replicated parameters need no
``axis_name``.

**Hyper-parameters** may be traced, so ``optax.inject_hyperparams`` and ``jax.vmap`` work. Traced values are not
checked. With ``inject_hyperparams``, list a ``mask`` that is a function and a ``mu_dtype`` that is a type in its
``static_args``; with bfloat16 parameters set its ``hyperparam_dtype`` to float32, since 0.999 is 1 in bfloat16.

**To maximize**, put ``optax.scale(-1.0)`` first in a chain.

**Half precision.** The moments of bfloat16 and float16 leaves are float32. Updates have the dtype of the gradients.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
except ImportError as error:
    raise ImportError("avagrad.optax needs jax and optax: pip install '.[jax]' in avagrad's folder.") from error

from avagrad.optim.arguments import BOOL, Allowed, check_values, is_finite
from avagrad.optim.avagrad import DelayedOptimizer
from avagrad.optim.rules import LARGEST

__all__ = [
    "DelayedState",
    "avagrad",
    "avagradw",
    "avastep",
    "delayed_adam",
    "scale_by_avagrad",
    "scale_by_avastep",
    "scale_by_delayed_adam",
]

_BETA = ("a number from 0 up to, but not including, 1", lambda x: is_finite(x) and 0 <= x < 1)
_ALLOWED: Allowed = {
    **DelayedOptimizer._allowed,
    "learning_rate": (
        "a finite number of at least 0, or a schedule",
        lambda x: callable(x) or (is_finite(x) and x >= 0),
    ),
    "b1": _BETA,
    "b2": _BETA,
    "norm": ("1 or 2", lambda x: is_finite(x) and x in (1, 2)),
    "decoupled_weight_decay": BOOL,
    "mu_dtype": ("a dtype of real floating-point numbers, or None", lambda x: x is None or _is_real(x)),
}


class DelayedState(NamedTuple):
    """The state of all transformations here.

    Attributes:
        count: the number of gradients of each leaf so far, in the order of ``jax.tree.leaves``.
        mu: the first moments.
        nu: the second moments.

    >>> state = scale_by_avagrad().init({"b": jnp.zeros(3), "w": jnp.zeros((2, 3))})
    >>> state.count
    Array([0, 0], dtype=int32)
    """

    count: Any
    mu: Any
    nu: Any


@dataclass(frozen=True)
class _Rule:
    """The delayed rule (see :mod:`avagrad.optim.rules`); a variant is a flag. Numbers may be traced, flags may not."""

    owner: str
    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    decoupled_weight_decay: bool
    mask: Any
    mu_dtype: Any
    clip_update: Any
    clip_moment: Any = None
    norm: Any = 2
    axis_name: Any = None
    bias_correction: bool = True
    active_only: bool = False
    normalised: bool = True  # else gamma is 1
    norm_of_step: bool = (
        False  # gamma normalises the predicted step, and gradients are bounded (AvaStep); else the rates
    )

    def __post_init__(self) -> None:
        _check(self.owner, vars(self))
        if self.clip_update is not None and not self.bias_correction:
            raise ValueError(
                f"{self.owner}: clip_update is {self.clip_update!r} and bias_correction is False, but clip_update must "
                "be None then: the first gradients have no typical size yet."
            )

    def init(self, params: Any) -> DelayedState:
        """Return the state before the first gradient."""
        leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_missing)
        for path, p in leaves:
            if not _is_missing(p) and not _is_real(jnp.result_type(p)):
                found = f"params{jax.tree_util.keystr(path)} is {jnp.result_type(p)}"
                raise ValueError(f"{self.owner}: {found}, but must be of real floating-point numbers.")
        nu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.promote_types(jnp.result_type(p), jnp.float32)), params)
        mu = jax.tree.map(lambda v: jnp.zeros_like(v, dtype=self.mu_dtype), nu)
        return DelayedState(jnp.zeros(len(leaves), jnp.int32), mu, nu)

    def update(self, updates: Any, state: DelayedState, params: Any = None) -> tuple[Any, DelayedState]:
        """Return the direction of a step, to be multiplied by minus the learning rate, and the new state."""
        tree: Any = jax.tree.structure(state.nu, is_leaf=_is_missing)
        g, m, v = (tree.flatten_up_to(x) for x in (updates, state.mu, state.nu))
        w: list[Any] = [None] * len(g) if params is None else tree.flatten_up_to(params)
        decays, gamma = self.decays(tree, params), self.gamma(state.count, v)
        has_gradient = [not _is_missing(x) for x in g]
        for i, has_state in enumerate(not _is_missing(x) for x in v):
            if has_gradient[i] and not has_state:
                path, _ = jax.tree_util.tree_leaves_with_path(state.nu, is_leaf=_is_missing)[i]
                found = f"updates{jax.tree_util.keystr(path)} is given"
                raise ValueError(f"{self.owner}: {found}, but must be missing as it was in the params of init.")
            if has_gradient[i]:
                g[i], m[i], v[i] = self.step(g[i], m[i], v[i], state.count[i], gamma, w[i] if decays[i] else None)
            elif has_state:
                g[i] = jnp.zeros_like(v[i] if w[i] is None else w[i])
        count = jnp.where(jnp.array(has_gradient, bool), optax.safe_increment(state.count), state.count)
        return tree.unflatten(g), DelayedState(count, tree.unflatten(m), tree.unflatten(v))

    def decays(self, tree: Any, params: Any) -> list[Any]:
        """Return for each leaf whether it decays."""
        if not _is_traced(self.weight_decay) and self.weight_decay == 0:
            return [False] * tree.num_leaves
        if params is None:
            value = "traced" if _is_traced(self.weight_decay) else self.weight_decay
            raise ValueError(f"{self.owner}: weight_decay is {value}, so params must be given: update(..., params).")
        mask: Any = True if self.mask is None else self.mask
        if (leaves := jax.tree.leaves(mask)) and all(map(callable, leaves)):
            mask = mask(params)
        expanded = jax.tree.map(lambda decays, below: jax.tree.map(lambda _: decays, below), mask, params)
        return list(tree.flatten_up_to(expanded))

    def rates(self, v: Any, count: Any) -> tuple[Any, Any]:
        """Return the typical sizes of gradients and the rates, from past gradients only: ``r_t`` and ``eta_t``.

        With bias correction they are invalid for a leaf without a gradient so far.
        """
        r = jnp.sqrt(v / _correction(self.b2, jnp.maximum(count, 1), v.dtype) if self.bias_correction else v)
        eta = 1 / (r + self.eps)
        return r, eta * jnp.sign(v) if self.active_only else eta  # v is exactly 0: no gradient so far

    def gamma(self, count: Any, leaves: list[Any]) -> Any:
        """Return the factor that normalises the rates, or the predicted step."""
        if not self.normalised:
            return 1.0
        # The terms are multiplied by unit, so that their squares fit in float32 at every eps.
        unit = jnp.maximum(1.0, self.eps) if self.norm_of_step else jnp.sqrt(self.eps)
        total = d = jnp.zeros((), jnp.result_type(float))
        for i, v in enumerate(leaves):
            if not _is_missing(v):
                r, eta = self.rates(v, count[i])
                x = unit * r * eta if self.norm_of_step else unit * eta
                power_sum = jnp.sum(jnp.where(self.norm == 2, x * x, x), dtype=total.dtype)
                size = jnp.sum(jnp.sign(v), dtype=d.dtype) if self.active_only else float(v.size)
                counts = count[i] > 0 if self.bias_correction else True
                total, d = total + jnp.where(counts, power_sum, 0.0), d + jnp.where(counts, size, 0.0)
        if self.axis_name is not None:
            total, d = jax.lax.psum((total, d), self.axis_name)
        none = total == 0  # counts, and all rates are 0
        mean = jnp.where(none, 1.0, total) / jnp.where(none, 1.0, d)
        return unit / jnp.where(self.norm == 2, jnp.sqrt(mean), mean)

    def step(self, g: Any, m: Any, v: Any, count: Any, gamma: Any, w: Any) -> tuple[Any, Any, Any]:
        """Return the direction and the moments of one leaf; ``w`` is None if it does not decay."""
        r, eta = self.rates(v, count)
        decay = None if w is None else self.weight_decay * jnp.asarray(w, v.dtype)
        x, mu = jnp.asarray(g, v.dtype), m.astype(v.dtype)
        if decay is not None and not self.decoupled_weight_decay:  # decay alone does not make a coordinate active
            x = x + (jnp.where((v == 0) & (x == 0), 0.0, decay) if self.active_only else decay)
        if self.norm_of_step:
            x = jnp.clip(x, -LARGEST, LARGEST)
        if self.clip_moment is not None:
            most = jnp.where(r > 0, self.clip_moment * r, math.inf)
            x = jnp.clip(x, -most, most)
        mu = self.b1 * mu + (1 - self.b1) * x
        m_hat = mu / _correction(self.b1, count + 1, v.dtype) if self.bias_correction else mu
        if self.clip_update is not None:
            m_hat = jnp.clip(m_hat, -self.clip_update * r, self.clip_update * r)
        u = jnp.asarray(gamma, v.dtype) * eta * m_hat
        if decay is not None and self.decoupled_weight_decay:
            u = u + decay
        if self.bias_correction:  # a first gradient only fills the moments
            u = jnp.where(count > 0, u, 0.0)
        nu = self.b2 * v + (1 - self.b2) * x * x
        return u.astype(jnp.result_type(g)), mu.astype(m.dtype), nu.astype(v.dtype)


def scale_by_delayed_adam(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    mask: Any = None,
    bias_correction: bool = True,
    active_only: bool = False,
    clip_update: Any = None,
    mu_dtype: Any = None,
) -> Any:
    """Scale updates by the rates of :class:`avagrad.DelayedAdam`. Args are those of :func:`scale_by_avagrad`.

    There is no norm, so ``axis_name`` is not needed.

    >>> opt = scale_by_delayed_adam()
    >>> state = opt.init(jnp.zeros(2))
    >>> for _ in range(2):
    ...     updates, state = opt.update(jnp.array([1.0, -3.0]), state)
    >>> [round(x, 4) for x in updates.tolist()]
    [1.0, -1.0]
    """
    return _scaling("scale_by_delayed_adam", {**locals(), "normalised": False})


def scale_by_avagrad(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 0.1,
    weight_decay: Any = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    mask: Any = None,
    bias_correction: bool = True,
    norm: Any = 2,
    active_only: bool = False,
    clip_update: Any = None,
    mu_dtype: Any = None,
    axis_name: Any = None,
) -> Any:
    """Scale updates by the rates of :class:`avagrad.AvaGrad`, divided by their root mean square over all leaves.

    Args:
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: how adaptive the method is: like Adam if small, like SGD if large; from 1e-15 to 1e15.
        weight_decay: added to the gradient, times the parameter (L2). If it is not 0, ``update`` needs ``params``.
        decoupled_weight_decay: add the decay to the update instead, as AdamW does; not at a leaf's first gradient.
        mask: which leaves decay: a tree of bools with the structure of the parameters or a prefix of it, or a function
            that returns one for the parameters; None for all.
        bias_correction: divide the moments by 1 - beta^t. False is the paper's algorithm as printed: a first
            gradient then moves a leaf, and all leaves count in the norm from the start.
        norm: 2 for the root mean square of the rates (the paper), 1 for their mean.
        active_only: coordinates that have never had a gradient other than 0 do not move, and do not count in the norm.
        clip_update: clamp a coordinate's momentum to this multiple of the typical size of its gradient; None is no
            clamp. Not with ``bias_correction=False``.
        mu_dtype: the dtype of the first moments; None for the second moments' (at least float32).
        axis_name: in ``shard_map`` and ``pmap`` the axis, or axes, over which all leaves are sharded.

    >>> opt = scale_by_avagrad(eps=1.0)
    >>> state = opt.init(jnp.zeros(2))
    >>> for _ in range(2):
    ...     updates, state = opt.update(jnp.array([1.0, 1.0]), state)
    >>> [round(x, 4) for x in updates.tolist()]
    [1.0, 1.0]
    """
    return _scaling("scale_by_avagrad", locals())


def scale_by_avastep(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    mask: Any = None,
    clip_update: Any = 1.0,
    clip_moment: Any = None,
    norm: Any = 2,
    mu_dtype: Any = None,
    axis_name: Any = None,
) -> Any:
    """Scale updates as :class:`avagrad.AvaStep` does: the root mean square of all is at most ``clip_update``.

    The arguments are those of :func:`scale_by_avagrad`, without ``bias_correction`` and ``active_only``, which are
    always on, and with these:

    - ``norm``: 2 for the root mean square of the predicted step, 1 for the mean of its absolute values
    - ``clip_moment``: clamp gradients to this multiple of their typical size; None is no clamp

    >>> opt = scale_by_avastep(eps=1.0)
    >>> state = opt.init(jnp.zeros(2))
    >>> for _ in range(2):
    ...     updates, state = opt.update(jnp.array([1.0, 1.0]), state)
    >>> [round(x, 4) for x in updates.tolist()]
    [1.0, 1.0]
    """
    return _scaling("scale_by_avastep", {**locals(), "active_only": True, "norm_of_step": True})


def delayed_adam(
    learning_rate: Any = 1e-3,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    mask: Any = None,
    bias_correction: bool = True,
    active_only: bool = False,
    clip_update: Any = None,
    mu_dtype: Any = None,
) -> Any:
    """Delayed Adam, as :class:`avagrad.DelayedAdam`: Adam whose rates come only from past gradients.

    ``learning_rate`` is a number or a schedule. All other args are those of :func:`scale_by_avagrad`.

    >>> params, opt = jnp.array([1.0, -2.0]), delayed_adam(0.01)
    >>> state = opt.init(params)
    >>> for _ in range(3):
    ...     updates, state = opt.update(2 * params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> [round(x, 4) for x in params.tolist()]
    [0.98, -1.98]
    """
    return _optimizer("delayed_adam", {**locals(), "decoupled_weight_decay": False, "normalised": False})


def avagrad(
    learning_rate: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 0.1,
    weight_decay: Any = 0.0,
    *,
    mask: Any = None,
    bias_correction: bool = True,
    norm: Any = 2,
    active_only: bool = False,
    clip_update: Any = None,
    mu_dtype: Any = None,
    axis_name: Any = None,
) -> Any:
    """AvaGrad, as :class:`avagrad.AvaGrad`: Delayed Adam, its rates divided by their root mean square.

    ``learning_rate`` is a number or a schedule, on SGD's scale (divided by 1 - momentum), not Adam's. All other args
    are those of :func:`scale_by_avagrad`.

    >>> params, opt = jnp.array([1.0, -2.0]), avagrad(0.1)
    >>> state = opt.init(params)
    >>> for _ in range(3):
    ...     updates, state = opt.update(2 * params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> [round(x, 4) for x in params.tolist()]
    [0.5199, -1.4965]
    """
    return _optimizer("avagrad", {**locals(), "decoupled_weight_decay": False})


def avagradw(
    learning_rate: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 0.1,
    weight_decay: Any = 0.0,
    *,
    mask: Any = None,
    bias_correction: bool = True,
    norm: Any = 2,
    active_only: bool = False,
    clip_update: Any = None,
    mu_dtype: Any = None,
    axis_name: Any = None,
) -> Any:
    """AvaGrad with decoupled weight decay, as :class:`avagrad.AvaGradW`. Args are those of :func:`avagrad`.

    >>> params, opt = jnp.array([1.0, -2.0]), avagradw(0.1, weight_decay=0.01)
    >>> state = opt.init(params)
    >>> for _ in range(3):
    ...     updates, state = opt.update(2 * params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> [round(x, 4) for x in params.tolist()]
    [0.5182, -1.4929]
    """
    return _optimizer("avagradw", {**locals(), "decoupled_weight_decay": True})


def avastep(
    learning_rate: Any = 1e-3,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    mask: Any = None,
    clip_update: Any = 1.0,
    clip_moment: Any = None,
    norm: Any = 2,
    mu_dtype: Any = None,
    axis_name: Any = None,
) -> Any:
    """AvaStep, as :class:`avagrad.AvaStep`: steps of a known size, at every ``eps``.

    ``learning_rate`` is a number or a schedule, on Adam's scale. All other args are those of
    :func:`scale_by_avastep`.

    >>> params, opt = jnp.array([1.0, -2.0]), avastep(0.01)
    >>> state = opt.init(params)
    >>> for _ in range(3):
    ...     updates, state = opt.update(2 * params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> [round(x, 4) for x in params.tolist()]
    [0.98, -1.98]
    """
    return _optimizer("avastep", {**locals(), "active_only": True, "norm_of_step": True})


def _scaling(owner: str, arguments: dict[str, Any]) -> Any:
    rule = _Rule(owner, **arguments)
    return optax.GradientTransformation(rule.init, rule.update)


def _optimizer(owner: str, arguments: dict[str, Any]) -> Any:
    learning_rate = arguments.pop("learning_rate")
    _check(owner, {"learning_rate": learning_rate})
    return optax.chain(_scaling(owner, arguments), optax.scale_by_learning_rate(learning_rate))


def _check(owner: str, arguments: dict[str, Any]) -> None:
    """Reject values that are not allowed; a traced one has no value yet."""
    known = {key: x for key, x in arguments.items() if not _is_traced(x)}
    arrays = {key: x.item() for key, x in known.items() if isinstance(x, jax.Array | np.ndarray) and x.size == 1}
    check_values(owner, {**known, **arrays}, _ALLOWED)


def _correction(beta: Any, t: Any, dtype: Any) -> Any:
    """Return ``1 - beta^t`` for ``t >= 1``, to the last digit also in float32."""
    if isinstance(beta, float | int):
        return -jnp.expm1(t.astype(dtype) * (math.log(beta) if beta > 0 else -math.inf))
    return -jnp.expm1(t.astype(dtype) * jnp.log(beta))


def _is_missing(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _is_real(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
