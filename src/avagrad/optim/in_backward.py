"""Steps inside backward: each parameter moves as soon as its gradient is complete, and the gradient is freed.

Gradients then never exist all at once. For the delayed family this is exact, since the rates and their norm come from
past gradients and are known before backward begins.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from avagrad.optim.sharding import is_dtensor
from avagrad.optim.step import Step

if TYPE_CHECKING:
    from avagrad.optim.optimizer import RuleOptimizer

__all__ = ["StepInBackward"]


class StepInBackward:
    """The context of :meth:`RuleOptimizer.step_in_backward`: inside it backward takes the steps.

    The first gradient of a backward begins a :class:`Step`, and ``optimizer.step()`` ends it.
    """

    def __init__(self, opt: "RuleOptimizer") -> None:
        self._opt, self._owner = opt, type(opt).__name__
        self._is_entered = False
        self._handles: dict[Tensor, Any] = {}  # the hook of each parameter
        self._lock = threading.Lock()  # backward has a thread for each device
        self._step: Step | None = None  # the current one, and
        self._task = -1  # the backward that began it
        self._moved: set[int] = set()

    def __enter__(self) -> "StepInBackward":
        other = self._opt._in_backward
        if self._is_entered or (other is not None and other is not self and other._is_entered):
            raise RuntimeError(
                f"{self._owner}: step_in_backward() is entered while another one of this optimizer is in use or waits "
                "for its step(): exit that one first."
            )
        self._opt._in_backward = None  # an error leaves nothing that step() would wait for
        for p in (p for group in self._opt.param_groups for p in group["params"]):
            if is_dtensor(p):
                raise ValueError(
                    f"{self._owner}: a parameter of shape {tuple(p.shape)} is a DTensor, but must be a plain tensor "
                    "for step_in_backward(): fully_shard sets gradients itself, without hooks. Use step()."
                )
        self._opt._in_backward, self._is_entered = self, True
        for group in self._opt.param_groups:
            self.watch(group["params"])
        return self

    def watch(self, params: list[Tensor]) -> None:
        """Also move these parameters when their gradients are complete."""
        if not self._is_entered:
            return
        for p in params:
            if p.requires_grad and p not in self._handles:
                self._handles[p] = p.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]

    def __exit__(self, error: object, *_: object) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        if error is not None:
            try:
                self.end()
            except Exception:  # the user's own error is the one to show
                self._opt.refresh()
        if self._step is None:  # else step() will end it
            self._opt._in_backward, self._is_entered = None, False

    @torch.no_grad()
    def _complete(self, p: Tensor) -> None:
        with self._lock:
            task = torch._C._current_graph_task_id()
            if p.grad is None:
                raise RuntimeError(
                    f"{self._owner}: a gradient of shape {tuple(p.shape)} was freed before this optimizer could use "
                    "it, by a hook of yours or another step_in_backward(): a parameter can be in one only."
                )
            step = self._step
            if step is None:
                step, self._task = self._begin(), task
            elif self._task != task:
                p.grad = None  # so that step() can end the step
                raise RuntimeError(
                    f"{self._owner}: a second backward() before step(), but inside step_in_backward() the first one "
                    "has already moved the parameters: call step() after each backward(), also after one that failed; "
                    "to accumulate, add up the losses or exit the context; for checkpointing, use_reentrant=False."
                )
            step.move_one(p)
            self._moved.add(id(p))
            p.grad = None

    def _begin(self) -> Step:
        step = Step(self._opt, in_backward=True)
        step.begin()
        self._step = step
        return step

    def close(self, closure: object) -> bool:
        """End the step that backward began; return False if there is none. Called by ``step()``."""
        opt = self._opt
        if not self._is_entered:
            opt._in_backward = None
            raise RuntimeError(
                f"{self._owner}: step_in_backward() was called but not entered, so backward() has moved nothing: write "
                "`with optimizer.step_in_backward():` around backward() and step()."
            )
        if closure is not None:
            raise RuntimeError(
                f"{self._owner}: step() has a closure, but inside step_in_backward() the step is taken by the one "
                "backward() before it: call backward() yourself and step() without a closure, or exit the context."
            )
        if getattr(opt, "grad_scale", None) is not None or getattr(opt, "found_inf", None) is not None:
            for name in ("grad_scale", "found_inf"):  # the scaler removes them only after a step that succeeds
                opt.__dict__.pop(name, None)
            raise RuntimeError(
                f"{self._owner}: step() is called by a GradScaler, but inside step_in_backward() the parameters have "
                "already moved, by gradients that were still scaled: load the last checkpoint, and use bfloat16 "
                "without a scaler, or exit the context."
            )
        left = [p for group in opt.param_groups for p in group["params"] if p.grad is not None]
        if self._step is None and not left:
            return False
        step = self._step or self._begin()
        if any(id(p) in self._moved for p in left):
            raise RuntimeError(
                f"{self._owner}: a parameter that backward has already moved has a gradient again, set by hand, by "
                "DistributedDataParallel (not supported), or by a second backward() before step(): call zero_grad() "
                "and step()."
            )
        for p in left:  # unfrozen since then, or with gradients from elsewhere
            step.move_one(p)
            p.grad = None
        self.end()
        if self._handles:
            for group in opt.param_groups:
                self.watch(group["params"])
        else:
            opt._in_backward, self._is_entered = None, False
        return True

    def end(self) -> None:
        """End the step that backward began, if there is one; parameters that have not moved stay."""
        if self._step is not None:
            step, self._step, self._moved = self._step, None, set()
            step.end()
