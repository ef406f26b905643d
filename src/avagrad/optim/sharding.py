"""Parameters that are spread over ranks: the part of each that is here, and one sum over all of them.

AvaGrad's norm runs over every element of every parameter, wherever it is. So each element is counted once, by one
rank, and the ranks add up what they have counted: a few numbers, in one all-reduce for each set of ranks, however many
parameters there are. The sum belongs to the *next* step, since rates come from the past: it is started when a step
ends, and awaited when the next one begins, behind a whole forward and backward pass.

Every rank takes part in every step, with or without gradients, by a rule that all of them can follow without asking:
each step starts the sums for the next one. A step that finds none under way (the first one, or the first after a state
was loaded or a hyper-parameter of the rates was changed, which all ranks do together) takes them itself, and waits.
"""

import sys
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "LocalView",
    "Sharding",
    "bump_versions",
    "global_max",
    "is_asked_for_state",
    "is_dtensor",
    "local_gradients",
    "local_groups",
    "local_part",
    "refuse_hidden_shards",
    "sharding_of",
    "spread_as",
]

Group = dict[str, Any]
_PATIENCE = 5.0  # seconds
OWNERS = "_owners"  # in a group of local parts: the parameters that they are parts of


# --- the part that is here -------------------------------------------------------------------------------------------


def is_dtensor(x: Tensor) -> bool:
    """Tell whether a tensor is spread over a mesh of ranks.

    >>> is_dtensor(torch.ones(2))
    False
    """
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it, there are none
    return module is not None and isinstance(x, module.DTensor)


