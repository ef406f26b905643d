"""Numbers about the next step, for logging. One pass over the state, one block at a time.

Everything is a sum over coordinates: histograms and a few numbers, in one row of a table for each set of ranks that
adds them up (:mod:`avagrad.optim.sharding`). So the numbers cover the whole model, however it is sharded.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from avagrad.optim.backends.loop import blocks
from avagrad.optim.params import Params, ParamView
from avagrad.optim.rules import Delayed, scalar_dtype
from avagrad.optim.sharding import Sharding

__all__ = ["diagnostics"]

SIZE, CPU_SIZE = 2**20, 2**17  # coordinates per block: bounds the memory; on a CPU a block stays in its caches
_BINS = 2**15  # the positive bfloat16 numbers, 0.4 to 0.8 % apart
_NUMBERS = 6


def diagnostics(params: Params, rules: Sequence[Delayed], gamma: float, sharding: Sharding | None) -> dict[str, float]:
    """Return the numbers that :meth:`DelayedOptimizer.diagnostics` describes."""
    groups = 0 if sharding is None else len(sharding.groups)
    table = torch.zeros(1 + groups, 2 * _BINS + _NUMBERS, dtype=torch.float64, device="cpu")

    def kind_of(view: ParamView) -> tuple[int | None, int, float, torch.device]:
        row = 0 if sharding is None else sharding.row_of(view.param)
        return row, view.group, view.step.item(), view.w.device

    for (row, group, step, device), views in itertools.groupby(params.views, kind_of):
        if row is not None:
            table[row] += _sums(views, rules[group], step, device)
    total = table.sum(0) if sharding is None else sharding.add_up(table)
    rates, normalised, numbers = torch.split(total, [_BINS, _BINS, _NUMBERS])
    inactive, known, counted, clipped, predicted, real = numbers.tolist()
    values, many = _VALUES[rates > 0] * gamma, rates[rates > 0]
    median = int((many.cumsum(0) < (many.sum() + 1) // 2).sum())
    none = not len(values)
    return {
        "gamma": gamma,
        "rate_min": 0.0 if none else values[0].item(),
        "rate_median": 0.0 if none else values[median].item(),
        "rate_max": 0.0 if none else values[-1].item(),
        "norm_share_of_top_1_percent": _share_of_top(normalised, rules[0].flags.norm or 2),
        "inactive_share": inactive / known if known else 0.0,
        "step_rms_predicted": gamma * math.sqrt(predicted / counted) if counted else 0.0,
        "step_rms": gamma * math.sqrt(real / counted) if counted else 0.0,
        "clipped_share": clipped / counted if counted else 0.0,
    }


def _sums(views: Iterable[ParamView], rule: Delayed, step: float, device: torch.device) -> Tensor:
    """Return the histograms of lr eta and of what gamma normalises, and the numbers, all without gamma."""
    sizes = torch.zeros(_BINS, dtype=torch.int64, device=device)
    totals = torch.zeros(3, dtype=scalar_dtype(device), device=device)
    clipped, predicted, real = totals  # a count, and sums of squared steps
    for view in views:
        for m, v in zip(*(blocks(x, CPU_SIZE if device.type == "cpu" else SIZE) for x in view.state), strict=True):
            r = rule.sizes(v, step)
            sizes += torch.bincount(_bins(r), minlength=_BINS)
            if step:
                m_hat, kept = rule.momentum(m, r, step)
                if kept is not m_hat:
                    clipped += torch.count_nonzero(m_hat / kept > 1 + 1e-5)  # beyond rounding
                eta = rule.rates(r, step)
                for total, move in ((predicted, r.mul_(eta)), (real, eta.mul_(kept))):  # in memory that is here
                    total += torch.dot(move.flatten(), move.flatten())
    # The rule maps each bin as a whole.
    many, values, lr = sizes.to(device="cpu", dtype=torch.float64), _VALUES.clone(), float(rule.lr)
    eta = rule.rates(values, step)
    histograms = torch.zeros(2, _BINS, dtype=torch.float64, device="cpu")
    for histogram, x in zip(histograms, (lr * eta, eta * values if rule.flags.norm_of_step else eta), strict=True):
        histogram.index_add_(0, _bins(x).int(), many)
        histogram[0] = 0
    known = many if step else torch.zeros_like(many)
    counts = [x.sum().item() for x in (known[0], known, many[eta != 0])]
    factors = torch.tensor([1.0, lr * lr, lr * lr], dtype=torch.float64, device="cpu")
    numbers = torch.cat([torch.tensor(counts, dtype=torch.float64, device="cpu"), factors * totals.cpu()])
    return torch.cat([*histograms, numbers])


def _bins(x: Tensor) -> Tensor:
    """Return the bin of each element, its bfloat16 number without the sign; 0 is in bin 0."""
    return x.bfloat16().contiguous().view(torch.int16).flatten() & (_BINS - 1)  # a NaN may have a sign


_VALUES = torch.arange(_BINS, dtype=torch.int16, device="cpu").view(torch.bfloat16).double()  # NaN at the end


def _share_of_top(counts: Tensor, norm: int) -> float:
    """Return the share of the largest 1 % in the sum of powers."""
    counts, values = counts.flip(0), _VALUES.flip(0).nan_to_num(nan=0.0, posinf=0.0) ** norm
    wanted = math.ceil(counts.sum().item() / 100)
    before = counts.cumsum(0) - counts
    taken = (wanted - before).clamp(min=0).minimum(counts)
    total = (counts * values).sum().item()
    return (taken * values).sum().item() / total if total else 0.0
