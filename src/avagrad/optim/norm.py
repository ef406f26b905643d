"""The one owner of gamma: the sum over all rates, taken tensor by tensor.

gamma_t is a function of the state (``step``, ``exp_avg_sq``) and of the groups' hyper-parameters,
and of nothing else: not of this step's gradients, nor of which parameters have one. So it is worked
out from the state when a step begins, and nothing is kept that a loaded, edited or broadcast state
could make stale. Where parameters are spread over ranks it is worked out when the step before ends,
so that nobody waits for the others (:mod:`avagrad.optim.sharding`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from avagrad.optim.entries import Batch, Entry, Group, count, hyper_of_rates, prefers_foreach, scalar_dtype
from avagrad.optim.foreach import blocks, foreach_rates, in_batches
from avagrad.optim.rules import Scalar, rates, scale
from avagrad.optim.sharding import Sharding

__all__ = ["global_gamma", "key_of_sums", "one_norm", "start_sums", "table_of_sums"]


def global_gamma(batches: Sequence[Batch], sharding: Sharding | None = None) -> dict[torch.device, Tensor]:
    """Return gamma on each device that holds a state: one number, and no host read.

    Where parameters are spread over ranks, all of them call this together.
    """
    groups = [batch.group for batch in batches]
    if sharding is None:
        sums = table_of_sums(batches)[0]
    else:
        sums = sharding.total(key_of_sums(groups), lambda: table_of_sums(batches, sharding))
    gamma = scale(sums[0], sums[1], norm=one_norm(groups))
    # A copy to the CPU must have arrived when it is read; all others may take their time.
    devices = _devices(batches, sharding)
    return {device: gamma.to(device, non_blocking=device.type != "cpu") for device in devices}


def key_of_sums(groups: Sequence[Group]) -> tuple[object, ...]:
    """Return what the sums are made with: where it has changed, they are to be taken again."""
    keys = ("eps", "bias_correction", "active_only", "norm")
    return tuple((group["betas"][1], *(group.get(key) for key in keys)) for group in groups)


def start_sums(sharding: Sharding, groups: Sequence[Group], table: Callable[[], Tensor]) -> None:
    """Start the sums for the next step, where nothing can change them before it.

    Without bias correction parameters count before they have had a gradient, unless they are frozen: then one that is
    thawed, on one rank maybe, changes the sum, and it is taken when the step begins.
    """
    sharding.discard()
    if all(group["bias_correction"] or group["active_only"] for group in groups):
        sharding.start(table(), key_of_sums(groups))


def table_of_sums(batches: Sequence[Batch], sharding: Sharding | None = None) -> Tensor:
    """Return the sum of eta^p over all that this rank counts, and how many they are: in a row for each set of ranks.

    Without sharding there is one row.
    """
    norm = one_norm([batch.group for batch in batches])
    plain_row = 0 if sharding is None else sharding.plain_row
    shares: list[list[tuple[Scalar, Scalar]]] = [[] for _ in range(1 if sharding is None else 1 + len(sharding.groups))]
    for group, entries, never_had_a_gradient in batches:
        rows = [plain_row if sharding is None else sharding.row_of(entry.param) for entry in entries]
        for row, found in enumerate(shares):
            if here := [entry for entry, its in zip(entries, rows, strict=True) if its == row]:
                found += _shares(group, here)
        if not group["bias_correction"] and not group["active_only"]:
            # One product for all that have had no gradient yet, with or without a state: to the same bits. Parameters
            # that are spread over a mesh know how many they are on all ranks together.
            firsts = [_first_count(group, entry, count(entry.param)) for entry in entries if _is_first(entry)]
            firsts_and_unseen = never_had_a_gradient + sum(firsts)
            shares[plain_row].append((firsts_and_unseen * group["eps"] ** -norm, firsts_and_unseen))
    home = _devices(batches, sharding)[0]
    return torch.stack([_sum_of_both(found, home) for found in shares])


def _devices(batches: Sequence[Batch], sharding: Sharding | None) -> list[torch.device]:
    devices = list(dict.fromkeys(entry.w.device for batch in batches for entry in batch.entries))
    return devices or [torch.device("cpu") if sharding is None else sharding.device]


def _sum_of_both(shares: Sequence[tuple[Scalar, Scalar]], device: torch.device) -> Tensor:
    return torch.stack([_sum([share[i] for share in shares], device) for i in (0, 1)])


def one_norm(groups: Sequence[Group], owner: str = "AvaGrad") -> int:
    """Return the ``norm`` of all groups (2 where they have none), or refuse groups that differ in it."""
    norms = [group.get("norm", 2) for group in groups]
    for norm in norms:
        if norm != norms[0]:
            raise ValueError(
                f"{owner}: norm is {norms[0]} in one group and {norm} in another, but must be the same in all: "
                "gamma is one number."
            )
    return int(norms[0])


def _shares(group: Group, entries: Sequence[Entry]) -> list[tuple[Scalar, Scalar]]:
    """Return shares that add up to the group's part of the norm: sums of eta^p, and how many of them count."""
    pasts = [entry.past for entry in entries]
    shares: list[tuple[Scalar, Scalar]] = []
    blocks_of_v = [
        (i, nth, block)
        for i, entry in enumerate(entries)
        if isinstance(pasts[i], Tensor) or pasts[i] > 0
        for nth, block in enumerate(blocks(entry.state[1]))
    ]
    for (i, nth, block), total in zip(blocks_of_v, _power_sums(group, entries, pasts, blocks_of_v), strict=True):
        past = pasts[i]
        d: Scalar = (block != 0).sum(dtype=total.dtype) if group["active_only"] else block.numel()
        if isinstance(past, Tensor):  # only the device knows whether there has been a gradient
            known = (past > 0).to(total.dtype)
            first_d = _first_count(group, entries[i], entries[i].w.numel()) if nth == 0 else 0
            total = torch.where(past > 0, total, first_d * group["eps"] ** -group["norm"])
            d = known * d + (1 - known) * first_d
        shares.append((total, d))
    return shares


