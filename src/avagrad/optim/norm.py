"""The one owner of gamma: the sum over all rates, taken tensor by tensor.

gamma_t is a function of the state (``step``, ``exp_avg_sq``) and of the groups' hyper-parameters,
and of nothing else: not of this step's gradients, nor of which parameters have one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from avagrad.optim.base import Batch, Entry, Group, host_or_device, prefers_foreach, scalar_dtype
from avagrad.optim.foreach import blocks, foreach_rates, in_batches
from avagrad.optim.rules import Scalar, rates, scale

__all__ = ["GlobalNorm"]


class _Share(NamedTuple):
    """What one parameter adds to the norm, and what this was worked out from."""

    total: Tensor  # the sum of eta^p
    d: Scalar  # the number of rates in it
    v: Tensor
    step: Tensor
    stamp: tuple[object, ...]


class GlobalNorm:
    """Gamma for a step, from each parameter's share of the norm.

    A share is worked out again when what it comes from has changed, as torch's version counters and
    the group's values tell; a parameter that took no part in the last step keeps its share. Nothing
    here is ever saved.
    """

    def __init__(self) -> None:
        self._shares: dict[Tensor, _Share] = {}

    def gamma(self, batches: Sequence[Batch]) -> dict[torch.device, Tensor]:
        """Return gamma on each device that holds a state: one number, and no host read."""
        norm = batches[0].group["norm"]
        totals: dict[torch.device, list[Tensor]] = {}
        counts: list[Tensor] = []
        unseen = known_d = 0.0
        for group, entries, never_had_a_gradient in batches:
            if group["norm"] != norm:
                raise ValueError(
                    f"norm is {norm} in one group and {group['norm']} in another, but must be the same in all: "
                    "gamma is one number."
                )
            for total, count in self._shares_of(group, entries):
                totals.setdefault(total.device, []).append(total)
                if isinstance(count, Tensor):
                    counts.append(count)
                else:
                    known_d += count
            if not group["bias_correction"] and not group["active_only"]:
                unseen += never_had_a_gradient * group["eps"] ** -norm
                known_d += never_had_a_gradient

        home = next(iter(totals), torch.device("cpu"))
        total = torch.full((), unseen, dtype=scalar_dtype(home), device=home)
        for terms in totals.values():
            total = total + torch.stack(terms).sum().to(home)
        d = torch.full_like(total, known_d)
        for count in counts:
            d = d + count.to(home)
        gamma = scale(total, d, norm=norm)
        return {device: gamma.to(device, non_blocking=device.type != "cpu") for device in (home, *totals)}

    def _shares_of(self, group: Group, entries: Sequence[Entry]) -> list[tuple[Tensor, Scalar]]:
        """Return (total, d) for each entry, worked out only where it is not known."""
        if group["capturable"] or group["differentiable"] or torch.compiler.is_compiling():
            # A graph runs without this code, and autograd needs the sum itself: nothing may be kept.
            self._shares = {}
            return _work_out(group, entries)
        stamps = [_stamp(group, entry) for entry in entries]
        stale = []
        for entry, stamp in zip(entries, stamps, strict=True):
            known = self._shares.get(entry.param)
            v = entry.state[1]
            if known is None or known.v is not v or known.step is not entry.step or known.stamp != stamp:
                stale.append((entry, stamp))
        new = _work_out(group, [entry for entry, _ in stale])
        for (entry, stamp), (total, d) in zip(stale, new, strict=True):
            self._shares[entry.param] = _Share(total, d, entry.state[1], entry.step, stamp)
        shares = [self._shares[entry.param] for entry in entries]
        return [(share.total, share.d) for share in shares]


def _stamp(group: Group, entry: Entry) -> tuple[object, ...]:
    """Return all that a share depends on, beside the identity of its tensors."""
    hyper = (group["betas"][1], group["eps"], group["norm"], group["bias_correction"], group["active_only"])
    return (entry.state[1]._version, entry.step._version, entry.param.requires_grad, *hyper)


def _work_out(group: Group, entries: Sequence[Entry]) -> list[tuple[Tensor, Scalar]]:
    """Return (total, d) for each entry, from its state.

    The loop sums a block in the dtype of the moments, pairwise; the sums of blocks are added in float64.
    """
    norm, active_only, bias_correction = group["norm"], group["active_only"], group["bias_correction"]
    hyper = {
        "beta2": group["betas"][1],
        "eps": group["eps"],
        "bias_correction": bias_correction,
        "active_only": active_only,
    }
    pasts = [host_or_device(entry.step, group) for entry in entries]
    sums: list[list[Tensor]] = [[] for _ in entries]
    counts: list[list[Tensor]] = [[] for _ in entries]
    if prefers_foreach(group, [entry.param for entry in entries]):
        items = [(i, b) for i, entry in enumerate(entries) for b in blocks(entry.state[1])]
        for batch in in_batches(items, key=lambda item: item[1]):
            vs = [v for _, v in batch]
            etas = foreach_rates(vs, [pasts[i] for i, _ in batch], **hyper)
            # Told to use float64: on a CPU this operation adds up in sequence, and a float32 sum loses digits.
            norms = torch._foreach_norm(etas, norm, dtype=scalar_dtype(vs[0].device))
            active = torch._foreach_norm(torch._foreach_sign(vs), 1) if active_only else norms
            for (i, _), x, n in zip(batch, norms, active, strict=True):
                sums[i].append(x**norm)
                counts[i].append(n)
    else:
        for i, entry in enumerate(entries):
            for v in blocks(entry.state[1]):
                eta = rates(v, pasts[i], **hyper)
                sums[i].append((eta * eta if norm == 2 else eta).sum().to(scalar_dtype(v.device)))
                counts[i].append((v != 0).sum() if active_only else v)

    shares: list[tuple[Tensor, Scalar]] = []
    for i, entry in enumerate(entries):
        total = torch.stack(sums[i]).sum()
        # Without bias correction a parameter counts from the start; with it, from its first gradient on.
        counted: Scalar = 1.0
        if bias_correction or not entry.param.requires_grad:
            past = pasts[i]
            counted = (past > 0).to(past.dtype) if isinstance(past, Tensor) else float(past > 0)
        if active_only:
            shares.append((total, torch.stack(counts[i]).sum(dtype=total.dtype)))
        else:
            shares.append((total * counted, entry.w.numel() * counted))
    return shares
