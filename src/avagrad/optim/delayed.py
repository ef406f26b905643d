"""DelayedAdam, AvaGrad and AvaGradW: one update rule, three names.

The rule itself is in :mod:`avagrad.optim.rules`; this file gives it torch.optim's manners.
"""

from collections.abc import Callable
from contextlib import nullcontext
from operator import is_not
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import check_values, explain_unknown_keywords
from avagrad.optim.base import RuleOptimizer
from avagrad.optim.entries import (
    Batch,
    Entry,
    Group,
    as_real,
    by_device,
    count,
    host_or_device,
    hyper_of_rates,
    prefers_foreach,
)
from avagrad.optim.foreach import blocks, count_gradients, foreach_delayed_step, in_batches
from avagrad.optim.fused.plan import FusedPlan, fits_its_parameter, reason_against
from avagrad.optim.norm import global_gamma, one_norm, start_sums, table_of_sums
from avagrad.optim.rules import Scalar, delayed_step, rates
from avagrad.optim.sharding import (
    LocalView,
    Sharding,
    is_dtensor,
    local_gradients,
    local_groups,
    local_part,
    refuse_hidden_shards,
    sharding_of,
)

__all__ = ["AvaGrad", "AvaGradW", "DelayedAdam"]


_CHOICES = ("norm", "rounding", "rounding_seed")


class _Begun(NamedTuple):
    """A step that backward is taking: what stands for all of its parameters."""

    plan: FusedPlan | None  # without one, the other paths take it
    gammas: dict[torch.device, Tensor]


