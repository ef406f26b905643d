"""A stack of models of one seed, each with its own lr and eps, that takes its steps as one computation.

All members see the same batches and the same masks, and start from the same weights: those of the trainer's run with
that seed. A member whose loss is not finite stays as it is from then on; the others do not notice.
"""

from __future__ import annotations  # a compiler need not work them out inside of a step

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from avagrad.lab.config import Config
from avagrad.lab.ensemble.layers import stackable
from avagrad.lab.ensemble.optimizer import Blocks, Layout, StackedOptimizer, wants_blocks
from avagrad.lab.stepping import Losses, autocast
from avagrad.lab.tasks.base import Carry, Task
from avagrad.optim.param_groups import no_decay_groups
from avagrad.optim.rules import Scalar

__all__ = ["Stack"]

Batch = tuple[Tensor, ...]
_PIECE = 2**17  # numbers that are updated at a time on a CPU: with what is computed on the way, they stay in its caches


class _Asked(nn.Module):
    """A model together with what a task asks of it, so that its parameters can be swapped for a member's."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, ask: Callable[[Task, nn.Module], Any]) -> Any:
        """Ask."""
        return ask(self.task, self.model)


class Stack:
    """A stack of models; :meth:`step` takes all of them on, :meth:`scores` measures them.

    Args:
        task: of the members' seed.
        configs: one for each member; they differ in lr and eps alone.
        noise: where the randomness inside of a step comes from.
        convolution: "grouped" or "bmm", see :func:`avagrad.lab.ensemble.layers.stackable`.
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
        convolution: str = "grouped",
        compile: bool = False,
        graph: bool = False,
    ) -> None:
        self.task, self.noise, self.precision = task, noise, configs[0].precision
        self.model = stackable(task.new_model(), convolution)
        self.asked = _Asked(task, self.model)
        self.on_cuda = torch.device(task.device).type == "cuda"
        weights = {name: p.detach() for name, p in self.asked.named_parameters() if p.requires_grad}
        dtype = next(iter(weights.values())).dtype
        self.layout = Layout(weights, apart=wants_blocks(configs[0].optimizer), exempt=self._exempt())
        self.optimizer = StackedOptimizer(configs, dtype, task.device, self.layout.decays)
        self.members = len(configs)
        self.w = self.layout.rows(self._stacked(weights))
        self.state = self.optimizer.start(self.w)
        fixed = {name: p.detach() for name, p in self.asked.named_parameters() if not p.requires_grad}
        self.buffers = self._stacked(dict(self.asked.named_buffers()) | fixed)
        self.carry: Carry = ()
        self.losses = Losses(task.device, total=[0.0] * self.members)
        # A graph or a compiled step finds its numbers on the device; without them plain ones cost nothing.
        on_device = compile or graph
        self.t: Scalar = torch.zeros((), dtype=torch.float64, device=task.device) if on_device else 0
        self.lr = self.optimizer.lr_at(0)
        self.alive = torch.ones(self.members, 1, dtype=torch.bool, device=task.device)
        self.by_transform = compile  # which a compiler can follow; autograd itself costs less
        self.advance: Callable[..., Any] = self._advance
        self.measure: Callable[..., tuple[Tensor, Tensor]] = self._measure
        if compile:
            self.advance = torch.compile(self._advance, dynamic=False, fullgraph=True)
            self.measure = torch.compile(self._measure, dynamic=False)
        self.graph = _Graph(self) if graph else None
        self.piece = 0 if self.on_cuda or on_device else max(1, _PIECE // self.layout.numbers)

    def _exempt(self) -> set[str]:
        """Return the names of the parameters that do not decay."""
        if not self.task.no_decay:
            return set()
        _, others = no_decay_groups(self.asked, weight_decay=1.0)
        ids = {id(p) for p in others["params"]}
        return {name for name, p in self.asked.named_parameters() if id(p) in ids}

    def _stacked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.detach().expand(self.members, *x.shape).clone() for name, x in tensors.items()}

    @property
    def first_bad(self) -> Tensor:
        """The step at which each member diverged; 0 for those that have not."""
        return self.losses.first_bad

    def begin(self, epoch: int, *, anew: bool = True) -> None:
        """Begin an epoch, or go on in one: its learning rates, and what is carried from step to step."""
        self.asked.train()
        self.set_lr(epoch)
        if anew:
            carry = tuple(part.expand(self.members, *part.shape).clone() for part in self.task.start(self.model))
            if self.carry:
                _refill(self.carry, carry)
            else:
                self.carry = carry

    def set_lr(self, epoch: int, step: int = 0) -> None:
        """Set the learning rates of a step of an epoch, both counted from 0."""
        _refill([self.lr], [self.optimizer.lr_at(epoch, step, self.task.steps_per_epoch)])

    @torch.no_grad()
    def step(self, batch: Batch) -> None:
        """Take a step with all members."""
        if self.graph is not None:
            self.graph.step(batch)
        elif self.piece:
            self._take_in_pieces(batch)
        else:
            self.take(batch)
        self.losses.count += 1

    def take(self, batch: Batch) -> None:
        """Take a step, one operation at a time."""
        now = (self.w, self.state, self.buffers, self.carry, self.t, self.lr, self.alive)
        self.w, self.state, self.buffers, self.carry, self.t, losses = self.advance(*now, batch)
        self.note(losses)

    def note(self, losses: Tensor) -> None:
        """Count the losses of a step, and see who has diverged; nothing waits for the device."""
        self.losses.note(losses)
        self.alive.copy_((self.losses.first_bad == 0)[:, None])

    def give_up(self, bad: Tensor, step: int) -> None:
        """Take members for diverged at a step, for another reason than their loss in it."""
        self.losses.first_bad += (bad & (self.losses.first_bad == 0)) * step
        self.alive.copy_((self.losses.first_bad == 0)[:, None])

    def _advance(
        self,
        w: Blocks,
        state: list[Blocks],
        buffers: dict[str, Tensor],
        carry: Carry,
        t: Scalar,
        lr: Tensor,
        alive: Tensor,
        batch: Batch,
    ) -> tuple[Blocks, list[Blocks], dict[str, Tensor], Carry, Scalar, Tensor]:
        """Return all that changes in a step, after it; a pure function, but for the noise."""
        losses, g, buffers, carry = self._gradients(w, buffers, carry, batch)
        t = t + 1
        moved, state = self.optimizer.step(w, g, state, t, lr)
        goes_on = alive & losses.isfinite()[:, None]
        w = [torch.where(goes_on, new, old) for new, old in zip(moved, w, strict=True)]
        return w, state, buffers, carry, t, losses

    def _take_in_pieces(self, batch: Batch) -> None:
        """Take a step; parameters and state are gone through a few members at a time, within a processor's caches."""
        losses, g, self.buffers, self.carry = self._gradients(self.w, self.buffers, self.carry, batch)
        assert isinstance(self.t, int)
        self.t += 1
        self.note(losses)
        for start in range(0, self.members, self.piece):
            rows = slice(start, start + self.piece)
            moved, state = self.optimizer.step(self.w, g, self.state, self.t, self.lr, rows)
            for old, new in zip(self.w, moved, strict=True):
                old[rows] = torch.where(self.alive[rows], new, old[rows])
            for kept, values in zip(self.state, state, strict=True):
                _refill((old[rows] for old in kept), values)

    def _gradients(
        self, w: Blocks, buffers: dict[str, Tensor], carry: Carry, batch: Batch
    ) -> tuple[Tensor, Blocks, dict[str, Tensor], Carry]:
        def of_one(weights: dict[str, Tensor], buffers: dict[str, Tensor], carry: Carry) -> Any:
            noted = {name: buffer.clone() for name, buffer in buffers.items()}  # BatchNorm writes to them

            def ask(task: Task, model: nn.Module) -> tuple[Tensor, Carry]:
                return task.loss(model, batch, carry, self.noise)

            loss, after = functional_call(self.asked, (weights, noted), (ask,))
            return loss, noted, after

        def of_all(weights: dict[str, Tensor]) -> Any:
            with autocast(self.precision, self.task.device, keep=False):
                losses, noted, after = vmap(of_one, randomness="same")(weights, buffers, carry)
            # The members' losses have nothing to do with one another: the gradient of the sum is each one's own.
            return losses.sum(), (losses, noted, after)

        weights = self.layout.views(w)
        if self.by_transform:
            gradients, (losses, noted, after) = torch.func.grad(of_all, has_aux=True)(weights)
        else:
            weights = {name: x.detach().requires_grad_() for name, x in weights.items()}
            with torch.enable_grad():
                total, (losses, noted, after) = of_all(weights)
            gradients = dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))
        return losses.detach(), self.layout.rows(gradients), noted, after

    # --- measuring ---

    @torch.no_grad()
    def scores(self, part: str, at_once: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the members' losses and errors on the "validation" or the "test" part, so many members at once."""
        self.asked.eval()
        at_once = at_once or self.members
        views, found = self.layout.views(self.w), []
        for start in range(0, self.members, at_once):
            rows = slice(start, start + at_once)
            weights, buffers = ({name: x[rows] for name, x in tensors.items()} for tensors in (views, self.buffers))
            found.append(self.measure(weights, buffers, part))
        losses, errors = zip(*found, strict=True)
        return torch.cat(losses), torch.cat(errors)

    def _measure(self, weights: dict[str, Tensor], buffers: dict[str, Tensor], part: str) -> tuple[Tensor, Tensor]:
        def of_one(weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any:
            return functional_call(self.asked, (weights, buffers), (lambda task, model: task.scores(model, part),))

        with autocast(self.precision, self.task.device, keep=False):
            losses, errors = vmap(of_one)(weights, buffers)
        return losses, errors

    # --- stopping and going on ---

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes."""
        return {
            "w": self.w,
            "state": self.state,
            "buffers": self.buffers,
            "carry": list(self.carry),
            "t": float(self.t),
            "first_bad": self.losses.first_bad,
            "loss_sums": self.losses.total,
            "losses": self.losses.count,
            "noise": self.noise.get_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.noise.set_state(saved["noise"])
        _refill(self.w, saved["w"])
        for kept, old in zip(self.state, saved["state"], strict=True):
            _refill(kept, old)
        _refill(self.buffers.values(), (saved["buffers"][name] for name in self.buffers))
        self.carry = tuple(part.to(self.task.device) for part in saved["carry"])
        steps = int(saved["t"])
        self.t = self.t.fill_(steps) if isinstance(self.t, Tensor) else steps
        self.losses = Losses(self.task.device, steps, saved["loss_sums"].tolist(), saved["losses"])
        self.losses.first_bad.copy_(saved["first_bad"])
        self.alive.copy_((self.losses.first_bad == 0)[:, None])


class _Graph:
    """Takes a stack's first steps one operation at a time, then records one as a CUDA graph, and replays it."""

    _EAGER = 3  # lazily made things (workspaces, compiled kernels) are made before the recording

    def __init__(self, members: Stack) -> None:
        self.members, self.taken = members, 0
        self.inputs: Batch = ()
        self.recorded: torch.cuda.CUDAGraph | None = None

    def step(self, batch: Batch) -> None:
        members = self.members
        if self.recorded is None and self.taken < self._EAGER:
            self.taken += 1
            members.take(batch)
            return
        if self.recorded is None:
            self._record(batch)
        assert self.recorded is not None
        if any(x.shape != y.shape for x, y in zip(batch, self.inputs, strict=True)):  # the end of a text
            self._take_in_place(batch)
            return
        for kept, new in zip(self.inputs, batch, strict=True):
            kept.copy_(new, non_blocking=True)
        self.recorded.replay()

    def _record(self, batch: Batch) -> None:
        self.inputs = tuple(x.clone() for x in batch)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has memory of its own, beside what the first steps have left
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.members.noise)
        with torch.cuda.graph(graph):
            self._take_in_place(self.inputs)
        self.recorded = graph

    def _take_in_place(self, batch: Batch) -> None:
        """Take a step and put the results where the graph reads them."""
        members = self.members
        before = _tensors(members)
        members.take(batch)
        _refill(before, _tensors(members))
        _put_back(members, before)


def _tensors(members: Stack) -> list[Tensor]:
    t = [members.t] if isinstance(members.t, Tensor) else []
    flat = [kept for block in members.state for kept in block]
    return [*members.w, *flat, *members.buffers.values(), *members.carry, *t]


def _put_back(members: Stack, tensors: Iterable[Tensor]) -> None:
    rest = iter(tensors)
    members.w = [next(rest) for _ in members.w]
    members.state = [[next(rest) for _ in block] for block in members.state]
    members.buffers = {name: next(rest) for name in members.buffers}
    members.carry = tuple(next(rest) for _ in members.carry)
    if isinstance(members.t, Tensor):
        members.t = next(rest)


def _refill(kept: Iterable[Tensor], new: Iterable[Tensor]) -> None:
    for old, values in zip(kept, new, strict=True):
        old.copy_(values)
