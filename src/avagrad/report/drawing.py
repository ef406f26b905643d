"""What all figures share: colours, axes, lines with bands, legends, and how a figure becomes a file."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker
from matplotlib.figure import Figure as Figure
from matplotlib.lines import Line2D

from avagrad.files import write_atomic
from avagrad.report.values import Band

__all__ = ["label", "rendered", "save"]

# These three appear nowhere else in a figure, so that a page can replace them by its own.
PAPER, INK, FAINT = "#fefefe", "#1a1a1a", "#999999"
# Okabe and Ito's, without yellow and black, which cannot be seen on white and on black. Colours and styles have no
# common period, so that neighbours differ in both and no two of 30 lines are the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
_LONGEST = 60  # characters of a label
_FEW = 30  # points of a line that are marked one by one
_PARTS = {20.0: (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), 1e3: (1.0, 2.0, 5.0), math.inf: (1.0,)}


def label(text: object, longest: int = _LONGEST) -> str:
    r"""Return a text as matplotlib can show it: on one line, not too long, and with nothing that it would interpret.

    >>> label("a name\nwith $x$"), label("x" * 100, longest=5)
    ('a name with \\$x\\$', 'xxxx…')
    """
    shown = "".join(char if char.isprintable() else " " for char in str(text).encode("utf-8", "replace").decode())
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    shown = f" {shown}" if shown.startswith("_") else shown  # a legend leaves out what begins with it
    return shown.replace("$", r"\$")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the suffix is the format.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(Figure(), Path(place, "a.png"))
    ...     Path(place, "a.png").stat().st_size > 0
    True
    """
    content = rendered(figure, Path(path).suffix.lstrip(".").lower() or "png")
    write_atomic(Path(path), lambda file: file.write(content))


def rendered(figure: Figure, kind: str) -> bytes:
    """Return a figure as "png" or "svg"; the same figure gives the same bytes.

    >>> rendered(Figure(), "svg")[:5]
    b'<?xml'
    """
    held = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "avagrad", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font does not have
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(held, format=kind, dpi=150, facecolor=figure.get_facecolor(), metadata=metadata)
    return held.getvalue()


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """Return a figure without axes; the size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    if title:
        lines = textwrap.wrap(label(title, longest=150), int(9 * width)) or [""]
        figure.suptitle("\n".join(lines), color=INK, fontsize=11)
    return figure


def empty_figure(text: str) -> Figure:
    """Return a figure that only says why it is empty."""
    figure = new_figure(4.6, 2.0)
    figure.text(0.5, 0.5, text, color=FAINT, ha="center")
    return figure


def line_style(place: int) -> dict[str, Any]:
    """Return the colour, dashes and width of the line at a place of a legend."""
    return {"color": COLOURS[place % len(COLOURS)], "ls": STYLES[place % len(STYLES)], "lw": 1.5}


def draw_band(axes: Any, band: Band, style: Mapping[str, Any], *, steps: bool = False) -> None:
    """Draw a line with its band; with ``steps``, a value holds until the next."""
    if band.is_empty:
        return
    middle, low, high = ([math.nan if y is None else y for y in part] for part in (band.middle, band.low, band.high))
    if band.low != band.high:
        axes.fill_between(band.x, low, high, color=style["color"], alpha=0.14, lw=0, step="post" if steps else None)
    marker = "o" if sum(y is not None for y in band.middle) <= _FEW and not steps else None
    axes.plot(band.x, middle, **style, marker=marker, ms=3, drawstyle="steps-post" if steps else "default")


def finish_axes(
    axes: Any, *, x: str = "", y: str = "", log_x: bool = False, log_y: bool = False, counts_x: bool = False
) -> None:
    """Give axes their labels, scales, round ticks and a grid; ``counts_x`` if there is no half of an x."""
    axes.set_facecolor(PAPER)
    axes.tick_params(which="both", colors=INK, labelsize=9)
    axes.grid(visible=True, color=FAINT, alpha=0.25, lw=0.6)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    for text, set_label in ((x, axes.set_xlabel), (y, axes.set_ylabel)):
        if text:
            set_label(label(text), color=INK, fontsize=10)
    for is_log, axis, scale in ((log_x, axes.xaxis, axes.set_xscale), (log_y, axes.yaxis, axes.set_yscale)):
        axis.get_offset_text().set_color(INK)
        if is_log:
            scale("log")
            _set_round_ticks(axis)
        elif isinstance(axis.get_major_formatter(), matplotlib.ticker.ScalarFormatter):
            axis.get_major_formatter().set_useOffset(False)  # 10.0007, and not 0.0007 with +1e1 in a corner
    if counts_x:
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator([d * 10**k for k in range(6) for d in (1, 2, 5)]))
    if not axes.has_data():
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, color=FAINT, ha="center", va="center")


def _set_round_ticks(axis: Any) -> None:
    """Put round numbers on a logarithmic axis, more of them where it is short."""
    low, high = axis.get_view_interval()
    parts = next(parts for most, parts in _PARTS.items() if high <= most * low)
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=parts))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def legend(figure: Figure, entries: Iterable[tuple[Any, str]], note: str = "") -> None:
    """Put a legend below the axes; an entry is a style of a line, or an artist, and a name."""
    found = [(Line2D([], [], **each) if isinstance(each, Mapping) else each, label(name)) for each, name in entries]
    if not found and not note:
        return
    wide = figure.get_figwidth() / 10
    longest = max((len(name) for _, name in found), default=0)
    drawn = figure.legend(
        [artist for artist, _ in found],
        [name for _, name in found],
        loc="outside lower center",
        ncols=max(1, min(4, int(118 * wide // (longest + 12)))),
        fontsize=9,
        frameon=False,
        labelcolor=INK,
        handlelength=2.6,
        title="\n".join(textwrap.wrap(label(note, longest=300), int(120 * wide))) or None,
        title_fontsize=9,
    )
    drawn.get_title().set_color(INK)


def styles_of(titles: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a style for each of several titles."""
    return {title: line_style(place) for place, title in enumerate(dict.fromkeys(titles))}