def _is_first(entry: Entry) -> bool:
    return not isinstance(entry.past, Tensor) and entry.past == 0


def _first_count(group: Group, entry: Entry, elements: int) -> int:
    """Return how many rates, of 1 / eps, a parameter of so many elements has in the norm before its first gradient."""
    counts = not group["bias_correction"] and not group["active_only"] and entry.param.requires_grad
    return elements if counts else 0


def _power_sums(
    group: Group, entries: Sequence[Entry], pasts: Sequence[Scalar], blocks_of_v: Sequence[tuple[int, int, Tensor]]
) -> list[Tensor]:
    """Return the sum of eta^p over each block, to be added in float64.

    The loop sums a block in the dtype of the moments, pairwise. The norm of foreach adds up in sequence on
    a CPU, where a float32 sum loses digits, so it is told to use float64.
    """
    norm, hyper = group["norm"], hyper_of_rates(group, entries)
    sums: list[Tensor] = []
    if prefers_foreach(group, [entry.w for entry in entries]):
        place: dict[int, Tensor] = {}
        items = [(nth, i, block) for nth, (i, _, block) in enumerate(blocks_of_v)]
        for batch in in_batches(items, key=lambda item: item[2]):
            vs = [v for _, _, v in batch]
            etas = foreach_rates(vs, [pasts[i] for _, i, _ in batch], **hyper[vs[0].device])
            norms = torch.stack(torch._foreach_norm(etas, norm, dtype=scalar_dtype(vs[0].device)))
            place.update(zip([nth for nth, _, _ in batch], (norms**norm).unbind(), strict=True))
        sums = [place[nth] for nth in range(len(items))]
    else:
        for i, _, v in blocks_of_v:
            eta = rates(v, pasts[i], **hyper[v.device])
            sums.append((eta * eta if norm == 2 else eta).sum())
    return sums


def _sum(terms: Sequence[Scalar], device: torch.device) -> Tensor:
    """Add up numbers and tensors, in float64 and on a device."""
    dtype = scalar_dtype(device)
    total = torch.full((), float(sum(x for x in terms if not isinstance(x, Tensor))), dtype=dtype, device=device)
    tensors: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in terms:
        if isinstance(x, Tensor):
            tensors.setdefault((x.device, x.dtype), []).append(x)
    for alike in tensors.values():
        total = total + torch.stack(alike).sum(dtype=scalar_dtype(alike[0].device)).to(device)
    return total
