"""Heat maps: lr against eps, with the ridge of the best learning rates and the path of the search."""

import bisect
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from avagrad.report.comparable import comparable_sweeps, names_of
from avagrad.report.drawing import FAINT, INK, Figure, empty_figure, finish_axes, label, legend, new_figure
from avagrad.report.known import Known, known_of
from avagrad.report.reading import Collection
from avagrad.report.values import short, ticks
from avagrad.tune.records import Record
from avagrad.tune.search import plan
from avagrad.tune.separability import Separability, two_digits
from avagrad.tune.space import Cell, Space

__all__ = ["CHAPTER", "NAME", "NOTE", "HeatMap", "caption", "draw", "draw_heat_maps", "heat_map", "numbers", "shades"]

NAME, CHAPTER = "heat-maps", "lr and eps"
NOTE = "A cell is a training; point at it for its value. Bright is good; a heading has one scale of colours."
_FEW = 40  # values, of which the ranks would make what is slightly worse as dark as what failed
MOST_VALUES = 40  # of an axis, before its values are put into bins
_BINS = 24
_COLOURS = "viridis_r"  # can be read with every kind of colour blindness, and in print
_RIDGE, _HALO = "#e6007e", "#ffffff"


@dataclass(frozen=True)
class HeatMap:
    """A map of lr (rows, from the smallest up) against eps (columns).

    A value is None where nothing was run, and infinite where the run diverged. ``ridge`` has for each column the row of
    its best cell, or None. ``path`` has the cells that a search went through, as (row, column), and ``way`` says which
    search that is. ``records`` is how many were put into bins; 0 if each cell is a point.

    >>> HeatMap("adam", (0.1, 1.0), (1e-8,), ((0.5,), (None,)), (0,), (0, 0), (), None).finite
    [0.5]
    """

    name: str
    lr: tuple[float, ...]
    eps: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]
    ridge: tuple[int | None, ...]
    best: tuple[int, int] | None
    path: tuple[tuple[int, int], ...]
    separability: Separability | None  # None if the grid is not whole
    way: str = ""
    records: int = 0
    best_point: Cell | None = None  # if it is not the middle of its bin
    title: str = ""  # of the group that shares the scale
    measure: str = "value"
    shade: Mapping[float, float] = field(default_factory=dict)  # of each value, on the scale of the group
    seeds: Mapping[tuple[int, int], int] = field(default_factory=dict)  # of each cell, if a search had several

    @property
    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [value for row in self.values for value in row if value is not None and math.isfinite(value)]

    @property
    def subtitle(self) -> str:
        """The slope of the ridge, or how much of the grid there is."""
        if self.records:
            return f"{self.records:,} points in {len(self.lr)} x {len(self.eps)} bins"
        if self.separability is None:
            return f"{len(self.places())} of {len(self.lr) * len(self.eps)} cells"
        slope = self.separability.slope
        return "" if slope is None else f"slope of the ridge {two_digits(slope)}"

    @property
    def best_value(self) -> float | None:
        """The value of the best cell."""
        return None if self.best is None else self.values[self.best[0]][self.best[1]]

    @property
    def hover(self) -> dict[str, list[str]]:
        """The texts of the cells, by the ids of their groups in a drawing of this map alone."""
        cells, diverged = [], []
        for row, column, value in self.places():
            where = f"{self.name}\n{'about ' if self.records else ''}{Cell(self.lr[row], self.eps[column])}"
            if math.isfinite(value):
                best = ", the best" if (row, column) == self.best else ""
                count = self.seeds.get((row, column))
                seeds = "" if count is None else f", mean of {count} seeds" if count > 1 else ", 1 seed"
                cells.append(f"{where}\n{self.measure}: {value:.5g}{seeds}{best}")
            else:
                diverged.append(f"{where}\ndiverged")
        return {"cells-0": cells, "diverged-0": diverged}

    def places(self) -> list[tuple[int, int, float]]:
        """Return the cells that were run, in the order in which they are drawn: (row, column, value)."""
        return [
            (row, column, value)
            for row, values in enumerate(self.values)
            for column, value in enumerate(values)
            if value is not None
        ]


