"""Drawing curves and bars: numbers come in, figures go out."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.font_manager
import matplotlib.ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from avagrad.report.curves import (
    Band,
    BarGroup,
    BudgetChart,
    BudgetLine,
    LearningChart,
    LearningLine,
    Start,
    ratio_span,
)
from avagrad.report.figures import LOOKS, label
from avagrad.report.ridges import Ridge

__all__ = [
    "draw_budgets",
    "draw_figure_1",
    "draw_learning_curves",
    "draw_race",
    "draw_ridges",
    "draw_step_bars",
    "draw_step_sizes",
]

# Okabe and Ito's, without yellow and black, which do not show on white and on black. Colours and styles have no common
# period, so that neighbours differ in both and no two of 30 lines are the same.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
_WIDTHS = (3.6, 2.4, 1.4)
_LONGEST = 70  # a text that fits into a figure
_Ink = Mapping[str, str]


def draw_learning_curves(chart: LearningChart, *, look: str = "light") -> Figure:
    """Draw training loss, validation error, gamma and lr against the epoch; a cross is where a line diverged.

    >>> len(draw_learning_curves(LearningChart("digits", {"loss": "loss", "lr": "lr"}, (), frozenset(), 0)).axes)
    2
    """
    ink = LOOKS[look]
    figure = _figure(10.0, 6.4 + 0.11 * len(chart.lines), chart.title, ink)
    grid = figure.subplots(-(-len(chart.quantities) // 2), 2, squeeze=False, sharex=True).flat
    for axes, (name, title) in zip(grid, chart.quantities.items(), strict=False):
        for place, line in enumerate(chart.lines):
            _draw_learning_line(axes, place, line, name)
        _dress(axes, ink, y=title, log_y=name in chart.log)
        if all(line.bands[name].is_empty for line in chart.lines):
            _say_nothing(axes, ink)
    for axes in figure.axes[-2:]:
        axes.set_xlabel("epoch", color=ink["ink"], fontsize=9)
    _legend(figure, [(_style(place), line.label) for place, line in enumerate(chart.lines)], ink, note=chart.note)
    return figure


def _draw_learning_line(axes: Any, place: int, line: LearningLine, name: str) -> None:
    band = line.bands[name]
    _draw_band(axes, band, _style(place))
    if line.diverged and band.last is not None:
        axes.plot(*band.last, marker="x", ms=9, mew=2, color=_style(place)["color"], ls="none")


def draw_budgets(chart: BudgetChart, *, look: str = "light") -> Figure:
    """Draw the best value against the trials spent, and beside it the end of that from near; a dot ends a search.

    >>> len(draw_budgets(BudgetChart("digits", "validation error, %", (), False, None)).axes)
    1
    """
    ink = LOOKS[look]
    panels = 1 if chart.closer is None else 2
    figure = _figure(5.5 * panels, 4.4 + 0.1 * len(chart.lines), chart.title, ink)
    styles = [_budget_style(line) for line in chart.lines]
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes in all_axes:
        for line, style in zip(chart.lines, styles, strict=True):
            _draw_band(axes, line.band, style, steps=True)
            if line.band.last is not None and line.kind != "random":
                axes.plot(*line.band.last, marker="o", ms=6, color=style["color"], ls="none")
    if chart.closer is not None:
        all_axes[1].set(xlim=chart.closer[:2], ylim=chart.closer[2:])
        _dress(all_axes[1], ink, x="trials", y="the same, from near", log_x=True)
    _dress(all_axes[0], ink, x="trials", y=f"best {chart.measure}", log_x=bool(chart.lines), log_y=chart.log)
    if all(line.band.is_empty for line in chart.lines):
        _say_nothing(all_axes[0], ink)
    _legend(figure, list(zip(styles, (line.label for line in chart.lines), strict=True)), ink, note=chart.note)
    return figure


def _budget_style(line: BudgetLine) -> dict[str, Any]:
    # Searches often find the same: a wide line shows at the sides of a narrow one above it.
    style = {"color": _COLOURS[line.sweep % len(_COLOURS)], "lw": _WIDTHS[line.sweep % len(_WIDTHS)]}
    return style | ({"ls": _STYLES[1], "lw": 1.2} if line.kind == "random" else {"ls": "-"})


def draw_figure_1(starts: Sequence[Start], *, look: str = "light") -> Figure:
    """Draw the paper's Figure 1: a row for each start, with the mean iterate and the mean squared gradient.

    >>> len(draw_figure_1([Start(0.0, 0.4995, (), "")]).axes)
    2
    """
    ink = LOOKS[look]
    figure = _figure(10.0, 1.4 + 2.9 * max(len(starts), 1), "The problem of Theorem 1", ink)
    grid = figure.subplots(max(len(starts), 1), 2, squeeze=False, sharex=True)
    titles = dict.fromkeys(line.title for start in starts for line in start.lines)
    styles = {title: _style(place) for place, title in enumerate(titles)}
    for (left, right), start in zip(grid, starts, strict=False):
        _draw_start(left, right, start, styles, ink)
    for axes in figure.axes:
        if not axes.lines:
            _say_nothing(axes, ink)
        _dress(axes, ink)
    for axes in grid[-1]:
        _dress(axes, ink, x="step")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda step, _: f"{step:,.5g}"))
    notes = dict.fromkeys(start.note for start in starts if start.note)
    entries = [(style, title) for title, style in styles.items()]
    if any(not line.bound.is_empty for start in starts for line in start.lines):
        entries.append((_dotted(ink["ink"]), "Theorem 2's bound, in the method's colour"))
    entries.append(({"color": ink["faint"], "ls": "-", "lw": 1.0}, "the minimiser w*"))
    _legend(figure, entries, ink, note=" ".join(notes))
    return figure


def _draw_start(left: Any, right: Any, start: Start, styles: Mapping[str, Mapping[str, Any]], ink: _Ink) -> None:
    if start.minimiser is not None:
        left.axhline(start.minimiser, color=ink["faint"], lw=1.0)
    for line in start.lines:
        style = styles[line.title]
        _draw_band(left, line.w, style)
        _draw_band(right, line.squared_gradient, style)
        _draw_band(right, line.bound, _dotted(style["color"]))
    _dress(left, ink, y=f"mean w, {start.title}".rstrip(", "))
    _dress(right, ink, y="mean squared gradient")
    right.set_ylim(bottom=0)


def draw_step_sizes(eps: Sequence[float], sizes: Mapping[str, Sequence[float]], *, look: str = "light") -> Figure:
    """Draw the root mean square of a step, over lr, against eps: a line for each method.

    >>> len(draw_step_sizes([1e-8, 1.0], {"Adam": [1.0, 0.01], "AvaStep": [1.0, 1.0]}).axes[0].lines)
    2
    """
    ink = LOOKS[look]
    figure = _figure(6.4, 4.2, "The size of a step", ink)
    axes = figure.subplots()
    for place, values in enumerate(sizes.values()):
        axes.plot(eps, values, **_style(place))
    _dress(axes, ink, x="eps", y="RMS of a step / lr", log_x=True, log_y=True)
    _legend(figure, [(_style(place), name) for place, name in enumerate(sizes)], ink)
    return figure


def draw_ridges(ridges: Mapping[str, Sequence[Ridge]], *, measure: str, look: str = "light") -> Figure:
    """Draw the best lr and the best loss against eps: a line for each method, the mean of its seeds.

    >>> flat = Ridge((1e-8, 1.0), (0.01, 0.01), (2.2, 2.3), 0.0, 0.0, 0, 0.01, 2.2, 0.0)
    >>> len(draw_ridges({"AvaStep": [flat, flat]}, measure="bits").axes)
    2
    """
    ink = LOOKS[look]
    figure = _figure(9.6, 4.2, "", ink)
    left, right = figure.subplots(1, 2)
    for place, seeds in enumerate(ridges.values()):
        eps = seeds[0].eps
        lrs, losses = (list(zip(*(getattr(each, name) for each in seeds), strict=True)) for name in ("lrs", "losses"))
        left.plot(eps, [statistics.geometric_mean(each) for each in lrs], **_style(place), marker="o", ms=3)
        right.plot(eps, [statistics.mean(each) for each in losses], **_style(place), marker="o", ms=3)
    _dress(left, ink, x="eps", y="best lr", log_x=True, log_y=True)
    _dress(right, ink, x="eps", y=f"{measure}, at the best lr", log_x=True)
    _legend(figure, [(_style(place), name) for place, name in enumerate(ridges)], ink)
    return figure


def draw_race(
    trials: Sequence[int], maps: Mapping[str, Mapping[str, Sequence[float | None]]], *, look: str = "light"
) -> Figure:
    """Draw for each map the median regret of each search against the trials spent.

    >>> len(draw_race((8, 16), {"digits": {"random": (0.5, None), "ours": (0.1, 0.0)}}).axes)
    1
    """
    ink = LOOKS[look]
    figure = _figure(3.6 * len(maps), 3.6, "", ink)
    names = list(dict.fromkeys(name for searches in maps.values() for name in searches))
    styles = {name: {**_style(place), "marker": "o", "ms": 4} for place, name in enumerate(names)}
    for axes, (title, searches) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        for name, regrets in searches.items():
            known = [(n, regret) for n, regret in zip(trials, regrets, strict=True) if regret is not None]
            axes.plot(*zip(*known, strict=True), **styles[name])
        _dress(axes, ink, x="trials", y="regret")
        axes.set_title(title, color=ink["ink"], fontsize=10)
        axes.set_ylim(bottom=0)
    _legend(figure, [(style, name) for name, style in styles.items()], ink)
    return figure


def draw_step_bars(groups: Sequence[BarGroup], *, title: str = "", look: str = "light") -> Figure:
    """Draw what a step costs beside torch's fused AdamW: a bar to the left is faster, one to the right slower.

    A bar is as long as the logarithm of the ratio; a panel is a set of parameters.

    >>> len(draw_step_bars([BarGroup("resnet50", ()), BarGroup("gpt2", ())]).axes)
    2
    """
    ink = LOOKS[look]
    columns = 2 if len(groups) > 1 else 1
    rows = -(-len(groups) // columns)
    most = max((len(group.bars) for group in groups), default=1)
    figure = _figure(6.2 * columns, 1.0 + max(rows, 1) * (0.7 + 0.24 * max(most, 3)), title, ink)
    if not groups:
        figure.text(0.5, 0.5, "no step times", color=ink["faint"], ha="center")
        return figure
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, group in zip(grid.flat, groups, strict=False):
        _draw_bar_group(axes, group, ratio_span(groups), ink)
    for axes in grid.flat[len(groups) :]:
        axes.remove()
    for axes in figure.axes[-columns:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("time of a step, times that of torch's fused AdamW", color=ink["ink"], fontsize=8)
    return figure


def _draw_bar_group(axes: Any, group: BarGroup, span: tuple[float, float], ink: _Ink) -> None:
    axes.set_title(label(group.title), color=ink["ink"], fontsize=9, loc="left")
    axes.set_xscale("log")
    for place, bar in enumerate(group.bars):
        if bar.ratio is not None:
            colour = _COLOURS[0] if bar.is_ours else ink["faint"]
            axes.plot((1.0, bar.ratio), (place, place), color=colour, lw=8, solid_capstyle="butt")
        # Always to the right of both the bar and the line at 1, where there is room.
        axes.annotate(
            label(bar.label), (max(bar.ratio or 1.0, 1.0), place), (5, 0), textcoords="offset points", va="center",
            fontsize=7, color=ink["ink"],
        )  # fmt: skip
    axes.axvline(1.0, color=ink["ink"], lw=0.8)
    low, high = span
    axes.set_xlim(low / 1.5, high * 15)  # with room for the labels
    axes.set_ylim(len(group.bars) - 0.4, -0.6)
    labels = [label(bar.title) for bar in group.bars]
    axes.set_yticks(range(len(group.bars)), labels)
    _dress(axes, ink, log_x=True)
    axes.grid(visible=False, axis="y")


# --- what all of them need -----------------------------------------------------------------------


def _figure(width: float, height: float, title: str, ink: _Ink) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=ink["paper"])
    if title:
        figure.suptitle(label(title), color=ink["ink"], fontsize=11)
    return figure


def _style(place: int) -> dict[str, Any]:
    return {"color": _COLOURS[place % len(_COLOURS)], "ls": _STYLES[place % len(_STYLES)], "lw": 1.5}


def _dotted(colour: str) -> dict[str, Any]:
    return {"color": colour, "ls": (0, (1, 2)), "lw": 1.2}


def _draw_band(axes: Any, band: Band, style: Mapping[str, Any], *, steps: bool = False) -> None:
    if band.is_empty:
        return
    middle, low, high = ([math.nan if y is None else y for y in part] for part in (band.middle, band.low, band.high))
    if band.has_width:
        axes.fill_between(
            band.x, low, high, color=style["color"], alpha=0.12, lw=0, step="post" if steps else None
        )  # fmt: skip
    marker = "o" if band.is_sparse and not steps else None
    axes.plot(band.x, middle, **style, marker=marker, ms=3, drawstyle="steps-post" if steps else "default")


def _dress(axes: Any, ink: _Ink, *, x: str = "", y: str = "", log_x: bool = False, log_y: bool = False) -> None:
    axes.set_facecolor(ink["paper"])
    axes.tick_params(which="both", colors=ink["ink"], labelsize=8)
    axes.grid(visible=True, color=ink["faint"], alpha=0.25, lw=0.6)
    for spine in axes.spines.values():
        spine.set_color(ink["faint"])
    for text, tell in ((x, axes.set_xlabel), (y, axes.set_ylabel)):
        if text:
            tell(label(text), color=ink["ink"], fontsize=9)
    for is_log, axis, scale in ((log_x, axes.xaxis, axes.set_xscale), (log_y, axes.yaxis, axes.set_yscale)):
        axis.get_offset_text().set_color(ink["ink"])
        if is_log:
            scale("log")
            _mark_powers(axis)
        elif isinstance(axis.get_major_formatter(), matplotlib.ticker.ScalarFormatter):
            axis.get_major_formatter().set_useOffset(False)  # 10.0007, and not 0.0007 with +1e1 in a corner


def _mark_powers(axis: Any) -> None:
    """Put round numbers on a logarithmic axis: more of them where it is short."""
    low, high = axis.get_view_interval()
    parts = next(parts for most, parts in _PARTS.items() if high <= most * low)
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=parts))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


_PARTS = {20.0: (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), 1e3: (1.0, 2.0, 5.0), math.inf: (1.0,)}


def _say_nothing(axes: Any, ink: _Ink) -> None:
    axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, color=ink["faint"], ha="center", va="center")


def _legend(figure: Figure, entries: Sequence[tuple[Mapping[str, Any], str]], ink: _Ink, note: str = "") -> None:
    """Put the legend below everything, where it hides nothing."""
    if not entries and not note:
        return
    longest = max((len(label(name)) for _, name in entries), default=0)
    legend = figure.legend(
        [Line2D([], [], **style) for style, _ in entries],
        [label(name) for _, name in entries],
        loc="outside lower center",
        ncols=1 if longest > 60 else 2 if longest > 32 else 3,
        fontsize=8,
        frameon=False,
        labelcolor=ink["ink"],
        handlelength=3.5,
        title=label(note, longest=200) or None,
        title_fontsize=8,
    )
    legend.get_title().set_color(ink["ink"])
