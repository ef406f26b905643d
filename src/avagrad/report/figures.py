"""Drawing: numbers come in, figures go out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from avagrad.report.heatmaps import HeatMap, shades, ticks

__all__ = ["draw_heat_maps", "save"]

# Viridis can be told apart with every kind of colour blindness, and in print.
_COLOURS = "viridis_r"
_LOOKS = {
    "light": {"paper": "white", "ink": "#1a1a1a", "faint": "#999999", "line": "#e6007e"},
    "dark": {"paper": "#14161a", "ink": "#e8e8e8", "faint": "#777777", "line": "#ff5cad"},
}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the ending says in which format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(Figure(), Path(place, "a.png"))
    ...     Path(place, "a.png").stat().st_size > 0
    True
    """
    with matplotlib.rc_context({"svg.hashsalt": "avagrad", "svg.fonttype": "none"}):  # the same bytes every time
        figure.savefig(path, dpi=150, facecolor=figure.get_facecolor(), metadata=_no_date(path))


def _no_date(path: str | Path) -> dict[str, Any]:
    return {"Date": None} if str(path).endswith(".svg") else {}


def draw_heat_maps(
    maps: Sequence[HeatMap],
    *,
    measure: str = "validation error, %",
    direction: str = "minimize",
    paths: bool = True,
    look: str = "light",
) -> Figure:
    """Draw maps side by side, on one scale of colours: lr against eps, with the ridge of the best lr of each eps.

    Diverged cells are hatched, missing ones are blank.

    >>> one = HeatMap("adam", (0.1, 1.0), (1e-8, 1.0), ((0.5, None), (float("inf"), 0.7)), (0, 1), (0, 0), (), None)
    >>> len(draw_heat_maps([one]).axes)
    2
    """
    ink = _LOOKS[look]
    width = 1.2 + sum(max(2.2, 0.27 * len(each.eps) + 0.6) for each in maps)
    height = 1.7 + max((0.22 * len(each.lr) for each in maps), default=2.0)
    figure = Figure(figsize=(width, max(height, 3.0)), layout="constrained", facecolor=ink["paper"])
    if not maps:
        figure.text(0.5, 0.5, "no records with an lr and an eps", color=ink["faint"], ha="center")
        return figure
    shade = shades(maps, direction=direction)
    colours = matplotlib.colormaps[_COLOURS]
    all_axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, each in zip(all_axes, maps, strict=True):
        _draw_cells(axes, each, shade, colours, ink)
        _draw_ridge(axes, each, ink)
        if paths and each.path:
            _draw_path(axes, each, ink)
        _dress(axes, each, ink)
    _draw_scale(figure, all_axes, shade, colours, measure, ink)
    return figure


def _draw_cells(axes: Any, each: HeatMap, shade: Mapping[float, float], colours: Any, ink: dict[str, str]) -> None:
    best = None if each.best is None else each.values[each.best[0]][each.best[1]]
    for row, values in enumerate(each.values):
        for column, value in enumerate(values):
            corner = (column - 0.5, row - 0.5)
            if value is None:
                continue
            if value not in shade:  # diverged
                axes.add_patch(
                    matplotlib.patches.Rectangle(corner, 1, 1, fill=False, hatch="////", lw=0, edgecolor=ink["faint"])
                )
                continue
            axes.add_patch(matplotlib.patches.Rectangle(corner, 1, 1, color=colours(shade[value]), lw=0))
            dark = shade[value] > 0.5
            text = f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"
            weight = "bold" if value == best else "normal"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=5,
                color="white" if dark else "black",
                weight=weight,
            )


def _draw_ridge(axes: Any, each: HeatMap, ink: dict[str, str]) -> None:
    points = [(column, row) for column, row in enumerate(each.ridge) if row is not None]
    if len(points) > 1:
        axes.plot(*zip(*points, strict=True), color=ink["line"], lw=1.4, marker="o", ms=3, label="best lr for each eps")
    if each.best is not None:
        axes.plot(each.best[1], each.best[0], marker="*", ms=11, color=ink["line"], mec="white", mew=0.6, ls="none")


def _draw_path(axes: Any, each: HeatMap, ink: dict[str, str]) -> None:
    rows, columns = zip(*each.path, strict=True)
    axes.plot(
        columns, rows, color=ink["ink"], lw=1.0, ls=":", marker="s", ms=4, mfc="none", label="two lines and a ring"
    )


def _dress(axes: Any, each: HeatMap, ink: dict[str, str]) -> None:
    axes.set_facecolor(ink["paper"])
    axes.set_xlim(-0.5, len(each.eps) - 0.5)
    axes.set_ylim(-0.5, len(each.lr) - 0.5)
    for places, set_ticks in ((ticks(each.eps), axes.set_xticks), (ticks(each.lr), axes.set_yticks)):
        set_ticks([place for place, _ in places], [label for _, label in places])
    axes.tick_params(colors=ink["ink"], labelsize=7)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("eps", color=ink["ink"], fontsize=9)
    axes.set_ylabel("lr", color=ink["ink"], fontsize=9)
    for spine in axes.spines.values():
        spine.set_color(ink["faint"])
    found = each.separability
    slope = "" if found is None or found.slope is None else f"\nslope of the ridge {found.slope:.2f}"
    axes.set_title(f"{each.title}{slope}", color=ink["ink"], fontsize=10)


def _draw_scale(
    figure: Figure, all_axes: Any, shade: Mapping[float, float], colours: Any, measure: str, ink: dict[str, str]
) -> None:
    scale = matplotlib.cm.ScalarMappable(norm=matplotlib.colors.Normalize(0, 1), cmap=colours)
    bar = figure.colorbar(scale, ax=list(all_axes), fraction=0.03, pad=0.01)
    ordered = sorted(shade.items(), key=lambda pair: pair[1])
    marks = [min(ordered, key=lambda pair: abs(pair[1] - at)) for at in (0, 0.25, 0.5, 0.75, 1)] if ordered else []
    marks = list(dict(marks).items())
    bar.set_ticks([at for _, at in marks], labels=[f"{value:.3g}" for value, _ in marks])
    bar.ax.tick_params(colors=ink["ink"], labelsize=7)
    bar.set_label(f"{measure}; colours by rank", color=ink["ink"], fontsize=8)
