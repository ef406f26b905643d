"""The one owner of gamma: the sum over all rates, taken tensor by tensor.

gamma_t is a function of the state (``step``, ``exp_avg_sq``) and of the groups' hyper-parameters,
and of nothing else: not of this step's gradients, nor of which parameters have one. So it is worked
out from the state when a step begins, and nothing is kept that a loaded, edited or broadcast state
could make stale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from avagrad.optim.entries import Batch, Entry, Group, host_or_device, hyper_of_rates, prefers_foreach, scalar_dtype
from avagrad.optim.foreach import blocks, foreach_rates, in_batches
from avagrad.optim.rules import Scalar, rates, scale

__all__ = ["global_gamma", "one_norm"]


def global_gamma(batches: Sequence[Batch]) -> dict[torch.device, Tensor]:
    """Return gamma on each device that holds a state: one number, and no host read."""
    norm = one_norm([batch.group for batch in batches])
    totals: dict[torch.device, list[Tensor]] = {}
    counts: list[Scalar] = []
    unseen: list[Scalar] = []
    for group, entries, never_had_a_gradient in batches:
        for share, count in _shares(group, entries):
            totals.setdefault(share.device, []).append(share)
            counts.append(count)
        if not group["bias_correction"] and not group["active_only"]:
            unseen.append(never_had_a_gradient * group["eps"] ** -norm)
            counts.append(never_had_a_gradient)

    home = next(iter(totals), torch.device("cpu"))
    total = _sum(unseen, home)
    for terms in totals.values():
        total = total + torch.stack(terms).sum().to(home)
    gamma = scale(total, _sum(counts, home), norm=norm)
    # A copy to the CPU must have arrived when it is read; all others may take their time.
    return {device: gamma.to(device, non_blocking=device.type != "cpu") for device in (home, *totals)}


def one_norm(groups: Sequence[Group]) -> int:
    """Return the ``norm`` of all groups (2 where they have none), or refuse groups that differ in it."""
    norms = [group.get("norm", 2) for group in groups]
    for norm in norms:
        if norm != norms[0]:
            raise ValueError(
                f"norm is {norms[0]} in one group and {norm} in another, but must be the same in all: "
                "gamma is one number."
            )
    return int(norms[0])


def _shares(group: Group, entries: Sequence[Entry]) -> list[tuple[Tensor, Scalar]]:
    """Return each parameter's share of the norm: the sum of its eta^p, and how many of them count.

    The loop sums a block in the dtype of the moments, pairwise; the sums of blocks are added in float64.
    """
    norm, active_only, bias_correction = group["norm"], group["active_only"], group["bias_correction"]
    hyper = hyper_of_rates(group, entries)
    pasts = [host_or_device(entry.step, group) for entry in entries]
    sums: list[list[Tensor]] = [[] for _ in entries]
    active: list[list[Tensor]] = [[] for _ in entries]
    if prefers_foreach(group, [entry.param for entry in entries]):
        items = [(i, b) for i, entry in enumerate(entries) for b in blocks(entry.state[1])]
        for batch in in_batches(items, key=lambda item: item[1]):
            vs = [v for _, v in batch]
            etas = foreach_rates(vs, [pasts[i] for i, _ in batch], **hyper[vs[0].device])
            # Told to use float64: on a CPU this operation adds up in sequence, and a float32 sum loses digits.
            norms = torch._foreach_norm(etas, norm, dtype=scalar_dtype(vs[0].device))
            signs = torch._foreach_norm(torch._foreach_sign(vs), 1) if active_only else norms
            for (i, _), x, count in zip(batch, norms, signs, strict=True):
                sums[i].append(x**norm)
                active[i].append(count)
    else:
        for i, entry in enumerate(entries):
            for v in blocks(entry.state[1]):
                eta = rates(v, pasts[i], **hyper[v.device])
                sums[i].append((eta * eta if norm == 2 else eta).sum().to(scalar_dtype(v.device)))
                active[i].append((v != 0).sum() if active_only else v)

    shares: list[tuple[Tensor, Scalar]] = []
    for i, entry in enumerate(entries):
        total = torch.stack(sums[i]).sum()
        if active_only:
            shares.append((total, torch.stack(active[i]).sum(dtype=total.dtype)))
            continue
        # Before its first gradient a parameter counts only without bias correction: with 1 / eps, as one
        # that has no state yet, and to the same bits.
        n = entry.w.numel()
        counts_at_once = not bias_correction and entry.param.requires_grad
        first = total.new_zeros(()) + (n * group["eps"] ** -norm if counts_at_once else 0.0)
        past = pasts[i]
        if isinstance(past, Tensor):
            total = torch.where(past > 0, total, first)
            seen: Scalar = (past > 0).to(past.dtype)
        else:
            total = total if past else first
            seen = 1.0 if past else 0.0
        shares.append((total, n if counts_at_once else n * seen))
    return shares


def _sum(terms: Sequence[Scalar], device: torch.device) -> Tensor:
    """Add up numbers and tensors, on a device."""
    total = torch.full(
        (), float(sum(x for x in terms if not isinstance(x, Tensor))), dtype=scalar_dtype(device), device=device
    )
    for term in terms:
        if isinstance(term, Tensor):
            total = total + term.to(device)
    return total
