"""Parameters that are sharded over ranks: the local part of each, and which rank counts it.

The norm runs over every element of every parameter, on all ranks. So each element is counted once, by one rank,
and the ranks add up their sums: two numbers in one all-reduce for each set of ranks
(:mod:`avagrad.optim.norm`), however many parameters there are.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Sharding"]

PLAIN = (Tensor, torch.nn.Parameter)  # tensors that are no subclass, such as a DTensor


# --- the local part --------------------------------------------------------------------------------------------------


def is_dtensor(x: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without this import there are no DTensors
    return module is not None and type(x) not in PLAIN and isinstance(x, module.DTensor)


def local_part(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of a tensor on this rank; a plain tensor itself. Called where autograd records nothing.

    With ``like`` the tensor gets the placements of that one first: a gradient may still need a reduction over ranks.
    """
    if not is_dtensor(x):
        return x
    sharded: Any = x
    if like is not None and is_dtensor(like) and sharded.placements != like.placements:  # type: ignore[attr-defined]
        sharded = sharded.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    local = sharded.to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def global_max(p: Tensor, x: Tensor) -> Tensor:
    """Return the largest element of a tensor that is sharded as ``p`` is, with ``x`` as its local part."""
    import torch.distributed as dist

    largest = x.amax() if x.numel() else x.new_full((), -torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_group_of(p.device_mesh))  # type: ignore[attr-defined]
    return largest


# --- which rank counts it --------------------------------------------------------------------------------------------


class Sharding:
    """Which rank counts which parameter. Immutable.

    Sums are rows of a table: row 0 is the same on every rank, each other row is added up over a group of ranks.
    """

    def __init__(self, params: Sequence[Tensor], process_group: Any = None) -> None:
        self.groups: list[Any] = [] if process_group is None else [process_group]
        self.device = params[0].device if params else _device_of(process_group)
        plain_row = len(self.groups)  # of tensors that carry no placement
        self._rows: dict[int, int | None] = {}  # by id; None: another rank counts it
        by_ranks: dict[tuple[int, ...], int] = {}
        for p in params:
            if not is_dtensor(p):
                self._rows[id(p)] = plain_row
                continue
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            ranks = tuple(mesh.mesh.flatten().tolist())
            if ranks not in by_ranks:
                self.groups.append(_group_of(mesh))
                by_ranks[ranks] = len(self.groups)
            at = zip(mesh.get_coordinate(), placements, strict=True)
            is_replica = any(place for place, placement in at if placement.is_replicate())
            self._rows[id(p)] = None if is_replica else by_ranks[ranks]

    def row_of(self, p: Tensor) -> int | None:
        """Return the row in which this rank counts a parameter; None if another rank does."""
        return self._rows[id(p)]

    def all_reduce(self, table: Tensor) -> list[Any]:
        """Start the all-reduce of each row of a table but the first over its group; return the works to wait for."""
        import torch.distributed as dist

        pairs = zip(table[1:], self.groups, strict=True)
        return [dist.all_reduce(row, group=group, async_op=True) for row, group in pairs]

    def add_up(self, table: Tensor) -> Tensor:
        """Return the total of a table over all ranks, on the CPU. All ranks call this together."""
        table = table.to(self.device)
        for work in self.all_reduce(table):
            work.wait()
        return table.to("cpu").sum(0)


def sharding_of(owner: str, params: Sequence[Tensor], process_group: Any) -> Sharding | None:
    """Return how parameters are sharded over ranks; None if they are not. Reject what cannot be summed."""
    _reject_flat_parameters(owner, params, process_group)
    sharded = [p for p in params if is_dtensor(p)]
    if process_group is not None and sharded:
        raise ValueError(
            f"{owner}: process_group is given, but a parameter of shape {tuple(sharded[0].shape)} is a DTensor, which "
            "carries its own mesh: leave process_group out."
        )
    if process_group is not None:
        import torch.distributed as dist

        if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
            raise ValueError(
                f"{owner}: process_group is {process_group!r}, but must be a torch.distributed.ProcessGroup that this "
                "rank is a member of, or None."
            )
    for p in sharded:
        if p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{owner}: a parameter of shape {tuple(p.shape)} is a DTensor on a mesh that this rank is not part of, "
                "but must be on one that it is part of: the norm would differ between ranks."
            )
        if any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
            raise ValueError(
                f"{owner}: a parameter of shape {tuple(p.shape)} is Partial, a sum that is still to be "
                "reduced, but must be sharded or replicated."
            )
    return Sharding(params, process_group) if sharded or process_group is not None else None


def _reject_flat_parameters(owner: str, params: Sequence[Tensor], process_group: Any) -> None:
    """Reject parts of FullyShardedDataParallel's parameters if it is unknown over which ranks they are sharded."""
    are_parts = {bool(getattr(p, "_fsdp_flattened", False)) for p in params}
    if any(getattr(p, "_is_flat_param", False) for p in params):
        raise ValueError(
            f"{owner}: a parameter is a FlatParameter of FullyShardedDataParallel, which is padded: wrap it with "
            "use_orig_params=True and pass the group that shards it, process_group=..., or use fully_shard."
        )
    if process_group is None and True in are_parts:
        raise ValueError(
            f"{owner}: a parameter is a part of a FlatParameter of FullyShardedDataParallel, but process_group is "
            "None: the norm runs over all parts, so pass the group over which they are sharded, process_group=... "
            "(torch.distributed.group.WORLD if there is no other), or use fully_shard."
        )
    if len(are_parts) > 1:
        raise ValueError(
            f"{owner}: some parameters are parts of FullyShardedDataParallel's, and others are whole on every rank "
            "(ignored_modules), but must be all parts or all whole. Use fully_shard."
        )


def _device_of(process_group: Any) -> torch.device:
    """Return a device for a group's communication, for a rank that has no parameters."""
    import torch.distributed as dist

    has_nccl = "nccl" in dist.get_backend(process_group)
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


_made: dict[tuple[Any, tuple[int, ...]], Any] = {}  # process groups, by their world and ranks


def _group_of(mesh: Any) -> Any:
    """Return the process group of all ranks of a mesh: an existing one, or a new one, which its members create."""
    import torch.distributed as dist

    if mesh.ndim == 1:
        return mesh.get_group()
    world, ranks = dist.group.WORLD, tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return world
    if (world, ranks) not in _made:
        _made[world, ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[world, ranks]
