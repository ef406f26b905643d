"""What a search finds for its trials, compared with as many random cells of the same grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avagrad.report.comparable import comparable_sweeps, names_of
from avagrad.report.drawing import COLOURS, STYLES, Figure, draw_band, finish_axes, legend, new_figure
from avagrad.report.reading import Collection, Sweep
from avagrad.report.values import Band, number, wants_log
from avagrad.tune.records import sign_of
from avagrad.tune.search import replay
from avagrad.tune.separability import counted

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers", "random_search"]

NAME = "budgets"
CHAPTER = "What a search finds for its trials"
NOTE = "The best value after so many trials."
_WIDTHS = (3.6, 2.4, 1.4)
_MOST = 6  # sweeps in one drawing
_EARLY = 5  # trials, before which values are so bad that the differences at the end could not be seen


@dataclass(frozen=True)
class Line:
    """The best value after each trial. ``kind`` is "separable", "random" (with a band), or "records"."""

    title: str
    kind: str
    sweep: int  # lines of one sweep have one colour
    band: Band

    @property
    def label(self) -> str:
        """The title, and how the cells were chosen."""
        how = {"separable": "two lines and a ring", "random": "random cells"}
        return f"{self.title}, {how.get(self.kind, 'as it was run')}"


@dataclass(frozen=True)
class Budgets:
    """The lines of sweeps that may be compared. A trial is a cell, or a seed of it: see :class:`Known`."""

    title: str
    measure: str
    lines: tuple[Line, ...]
    log: bool  # of the values; trials always are
    direction: str = "minimize"

    @property
    def best_sweeps(self) -> set[int]:
        """The sweeps that end best; as many as one drawing can hold."""
        sign = sign_of(self.direction)
        ends = {line.sweep: sign * last[1] for line in self.lines[::-1] if (last := line.band.last)}
        return set(sorted(ends, key=lambda sweep: ends[sweep])[:_MOST])

    @property
    def limits(self) -> tuple[float, float] | None:
        """The ends of the axis of values: the least and the largest once a search has had a few trials, and room."""
        bands = [line.band for line in self.lines if line.sweep in self.best_sweeps]
        late = [y for band in bands for x, y in zip(band.x, band.middle, strict=True) if y is not None and x >= _EARLY]
        low, high = min(late, default=0.0), max(late, default=0.0)
        room = 0.08 * (high - low) or 0.06 * abs(high) or 1.0
        return (low / (high / low) ** 0.08 if self.log else low - room, high + room) if late else None


def numbers(collection: Collection) -> list[Budgets]:
    """Return a chart for each group of sweeps that may be compared: the best value against the trials spent.

    On a whole grid the separable search is replayed, next to :func:`random_search` on the same grid (the median, and
    from the lucky quarter to the unlucky one). What is not a whole grid is shown in the order of its records. Before
    the first trial that did not diverge there is a gap.

    >>> from avagrad.tune.records import Record
    >>> records = tuple(Record(lr, eps, value=lr + eps) for lr in (1, 2, 3) for eps in (0.1, 1, 2))
    >>> (chart,) = numbers(Collection("a", sweeps=(Sweep("a", "a", records, {}, {}, "minimize"),)))
    >>> [(line.kind, line.band.last) for line in chart.lines]
    [('separable', (6, 1.1)), ('random', (9, 1.1))]
    """
    found = []
    for title, sweeps in comparable_sweeps([sweep for sweep in collection.sweeps if sweep.records]):
        named = enumerate(zip(names_of(sweeps), sweeps, strict=True))
        lines = tuple(line for i, (name, sweep) in named for line in _lines(name, i, sweep))
        log = wants_log((value for line in lines for value in line.band.values), span=3.0)
        found.append(Budgets(title, sweeps[0].measure, lines, log, sweeps[0].direction))
    return found


def _lines(title: str, place: int, sweep: Sweep) -> list[Line]:
    known = sweep.known
    each = next(score.count for score in known.cells.values()) if known.search and known.is_whole else 1  # of a cell

    def line(kind: str, lucky: Sequence[float], usual: Sequence[float], unlucky: Sequence[float]) -> Line:
        # An infinite loss is a gap: nothing that works has been found yet.
        low, middle, high = (tuple(number(known.sign * loss) for loss in curve) for curve in (lucky, usual, unlucky))
        return Line(title, kind, place, Band(tuple(range(each, each * len(middle) + 1, each)), middle, low, high))

    if not known.is_whole or known.space is None:
        return [line("records", *[known.curve] * 3)]
    found = replay("separable", known.space, known.cells, **known.options)
    losses = [math.inf if score.pruned else score.loss for score in known.cells.values()]
    return [
        line("separable", *[found.curve] * 3),
        line("random", *(random_search(losses, q) for q in (0.25, 0.5, 0.75))),
    ]


def random_search(losses: Sequence[float], share: float = 0.5) -> list[float]:
    """Return what so many cells drawn at random, none twice, reach: the loss that a share of all draws is not above.

    It is exact: of ``N`` cells the best of ``n`` is among the ``i`` best with probability
    ``1 - C(N - i, n) / C(N, n)``. A cell that diverged has an infinite loss, so that a mean would be infinite, too: the
    median (a half) is not.

    >>> random_search([3.0, 1.0, math.inf]), random_search([3.0, 1.0, math.inf], share=0.75)
    ([3.0, 1.0, 1.0], [inf, 3.0, 1.0])
    """
    ordered, total = sorted(losses), len(losses)
    found = []
    rank = total
    for drawn in range(1, total + 1):
        # More draws reach a better rank or the same, so it never has to go back. Odds that are equal must not be
        # missed by a rounding.
        while rank > 1 and _odds(total, rank - 1, drawn) >= share - 1e-9:
            rank -= 1
        found.append(ordered[rank - 1])
    return found


def _odds(total: int, best: int, drawn: int) -> float:
    """Return the probability that one of the best is among those that were drawn."""
    if drawn > total - best:
        return 1.0
    ways = (math.lgamma(k + 1) for k in (total - best, total - drawn, total - best - drawn, total))
    others, undrawn, neither, all_of_them = ways
    return -math.expm1(others + undrawn - neither - all_of_them)


def caption(chart: Budgets) -> str:
    """Return what is drawn: what each search has found when it ends, and random cells for as many trials.

    >>> search = Line("Adam", "separable", 0, Band((1.0, 2.0), (5.0, 3.0)))
    >>> caption(Budgets("digits", "error, %", (search,), False))
    'Adam: 3 after 2 trials.'
    """
    lines = [line for line in chart.lines if line.sweep in chart.best_sweeps]
    random = {
        (line.sweep, trials): f", where as many random cells have {value:.4g}"
        for line in lines
        if line.kind == "random"
        for trials, value in zip(line.band.x, line.band.middle, strict=True)
        if value is not None
    }
    found = [
        f"{line.title}: {end[1]:.4g} after {counted(int(end[0]), 'trial')}{random.get((line.sweep, end[0]), '')}."
        for line in lines
        if line.kind != "random" and (end := line.band.last) is not None
    ]
    if random:
        found.append("Two lines and a ring are replayed. Of random draws the median is a line, the middle half a band.")
    low, high = chart.limits or (-math.inf, math.inf)
    if any(y is not None and not low <= y <= high for line in lines for y in line.band.middle):
        found.append(f"Early trials are {'below' if chart.direction == 'maximize' else 'above'} the picture.")
    return " ".join(found) or "No trial has a finite value."


def draw(chart: Budgets) -> Figure:
    """Draw the best value against the trials spent, of the sweeps that end best; a dot ends a search.

    >>> len(draw(Budgets("digits", "validation error, %", (), False)).axes)
    1
    """
    lines = [line for line in chart.lines if line.sweep in chart.best_sweeps]
    styles = [_style(line, sorted(chart.best_sweeps).index(line.sweep)) for line in lines]
    figure = new_figure(8.0, 4.4 + 0.18 * len(lines), chart.title)
    axes = figure.subplots()
    for line, style in zip(lines, styles, strict=True):
        draw_band(axes, line.band, style, steps=True)
        if line.band.last is not None and line.kind != "random":
            axes.plot(*line.band.last, marker="o", ms=6, color=style["color"], ls="none")
    if chart.limits is not None:
        axes.set_ylim(*chart.limits)
    finish_axes(axes, x="trials", y=f"best {chart.measure}", log_x=bool(lines), log_y=chart.log, counts_x=True)
    left_out = len({line.sweep for line in chart.lines}) - len(chart.best_sweeps) if lines else 0
    left = "1 more sweep is not drawn: it ends" if left_out == 1 else f"{left_out} more sweeps are not drawn: they end"
    note = f"{left} worse." if left_out else ""
    legend(figure, zip(styles, (line.label for line in lines), strict=True), note)
    return figure


def _style(line: Line, place: int) -> dict[str, Any]:
    # Searches often find the same: a wide line shows at the sides of a narrow one above it.
    style = {"color": COLOURS[place % len(COLOURS)], "lw": _WIDTHS[place % len(_WIDTHS)]}
    return style | ({"ls": STYLES[1], "lw": 1.2} if line.kind == "random" else {"ls": "-"})
