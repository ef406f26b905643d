"""That whatever is there can be drawn, the same way every time, and that it shows the numbers that it was given."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from avagrad.report.drawing import save
from avagrad.report.figures import budgets, figure_1, learning_curves, step_times
from avagrad.report.figures.budgets import Budgets
from avagrad.report.figures.figure_1 import Figure1, Start
from avagrad.report.figures.learning_curves import Learning
from avagrad.report.figures.step_times import Bar, Bars
from avagrad.report.reading import Collection, Run, Sweep
from avagrad.report.values import Band
from avagrad.tune.records import Record

HOSTILE = r"_<b>$\frac{$ & \n 漢字 " + 300 * "x"
NAMES = {"loss": "training loss", "error": "validation error", "gamma": "gamma", "lr": "lr"}
SLOPE = Band((1, 2, 3, 4), (8.0, None, 2.0, 1.0), (4.0, None, 1.0, 0.5), (16.0, None, 4.0, 2.0))
POINT = Band((1,), (3.0,), (3.0,), (3.0,))
HUGE = Band((1, 2), (1e99, 1e-99), (1e99, 1e-99), (1e99, 1e-99))
NONE = Band((1, 2), (None, None), (None, None), (None, None))


def learning(*bands: Band, title: str = "a", log: frozenset[str] = frozenset()) -> Learning:
    lines = tuple(learning_curves.Line(title, 3, 1, dict.fromkeys(NAMES, band)) for band in bands)
    return Learning(title, NAMES, lines, log)


def budget(*bands: Band, kind: str = "random", log: bool = False) -> Budgets:
    lines = tuple(budgets.Line(HOSTILE, kind, i, band) for i, band in enumerate(bands))
    return Budgets(HOSTILE, HOSTILE, lines, log)


def start(band: Band) -> Start:
    return Start(0.0, 0.5, (figure_1.Line(HOSTILE, band, band, band), figure_1.Line("b", NONE, NONE, NONE)), HOSTILE)


def flat_sweep() -> Sweep:
    records = tuple(Record(lr, eps, value=5) for lr in range(1, 7) for eps in range(1, 7))
    return Sweep("a", "a", records, {}, {}, "minimize")


BARS = tuple(Bar(HOSTILE, 10.0**k, None if k == 0 else 10.0**k) for k in range(-3, 4))
FIGURES = {
    "no lines": lambda: learning_curves.draw(learning()),
    "gaps": lambda: learning_curves.draw(learning(SLOPE, NONE, POINT, log=frozenset(["loss"]))),
    "hostile": lambda: learning_curves.draw(learning(*[SLOPE] * 12, title=HOSTILE)),
    "huge": lambda: learning_curves.draw(learning(HUGE, log=frozenset(NAMES))),
    "huge, straight": lambda: learning_curves.draw(learning(HUGE)),
    "no budgets": lambda: budgets.draw(budget()),
    "budgets": lambda: budgets.draw(budget(SLOPE, POINT, NONE)),
    "budget of one": lambda: budgets.draw(budget(POINT, kind="records", log=True)),
    "budgets of nothing": lambda: budgets.draw(budget(NONE)),
    "a flat grid": lambda: budgets.draw(budgets.numbers(Collection("a", sweeps=(flat_sweep(),)))[0]),
    "no starts": lambda: figure_1.draw(Figure1("a", ())),
    "starts": lambda: figure_1.draw(Figure1("a", (start(SLOPE), start(POINT), Start(None, None, (), "")))),
    "no bars": lambda: step_times.draw(Bars("a", {}, {})),
    "bars": lambda: step_times.draw(Bars(HOSTILE, {f"{HOSTILE}{i}": BARS for i in range(3)}, {})),
    "no ratios": lambda: step_times.draw(Bars("a", {"a": (Bar("a", 1e99, None),)}, {})),
}


@pytest.mark.parametrize("name", FIGURES)
def test_everything_can_be_drawn(name: str, tmp_path: Path) -> None:
    for file in ("a.svg", "b.svg"):
        save(FIGURES[name](), tmp_path / file)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<b>" not in (tmp_path / "a.svg").read_text()


def heights(figure: Figure, axes: int) -> list[list[float]]:
    return [np.asarray(line.get_ydata(), dtype=float).tolist() for line in figure.axes[axes].lines]


def test_the_caption_of_learning_curves_ranks_only_what_came_to_the_end() -> None:
    whole, cut = Band((1.0, 2.0, 3.0), (30.0, 20.0, 10.0)), Band((1.0,), (5.0,))
    lines = [("lr 0.1", 1, 0, whole), ("lr 0.2", 1, 1, cut), ("lr 0.3", 1, 0, cut), ("lr 0.4", 3, 1, cut)]
    found = tuple(learning_curves.Line(name, seeds, gone, {"error": band}) for name, seeds, gone, band in lines)
    caption = learning_curves.caption(Learning("a", NAMES, found, frozenset()))
    assert caption.endswith("at the end: lr 0.1: 10. Diverged: lr 0.2; lr 0.4.")
    same = tuple(learning_curves.Line(f"lr {i}", 1, 0, {"error": whole}) for i in range(5))
    assert learning_curves.caption(Learning("a", NAMES, same, frozenset())).endswith("lr 2: 10; 2 more.")


def test_learning_curves_show_means_gaps_and_where_a_run_diverged() -> None:
    figure = learning_curves.draw(learning(SLOPE, log=frozenset(["loss"])))
    line, cross = heights(figure, 0)
    assert line == pytest.approx([8, math.nan, 2, 1], nan_ok=True)
    assert cross == [1.0]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear", "linear"]
    assert [axes.get_ylabel() for axes in figure.axes] == list(NAMES.values())


def test_the_legend_names_every_line_and_the_rest_is_folded() -> None:
    rows = ({"epoch": 1, "loss": 1.0, "error": 5.0},)
    runs = tuple(Run("a", {"optimizer": "sgd", "lr": lr}, {}, rows, 1, None) for lr in range(1, 16))
    (legend,) = learning_curves.draw(learning_curves.numbers(Collection("a", runs))[0]).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *(f"SGD, lr {lr}" for lr in range(1, 13)),
        "SGD, 3 other settings (median, middle 80 %)",
    ]
    looks = {(str(line.get_color()), line.get_linestyle(), str(line._dash_pattern)) for line in legend.get_lines()}  # type: ignore[attr-defined]
    assert len(looks) == 13


def test_a_search_ends_with_a_dot_and_a_random_one_does_not() -> None:
    assert heights(budgets.draw(budget(SLOPE, kind="separable")), 0)[1:] == [[1.0]]
    assert len(heights(budgets.draw(budget(SLOPE, kind="random")), 0)) == 1


def test_the_axis_of_budgets_begins_where_the_differences_do() -> None:
    band = Band((1, 4, 5, 9), (900.0, 80.0, 5.0, 4.0), (900.0, 80.0, 5.0, 4.0), (900.0, 80.0, 5.0, 4.0))
    chart = budget(band, kind="records")
    low, high = budgets.draw(chart).axes[0].get_ylim()
    assert 3.5 < low < 4 < 5 < high < 5.5
    assert budget(POINT).limits is None
    assert budgets.caption(chart).endswith(" Early trials are above the picture.")
    more = budget(Band((1, 5), (0.1, 5.0), (0.1, 5.0), (0.1, 5.0)), kind="records")
    assert budgets.caption(replace(more, direction="maximize")).endswith(" Early trials are below the picture.")
    level = Band((1, 5), (5.0, 5.0), (5.0, 5.0), (5.0, 5.0))
    assert "picture" not in budgets.caption(budget(level, kind="records"))


@pytest.mark.parametrize("last", [1, 3, 9, 22, 150, 20_000])
def test_trials_are_whole_numbers(last: int) -> None:
    curve = (1.0,) * last
    axes = budgets.draw(budget(Band(tuple(range(1, last + 1)), curve, curve, curve), kind="records")).axes[0]
    low, high = axes.get_xlim()
    there = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert there
    assert there == [round(tick) for tick in there]
    assert len(there) <= 16


def test_budgets_say_of_what_there_is_a_line() -> None:
    assert "random" not in budgets.NOTE + budgets.caption(budget(SLOPE, kind="records"))
    caption = budgets.caption(budget(SLOPE, kind="random"))
    assert "Two lines and a ring are replayed. Of random draws the median is a line, the middle half a band." in caption


def test_of_many_sweeps_the_best_are_drawn_and_the_rest_counted() -> None:
    bands = [Band((1, 2), (9.0, float(i)), (9.0, float(i)), (9.0, float(i))) for i in range(9)]
    chart = budget(*bands, kind="separable")
    assert chart.best_sweeps == set(range(6))
    (legend,) = budgets.draw(chart).legends
    assert len(legend.get_texts()) == 6
    assert legend.get_title().get_text().startswith("3 more sweeps are not drawn")


def test_figure_1_shows_the_minimiser_and_the_bound() -> None:
    figure = figure_1.draw(Figure1("a", (start(SLOPE),)))
    assert heights(figure, 0)[0] == [0.5, 0.5]
    assert len(heights(figure, 1)) == 2  # the squared gradient, and the bound
    assert figure.axes[0].get_ylabel() == "mean w, from w = 0"


def test_bars_go_from_1_to_the_ratio() -> None:
    (axes,) = step_times.draw(Bars("a", {"a": (Bar("x", 2.0, 0.5), Bar("y", 3.0, None))}, {})).axes
    bar, _ = axes.lines
    assert np.asarray(bar.get_xdata()).tolist() == [1.0, 0.5]
    assert [text.get_text() for text in axes.texts] == ["2 ms, 0.50 x", "3 ms"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["x", "y"]
