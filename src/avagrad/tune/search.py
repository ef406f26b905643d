"""Which point to try next. Pure: what a search wants is a function of what is known, so it can stop and go on anywhere.

- ``lines``: over lr at the start's eps, then over eps at the best lr, each from coarse to fine: every second value,
  counted from the start (every fourth, then every second, on an axis of more than 16), then the neighbours of the best.
  Along eps, where losses are often level, a second dip among the coarse values is followed up as well. Last come those
  neighbours of the pick on both axes that are not known yet; while one of them is better, the search moves there. A
  pick at an end of an axis extends it, at most twice, where that is allowed. Coarse values need one seed, all others
  need all. On 13 x 11 values that is at most 9 + 7 + 2 = 18 cells where no neighbour is better, and 2 more where there
  is a second dip.
- ``separable``: the whole lr line at the start's eps, the whole eps line at its best lr, then the ring: the neighbours
  of the best cell, up to eight. A better neighbour means that lr and eps do not part here: the eps line is repeated at
  the neighbour's lr, the best of that line gets a ring of its own, and so on until a ring finds nothing better. On
  21 x 21 values that is at most 21 + 20 + 6 = 47 cells where the first ring confirms.
- ``grid``: every cell.

Where one axis is absent, or has one value, every method is a single line.

**Ranks.** A complete cell comes before a pruned one, whose loss is that of a shorter run; of the same kind the lower
loss comes first. A cell that diverged, or failed for good, has an infinite loss and is never picked.

**Ties.** Of cells with the same rank the middle one is taken, the lower of two: the middle of a plateau is the safest.
On a grid that is the middle one of the tied lrs, then the middle one of the tied eps at that lr.

**Noise.** A neighbour is *better* where it is complete and the cell is pruned, or where both are of the same kind and
its mean loss is lower by more than ``margin`` plus the standard error of the difference, which is 0 with one seed. The
best of a line is the lowest mean.

**It ends.** Better implies an earlier rank: margin and error are not negative. So each neighbour that is moved to, and
the best of a line through it, ranks strictly earlier than the pick before. No cell is picked twice, and there are
finitely many.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from avagrad.tune.records import Record, worst
from avagrad.tune.space import NAMES, Cell, Point, Space

__all__ = ["METHODS", "Plan", "Replay", "Score", "best", "best_so_far", "better", "plan", "replay", "scores", "widest"]

METHODS = ("lines", "separable", "grid")
_EXTENSIONS = 2  # of an axis, at most
_LONG = 16  # values of an axis whose first stride is 2; that of a longer one is 4


@dataclass(frozen=True)
class Score:
    """What is known of a cell: the mean loss over its seeds, to be made small, and that mean's standard error.

    >>> Score(0.5).error, Score(float("inf")).failed
    (0.0, True)
    """

    loss: float
    error: float = 0.0
    count: int = 1
    pruned: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.loss) or self.loss == -math.inf:
            raise ValueError(f"loss is {self.loss}, but must be a number, or inf where a run diverged or failed.")
        if not self.error >= 0:
            raise ValueError(f"error is {self.error}, but must be a number of at least 0.")
        if self.count < 1:
            raise ValueError(f"count is {self.count}, but must be at least 1.")

    @property
    def failed(self) -> bool:
        """Whether a run of this cell diverged or failed for good."""
        return self.loss == math.inf

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What cells are compared by: complete ones first, then pruned ones, and last what failed."""
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
    sign = 1 if worst(direction) > 0 else -1
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
    """Return whether a score is better than another one by more than margin and noise explain.

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
    there = [cell for cell in cells if cell in known and not known[cell].failed]
    if not there:
        return None
    first = min(known[cell].rank for cell in there)
    tied = [cell for cell in there if known[cell].rank == first]
    # In a space an axis is absent from all cells or from none, so None is never compared with a number.
    lr = _middle({cell.lr for cell in tied})
    return Cell(lr, _middle({cell.eps for cell in tied if cell.lr == lr}))


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
    for step in _steps(method, _Known(space, known, by_first_seed, start, margin), extend):
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


def best_so_far(order: Iterable[Cell], known: Mapping[Cell, Score]) -> list[float]:
    """Return the lowest loss after each trial; a pruned cell does not lower it, since its loss is a shorter run's.

    >>> line = [Cell(1.0, None), Cell(2.0, None), Cell(3.0, None)]
    >>> best_so_far(line, {line[0]: Score(0.5), line[1]: Score(0.7), line[2]: Score(0.1)})
    [0.5, 0.5, 0.1]
    """
    return list(itertools.accumulate((math.inf if known[cell].pruned else known[cell].loss for cell in order), min))


def widest(space: Space) -> Space:
    """Return the space with its axes extended as far as the search by lines may extend them.

    >>> from avagrad.tune.space import axis
    >>> widest(Space(axis([1, 10], "lr"), None)).lr.values
    (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0)
    """
    for name in NAMES:
        for end in (0, -1):
            for _ in range(_EXTENSIONS):
                space = space.extended(name, space.cells()[end])
    return space


# --- the methods -----------------------------------------------------------------------------------


class _Known(NamedTuple):
    """What a method works with."""

    space: Space
    known: Mapping[Cell, Score]
    by_first_seed: Mapping[Cell, Score]
    start: Cell
    margin: float


@dataclass(frozen=True)
class _Step:
    """A stage of a search: it goes on to the next one when all of these cells are known."""

    stage: str
    cells: tuple[Cell, ...]
    pick: Cell | None
    path: tuple[Cell, ...]
    rest: int = 0  # how many further cells the stages up to the next ring take at most
    rings: int = 0
    confirmed: bool | None = None
    coarse: bool = False
    space: Space | None = None  # where the axes were extended


def _steps(method: str, given: _Known, extend: bool) -> Iterator[_Step]:
    space, _, _, start, margin = given
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be one of {', '.join(METHODS)}.")
    if start not in space:
        raise ValueError(f"start is {start}, but must be a cell of the space.")
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin is {margin}, but must be finite and at least 0.")
    if method == "lines" and space.shape != (1, 1):
        return _Lines(given, extend).steps()
    if 1 in space.shape:
        return _line(given)
    return _separable(given) if method == "separable" else _grid(given)


class _Lines:
    """The search by lines. It keeps the space, whose axes may be extended on the way."""

    def __init__(self, given: _Known, extend: bool) -> None:
        self.space, self.known, self.by_first_seed, self.start, self.margin = given
        self.path: tuple[Cell, ...] = (self.start,)
        self.extensions = dict.fromkeys(NAMES, _EXTENSIONS if extend else 0)
        rows, columns = self.space.shape
        self.names = [name for name, length in zip(NAMES, (rows, columns), strict=True) if length > 1]

    def steps(self) -> Iterator[_Step]:
        pick = self.start
        for name in self.names:
            stage = f"line over {name}" + (f" at {at}" if any(at := pick._replace(**{name: None})) else "")
            found = yield from self._line(name, pick, stage)
            if found is None:
                yield _nothing(stage, self.start)
                return
            pick = found
            self.path = (*self.path, pick)
        yield from self._neighbours(pick)

    def _line(self, name: str, at: Cell, stage: str) -> Generator[_Step, None, Cell | None]:
        """Search an axis through a cell, from coarse to fine; return its best cell."""
        line = self.space.along(name, at)
        later = self.names[self.names.index(name) + 1 :]
        rest = sum(_most_of_line(other, self.space) - 1 for other in later) + 2 * len(self.names) - 2
        stride = _first_stride(len(line))
        cells = self._around(name, at, stride, len(line))
        pick = best(cells, self.by_first_seed)
        yield self._step(stage, cells, pick, rest=rest + _most_refined(name, stride), coarse=True)
        dips = self._dips(name, cells, pick)
        while dips and stride > 1:
            stride //= 2
            near = [self._around(name, dip, stride, 1) for dip in dips]
            cells = tuple(dict.fromkeys(itertools.chain.from_iterable(near)))
            known = self.by_first_seed if stride > 1 else self.known
            more = {"rest": rest + _most_refined(name, stride), "coarse": stride > 1}
            yield self._step(stage, cells, best(cells, known), **more)
            dips = [found for each in near if (found := best(each, known)) is not None]
        pick = best(dips, self.known)
        if pick is None:  # all that was tried has failed, but not yet all
            pick = best(line, self.known)
            yield self._step(stage, line, pick, rest=rest)
        while pick is not None and self._extends(name, pick=pick):
            before, line = line, self.space.along(name, at)
            cells = tuple(cell for cell in line if cell == pick or cell not in before)
            pick = best(cells, self.known)
            yield self._step(stage, cells, pick, rest=rest)
        return pick

    def _dips(self, name: str, cells: tuple[Cell, ...], pick: Cell | None) -> list[Cell]:
        """Return the best coarse cell; along eps, where a line may have two dips, also the best of another dip."""
        if pick is None or name != "eps":
            return [pick] if pick else []
        ranks = [self.by_first_seed[cell].rank for cell in cells]
        place = cells.index(pick)
        others = [
            cell
            for i, cell in enumerate(cells)
            if abs(i - place) > 1 and all(ranks[i] <= ranks[k] for k in (i - 1, i + 1) if 0 <= k < len(cells))
        ]
        second = best(others, self.by_first_seed)
        return [pick, second] if second else [pick]

    def _neighbours(self, pick: Cell) -> Iterator[_Step]:
        confirmed = None
        for rings in itertools.count():
            near = tuple(cell for name in self.names for cell in self._around(name, pick, 1, 1) if cell != pick)
            stage = f"neighbours of {pick}"
            yield self._step(stage, near, pick, rings=rings, confirmed=confirmed)
            to = best((cell for cell in near if better(self.known[cell], self.known[pick], self.margin)), self.known)
            if to is not None:
                pick, confirmed = to, False
                self.path = (*self.path, pick)
            elif not self._extends(*self.names, pick=pick):
                yield self._step(stage, (), pick, rings=rings + (len(self.names) > 1), confirmed=True)
                return

    def _around(self, name: str, cell: Cell, stride: int, most: int) -> tuple[Cell, ...]:
        """Return the cell and, on either side, at most so many along an axis, a stride from one another."""
        line = self.space.along(name, cell)
        place = line.index(cell)
        return tuple(
            each for i, each in enumerate(line) if (i - place) % stride == 0 and abs(i - place) <= most * stride
        )

    def _extends(self, *names: str, pick: Cell) -> bool:
        """Extend the axes at an end of which the pick is, if they still may be; tell whether one was."""
        before = self.space
        for name in names:
            longer = self.space.extended(name, pick) if self.extensions[name] else self.space
            self.extensions[name] -= longer != self.space
            self.space = longer
        return self.space != before

    def _step(self, stage: str, cells: tuple[Cell, ...], pick: Cell | None, **more: Any) -> _Step:
        return _Step(stage, cells, pick, self.path, space=self.space, **more)


def _first_stride(length: int) -> int:
    return 4 if length > _LONG else 2


def _most_refined(name: str, stride: int) -> int:
    """Return how many cells it takes at most to go from this stride to single steps."""
    return (4 if name == "eps" else 2) * (stride // 2)


def _most_of_line(name: str, space: Space) -> int:
    """Return how many cells of an axis the search by lines takes at most."""
    length = space.shape[NAMES.index(name)]
    stride = _first_stride(length)
    return min(length, math.ceil(length / stride) + _most_refined(name, stride))


def _separable(given: _Known) -> Iterator[_Step]:
    space, known, _, start, margin = given
    _, columns = space.shape
    line, stage = space.along("lr", start), f"line over lr at {Cell(None, start.eps)}"
    pick = best(line, known)
    yield _Step(stage, line, pick, (start,), rest=columns - 1 + _ring_at_most(space))
    if pick is None:
        yield _nothing(stage, start)
        return
    path = (start, pick)
    line, stage = space.along("eps", pick), f"line over eps at {Cell(pick.lr, None)}"
    pick = best(line, known)
    yield _Step(stage, line, pick, path, rest=_ring_at_most(space))
    yield from _rings(space, known, pick, path, margin)


def _rings(
    space: Space, known: Mapping[Cell, Score], pick: Cell | None, path: tuple[Cell, ...], margin: float
) -> Iterator[_Step]:
    confirmed = None
    for rings in itertools.count():
        assert pick is not None  # every line from here on has a cell that did not fail: the one that led to it
        path = (*path, pick)
        ring, stage = space.neighbours(pick), f"ring around {pick}"
        yield _Step(stage, ring, pick, path, rings=rings, confirmed=confirmed)
        to = best((cell for cell in ring if better(known[cell], known[pick], margin)), known)
        if to is None:
            yield _Step(stage, (), pick, path, rings=rings + 1, confirmed=True)
            return
        confirmed = False
        line = space.along("eps", to)
        pick = best(line, known)
        yield _Step(
            f"line over eps at {Cell(to.lr, None)}", line, pick, path, _ring_at_most(space), rings + 1, confirmed
        )


def _line(given: _Known) -> Iterator[_Step]:
    """Run the only line there is; nothing is left to confirm then."""
    space, known, _, start, _ = given
    rows, columns = space.shape
    name, at = ("eps", Cell(start.lr, None)) if space.lr is None or rows < columns else ("lr", Cell(None, start.eps))
    stage = f"line over {name}" + (f" at {at}" if any(at) else "")
    pick = best(space.cells(), known)
    yield _Step(stage, space.cells(), pick, (start,))
    yield _Step(stage, (), pick, (start, pick), confirmed=True) if pick else _nothing(stage, start)


def _grid(given: _Known) -> Iterator[_Step]:
    space, known, _, start, _ = given
    stage = f"grid of {len(space)} cells"
    pick = best(space.cells(), known)
    yield _Step(stage, space.cells(), pick, (start,))
    yield _Step(stage, (), pick, (start, pick)) if pick else _nothing(stage, start)


def _nothing(stage: str, start: Cell) -> _Step:
    return _Step(f"every point of the {stage} diverged or failed", (), None, (start,))


def _ring_at_most(space: Space) -> int:
    """Return how many unknown neighbours a cell has at most, where the eps line through it is known."""
    rows, columns = (min(3, length) for length in space.shape)
    return (rows - 1) * columns


def _middle(values: set[float | None]) -> float | None:
    ordered = sorted(values, key=lambda value: value or 0.0)
    return ordered[(len(ordered) - 1) // 2]


def _score(runs: list[Record], sign: int) -> Score:
    pruned = any(run.pruned for run in runs)
    if any(run.diverged for run in runs):
        return Score(math.inf, count=len(runs), pruned=pruned)
    losses = [sign * run.value for run in runs]
    try:
        loss = fmean(losses)
    except OverflowError:
        loss = math.fsum(value / len(losses) for value in losses)
    # Not statistics.stdev: squares of large losses leave the range of floats, which hypot does not.
    error = math.hypot(*(value - loss for value in losses)) / math.sqrt(len(runs) * max(len(runs) - 1, 1))
    return Score(loss, error, len(runs), pruned)
