"""Which point to try next. Pure: what a search wants is a function of what is known, so it can stop and go on anywhere.

The methods are in :mod:`avagrad.tune.methods`; which cell is better, in :mod:`avagrad.tune.scores`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from avagrad.tune.methods import METHODS, Known, steps, widest
from avagrad.tune.scores import Score, best, best_so_far, better, scores
from avagrad.tune.space import Cell, Space

__all__ = ["METHODS", "Plan", "Replay", "Score", "best", "best_so_far", "better", "plan", "replay", "scores", "widest"]


@dataclass(frozen=True)
class Plan:
    """What a search wants next, and what it has found so far.

    - ``space``: the space, with what its axes were extended by
    - ``cells``: what has to be evaluated now; none of them is known
    - ``coarse``: whether one seed of these cells is enough
    - ``pick``: the best so far under the method's rule
    - ``stage``: what is being done, for people
    - ``path``: the start and then the best of each stage
    - ``confirmed``: what the last ring said; None before the first one and where there is none
    - ``rings``: how many rings have been completed; lr and eps part where the first one confirms
    - ``at_most``: how many cells it takes in all, at most, if the next ring confirms

    >>> from avagrad.tune.space import axis
    >>> plan("grid", Space(axis([1, 2], "lr"), None), {}, start=Cell(1.0, None)).done
    False
    """

    space: Space
    cells: tuple[Cell, ...]
    coarse: bool
    pick: Cell | None
    done: bool
    stage: str
    path: tuple[Cell, ...]
    confirmed: bool | None
    rings: int
    at_most: int


def plan(
    method: str,
    space: Space,
    known: Mapping[Cell, Score],
    *,
    start: Cell,
    margin: float = 0.0,
    by_first_seed: Mapping[Cell, Score] | None = None,
    extend: bool = False,
) -> Plan:
    """Return what a search wants next, given what is known.

    ``by_first_seed`` is what is known of cells by their first seed alone; without, there is one seed. ``extend`` lets
    the search by lines extend an axis.

    >>> from avagrad.tune.space import axis
    >>> space = Space(axis("paper", "lr"), axis("paper", "eps"))
    >>> first = plan("separable", space, {}, start=space.start())
    >>> first.stage, len(first.cells), first.at_most
    ('line over lr at eps 0.1', 21, 47)
    >>> second = plan("separable", space, {cell: Score(abs(cell.lr - 1)) for cell in first.cells}, start=space.start())
    >>> second.stage, len(second.cells), str(second.pick)
    ('line over eps at lr 1', 20, 'lr 1, eps 0.1')
    """
    by_first_seed = known if by_first_seed is None else by_first_seed
    wanted: dict[Cell, None] = {}
    for step in steps(method, Known(space, known, by_first_seed, start, margin), extend):
        wanted |= dict.fromkeys(step.cells)
        there = by_first_seed if step.coarse else known
        unknown = tuple(cell for cell in dict.fromkeys(step.cells) if cell not in there)
        if unknown:
            break
    # Only the last step wants nothing that is unknown: every other one is passed by as soon as its cells are known.
    space = step.space or space
    return Plan(
        space=space,
        cells=unknown,
        coarse=step.coarse,
        pick=step.pick,
        done=not unknown,
        stage=step.stage,
        path=tuple(cell for cell, _ in itertools.groupby(step.path)),
        confirmed=step.confirmed,
        rings=step.rings,
        at_most=min(len(wanted) + step.rest, len(space)),
    )


@dataclass(frozen=True)
class Replay:
    """What a search would have found on a finished grid, and what it would have paid.

    ``order`` holds the cells in the order of their evaluation, ``curve`` the lowest loss after each.

    >>> Replay(Cell(1.0, None), Score(0.5), (Cell(1.0, None),), (Cell(1.0, None),), True, 0, (0.5,)).trials
    1
    """

    pick: Cell | None
    score: Score | None
    order: tuple[Cell, ...]
    path: tuple[Cell, ...]
    confirmed: bool | None
    rings: int
    curve: tuple[float, ...]

    @property
    def trials(self) -> int:
        """How many cells were paid for."""
        return len(self.order)


def replay(
    method: str,
    space: Space,
    known: Mapping[Cell, Score],
    *,
    start: Cell,
    margin: float = 0.0,
    by_first_seed: Mapping[Cell, Score] | None = None,
    extend: bool = False,
) -> Replay:
    """Run a search on what is known already, as if it had to be paid for; the arguments are those of :func:`plan`.

    >>> from avagrad.tune.space import axis
    >>> space = Space(axis("1e-3:1e3:7", "lr"), axis("1e-8:1:9", "eps"))
    >>> known = {cell: Score(abs(cell.lr - 1) + abs(cell.eps - 0.01)) for cell in space.cells()}
    >>> found = replay("lines", space, known, start=space.start())
    >>> str(found.pick), found.trials, found.confirmed, len(space)
    ('lr 1, eps 0.01', 12, True, 63)
    """
    by_first_seed = known if by_first_seed is None else by_first_seed
    paid: dict[Cell, Score] = {}
    paid_once: dict[Cell, Score] = {}  # for the first seed
    search = {"start": start, "margin": margin, "by_first_seed": paid_once, "extend": extend}
    while not (now := plan(method, space, paid, **search)).done:  # type: ignore[arg-type]
        there = by_first_seed if now.coarse else known
        for cell in now.cells:
            if cell not in there:
                raise ValueError(f"known has no {cell}, but must have all that the {method} search wants: {now.stage}.")
            paid_once[cell] = by_first_seed[cell]
            if not now.coarse:
                paid[cell] = known[cell]
    score = paid[now.pick] if now.pick is not None else None
    curve = tuple(best_so_far(paid_once, {**by_first_seed, **known}))
    return Replay(now.pick, score, tuple(paid_once), now.path, now.confirmed, now.rings, curve)