def numbers(collection: Collection) -> list[HeatMap]:
    """Return a map for each sweep over lr and eps; those that may be compared share a title and a scale.

    >>> numbers(Collection("nothing"))
    []
    """
    found = []
    for title, sweeps in comparable_sweeps(collection.sweeps):
        maps = [
            heat_map(name, sweep.records, direction=sweep.direction, search=sweep.search)
            for name, sweep in zip(names_of(sweeps), sweeps, strict=True)
            if any(record.lr is not None and record.eps is not None for record in sweep.records)
        ]
        shade = shades(maps, direction=sweeps[0].direction)
        found += [replace(each, title=title, measure=sweeps[0].measure, shade=shade) for each in maps]
    return found


def caption(heat_map: HeatMap) -> str:
    """Return what a map shows.

    >>> caption(HeatMap("Adam", (0.1, 1.0), (1e-8,), ((0.5,), (None,)), (0,), (0, 0), (), None))
    'Adam: 1 of 2 cells was run. The best is lr 0.1, eps 1e-08: 0.5.'
    """
    name, best, value = heat_map.name, heat_map.best, heat_map.best_value
    if heat_map.separability is not None:
        run = heat_map.separability.summary()
    elif heat_map.records:
        run = f"{heat_map.records:,} points are not on a grid. A cell is a bin, and its value the best in it."
    else:
        count = len(heat_map.places())
        run = f"{count} of {len(heat_map.lr) * len(heat_map.eps)} cells {'was' if count == 1 else 'were'} run."
    if best is None or value is None:
        return f"{name}: {run}" + ("" if heat_map.separability else " All of them diverged.")
    if heat_map.separability is None:
        point = heat_map.best_point or Cell(heat_map.lr[best[0]], heat_map.eps[best[1]])
        run += f" The best is {point}: {value:.4g}."
    # Which of several is called the best is chance.
    same = heat_map.finite.count(value)
    return f"{name}: {run}" + (f" {same} cells share the best value." if same > 1 else "")


def heat_map(
    name: str, records: Sequence[Record], *, direction: str = "minimize", search: Mapping[str, Any] | None = None
) -> HeatMap:
    """Return the map of records. Seeds of a point are averaged, and one that diverged makes the cell diverged.

    Records without an lr or without an eps are left out. Where the points are not on a grid, they are put into bins.
    ``search`` is what :attr:`avagrad.tune.study.Study.search` says of the search that made the records.

    >>> records = [Record(lr, eps, value=abs(math.log10(lr / eps))) for lr in (0.1, 1, 10) for eps in (0.1, 1, 10)]
    >>> found = heat_map("a ridge", records)
    >>> found.ridge, found.best, found.separability.slope
    ((0, 1, 2), (1, 1), 1.0)
    """
    records = [record for record in records if record.lr is not None and record.eps is not None]
    if not records:
        raise ValueError(f"{name}: a heat map needs records with an lr and an eps.")
    known = known_of(records, direction, search)
    cells, kept, ran = known.cells, known.search, Space.of(*zip(*known.cells, strict=True))
    space = known.space or ran
    if _needs_bins(ran, len(cells)):
        return _binned(name, ran, known)
    shown = kept.plan if kept and kept.plan.confirmed else None  # a grid has none
    lrs, epses = _axes(space)
    if known.parts is None:
        ridge = tuple(_lowest(known, [Cell(lr, eps) for lr in lrs]) for eps in epses)
    else:
        ridge = tuple(None if lr is None else lrs.index(lr) for _, lr in known.parts.ridge)
    best = min(cells, key=known.rank)
    way = "path of the search" if shown or known.parts is None else "path of two lines and a ring"
    if shown is None and (kept is None or known.parts is not None):
        shown = plan("separable", space, cells, **known.options)
    values = tuple(tuple(_value(known, Cell(lr, eps)) for eps in epses) for lr in lrs)
    place = None if cells[best].failed else space.indices(best)
    several = kept is not None and any(score.count > 1 for score in cells.values())
    counts = {space.indices(cell): score.count for cell, score in cells.items()} if several else {}
    steps = tuple(map(space.indices, shown.path if shown and shown.done else ()))
    return HeatMap(name, lrs, epses, values, ridge, place, steps, known.parts, way, seeds=counts)


