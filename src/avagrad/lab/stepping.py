"""One training step: forward, backward, clipping, update; on CUDA as one graph.

Losses, and the first one that is not finite, are tracked on the device, so that the host need not wait.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from avagrad.lab.tasks.base import Batch, Carry, Task

PRECISIONS = ("float32", "tf32", "bf16")
_Take = Callable[[Batch], None]  # takes a step


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
    >>> int(losses.first_bad), int(losses.count)
    (3, 4)
    """

    def __init__(self, device: str, steps: int = 0, total: float | Sequence[float] = 0.0, count: int = 0) -> None:
        self.steps = torch.tensor(steps, device=device)
        self.recorded = self.steps - count  # steps until the last record
        self.total = torch.tensor(total, dtype=torch.float64, device=device)
        self.first_bad = torch.zeros_like(self.total, dtype=torch.int64)

    @property
    def count(self) -> Tensor:
        """The number of steps since the last record."""
        return self.steps - self.recorded

    def add(self, loss: Tensor) -> None:
        """Add a step's loss."""
        self.steps += 1
        self.total += loss.detach()
        is_first = (self.first_bad == 0) & ~loss.detach().isfinite()
        self.first_bad += is_first * self.steps

    def means(self) -> Tensor:
        """Return the mean since the last record, for each model of a stack, and reset."""
        means = self.total / self.count.clamp(min=1)
        self.total.zero_()
        self.recorded.copy_(self.steps)
        return means


class Step:
    """Takes steps eagerly."""

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

    def __call__(self, batch: Batch) -> None:
        """Take a step."""
        loss = self._forward(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._update(loss)

    def _forward(self, batch: Batch) -> Tensor:
        with autocast(self.precision, self.task.device, keep=self._caches_casts):
            loss, self.carry = self.task.loss(self.model, batch, self.carry, self.noise)
        return loss

    def _update(self, loss: Tensor) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.losses.add(loss)


class Recorder:
    """Calls a step eagerly a few times, then records it as a CUDA graph, and replays the graph.

    ``noise`` is the generator of the randomness inside the step.
    """

    _EAGER = 3  # lazy initialisation (workspaces, states, compiled kernels) must happen before the recording

    def __init__(self, noise: torch.Generator) -> None:
        self.noise = noise
        self.taken = 0
        self.inputs: Batch = ()
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, batch: Batch, eager: _Take, in_place: _Take, other_shape: _Take) -> None:
        """Take a step.

        Args:
            batch: the batch.
            eager: the step, for the first batches.
            in_place: the same step, which leaves all results in the memory where the next step reads them.
            other_shape: the step for a batch of another shape than the recorded one (the end of a text).
        """
        if self.taken < self._EAGER:
            self.taken += 1
            eager(tuple(x.clone() for x in batch))  # with the same layout as in the recording
            return
        graph = self.graph or self._record(batch, in_place)
        if any(x.shape != y.shape for x, y in zip(batch, self.inputs, strict=True)):
            other_shape(batch)
            return
        copy_into(self.inputs, batch)
        graph.replay()

    def _record(self, batch: Batch, in_place: _Take) -> torch.cuda.CUDAGraph:
        self.inputs = tuple(x.clone() for x in batch)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has its own memory, in addition to that of the first steps
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.noise)
        with torch.cuda.graph(self.graph):
            in_place(self.inputs)
        return self.graph


def copy_into(kept: Iterable[Tensor], new: Iterable[Tensor]) -> None:
    """Copy tensors into others."""
    for old, values in zip(kept, new, strict=True):
        old.copy_(values, non_blocking=old.is_cuda)


class GraphStep(Step):
    """Takes steps from a CUDA graph."""

    _caches_casts = False  # a cast belongs to one step of the graph; and code compiled in the first steps stays valid

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.recorder = Recorder(self.noise)

    def start(self, carry: Carry) -> None:
        """Begin or resume an epoch: the carry is copied to where the graph reads it."""
        if self.recorder.graph is None:
            self.carry = tuple(part.clone() for part in carry)  # the graph writes to it
        else:
            copy_into(self.carry, carry)

    def __call__(self, batch: Batch) -> None:
        """Take a step."""
        self.recorder.step(batch, self._eagerly, self._in_place, self._with_kept_gradients)

    def _eagerly(self, batch: Batch) -> None:
        super().__call__(batch)
        self.carry = tuple(part.clone() for part in self.carry)
        self.optimizer.zero_grad()  # the graph allocates gradients in its own memory

    def _in_place(self, batch: Batch) -> None:
        kept, loss = self.carry, self._forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._finish(kept, loss)

    def _with_kept_gradients(self, batch: Batch) -> None:
        """Take a step eagerly, with the gradients in the same memory, where the optimizer in the graph reads them."""
        kept, loss = self.carry, self._forward(batch)
        with_grad = [p for p in self.parameters if p.grad is not None]
        gradients = torch.autograd.grad(loss, with_grad, materialize_grads=True)
        torch._foreach_copy_([p.grad for p in with_grad if p.grad is not None], gradients)
        self._finish(kept, loss)

    def _finish(self, kept: Carry, loss: Tensor) -> None:
        self._update(loss)
        copy_into(kept, self.carry)
        self.carry = kept
