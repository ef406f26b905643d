"""Loading a state: exact to the bit, also from other optimizers; nothing changes if it does not fit."""

import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from avagrad.optim.arguments import callers_level
from avagrad.optim.params import Group
from avagrad.optim.rounding import moment_dtype
from avagrad.optim.sharding import PLAIN, is_dtensor, local_part

if TYPE_CHECKING:
    from avagrad.optim.optimizer import RuleOptimizer

__all__ = ["load_state_dict"]

_MUST_BE = "must be that of an optimizer, with state and param_groups"


def load_state_dict(opt: "RuleOptimizer", state_dict: StateDict, load: Callable[[StateDict], None]) -> None:
    """Load a state by torch's ``load``, and undo its casts of dtypes."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{type(opt).__name__}: state_dict is {state_dict!r}, but {_MUST_BE}.")
    fitting: StateDict = {}

    def adapt(_: Optimizer, loaded: StateDict) -> StateDict:
        fitting.update(_fitting(opt, loaded))
        if opt._in_backward is not None:
            opt._in_backward.end()  # drops the step that backward has begun
        return fitting

    def restore_dtypes(_: Optimizer) -> None:
        """Copy the values again: torch has cast every moment to its parameter's dtype."""
        for saved_id, p, group in _matched(opt, fitting):
            for key, value in fitting["state"].get(saved_id, {}).items():
                if key == "step":
                    device = p.device if group["capturable"] else torch.device("cpu")
                    opt.state[p][key] = value.to(device=device, dtype=torch.float32, copy=True)
                elif key in opt._state_tensors(group) or key == "compensation":
                    if is_dtensor(p) and not is_dtensor(value) and value.shape == p.shape:  # whole, on every rank
                        from torch.distributed.tensor import distribute_tensor

                        value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
                    dtype = p.dtype if key == "compensation" else moment_dtype(p.dtype)
                    opt.state[p][key] = value.to(device=p.device, dtype=dtype, copy=True)

    # After the user's own pre-hooks have changed the state, and before their post-hooks see the result.
    handles = (
        opt.register_load_state_dict_pre_hook(adapt),
        opt.register_load_state_dict_post_hook(restore_dtypes, prepend=True),
    )
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()
    _warn_foreign(opt, state_dict)


def _warn_foreign(opt: "RuleOptimizer", loaded: StateDict) -> None:
    """Warn about what was loaded from another optimizer's state."""
    groups = loaded["param_groups"]
    reasons = [reason for group in groups if (reason := opt._foreign_reason(group))]
    if not reasons:
        return
    adopted = [item for group in groups for item in opt._adopted(group).items()]
    values = {key: dict.fromkeys(repr(value) for name, value in adopted if name == key) for key, _ in adopted}
    also = "".join(f", {key}={' and '.join(each)}" for key, each in values.items())
    wanted = {"step", *chain.from_iterable(opt._state_tensors(group) for group in opt.param_groups)}
    states = [state for state in loaded["state"].values() if isinstance(state, dict)]
    unused = dict.fromkeys(key for state in states for key in state if key not in wanted)
    dropped = f" Not used: {', '.join(map(str, unused))}." if unused else ""
    lr = " Loading a scheduler's state as well restores that optimizer's lr: make a new scheduler, or set its base_lrs."
    warnings.warn(
        f"{type(opt).__name__}: the loaded state is from another optimizer ({reasons[0]}). Its moments and step counts"
        f"{also} are loaded; all other hyper-parameters are kept.{dropped}{'' if adopted else lr}",
        stacklevel=callers_level(),
    )


