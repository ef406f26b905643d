"""Params: an immutable snapshot of an optimizer's groups, parameters and states."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from avagrad.optim.backends.choose import backends_for
from avagrad.optim.backends.loop import Backend, batch_size
from avagrad.optim.rounding import is_half
from avagrad.optim.rules import Rule, Scalar, scalar_dtype
from avagrad.optim.sharding import PLAIN, Sharding, is_dtensor, local_part

if TYPE_CHECKING:
    from avagrad.optim.optimizer import RuleOptimizer

__all__ = ["ParamView", "Params"]

Group = dict[str, Any]

# Keys of a group, besides the flags of its rule, that decide which tables and kernels a step uses.
_LAYOUT_KEYS = ("foreach", "fused", "capturable", "rounding", "rounding_seed")


class ParamView(NamedTuple):
    """A parameter with its state as a backend sees it: the tensors that are on this rank."""

    param: Tensor  # the user's
    w: Tensor
    step: Tensor
    state: tuple[Tensor, ...]  # in the order of the optimizer's state keys
    compensation: Tensor | None  # the rounding error so far
    group: int
    param_id: int  # index among all parameters of the optimizer
    offset: int  # coordinates of small parameters of the group before it, whether or not they have a state
    is_small: bool  # foreach joins it with others
    rounding: str
    seed: int
    on_host: bool  # whether the step count may be read

    def step_value(self) -> Scalar:
        """Return the step count: a number, or a tensor if the host must not read it."""
        return self.step.item() if self.on_host else self.step.to(scalar_dtype(self.step.device))

    def gradient(self) -> Tensor | None:
        """Return the part of the gradient that is on this rank."""
        g = self.param.grad
        return g if g is None or self.w is self.param else local_part(g, like=self.param)


class Params:
    """An immutable snapshot of the parameters that have a state.

    It is taken when a step begins and something has changed since the last one. :meth:`matches` checks whether it
    still describes the optimizer. ``backends`` move the parameters; their tables live as long as the snapshot.
    """

    def __init__(self, opt: "RuleOptimizer", rules: Sequence[Rule], *, placeholders: bool = False) -> None:
        """Take the snapshot. With ``placeholders`` parameters that count without a state get one of zeros."""
        groups = opt.param_groups
        self.params: list[list[Tensor]] = [list(group["params"]) for group in groups]
        self.sharding: Sharding | None = opt._sharding()
        self.views: list[ParamView] = []
        self.others: list[Tensor] = []  # those without a view
        memory = Counter(_memory_of(p) for ps in self.params for p in ps)
        param_id = 0
        for index, (group, rule) in enumerate(zip(groups, rules, strict=True)):
            offset = 0
            for p in group["params"]:
                state = opt.state.get(p)
                if not state and placeholders and rule.counts_from_start and p.requires_grad:
                    state = opt._new_state(p, group, expanded=True)
                numel = 0 if is_lazy(p) else local_part(p).numel()
                is_small = numel <= batch_size(p.device) // 4 and (not numel or memory[_memory_of(p)] == 1)
                if state and not _is_frozen_from_start(p, state, rule):
                    self.views.append(_view(opt, p, state, group, (index, param_id, offset, is_small)))
                else:
                    self.others.append(p)
                param_id += 1
                offset += numel if is_small else 0
        self.devices = list(dict.fromkeys(view.w.device for view in self.views))
        self.has_dtensors = any(is_dtensor(view.param) for view in self.views)
        self.backends: list[Backend] = backends_for(opt, self.views, groups, rules)
        self._found = {id(view.param): (each, i) for each in self.backends for i, view in enumerate(each.views)}

        # What matches() compares with.
        self._layout = _layout(groups, rules)
        self._state_values = list(_state_values(opt))
        tensors = chain.from_iterable((view.param, view.step, *view.state, view.compensation) for view in self.views)
        self._addressed = [x for x in tensors if x is not None and type(x) in PLAIN]
        self._addresses = self._current_addresses(opt)
        self._freezable = [p for ps, rule in zip(self.params, rules, strict=True) if rule.counts_from_start for p in ps]
        self._frozen = [not p.requires_grad for p in self._freezable]

    def matches(self, opt: "RuleOptimizer", rules: Sequence[Rule]) -> bool:
        """Return whether groups, parameters and states are still these tensors, in the same memory.

        In-place edits of a state are not detected: call :meth:`RuleOptimizer.refresh` after one.
        """
        groups = opt.param_groups
        return (
            len(groups) == len(self.params)
            and all(_same(group["params"], known) for group, known in zip(groups, self.params, strict=True))
            and _layout(groups, rules) == self._layout
            and _same(list(_state_values(opt)), self._state_values)
            and self._current_addresses(opt) == self._addresses
            and all(backend.fits() for backend in self.backends)
            and [not p.requires_grad for p in self._freezable] == self._frozen
        )

    def same_params(self, opt: "RuleOptimizer") -> bool:
        """Return whether the optimizer still has these parameters."""
        now = [p for group in opt.param_groups for p in group["params"]]
        return _same(now, list(chain.from_iterable(self.params)))

    def lacks(self, *, in_backward: bool) -> bool:
        """Return whether a parameter without a view has a gradient, or may get one in this backward."""
        return any(p.grad is not None or (in_backward and p.requires_grad) for p in self.others)

    def find(self, p: Tensor) -> tuple[Backend, int] | None:
        """Return the backend that moves a parameter, and the index of its view there."""
        return self._found.get(id(p))

    def _current_addresses(self, opt: "RuleOptimizer") -> list[int]:
        addresses = list(map(Tensor.data_ptr, self._addressed))
        if self.has_dtensors:
            spread = [view.param for view in self.views if is_dtensor(view.param)]
            states = (x for p in spread for x in opt.state.get(p, {}).values() if is_dtensor(x))
            addresses += [local_part(x).data_ptr() for x in chain(spread, states)]
        return addresses


def _memory_of(p: Tensor) -> int | None:
    """Return the address of a parameter's memory: foreach must not join parameters that share it."""
    x = local_part(p)
    return x.untyped_storage().data_ptr() if type(x) in PLAIN and x.numel() else None


