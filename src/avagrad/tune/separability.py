"""Whether lr and eps can be tuned one after the other: measured on a finished grid, or from a search's ring.

The *ridge* is the best lr at each eps. If it is flat, the two are separable: the best lr can be found at any eps, and
a line over lr and a line over eps find the best cell of the grid. If its slope in logarithms is 1, only their ratio
matters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import linear_regression

from avagrad.tune.scores import Score, best
from avagrad.tune.search import Plan, replay
from avagrad.tune.space import Cell, Space, shown

__all__ = ["Separability", "counted", "separability", "two_digits", "verdict"]


@dataclass(frozen=True)
class Separability:
    """How separable lr and eps are on a grid, and what two lines and a ring find there.

    - ``ridge``: each eps with its best lr, None if all of its cells diverged or failed. Among tied lrs it is the one
      nearest to the best cell's, so that a plateau never counts as a move
    - ``moves``: how far the ridge moves, in steps of the lr axis; ``at_ends``: at how many eps it is at an end of that
      axis, so that it may move more
    - ``slope``, ``slope_at_large_eps``: the least-squares slope of log lr against log eps over the ridge, and over the
      upper half of the eps axis; None with fewer than two points
    - ``share``: the share of all eps at which the ridge is at the best cell's lr
    - ``stays``: the range of eps, around the best cell's, in which the ridge stays within one step of the best cell's
      lr
    - ``best``, ``best_loss``: the best cell of the grid
    - ``pick``, ``pick_loss``, ``regret``, ``trials``, ``rings``, ``confirmed``: the result of the separable search,
      how much worse it is than the best cell, and its cost
    - ``cells``: the number of cells of the grid, ``pruned`` of which have losses of shorter runs; ``start``: where the
      separable search starts

    None or infinity means that there is no value: every cell diverged, or the search's first line did.

    >>> from avagrad.tune.space import axis
    >>> space = Space(axis("1e-3:1e3:7", "lr"), axis("1e-4:1:5", "eps"))
    >>> known = {cell: Score(abs(math.log10(cell.lr)) + abs(math.log10(cell.eps) + 1)) for cell in space.cells()}
    >>> print(separability(space, known, start=space.start()).summary())
    The best lr does not move over eps from 0.0001 to 1 (slope 0.00; 0.00 at large eps). It is the overall best at 100 %
    of the eps and stays within one step of it from 0.0001 to 1. Two lines and a ring from lr 1, eps 0.1 find lr 1, eps
    0.1 in 15 trials instead of 35, the best of the grid.
    """

    ridge: tuple[tuple[float, float | None], ...]
    moves: int
    at_ends: int
    slope: float | None
    slope_at_large_eps: float | None
    share: float
    stays: tuple[float, float] | None
    best: Cell | None
    best_loss: float
    pick: Cell | None
    pick_loss: float
    regret: float | None
    trials: int
    rings: int
    confirmed: bool | None
    cells: int
    pruned: int
    start: Cell

    def summary(self) -> str:
        """Return the findings in two or three sentences."""
        if self.best is None or self.stays is None:
            return f"All {self.cells} cells of the grid diverged or failed, so nothing is known about lr and eps."
        working = [eps for eps, lr in self.ridge if lr is not None]
        moves = f"moves by {counted(self.moves, 'step')}" if self.moves else "does not move"
        ends = ""
        if self.at_ends:
            moves = moves if self.moves else f"is {shown(self.best.lr or 0.0)}"
            end = f"At {self.at_ends} of {len(working)} eps the best lr is at an end of its axis"
            ends = f" {end}, so it may move more than this."
        slopes = f"slope {two_digits(self.slope)}; {two_digits(self.slope_at_large_eps)} at large eps"
        failed = len(self.ridge) - len(working)
        if failed:
            slopes += f"; no lr works at {failed} of the eps"
        found = (
            f"Two lines and {counted(self.rings, 'ring')} from {self.start} find {self.pick} in {self.trials} trials"
            f" instead of {self.cells}, {self._worse()}."
            if self.pick is not None
            else f"The first line, of {self.trials} trials, finds nothing: each of them diverged or failed."
        )
        return (
            f"The best lr {moves} over eps from {shown(working[0])} to {shown(working[-1])} ({slopes}).{ends} It is"
            f" the overall best at {100 * self.share:.0f} % of the eps and stays within one step of it from"
            f" {shown(self.stays[0])} to {shown(self.stays[1])}. {found}"
            + (f" {self.pruned} of {self.cells} cells were pruned, so all of this is uncertain." if self.pruned else "")
        )

    def _worse(self) -> str:
        if self.pick == self.best:
            return "the best of the grid"
        return (
            f"{self.regret:.3g} worse than the best of the grid" if self.regret else "as good as the best of the grid"
        )


def separability(space: Space, known: Mapping[Cell, Score], *, start: Cell, margin: float = 0.0) -> Separability:
    """Measure on a complete grid how separable lr and eps are.

    >>> from avagrad.tune.space import axis
    >>> space = Space(axis("1e-4:1:5", "lr"), axis("1e-4:1:5", "eps"))
    >>> known = {cell: Score(abs(math.log10(cell.lr / cell.eps))) for cell in space.cells()}
    >>> found = separability(space, known, start=space.start())
    >>> found.moves, round(found.slope, 3), found.share, found.stays
    (4, 1.0, 0.2, (0.001, 0.1))
    """
    if space.lr is None or space.eps is None or 1 in space.shape:
        rows, columns = space.shape
        raise ValueError(f"space has {rows} lr and {columns} eps, but must have at least two of each.")
    missing = [cell for cell in space.cells() if cell not in known]
    if missing:
        raise ValueError(
            f"known lacks {len(missing)} of {len(space)} cells, the first at {missing[0]}, but must have all of them."
        )
    top = best(space.cells(), known)
    lrs, all_eps = space.lr.values, space.eps.values
    best_place, at = space.indices(top) if top is not None else (0, 0)
    places = [_on_ridge([known[Cell(lr, eps)] for lr in lrs], best_place) for eps in all_eps]
    ridge = tuple((eps, None if place is None else lrs[place]) for eps, place in zip(all_eps, places, strict=True))
    working = [place for place in places if place is not None]

    near = [place is not None and abs(place - best_place) <= 1 for place in places]
    first = last = at
    while first > 0 and near[first - 1]:
        first -= 1
    while last + 1 < len(near) and near[last + 1]:
        last += 1
    stays = (all_eps[first], all_eps[last]) if top is not None else None

    found = replay("separable", space, known, start=start, margin=margin)
    best_loss = known[top].loss if top is not None else math.inf
    pick_loss = found.score.loss if found.score is not None else math.inf
    return Separability(
        ridge=ridge,
        moves=max(working, default=0) - min(working, default=0),
        at_ends=sum(place in (0, len(lrs) - 1) for place in working),
        slope=_slope(ridge),
        slope_at_large_eps=_slope(ridge[len(ridge) // 2 :]),
        share=working.count(best_place) / len(places),
        stays=stays,
        best=top,
        best_loss=best_loss,
        pick=found.pick,
        pick_loss=pick_loss,
        regret=None if found.pick is None else pick_loss - best_loss,
        trials=found.trials,
        rings=found.rings,
        confirmed=found.confirmed,
        cells=len(space),
        pruned=sum(known[cell].pruned for cell in space.cells()),
        start=start,
    )


def verdict(plan: Plan) -> str:
    """Return in a sentence whether a search's ring confirms its pick.

    >>> from avagrad.tune.search import plan
    >>> from avagrad.tune.space import axis
    >>> space = Space(axis([1, 2], "lr"), axis([1, 2], "eps"))
    >>> verdict(plan("lines", space, {cell: Score(sum(cell)) for cell in space.cells()}, start=space.start()))
    'No neighbour of lr 1, eps 1 along lr or eps is better.'
    """
    if plan.pick is None:
        return f"There is no pick{'' if plan.done else ' yet'}: {plan.stage}."
    if plan.confirmed is None and not plan.done:
        return f"The best so far is {plan.pick}, and its neighbours have not all been tried yet."
    if plan.confirmed is None:
        return f"The best of the whole grid is {plan.pick}."
    if not plan.confirmed:
        return f"A neighbour was better, so two lines are not enough here: the search moves to {plan.pick}."
    if plan.rings == 0:
        return f"The best of the line is {plan.pick}, and there is no other line."
    moved = f", but two lines were not enough: it took {plan.rings} rings" if plan.rings > 1 else ""
    return f"No neighbour of {plan.pick} along lr or eps is better{moved}."


def _on_ridge(row: list[Score], best_place: int) -> int | None:
    """Return the index of the best score of a row, among ties the one nearest to a place; None if all failed."""
    if all(score.failed for score in row):
        return None
    return min(range(len(row)), key=lambda place: (row[place].rank, abs(place - best_place), place))


def _slope(ridge: tuple[tuple[float, float | None], ...]) -> float | None:
    points = [(math.log(eps), math.log(lr)) for eps, lr in ridge if lr is not None]
    if len(points) < 2:
        return None
    return linear_regression(*zip(*points, strict=True)).slope


def counted(number: int, thing: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "ring"), counted(1, "step"), counted(2, "step")
    ('a ring', '1 step', '2 steps')
    """
    return (f"a {thing}" if thing == "ring" else f"1 {thing}") if number == 1 else f"{number} {thing}s"


def two_digits(slope: float | None) -> str:
    """Return a slope as text with two decimals.

    >>> two_digits(0.3849), two_digits(-0.001), two_digits(None)
    ('0.38', '0.00', 'unknown')
    """
    return "unknown" if slope is None else f"{round(slope, 2) + 0.0:.2f}"  # adding 0 avoids -0.0
