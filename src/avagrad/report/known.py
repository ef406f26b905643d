"""What a sweep knows: its axes, the score of each cell, and what its search has found."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from avagrad.tune.records import Record, sign_of
from avagrad.tune.scores import Score, best, best_so_far, scores
from avagrad.tune.search import Plan, plan, replay
from avagrad.tune.separability import Separability, separability
from avagrad.tune.space import NAMES, Cell, Point, Space, axis

__all__ = ["Known", "known_of"]


@dataclass(frozen=True)
class Known:
    """The axes of a sweep, and the score of each cell in the order of their records.

    A trial is a cell, or a record where there is a search.

    >>> Known(None, {Cell(1.0, None): Score(0.5)}, sign=1.0).best
    Cell(lr=1.0, eps=None)
    """

    space: Space | None  # None if there are no records
    cells: Mapping[Cell, Score]
    sign: float  # -1 if more is better: a loss is always to be made small
    options: Mapping[str, Any] = field(default_factory=dict)  # where two lines and a ring start, and the margin
    search: Plan | None = None  # the one that a study keeps, as far as the records bring it
    complete: frozenset[Cell] = frozenset()  # the cells that have all of its seeds
    used: frozenset[Cell] = frozenset()  # the cells that it evaluated, if it has ended

    @property
    def is_whole(self) -> bool:
        """Whether every lr was run with every eps, and with all seeds, and there are at least two of each."""
        if self.space is None or 1 in self.space.shape or len(self.cells) != len(self.space):
            return False
        return all(cell in (self.complete if self.search else self.cells) for cell in self.space.cells())

    @cached_property
    def parts(self) -> Separability | None:
        """How far lr and eps are separable; None if the grid is not whole."""
        whole = self.space if self.is_whole else None
        return None if whole is None else separability(whole, self.cells, **self.options)

    @cached_property
    def best(self) -> Cell | None:
        """The pick of a search that has ended, else the best cell; some may lack an lr or an eps that others have."""
        if self.search is not None and self.used and self.search.pick is not None:
            return self.search.pick
        if self.parts is not None:
            return self.parts.best
        there = [cell for cell, score in self.cells.items() if not score.failed]
        if self.search is not None:
            most = max(map(self._seeds, there), default=None)
            there = [cell for cell in there if self._seeds(cell) == most]
        same_axes = len({tuple(value is None for value in cell) for cell in there}) == 1
        return best(there, self.cells) if same_axes else min(there, key=lambda x: self.cells[x].rank, default=None)

    @property
    def trials(self) -> int:
        """How many trials there were; of a search that has ended, those that it used."""
        return sum(self.cells[x].count for x in self.used or self.cells) if self.search else len(self.cells)

    @property
    def curve(self) -> list[float]:
        """The lowest loss after each trial. Where a search has ended, it ends at its pick."""
        if self.search is None:
            return best_so_far(self.cells, self.cells)
        pick = self.cells[self.best].loss if self.used and self.best else -math.inf
        losses: list[float] = []
        for cell in (cell for cell in self.cells if cell in (self.used or self.cells)):
            score, counts = self.cells[cell], cell in self.complete and not self.cells[cell].pruned
            losses += [math.inf] * (score.count - 1) + [max(score.loss, pick) if counts else math.inf]
        return [*itertools.accumulate(losses, min)]

    def _seeds(self, cell: Cell) -> tuple[bool, int]:
        return cell in self.complete, self.cells[cell].count

    def rank(self, cell: Cell) -> tuple[Any, ...]:
        """Return the sort key of cells. With a search its pick is first, and cells with fewer seeds are last."""
        score = self.cells[cell]
        more = (cell != self.best, score.failed, cell not in self.complete) if self.search else ()
        return *more, *score.rank

    def value(self, cell: Cell | None) -> float | None:
        """Return the mean over the seeds of a cell."""
        return None if cell is None else self.sign * self.cells[cell].loss


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
    found: tuple[Any, ...] = ()
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # One that is written by another version, or by hand, is left out.
        found = _search(search, records.values(), direction) if search else ()
    if search and found:
        known |= scores((x for x in records.values() if x.seed in search["seeds"]), direction=direction)
    # A cell is known when the last of its seeds is.
    order = dict.fromkeys(point.cell for point in reversed(records))
    space = Space.of((cell.lr for cell in known), (cell.eps for cell in known)) if known else None
    start = found[0] if found and space and found[0]["start"] in space else {"start": space.start()} if space else {}
    return Known(space, {cell: known[cell] for cell in reversed(order)}, sign_of(direction), start, *found[1:])


def _search(search: Mapping[str, Any], records: Iterable[Record], direction: str) -> tuple[Any, ...]:
    """Return the options of a search, its plan, its complete cells, and those that it used."""
    own = Space(*(axis(search[name], name) if search.get(name) else None for name in NAMES))
    by_seed = {seed: [record for record in records if record.seed == seed] for seed in search["seeds"]}
    first, *_ = (scores(each, direction=direction) for each in by_seed.values())
    complete = scores(itertools.chain(*by_seed.values()), direction=direction, seeds=len(by_seed))
    options = {"start": Cell(*search["start"]), "margin": float(search["margin"])}
    given: dict[str, Any] = options | {"by_first_seed": first, "extend": bool(search["extend"])}
    now = plan(search["method"], own, complete, **given)
    used = replay(search["method"], own, complete, **given).order if now.done else ()
    return options, now, frozenset(complete), frozenset(used)