def _view(
    opt: "RuleOptimizer", p: Tensor, state: dict[str, Tensor], group: Group, where: tuple[int, int, int, bool]
) -> ParamView:
    rounding = group.get("rounding", "nearest") if is_half(p.dtype) else "nearest"
    compensation = state.get("compensation") if rounding == "kahan" else None
    tensors = tuple(local_part(state[key]) for key in opt._state_tensors(group))
    local = None if compensation is None else local_part(compensation)
    on_host = not group["capturable"] and state["step"].device.type == "cpu"
    how = rounding, group.get("rounding_seed", 0), on_host
    return ParamView(p, local_part(p), state["step"], tensors, local, *where, *how)


def _is_frozen_from_start(p: Tensor, state: dict[str, Tensor], rule: Rule) -> bool:
    """Return whether a parameter would count before its first gradient, but cannot get one."""
    return rule.counts_from_start and not p.requires_grad and p.grad is None and state["step"].item() == 0


def _layout(groups: Sequence[Group], rules: Sequence[Rule]) -> list[Any]:
    return [
        (*map(group.get, _LAYOUT_KEYS), rule.flags, rule.checked) for group, rule in zip(groups, rules, strict=True)
    ]


def _state_values(opt: "RuleOptimizer") -> Iterable[Any]:
    """Return all parameters, keys and values of the states, as one sequence of objects."""
    states = [state for state in opt.state.values() if isinstance(state, dict)]  # there may be others, as in torch
    return chain(opt.state, chain.from_iterable(states), chain.from_iterable(map(dict.values, states)))


def _same(now: Sequence[Any], known: Sequence[Any]) -> bool:
    """Compare by identity; tensors cannot be compared otherwise."""
    return len(now) == len(known) and all(map(is_, now, known))
