"""DelayedAdam, AvaGrad and AvaGradW: the classes of the delayed rule. The rule is in :mod:`avagrad.optim.rules`."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import ALLOWED, BOOL, Allowed, explain_unknown_keywords, is_finite
from avagrad.optim.diagnostics import diagnostics
from avagrad.optim.norm import Norm
from avagrad.optim.optimizer import RuleOptimizer
from avagrad.optim.params import Group, Params
from avagrad.optim.rules import Delayed
from avagrad.optim.sharding import Sharding, sharding_of

__all__ = ["AvaGrad", "AvaGradW", "DelayedAdam", "DelayedOptimizer"]


class DelayedOptimizer(RuleOptimizer):
    """Base class of the delayed family. Its members differ in flags."""

    _normalised: ClassVar[bool] = True  # gamma from the global norm; else 1
    _lr_hint = "lr is on SGD's scale here, not AdamW's: the larger it is, the smaller weight_decay must be"
    _decoupled: ClassVar[bool | None] = False  # weight decay as in AdamW, else as in Adam; None: an argument
    _has_kernels = True
    _rule_class = Delayed
    _allowed: ClassVar[Allowed] = {
        **ALLOWED,
        "norm": ("1 or 2", lambda x: type(x) is int and x in (1, 2)),
        "bias_correction": BOOL,
        "active_only": BOOL,
        "decoupled_weight_decay": BOOL,
        "clip_update": (
            "a number above 0 and up to 1e15, or None",
            lambda x: x is None or (is_finite(x) and 0 < x <= 1e15),
        ),
        "clip_moment": (
            "a number above 1 and up to 1e15, or None",
            lambda x: x is None or (is_finite(x) and 1 < x <= 1e15),
        ),
    }
    _own_keys = ("bias_correction", "active_only", "decoupled_weight_decay")
    _process_group: Any = None  # of an optimizer that was copied or unpickled

    def __init__(self, params: ParamsT, defaults: Group, process_group: Any) -> None:
        self._process_group = process_group
        # Saved in the group, under torch's name, so that a checkpoint shows what its weight_decay means.
        super().__init__(params, {"decoupled_weight_decay": self._decoupled, **defaults})

    def _state_tensors(self, group: Group) -> dict[str, bool]:
        return {"exp_avg": True, "exp_avg_sq": True}

    def _foreign_reason(self, group: Group) -> str | None:
        if reason := super()._foreign_reason(group):
            return reason
        if ("norm" in group) != self._normalised:
            return f"its groups have {'no' if self._normalised else 'a'} norm"
        if self._decoupled not in (None, group["decoupled_weight_decay"]):
            return f"its weight decay is {'not ' if self._decoupled else ''}decoupled"
        return None

    def _check_combination(self, group: Group) -> None:
        corrected = "bias_correction" not in self.defaults or group["bias_correction"]
        if group["clip_update"] is not None and not corrected:
            raise ValueError(
                f"{type(self).__name__}: clip_update is {group['clip_update']!r} and bias_correction is False, but "
                "clip_update must be None then: the first gradients have no typical size yet."
            )
        if self._decoupled not in (None, group["decoupled_weight_decay"]):
            raise ValueError(
                f"{type(self).__name__}: decoupled_weight_decay is {group['decoupled_weight_decay']!r}, but must be "
                f"{self._decoupled}: the class decides it (AvaGradW decouples, AvaGrad and DelayedAdam do not)."
            )

    def _check_together(self, groups: Sequence[Group]) -> None:
        first, *others = dict.fromkeys(group.get("norm") for group in groups) or [None]
        if others and self._normalised:
            raise ValueError(
                f"{type(self).__name__}: norm is {first} in one group and {others[0]} in another, but must be the same "
                "in all: gamma is one number."
            )

    def _delayed_rules(self) -> list[Delayed]:
        return [rule for rule in self._rules() if isinstance(rule, Delayed)]

    # --- parameters that are sharded over ranks ---

    @property
    def process_group(self) -> Any:
        """The ranks over which parameters are sharded that carry no placement themselves.

        It is not saved, pickled or copied, since it is different in another process: set it again there.
        """
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        before, self._process_group = self._process_group, group
        try:
            self._sharding()
        except ValueError:
            self._process_group = before
            raise
        self.refresh()

    def _sharding(self) -> Sharding | None:
        return self._find_sharding() if self._normalised else None  # else there is nothing to sum

    def _find_sharding(self) -> Sharding | None:
        params = [p for group in self.param_groups for p in group["params"]]
        return sharding_of(type(self).__name__, params, self._process_group)

    # --- for logging ---

    @torch.no_grad()
    def gamma(self) -> float:
        """Return the gamma of the next step, for logging. Unlike a step, this reads from the device.

        If parameters are sharded over ranks, all ranks must call this together.

        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> opt = AvaGrad([w], eps=1.0)
        >>> w.grad = torch.tensor([1.0, 1.0, 1.0])
        >>> opt.step()
        >>> opt.gamma()
        2.0
        """
        rules = self._delayed_rules()
        if not self._normalised:
            return 1.0
        params = self._params
        if params is None or not params.matches(self, rules):
            params = Params(self, rules, placeholders=True)
        totals = self._norm.totals(params, rules)
        return rules[0].gamma(next(iter(totals.values()))).item()

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Return numbers about the next step, for logging. Quantiles and the share of the top are accurate to 1 %.

        - ``gamma``;
        - ``rate_min``, ``rate_median``, ``rate_max``: of the effective rates lr * gamma * eta, over all coordinates
          that count in the norm;
        - ``norm_share_of_top_1_percent``: the share of the norm's sum that comes from its largest 1 % of terms.
          Near 1, a few coordinates with tiny gradients set the scale for all others (see ``norm``);
        - ``inactive_share``: the share of coordinates that have never had a gradient other than 0. At a small eps
          they set the scale, however few they are (see ``active_only``);
        - ``step_rms_predicted``: the root mean square of a step in which every momentum has the typical size of its
          gradient. In AvaStep, with ``norm=2`` and one lr, it is lr;
        - ``step_rms``: the same with the current momentum, about that of the last step. It is smaller, by the
          noise that the momentum averages out;
        - ``clipped_share``: the share of coordinates whose momentum ``clip_update`` would clamp.

        Unlike a step, this goes over the whole state and reads from the device. It takes the time of some ten steps
        and at most 64 MB. If parameters are sharded over ranks, it covers the whole model, and all ranks must call it.

        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> opt = AvaGrad([w], lr=0.5, eps=1.0)
        >>> w.grad = torch.tensor([1.0, 1.0, 1.0])
        >>> opt.step()
        >>> round(opt.diagnostics()["rate_median"], 2)
        0.5
        """
        rules = self._delayed_rules()
        params = Params(self, rules, placeholders=True)
        gamma = 1.0
        if self._normalised:
            gamma = rules[0].gamma(next(iter(Norm().totals(params, rules).values()))).item()
        return diagnostics(params, rules, gamma, self._find_sharding())


