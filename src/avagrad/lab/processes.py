"""Processes that share a run, started by ``torchrun``; with one process everything here is trivial."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["Processes", "joined"]

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that share the run. Only the first one writes to the run's folder.

    >>> Processes().largest(3)
    3
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"

    def first(self, work: Callable[[], T]) -> T | None:
        """Call a function in the first process; if it fails there, raise an error in all.

        >>> Processes().first(lambda: 7)
        7
        """
        if self.world == 1:
            return work()
        done, failed = None, None
        if self.rank == 0:
            try:
                done = work()
            except Exception as error:
                failed = error
        failure: list[Any] = [None if failed is None else (type(failed).__name__, str(failed))]
        dist.broadcast_object_list(failure, src=0)
        if failed is not None:
            raise failed
        if failure[0] is not None:
            raise RuntimeError(f"the first process stopped: {failure[0][0]}: {failure[0][1]}")
        return done

    def largest(self, number: int) -> int:
        """Return the largest of the processes' numbers."""
        if self.world == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared.item())

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's values to all.

        >>> Processes().broadcast([torch.zeros(1)])
        """
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def all_gather(self, value: Tensor) -> list[float]:
        """Return the values of all processes, in their order.

        >>> Processes().all_gather(torch.tensor(2.0))
        [2.0]
        """
        values = [torch.empty_like(value) for _ in range(self.world)]
        if self.world == 1:
            values = [value]
        else:
            dist.all_gather(values, value)
        return [one.item() for one in values]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of the processes' values.

        >>> Processes().mean(torch.tensor(2.0))
        tensor(2.)
        """
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.world
        return value


@contextlib.contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the processes that torchrun has started, if it has; each takes the GPU of its local rank.

    >>> with joined("cpu") as processes:
    ...     processes.world
    1
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world == 1:
        yield Processes(device=device)
        return
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and torch.device(device).index is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    begun_here = not dist.is_initialized()
    if begun_here:
        dist.init_process_group("nccl" if is_cuda else "gloo")
    try:
        yield Processes(rank, world, device)
    finally:
        if begun_here:
            # Objects that hold the group (a DistributedDataParallel model) must be freed first: freed later, one may
            # wait for a thread of the group that waits for Python.
            gc.collect()
            dist.destroy_process_group()
