"""The methods for a stack of models, each with its own lr and eps: the rules of the optimizers, under vmap.

Every setting of :mod:`avagrad.lab.methods` means the same as for the classes there.
"""

from __future__ import annotations  # so that a compiled step does not evaluate annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from avagrad.lab.config import Config, optimizer_arguments
from avagrad.lab.methods import method
from avagrad.lab.torch_rules import AdamRule, SgdRule
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.rules import Delayed, Rule, Scalar

Weights = dict[str, Tensor]  # of a model, or (members, ...) of a stack
State = dict[str, list[Tensor]]  # of each parameter
_PER_MEMBER = ("lr", "base_lr", "eps", "weight_decay")  # may differ between members
# Options of the classes that choose an implementation; the ensemble has its own.
_PATHS = ("foreach", "fused", "capturable", "rounding", "rounding_seed")
# The rules of the classes that are not ours.
_RULES: dict[type, type[Rule]] = {
    torch.optim.SGD: SgdRule,
    torch.optim.Adam: AdamRule,
    torch.optim.AdamW: AdamRule,
}


class StackedOptimizer:
    """One method, with the settings of each member; it has no state, so that a step can be compiled or captured.

    Parameters that are ``exempt`` do not decay.
    """

    def __init__(
        self, configs: Sequence[Config], dtype: torch.dtype, device: str, exempt: Collection[str] = ()
    ) -> None:
        self.configs, self.dtype, self.device, self.exempt = configs, dtype, device, exempt
        # The classes themselves supply defaults, and reject invalid values.
        make = method(configs[0].optimizer).build
        made = [make([torch.zeros(1)], optimizer_arguments(config)) for config in configs]
        groups = [optimizer.param_groups[0] for optimizer in made]
        self.group = {name: value for name, value in groups[0].items() if name not in ("params", *_PATHS)}
        self.own: dict[str, Tensor] = {}  # the settings that differ between members
        for name, value in self.group.items():
            values = [group[name] for group in groups]
            other = next((x for x in values if x != value), value)
            if other != value and name not in _PER_MEMBER:
                raise ValueError(f"{name} is {value!r} in one member and {other!r} in another, but must be the same.")
            if other != value:
                self.own[name] = self._tensor(values)
        if self.group.get("dampening"):
            raise ValueError(f"dampening is {self.group['dampening']!r}, but must be 0 in an ensemble.")
        self.clip = configs[0].clip
        optimizer = made[0]
        self.rule_class: type[Rule]
        if isinstance(optimizer, RuleOptimizer):
            self.rule_class, self.state = optimizer._rule_class, optimizer._state_tensors(groups[0])
        else:
            self.rule_class = _RULES[type(optimizer)]
            count = 1 if "momentum" in self.group else 3 if self.group.get("amsgrad") else 2
            self.state = {str(i): True for i in range(count)}

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def lr_at(self, epoch: int, step: int = 0, steps_per_epoch: int = 1) -> Tensor:
        """Return the members' learning rates in a step of an epoch."""
        return self._tensor([config.lr_at(epoch, step, steps_per_epoch) for config in self.configs])

    def start(self, w: Weights) -> State:
        """Return the state before the first step."""
        scalar = torch.zeros(len(self.configs), dtype=self.dtype, device=self.device)
        return {
            name: [torch.zeros_like(x) if is_like_w else scalar.clone() for is_like_w in self.state.values()]
            for name, x in w.items()
        }

    def step(self, w: Weights, g: Weights, state: State, t: Scalar, lr: Tensor) -> tuple[Weights, State]:
        """Return parameters and state after the ``t``-th step."""

        def of_one(w: Weights, g: Weights, state: State, own: Weights) -> tuple[Weights, State]:
            return self._step_of_one(w, g, state, t, self.group | own)

        moved: tuple[Weights, State] = vmap(of_one)(w, g, state, self.own | {"lr": lr})
        return moved

    def _step_of_one(
        self, w: Weights, g: Weights, state: State, t: Scalar, group: dict[str, Any]
    ) -> tuple[Weights, State]:
        """Take a step of one member, as the optimizer's class does."""
        if self.clip is not None:
            g = _clipped(g, self.clip)
        rule, exempt = self.rule_class.of(group), self.rule_class.of(group | {"weight_decay": 0.0})
        gamma: Scalar = 1.0
        if isinstance(rule, Delayed) and rule.normalised:
            sums = [rule.sums(v, t - 1) for _, v in state.values()]
            total, count = (sum(column) for column in zip(*sums, strict=True))
            gamma = rule.gamma((total, count)).to(self.dtype)
        new, kept = {}, {}
        for name, x in w.items():
            moves = exempt if name in self.exempt else rule
            new[name], *kept[name] = moves.apply(x, x, g[name], state[name], t - 1, gamma)
        return new, kept


def _clipped(g: Weights, most: float) -> Weights:
    """Clip gradients by their norm, as torch.nn.utils.clip_grad_norm_ does."""
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in g.values()]))
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    return {name: x * factor for name, x in g.items()}