def _needs_bins(space: Space, cells: int) -> bool:
    """Tell whether points are not on a grid: an axis is too long, or nearly every point has values of its own."""
    rows, columns = space.shape
    return max(rows, columns) > MOST_VALUES or (cells > 12 and rows + columns > 1.5 * cells)


def _binned(name: str, space: Space, known: Known) -> HeatMap:
    """Put points into bins, evenly spaced in logarithms; the value of a bin is the best in it."""
    most = min(_BINS, math.ceil(math.sqrt(len(known.cells))) + 2)
    (lr_edges, lrs), (eps_edges, epses) = (_bins(values, most) for values in _axes(space))
    cells: dict[tuple[int, int], Cell] = {}
    for cell in known.cells:
        place = bisect.bisect(lr_edges, cell.lr or 0.0), bisect.bisect(eps_edges, cell.eps or 0.0)
        if place not in cells or known.rank(cell) < known.rank(cells[place]):
            cells[place] = cell
    rows, columns = range(len(lrs)), range(len(epses))
    values = tuple(tuple(_value(known, cells.get((row, column))) for column in columns) for row in rows)
    ridge = tuple(_lowest(known, [cells.get((row, column)) for row in rows]) for column in columns)
    best = min(cells, key=lambda place: known.rank(cells[place]))
    point, found = cells[best], None if known.cells[cells[best]].failed else best
    return HeatMap(name, lrs, epses, values, ridge, found, (), None, records=len(known.cells), best_point=point)


def _bins(values: Sequence[float], most: int) -> tuple[list[float], tuple[float, ...]]:
    """Return the edges between bins, and the middles of the bins; values that are few have a bin each."""
    logs = [math.log10(value) for value in values]
    if len(values) <= most:
        return [10 ** ((a + b) / 2) for a, b in itertools.pairwise(logs)], tuple(values)
    width = (logs[-1] - logs[0]) / most
    edges = [10 ** (logs[0] + width * i) for i in range(1, most)]
    return edges, tuple(10 ** (logs[0] + width * (i + 0.5)) for i in range(most))


def _axes(space: Space) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (space.lr.values if space.lr else ()), (space.eps.values if space.eps else ())


def _value(known: Known, cell: Cell | None) -> float | None:
    score = known.cells.get(cell) if cell else None
    return None if score is None else math.inf if score.failed else known.value(cell)


def _lowest(known: Known, column: Sequence[Cell | None]) -> int | None:
    there = [(cell, i) for i, cell in enumerate(column) if cell in known.cells]
    ranks = [(known.rank(cell), i) for cell, i in there if cell and not known.cells[cell].failed]
    return min(ranks)[1] if ranks and len(there) > 1 else None  # one cell alone is not the best of its eps


def shades(maps: Sequence[HeatMap], *, direction: str = "minimize") -> Mapping[float, float]:
    """Return for each finite value a shade from 0 (best) to 1 (worst), the same for all maps.

    Shades are by rank, not by value: most of a map is as bad as guessing, and what matters are the differences among
    the good. Few values are shaded by value. Equal values have equal shades.

    >>> one = HeatMap("", (1.0, 2.0), (1.0, 2.0), ((90.0, 90.0), (10.0, 11.0)), (), None, (), None)
    >>> dict(shades([one]))
    {10.0: 0.0, 11.0: 0.0125, 90.0: 1.0}
    """
    values = sorted((value for each in maps for value in each.finite), reverse=direction == "maximize")
    places: dict[float, list[int]] = {}
    for i, value in enumerate(values):
        places.setdefault(value, []).append(i)
    middles = {value: sum(found) / len(found) for value, found in places.items()}
    if len(places) < _FEW:
        middles = {value: abs(value / 2 - values[0] / 2) for value in places}  # a whole difference may overflow
    last = max(middles.values(), default=0.0)
    return {value: middle / last if last else 0.0 for value, middle in middles.items()}


