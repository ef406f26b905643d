"""Norm: the sum over all rates that gamma is computed from, kept from the end of one step for the next.

gamma_t is a function of the state (``step``, ``exp_avg_sq``) and of the groups' hyper-parameters, not of this step's
gradients. So the sum for the next step is known when a step ends. If parameters are sharded over ranks, its
all-reduce starts then, overlaps with a whole forward and backward pass, and is awaited when the next step begins.

Every rank joins in every step, with or without gradients. A step without a pending all-reduce (the first, or the
first after a state was loaded or a hyper-parameter of the rates was changed, which all ranks do together) starts one
and waits.
"""

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from avagrad.optim.params import Params
from avagrad.optim.rules import Rule, scalar_dtype
from avagrad.optim.sharding import Sharding

__all__ = ["Norm"]

_WAIT_SECONDS = 5.0  # for an all-reduce that no step will await


class Norm:
    """The sums of one optimizer. Only this class knows when they are stale."""

    def __init__(self) -> None:
        self._params: Params | None = None  # the snapshot that the sums belong to
        self._key: list[Any] = []  # the hyper-parameters that they were made with
        self._totals: dict[torch.device, Tensor] = {}  # written in place: a CUDA graph reads them at each replay
        self._all_reduce: _AllReduce | None = None
        # If sharded: a snapshot, and which rows of its sums go into which row of the table.
        self._rows: tuple[Params, list[dict[torch.device, Tensor]]] | None = None

    def invalidate(self) -> None:
        """Recompute the sums when the next step begins; with sharding all ranks call this together."""
        self._params = self._rows = None
        if self._all_reduce is not None:
            self._all_reduce.wait()
        self._all_reduce = None

    def totals(self, params: Params, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return on each device the sum of eta^p over all coordinates that count, and their number."""
        key = [rule.norm_key for rule in rules]
        sums: list[dict[torch.device, Tensor]] | None = None
        if self._params is not params or self._key != key:
            sums = [backend.sums(rules) for backend in params.backends]
            self._params, self._key = params, key
        sharding = params.sharding
        devices = params.devices or [torch.device("cpu") if sharding is None else sharding.device]
        if sharding is not None:
            if self._all_reduce is None or self._all_reduce.key != key:
                sums = sums or [backend.next_sums(rules) for backend in params.backends]
                self._all_reduce = _AllReduce(sharding, self._table(params, sharding, sums), key)
            self._store(devices, self._all_reduce.wait())
            if any(rule.counts_from_start for rule in rules):
                self._all_reduce = None
        elif sums is not None:
            self._add_up(devices, sums)
        return {device: self._total(device) for device in devices}

    def accept(self, params: Params, rules: Sequence[Rule]) -> None:
        """Collect the sums for the next step at the end of a step."""
        sums = [backend.next_sums(rules) for backend in params.backends]
        if params.sharding is None:
            self._add_up(params.devices or [torch.device("cpu")], sums)
            return
        if self._all_reduce is not None:
            self._all_reduce.wait()
        self._all_reduce = None
        # If parameters count before their first gradient, one may be frozen or unfrozen before the next step, maybe on
        # one rank only. So the sums are computed when that step begins.
        if not any(rule.counts_from_start for rule in rules):
            self._all_reduce = _AllReduce(params.sharding, self._table(params, params.sharding, sums), self._key)

    def _add_up(self, devices: Sequence[torch.device], sums: Sequence[dict[torch.device, Tensor]]) -> None:
        """Add up the sums of all blocks."""
        if len(devices) == len(sums) == 1:
            rows, total = sums[0][devices[0]], self._total(devices[0])
            total.copy_(_one_by_one(rows)) if devices[0].type == "cpu" else torch.sum(rows, 0, out=total)
            return
        totals = [_one_by_one(rows).to(devices[0]) for each in sums for rows in each.values()]
        self._store(devices, sum(totals, torch.zeros(2, dtype=scalar_dtype(devices[0]), device=devices[0])))

    def _store(self, devices: Sequence[torch.device], total: Tensor) -> None:
        for device in devices:
            # A copy to the CPU must be complete before it is read; other devices keep the order themselves.
            self._total(device).copy_(total, non_blocking=device.type != "cpu")

    def _total(self, device: torch.device) -> Tensor:
        if device not in self._totals:
            with torch.inference_mode(mode=False):  # it is also written to outside of it
                self._totals[device] = torch.zeros(2, dtype=scalar_dtype(device), device=device)
        return self._totals[device]

    def _table(self, params: Params, sharding: Sharding, sums: Sequence[dict[torch.device, Tensor]]) -> Tensor:
        """Return this rank's sums, with one row for each set of ranks that adds them up."""
        home = (params.devices or [sharding.device])[0]
        if self._rows is None or self._rows[0] is not params:
            self._rows = params, [_rows_of(backend, sharding) for backend in params.backends]
        table = torch.zeros(1 + len(sharding.groups), 2, dtype=scalar_dtype(home), device=home)
        for each, rows in zip(sums, self._rows[1], strict=True):
            for device, values in each.items():
                table += (rows[device] @ values).to(home)
        return table


class _AllReduce:
    """The all-reduced sums of all ranks, pending or complete."""

    def __init__(self, sharding: Sharding, table: Tensor, key: list[Any]) -> None:
        self.key, self._table = key, table
        self._works = sharding.all_reduce(table)
        weakref.finalize(self, _await_end, self._works)

    def wait(self) -> Tensor:
        """Return the total over all ranks."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return self._table.sum(0)


def _await_end(works: list[Any]) -> None:
    """Wait a limited time for an all-reduce that no step has awaited: other ranks may be gone.

    A process must not exit while a thread of its process group is still working.
    """
    until = time.monotonic() + _WAIT_SECONDS
    for work in works:
        while time.monotonic() < until and not work.is_completed():
            time.sleep(0.001)


def _rows_of(backend: Any, sharding: Sharding) -> dict[torch.device, Tensor]:
    """Return for each device a matrix of 0 and 1: which rows of the sums go into which row of the table."""
    found = {}
    for device, views in backend.views_of_rows().items():
        rows = [sharding.row_of(backend.views[i].param) for i in views]
        index = torch.tensor([-1 if row is None else row for row in rows], dtype=torch.int64, device="cpu")
        counted = torch.arange(1 + len(sharding.groups), device="cpu")[:, None] == index
        found[device] = counted.to(device=device, dtype=scalar_dtype(device))
    return found


def _one_by_one(rows: Tensor) -> Tensor:
    """Return the sum of the rows, added sequentially, so that rows of 0 leave the result bit-identical."""
    return rows.cumsum(0)[-1] if len(rows) else rows.sum(0)
