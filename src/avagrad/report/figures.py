"""Drawing heat maps: numbers come in, figures go out."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from avagrad.files import write_atomic
from avagrad.report.heatmaps import HeatMap, shades, short_value, text_colour, ticks

__all__ = ["LOOKS", "Draw", "draw_heat_maps", "label", "rendered", "save"]

Draw = Callable[[], Figure]

# Viridis can be told apart with every kind of colour blindness, and in print.
_COLOURS = "viridis_r"
LOOKS = {
    # Colours that nothing else in a figure has, so that a page can put its own in their place.
    "light": {"paper": "#fefefe", "ink": "#1a1a1a", "faint": "#999999"},
    "dark": {"paper": "#14161a", "ink": "#e8e8e8", "faint": "#777777"},
}
_RIDGE, _PATH = "#e6007e", "#0d0d0d"  # they are on cells, which are as bright in every look
_LONGEST = 60  # characters of a label


def label(text: object, longest: int = _LONGEST) -> str:
    r"""Return a text as a figure can hold it: on one line, not too long, and without what is special to matplotlib.

    >>> label("a name\nwith $x$"), label("x" * 100, longest=5)
    ('a name with \\$x\\$', 'xxxx…')
    """
    shown = "".join(char if char.isprintable() else " " for char in str(text).encode("utf-8", "replace").decode())
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    shown = f" {shown}" if shown.startswith("_") else shown  # or a legend would leave it out
    return shown.replace("$", r"\$")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the ending says in which format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(Figure(), Path(place, "a.png"))
    ...     Path(place, "a.png").stat().st_size > 0
    True
    """
    content = rendered(figure, Path(path).suffix.lstrip(".").lower() or "png")
    write_atomic(Path(path), lambda file: file.write(content))


def rendered(figure: Figure, kind: str) -> bytes:
    """Return a figure as a file of a kind, such as "png" or "svg"; the same figure gives the same bytes.

    >>> rendered(Figure(), "svg")[:5]
    b'<?xml'
    """
    held = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "avagrad", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font does not have
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(held, format=kind, dpi=150, facecolor=figure.get_facecolor(), metadata=metadata)
    return held.getvalue()


def draw_heat_maps(
    maps: Sequence[HeatMap],
    *,
    measure: str = "validation error, %",
    direction: str = "minimize",
    paths: bool = True,
    look: str = "light",
    shade: Mapping[float, float] | None = None,
) -> Figure:
    """Draw maps side by side, on one scale of colours: lr against eps, with the ridge of the best lr of each eps.

    Diverged cells are hatched, missing ones are blank. ``shade`` is another scale, such as that of more maps than are
    drawn. In an SVG each cell that was run is a group with an id, ``cell-MAP-ROW-COLUMN``.

    >>> one = HeatMap("adam", (0.1, 1.0), (1e-8, 1.0), ((0.5, None), (float("inf"), 0.7)), (0, 1), (0, 0), (), None)
    >>> len(draw_heat_maps([one]).axes)
    2
    """
    ink = LOOKS[look]
    width = 1.2 + sum(max(2.2, 0.27 * len(each.eps) + 0.6) for each in maps)
    height = 1.7 + max((0.22 * len(each.lr) for each in maps), default=2.0)
    figure = Figure(figsize=(width, max(height, 3.0)), layout="constrained", facecolor=ink["paper"])
    if not maps:
        figure.text(0.5, 0.5, "no records with an lr and an eps", color=ink["faint"], ha="center")
        return figure
    shade = shades(maps, direction=direction) if shade is None else shade
    colours = matplotlib.colormaps[_COLOURS]
    all_axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for number, (axes, each) in enumerate(zip(all_axes, maps, strict=True)):
        _draw_cells(axes, each, f"cell-{number}", shade, colours, ink)
        _draw_ridge(axes, each)
        if paths and each.path:
            _draw_path(axes, each)
        _dress(axes, each, ink)
    _draw_scale(figure, all_axes, shade, colours, measure, ink)
    return figure


def _draw_cells(
    axes: Any, each: HeatMap, name: str, shade: Mapping[float, float], colours: Any, ink: dict[str, str]
) -> None:
    best = None if each.best is None else each.values[each.best[0]][each.best[1]]
    for row, values in enumerate(each.values):
        for column, value in enumerate(values):
            if value is None:
                continue
            finite = value in shade
            look: dict[str, Any] = {"facecolor": colours(shade[value])} if finite else {"fill": False, "hatch": "////"}
            cell = matplotlib.patches.Rectangle(
                (column - 0.5, row - 0.5), 1, 1, lw=0, edgecolor=ink["faint"], gid=f"{name}-{row}-{column}", **look
            )
            cell.set_in_layout(False)  # it is within the axes: looking at each would take most of the time
            axes.add_patch(cell)
            if finite:
                style = {"weight": "bold" if value == best else "normal", "color": text_colour(shade[value])}
                text = axes.text(
                    column, row, short_value(value), ha="center", va="center", fontsize=5, zorder=4, **style
                )
                text.set_in_layout(False)


def _draw_ridge(axes: Any, each: HeatMap) -> None:
    """Draw the line of best lrs beneath the numbers, with a ring around each."""
    points = [(column, row) for column, row in enumerate(each.ridge) if row is not None]
    if len(points) > 1:
        axes.plot(*zip(*points, strict=True), color=_RIDGE, lw=1.3, marker="o", ms=10, mfc="none", zorder=2)
    if each.best is not None:
        row, column = each.best
        axes.plot(column, row, marker="o", ms=13, mfc="none", color=_RIDGE, mew=2.4, ls="none", zorder=3)


def _draw_path(axes: Any, each: HeatMap) -> None:
    rows, columns = zip(*each.path, strict=True)
    axes.plot(columns, rows, color=_PATH, lw=1.0, ls=":", marker="s", ms=13, mfc="none", zorder=3)


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
    axes.set_title("\n".join(filter(None, (label(each.title), each.subtitle))), color=ink["ink"], fontsize=10)


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
    bar.set_label(f"{label(measure)}; colours by rank", color=ink["ink"], fontsize=8)