class DelayedAdam(DelayedOptimizer):
    """Delayed Adam: Adam whose rates come only from past gradients (the paper's Algorithm 1).

        m_t     = beta1 m_{t-1} + (1 - beta1) g_t
        w_{t+1} = w_t - lr m_t / (sqrt(v_{t-1}) + eps)
        v_t     = beta2 v_{t-1} + (1 - beta2) g_t^2

    Swapping the last two lines gives Adam. Since the rates do not depend on the current sample,
    it converges as SGD does, where Adam may not. But a coordinate that has had no gradient yet has the rate
    lr / eps, and its first gradient moves it that far: with embeddings, sparse inputs or dead units use
    ``active_only=True``, or a larger eps. A gradient far larger than all before it is divided by the old, small
    size, so even a second step may be huge: ``clip_update=1`` bounds every move by lr, with AdamW-like results.

    The arguments are those of :class:`AvaGrad`, without ``norm``. ``lr`` and ``eps`` mean what they mean in Adam;
    ``process_group`` is not needed. With ``bias_correction=False`` the first step has the size lr / eps.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = DelayedAdam([w], lr=0.01)
    >>> for _ in range(3):
    ...     w.grad = 2 * w.detach()
    ...     opt.step()
    >>> w.detach()
    tensor([ 0.9800, -1.9800])
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
        clip_update: float | None = None,
        maximize: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        defaults: Group = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "active_only": active_only, "maximize": maximize,
            "clip_update": clip_update, "rounding": rounding, "rounding_seed": rounding_seed,
            "foreach": foreach, "capturable": capturable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, process_group)


class AvaGrad(DelayedOptimizer):
    """AvaGrad: Delayed Adam, its rates divided by their root mean square (the paper's Algorithm 2).

        m_t     = beta1 m_{t-1} + (1 - beta1) g_t
        eta_t   = 1 / (sqrt(v_{t-1}) + eps)
        w_{t+1} = w_t - lr eta_t / RMS(eta_t) m_t
        v_t     = beta2 v_{t-1} + (1 - beta2) g_t^2

    The norm runs over all parameters of all groups, whether or not they have a gradient in this step.
    It makes ``lr`` and ``eps`` (nearly) independent, so that they can be searched one after the other.

    Args:
        params: parameters or named parameters to optimize, or dicts that define parameter groups.
        lr: the learning rate alpha; a number or a tensor of one element. It is on SGD's scale (divided by
            1 - momentum), not Adam's.
        betas: the decay of the two moments.
        eps: how adaptive the method is: like Adam if small, like SGD if large; from 1e-15 to 1e15.
        weight_decay: added to the gradient, times the parameter (L2). :class:`AvaGradW` decouples it.
        bias_correction: divide the moments by 1 - beta^t. The first gradient of a parameter then only
            fills its moments, because there is no earlier one to take rates from. False is the paper's
            algorithm as printed.
        norm: 2 for the root mean square of the rates (the paper), 1 for their mean, in which a few huge
            rates count far less. Beyond the paper.
        active_only: coordinates that have never had a gradient other than 0 do not move, and do not count in
            the norm. Beyond the paper.
        clip_update: clamp a coordinate's momentum to this multiple of the typical size of its gradient, the root of
            the second moment; None is no clamp. With a clamp, coordinates without a second moment do not move.
            Beyond the paper; not with ``bias_correction=False``.
        maximize: maximize the objective instead of minimizing it.
        rounding: how updates, which are computed in float32, are rounded to bfloat16 and float16 parameters:
            ``"nearest"``; ``"stochastic"``, up or down at random so that the mean is right; or ``"kahan"``, which
            keeps the rounding error in a state tensor of the parameter's size and adds it next time. Only the last
            two keep such parameters learning when updates become small.
        rounding_seed: seed of stochastic rounding; the random bits depend only on it, on the step and on the
            position of the element.
        foreach: use the foreach implementation; None chooses as torch.optim does. Its temporaries take at most
            a few hundred megabytes, whatever the size of the model.
        capturable: keep ``step`` on the device, so that a CUDA graph can hold the step.
        fused: take the whole step in one pass over memory: by Triton on CUDA, by native code on a CPU. None does so
            where possible. Parameters may be float32, bfloat16, float16 and, on a CPU, float64.
        process_group: the ranks over which parameters are sharded that carry no placement themselves: FSDP1's with
            use_orig_params, ZeroRedundancyOptimizer's, DeepSpeed's. DTensors (fully_shard, tensor parallel) need none.
            It is an attribute, and not part of a saved, pickled or copied optimizer.

    Reference: Savarese, McAllester, Babu, Maire, "Domain-independent Dominance of Adaptive Methods".

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AvaGrad([w], lr=0.1)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> w.detach()
    tensor([ 0.5199, -1.4965])
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
        clip_update: float | None = None,
        maximize: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        defaults: Group = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "norm": norm,
            "bias_correction": bias_correction, "active_only": active_only, "maximize": maximize,
            "clip_update": clip_update, "rounding": rounding, "rounding_seed": rounding_seed,
            "foreach": foreach, "capturable": capturable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, process_group)


class AvaGradW(AvaGrad):
    """AvaGrad with decoupled weight decay, as AdamW is to Adam.

    Instead of entering the gradient, the decay shrinks the parameter by ``1 - lr * weight_decay`` at
    each step (with bias correction: each step after a parameter's first). Everything else, including
    the arguments, is as in :class:`AvaGrad`.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AvaGradW([w], lr=0.1, weight_decay=0.01)
    >>> for _ in range(3):
    ...     w.grad = 2 * w.detach()
    ...     opt.step()
    >>> w.detach()
    tensor([ 0.5182, -1.4929])
    """

    _decoupled = True
