"""The methods for a stack of models, each with its own lr and eps: the functions of optim/rules.py, with columns.

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
from avagrad.lab.rms_adam import RmsAdam
from avagrad.lab.torch_rules import adam_direction, adam_step, sgd_step
from avagrad.optim.adabound import AdaBound, adabound_step
from avagrad.optim.adashift import AdaShift, adashift_step
from avagrad.optim.adopt import ADOPT, adopt_step
from avagrad.optim.baselines import with_l2
from avagrad.optim.rules import LARGEST, Clips, Scalar, delayed_step, gradient_sizes, rates, scale

Blocks = list[Tensor]  # each (members, numbers)
_PER_MEMBER = ("lr", "base_lr", "eps", "weight_decay")  # may differ between members
# Options of the classes that choose an implementation; the ensemble has its own.
_PATHS = ("foreach", "fused", "capturable", "rounding", "rounding_seed")


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
        record = method(configs[0].optimizer)
        self.configs, self.dtype, self.device, self.decays = configs, dtype, device, decays
        # The classes themselves supply defaults, and reject invalid values.
        groups = [record.build([torch.zeros(1)], optimizer_arguments(config)).param_groups[0] for config in configs]
        self.hyper: dict[str, Any] = {k: value for k, value in groups[0].items() if k not in ("params", *_PATHS)}
        for group in groups:
            for name, value in self.hyper.items():
                if name not in _PER_MEMBER and group[name] != value:
                    raise ValueError(
                        f"{name} is {value!r} in one member and {group[name]!r} in another, but must be the same."
                    )
        if self.hyper.get("dampening"):
            raise ValueError(f"dampening is {self.hyper['dampening']!r}, but must be 0 in an ensemble.")
        self.columns = {"base_lr": self._column([config.lr for config in configs])}
        if record.has_eps:
            self.columns["eps"] = self._column([group["eps"] for group in groups])
        if len({group["weight_decay"] for group in groups}) > 1:  # else a plain number, which may be 0 and cost nothing
            self.columns["weight_decay"] = self._column([group["weight_decay"] for group in groups])
        self.clip = configs[0].clip
        self.kind, self.rule = record.make, _RULES.get(record.make)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device)[:, None]

    def lr_at(self, epoch: int, step: int = 0, steps_per_epoch: int = 1) -> Tensor:
        """Return the members' learning rates in a step of an epoch, as a column."""
        return self._column([config.lr_at(epoch, step, steps_per_epoch) for config in self.configs])

    def start(self, w: Blocks) -> list[Blocks]:
        """Return the state before the first step: a list of tensors for each block."""
        if self.kind is torch.optim.SGD:
            count = 1
        elif self.kind is AdaShift:
            count = self.hyper["keep"]
        else:
            count = 3 if self.hyper.get("amsgrad") or self.hyper.get("amsbound") else 2
        state = [[torch.zeros_like(block) for _ in range(count)] for block in w]
        if self.kind is AdaShift:
            shared = self.hyper["reduce"] == "max"
            for block, kept in zip(w, state, strict=True):
                kept.insert(0, torch.zeros_like(block[:, 0] if shared else block))
        return state

    def step(self, w: Blocks, g: Blocks, state: list[Blocks], t: Scalar, lr: Tensor) -> tuple[Blocks, list[Blocks]]:
        """Return parameters and state after the ``t``-th step; rows of different members are never mixed."""
        if self.clip is not None:
            g = _clipped(g, self.clip)
        columns = self.columns | {"lr": lr}
        move = self._mover(state, t, self.hyper | columns)
        weight_decay = columns.get("weight_decay", self.hyper["weight_decay"])
        decays = [weight_decay if decays else 0.0 for decays in self.decays]
        moved = [move(*block) for block in zip(w, g, state, decays, strict=True)]
        new = [x for x, _ in moved]
        if self.kind is RmsAdam:
            new = _moved_by_rms(w, new, columns["lr"])
        return new, [kept for _, kept in moved]

    def _mover(self, state: list[Blocks], t: Scalar, hyper: dict[str, Any]) -> Any:
        """Return the function that moves one block: parameters, gradients, state, weight decay."""
        common = {name: hyper[name] for name in ("lr", "maximize")}
        if "betas" in hyper:
            common |= {"beta1": hyper["betas"][0], "beta2": hyper["betas"][1]}
        if self.rule is not None:
            rule, names = self.rule
            common |= {_ARGUMENTS.get(name, name): hyper[name] for name in names}
            may_lack_one = "amsgrad" in hyper or "amsbound" in hyper

            def move(w: Tensor, g: Tensor, kept: Blocks, decay: Scalar) -> tuple[Tensor, Blocks]:
                states = (*kept, None)[:3] if may_lack_one else kept
                w, *new = rule(w, g, *states, t, weight_decay=decay, **common)
                return w, new[: len(kept)]

            return move
        if self.kind is AdaShift:
            fixed = {name: common.pop(name) for name in ("beta1", "beta2", "maximize")} | {"reduce": hyper["reduce"]}
            own = common | {"eps": hyper["eps"]}

            def one(w: Tensor, g: Tensor, kept: Blocks, own: dict[str, Any]) -> tuple[Tensor, Blocks]:
                w, ring, v = adashift_step(w, g, kept[1:], kept[0], t, **own, **fixed)
                return w, [v, *ring]

            def adashift(w: Tensor, g: Tensor, kept: Blocks, decay: Scalar) -> tuple[Tensor, Blocks]:
                values = (own | {"weight_decay": decay}).items()
                each = {name: x[:, 0] if isinstance(x, Tensor) else x for name, x in values}
                axes = {name: 0 if isinstance(x, Tensor) else None for name, x in values}
                moved: tuple[Tensor, Blocks] = vmap(one, in_dims=(0, 0, 0, axes))(w, g, kept, each)
                return moved

            return adashift
        return self._delayed_mover(state, t, hyper, common)

    def _delayed_mover(self, state: list[Blocks], t: Scalar, hyper: dict[str, Any], common: dict[str, Any]) -> Any:
        norm_of_step = "norm_of" in hyper  # AvaStep, in which the next two are always on
        forms = {name: hyper.get(name, True) for name in ("bias_correction", "active_only")}
        corrected = {"beta2": common["beta2"], "bias_correction": forms["bias_correction"]}
        sizes = [gradient_sizes(kept[1], t - 1, **corrected) for kept in state]
        etas = [rates(r, t - 1, eps=hyper["eps"], **forms) for r in sizes]
        gamma: Scalar = 1.0
        if norm_of_step:
            unit = hyper["eps"].clamp(min=1.0)  # as in rules.Delayed.sums
            terms = [eta * unit * r for eta, r in zip(etas, sizes, strict=True)]
            gamma = self._gamma(terms, state, forms["active_only"], unit)
        elif "norm" in hyper:
            gamma = self._gamma(etas, state, forms["active_only"])
        common |= {"decoupled": hyper["decoupled_weight_decay"], **forms}
        bounds = hyper["clip_update"], hyper.get("clip_moment"), LARGEST if norm_of_step else None
        remaining = iter(zip(etas, sizes, strict=True))

        def delayed(w: Tensor, g: Tensor, kept: Blocks, decay: Scalar) -> tuple[Tensor, Blocks]:
            eta, r = next(remaining)
            clips = Clips(r, *bounds)
            w, m, v = delayed_step(w, g, kept[0], kept[1], t, eta, gamma, clips=clips, weight_decay=decay, **common)
            return w, [m, v]

        return delayed

    def _gamma(self, terms: Blocks, state: list[Blocks], active_only: bool, unit: Scalar = 1.0) -> Tensor:
        """Return the members' gammas as a column: each has its own norm. ``terms`` are multiples of ``unit``."""
        norm = self.hyper["norm"]
        sums = [(x * x if norm == 2 else x).sum(1, keepdim=True) for x in terms]
        d: Scalar = sum(x.shape[1] for x in terms)
        if active_only:
            counts = [(kept[1] != 0).sum(1, keepdim=True) for kept in state]
            d = torch.stack(counts).sum(0).double()
        total = torch.stack(sums).sum(0, dtype=torch.float64) / unit**norm
        return scale(total, d, norm=norm).to(self.dtype)


