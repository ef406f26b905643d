"""Processes that are started once, form a process group, and run one function after another in all of them."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Ranks", "RanksFailedError", "open_pools"]

GROUP_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 60.0
# When one rank has failed, others may wait for it in a collective: those that have nothing to say soon are killed.
GRACE_S = 2.0
# Imported once, by the process from which the ranks are forked. (It does not know the folders of the tests.)
PRELOADED = [
    "avagrad",
    "torch._dynamo",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
]


class RanksFailedError(AssertionError):
    """Some ranks raised, died or did not answer."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{reason}" for rank, reason in sorted(reasons.items())))
        self.reasons = reasons


class Ranks:
    """``n`` processes in one gloo group; a pool that has failed is replaced when it is next used."""

    def __init__(self, n: int, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self.n, self._group_timeout_s = n, group_timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        grace_s: float = GRACE_S,
    ) -> list[Any]:
        """Call a function of a module in every rank, and return what each one returns.

        What a rank raises is raised here, with the rank's traceback. ``grace_s`` is how long the others may then take.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers, reasons = self._gather(timeout_s, grace_s)
        if reasons:
            self.close()
            raise RanksFailedError(reasons)
        return [answers[rank] for rank in range(self.n)]

    def _gather(self, timeout_s: float, grace_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return what the ranks have answered, and why others have not."""
        answers: dict[int, Any] = {}
        reasons: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                reasons |= dict.fromkeys(waiting.values(), "no answer in time")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    succeeded, answer = False, "the process has ended"
                if succeeded:
                    answers[rank] = answer
                else:
                    if not reasons:
                        deadline = min(deadline, time.monotonic() + grace_s)
                    reasons[rank] = answer
        return answers, reasons

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting_point = Path(self._folder.name) / "store"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.n):
            here, there = context.Pipe()
            arguments = (rank, self.n, str(meeting_point), self._group_timeout_s, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self._processes.append(process)
            self._pipes.append(here)

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None


@contextlib.contextmanager
def open_pools() -> Iterator[Callable[[int], Ranks]]:
    """Yield a function that returns the pool of so many ranks; all of them are ended at the end."""
    pools: dict[int, Ranks] = {}

    def pool(n: int) -> Ranks:
        return pools.setdefault(n, Ranks(n))

    try:
        yield pool
    finally:
        for each in pools.values():
            each.close()


def _serve(rank: int, n: int, meeting_point: str, group_timeout_s: float, pipe: Connection) -> None:
    """Run what comes through the pipe until it is closed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = dist.FileStore(meeting_point, n)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            sys.exit()
        try:
            function, args = pickle.loads(call)
            answer = pickle.dumps((True, function(*args)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
