"""Step: begin, move, end. ``step()`` and ``step_in_backward()`` are both a Step."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from avagrad.optim.backends.loop import Backend, Loop
from avagrad.optim.rules import Rule, Scalar, scalar_dtype

if TYPE_CHECKING:
    from avagrad.optim.optimizer import RuleOptimizer

__all__ = ["Step"]


class Step:
    """One step of an optimizer.

    - :meth:`begin` rejects invalid parameters and gradients, makes states, takes a snapshot of the parameters if the
      last one no longer matches, and prepares gamma. If the host must read something, it reads it here.
    - :meth:`move` moves all parameters by their gradients; :meth:`move_one` moves one of them, inside backward.
      Version counters are bumped where autograd does not see a write.
    - :meth:`end` passes the sums for the next gamma to the norm, which starts their all-reduce over ranks.

    A step that a GradScaler skips moves nothing; ranks still join the all-reduce.
    """

    def __init__(self, opt: "RuleOptimizer", *, in_backward: bool = False) -> None:
        self._opt, self._in_backward = opt, in_backward
        self.grad_scale: Tensor | None = None if in_backward else getattr(opt, "grad_scale", None)
        found_inf = None if in_backward else getattr(opt, "found_inf", None)
        self.found_inf: Tensor | None = found_inf if isinstance(found_inf, Tensor) else None  # 0 if none had a gradient
        self.rules: list[Rule] = []
        self.totals: dict[torch.device, Tensor] = {}
        self._work: list[tuple[Backend, Any]] = []
        self._is_empty = False  # nothing to do, on any rank
        self._rules_on: dict[tuple[int, torch.device], Rule] = {}
        self._gammas: dict[torch.device, Scalar] = {}
        self._stale: list[Backend] = []  # kernels whose parameters the loop has moved
        self._has_new_params = False

    def __enter__(self) -> "Step":
        self.begin()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.end()
        else:
            self._opt.refresh()  # some parameters may have moved

    # --- begin ---

    def begin(self) -> None:
        """Begin the step. Afterwards what the parameters share stays the same, and an ordinary step rejects nothing."""
        opt = self._opt
        self.rules = opt._rules()
        opt._warn_of_decay(self.rules)
        if self._skips() and opt._sharding() is None:
            self._is_empty = True
            return
        self.params = opt._current_params(self.rules, in_backward=self._in_backward)
        if not self._in_backward:
            self._collect_gradients()
            self._is_empty = not self._work and self.params.sharding is None
        if not self._is_empty and self.rules and self.rules[0].normalised:
            self.totals = opt._norm.totals(self.params, self.rules)
        if self._in_backward:
            for backend in self.params.backends:
                backend.begin_backward(self)

    def _collect_gradients(self) -> None:
        """Assign gradients to backends. If a kernel cannot read one, the loop moves the kernel's parameters."""
        local: dict[int, Tensor | None] = {}
        if self.params.has_dtensors:  # a gradient may be redistributed: by all ranks in the same order
            local = {view.param_id: view.gradient() for view in self.params.views}
        for backend in self.params.backends:
            grads = [local[view.param_id] for view in backend.views] if local else [p.grad for p in backend.params]
            if all(g is None for g in grads):
                continue
            work = backend.prepare(grads)
            if work is None or not backend.is_kernel:
                self._opt._reject_sparse(grads)
            if work is None:
                self._stale.append(backend)
                backend, work = Loop(backend.views), grads
            self._work.append((backend, work))
        if self._skips(read=not all(backend.is_kernel for backend, _ in self._work)):
            self._work, self._stale = [], []

    def _skips(self, *, read: bool = False) -> bool:
        """Return whether a GradScaler has found an infinity and the optimizer has to skip the step.

        Kernels check this on the device; ``read`` means that some parameters are moved without kernels.
        """
        if self.found_inf is None or not (read or self.found_inf.device.type == "cpu"):
            return False
        return self.found_inf.item() != 0

    # --- for the backends ---

    def rule(self, group: int, device: torch.device) -> Rule:
        """Return a group's rule with its tensors on a device."""
        if (group, device) not in self._rules_on:
            self._rules_on[group, device] = self.rules[group].on(device, scalar_dtype(device))
        return self._rules_on[group, device]

    def gamma(self, device: torch.device) -> Scalar:
        """Return gamma on a device, without a host read: a tensor, or 1.0 if nothing is normalised."""
        if device not in self._gammas:
            total = self.totals.get(device)
            if total is None and self.totals:  # a device that was added during this step
                total = next(iter(self.totals.values())).to(device)
            self._gammas[device] = 1.0 if total is None else self.rules[0].gamma(total)
        return self._gammas[device]

    # --- move ---

    def move(self) -> None:
        """Move all parameters that have a gradient."""
        for backend, work in self._work:
            if unseen := backend.move(work, self):
                torch.autograd.graph.increment_version(unseen)

    def move_one(self, p: Tensor) -> None:
        """Move a parameter by its gradient, inside backward; do nothing if it is not one of the optimizer's."""
        g = p.grad
        assert g is not None
        self._opt._reject_sparse([g])
        found = self.params.find(p)
        if found is None:  # unfrozen or added since the step began
            self.rules = self._opt._rules()
            view = self._opt._join(p, self.rules)
            if view is not None:
                self._has_new_params = True
                Loop([view]).move_one(0, g, self)
            return
        backend, i = found
        if backend.move_one(i, g, self):
            if backend.is_kernel:
                torch.autograd.graph.increment_version(p)
        else:
            Loop(backend.views).move_one(i, g, self)
            self._stale.append(backend)

    # --- end ---

    def end(self) -> None:
        """End the step: from here on the next gamma is known."""
        if self._is_empty:
            return
        if not (self.rules and self.rules[0].normalised):
            return
        if self._has_new_params:
            self.params = self._opt._current_params(self.rules)
            self._stale = self.params.backends
        for backend in self._stale:
            backend.sums(self.rules)
        self._opt._norm.accept(self.params, self.rules)