def draw(heat_map: HeatMap) -> Figure:
    """Draw one map on the scale of its group.

    >>> len(draw(HeatMap("Adam", (0.1,), (1e-8,), ((0.5,),), (0,), (0, 0), (), None, shade={0.5: 0.0})).axes)
    2
    """
    return draw_heat_maps([heat_map], measure=heat_map.measure, shade=heat_map.shade)


def draw_heat_maps(
    maps: Sequence[HeatMap],
    *,
    measure: str = "validation error, %",
    direction: str = "minimize",
    shade: Mapping[float, float] | None = None,
) -> Figure:
    """Draw maps side by side, on one scale of colours; ``shade`` is another scale, such as that of more maps.

    In an SVG the cells of a map are a group with the id ``cells-PLACE``, those that diverged ``diverged-PLACE``.

    >>> one = HeatMap("adam", (0.1, 1.0), (1e-8, 1.0), ((0.5, None), (float("inf"), 0.7)), (0, 1), (0, 0), (), None)
    >>> len(draw_heat_maps([one]).axes)
    2
    """
    if not maps:
        return empty_figure("no records with an lr and an eps")
    heights = [max(2.0, min(3.4, len(each.lr) * min(0.34, 3.5 / len(each.eps)))) for each in maps]
    figure = new_figure(4.4 * len(maps), max(heights) + 2.1)
    shade = shades(maps, direction=direction) if shade is None else shade
    colours = matplotlib.colormaps[_COLOURS]
    all_axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for place, (axes, each) in enumerate(zip(all_axes, maps, strict=True)):
        _draw_cells(axes, each, place, shade, colours)
        _draw_lines(axes, each)
        _finish(axes, each)
    _draw_scale(figure, all_axes, shade, colours, measure)
    legend(figure, _legend(maps))
    return figure


def _draw_cells(axes: Any, each: HeatMap, place: int, shade: Mapping[float, float], colours: Any) -> None:
    finite = [found for found in each.places() if found[2] in shade]
    gone = [found for found in each.places() if found[2] not in shade]
    faces = {"facecolors": [colours(shade[value]) for _, _, value in finite]}
    hatched = {"facecolors": "none", "edgecolors": FAINT, "hatch": "////"}
    for name, found, style in (("cells", finite, faces), ("diverged", gone, hatched)):
        common: dict[str, Any] = {"gid": f"{name}-{place}", "linewidths": 0, "zorder": 1, "clip_on": False, **style}
        axes.add_collection(PolyCollection(_squares(found), **common))
    if len(each.eps) <= 9 and len(each.lr) <= 14:  # or there is no room for text that can be read
        for row, column, value in finite:
            text = "" if (row, column) == each.best else short(value, 2)  # that of the best is in the legend
            colour = "white" if shade[value] > 0.5 else "black"
            axes.text(column, row - 0.3, text, ha="center", va="center", fontsize=8, color=colour)


def _squares(places: Sequence[tuple[int, int, float]]) -> list[list[tuple[float, float]]]:
    corners = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))
    return [[(column + x, row + y) for x, y in corners] for row, column, _ in places]


def _draw_lines(axes: Any, each: HeatMap) -> None:
    """Draw the ridge, the path and the best cell, with halos: they are on cells of every colour."""
    halo = [withStroke(linewidth=3.2, foreground=_HALO)]
    points = [(column, row) for column, row in enumerate(each.ridge) if row is not None]
    if len(points) > 1:
        axes.plot(*zip(*points, strict=True), **_RIDGE_STYLE, path_effects=halo, zorder=2)
    if len(each.path) > 1:
        rows, columns = zip(*each.path, strict=True)
        axes.plot(columns, rows, **_PATH_STYLE, path_effects=halo, zorder=3)
    if each.path:
        axes.plot(each.path[0][1], each.path[0][0], **_START_STYLE, zorder=4)
    if each.best is not None:
        axes.plot(each.best[1], each.best[0], **_BEST_STYLE, zorder=5)