def _in_fake_mode() -> bool:
    """Tell whether tensors that are made now have no memory."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(type(mode).__name__ == "FakeTensorMode" for mode in _get_current_dispatch_mode_stack())


class _Delayed(RuleOptimizer):
    """The delayed family, with what differs between its members as flags."""

    _normalised: ClassVar[bool] = True  # gamma from the global norm; else 1
    _decoupled: ClassVar[bool] = False  # weight decay as in AdamW; else as in Adam
    _own_keys: ClassVar[tuple[str, ...]] = ("bias_correction", "active_only", "decoupled_weight_decay")
    _plan: FusedPlan | None = None
    _begun: "_Begun | None" = None  # a step that backward is taking
    _sharding: Sharding | None = None  # where the sum of the rates is over several ranks
    _view: LocalView | None = None  # what the plan sees of parameters that are spread over a mesh
    _process_group: Any = None
    _has_dtensors: bool = False
    _seen: list[Tensor] | None = None  # the parameters that were looked at

    def __init__(self, params: ParamsT, defaults: Group, process_group: Any = None) -> None:
        self._process_group = process_group
        # In the group, under torch's name for it, so that a checkpoint tells what its weight_decay means.
        super().__init__(params, defaults | {"decoupled_weight_decay": self._decoupled})

    def _foreign(self, group: Group) -> str | None:
        if reason := super()._foreign(group):
            return reason
        if ("norm" in group) != self._normalised:
            return f"its groups have {'no' if self._normalised else 'a'} norm"
        if group["decoupled_weight_decay"] != self._decoupled:
            return f"its weight decay is {'not ' if self._decoupled else ''}decoupled"
        return None

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["decoupled_weight_decay"] != self._decoupled:
            raise ValueError(
                f"{type(self).__name__}: decoupled_weight_decay is {group['decoupled_weight_decay']!r}, but must be "
                f"{self._decoupled}: the class says it (AvaGradW decouples, AvaGrad and DelayedAdam do not)."
            )

    def _check_together(self, groups: list[Group]) -> None:
        for group in groups:  # at each step, since a group may be edited; these choose what is done
            check_values(type(self).__name__, {key: group[key] for key in _CHOICES if key in group})
        one_norm(groups, type(self).__name__)

    def _state_tensors(self, group: Group) -> dict[str, bool]:
        return {"exp_avg": True, "exp_avg_sq": True}

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        self._plan = None
        self._forget_sharding()  # a copy may be given its group before it steps
        self._tell_scalers()

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, at any time; what it leaves out is taken from the constructor."""
        super().add_param_group(param_group)
        try:
            self._look_at_sharding()
        except ValueError:
            del self.param_groups[-1]
            raise
        self._tell_scalers()

    # --- parameters that are spread over ranks ---

    @property
    def process_group(self) -> Any:
        """The ranks over which parameters are spread that do not say so themselves.

        It is not saved, pickled or copied, since it is another one elsewhere: set it again there.
        """
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        before, self._process_group = self._process_group, group
        try:
            self._look_at_sharding()
        except ValueError:
            self._process_group = before
            raise
        self._plan = None

    def _forget_sharding(self) -> None:
        """Let go of sums that were started, and have the next step look at the parameters."""
        if self._sharding is not None:
            self._sharding.discard()
        self._sharding, self._seen = None, None

    def _look_again(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if self._seen is None or len(params) != len(self._seen) or any(map(is_not, params, self._seen)):
            self._look_at_sharding()

    def _steps_together(self) -> bool:
        return self._sharding is not None

    def _look_at_sharding(self) -> None:
        """See how the parameters are spread over ranks, and let go of sums that were started before."""
        self._forget_sharding()
        params = [p for group in self.param_groups for p in group["params"]]
        self._has_dtensors = any(map(is_dtensor, params))
        if self._normalised:  # else there is nothing to sum
            owner = type(self).__name__
            refuse_hidden_shards(owner, params, self._process_group)
            self._sharding = sharding_of(owner, params, self._process_group)
        self._seen = params
        self._tell_scalers()

    def _take_part(self, batches: list[Batch]) -> None:
        if self._sharding is not None:
            self._gammas(batches)

    def _start_next_sums(self) -> None:
        if self._sharding is not None:
            sharding, groups = self._sharding, self.param_groups
            start_sums(sharding, groups, lambda: table_of_sums([self._batch_of_states(g) for g in groups], sharding))

    def _tell_scalers(self) -> None:
        # All paths know how to unscale and skip; the fused one does it in passing.
        # Where ranks step together, none of them may be left out because its gradients are not finite.
        together = self._sharding is not None
        self._step_supports_amp_scaling = self._in_backward is not None or together or self._wants_fused()

    # --- the fused path ---

    def _reason_against_fused(self, group: Group) -> str | None:
        return reason_against(local_groups([group]))

    def _wants_fused(self, *, is_compiling: bool = False) -> bool:
        """Tell whether every group is asked, or by default allowed, to take the fused path."""
        for group in self.param_groups:
            default = group["fused"] is None and group["foreach"] is None
            # For the CPU torch.compile makes such code itself.
            default = default and (not is_compiling or all(p.is_cuda for p in group["params"][:1]))
            if group["differentiable"] or not (group["fused"] or default):
                return False
        return True

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a kernel of its own, and tables that it looks after
    def _fused_step(self, *, is_compiling: bool) -> bool:
        if not self._wants_fused(is_compiling=is_compiling) or _in_fake_mode():
            return False
        self._check_together(self.param_groups)
        if self._plan is None and not any(p.grad is not None for group in self.param_groups for p in group["params"]):
            return False
        if self._seen is None:
            self._look_again()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        with local_gradients(self.param_groups) if self._has_dtensors else nullcontext(True) as can_be_read:
            if isinstance(found_inf, Tensor) and found_inf.device.type == "cpu" and found_inf != 0:
                self._take_part([self._batch_of_states(group) for group in self.param_groups])
                self._start_next_sums()
                return True  # skipped; where only the device knows it, the kernel skips
            # Without bias correction a parameter counts before it has had a gradient.
            plan = self._fitting_plan(lambda p, group: p.grad is not None or not group["bias_correction"])
            return can_be_read and plan is not None and plan.step(grad_scale, found_inf)

    def _fitting_plan(self, joins: Callable[[Tensor, Group], bool]) -> FusedPlan | None:
        """Return a plan for the optimizer as it is, those that join given a state; None if there cannot be one."""
        if self._plan is not None and (self._view is None or self._view.fits()) and self._plan.fits():
            return self._plan
        self._plan = self._view = None
        had_dtensors = self._has_dtensors
        self._look_again()
        if self._has_dtensors != had_dtensors:
            return None  # their gradients were looked for elsewhere; the next step finds them
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        misfits = any(not fits_its_parameter(p, state) for p, _ in params if (state := self.state.get(p)))
        if misfits or any(map(self._reason_against_fused, self.param_groups)):
            return None
        new = [(p, group) for p, group in params if not self.state.get(p) and joins(p, group)]
        if new and self._has_an_lr() is not True:
            return None  # this may be a question, which the other paths know how to answer
        if any(p.grad is not None and p.grad.layout != torch.strided for p, _ in new):
            return None  # and they refuse it
        with torch.inference_mode(mode=False):  # what is made here is written to outside of it, too
            for p, group in new:
                self.state[p] = self._new_state(p, group)
            if not any(self.state.get(p) for p, _ in params):
                return None
            self._view = LocalView(self) if self._has_dtensors else None
            options: Group = {"normalised": self._normalised, "decoupled": self._decoupled}
            self._plan = FusedPlan(self._view or self, **options, sharding=self._sharding, row_of=self._rows_of_sums())
        return self._plan if self._plan.fits() else None

    def _rows_of_sums(self) -> Callable[[Tensor], int | None] | None:
        """Return in which row of the table of sums a parameter of the plan is counted; None without such a table."""
        if self._sharding is None:
            return None
        params = [p for group in self.param_groups for p in group["params"]]
        rows = {id(local_part(p)): self._sharding.row_of(p) for p in params}
        return lambda p: rows[id(p)]

    # --- stepping inside backward ---

    def _begin_step(self) -> None:
        self._look_again()
        super()._begin_step()
        # Which of them will have a gradient is not known yet.
        plan = self._fitting_plan(lambda p, _: p.requires_grad) if self._wants_fused() else None
        if plan is not None:
            plan.begin()
            self._begun = _Begun(plan, plan.gammas())
        else:
            self._begun = _Begun(None, self._gammas([self._batch_of_states(group) for group in self.param_groups]))

    def _move_one(self, p: Tensor) -> None:
        assert self._begun is not None
        if self._begun.plan is not None and self._begun.plan.can_move(p):
            self._begun.plan.move(p)
        else:
            super()._move_one(p)

    def _end_step(self) -> None:
        assert self._begun is not None
        if self._begun.plan is not None:
            self._begun.plan.end()
        else:
            self._start_next_sums()
        self._begun = None

    # --- the other paths ---

    def _gammas(self, batches: list[Batch]) -> dict[torch.device, Tensor]:
        return global_gamma(batches, self._sharding) if self._normalised else {}

    def _update(self, batches: list[Batch]) -> None:
        if self._plan is not None:
            self._plan.forget_sums()
        if not any(entry.g is not None for batch in batches for entry in batch.entries):
            if self._begun is None:
                self._take_part(batches)
            return
        gammas = self._begun.gammas if self._begun is not None else self._gammas(batches)
        for group, entries, _ in batches:
            moving = [entry for entry in entries if entry.g is not None]
            if not moving:
                continue
            move = _move_foreach if prefers_foreach(group, [entry.w for entry in moving]) else _move_in_loop
            move(moving, gammas, group, self._decoupled)

    @torch.no_grad()
    def gamma(self) -> float:
        """Return the gamma of the next step, for logging. Unlike a step, this reads from the device.

        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> opt = AvaGrad([w], eps=1.0)
        >>> w.grad = torch.tensor([1.0, 1.0, 1.0])
        >>> opt.step()
        >>> opt.gamma()
        2.0
        """
        self._look_again()
        fits = self._plan is not None and self._view is None and self._plan.fits()
        if self._normalised and self._plan is not None and fits:
            return self._plan.next_gamma().item()  # its sums stand from the last step, so nothing is gone through
        return self._gamma_of([self._batch_of_states(group) for group in self.param_groups])

    def _gamma_of(self, batches: list[Batch]) -> float:
        return next(iter(self._gammas(batches).values())).item() if self._normalised else 1.0

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Return what the next step will multiply gradients with, for logging.

        - ``gamma``;
        - ``rate_min``, ``rate_median``, ``rate_max``: of the effective rates lr * gamma * eta, over all coordinates
          that count in the norm;
        - ``norm_share_of_top_1_percent``: the share of the norm's sum that the largest 1 % of eta make up. Near 1, a
          few coordinates with tiny gradients set the scale for all others (see ``norm``);
        - ``inactive_share``: the share of coordinates that have never had a gradient other than 0. At a small eps
          they set the scale, many or few (see ``active_only``).

        Unlike a step, this reads from the device and needs memory of the size of the parameters.

        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> opt = AvaGrad([w], lr=0.5, eps=1.0)
        >>> w.grad = torch.tensor([1.0, 1.0, 1.0])
        >>> opt.step()
        >>> opt.diagnostics()["rate_median"]
        0.5
        """
        self._look_again()
        batches = [self._batch_of_states(group) for group in self.param_groups]
        gamma = self._gamma_of(batches)
        etas, moves = [torch.zeros(0, device="cpu")], [torch.zeros(0, device="cpu")]
        inactive = known = 0
        for group, entries, unseen in batches:
            rate = float(group["lr"]) * gamma
            hyper = hyper_of_rates(group, entries)
            for entry in entries:
                v, past = entry.state[1], entry.step.item()
                if past:
                    inactive += int((v == 0).sum())
                    known += v.numel()
                eta = rates(v, past, **hyper[v.device]).flatten().float().cpu()
                if group["active_only"]:
                    eta = eta[eta > 0]
                elif past == 0 and (group["bias_correction"] or not entry.param.requires_grad):
                    continue
                etas.append(eta)
                moves.append(rate * eta)
            if not group["bias_correction"] and not group["active_only"]:
                etas.append(torch.full((int(unseen),), 1 / group["eps"], device="cpu"))
                moves.append(torch.full((int(unseen),), rate / group["eps"], device="cpu"))
        eta, move = torch.cat(etas).double() ** batches[0].group.get("norm", 2), torch.cat(moves)
        if not eta.numel():
            eta = move = torch.zeros(1, dtype=torch.float64, device="cpu")
        largest = eta.topk((eta.numel() + 99) // 100).values.sum() / eta.sum().clamp(min=1e-300)
        return {
            "gamma": gamma,
            "rate_min": move.min().item(),
            "rate_median": move.median().item(),
            "rate_max": move.max().item(),
            "norm_share_of_top_1_percent": largest.item(),
            "inactive_share": inactive / known if known else 0.0,
        }

    def _batch_of_states(self, group: Group) -> Batch:
        """Return a group's state as a step would see it, creating nothing."""
        entries, unseen = [], 0
        for p in group["params"]:
            if state := self.state.get(p):
                moments = [as_real(local_part(state[name])) for name in self._state_tensors(group)]
                past = host_or_device(state["step"], group)
                entries.append(Entry(p, as_real(local_part(p).detach()), None, state["step"], past, moments))
            elif p.requires_grad:
                unseen += count(p)
        return Batch(group, entries, unseen)


class DelayedAdam(_Delayed):
    r"""Delayed Adam: Adam whose rates come from the past alone (the paper's Algorithm 1).

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        w_{t+1} &= w_t - \alpha \, m_t / (\sqrt{v_{t-1}} + \epsilon) \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2

    Swapping the last two lines gives Adam back. Since the rates do not depend on the current sample,
    it converges as SGD does, where Adam may not. But a coordinate that has had no gradient yet has the rate
    lr / eps, and its first gradient moves it that far: with embeddings, sparse inputs or dead units use
    ``active_only=True``, or a larger eps.

    Args:
        params: parameters or named parameters to optimize, or dicts that define parameter groups.
        lr: the learning rate alpha; a number or a tensor of one element.
        betas: the decay of the two moments.
        eps: added to the root of the second moment; from 1e-15 to 1e15.
        weight_decay: added to the gradient, times the parameter (L2).
        bias_correction: divide the moments by 1 - beta^t. The first gradient of a parameter then only
            fills its moments, because there is no earlier one to take rates from. False is the paper's
            box to the letter, with a first step of lr / eps.
        active_only: coordinates that have never had a gradient other than 0 do not move. Beyond the paper.
        maximize: go up instead of down.
        rounding: how bfloat16 and float16 parameters take their updates, which are worked out in float32:
            ``"nearest"``; ``"stochastic"``, up or down at random so that the mean is right; or ``"kahan"``, which
            keeps what is cut off in a state tensor of the parameter's size and adds it next time. Only the last
            two keep such parameters learning when updates become small.
        rounding_seed: for stochastic rounding; its random bits depend on it, on the step and on the place of the
            element alone.
        foreach: use the foreach implementation; None chooses as torch.optim does. Its temporaries take at most
            some hundred megabytes, whatever the size of the model.
        capturable: keep ``step`` on the device, so that a CUDA graph can hold the step.
        differentiable: let autograd follow the step.
        fused: take the whole step in one pass over memory: on CUDA by Triton, on a CPU by native code that a C
            compiler builds at the first step. None does so where it can. Parameters may be float32, bfloat16,
            float16, complex64 and, on a CPU, float64. It keeps the sum that the norm needs from
            the end of a step: after writing to ``exp_avg_sq`` or ``step`` by hand, put a new tensor into the state
            or load it.
        process_group: taken as :class:`AvaGrad` does, and not needed: there is no norm.

    >>> import torch
    >>> from avagrad import DelayedAdam
    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = DelayedAdam([w], lr=0.01)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> w
    Parameter containing:
    tensor([ 0.9800, -1.9800], requires_grad=True)

    Reference: Savarese, McAllester, Babu, Maire, "Domain-independent Dominance of Adaptive Methods".
    """

    _normalised = False

    @explain_unknown_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        active_only: bool = False,
        maximize: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        numbers: Group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        forms: Group = {"bias_correction": bias_correction, "active_only": active_only, "maximize": maximize}
        half: Group = {"rounding": rounding, "rounding_seed": rounding_seed}
        paths: Group = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, numbers | forms | half | paths, process_group)


