"""A stack of models of one seed, each with its own lr and eps, that takes its steps as one computation.

All members get the same batches and the same masks, and start from the same weights: those of the trainer's run with
that seed. A member whose loss is not finite no longer changes from then on, and does not affect the others.
"""

from __future__ import annotations  # so that a compiled step does not evaluate annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from avagrad.lab.config import Config
from avagrad.lab.ensemble.layers import stackable
from avagrad.lab.ensemble.optimizer import StackedOptimizer, State, Weights
from avagrad.lab.environment import generator_states, set_generator_states
from avagrad.lab.stepping import Losses, Recorder, autocast, copy_into
from avagrad.lab.tasks.base import Batch, Carry, Task
from avagrad.optim.param_groups import no_decay_groups
from avagrad.optim.rules import Scalar


class _FunctionalTask(nn.Module):
    """A task and its model as one module, so that ``functional_call`` can replace the model's parameters."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, function: Callable[[Task, nn.Module], Any]) -> Any:
        """Call a function of the task and the model."""
        return function(self.task, self.model)


class Stack:
    """A stack of models; :meth:`step` trains all of them, :meth:`scores` evaluates them.

    Args:
        task: the task, with the members' seed.
        configs: one for each member; they differ only in lr and eps.
        noise: the generator of the randomness inside a step.
        in_products: compute convolutions as matrix products.
        compile: compile the whole step (torch.compile).
        graph: record the step as a CUDA graph, and replay it.

    >>> from avagrad.lab.config import configure
    >>> from avagrad.lab.tasks import task_class
    >>> task = task_class("digits")()
    >>> members = Stack(task, [configure("digits", "sgd", lr=lr) for lr in (0.01, 0.1, 1e30)], torch.Generator())
    >>> members.begin(epoch=0)
    >>> for i in range(4):
    ...     members.step(task.batch(task.order(0), i))
    >>> members.first_bad.tolist(), members.scores("validation")[1].shape
    ([0, 0, 2], torch.Size([3]))
    """

    def __init__(
        self,
        task: Task,
        configs: Sequence[Config],
        noise: torch.Generator,
        *,
        in_products: bool = False,
        compile: bool = False,
        graph: bool = False,
    ) -> None:
        self.task, self.noise, self.precision = task, noise, configs[0].precision
        self.model = stackable(task.new_model(), in_products=in_products)
        self.functional = _FunctionalTask(task, self.model)
        weights = {name: p.detach() for name, p in self.functional.named_parameters() if p.requires_grad}
        dtype = next(iter(weights.values())).dtype
        self.optimizer = StackedOptimizer(configs, dtype, task.device, self._exempt())
        self.members = len(configs)
        self.w = self._stacked(weights)
        self.state = self.optimizer.start(self.w)
        fixed = {name: p.detach() for name, p in self.functional.named_parameters() if not p.requires_grad}
        self.buffers = self._stacked(dict(self.functional.named_buffers()) | fixed)
        self.carry: Carry = ()
        self.losses = Losses(task.device, total=[0.0] * self.members)
        # A graph or a compiled step reads its numbers from the device; otherwise plain numbers cost nothing.
        on_device = compile or graph
        self.t: Scalar = torch.zeros((), dtype=torch.float64, device=task.device) if on_device else 0
        self.lr = self.optimizer.lr_at(0)
        self.by_transform = compile  # torch.func.grad can be compiled; plain autograd costs less
        self.advance: Callable[..., Any] = self._advance
        self.measure: Callable[..., tuple[Tensor, Tensor]] = self._measure
        if compile:
            self.advance = torch.compile(self._advance, dynamic=False, fullgraph=True)
            self.measure = torch.compile(self._measure, dynamic=False)
        self.recorder = Recorder(noise) if graph else None

    def _exempt(self) -> set[str]:
        """Return the names of the parameters that do not decay."""
        if not self.task.no_decay:
            return set()
        _, others = no_decay_groups(self.functional, weight_decay=1.0)
        ids = {id(p) for p in others["params"]}
        return {name for name, p in self.functional.named_parameters() if id(p) in ids}

    def _stacked(self, tensors: Weights) -> Weights:
        return {name: x.detach().expand(self.members, *x.shape).clone() for name, x in tensors.items()}

    @property
    def first_bad(self) -> Tensor:
        """The step at which each member diverged; 0 for those that have not."""
        return self.losses.first_bad

    @property
    def alive(self) -> Tensor:
        """Whether each member has not diverged."""
        return self.first_bad == 0

    @property
    def changing(self) -> tuple[Weights, State, Weights, Carry, Scalar]:
        """Everything that a step changes, except for the losses."""
        return self.w, self.state, self.buffers, self.carry, self.t

    def begin(self, epoch: int, *, new: bool = True) -> None:
        """Begin or resume an epoch: set its learning rates, and reset the carry of a new one."""
        self.functional.train()
        self.set_lr(epoch)
        if new:
            carry = tuple(part.expand(self.members, *part.shape).clone() for part in self.task.start(self.model))
            if self.carry:
                copy_into(self.carry, carry)
            else:
                self.carry = carry

    def set_lr(self, epoch: int, step: int = 0) -> None:
        """Set the learning rates of a step of an epoch, both counted from 0."""
        copy_into([self.lr], [self.optimizer.lr_at(epoch, step, self.task.steps_per_epoch)])

    @torch.no_grad()
    def step(self, batch: Batch) -> None:
        """Take a step with all members."""
        if self.recorder is None:
            self._eagerly(batch)
        else:
            self.recorder.step(batch, self._eagerly, self._in_place, self._in_place)

    def _eagerly(self, batch: Batch) -> None:
        after = self.advance(*self.changing, self.lr, self.alive, batch)
        self.w, self.state, self.buffers, self.carry, self.t, losses = after
        self.losses.add(losses)

    def _in_place(self, batch: Batch) -> None:
        """Take a step, and copy the results to where it has read them."""
        before = self.changing
        self._eagerly(batch)
        copy_into(_tensors(*before), _tensors(*self.changing))
        self.w, self.state, self.buffers, self.carry, self.t = before

    def mark_diverged(self, bad: Tensor, step: int) -> None:
        """Mark members as diverged at a step, for another reason than its training loss."""
        self.losses.first_bad += (bad & (self.first_bad == 0)) * step

    def _advance(
        self,
        w: Weights,
        state: State,
        buffers: Weights,
        carry: Carry,
        t: Scalar,
        lr: Tensor,
        alive: Tensor,
        batch: Batch,
    ) -> tuple[Weights, State, Weights, Carry, Scalar, Tensor]:
        """Return everything that changes in a step; a pure function, except for the noise."""
        losses, g, buffers, carry = self._gradients(w, buffers, carry, batch)
        t = t + 1
        moved, state = self.optimizer.step(w, g, state, t, lr)
        moves = alive & losses.isfinite()
        w = {name: torch.where(moves.view(-1, *[1] * (x.dim() - 1)), moved[name], x) for name, x in w.items()}
        return w, state, buffers, carry, t, losses

    def _gradients(
        self, weights: Weights, buffers: Weights, carry: Carry, batch: Batch
    ) -> tuple[Tensor, Weights, Weights, Carry]:
        def of_one(weights: Weights, buffers: Weights, carry: Carry) -> Any:
            noted = {name: buffer.clone() for name, buffer in buffers.items()}  # BatchNorm writes to them

            def loss_of(task: Task, model: nn.Module) -> tuple[Tensor, Carry]:
                return task.loss(model, batch, carry, self.noise)

            loss, after = functional_call(self.functional, (weights, noted), (loss_of,))
            return loss, noted, after

        def of_all(weights: Weights) -> Any:
            with autocast(self.precision, self.task.device, keep=False):
                losses, noted, after = vmap(of_one, randomness="same")(weights, buffers, carry)
            # The members are independent: the gradient of the sum has each one's own gradient.
            return losses.sum(), (losses, noted, after)

        if self.by_transform:
            gradients, (losses, noted, after) = torch.func.grad(of_all, has_aux=True)(weights)
        else:
            weights = {name: x.detach().requires_grad_() for name, x in weights.items()}
            with torch.enable_grad():
                total, (losses, noted, after) = of_all(weights)
            gradients = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))
        return losses.detach(), gradients, noted, after

    # --- evaluation ---

    @torch.no_grad()
    def scores(self, part: str, at_once: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the members' losses and errors on the "validation" or the "test" part, ``at_once`` at a time."""
        self.functional.eval()
        at_once = at_once or self.members
        found = []
        for start in range(0, self.members, at_once):
            rows = slice(start, start + at_once)
            weights, buffers = ({name: x[rows] for name, x in tensors.items()} for tensors in (self.w, self.buffers))
            found.append(self.measure(weights, buffers, part))
        losses, errors = zip(*found, strict=True)
        return torch.cat(losses), torch.cat(errors)

    def _measure(self, weights: Weights, buffers: Weights, part: str) -> tuple[Tensor, Tensor]:
        def of_one(weights: Weights, buffers: Weights) -> Any:
            return functional_call(self.functional, (weights, buffers), (lambda task, model: task.scores(model, part),))

        with autocast(self.precision, self.task.device, keep=False):
            losses, errors = vmap(of_one)(weights, buffers)
        return losses, errors

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes."""
        return {
            "w": self.w,
            "state": self.state,
            "buffers": self.buffers,
            "carry": list(self.carry),
            "t": float(self.t),
            "first_bad": self.first_bad,
            "loss_sums": self.losses.total,
            "losses": int(self.losses.count),
            "generators": generator_states(self.task.device) | {"noise": self.noise.get_state()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a state."""
        set_generator_states(self.task.device, saved["generators"])
        self.noise.set_state(saved["generators"]["noise"])
        for name, x in self.w.items():
            x.copy_(saved["w"][name])
            copy_into(self.state[name], saved["state"][name])
        copy_into(self.buffers.values(), (saved["buffers"][name] for name in self.buffers))
        self.carry = tuple(part.to(self.task.device) for part in saved["carry"])
        steps = int(saved["t"])
        self.t = self.t.fill_(steps) if isinstance(self.t, Tensor) else steps
        self.losses = Losses(self.task.device, steps, saved["loss_sums"].tolist(), saved["losses"])
        self.first_bad.copy_(saved["first_bad"])


def _tensors(w: Weights, state: State, buffers: Weights, carry: Carry, t: Scalar) -> list[Tensor]:
    assert isinstance(t, Tensor)
    return [*w.values(), *(x for kept in state.values() for x in kept), *buffers.values(), *carry, t]
