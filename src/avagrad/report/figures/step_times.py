"""What a step costs, compared with torch's fused AdamW."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avagrad.report.drawing import COLOURS, FAINT, INK, Figure, empty_figure, finish_axes, label, new_figure
from avagrad.report.reading import Collection
from avagrad.report.values import LARGEST, grouped, number

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers"]

NAME, CHAPTER, NOTE = "step-times", "What a step costs", ""


@dataclass(frozen=True)
class Bar:
    """What a step of one optimizer costs, and how many times what torch's fused AdamW costs."""

    title: str
    milliseconds: float
    ratio: float | None

    @property
    def is_ours(self) -> bool:
        """Whether the optimizer is one of this library."""
        return self.title.startswith(("AvaGrad", "AvaStep", "DelayedAdam"))

    @property
    def label(self) -> str:
        """Both numbers, in words."""
        time = f"{self.milliseconds:.3g} ms" if self.milliseconds < 1000 else f"{self.milliseconds:.0f} ms"
        if self.ratio is None:
            return time
        return f"{time}, {self.ratio:.2f} x" if 0.01 <= self.ratio < 10 else f"{time}, {self.ratio:.3g} x"


@dataclass(frozen=True)
class Bars:
    """One file of step times; the title is the device."""

    title: str
    groups: Mapping[str, tuple[Bar, ...]]  # by what was stepped
    about: Mapping[str, Any]

    @property
    def span(self) -> tuple[float, float]:
        """The least and the largest ratio, 1 included."""
        ratios = [bar.ratio for bars in self.groups.values() for bar in bars if bar.ratio is not None]
        return min([1.0, *ratios]), max([1.0, *ratios])


def numbers(collection: Collection) -> list[Bars]:
    """Return what a step costs for each set of parameters on which torch's fused AdamW was measured, in their order.

    >>> from avagrad.report.reading import StepTimes
    >>> rows = ({"parameters": "a", "optimizer": "torch AdamW fused", "milliseconds": 2.0},
    ...         {"parameters": "a", "optimizer": "AvaGrad fused", "milliseconds": 1.0})
    >>> (found,) = numbers(Collection("a", step_times=(StepTimes("a", {"device": "CPU"}, rows),)))
    >>> found.title, [(bar.title, bar.ratio) for bar in found.groups["a"]]
    ('CPU', [('torch AdamW fused', 1.0), ('AvaGrad fused', 0.5)])
    """
    found = []
    for times in collection.step_times:
        by_parameters = grouped(times.rows, lambda row: str(row.get("parameters") or "unknown parameters"))
        bars = ((str(title), _bars(rows)) for title, rows in by_parameters.items())
        if groups := {title: each for title, each in bars if any(bar.ratio for bar in each)}:
            found.append(Bars(str(times.about.get("device") or "unknown device"), groups, times.about))
    return found


def _bars(rows: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
    measured = [(str(row.get("optimizer") or "unknown"), _above_0(row.get("milliseconds")), row) for row in rows]
    reference = next((time for name, time, _ in measured if name == "torch AdamW fused"), None)
    return tuple(
        Bar(name, time, time / reference if reference else _above_0(row.get("of_fused_adamw")))
        for name, time, row in measured
        if time is not None
    )


def _above_0(value: object) -> float | None:
    known = number(value)
    return known if known is not None and known > 1 / LARGEST else None


def caption(bars: Bars) -> str:
    """Return how the fastest of ours compares with torch's fused AdamW, and on what it was measured.

    >>> caption(Bars("CPU", {"resnet50": (Bar("AvaGrad fused", 0.25, 0.5),)}, {"device": "CPU"}))
    "The fastest of ours, times torch's fused AdamW: resnet50: AvaGrad fused 0.50. Measured with device CPU."
    """
    ours = {title: [bar for bar in group if bar.is_ours and bar.ratio] for title, group in bars.groups.items()}
    fastest = {title: min(found, key=lambda bar: bar.milliseconds) for title, found in ours.items() if found}
    ratios = "; ".join(f"{title}: {bar.title} {bar.ratio:.2f}" for title, bar in fastest.items())
    about = ", ".join(f"{key} {value}" for key, value in bars.about.items())
    compared = f"The fastest of ours, times torch's fused AdamW: {ratios}." if ratios else ""
    return " ".join(filter(None, [compared, f"Measured with {about}." if about else ""]))


def draw(bars: Bars) -> Figure:
    """Draw a panel for each set of parameters: a bar to the left is faster than torch's fused AdamW.

    A bar is as long as the logarithm of the ratio.

    >>> len(draw(Bars("CPU", {"resnet50": (), "gpt2": ()}, {})).axes)
    2
    """
    if not bars.groups:
        return empty_figure("no step times")
    columns = 2 if len(bars.groups) > 1 else 1
    rows = -(-len(bars.groups) // columns)
    most = max(map(len, bars.groups.values()))
    figure = new_figure(6.4 * columns, 1.0 + rows * (0.7 + 0.25 * max(most, 3)))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for axes, (title, group) in zip(grid.flat, bars.groups.items(), strict=False):
        _draw_group(axes, title, group, bars.span)
    for axes in grid.flat[len(bars.groups) :]:
        axes.remove()
    for axes in figure.axes[-columns:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("time of a step / that of torch's fused AdamW", color=INK, fontsize=9)
    return figure


def _draw_group(axes: Any, title: str, group: Sequence[Bar], span: tuple[float, float]) -> None:
    axes.set_title(label(title), color=INK, fontsize=10, loc="left")
    for place, bar in enumerate(group):
        if bar.ratio is not None:
            colour = COLOURS[0] if bar.is_ours else FAINT
            axes.plot((1.0, bar.ratio), (place, place), color=colour, lw=8, solid_capstyle="butt")
        # Always to the right of both the bar and the line at 1, where there is room.
        where = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9, "color": INK}
        axes.annotate(label(bar.label), (max(bar.ratio or 1.0, 1.0), place), **where)
    axes.axvline(1.0, color=INK, lw=0.8)
    low, high = span
    axes.set_xlim(low / 1.5, high * 30)  # with room for the labels
    finish_axes(axes, log_x=True)
    axes.set_ylim(len(group) - 0.4, -0.6)
    axes.set_yticks(range(len(group)), [label(bar.title, 40) for bar in group])
    axes.grid(visible=False, axis="y")