class AvaGrad(_Delayed):
    r"""AvaGrad: Delayed Adam, its rates divided by their root mean square (the paper's Algorithm 2).

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        \eta_t &= 1 / (\sqrt{v_{t-1}} + \epsilon) \\
        w_{t+1} &= w_t - \alpha \, \frac{\eta_t}{\lVert \eta_t / \sqrt{d} \rVert_2} \, m_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2

    The norm runs over all parameters of all groups, whether or not they have a gradient in this step.
    It makes ``lr`` and ``eps`` (nearly) independent, so that they can be searched one after the other.

    Args:
        params: parameters or named parameters to optimize, or dicts that define parameter groups.
        lr: the learning rate alpha; a number or a tensor of one element. It is of the size of SGD's (divided by
            1 - momentum), not of Adam's.
        betas: the decay of the two moments.
        eps: how adaptive the method is: small as Adam, large as SGD; from 1e-15 to 1e15.
        weight_decay: added to the gradient, times the parameter (L2). :class:`AvaGradW` decouples it.
        bias_correction: divide the moments by 1 - beta^t. The first gradient of a parameter then only
            fills its moments, because there is no earlier one to take rates from. False is the paper's
            box to the letter.
        norm: 2 for the root mean square of the rates (the paper), 1 for their mean, in which a few huge
            rates count far less. Beyond the paper.
        active_only: coordinates that have never had a gradient other than 0 do not move, and do not count in
            the norm. Beyond the paper.
        maximize: go up instead of down.
        rounding: how bfloat16 and float16 parameters take their updates, which are worked out in float32:
            ``"nearest"``; ``"stochastic"``, up or down at random so that the mean is right; or ``"kahan"``, which
            keeps what is cut off in a state tensor of the parameter's size and adds it next time. Only the last
            two keep such parameters learning when updates become small.
        rounding_seed: for stochastic rounding; its random bits depend on it, on the step and on the place of the
            element alone.
        foreach: use the foreach implementation; None chooses as torch.optim does. Its temporaries take at most
            some hundred megabytes, whatever the size of the model.
        capturable: keep ``step`` on the device, so that a CUDA graph can hold the step.
        differentiable: let autograd follow the step.
        fused: take the whole step in one pass over memory: on CUDA by Triton, on a CPU by native code that a C
            compiler builds at the first step. None does so where it can. Parameters may be float32, bfloat16,
            float16, complex64 and, on a CPU, float64. It keeps the sum that the norm needs from
            the end of a step: after writing to ``exp_avg_sq`` or ``step`` by hand, put a new tensor into the state
            or load it.
        process_group: the ranks over which parameters are spread that do not say so themselves: FSDP1's with
            use_orig_params, ZeroRedundancyOptimizer's, DeepSpeed's. DTensors (fully_shard, tensor parallel) need none.
            It is an attribute, and not part of a saved, pickled or copied optimizer.

    >>> import torch
    >>> from avagrad import AvaGrad
    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AvaGrad([w], lr=0.1)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> w
    Parameter containing:
    tensor([ 0.5199, -1.4965], requires_grad=True)

    Reference: Savarese, McAllester, Babu, Maire, "Domain-independent Dominance of Adaptive Methods".
    """

    @explain_unknown_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 0.1,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        norm: int = 2,
        active_only: bool = False,
        maximize: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        numbers: Group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "norm": norm}
        forms: Group = {"bias_correction": bias_correction, "active_only": active_only, "maximize": maximize}
        half: Group = {"rounding": rounding, "rounding_seed": rounding_seed}
        paths: Group = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, numbers | forms | half | paths, process_group)


