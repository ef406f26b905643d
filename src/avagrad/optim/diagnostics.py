"""Numbers about the next step, for logging. One pass over the state, a block at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from avagrad.optim.backends.loop import blocks
from avagrad.optim.params import Params
from avagrad.optim.rules import Delayed

__all__ = ["diagnostics"]

SIZE = 2**20  # coordinates taken at a time: bounds the memory
_BINS = 2**15  # of the positive float32 numbers, by their first 15 bits: a bin is 0.8 % wide


def diagnostics(params: Params, rules: Sequence[Delayed], gamma: float) -> dict[str, float]:
    """Return the numbers that :meth:`DelayedOptimizer.diagnostics` describes."""
    rates: dict[float, Tensor] = {}  # for each lr how many eta are in each bin
    normalised = torch.zeros(_BINS, dtype=torch.float64, device="cpu")  # the same of what gamma normalises
    inactive = known = counted = clipped = 0
    predicted = real = 0.0
    for view in params.views:
        rule, step = rules[view.group], view.step.item()
        lr = float(rule.lr)
        for m, v in zip(*(blocks(x, SIZE) for x in view.state), strict=True):
            eta, r = rule.rates(v, step), rule.sizes(v, step)
            counts = _counts(eta)
            rates[lr] = rates.get(lr, 0) + counts
            normalised += _counts(eta * r) if rule.flags.of_step else counts
            counted += int((eta != 0).sum())
            if step:
                inactive += int((v == 0).sum())
                known += v.numel()
                m_hat, kept = rule.momentum(m, v, step)
                clipped += int((kept != m_hat).sum())
                predicted += (lr * gamma) ** 2 * (eta * r).double().square().sum().item()
                real += (lr * gamma) ** 2 * (eta * kept).double().square().sum().item()
    values = torch.cat([_VALUES * lr * gamma for lr in rates] or [_VALUES])
    numbers = torch.cat([*rates.values()] or [torch.zeros(_BINS, dtype=torch.float64, device="cpu")])
    order = values[numbers > 0].argsort()
    values, numbers = values[numbers > 0][order], numbers[numbers > 0][order]
    median = int((numbers.cumsum(0) < (numbers.sum() + 1) // 2).sum()) if len(values) else 0
    none = not len(values)
    return {
        "gamma": gamma,
        "rate_min": 0.0 if none else values[0].item(),
        "rate_median": 0.0 if none else values[median].item(),
        "rate_max": 0.0 if none else values[-1].item(),
        "norm_share_of_top_1_percent": _share_of_top(normalised, rules[0].flags.norm or 2),
        "inactive_share": inactive / known if known else 0.0,
        "step_rms_predicted": math.sqrt(predicted / counted) if counted else 0.0,
        "step_rms": math.sqrt(real / counted) if counted else 0.0,
        "clipped_share": clipped / counted if counted else 0.0,
    }


def _counts(x: Tensor) -> Tensor:
    """Return how many elements lie in each bin; 0 in none."""
    bins = (x.float().contiguous().view(torch.int32).flatten() >> 16) & (_BINS - 1)  # a NaN may have a sign
    counts = torch.bincount(bins, minlength=_BINS).to(device="cpu", dtype=torch.float64)
    counts[0] = 0
    return counts


# The middle of each bin.
_VALUES = ((torch.arange(_BINS, dtype=torch.int32, device="cpu") << 16) + 2**15).view(torch.float32).double()


def _share_of_top(counts: Tensor, norm: int) -> float:
    """Return the share of the largest 1 % in the sum of powers."""
    counts, values = counts.flip(0), _VALUES.flip(0).nan_to_num(nan=0.0, posinf=0.0) ** norm
    wanted = math.ceil(counts.sum().item() / 100)
    before = counts.cumsum(0) - counts
    taken = (wanted - before).clamp(min=0).minimum(counts)
    total = (counts * values).sum().item()
    return (taken * values).sum().item() / total if total else 0.0