def local_part(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of a tensor that this rank holds: a plain tensor itself.

    With ``like``, of a tensor that is spread as that one is: a gradient may still have to be added up over ranks.

    >>> local_part(torch.ones(2))
    tensor([1., 1.])
    """
    if not is_dtensor(x):
        return x
    spread: Any = x
    if like is not None and is_dtensor(like) and spread.placements != like.placements:  # type: ignore[attr-defined]
        spread = spread.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    # Not to_local(), which gives a new view of a parameter each time: what is kept is told by its identity.
    local = spread._local_tensor
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def spread_as(local: Tensor, p: Tensor) -> Tensor:
    """Return this rank's part as a tensor that is spread over the mesh of a parameter.

    >>> spread_as(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not is_dtensor(p):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = p
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def local_groups(groups: Sequence[Group]) -> list[Any]:
    """Return groups whose parameters are the parts that are here; all else is the groups' own, also when it changes.

    >>> group = {"params": [torch.ones(2)], "lr": 1.0}
    >>> (local,) = local_groups([group])
    >>> group["lr"] = 2.0
    >>> local["lr"], local["params"]
    (2.0, [tensor([1., 1.])])
    """
    return [
        ChainMap({"params": [local_part(p) for p in group["params"]], OWNERS: group["params"]}, group)
        for group in groups
    ]


class _LocalState(dict[str, Tensor]):
    """The parts of a parameter's state; what is put here is put into the state itself, spread as the parameter is."""

    def __init__(self, p: Tensor, state: dict[str, Tensor]) -> None:
        super().__init__({key: local_part(x) for key, x in state.items()})
        self.p, self.state = p, state

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.state[key] = value if key == "step" else spread_as(value, self.p)
        super().__setitem__(key, local_part(self.state[key]))

    def pop(self, key: str, default: Any = None) -> Any:
        self.state.pop(key, None)
        return super().pop(key, default)

    def is_of(self, state: dict[str, Tensor]) -> bool:
        same_keys = self.state is state and self.keys() == state.keys()
        return same_keys and all(local_part(x) is self[key] for key, x in state.items())


class LocalView:
    """An optimizer as one rank's kernels see it: plain tensors, where its parameters are spread over a mesh."""

    def __init__(self, opt: Any) -> None:
        self.groups, self.states = opt.param_groups, opt.state
        self.param_groups = local_groups(opt.param_groups)
        self.pairs = [(p, local_part(p)) for group in opt.param_groups for p in group["params"]]
        self.state = {
            local: _LocalState(p, state) if is_dtensor(p) else state
            for p, local in self.pairs
            if (state := opt.state.get(p))
        }

    def fits(self) -> bool:
        """Tell whether the optimizer's tensors are still those that are seen here."""
        now = [p for group in self.groups for p in group["params"]]
        return (
            len(self.groups) == len(self.param_groups)
            and len(now) == len(self.pairs)
            and all(p is q and local_part(q) is local for p, (q, local) in zip(now, self.pairs, strict=True))
            and all(self._has_same_state(p, local) for p, local in self.pairs)
        )

    def _has_same_state(self, p: Tensor, local: Tensor) -> bool:
        seen, state = self.state.get(local), self.states.get(p)
        if seen is None or not state:
            return seen is None and not state
        return seen.is_of(state) if isinstance(seen, _LocalState) else seen is state


@contextmanager
def local_gradients(groups: Sequence[Group]) -> Iterator[bool]:
    """Give the parts that are here the parts of the gradients; yields whether they can have them."""
    given: list[Tensor] = []
    fitting = True
    try:
        for p in (p for group in groups for p in group["params"]):
            if is_dtensor(p):
                local, g = local_part(p), None if p.grad is None else local_part(p.grad, like=p)
                fitting = fitting and (g is None or (g.dtype == local.dtype and g.layout == torch.strided))
                if fitting:
                    local.grad = g
                    given.append(local)
        yield fitting
    finally:
        for local in given:
            local.grad = None
        bump_versions(groups)


def bump_versions(groups: Sequence[Group]) -> None:
    """Tell autograd that parameters have been written to through their local parts."""
    spread = [p for group in groups for p in group["params"] if p.grad is not None and is_dtensor(p)]
    if spread:
        torch.autograd.graph.increment_version(spread)


# --- the sum over ranks ----------------------------------------------------------------------------------------------


class Sharding:
    """Who counts which parameter, and the sums that are under way.

    Sums are rows of a table: row 0 is what every rank has counted alone and for all, rows 1, 2, ... are to be added up
    over a group of ranks each.
    """

    def __init__(self, params: Sequence[Tensor], process_group: Any = None) -> None:
        self.groups: list[Any] = [] if process_group is None else [process_group]
        self.plain_row = len(self.groups)  # of tensors that carry no placement
        self.rows: dict[int, int | None] = {}  # by id; None: another rank counts it
        self.device = params[0].device if params else _device_of(process_group)
        by_ranks: dict[tuple[int, ...], int] = {}
        for p in params:
            if not is_dtensor(p):
                self.rows[id(p)] = self.plain_row
                continue
            mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
            coordinate = mesh.get_coordinate()
            ranks = tuple(mesh.mesh.flatten().tolist())
            if ranks not in by_ranks:
                self.groups.append(_group_of(mesh))
                by_ranks[ranks] = len(self.groups)
            replicas = [at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()]
            self.rows[id(p)] = None if any(replicas) else by_ranks[ranks]
        self.pending: tuple[Any, Tensor, list[Any]] | None = None
        self._last: list[Any] = []  # what was started last
        weakref.finalize(self, _see_the_end_of, self._last)

    def row_of(self, p: Tensor) -> int | None:
        """Return the row in which this rank counts a parameter; None where another one does."""
        return self.rows[id(p)]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # what is under way lies between two calls of a compiled step
    def start(self, table: Tensor, key: Any) -> None:
        """Have the ranks add up their tables, for a step whose rates are made with ``key``."""
        import torch.distributed as dist

        self.discard()
        works = [
            dist.all_reduce(row, group=group, async_op=True) for row, group in zip(table[1:], self.groups, strict=True)
        ]
        self.pending = key, table, works
        self._last[:] = works

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def total(self, key: Any, table: Callable[[], Tensor]) -> Tensor:
        """Return the sums over everything: those that are under way, if they are for this key, else now."""
        if self.pending is None or self.pending[0] != key:
            self.start(table(), key)
        assert self.pending is not None
        _, held, works = self.pending
        for work in works:
            work.wait()
        self.pending = key, held, []
        return held.sum(0)

    def discard(self) -> None:
        """Let go of what is under way."""
        if self.pending is not None:
            for work in self.pending[2]:
                work.wait()
        self.pending = None
        self._last.clear()


def _see_the_end_of(works: list[Any]) -> None:
    """Wait for what the last step has started and no step has awaited, though not for ranks that are gone.

    A process must not end while a thread of its process group is still at it.
    """
    until = time.monotonic() + _PATIENCE
    for work in works:
        while time.monotonic() < until and not work.is_completed():
            time.sleep(0.001)
    works.clear()


def global_max(p: Tensor, x: Tensor) -> Tensor:
    """Return the largest element of a tensor that is spread as ``p`` is, where ``x`` is the part that is here."""
    import torch.distributed as dist

    largest = x.amax() if x.numel() else x.new_full((), -torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_group_of(p.device_mesh))  # type: ignore[attr-defined]
    return largest


def sharding_of(owner: str, params: Sequence[Tensor], process_group: Any) -> Sharding | None:
    """Return how parameters are spread over ranks; None where they are not."""
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


def refuse_hidden_shards(owner: str, params: Sequence[Tensor], process_group: Any) -> None:
    """Refuse parameters that are parts of something, where nobody says what the other parts are with."""
    for p in params:
        if getattr(p, "_is_flat_param", False):
            raise ValueError(
                f"{owner}: a parameter is a FlatParameter of FullyShardedDataParallel, which is padded with elements "
                "that are nobody's: wrap the model with use_orig_params=True and pass the group that shards it, "
                "process_group=..., or use fully_shard."
            )
        if process_group is None and getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"{owner}: a parameter is a part of a FlatParameter of FullyShardedDataParallel, but process_group is "
                "None: the norm runs over all parts, so pass the group over which they are spread, process_group=... "
                "(torch.distributed.group.WORLD if no other was given), or use fully_shard."
            )
    flags = {bool(getattr(p, "_fsdp_flattened", False)) for p in params}
    if len(flags) > 1:
        raise ValueError(
            f"{owner}: some parameters are parts of FullyShardedDataParallel's, and others are whole on every rank "
            "(ignored_modules), but must be all parts or all whole: nothing says which a group would add up. Use "
            "fully_shard."
        )
    if process_group is None and _is_made_by_zero():
        raise ValueError(
            f"{owner}: ZeroRedundancyOptimizer gives each rank a part of the parameters, but process_group is None, "
            "and the norm runs over all parts: pass optimizer_class=functools.partial("
            f"{owner}, process_group=...), since ZeroRedundancyOptimizer keeps an argument of that name to itself."
        )


def _is_made_by_zero() -> bool:
    """Tell whether an optimizer is being made by a ZeroRedundancyOptimizer.

    It hands each rank plain parameters, of which nothing says that they are a part: the callers are all there is to
    see. It is some four frames up; a name is enough, and nothing has to be imported.
    """
    return any(type(frame.f_locals.get("self")).__name__ == "ZeroRedundancyOptimizer" for frame in _callers())


def is_asked_for_state() -> bool:
    """Tell whether a step is torch.distributed.checkpoint's way to ask for a state.

    It asks on those ranks alone that have none, with an lr of 0, so it must not be taken for a step that ranks take
    together; and a step with an lr of 0, as in a warm-up, must not be taken for a question. The callers tell.
    """
    return any(frame.f_code.co_name == "_init_optim_state" for frame in _callers())


def _callers() -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    for _ in range(40):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
