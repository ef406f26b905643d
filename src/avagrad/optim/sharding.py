"""Parameters that are spread over ranks: the part of each that is here, and who counts it.

The norm runs over every element of every parameter, wherever it is. So each element is counted once, by one rank,
and the ranks add up what they have counted: two numbers in one all-reduce for each set of ranks
(:mod:`avagrad.optim.norm`), however many parameters there are.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Sharding"]


# --- the part that is here -------------------------------------------------------------------------------------------


def is_dtensor(x: Tensor) -> bool:
    """Tell whether a tensor is spread over a mesh of ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there are none
    return module is not None and type(x) not in (Tensor, torch.nn.Parameter) and isinstance(x, module.DTensor)


def local_part(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of a tensor that this rank holds: a plain tensor itself. Called where autograd records nothing.

    With ``like``, of a tensor that is spread as that one is: a gradient may still have to be added up over ranks.
    """
    if not is_dtensor(x):
        return x
    spread: Any = x
    if like is not None and is_dtensor(like) and spread.placements != like.placements:  # type: ignore[attr-defined]
        spread = spread.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    local = spread.to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def global_max(p: Tensor, x: Tensor) -> Tensor:
    """Return the largest element of a tensor that is spread as ``p`` is, where ``x`` is the part that is here."""
    import torch.distributed as dist

    largest = x.amax() if x.numel() else x.new_full((), -torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_group_of(p.device_mesh))  # type: ignore[attr-defined]
    return largest


# --- who counts it ---------------------------------------------------------------------------------------------------


class Sharding:
    """Who counts which parameter. Immutable.

    Sums are rows of a table: row 0 every rank counts alone and for all, each other is added up over a group of ranks.
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
        """Return the row in which this rank counts a parameter; None where another one does."""
        return self._rows[id(p)]

    def all_reduce(self, table: Tensor) -> list[Any]:
        """Begin to add up each row of a table but the first over its group; return what to wait for."""
        import torch.distributed as dist

        pairs = zip(table[1:], self.groups, strict=True)
        return [dist.all_reduce(row, group=group, async_op=True) for row, group in pairs]

    def add_up(self, table: Tensor) -> Tensor:
        """Return the sum over everything of a table on the CPU. All ranks call this together."""
        table = table.to(self.device)
        for work in self.all_reduce(table):
            work.wait()
        return table.to("cpu").sum(0)


def sharding_of(owner: str, params: Sequence[Tensor], process_group: Any) -> Sharding | None:
    """Return how parameters are spread over ranks; None where they are not. Refuse what cannot be summed."""
    _refuse_flat_parameters(owner, params, process_group)
    spread = [p for p in params if is_dtensor(p)]
    if process_group is not None and spread:
        raise ValueError(
            f"{owner}: process_group is given, but a parameter of shape {tuple(spread[0].shape)} is a DTensor, which "
            "carries its own mesh: leave process_group out."
        )
    if process_group is not None:
        import torch.distributed as dist

        if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
            raise ValueError(
                f"{owner}: process_group is {process_group!r}, but must be a torch.distributed.ProcessGroup that this "
                "rank is a member of, or None."
            )
    for p in spread:
        if p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
            raise ValueError(
                f"{owner}: a parameter of shape {tuple(p.shape)} is a DTensor on a mesh that this rank is not part of, "
                "but must be on one that it is part of: the norm would differ between ranks."
            )
        if any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
            raise ValueError(
                f"{owner}: a parameter of shape {tuple(p.shape)} is Partial, the terms of a sum that is still to be "
                "taken, but must be sharded or replicated."
            )
    return Sharding(params, process_group) if spread or process_group is not None else None


def _refuse_flat_parameters(owner: str, params: Sequence[Tensor], process_group: Any) -> None:
    """Refuse parts of FullyShardedDataParallel's parameters where nothing says over which ranks they are spread."""
    are_parts = {bool(getattr(p, "_fsdp_flattened", False)) for p in params}
    if any(getattr(p, "_is_flat_param", False) for p in params):
        raise ValueError(
            f"{owner}: a parameter is a FlatParameter of FullyShardedDataParallel, which is padded: wrap it with "
            "use_orig_params=True and pass the group that shards it, process_group=..., or use fully_shard."
        )
    if process_group is None and True in are_parts:
        raise ValueError(
            f"{owner}: a parameter is a part of a FlatParameter of FullyShardedDataParallel, but process_group is "
            "None: the norm runs over all parts, so pass the group over which they are spread, process_group=... "
            "(torch.distributed.group.WORLD if no other was given), or use fully_shard."
        )
    if len(are_parts) > 1:
        raise ValueError(
            f"{owner}: some parameters are parts of FullyShardedDataParallel's, and others are whole on every rank "
            "(ignored_modules), but must be all parts or all whole. Use fully_shard."
        )


def _device_of(process_group: Any) -> torch.device:
    """Return a device that a group can send from, for a rank that has no parameters."""
    import torch.distributed as dist

    has_nccl = "nccl" in dist.get_backend(process_group)
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


_made: dict[tuple[Any, tuple[int, ...]], Any] = {}  # process groups, by the world that they are of and their ranks


def _group_of(mesh: Any) -> Any:
    """Return the process group of all ranks of a mesh: one that is there, or a new one, which its members make."""
    import torch.distributed as dist

    if mesh.ndim == 1:
        return mesh.get_group()
    world, ranks = dist.group.WORLD, tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == dist.get_world_size():
        return world
    if (world, ranks) not in _made:
        _made[world, ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[world, ranks]