def _rms_adam_direction(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Scalar, *, weight_decay: Scalar, maximize: bool, **rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    del rest["lr"]  # it multiplies the directions of all blocks
    u, m, v, _ = adam_direction(with_l2(w, g, weight_decay, maximize), m, v, None, t, **rest)
    return u, m, v


def _moved_by_rms(w: Blocks, directions: Blocks, lr: Tensor) -> Blocks:
    """Move the members along RmsAdam's directions, divided by their root mean square over all blocks."""
    total = torch.stack([u.square().sum(1, keepdim=True, dtype=torch.float64) for u in directions]).sum(0)
    scale = torch.where(total > 0, (sum(u.shape[1] for u in directions) / total).sqrt(), 1.0)
    return [x - lr * (scale * u).to(x.dtype) for x, u in zip(w, directions, strict=True)]


# The rules of the classes that have one, and the settings that are its arguments.
_RULES: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.optim.SGD: (sgd_step, ("momentum", "nesterov")),
    torch.optim.Adam: (adam_step, ("eps", "decoupled_weight_decay")),
    torch.optim.AdamW: (adam_step, ("eps", "decoupled_weight_decay")),
    AdaBound: (adabound_step, ("eps", "base_lr", "final_lr", "gamma")),
    ADOPT: (adopt_step, ("eps", "decoupled_weight_decay")),
    RmsAdam: (_rms_adam_direction, ("eps",)),  # the length of its step follows from all blocks
}
_ARGUMENTS = {"decoupled_weight_decay": "decoupled"}


def _clipped(g: Blocks, most: float) -> Blocks:
    """Clip the gradients of each member by their norm, as torch.nn.utils.clip_grad_norm_ does."""
    norms = torch.cat([torch.linalg.vector_norm(block, dim=1, keepdim=True) for block in g], 1)
    total = torch.linalg.vector_norm(norms, dim=1, keepdim=True) if len(g) > 1 else norms
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    return [block * factor for block in g]
