"""Learning curves: training loss, validation error, gamma and lr against the epoch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from avagrad.report.comparable import Group, Setting, comparable, unit_of
from avagrad.report.drawing import Figure, draw_band, finish_axes, legend, line_style, new_figure
from avagrad.report.reading import Collection, Run
from avagrad.report.values import Band, grouped, mean_of_all, number, wants_log

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers"]

NAME, CHAPTER = "learning-curves", "Methods compared"
NOTE = "Learning curves are means over seeds, with a band from the least to the most. A cross is where a run diverged."
MOST_LINES = 12  # of single settings in a chart
QUANTITIES = {"loss": "training loss", "error": "validation error", "gamma": "gamma", "lr": "lr"}


@dataclass(frozen=True)
class Line:
    """What a setting did over the epochs, for each quantity; or several settings of a method, folded."""

    title: str
    seeds: int
    diverged: int
    bands: Mapping[str, Band]
    settings: int = 1

    @property
    def label(self) -> str:
        """The title, with how many seeds there are and how many of them diverged."""
        runs = [f"{self.seeds} seeds"] if self.seeds > 1 and self.settings == 1 else []
        gone = ["diverged" if self.seeds == 1 else f"{self.diverged} diverged"] if self.diverged else []
        return ", ".join([self.title, *runs, *gone])


@dataclass(frozen=True)
class Learning:
    """The lines of runs that may be compared, and which of the quantities want a logarithmic axis."""

    title: str
    quantities: Mapping[str, str]  # with their titles
    lines: tuple[Line, ...]
    log: frozenset[str]


def numbers(collection: Collection, *, most: int = MOST_LINES) -> list[Learning]:
    """Return a chart for each group of runs that may be compared.

    Seeds are averaged where all of them have a record, so a line ends where its first seed diverges. Of many settings
    the best ``most`` by validation error have lines of their own; the others are folded into one line for each method.

    >>> rows = ({"epoch": 1, "loss": 2.0, "error": 50.0}, {"epoch": 2, "loss": 1.0, "error": 25.0})
    >>> config = {"task": "digits", "optimizer": "sgd", "lr": 0.1}
    >>> runs = tuple(Run("a", config | {"seed": seed}, {}, rows, 1, None) for seed in (0, 1))
    >>> (chart,) = numbers(Collection("a", runs))
    >>> chart.title, chart.lines[0].label, chart.lines[0].bands["loss"].middle
    ('digits', 'SGD, lr 0.1, 2 seeds', (2.0, 1.0))
    """
    return [_chart(group, most) for group in comparable(collection.runs)]


def _chart(group: Group, most: int) -> Learning:
    found = {id(setting): (setting, _line(setting)) for setting in group.settings}
    kept = set(sorted(found, key=lambda each: _at_the_end(*found[each]))[: max(most, 1)])
    lines = [line for each, (_, line) in found.items() if each in kept]  # in the order of the methods
    rest = grouped((setting for each, (setting, _) in found.items() if each not in kept), lambda each: each.method)
    lines += [_folded(str(method), settings) for method, settings in rest.items()]
    values = {name: [y for line in lines for y in line.bands[name].values] for name in ("loss", "gamma", "lr")}
    log = {name for name, found in values.items() if wants_log(found)}
    unit = unit_of(group.task)
    titles = QUANTITIES | {"error": f"validation error, {unit}" if unit else "validation error"}
    return Learning(group.title, titles, tuple(lines), frozenset(log))


def _line(setting: Setting) -> Line:
    # A run that has only begun has no rows, and would end the line of the others before it begins.
    runs = [run for run in setting.runs if run.rows or run.status != "unfinished"]
    tables = [_by_epoch(run) for run in runs]
    epochs = tuple(sorted(set.intersection(*map(set, tables)))) if tables else ()
    columns = {name: [[table[at].get(name) for table in tables] for at in epochs] for name in QUANTITIES}
    bands = {name: _mean_and_range(epochs, columns[name]) for name in QUANTITIES}
    return Line(setting.title, len(runs), setting.diverged, bands)


def _folded(method: str, settings: Sequence[Setting]) -> Line:
    """Return the median of many settings and the middle 80 % of them: a mean would be that of what diverges."""
    runs = [run for setting in settings for run in setting.runs]
    tables = [_by_epoch(run) for run in runs]
    epochs = tuple(sorted(set().union(*tables)))
    bands = {}
    for name in QUANTITIES:
        columns = [[y for table in tables if (y := number(table.get(at, {}).get(name))) is not None] for at in epochs]
        spread = [quantiles(column, n=10, method="inclusive") if len(column) > 1 else 9 * column for column in columns]
        low, middle, high = (tuple(each[i] if each else None for each in spread) for i in (0, 4, 8))
        bands[name] = Band(epochs, middle, low, high)
    title = f"{method}, {len(settings)} other setting{'s' * (len(settings) > 1)} (median, middle 80 %)"
    return Line(title, len(runs), sum(setting.diverged for setting in settings), bands, len(settings))


def _by_epoch(run: Run) -> dict[float, Mapping[str, Any]]:
    # The row of a divergence has no values, and the number of the epoch before.
    rows = [row for row in run.rows if row.get("diverged") is not True]
    return {epoch: row for row in rows if (epoch := number(row.get("epoch"))) is not None}


def _mean_and_range(x: tuple[float, ...], columns: Sequence[Sequence[object]]) -> Band:
    middle = tuple(mean_of_all(column) for column in columns)
    known = [[found for value in column if (found := number(value)) is not None] for column in columns]
    pairs = list(zip(middle, known, strict=True))
    low, high = (tuple(None if at is None else pick(column) for at, column in pairs) for pick in (min, max))
    return Band(x, middle, low, high)


def _at_the_end(setting: Setting, line: Line) -> tuple[bool, float]:
    last = line.bands["error"].last
    known = setting.validation if setting.validation is not None else last[1] if last else math.inf
    return setting.diverged > 0, known


def caption(chart: Learning) -> str:
    """Return which settings have the least validation error at the end.

    >>> line = Line("SGD, lr 0.1", 2, 0, {"error": Band((1.0, 2.0), (50.0, 25.0))})
    >>> caption(Learning("digits", {"error": "validation error, %"}, (line,), frozenset()))
    'Validation error, %, at the end: SGD, lr 0.1: 25.'
    """
    single = [line for line in chart.lines if line.settings == 1]
    ends = [(*end, line) for line in single if (end := line.bands.get("error", Band()).last) is not None]
    last = max((epoch for epoch, _, _ in ends), default=0.0)
    ends = [end for end in ends if end[0] == last and not end[2].diverged]  # the others have not come so far
    ends.sort(key=lambda end: end[1])
    named = "; ".join(f"{line.title}: {value:.4g}" for _, value, line in ends[:3])
    others = len(ends) - 3 + sum(line.settings for line in chart.lines if line.settings > 1)
    more = f"; {others} more" if others > 0 else ""
    diverged = [line.title for line in single if line.diverged]
    lost = f"Diverged: {'; '.join(diverged)}." if diverged else ""
    quantity = chart.quantities.get("error", "error").capitalize()
    return " ".join(filter(None, [f"{quantity}, at the end: {named}{more}." if ends else "", lost]))


def draw(chart: Learning) -> Figure:
    """Draw a panel for each quantity; a cross is where a line diverged.

    >>> len(draw(Learning("digits", {"loss": "loss", "lr": "lr"}, (), frozenset())).axes)
    2
    """
    figure = new_figure(9.0, 6.4 + 0.13 * len(chart.lines), chart.title)
    grid = figure.subplots(-(-len(chart.quantities) // 2), 2, squeeze=False, sharex=True).flat
    for i, (axes, (name, title)) in enumerate(zip(grid, chart.quantities.items(), strict=False)):
        for place, line in enumerate(chart.lines):
            band = line.bands[name]
            draw_band(axes, band, line_style(place))
            if line.diverged and line.settings == 1 and band.last is not None:
                axes.plot(*band.last, marker="x", ms=9, mew=2, color=line_style(place)["color"], ls="none")
        last_row = i >= len(chart.quantities) - 2
        finish_axes(axes, x="epoch" if last_row else "", y=title, log_y=name in chart.log)
    legend(figure, [(line_style(place), line.label) for place, line in enumerate(chart.lines)])
    return figure
