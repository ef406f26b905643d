"""The choice of a backend for each parameter group."""

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from avagrad.optim.arguments import callers_level
from avagrad.optim.backends import fused, native
from avagrad.optim.backends.foreach import Foreach
from avagrad.optim.backends.loop import Backend, Loop
from avagrad.optim.rules import Rule
from avagrad.optim.sharding import local_part

if TYPE_CHECKING:
    from avagrad.optim.optimizer import RuleOptimizer
    from avagrad.optim.params import ParamView

__all__ = ["backends_for", "prefers_foreach", "wants_fused"]


def backends_for(
    opt: "RuleOptimizer", views: Sequence["ParamView"], groups: Sequence[dict[str, Any]], rules: Sequence[Rule]
) -> list[Backend]:
    """Return the backends that move these parameters; each moves a part of them."""
    by_group: dict[int, list[ParamView]] = {}
    for view in views:
        by_group.setdefault(view.group, []).append(view)
    chosen: dict[int, type[Backend]] = {}
    for index, members in by_group.items():
        group, chosen[index] = groups[index], Loop
        if opt._has_kernels:
            if wants_fused(group, [local_part(p) for p in group["params"]]) and fused.fit(members):
                chosen[index] = fused.Fused
            elif prefers_foreach(group, [view.w for view in members]):
                chosen[index] = Foreach
    for_kernels = [view for view in views if chosen[view.group] is fused.Fused]
    chosen |= dict.fromkeys(fused.sharing_memory(for_kernels), Foreach)
    kinds: dict[type[Backend], list[ParamView]] = {}  # in the order of the first group of each
    for index, members in by_group.items():
        kinds.setdefault(chosen[index], []).extend(members)
    return [kind(members, rules) for kind, members in kinds.items()]


def wants_fused(group: dict[str, Any], local: Sequence[Tensor]) -> bool:
    """Return whether a group wants the fused backend, explicitly or by default, and supports it."""
    if group["fused"] is False or (group["fused"] is None and group["foreach"] is not None):
        return False
    return fused.unsupported_reason(local) is None


def prefers_foreach(group: dict[str, Any], params: list[Tensor]) -> bool:
    """Choose between foreach and the loop: as torch does, and foreach if the native code is missing."""
    if group["foreach"] is not None or group["fused"] is not None:
        return bool(group["foreach"])
    _, missing = native.load()
    if missing is not None and fused.unsupported_reason(params) == missing:
        _warn_of_missing_native(missing)
        return True
    return _default_to_fused_or_foreach(params, differentiable=False, use_fused=False)[1]


@functools.cache
def _warn_of_missing_native(reason: str) -> None:
    """Warn once per process why steps on the CPU are slow."""
    warnings.warn(
        f"{reason}. Until then steps use foreach, which takes several times as long; set foreach=True to "
        "silence this warning.",
        stacklevel=callers_level(),
    )
