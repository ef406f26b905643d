"""That whatever is there can be drawn, the same way every time, and that it shows the numbers that it was given."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from avagrad.report.charts import draw_budgets, draw_figure_1, draw_learning_curves, draw_step_bars
from avagrad.report.curves import (
    Band,
    Bar,
    BarGroup,
    BudgetChart,
    BudgetLine,
    LearningChart,
    LearningLine,
    Start,
    SyntheticLine,
    budget_curves,
    learning_curves,
)
from avagrad.report.figures import LOOKS, save
from avagrad.report.reading import Run, Sweep
from avagrad.tune.records import Record

HOSTILE = r"_<b>$\frac{$ & \n 漢字 " + 300 * "x"
NAMES = {"loss": "training loss", "error": "validation error", "gamma": "gamma", "lr": "lr"}
SLOPE = Band((1, 2, 3, 4), (8.0, None, 2.0, 1.0), (4.0, None, 1.0, 0.5), (16.0, None, 4.0, 2.0))
POINT = Band((1,), (3.0,), (3.0,), (3.0,))
HUGE = Band((1, 2), (1e99, 1e-99), (1e99, 1e-99), (1e99, 1e-99))
NONE = Band((1, 2), (None, None), (None, None), (None, None))


def learning(*bands: Band, title: str = "a", log: frozenset[str] = frozenset(), left_out: int = 0) -> LearningChart:
    lines = tuple(LearningLine(title, 3, 1, dict.fromkeys(NAMES, band)) for band in bands)
    return LearningChart(title, NAMES, lines, log, left_out)


def budget(*bands: Band, kind: str = "random", log: bool = False) -> BudgetChart:
    lines = tuple(BudgetLine(HOSTILE, kind, i, band) for i, band in enumerate(bands))
    return BudgetChart(HOSTILE, HOSTILE, lines, log, None)


def start(band: Band) -> Start:
    return Start(0.0, 0.5, (SyntheticLine(HOSTILE, band, band, band), SyntheticLine("b", NONE, NONE, NONE)), HOSTILE)


def flat_sweep() -> Sweep:
    records = tuple(Record(lr, eps, value=5) for lr in range(1, 7) for eps in range(1, 7))
    return Sweep("a", "a", records, {}, {}, "minimize")


BARS = tuple(Bar(HOSTILE, 10.0**k, None if k == 0 else 10.0**k, k > 1) for k in range(-3, 4))
FIGURES = {
    "no lines": lambda look: draw_learning_curves(learning(), look=look),
    "gaps": lambda look: draw_learning_curves(learning(SLOPE, NONE, POINT, log=frozenset(["loss"])), look=look),
    "hostile": lambda look: draw_learning_curves(learning(*[SLOPE] * 12, title=HOSTILE, left_out=3), look=look),
    "huge": lambda look: draw_learning_curves(learning(HUGE, log=frozenset(NAMES)), look=look),
    "huge, straight": lambda look: draw_learning_curves(learning(HUGE), look=look),
    "no budgets": lambda look: draw_budgets(budget(), look=look),
    "budgets": lambda look: draw_budgets(budget(SLOPE, POINT, NONE), look=look),
    "budget of one": lambda look: draw_budgets(budget(POINT, kind="records", log=True), look=look),
    "budgets of nothing": lambda look: draw_budgets(budget(NONE), look=look),
    "a flat grid": lambda look: draw_budgets(budget_curves([flat_sweep()])[0], look=look),
    "no starts": lambda look: draw_figure_1([], look=look),
    "starts": lambda look: draw_figure_1([start(SLOPE), start(POINT), Start(None, None, (), "")], look=look),
    "no bars": lambda look: draw_step_bars([], look=look),
    "bars": lambda look: draw_step_bars([BarGroup(HOSTILE, BARS)] * 3, title=HOSTILE, look=look),
    "no ratios": lambda look: draw_step_bars([BarGroup("a", (Bar("a", 1e99, None, True),))], look=look),
}


@pytest.mark.parametrize("name", FIGURES)
def test_everything_can_be_drawn(name: str, tmp_path: Path) -> None:
    look = list(LOOKS)[list(FIGURES).index(name) % 2]
    for file in ("a.svg", "b.svg"):
        save(FIGURES[name](look), tmp_path / file)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<b>" not in (tmp_path / "a.svg").read_text()


def heights(figure: Figure, axes: int) -> list[list[float]]:
    return [np.asarray(line.get_ydata(), dtype=float).tolist() for line in figure.axes[axes].lines]


def test_learning_curves_show_means_gaps_and_where_a_run_diverged() -> None:
    figure = draw_learning_curves(learning(SLOPE, log=frozenset(["loss"])))
    line, cross = heights(figure, 0)
    assert line == pytest.approx([8, math.nan, 2, 1], nan_ok=True)
    assert cross == [1.0]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear", "linear"]
    assert [axes.get_ylabel() for axes in figure.axes] == list(NAMES.values())


def test_the_legend_names_every_line_and_what_is_left_out() -> None:
    rows = ({"epoch": 1, "loss": 1.0, "error": 5.0},)
    runs = [Run("a", {"optimizer": "sgd", "lr": lr}, {}, rows, 1, None) for lr in range(1, 16)]
    (legend,) = draw_learning_curves(learning_curves(runs)[0]).legends
    assert [text.get_text() for text in legend.get_texts()] == [f"SGD, lr {lr}" for lr in range(1, 13)]
    assert legend.get_title().get_text().startswith("3 more settings are not shown")
    looks = {(str(line.get_color()), line.get_linestyle(), str(line._dash_pattern)) for line in legend.get_lines()}  # type: ignore[attr-defined]
    assert len(looks) == 12


def test_a_search_ends_with_a_dot_and_a_random_one_does_not() -> None:
    assert heights(draw_budgets(budget(SLOPE, kind="separable")), 0)[1:] == [[1.0]]
    assert len(heights(draw_budgets(budget(SLOPE, kind="random")), 0)) == 1
    chart = BudgetChart("a", "b", budget(SLOPE).lines, False, (2.0, 5.0, 0.5, 3.0))
    _, closer = draw_budgets(chart).axes
    assert (closer.get_xlim(), closer.get_ylim()) == ((2.0, 5.0), (0.5, 3.0))


def test_figure_1_shows_the_minimiser_and_the_bound() -> None:
    figure = draw_figure_1([start(SLOPE)])
    assert heights(figure, 0)[0] == [0.5, 0.5]
    assert len(heights(figure, 1)) == 2  # the squared gradient, and the bound
    assert figure.axes[0].get_ylabel() == "mean w, from w = 0"


def test_bars_go_from_1_to_the_ratio() -> None:
    (axes,) = draw_step_bars([BarGroup("a", (Bar("x", 2.0, 0.5, True), Bar("y", 3.0, None, False)))]).axes
    bar, _ = axes.lines
    assert np.asarray(bar.get_xdata()).tolist() == [1.0, 0.5]
    assert [text.get_text() for text in axes.texts] == ["2 ms, 0.50 x", "3 ms"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["x", "y"]
