"""Scores of cells, and which cell is the best.

**Ranks.** A complete cell comes before a pruned one, whose loss is from a shorter run; among cells of the same kind
the lower loss comes first. A cell that diverged, or failed permanently, has an infinite loss and is never picked.

**Ties.** Among cells with the same rank the middle one is picked, the lower of two: the middle of a plateau is the
safest. On a grid that is the middle one of the tied lrs, then the middle one of the tied eps at that lr.

**Noise.** A neighbour is *better* if it is complete and the cell is pruned, or if both are of the same kind and its
mean loss is lower by more than ``margin`` plus the standard error of the difference, which is 0 with one seed. The
best of a line is the lowest mean.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from avagrad.tune.records import Record, sign_of
from avagrad.tune.space import Cell, Point

__all__ = ["Score", "best", "best_so_far", "better", "mean", "scores"]


@dataclass(frozen=True)
class Score:
    """The score of a cell: the mean loss over its seeds (lower is better), and the standard error of that mean.

    >>> Score(0.5).error, Score(float("inf")).failed
    (0.0, True)
    """

    loss: float
    error: float = 0.0
    count: int = 1
    pruned: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.loss) or self.loss == -math.inf:
            raise ValueError(f"loss is {self.loss}, but must be a number, or inf if a run diverged or failed.")
        if not self.error >= 0:
            raise ValueError(f"error is {self.error}, but must be a number of at least 0.")
        if self.count < 1:
            raise ValueError(f"count is {self.count}, but must be at least 1.")

    @property
    def failed(self) -> bool:
        """Whether a run of this cell diverged or failed permanently."""
        return self.loss == math.inf

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The sort key of cells: complete ones first, then pruned ones, then failed ones."""
        return self.failed, self.pruned, self.loss


def scores(records: Iterable[Record], *, direction: str = "minimize", seeds: int | None = None) -> dict[Cell, Score]:
    """Return the score of each cell that has records: the mean over its seeds, infinite if one of them diverged.

    With ``seeds``, cells that have fewer are left out: they are not known yet.

    >>> two = [Record(1, 0.1, seed=0, value=0.5), Record(1, 0.1, seed=1, value=0.75)]
    >>> scores(two)
    {Cell(lr=1.0, eps=0.1): Score(loss=0.625, error=0.125, count=2, pruned=False)}
    >>> scores(two, direction="maximize")[1.0, 0.1].loss, scores(two, seeds=3)
    (-0.625, {})
    """
    sign = sign_of(direction)
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds is {seeds}, but must be at least 1, or None.")
    found: dict[Cell, dict[Point, Record]] = defaultdict(dict)
    for record in records:
        if record.point in found[record.point.cell]:
            raise ValueError(f"records has {record.point.key} twice, but must have one record for each point.")
        found[record.point.cell][record.point] = record
    return {
        cell: _score(list(runs.values()), sign) for cell, runs in found.items() if seeds is None or len(runs) >= seeds
    }


def better(score: Score, than: Score, margin: float = 0.0) -> bool:
    """Return whether a score is better than another one by more than margin and noise.

    >>> better(Score(0.5), Score(0.6)), better(Score(0.5), Score(0.6), margin=0.2)
    (True, False)
    >>> better(Score(0.5, error=0.3), Score(0.6, error=0.4)), better(Score(0.6), Score(0.5, pruned=True))
    (False, True)
    """
    if score.failed or than.failed:
        return than.failed and not score.failed
    if score.pruned != than.pruned:
        return than.pruned
    return score.loss + margin + math.hypot(score.error, than.error) < than.loss


def best(cells: Iterable[Cell], known: Mapping[Cell, Score]) -> Cell | None:
    """Return the best of those cells that are known, the middle one of ties; None if none is known or all failed.

    >>> line = [Cell(lr, None) for lr in (1.0, 2.0, 3.0, 4.0)]
    >>> best(line, {line[0]: Score(0.2), line[1]: Score(0.1), line[2]: Score(0.1), line[3]: Score(0.1)})
    Cell(lr=3.0, eps=None)
    """
    candidates = [cell for cell in cells if cell in known and not known[cell].failed]
    if not candidates:
        return None
    first = min(known[cell].rank for cell in candidates)
    tied = [cell for cell in candidates if known[cell].rank == first]
    # In a space an axis is absent from all cells or from none, so None is never compared with a number.
    lr = _middle({cell.lr for cell in tied})
    return Cell(lr, _middle({cell.eps for cell in tied if cell.lr == lr}))


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite numbers, also if their sum would overflow.

    >>> mean([1.0, 2.0]), mean([1.7e308, 1.7e308])
    (1.5, 1.7e+308)
    """
    try:
        return fmean(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def best_so_far(order: Iterable[Cell], known: Mapping[Cell, Score]) -> list[float]:
    """Return the lowest loss after each trial; pruned cells do not count, since their losses are from shorter runs.

    >>> line = [Cell(1.0, None), Cell(2.0, None), Cell(3.0, None)]
    >>> best_so_far(line, {line[0]: Score(0.5), line[1]: Score(0.7), line[2]: Score(0.1)})
    [0.5, 0.5, 0.1]
    """
    return list(itertools.accumulate((math.inf if known[cell].pruned else known[cell].loss for cell in order), min))


def _middle(values: set[float | None]) -> float | None:
    ordered = sorted(values, key=lambda value: value or 0.0)
    return ordered[(len(ordered) - 1) // 2]


def _score(runs: list[Record], sign: float) -> Score:
    pruned = any(run.pruned for run in runs)
    if any(run.diverged for run in runs):
        return Score(math.inf, count=len(runs), pruned=pruned)
    losses = [sign * run.value for run in runs]
    loss = mean(losses)
    # Not statistics.stdev: squares of large losses overflow, hypot does not.
    error = math.hypot(*(value - loss for value in losses)) / math.sqrt(len(runs) * max(len(runs) - 1, 1))
    return Score(loss, error, len(runs), pruned)
