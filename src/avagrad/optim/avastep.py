"""AvaStep: steps of a known size. It is a form of the delayed rule in :mod:`avagrad.optim.rules`."""

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from avagrad.optim.arguments import Allowed, explain_unknown_keywords
from avagrad.optim.avagrad import DelayedOptimizer
from avagrad.optim.params import Group

__all__ = ["AvaStep"]


class AvaStep(DelayedOptimizer):
    """AvaStep: steps of a known size. Its ``lr`` is Adam's, and means the same at every ``eps``. Beyond the paper.

        m_t     = beta1 m_{t-1} + (1 - beta1) g_t
        r_t     = sqrt(v_{t-1} / (1 - beta2^(t-1)))
        eta_t   = 1 / (r_t + eps)
        w_{t+1} = w_t - lr eta_t / RMS(eta_t r_t) clamp(m_t / (1 - beta1^t), -c r_t, c r_t)
        v_t     = beta2 v_{t-1} + (1 - beta2) g_t^2

    Where AvaGrad normalises the rates, AvaStep normalises the step that they are predicted to make. The root mean
    square of a step is at most c lr, whatever the gradient (with ``norm=2``; weight decay aside). A small eps gives
    Delayed Adam, a large one SGD with momentum and normalised gradients. A coordinate that has had no gradient other
    than 0 is moved by decoupled weight decay alone, and does not count. Gradients are clamped to 1e18. With
    ``clip_update=None`` Theorem 2 of the paper holds; with a clamp it does not.

    All arguments but these are those of :class:`AvaGrad`; ``bias_correction`` and ``active_only`` are always on.

    Args:
        lr: the learning rate, on Adam's scale, with the same schedules. Near the largest stable lr it needs a warm-up
            of 100 steps or more.
        norm: 2 for the root mean square of the predicted step, 1 for the mean of its absolute values.
        clip_update: c; None is no clamp.
        clip_moment: clamp gradients to this multiple of r_t; None is no clamp. With a number, one bad batch does not
            slow down the steps after it; but coordinates that rarely have a gradient lose their second moment.
        decoupled_weight_decay: decay as in AdamW; False adds it to the gradient, as in Adam.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> opt = AvaStep([w], lr=0.01)
    >>> for _ in range(3):
    ...     w.grad = 2 * w.detach()
    ...     opt.step()
    >>> w.detach()
    tensor([ 0.9800, -1.9800])
    """

    _lr_hint = "lr is on Adam's scale here, usually 1e-4 to 1e-2"
    _decoupled = None
    _needs_finite_state = True
    _own_keys = ("norm_of", "clip_update", "clip_moment")
    _allowed: ClassVar[Allowed] = {**DelayedOptimizer._allowed, "norm_of": ("'step'", lambda x: x == "step")}

    @explain_unknown_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        clip_update: float | None = 1.0,
        clip_moment: float | None = None,
        norm: int = 2,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        process_group: Any = None,
    ) -> None:
        defaults: Group = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "norm": norm, "norm_of": "step",
            "clip_update": clip_update, "clip_moment": clip_moment, "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay, "rounding": rounding, "rounding_seed": rounding_seed,
            "foreach": foreach, "capturable": capturable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults, process_group)

    def _adopted(self, group: Group) -> Group:
        """Return the values that mean the same in Adam and AdamW; their eps only if it is not the default."""
        if "amsgrad" not in group:
            return {}
        keys = ["lr", "initial_lr", "betas", *(["eps"] if group.get("eps") != 1e-8 else [])]
        if "decoupled_weight_decay" in group:  # distinguishes Adam from AdamW
            keys += ["weight_decay", "decoupled_weight_decay"]
        unchecked = ("", lambda value: True)  # initial_lr, which schedulers add
        return {key: group[key] for key in keys if key in group and self._allowed.get(key, unchecked)[1](group[key])}
