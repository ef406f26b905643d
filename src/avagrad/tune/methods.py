"""The search methods: lines, separable, grid. Each yields its stages; known scores alone decide on the next.

- ``lines``: over lr at the start's eps, then over eps at the best lr, each from coarse to fine: every second value,
  counted from the start (every fourth, then every second, on an axis of more than 16), then the neighbours of the best.
  Along lr the loss has one valley: coarse values are taken from the start outward, until the best has a worse one on
  either side. Along eps losses are often flat: all coarse values are taken, and a second dip among them is refined as
  well if it is above the best by no more than its depth. The last stage evaluates the unknown neighbours of the pick on
  both axes; while one of them is better, the search moves there. A pick at an end of an axis that is better than its
  neighbour there extends the axis, at most twice, if that is allowed. Coarse values need one seed, all others need all
  seeds. On 13 x 11 values that is at most 9 + 7 + 2 = 18 cells if no neighbour is better and no axis is extended, and
  2 more if there is a second dip.
- ``separable``: the whole lr line at the start's eps, the whole eps line at its best lr, then the ring: the neighbours
  of the best cell, up to eight. A better neighbour means that lr and eps are not separable here: the eps line is
  repeated at the neighbour's lr, the best of that line gets its own ring, and so on until a ring finds nothing better.
  On 21 x 21 values that is at most 21 + 20 + 6 = 47 cells if the first ring confirms.
- ``grid``: every cell.

If one axis is absent, or has one value, every method is a single line.

**Termination.** Better implies an earlier rank: margin and error are not negative. So each neighbour that the search
moves to, and the best of a line through it, ranks strictly earlier than the pick before. No cell is picked twice, and
there are finitely many.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from avagrad.tune.scores import Score, best, better
from avagrad.tune.space import NAMES, SMALLEST_EPS, Cell, Space

__all__ = ["METHODS"]

_MAX_EXTENSIONS = 2  # of one axis
_LONG = 16  # the first stride is 2 on an axis of up to so many values, and 4 on a longer one


class Inputs(NamedTuple):
    """The inputs of a method."""

    space: Space
    known: Mapping[Cell, Score]
    by_first_seed: Mapping[Cell, Score]
    start: Cell
    margin: float
    extend: bool  # whether axes may be extended


@dataclass(frozen=True)
class Stage:
    """A stage of a search. It ends when all of its cells are known."""

    name: str
    cells: tuple[Cell, ...]
    pick: Cell | None
    path: tuple[Cell, ...]
    remaining: int = 0  # an upper bound on the further cells up to the next ring
    rings: int = 0
    confirmed: bool | None = None
    coarse: bool = False
    space: Space | None = None  # with extended axes


def stages(method: str, given: Inputs) -> Iterator[Stage]:
    """Yield the stages of a search; the known scores decide on the next."""
    space, start, margin = given.space, given.start, given.margin
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, but must be one of {', '.join(METHODS)}.")
    if start not in space:
        raise ValueError(f"start is {start}, but must be a cell of the space.")
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin is {margin}, but must be finite and at least 0.")
    return METHODS[method](given)


class _Lines:
    """The search by lines. It may extend the axes of its space."""

    def __init__(self, given: Inputs) -> None:
        self.space, self.known, self.by_first_seed, self.start, self.margin, extend = given
        self.path: tuple[Cell, ...] = (self.start,)
        self.extensions = dict.fromkeys(NAMES, _MAX_EXTENSIONS if extend else 0)
        rows, columns = self.space.shape
        self.names = [name for name, length in zip(NAMES, (rows, columns), strict=True) if length > 1]

    def stages(self) -> Iterator[Stage]:
        pick = self.start
        for name in self.names:
            stage = _line_name(name, pick)
            found = yield from self._search_line(name, pick, stage)
            if found is None:
                yield _nothing(stage, self.start)
                return
            pick = found
            self.path = (*self.path, pick)
        yield from self._neighbours(pick)

    def _search_line(self, name: str, at: Cell, stage: str) -> Generator[Stage, None, Cell | None]:
        """Search an axis through a cell, from coarse to fine; return its best cell."""
        line = self.space.along(name, at)
        later = self.names[self.names.index(name) + 1 :]
        remaining = sum(_max_of_line(other, self.space) - 1 for other in later) + 2 * len(self.names) - 2
        stride = _first_stride(len(line))
        coarse = self._around(name, at, stride, len(line))
        cells = yield from self._coarse(name, at, coarse, stage, remaining + _max_refined(name, stride))
        dips = self._dips(name, cells)
        while dips and stride > 1:
            stride //= 2
            near = [self._around(name, dip, stride, 1) for dip in dips]
            cells = tuple(dict.fromkeys(itertools.chain.from_iterable(near)))
            known = self.by_first_seed if stride > 1 else self.known
            more = {"remaining": remaining + _max_refined(name, stride), "coarse": stride > 1}
            yield self._stage(stage, cells, best(cells, known), **more)
            dips = [found for each in near if (found := best(each, known)) is not None]
        pick = best(dips, self.known)
        if pick is None:  # all cells so far have failed, but the line has more
            pick = best(line, self.known)
            yield self._stage(stage, line, pick, remaining=remaining)
        while pick is not None and self._extends(name, pick=pick):
            before, line = line, self.space.along(name, at)
            cells = tuple(cell for cell in line if cell == pick or cell not in before)
            pick = best(cells, self.known)
            yield self._stage(stage, cells, pick, remaining=remaining)
        return pick

    def _coarse(
        self, name: str, at: Cell, every: tuple[Cell, ...], stage: str, remaining: int
    ) -> Generator[Stage, None, tuple[Cell, ...]]:
        """Evaluate the coarse cells of a line, along lr only as far as needed; return those."""
        place, reach = every.index(at), 1 if name == "lr" else len(every)
        first, last = max(place - reach, 0), min(place + reach, len(every) - 1)
        while True:
            cells = every[first : last + 1]
            pick = best(cells, self.by_first_seed)
            yield self._stage(stage, cells, pick, remaining=remaining + len(every) - len(cells), coarse=True)
            # One more beyond the pick, or on both sides if all have failed.
            low, high = (first, last) if pick is None else (every.index(pick),) * 2
            first, last = max(min(first, low - 1), 0), min(max(last, high + 1), len(every) - 1)
            if last - first < len(cells):
                return cells

    def _dips(self, name: str, cells: tuple[Cell, ...]) -> list[Cell]:
        """Return the best coarse cell; along eps also the best of another dip, if that may turn out to be lower."""
        pick = best(cells, self.by_first_seed)
        if pick is None or name != "eps":
            return [pick] if pick else []
        ranks = [self.by_first_seed[cell].rank for cell in cells]
        beside = [[k for k in (i - 1, i + 1) if 0 <= k < len(cells)] for i in range(len(cells))]
        place = cells.index(pick)
        others = [
            cell for i, cell in enumerate(cells) if abs(i - place) > 1 and all(ranks[i] <= ranks[k] for k in beside[i])
        ]
        second = best(others, self.by_first_seed)
        if second is None:
            return [pick]
        losses = [self.by_first_seed[cell].loss for cell in cells]
        at = cells.index(second)
        depth = max(losses[k] for k in beside[at]) - losses[at]
        return [pick, second] if losses[at] - losses[place] <= depth else [pick]

    def _neighbours(self, pick: Cell) -> Iterator[Stage]:
        confirmed = None
        for rings in itertools.count():
            near = tuple(cell for name in self.names for cell in self._around(name, pick, 1, 1) if cell != pick)
            stage = f"neighbours of {pick}"
            yield self._stage(stage, near, pick, rings=rings, confirmed=confirmed)
            to = best((cell for cell in near if better(self.known[cell], self.known[pick], self.margin)), self.known)
            if to is not None:
                pick, confirmed = to, False
                self.path = (*self.path, pick)
            elif not self._extends(*self.names, pick=pick):
                yield self._stage(stage, (), pick, rings=rings + (len(self.names) > 1), confirmed=True)
                return

    def _around(self, name: str, cell: Cell, stride: int, most: int) -> tuple[Cell, ...]:
        """Return the cell and up to ``most`` cells on either side of it along an axis, a stride apart."""
        line = self.space.along(name, cell)
        place = line.index(cell)
        return tuple(
            each for i, each in enumerate(line) if (i - place) % stride == 0 and abs(i - place) <= most * stride
        )

    def _extends(self, *names: str, pick: Cell) -> bool:
        """Extend the axes that have the best at their end, as far as allowed; return whether one was extended."""
        before = self.space
        for name in names:
            if self.extensions[name] and is_best_at_end(before, name, pick, self.known, self.margin):
                longer = self.space.extended(name, pick)
                self.extensions[name] -= longer != self.space
                self.space = longer
        return self.space != before

    def _stage(self, stage: str, cells: tuple[Cell, ...], pick: Cell | None, **more: Any) -> Stage:
        return Stage(stage, cells, pick, self.path, space=self.space, **more)


def is_best_at_end(space: Space, name: str, pick: Cell, known: Mapping[Cell, Score], margin: float) -> bool:
    """Return whether a cell is at an end of an axis, and better than its neighbour there by more than the margin.

    A small enough eps is not an end: nothing is to be found beyond it.
    """
    line = space.along(name, pick)
    place = line.index(pick)
    if len(line) == 1 or 0 < place < len(line) - 1:
        return False
    if name == "eps" and place == 0 and pick.eps is not None and pick.eps <= SMALLEST_EPS:
        return False
    inner = line[1 if place == 0 else -2]
    return inner not in known or better(known[pick], known[inner], margin)


def _lines(given: Inputs) -> Iterator[Stage]:
    return _whole(given) if given.space.shape == (1, 1) else _Lines(given).stages()


def _first_stride(length: int) -> int:
    return 4 if length > _LONG else 2


def _max_refined(name: str, stride: int) -> int:
    """Return an upper bound on the cells needed to refine from this stride to single steps."""
    return (4 if name == "eps" else 2) * (stride // 2)


def _max_of_line(name: str, space: Space) -> int:
    """Return an upper bound on the cells of an axis that the search by lines evaluates."""
    length = space.shape[NAMES.index(name)]
    stride = _first_stride(length)
    return min(length, math.ceil(length / stride) + _max_refined(name, stride))


def _separable(given: Inputs) -> Iterator[Stage]:
    if 1 in given.space.shape:
        yield from _whole(given)
        return
    space, known, _, start, margin, _ = given
    _, columns = space.shape
    line, stage = space.along("lr", start), _line_name("lr", start)
    pick = best(line, known)
    yield Stage(stage, line, pick, (start,), remaining=columns - 1 + _ring_at_most(space))
    if pick is None:
        yield _nothing(stage, start)
        return
    path = (start, pick)
    line, stage = space.along("eps", pick), _line_name("eps", pick)
    pick = best(line, known)
    yield Stage(stage, line, pick, path, remaining=_ring_at_most(space))
    yield from _rings(space, known, pick, path, margin)


def _rings(
    space: Space, known: Mapping[Cell, Score], pick: Cell | None, path: tuple[Cell, ...], margin: float
) -> Iterator[Stage]:
    confirmed = None
    for rings in itertools.count():
        assert pick is not None  # every line from here on contains a cell that did not fail: the previous pick
        path = (*path, pick)
        ring, stage = space.neighbours(pick), f"ring around {pick}"
        yield Stage(stage, ring, pick, path, rings=rings, confirmed=confirmed)
        to = best((cell for cell in ring if better(known[cell], known[pick], margin)), known)
        if to is None:
            yield Stage(stage, (), pick, path, rings=rings + 1, confirmed=True)
            return
        confirmed = False
        line = space.along("eps", to)
        pick = best(line, known)
        yield Stage(_line_name("eps", to), line, pick, path, _ring_at_most(space), rings + 1, confirmed)


def _whole(given: Inputs) -> Iterator[Stage]:
    """Evaluate every cell. If they are one line, there is nothing to confirm."""
    space, known, start = given.space, given.known, given.start
    rows, columns = space.shape
    line = _line_name("eps" if space.lr is None or rows < columns else "lr", start)
    stage, confirmed = (line, True) if 1 in space.shape else (f"grid of {len(space)} cells", None)
    pick = best(space.cells(), known)
    yield Stage(stage, space.cells(), pick, (start,))
    yield Stage(stage, (), pick, (start, pick), confirmed=confirmed) if pick else _nothing(stage, start)


def _line_name(name: str, through: Cell) -> str:
    at = through._replace(**{name: None})
    return f"line over {name} at {at}" if any(at) else f"line over {name}"


def _nothing(stage: str, start: Cell) -> Stage:
    return Stage(f"every point of the {stage} diverged or failed", (), None, (start,))


def _ring_at_most(space: Space) -> int:
    """Return an upper bound on the unknown neighbours of a cell if the eps line through it is known."""
    rows, columns = (min(3, length) for length in space.shape)
    return (rows - 1) * columns


METHODS: dict[str, Callable[[Inputs], Iterator[Stage]]] = {"lines": _lines, "separable": _separable, "grid": _whole}