_RIDGE_STYLE: dict[str, Any] = {"color": _RIDGE, "lw": 1.6, "marker": "o", "ms": 3.5}
_PATH_STYLE: dict[str, Any] = {"color": "#000000", "lw": 1.6, "ls": (0, (1.5, 1.2))}
_START_STYLE: dict[str, Any] = {"color": "#000000", "marker": "s", "ms": 7, "mfc": _HALO, "mew": 1.4, "ls": "none"}
_BEST_STYLE: dict[str, Any] = {"color": "#000000", "marker": "*", "ms": 14, "mfc": "#ffd500", "mew": 0.9, "ls": "none"}


def _legend(maps: Sequence[HeatMap]) -> list[tuple[Any, str]]:
    entries: list[tuple[Any, str]] = []
    if any(each.best is not None for each in maps):
        values = [f"{each.best_value:.4g}" for each in maps if each.best_value is not None]
        entries.append((Line2D([], [], **_BEST_STYLE), f"best cell: {', '.join(values)}"))
    if any(sum(row is not None for row in each.ridge) > 1 for each in maps):
        entries.append((_RIDGE_STYLE, "ridge: best lr of each eps"))
    path = {**_PATH_STYLE, "marker": "s", "mfc": _HALO, "ms": 6, "mew": 1.2}
    entries += [(path, f"{way}, from the square") for way in dict.fromkeys(each.way for each in maps if each.path)]
    if any(math.isinf(value) for each in maps for _, _, value in each.places()):
        entries.append((Patch(facecolor="none", edgecolor=FAINT, hatch="////", lw=0), "diverged"))
    if any(value is None for each in maps for row in each.values for value in row):
        entries.append((Patch(facecolor="none", edgecolor=FAINT, lw=0.8), "not run"))
    return entries


def _finish(axes: Any, each: HeatMap) -> None:
    finish_axes(axes, x="eps", y="lr")
    axes.grid(visible=False)
    axes.set(xlim=(-0.5, len(each.eps) - 0.5), ylim=(-0.5, len(each.lr) - 0.5))
    for values, most, set_ticks in ((each.eps, 6, axes.set_xticks), (each.lr, 11, axes.set_yticks)):
        places = ticks(values, most, bins=bool(each.records))
        set_ticks([place for place, _ in places], [text for _, text in places])
    title = [*textwrap.wrap(label(each.name, longest=120), 42)[:3], each.subtitle]
    axes.set_title("\n".join(filter(None, title)), color=INK, fontsize=10)


def _draw_scale(figure: Figure, all_axes: Any, shade: Mapping[float, float], colours: Any, measure: str) -> None:
    scale = matplotlib.cm.ScalarMappable(norm=matplotlib.colors.Normalize(0, 1), cmap=colours)
    bar = figure.colorbar(scale, ax=list(all_axes), location="bottom", aspect=40 * len(all_axes), pad=0.02)
    ordered, by_value = sorted(shade.items(), key=lambda pair: pair[1]), len(shade) < _FEW
    marks: dict[float, float] = {}
    for at in (1, 0.75, 0.5, 0.25, 0) if ordered else ():
        value, place = min(ordered, key=lambda pair: abs(pair[1] - at))
        marks |= {ordered[0][0] * (1 - at) + ordered[-1][0] * at: at} if by_value else {value: place}
    bar.set_ticks(list(marks.values()), labels=[short(value) for value in marks])
    bar.ax.tick_params(colors=INK, labelsize=9)
    bar.outline.set_visible(False)
    bar.set_label(f"{label(measure)}; colours by {'value' if by_value else 'rank'}", color=INK, fontsize=9)
