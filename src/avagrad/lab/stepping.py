"""One training step: forward, backward, clipping, update; on CUDA as one graph.

Losses, and the first one that is not finite, are tracked on the device, so that the host need not wait.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avagrad.lab.tasks.base import Carry, Task

PRECISIONS = ("float32", "tf32", "bf16")


def autocast(precision: str, device: str, *, keep: bool = True) -> Any:
    """Return the autocast context for a precision; ``keep`` caches weights that were cast."""
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, cache_enabled=keep)


class Losses:
    """The sum of losses, and the first step whose loss is not finite (0 for none); for one model or a stack.

    >>> losses = Losses("cpu")
    >>> for x in (1.0, 3.0, float("nan"), float("inf")):
    ...     losses.add(torch.tensor(x))
    >>> int(losses.first_bad), losses.count
    (3, 4)
    """

    def __init__(self, device: str, steps: int = 0, total: float | Sequence[float] = 0.0, count: int = 0) -> None:
        self.steps = torch.tensor(steps, device=device)
        self.total = torch.tensor(total, dtype=torch.float64, device=device)
        self.first_bad = torch.zeros_like(self.total, dtype=torch.int64)
        self.count = count  # since the last record

    def add(self, loss: Tensor) -> None:
        """Add a step's loss."""
        self.note(loss)
        self.count += 1

    def note(self, loss: Tensor) -> None:
        """Do the part of :meth:`add` that runs on the device."""
        self.steps += 1
        self.total += loss.detach()
        is_first = (self.first_bad == 0) & ~loss.detach().isfinite()
        self.first_bad += is_first * self.steps

    def means(self) -> Tensor:
        """Return the mean since the last record, for each model of a stack, and reset."""
        means = self.total / max(self.count, 1)
        self.total.zero_()
        self.count = 0
        return means


class Step:
    """Takes steps eagerly.

    >>> from avagrad.lab.tasks import task_class
    >>> task = task_class("digits")()
    >>> model = task.new_model()
    >>> optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), Losses("cpu")
    >>> step = Step(task, model, optimizer, torch.Generator(), losses, clip=None, precision="float32")
    >>> order = task.order(0)
    >>> bool(step(task.batch(order, 0)) > step(task.batch(order, 0)))  # the same batch, one step later
    True
    """

    _caches_casts = True  # autocast caches weights that it has cast

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        noise: torch.Generator,
        losses: Losses,
        *,
        clip: float | None,
        precision: str,
    ) -> None:
        self.task, self.model, self.optimizer, self.noise, self.losses = task, model, optimizer, noise, losses
        self.clip, self.precision = clip, precision
        self.carry: Carry = ()
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def start(self, carry: Carry) -> None:
        """Begin or resume an epoch."""
        self.carry = carry

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Take a step; return its loss, on the device."""
        loss = self._forward(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._update()
        self.losses.add(loss)
        return loss.detach()

    def _forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        with autocast(self.precision, self.task.device, keep=self._caches_casts):
            loss, self.carry = self.task.loss(self.model, batch, self.carry, self.noise)
        return loss

    def _update(self) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()


class GraphStep(Step):
    """Takes the first steps eagerly, then records one as a CUDA graph, and replays it.

    A batch of another shape than the recorded one (the end of a text) is taken eagerly, with the gradients in the same
    memory, where the optimizer in the graph reads them.
    """

    _caches_casts = False  # a cast belongs to one step of the graph; and code compiled in the first steps stays valid
    _EAGER = 3  # lazy initialisation (workspaces, states, compiled kernels) must happen before the recording

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.loss = torch.zeros(())

    def start(self, carry: Carry) -> None:
        """Begin or resume an epoch: the carry is copied to where the graph reads it."""
        if self.graph is None:
            self.carry = carry
        else:
            for kept, new in zip(self.carry, carry, strict=True):
                kept.copy_(new)

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Take a step; return its loss, on the device, valid until the next step."""
        if self.graph is None:
            if self.taken < self._EAGER:
                self.taken += 1
                return super().__call__(tuple(x.clone() for x in batch))  # with the same layout as in the recording
            self._record(batch)
        assert self.graph is not None
        if any(x.shape != y.shape for x, y in zip(batch, self.inputs, strict=True)):
            return self._step_eagerly(batch)
        for kept, new in zip(self.inputs, batch, strict=True):
            kept.copy_(new, non_blocking=True)
        self.graph.replay()
        self.losses.count += 1
        return self.loss

    def _record(self, batch: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(x.clone() for x in batch)
        self.carry = tuple(part.clone() for part in self.carry)
        self.optimizer.zero_grad()  # new gradients are allocated in the graph's own memory
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.noise)
        before = self.carry
        with torch.cuda.graph(graph):
            loss = self._forward(self.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            self._update()
            for kept, new in zip(before, self.carry, strict=True):
                kept.copy_(new)
            self.losses.note(loss)
            self.loss = loss.detach()
        self.carry, self.graph = before, graph

    def _step_eagerly(self, batch: tuple[Tensor, ...]) -> Tensor:
        kept = self.carry
        loss = self._forward(batch)
        with_grad = [p for p in self.parameters if p.grad is not None]  # in the graph
        gradients = torch.autograd.grad(loss, with_grad, materialize_grads=True)
        torch._foreach_copy_([p.grad for p in with_grad if p.grad is not None], gradients)
        self._update()
        for old, new in zip(kept, self.carry, strict=True):
            old.copy_(new)
        self.carry = kept
        self.losses.add(loss)
        return loss.detach()
