"""Which cells to evaluate next: a pure function of the results so far, so a search can be resumed at any point.

The methods are in :mod:`avagrad.tune.methods`; the comparison of cells is in :mod:`avagrad.tune.scores`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from avagrad.tune.methods import METHODS, Inputs, stages
from avagrad.tune.scores import Score, best, best_so_far, better, scores
from avagrad.tune.space import Cell, Space

__all__ = ["METHODS", "Plan", "Replay", "Score", "best", "better", "plan", "replay", "scores"]


@dataclass(frozen=True)
class Plan:
    """The next cells of a search, and its results so far.

    - ``space``: the space, with its axes as far as they were extended
    - ``cells``: the cells to evaluate now; none of them is known
    - ``asked``: all cells that the search has asked for so far, these among them
    - ``coarse``: whether one seed of these cells is enough
    - ``pick``: the best so far under the method's rule
    - ``stage``: a description of the current stage
    - ``path``: the start and then the best of each stage
    - ``confirmed``: whether the last ring found nothing better; None before the first one and without rings
    - ``rings``: the number of completed rings; lr and eps are separable if the first one confirms
    - ``at_most``: an upper bound on the total number of cells, if the next ring confirms, no axis is extended and no
      coarse line fails

    >>> from avagrad.tune.space import axis
    >>> plan("grid", Space(axis([1, 2], "lr"), None), {}, start=Cell(1.0, None)).done
    False
    """

    space: Space
    cells: tuple[Cell, ...]
    asked: frozenset[Cell]
    coarse: bool
    pick: Cell | None
    stage: str
    path: tuple[Cell, ...]
    confirmed: bool | None
    rings: int
    at_most: int

    @property
    def done(self) -> bool:
        """Whether the search has ended: there is no cell left to evaluate."""
        return not self.cells


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
    """Return the next cells of a search, given the known scores.

    ``by_first_seed`` has the scores of cells from their first seed alone; by default there is one seed. ``extend``
    allows the search by lines to extend an axis.

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
    for stage in stages(method, Inputs(space, known, by_first_seed, start, margin, extend)):
        wanted |= dict.fromkeys(stage.cells)
        scored = by_first_seed if stage.coarse else known
        unknown = tuple(cell for cell in dict.fromkeys(stage.cells) if cell not in scored)
        if unknown:
            break
    # Only the last stage has no unknown cells: every other one is passed as soon as its cells are known.
    space = stage.space or space
    return Plan(
        space=space,
        cells=unknown,
        asked=frozenset(wanted),
        coarse=stage.coarse,
        pick=stage.pick,
        stage=stage.name,
        path=tuple(cell for cell, _ in itertools.groupby(stage.path)),
        confirmed=stage.confirmed,
        rings=stage.rings,
        at_most=min(len(wanted) + stage.remaining, len(space)),
    )


@dataclass(frozen=True)
class Replay:
    """The result and the cost of a search that is replayed on a finished grid.

    ``order`` has the cells in the order of their evaluation, ``curve`` the lowest loss after each.

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
        """The number of evaluated cells."""
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
    """Run a search on known scores and count what it evaluates; the arguments are those of :func:`plan`.

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
        scored = by_first_seed if now.coarse else known
        for cell in now.cells:
            if cell not in scored:
                raise ValueError(f"known has no {cell}, but must have all cells of the {method} search: {now.stage}.")
            paid_once[cell] = by_first_seed[cell]
            if not now.coarse:
                paid[cell] = known[cell]
    score = paid[now.pick] if now.pick is not None else None
    curve = tuple(best_so_far(paid_once, {**by_first_seed, **known}))
    return Replay(now.pick, score, tuple(paid_once), now.path, now.confirmed, now.rings, curve)
