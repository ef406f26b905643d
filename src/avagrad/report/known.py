"""What a sweep knows: its axes, the score of each cell, and what its search has found."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from avagrad.tune.records import Record, sign_of
from avagrad.tune.scores import Score, best, best_so_far, scores
from avagrad.tune.separability import Separability, separability
from avagrad.tune.space import Cell, Point, Space
from avagrad.tune.stored_search import StoredSearch, stored_search

__all__ = ["Known", "known_of"]


@dataclass(frozen=True)
class Known:
    """The axes of a sweep, and the score of each cell in the order of their records.

    A trial is a cell, or a record where there is a search.

    >>> Known(None, {Cell(1.0, None): Score(0.5)}, sign=1.0).best
    Cell(lr=1.0, eps=None)
    """

    space: Space | None  # with all values of the search's axes; None if there are no records
    cells: Mapping[Cell, Score]
    sign: float  # -1 if more is better: a loss is always to be made small
    options: Mapping[str, Any] = field(default_factory=dict)  # where two lines and a ring start, and the margin
    search: StoredSearch | None = None  # the one that a study keeps

    @property
    def is_whole(self) -> bool:
        """Whether every lr was run with every eps, and with all seeds, and there are at least two of each."""
        if self.space is None or 1 in self.space.shape or len(self.cells) != len(self.space):
            return False
        return all(cell in (self.search.complete if self.search else self.cells) for cell in self.space.cells())

    @cached_property
    def parts(self) -> Separability | None:
        """How far lr and eps are separable; None if the grid is not whole."""
        whole = self.space if self.is_whole else None
        return None if whole is None else separability(whole, self.cells, **self.options)

    @cached_property
    def best(self) -> Cell | None:
        """The pick of a search that has ended, else the best cell; some may lack an lr or an eps that others have."""
        if self.search is not None and self.search.plan.done and self.search.plan.pick is not None:
            return self.search.plan.pick
        if self.parts is not None:
            return self.parts.best
        there = [cell for cell, score in self.cells.items() if not score.failed]
        if self.search is not None:
            seeds = {cell: (cell in self.search.complete, self.cells[cell].count) for cell in there}
            most = max(seeds.values(), default=None)
            there = [cell for cell in there if seeds[cell] == most]
        same_axes = len({tuple(value is None for value in cell) for cell in there}) == 1
        return best(there, self.cells) if same_axes else min(there, key=lambda x: self.cells[x].rank, default=None)

    @property
    def trials(self) -> int:
        """How many trials there were; of a search that has ended, those that it used."""
        return sum(self.cells[x].count for x in self.search.used or self.cells) if self.search else len(self.cells)

    @property
    def curve(self) -> list[float]:
        """The lowest loss after each trial. Where a search has ended, it ends at its pick."""
        if self.search is None:
            return best_so_far(self.cells, self.cells)
        used, complete = self.search.used, self.search.complete
        pick = self.cells[self.best].loss if used and self.best else -math.inf
        losses: list[float] = []
        for cell in (cell for cell in self.cells if cell in (used or self.cells)):
            score, counts = self.cells[cell], cell in complete and not self.cells[cell].pruned
            losses += [math.inf] * (score.count - 1) + [max(score.loss, pick) if counts else math.inf]
        return [*itertools.accumulate(losses, min)]

    def rank(self, cell: Cell) -> tuple[Any, ...]:
        """Return the sort key of cells. The best is first; with a search, cells with fewer seeds are last."""
        score = self.cells[cell]
        more = (score.failed, cell not in self.search.complete) if self.search else ()
        return cell != self.best, *more, *score.rank

    def value(self, cell: Cell | None) -> float | None:
        """Return the mean over the seeds of a cell."""
        return None if cell is None else self.sign * self.cells[cell].loss + 0.0  # adding 0 avoids -0.0


def known_of(given: Sequence[Record], direction: str = "minimize", search: Mapping[str, Any] | None = None) -> Known:
    """Return the cells of records; of two records of one point the later one counts.

    ``search`` is :attr:`avagrad.tune.study.Study.search`: of a cell that has its seeds, only those count.

    >>> known = known_of([Record(lr, eps, value=lr) for lr in (1, 2) for eps in (1, 2)])
    >>> known.is_whole, known.value(Cell(2.0, 1.0))
    (True, 2.0)
    """
    records: dict[Point, Record] = {}
    for record in given:
        records.pop(record.point, None)
        records[record.point] = record
    known = scores(records.values(), direction=direction)
    if not known:
        return Known(None, known, sign_of(direction))
    found = stored_search(search or {}, [*records.values()], direction)
    if search and found:
        known |= scores((x for x in records.values() if x.seed in search["seeds"]), direction=direction)
    # A cell is known when the last of its seeds is.
    order = dict.fromkeys(point.cell for point in reversed(records))
    space = Space.of((cell.lr for cell in known), (cell.eps for cell in known))
    space = found.with_axes(space) if found else space
    options = found.options(space) if found else {"start": space.start()}
    return Known(space, {cell: known[cell] for cell in reversed(order)}, sign_of(direction), options, found)
