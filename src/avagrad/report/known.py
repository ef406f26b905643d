"""What a sweep knows: its axes, and the score of each cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from avagrad.tune.records import Record, sign_of
from avagrad.tune.scores import Score, best, scores
from avagrad.tune.separability import Separability, separability
from avagrad.tune.space import Cell, Point, Space

__all__ = ["Known", "known_of"]


@dataclass(frozen=True)
class Known:
    """The axes of a sweep, and the score of each cell in the order of their records. A trial is a cell.

    >>> Known(None, {Cell(1.0, None): Score(0.5)}, sign=1.0).best
    Cell(lr=1.0, eps=None)
    """

    space: Space | None  # None if there are no records
    cells: Mapping[Cell, Score]
    sign: float  # -1 if more is better: a loss is always to be made small

    @property
    def is_whole(self) -> bool:
        """Whether every lr was run with every eps, and there are at least two of each."""
        if self.space is None or 1 in self.space.shape or len(self.cells) != len(self.space):
            return False
        return all(cell in self.cells for cell in self.space.cells())

    @cached_property
    def parts(self) -> Separability | None:
        """How far lr and eps are separable; None if the grid is not whole."""
        whole = self.space if self.is_whole else None
        return None if whole is None else separability(whole, self.cells, start=whole.start())

    @cached_property
    def best(self) -> Cell | None:
        """The best cell; some may lack an lr or an eps that others have."""
        if self.parts is not None:
            return self.parts.best
        there = [cell for cell, score in self.cells.items() if not score.failed]
        same_axes = len({tuple(value is None for value in cell) for cell in there}) == 1
        return best(there, self.cells) if same_axes else min(there, key=lambda x: self.cells[x].rank, default=None)

    def value(self, cell: Cell | None) -> float | None:
        """Return the mean over the seeds of a cell."""
        return None if cell is None else self.sign * self.cells[cell].loss


def known_of(given: Sequence[Record], direction: str = "minimize") -> Known:
    """Return the cells of records; of two records of one point the later one counts.

    >>> known = known_of([Record(lr, eps, value=lr) for lr in (1, 2) for eps in (1, 2)])
    >>> known.is_whole, known.value(Cell(2.0, 1.0))
    (True, 2.0)
    """
    records: dict[Point, Record] = {}
    for record in given:
        records.pop(record.point, None)
        records[record.point] = record
    known = scores(records.values(), direction=direction)
    # A cell is known when the last of its seeds is.
    order = dict.fromkeys(point.cell for point in reversed(records))
    space = Space.of((cell.lr for cell in known), (cell.eps for cell in known)) if known else None
    return Known(space, {cell: known[cell] for cell in reversed(order)}, sign_of(direction))
