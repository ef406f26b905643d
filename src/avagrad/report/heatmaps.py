"""The numbers behind a heat map: values, shades, the ridge of best learning rates. Nothing is drawn here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from avagrad.tune.records import Record
from avagrad.tune.search import Score, plan, replay, scores
from avagrad.tune.separability import Separability, separability, two_digits
from avagrad.tune.space import Cell, Space, axis

__all__ = ["HeatMap", "heat_map", "shades", "short_value", "space_of", "text_colour", "ticks"]


@dataclass(frozen=True)
class HeatMap:
    """A map of lr (rows, from the smallest up) against eps (columns).

    A value is None where there is no record, and infinite where the run diverged; ``ridge`` has a row for each column,
    or None (also where one cell alone was run); ``path`` has the cells that a separable search goes through, as (row,
    column).

    >>> HeatMap("adam", (0.1, 1.0), (1e-8,), ((0.5,), (None,)), (0,), (0, 0), (), None).finite
    [0.5]
    """

    title: str
    lr: tuple[float, ...]
    eps: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]
    ridge: tuple[int | None, ...]
    best: tuple[int, int] | None
    path: tuple[tuple[int, int], ...]
    separability: Separability | None  # where the grid is whole

    @property
    def finite(self) -> list[float]:
        """The values that are numbers, in no order."""
        return [value for row in self.values for value in row if value is not None and math.isfinite(value)]

    @property
    def subtitle(self) -> str:
        """The slope of the ridge, or how much of the grid there is.

        >>> HeatMap("Adam", (0.1, 1.0), (1e-8,), ((0.5,), (None,)), (0,), (0, 0), (), None).subtitle
        '1 of 2 cells'
        """
        if self.separability is None:
            return f"{self._run} of {len(self.lr) * len(self.eps)} cells"
        slope = self.separability.slope
        return "" if slope is None else f"slope of the ridge {two_digits(slope)}"

    @property
    def _run(self) -> int:
        return sum(value is not None for row in self.values for value in row)

    def summary(self) -> str:
        """Return what the map says in a few sentences.

        >>> HeatMap("Adam", (0.1, 1.0), (1e-8,), ((0.5,), (None,)), (0,), (0, 0), (), None).summary()
        'Adam: 1 of 2 cells was run. The best is lr 0.1, eps 1e-08: 0.5.'
        """
        if self.separability is not None:
            return f"{self.title}: {self.separability.summary()}{self._ties()}"
        cells = len(self.lr) * len(self.eps)
        told = f"{self.title}: {self._run} of {cells} cells {'was' if self._run == 1 else 'were'} run."
        if self.best is None:
            return f"{told} All of them diverged."
        row, column = self.best
        return (
            f"{told} The best is {Cell(self.lr[row], self.eps[column])}: {self.values[row][column]:.4g}.{self._ties()}"
        )

    def _ties(self) -> str:
        """Say how many cells share the best value: which of them is called the best is then chance."""
        if self.best is None:
            return ""
        same = sum(value == self.values[self.best[0]][self.best[1]] for value in self.finite)
        return f" {same} cells share the best value." if same > 1 else ""

    def hover(self, number: int, measure: str) -> dict[str, str]:
        r"""Return what each cell holds, by the id that it has in a drawing whose map of that number this is.

        >>> HeatMap("Adam", (0.1,), (1e-8,), ((0.5,),), (0,), (0, 0), (), None).hover(0, "error, %")
        {'cell-0-0-0': 'Adam\nlr 0.1, eps 1e-08\nerror, %: 0.5, the best'}
        """
        found = {}
        for row, lr in enumerate(self.lr):
            for column, eps in enumerate(self.eps):
                value = self.values[row][column]
                if value is None:
                    continue
                best = ", the best" if (row, column) == self.best else ""
                told = f"{measure}: {value:.5g}{best}" if math.isfinite(value) else "diverged"
                found[f"cell-{number}-{row}-{column}"] = f"{self.title}\n{Cell(lr, eps)}\n{told}"
        return found


def space_of(records: Sequence[Record]) -> Space:
    """Return the axes on which records lie.

    >>> space_of([Record(0.1, 1e-8, value=1), Record(1, 1e-8, value=1), Record(1, 0.1, value=1)]).shape
    (2, 2)
    """
    lrs, epses = (
        {value for record in records if (value := getattr(record, name)) is not None} for name in ("lr", "eps")
    )
    return Space(axis(sorted(lrs) or None, "lr"), axis(sorted(epses) or None, "eps"))


def heat_map(title: str, records: Sequence[Record], *, direction: str = "minimize") -> HeatMap:
    """Work a heat map out; several seeds of a point are averaged, and one that diverged makes the cell diverged.

    >>> records = [Record(lr, eps, value=abs(math.log10(lr / eps))) for lr in (0.1, 1, 10) for eps in (0.1, 1, 10)]
    >>> found = heat_map("a ridge", records)
    >>> found.ridge, found.best, found.separability.slope
    ((0, 1, 2), (1, 1), 1.0)
    """
    space = space_of(records)
    if space.lr is None or space.eps is None:
        raise ValueError(f"{title}: a heat map needs records with an lr and an eps.")
    known = scores(records, direction=direction)
    sign = 1.0 if direction == "minimize" else -1.0
    lrs, epses = space.lr.values, space.eps.values

    def value(lr: float, eps: float) -> float | None:
        score = known.get(Cell(lr, eps))
        return None if score is None else math.inf if score.failed else sign * score.loss

    values = tuple(tuple(value(lr, eps) for eps in epses) for lr in lrs)
    whole = len(known) == len(space) and min(space.shape) > 1
    found = separability(space, known, start=space.start()) if whole else None
    path: tuple[tuple[int, int], ...] = ()
    best = min(known, key=lambda cell: known[cell].rank, default=None)
    if found is not None:
        path = tuple(space.indices(cell) for cell in replay("separable", space, known, start=space.start()).path)
        ridge = tuple(None if lr is None else lrs.index(lr) for _, lr in found.ridge)
        best = found.best
    else:
        ridge = tuple(_lowest([known.get(Cell(lr, eps)) for lr in lrs]) for eps in epses)
        search = plan("separable", space, known, start=space.start())
        if search.done:  # this is what was run, and no more is needed
            path = tuple(space.indices(cell) for cell in search.path)
    place = None if best is None or known[best].failed else space.indices(best)
    return HeatMap(title, lrs, epses, values, ridge, place, path, found)


def _lowest(column: Sequence[Score | None]) -> int | None:
    known = [(score, i) for i, score in enumerate(column) if score is not None]
    ranks = [(score.rank, i) for score, i in known if not score.failed]
    return min(ranks)[1] if ranks and len(known) > 1 else None  # one cell alone is not the best of its eps


def shades(maps: Sequence[HeatMap], *, direction: str = "minimize") -> Mapping[float, float]:
    """Return for each finite value a shade from 0 (best) to 1 (worst), the same for all maps.

    Shades go by rank, not by value: most of a map is as bad as guessing, and what matters are the differences among
    the good. Equal values have equal shades.

    >>> one = HeatMap("", (1.0, 2.0), (1.0, 2.0), ((90.0, 90.0), (10.0, 11.0)), (), None, (), None)
    >>> dict(shades([one]))
    {10.0: 0.0, 11.0: 0.4, 90.0: 1.0}
    """
    values = sorted((value for each in maps for value in each.finite), reverse=direction == "maximize")
    if not values:
        return {}
    places: dict[float, list[int]] = {}
    for i, value in enumerate(values):
        places.setdefault(value, []).append(i)
    middles = {value: sum(found) / len(found) for value, found in places.items()}
    last = max(middles.values())
    return {value: middle / last if last else 0.0 for value, middle in middles.items()}


def short_value(value: float) -> str:
    """Return a value in the few characters that a cell has room for.

    >>> [short_value(value) for value in (0.123, 2.18, 35.14, 5893.0, 1e6, -2.2e9)]
    ['.12', '2.2', '35', '5893', '1e6', '-2e9']
    """
    size = abs(value)
    if 0 < size < 1:
        return f"{value:.2f}".replace("0.", ".", 1)
    return f"{value:.1f}" if size < 10 else f"{value:.0f}" if size < 1e4 else _short(value, 1)


def text_colour(shade: float) -> str:
    """Return black or white, whichever is read better on a shade.

    >>> text_colour(0.0), text_colour(1.0)
    ('black', 'white')
    """
    return "white" if shade > 0.5 else "black"


def ticks(values: Sequence[float], most: int = 11) -> list[tuple[int, str]]:
    """Return where an axis has its labels, and what they say: powers of ten where there are any, else every so many.

    >>> ticks((5e-7, 1e-6, 5e-6, 1e-5))
    [(1, '1e-6'), (3, '1e-5')]
    >>> ticks((0.2, 2, 20))
    [(0, '0.2'), (1, '2'), (2, '20')]
    """
    tens = [i for i, value in enumerate(values) if abs(math.log10(value) - round(math.log10(value))) < 1e-9]
    places = tens if len(tens) >= 2 else list(range(len(values)))
    step = -(-len(places) // most)
    return [(i, _short(values[i])) for i in places[::step]]


def _short(value: float, digits: int = 3) -> str:
    text = f"{value:.{digits}g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text