def _fitting(opt: "RuleOptimizer", loaded: StateDict) -> StateDict:
    """Return ``loaded`` with missing hyper-parameters filled in, or reject it if it does not fit."""
    if not {"state", "param_groups"} <= loaded.keys():
        given = f"a dict that begins with the keys {list(loaded)[:5]}"
        raise ValueError(f"{type(opt).__name__}: state_dict is {given}, but {_MUST_BE}.")
    groups = loaded["param_groups"]
    saved_sizes, sizes = ([len(group["params"]) for group in each] for each in (groups, opt.param_groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"{type(opt).__name__}: the loaded state has {saved_sizes} parameters in its groups, but must have {sizes}"
            ": make the optimizer with the same groups."
        )
    foreign = any(opt._foreign_reason(group) for group in groups)
    if foreign:
        pairs = zip(opt.param_groups, groups, strict=True)
        groups = [{**own, **opt._adopted(saved), "params": saved["params"]} for own, saved in pairs]
    groups = [{**opt.defaults, **group} for group in groups]
    for own, group in zip(opt.param_groups, groups, strict=True):
        opt._check(group)
        opt._check_params({**group, "params": own["params"]})
    opt._check_together(groups)
    fitting = {**loaded, "param_groups": groups, "state": dict(loaded["state"])}
    for saved_id, p, group in _matched(opt, fitting):
        if (values := loaded["state"].get(saved_id, {})) != {}:
            fitting["state"][saved_id] = _fitting_state(opt, p, group, values, foreign)
    return fitting


def _fitting_state(
    opt: "RuleOptimizer", p: Tensor, group: Group, values: dict[str, Any], foreign: bool
) -> dict[str, Any]:
    """Return the state of one parameter, or reject it."""
    owner, about = type(opt).__name__, f"of a parameter of shape {tuple(p.shape)}"
    wanted = {"step": False, **opt._state_tensors(group)}
    if not isinstance(values, dict):
        raise ValueError(f"{owner}: the loaded state {about} is {values!r}, but must be a dict of tensors.")
    if lacking := [key for key in wanted if values.get(key) is None]:
        raise ValueError(
            f"{owner}: the loaded state {about} has no {', '.join(lacking)}, but must have {', '.join(wanted)}."
        )
    values = {key: values[key] for key in wanted} if foreign else dict(values)
    if isinstance(values["step"], (int, float)):  # in older versions of torch
        values["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
    for key, has_shape_of_p in {**wanted, "compensation": True}.items():
        if key not in values:
            continue
        value, shape = values[key], tuple(p.shape) if has_shape_of_p else ()
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex():
            raise ValueError(f"{owner}: the loaded {key} {about} is {value!r}, but must be a tensor, real and dense.")
        if value.shape != shape:
            raise ValueError(
                f"{owner}: the loaded {key} has the shape {tuple(value.shape)}, but must have {shape}, for a "
                f"parameter of shape {tuple(p.shape)}."
            )
        _reject_bad_numbers(f"{owner}: the loaded {key} {about}", key, value, finite=opt._needs_finite_state)
    return values


@torch.no_grad()
def _reject_bad_numbers(what: str, key: str, value: Tensor, *, finite: bool) -> None:
    value = local_part(value)
    if not value.numel() or value.is_meta or type(value) not in PLAIN:
        return  # it has no values to check
    if value.isnan().any():
        raise ValueError(f"{what} holds a NaN, but must hold numbers: it is from a training that has failed.")
    if finite and value.isinf().any():
        raise ValueError(f"{what} holds an infinity, but must hold finite numbers: the norm runs over all of them.")
    if (key == "step" or key.endswith("_sq")) and (value < 0).any():
        raise ValueError(f"{what} holds {value.min().item():g}, but must hold numbers of at least 0.")


def _matched(opt: "RuleOptimizer", state_dict: StateDict) -> list[tuple[Any, Tensor, Group]]:
    """Return (saved id, parameter, group) for each parameter, in order."""
    return [
        (saved_id, p, {**own, **saved})
        for own, saved in zip(opt.param_groups, state_dict["param_groups"], strict=True)
        for p, saved_id in zip(own["params"], saved["params"], strict=True)
    ]
