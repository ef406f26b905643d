"""The paper's Figure 1: where each method ends on the problem of Theorem 1."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avagrad.report.drawing import FAINT, INK, Figure, draw_band, finish_axes, legend, new_figure, styles_of
from avagrad.report.reading import Collection, Synthetic, method_title
from avagrad.report.values import Band, grouped, number
from avagrad.theory import Problem

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers"]

NAME, CHAPTER = "figure-1", "The problem of Theorem 1"
NOTE = "Means over time, as in the paper's Figure 1: lines are averages over replicas, bands the middle 80 % of them."
_NO_BOUND = "Theorem 2's bound is nowhere below 1, the most that a squared gradient can be."


@dataclass(frozen=True)
class Line:
    """What one method did, and where Theorem 2's bound on it says something."""

    title: str
    w: Band
    squared_gradient: Band
    bound: Band  # where it is below 1, the largest squared gradient there is


@dataclass(frozen=True)
class Start:
    """All methods from one start."""

    w1: float | None
    minimiser: float | None
    lines: tuple[Line, ...]
    note: str

    @property
    def title(self) -> str:
        """Where w starts, in words."""
        return "" if self.w1 is None else f"from w = {self.w1:g}"


@dataclass(frozen=True)
class Figure1:
    """The starts of one run, the lowest first."""

    title: str
    starts: tuple[Start, ...]


def numbers(collection: Collection) -> list[Figure1]:
    """Return for each run of the problem the mean iterate and the mean squared gradient, from each start.

    Lines are means over replicas, bands are from their 10 % to their 90 % quantile.

    >>> row = {"w1": 0.0, "method": "sgd", "step": 1, "mean_w": {"mean": 0.5, "q10": 0.25, "q90": 0.75}}
    >>> run = Synthetic("a", {"runs": [{"w1": 0.0, "C": 999.0, "delta": 1.0}]}, {}, (row,))
    >>> (start,) = numbers(Collection("a", synthetics=(run,)))[0].starts
    >>> start.title, round(start.minimiser, 4), start.lines[0].title, start.lines[0].w.middle
    ('from w = 0', 0.4995, 'SGD', (0.5,))
    """
    return [Figure1(_title(synthetic), starts_of(synthetic)) for synthetic in collection.synthetics]


def _title(synthetic: Synthetic) -> str:
    settings = {key: number(run.get(key)) for run in _runs(synthetic.config) for key in ("C", "delta", "lr", "steps")}
    return ", ".join(f"{key} = {value:g}" for key, value in settings.items() if value is not None) or "one run"


def starts_of(synthetic: Synthetic) -> tuple[Start, ...]:
    """Return the starts of a run, the lowest first."""
    by_start = grouped(synthetic.rows, lambda row: number(row.get("w1")))
    starts = sorted(by_start, key=lambda w1: math.inf if w1 is None else w1)  # type: ignore[return-value, arg-type]
    return tuple(_start(synthetic.config, number(w1), by_start[w1]) for w1 in starts)


def _start(config: Mapping[str, Any], w1: float | None, rows: Sequence[Mapping[str, Any]]) -> Start:
    by_method = grouped(rows, lambda row: str(row.get("method") or "unknown method"))
    lines = tuple(_line(str(name), found) for name, found in by_method.items())
    has_bound = any(_quantity(row, "bound", "mean") is not None for row in rows)
    note = _NO_BOUND if has_bound and all(line.bound.is_empty for line in lines) else ""
    return Start(w1, _minimiser(config, w1), lines, note)


