"""The methods for a stack of models, each with its own lr and eps: the rules of the optimizers, under vmap.

The parameters of all members are stored together, one row per member, so that a step is a few operations on one large
tensor, whatever the model. Every setting of :mod:`avagrad.lab.methods` means the same as for the classes there.
"""

from __future__ import annotations  # so that a compiled step does not evaluate annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from avagrad.lab.config import Config, optimizer_arguments
from avagrad.lab.methods import method
from avagrad.lab.rms_adam import RmsAdam, RmsAdamRule, rms_scale
from avagrad.lab.torch_rules import AdamRule, SgdRule
from avagrad.optim.adashift import AdaShift
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.rules import Delayed, Rule, Scalar

Blocks = list[Tensor]  # each (members, numbers)
_PER_MEMBER = ("lr", "base_lr", "eps", "weight_decay")  # may differ between members
# Options of the classes that choose an implementation; the ensemble has its own.
_PATHS = ("foreach", "fused", "capturable", "rounding", "rounding_seed")
# The rules of the classes that are not ours.
_RULES: dict[type, type[Rule]] = {
    torch.optim.SGD: SgdRule,
    torch.optim.Adam: AdamRule,
    torch.optim.AdamW: AdamRule,
    RmsAdam: RmsAdamRule,
}


class Layout:
    """How the parameters of a model are laid out in blocks of rows: all in one, or each tensor in its own block.

    Parameters that are ``exempt`` from weight decay never share a block with others; ``decays`` is a flag per block.

    >>> layout = Layout({"a": torch.ones(2, 2), "b": torch.zeros(1)})
    >>> blocks = layout.rows({"a": torch.ones(3, 2, 2), "b": torch.zeros(3, 1)})
    >>> [tuple(block.shape) for block in blocks], layout.views(blocks)["a"].shape
    ([(3, 5)], torch.Size([3, 2, 2]))
    """

    def __init__(self, like: Mapping[str, Tensor], *, apart: bool = False, exempt: Collection[str] = ()) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        together = [[name for name in like if (name in exempt) == is_exempt] for is_exempt in (False, True)]
        self.blocks = [[name] for name in like] if apart else [names for names in together if names]
        self.decays = [names[0] not in exempt for names in self.blocks]
        self.numbers = sum(shape.numel() for shape in self.shapes.values())

    def views(self, blocks: Blocks) -> dict[str, Tensor]:
        """Return each parameter, (members, *its shape), as a part of the blocks."""
        views: dict[str, Tensor] = {}
        for names, block in zip(self.blocks, blocks, strict=True):
            parts = torch.split_with_sizes(block, [self.shapes[name].numel() for name in names], 1)
            views |= {name: part.view(-1, *self.shapes[name]) for name, part in zip(names, parts, strict=True)}
        return views

    def rows(self, tensors: Mapping[str, Tensor]) -> Blocks:
        """Return blocks with copies of these tensors, each (members, *a parameter's shape)."""
        flat = {name: tensor.reshape(len(tensor), -1) for name, tensor in tensors.items()}
        return [torch.cat([flat[name] for name in names], 1) for names in self.blocks]


def wants_blocks(name: str) -> bool:
    """Return whether a method needs each tensor in its own block: AdaShift has one second moment per tensor."""
    return method(name).make is AdaShift


class StackedOptimizer:
    """One method, with the settings of each member; it has no state, so that a step can be compiled or captured.

    >>> from avagrad.lab.config import configure
    >>> optimizer = StackedOptimizer([configure("digits", "sgd", lr=lr) for lr in (0.1, 0.2)], torch.float64, "cpu")
    >>> w, g = [torch.ones(2, 3).double()], [torch.ones(2, 3).double()]
    >>> w, state = optimizer.step(w, g, optimizer.start(w), 1, optimizer.lr_at(0))
    >>> w[0][:, 0]
    tensor([0.9000, 0.7999], dtype=torch.float64)
    """

    def __init__(
        self, configs: Sequence[Config], dtype: torch.dtype, device: str, decays: Sequence[bool] = (True,)
    ) -> None:
        self.configs, self.dtype, self.device, self.decays = configs, dtype, device, decays
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
        self.by_rms = isinstance(optimizer, RmsAdam)
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

    def start(self, w: Blocks) -> list[Blocks]:
        """Return the state before the first step: a list of tensors for each block."""
        return [[torch.zeros_like(x if is_like_w else x[:, 0]) for is_like_w in self.state.values()] for x in w]

    def step(self, w: Blocks, g: Blocks, state: list[Blocks], t: Scalar, lr: Tensor) -> tuple[Blocks, list[Blocks]]:
        """Return parameters and state after the ``t``-th step."""

        def of_one(w: Blocks, g: Blocks, state: list[Blocks], own: dict[str, Tensor]) -> tuple[Blocks, list[Blocks]]:
            return self._step_of_one(w, g, state, t, self.group | own)

        moved: tuple[Blocks, list[Blocks]] = vmap(of_one)(w, g, state, self.own | {"lr": lr})
        return moved

    def _step_of_one(
        self, w: Blocks, g: Blocks, state: list[Blocks], t: Scalar, group: dict[str, Any]
    ) -> tuple[Blocks, list[Blocks]]:
        """Take a step of one member, as the optimizer's class does."""
        if self.clip is not None:
            g = _clipped(g, self.clip)
        exempt = group | {"weight_decay": 0.0}
        rules = [self.rule_class.of(group if decays else exempt) for decays in self.decays]
        gamma: Scalar = 1.0
        if rules[0].normalised:
            sums = [rule.sums(v, t - 1) for rule, (_, v) in zip(rules, state, strict=True) if isinstance(rule, Delayed)]
            total, count = (sum(column) for column in zip(*sums, strict=True))
            gamma = rules[0].gamma((total, count)).to(self.dtype)
        moved = [rule.apply(x, x, y, kept, t - 1, gamma) for rule, x, y, kept in zip(rules, w, g, state, strict=True)]
        new, kept = [x for x, *_ in moved], [list(rest) for _, *rest in moved]
        if self.by_rms:  # its rule returns directions
            factor = group["lr"] * rms_scale(new)
            new = [x - (factor * u).to(x.dtype) for x, u in zip(w, new, strict=True)]
        return new, kept


def _clipped(g: Blocks, most: float) -> Blocks:
    """Clip gradients by their norm, as torch.nn.utils.clip_grad_norm_ does."""
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(block) for block in g]))
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    return [block * factor for block in g]