class AvaGradW(AvaGrad):
    r"""AvaGrad with decoupled weight decay, as AdamW is to Adam.

    Instead of entering the gradient, the decay shrinks the parameter by ``1 - lr * weight_decay`` at
    each step (with bias correction: each step after a parameter's first). All else, arguments
    included, is :class:`AvaGrad`'s.

    >>> import torch
    >>> from avagrad import AvaGradW
    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AvaGradW([w], lr=0.1, weight_decay=0.01)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> w
    Parameter containing:
    tensor([ 0.5182, -1.4929], requires_grad=True)
    """

    _decoupled = True


def _hyper_of_step(group: Group, entries: list[Entry], decoupled: bool) -> dict[torch.device, Group]:
    return {
        device: {
            "lr": here["lr"],
            "beta1": here["betas"][0],
            "beta2": here["betas"][1],
            "weight_decay": here["weight_decay"],
            "decoupled": decoupled,
            "bias_correction": here["bias_correction"],
            "active_only": here["active_only"],
            "maximize": here["maximize"],
        }
        for device, here in by_device(group, entries).items()
    }


def _move_in_loop(entries: list[Entry], gammas: dict[torch.device, Tensor], group: Group, decoupled: bool) -> None:
    of_rates, of_step = hyper_of_rates(group, entries), _hyper_of_step(group, entries, decoupled)
    for entry in entries:
        w, g, (m, v) = entry.values(group)
        eta = rates(v, entry.past, **of_rates[w.device])
        moved = delayed_step(w, g, m, v, entry.past + 1, eta, gammas.get(w.device, 1.0), **of_step[w.device])
        entry.take(group, *moved)


def _move_foreach(entries: list[Entry], gammas: dict[torch.device, Tensor], group: Group, decoupled: bool) -> None:
    of_rates, of_step = hyper_of_rates(group, entries), _hyper_of_step(group, entries, decoupled)
    items: list[tuple[Tensor, Tensor, Tensor, Tensor, Scalar, Group]] = []
    for entry in entries:
        assert entry.g is not None
        pieces = zip(*map(blocks, (entry.w, entry.g, *entry.state)), strict=True)
        rests = [None] if entry.compensation is None else blocks(entry.compensation)
        roundings = [entry.rounding(group) | {"compensation": rest} for rest in rests]
        items.extend((w, g, m, v, entry.past, roundings[i % len(roundings)]) for i, (w, g, m, v) in enumerate(pieces))
    for batch in in_batches(items, key=lambda item: item[0]):
        ws, gs, ms, vs, pasts, roundings = (list(column) for column in zip(*batch, strict=True))
        device = ws[0].device
        hyper = of_rates[device] | of_step[device]
        foreach_delayed_step(ws, gs, ms, vs, pasts, roundings, gammas.get(device, 1.0), **hyper)
    count_gradients([entry.step for entry in entries])