def _line(name: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    at = {step: row for row in rows if (step := number(row.get("step"))) is not None}
    steps = tuple(sorted(at))

    def band(quantity: str) -> Band:
        parts = ("mean", "q10", "q90")
        middle, low, high = (tuple(_quantity(at[step], quantity, part) for step in steps) for part in parts)
        whole = not any(None in column for column in zip(low, high, strict=True))
        return Band(steps, middle, low, high) if whole else Band(steps, middle, middle, middle)

    bound = tuple(y if y is not None and y < 1 else None for y in band("bound").middle)
    title = method_title({"optimizer": name})
    return Line(title, band("mean_w"), band("mean_squared_gradient"), Band(steps, bound, bound, bound))


def _quantity(row: Mapping[str, Any], quantity: str, part: str) -> float | None:
    parts = row.get(quantity)
    return number(parts.get(part)) if isinstance(parts, Mapping) else None


def _runs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    runs = config.get("runs")
    return [run for run in runs if isinstance(run, Mapping)] if isinstance(runs, Sequence) else []


def _minimiser(config: Mapping[str, Any], w1: float | None) -> float | None:
    run = next((run for run in _runs(config) if number(run.get("w1")) == w1), {})
    C, delta = number(run.get("C")), number(run.get("delta"))
    try:
        return None if C is None or delta is None else Problem(C=C, delta=delta).minimiser
    except ValueError:  # there is no such problem
        return None


def caption(figure: Figure1) -> str:
    """Return where each method is at the end, from each start.

    >>> line = Line("Adam", Band((1.0,), (0.95,)), Band((1.0,), (0.9,)), Band())
    >>> caption(Figure1("one run", (Start(0.0, 0.4995, (line,), ""),)))
    'From w = 0 (the minimum is at 0.4995), means over time of w and of the squared gradient: Adam 0.950, 0.900.'
    """
    sentences = []
    for start in figure.starts:
        ends = [
            f"{line.title} {w[1]:.3f}, {squared[1]:.3f}"
            for line in start.lines
            if (w := line.w.last) is not None and (squared := line.squared_gradient.last) is not None
        ]
        lowest = "" if start.minimiser is None else f" (the minimum is at {start.minimiser:.4f})"
        where = f"{start.title.capitalize() or 'In all'}{lowest}, means over time of w and of the squared gradient"
        sentences += [f"{where}: {'; '.join(ends)}."] if ends else []
    return " ".join(filter(None, [*sentences, *dict.fromkeys(start.note for start in figure.starts)]))


def draw(figure_1: Figure1) -> Figure:
    """Draw a row for each start, with the mean iterate and the mean squared gradient.

    >>> len(draw(Figure1("one run", (Start(0.0, 0.4995, (), ""),))).axes)
    2
    """
    starts = figure_1.starts
    figure = new_figure(9.0, 1.4 + 2.9 * max(len(starts), 1), CHAPTER)
    grid = figure.subplots(max(len(starts), 1), 2, squeeze=False, sharex=True)
    styles = styles_of([line.title for start in starts for line in start.lines])
    for (left, right), start in zip(grid, starts, strict=False):
        if start.minimiser is not None:
            left.axhline(start.minimiser, color=FAINT, lw=1.0)
        for line in start.lines:
            draw_band(left, line.w, styles[line.title])
            draw_band(right, line.squared_gradient, styles[line.title])
            draw_band(right, line.bound, _dotted(styles[line.title]["color"]))
        left.set_ylabel(f"mean w, {start.title}".rstrip(", "), color=INK, fontsize=10)
        right.set_ylabel("mean squared gradient", color=INK, fontsize=10)
        right.set_ylim(bottom=0)
    for axes in grid.flat:
        finish_axes(axes, x="step" if axes in grid[-1] else "")
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    entries = [(style, title) for title, style in styles.items()]
    if any(not line.bound.is_empty for start in starts for line in start.lines):
        entries.append((_dotted(INK), "Theorem 2's bound, in the method's colour"))
    entries.append(({"color": FAINT, "ls": "-", "lw": 1.0}, "the minimiser w*"))
    legend(figure, entries, " ".join(dict.fromkeys(start.note for start in starts if start.note)))
    return figure


def _dotted(colour: str) -> dict[str, Any]:
    return {"color": colour, "ls": (0, (1, 2)), "lw": 1.2}
