"""The numbers behind curves and bars: against closed forms, and against counting all there is."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from matplotlib.text import Text

from avagrad.lab.tasks import synthetic as toy
from avagrad.report.comparable import comparable, distinct_names, names_of
from avagrad.report.figures import budgets, figure_1, learning_curves, step_times
from avagrad.report.figures.budgets import Budgets, random_search
from avagrad.report.figures.figure_1 import Start
from avagrad.report.figures.learning_curves import Learning
from avagrad.report.figures.step_times import Bars
from avagrad.report.reading import Collection, Run, StepTimes, Sweep, Synthetic
from avagrad.report.values import Band, number, wants_log
from avagrad.theory import Problem
from avagrad.tune.records import Record
from avagrad.tune.space import Cell

CONFIG = {"task": "digits", "optimizer": "adam", "lr": 0.1, "eps": 1e-8, "weight_decay": 0.0, "epochs": 3}


def rows(*losses: float | None, error: float = 50.0) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"epoch": i, "loss": loss, "error": error, "lr": 0.1, "gamma": None} for i, loss in enumerate(losses, 1)
    )


def run(metrics: Sequence[Mapping[str, Any]] = (), *, status: str | None = "finished", **config: Any) -> Run:
    error = metrics[-1].get("error") if metrics and status == "finished" else None
    result = None if status is None else {"status": status, "validation": {"error": error}, "test": {"error": error}}
    return Run("a", CONFIG | config, {}, tuple(metrics), 1, result)


def sweep(records: Sequence[Record], *, name: str = "a", direction: str = "minimize", **config: Any) -> Sweep:
    return Sweep(f"folder/{name}", name, tuple(records), config, {}, direction)


def learning(runs: Sequence[Run], most: int = 12) -> list[Learning]:
    return learning_curves.numbers(Collection("a", tuple(runs)), most=most)


def budgets_of(sweeps: Sequence[Sweep]) -> list[Budgets]:
    return budgets.numbers(Collection("a", sweeps=tuple(sweeps)))


def starts_of(synthetic: Synthetic) -> tuple[Start, ...]:
    return figure_1.numbers(Collection("a", synthetics=(synthetic,)))[0].starts


def bars_of(*rows: dict[str, Any]) -> Bars:
    return step_times.numbers(Collection("a", step_times=(StepTimes("a", {}, rows),)))[0]


# --- comparable runs ---


def test_runs_are_compared_where_only_the_method_and_the_seed_differ() -> None:
    same = [run(optimizer="sgd", lr=1.0, eps=None), run(seed=1, threads=7, device="cuda"), run(data="/x/y")]
    assert len(comparable(same[:2])) == 1
    assert len(comparable(same)) == 2
    assert [group.title for group in comparable([run(), run(epochs=4)])] == ["digits, epochs=3", "digits, epochs=4"]
    mlp = run(task_options={"model": "mlp"}, preset="quick")
    assert comparable([mlp])[0].title == "digits (mlp)"


def test_data_are_the_same_wherever_they_lie() -> None:
    def read(path: str, what: str) -> Run:
        return Run("a", CONFIG | {"data": path}, {"data": what}, (), 1, None)

    assert len(comparable([read("/a/x", "123"), read("/b/y", "123")])) == 1
    assert [group.title for group in comparable([read("/a/x", "12"), read("/b/x", "34")])] == [
        "digits, hash=12",
        "digits, hash=34",
    ]


def test_settings_stand_in_the_order_of_methods_and_can_be_distinct_names() -> None:
    beta = {"betas": [0.5, 0.9]}
    found = comparable([run(optimizer="lion"), run(lr=1.0), run(), run(optimizer_options=beta), run(optimizer="sgd")])
    assert [setting.title for setting in found[0].settings] == [
        "SGD, lr 0.1, eps 1e-08",
        "Adam, lr 0.1, eps 1e-08",
        "Adam, lr 0.1, eps 1e-08, betas=[0.5, 0.9]",
        "Adam, lr 1, eps 1e-08",
        "lion, lr 0.1, eps 1e-08",
    ]


def test_a_seed_counts_once_and_what_ended_goes_first() -> None:
    (group,) = comparable([run(rows(1), status=None), run(rows(1)), run(rows(2)), run(rows(3), seed=1)])
    assert [each.rows[0]["loss"] for each in group.settings[0].runs] == [1, 3]
    assert group.settings[0].runs[0].status == "finished"


# --- learning curves ---


def test_mean_and_range_over_seeds() -> None:
    (chart,) = learning([run(rows(4, 2, 1), seed=0), run(rows(2, 1, None), seed=1), run(rows(3, 3, 1), seed=2)])
    (line,) = chart.lines
    assert line.bands["loss"] == Band((1, 2, 3), (3, 2, None), (2, 1, None), (4, 3, None))
    assert line.bands["gamma"].is_empty
    assert line.label == "Adam, lr 0.1, eps 1e-08, 3 seeds"
    assert chart.quantities["error"] == "validation error, %"


def test_seeds_are_aligned_on_the_epochs_that_all_have() -> None:
    thinned = rows(5, 6, 7, 8)[1::2]
    (chart,) = learning([run(rows(1, 2, 3, 4)), run(thinned, seed=1), run((), seed=2, status=None)])
    assert chart.lines[0].bands["loss"].x == (2, 4)
    assert chart.lines[0].bands["loss"].middle == (4, 6)
    assert chart.lines[0].seeds == 2


def test_a_line_ends_where_a_seed_diverges() -> None:
    # What the trainer writes: the row of a divergence has the number of the last whole epoch.
    gone = (*rows(1, 2), {"epoch": 2, "loss": None, "error": None, "lr": 0.02, "gamma": None, "diverged": True})
    (chart,) = learning([run(rows(3, 4, 5)), run(gone, seed=1, status="diverged")])
    (line,) = chart.lines
    assert line.bands["loss"].middle == (2, 3)
    assert line.bands["lr"].middle == (0.1, 0.1)
    assert line.bands["loss"].last == (2, 3)
    assert line.label.endswith("2 seeds, 1 diverged")


def test_the_best_lines_are_kept_and_the_rest_is_folded() -> None:
    runs = [run(rows(1, error=10.0 + i), lr=0.1 * (i + 1)) for i in range(5)]
    gone = run(rows(1, error=1.0), lr=9.0, status="diverged")
    (chart,) = learning([gone, *runs[::-1]], most=3)
    *best, rest = chart.lines
    assert [line.title for line in best] == [f"Adam, lr {lr}, eps 1e-08" for lr in (0.1, 0.2, 0.3)]
    assert rest.label == "Adam, 3 other settings (median, middle 80 %), 1 diverged"
    assert rest.bands["error"].middle == (13.0,), "the median of 1, 13 and 14"
    assert [line.title for line in learning(runs)[0].lines] == [line.title for line in chart.lines[:3]] + [
        f"Adam, lr {lr}, eps 1e-08" for lr in (0.4, 0.5)
    ]


def test_logarithms_where_numbers_are_far_apart() -> None:
    assert learning([run(rows(10, 0.1))])[0].log == {"loss"}
    assert learning([run(rows(10, 0.0))])[0].log == frozenset()
    assert not wants_log([1, 20])
    assert wants_log([1, 21])


ODD: list[list[Run]] = [
    [],
    [Run("a", {}, {}, (), 1, None)],
    [Run("a", {}, {}, ({},), 1, {})],
    [Run("a", {"task": 3, "optimizer": None, "lr": "x", "seed": "y", "optimizer_options": 7}, {"data": []}, (), 1, {})],
    [Run("a", {"task": "m:T", "task_options": [1], "preset": {}}, {}, ({"epoch": "1", "loss": True},), 1, {"test": 3})],
    [run(rows(1e308, -1e308), lr=1e308), run(rows(math.nan, math.inf), seed=1, lr=1e308)],
    [run(rows(10**400)), run(rows(1e99), lr=10**400)],
    [run((), status="diverged"), run((), status="diverged", seed=1)],
]


@pytest.mark.parametrize("runs", ODD)
def test_odd_runs_never_raise(runs: list[Run]) -> None:
    charts = learning(runs)
    assert len(charts) == (1 if runs else 0)
    assert all(value < 1e100 for chart in charts for line in chart.lines for value in line.bands["loss"].values)


def test_numbers() -> None:
    given: list[object] = [1, 0.5, True, "1", None, math.inf, 10**400, []]
    assert [number(each) for each in given] == [1.0, 0.5, *[None] * 6]


# --- budgets ---


@pytest.mark.parametrize("share", [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)])
@pytest.mark.parametrize(
    "losses",
    [[5.0, 1.0, 3.0, 2.0, 4.0, 6.0], [2.0, 2.0, 1.0, math.inf, math.inf, 7.0, math.inf], [math.inf] * 3, [1.0]],
)
def test_random_search_against_all_draws(losses: list[float], share: Fraction) -> None:
    expected = []
    for drawn in range(1, len(losses) + 1):
        lowest = sorted(min(draw) for draw in itertools.combinations(losses, drawn))
        expected.append(next(x for i, x in enumerate(lowest, 1) if Fraction(i, len(lowest)) >= share))
    assert random_search(losses, float(share)) == expected


def test_random_search_of_a_large_grid_is_quick_and_ends_at_the_best() -> None:
    found = random_search([float(i) for i in range(10_000)])
    assert found[0] == 4999
    assert found[-1] == 0
    assert found == sorted(found, reverse=True)
    assert found[4999] == 0  # half of all draws of a half have the best


def valley(*, sign: float = 1.0, seeds: Sequence[int] = (0,)) -> list[Record]:
    tens = [10.0**k for k in range(-3, 4)]
    return [
        Record(lr, eps, seed, value=sign * (1 + seed + abs(math.log10(lr)) + abs(math.log10(eps))))
        for lr in tens
        for eps in tens
        for seed in seeds
    ]


@pytest.mark.parametrize(("sign", "direction"), [(1.0, "minimize"), (-1.0, "maximize")])
def test_a_whole_grid_is_searched_again(sign: float, direction: str) -> None:
    (chart,) = budgets_of([sweep(valley(sign=sign), direction=direction, task="digits")])
    separable, random = chart.lines
    assert separable.band.last == (17, sign * 1)  # lines of 7 and 6, and the 4 of the ring that neither has
    assert separable.band.middle[0] == sign * (1 + 3 + 1)  # eps 0.1, the least lr first
    assert random.band.last == (49, sign * 1)
    assert chart.measure == "validation error, %"
    falls = [sign * (y or math.nan) for y in random.band.middle]
    assert falls == sorted(falls, reverse=True)
    assert all(
        sign * (high or 0) >= sign * (low or 0) for low, high in zip(random.band.low, random.band.high, strict=True)
    )


def test_a_line_is_in_the_order_of_its_records() -> None:
    values = [math.inf, 5.0, 7.0, 3.0]
    (chart,) = budgets_of([sweep([Record(i + 1, None, value=value) for i, value in enumerate(values)])])
    assert [(line.kind, line.band.middle) for line in chart.lines] == [("records", (None, 5, 5, 3))]


def test_a_cell_is_paid_for_when_its_last_seed_is() -> None:
    records = [Record(1, None, 0, value=1), Record(2, None, 0, value=5), Record(2, None, 1, value=5)]
    found = sweep([*records, Record(1, None, 1, value=3)]).known
    assert list(found.cells) == [Cell(2.0, None), Cell(1.0, None)]
    assert found.cells[Cell(1.0, None)].loss == 2


def test_sweeps_are_compared_where_their_settings_are_the_same() -> None:
    records = valley()
    adam, sgd = sweep(records, task="digits", optimizer="adam"), sweep(records, task="digits", optimizer="sgd")
    other = sweep(records, task="digits", optimizer="adam", epochs=5)
    charts = budgets_of([adam, other, sgd])
    assert [[line.sweep for line in chart.lines] for chart in charts] == [[0, 0, 1, 1], [0, 0]]
    unknown = [Sweep(place, "x", tuple(records), {}, {}, "minimize") for place in ("a/x", "a/y", "b/x")]
    assert [chart.title for chart in budgets_of(unknown)] == ["x (1)", "x (2)"]
    assert names_of([adam, adam]) == ["Adam", "Adam"]  # one and the same
    assert names_of([adam, other]) == ["Adam", "Adam, epochs=5"]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [Record(1, 0.1, value=1)],
        [Record(1, 0.1, value=math.inf)],
        [Record(lr, eps, value=math.inf) for lr in (1, 2) for eps in (1, 2)],
        [Record(lr, eps, value=1, pruned=True) for lr in (1, 2) for eps in (1, 2)],
        [Record(1, None, value=1), Record(None, 1, value=2), Record(2, 2, value=3), Record(1, 1, value=0)],
        [Record(1, 1, value=1), Record(1, 1, value=2)],
        [Record(lr, eps, value=1.7e308) for lr in (1, 2) for eps in (1, 2)],
    ],
)
@pytest.mark.parametrize("direction", ["minimize", "maximize", "sideways"])
def test_odd_sweeps_never_raise(records: list[Record], direction: str) -> None:
    charts = budgets_of([sweep(records, direction=direction)])
    assert len(charts) == (1 if records else 0)


def texts_of(sweeps: Sequence[Sweep]) -> list[str]:
    figure = budgets.draw(budgets_of(sweeps)[0])
    return [text.get_text() for text in figure.findobj(Text)]


@pytest.mark.parametrize(
    ("count", "note"),
    [(6, ""), (7, "1 more sweep is not drawn: it ends worse."), (8, "2 more sweeps are not drawn: they end worse.")],
)
def test_a_drawing_says_how_many_sweeps_it_leaves_out(count: int, note: str) -> None:
    texts = texts_of([sweep([Record(1, None, value=i), Record(2, None, value=i)], name=f"{i}") for i in range(count)])
    assert [text for text in texts if "not drawn" in text] == ([note] if note else [])


def test_an_empty_drawing_leaves_nothing_out() -> None:
    gone = [Record(lr, eps, value=math.inf) for lr in (1, 2) for eps in (1, 2)]
    assert not any("drawn" in text or "worse" in text for text in texts_of([sweep(gone), sweep(gone, name="b")]))


# --- Figure 1 ---


def test_figure_1_from_a_run() -> None:
    settings = toy.Settings(C=9.0, lr=1e-2, steps=2000, replicas=4, w1=0.0, compile=False)
    curves = toy.run(settings, ("adam", "sgd"))
    rows = [
        json.loads(json.dumps(row, allow_nan=False))
        for curve in curves.values()
        for row in curve.rows(settings=settings)
    ]
    config = {"runs": [{"w1": 0.5, "C": 999.0, "delta": 1.0}, {"w1": 0.0, "C": 9.0, "delta": 1.0}]}
    half = [{"w1": 0.5} | row for row in rows]
    other, start = starts_of(Synthetic("a", config, {}, tuple(half + [{"w1": 0.0} | row for row in rows])))[::-1]
    assert (start.w1, other.w1) == (0.0, 0.5)
    assert start.minimiser == Problem(C=9.0, delta=1.0).minimiser
    adam, sgd = start.lines
    assert sgd.w.x == tuple(curves["sgd"].steps.tolist())
    assert sgd.w.middle == pytest.approx(curves["sgd"].mean_w.mean(1).tolist())
    assert sgd.squared_gradient.high == pytest.approx(curves["sgd"].mean_squared_gradient.quantile(0.9, 1).tolist())
    bound = curves["sgd"].bound(settings)
    assert bound is not None
    assert sgd.bound.middle == pytest.approx([x if x < 1 else None for x in bound.mean(1).tolist()])
    assert sgd.bound.last is not None
    assert sgd.bound.middle[0] is None
    assert adam.bound.is_empty
    assert start.note == ""


def test_the_bound_in_rows() -> None:
    still = toy.Settings(lr=0.0, steps=3, replicas=2, compile=False)
    curves = toy.run(still, ("adam", "sgd"))
    assert curves["sgd"].rows(settings=still)[0]["bound"] == {"mean": None, "q10": None, "q50": None, "q90": None}
    assert "bound" not in curves["adam"].rows(settings=still)[0]
    assert "bound" not in curves["sgd"].rows()[0]


def test_a_bound_that_says_nothing_is_said_so() -> None:
    def start(bound: float | None) -> str:
        row = {"w1": 0.0, "method": "sgd", "step": 1, "bound": {"mean": bound}}
        return starts_of(Synthetic("a", {}, {}, (row,)))[0].note

    assert start(1.5) == "Theorem 2's bound is nowhere below 1, the most that a squared gradient can be."
    assert start(0.5) == start(None) == ""


@pytest.mark.parametrize(
    "config", [{}, {"runs": 3}, {"runs": [3, {"w1": 0.0, "C": "x"}]}, {"runs": [{"w1": 0.0, "C": 1, "delta": 3}]}]
)
@pytest.mark.parametrize(
    "row", [{}, {"w1": 0.0}, {"w1": "0", "method": 3, "step": None}, {"w1": 0.0, "step": 1, "mean_w": 3, "bound": {}}]
)
def test_odd_rows_of_figure_1_never_raise(config: dict[str, Any], row: dict[str, Any]) -> None:
    (start,) = starts_of(Synthetic("a", config, {}, (row,)))
    assert start.minimiser is None
    assert start.lines[0].w.is_empty


# --- step times ---


def test_step_bars() -> None:
    def row(optimizer: str, milliseconds: Any, ratio: Any = None, parameters: str = "a") -> dict[str, Any]:
        row = {"parameters": parameters, "optimizer": optimizer, "milliseconds": milliseconds}
        return row | {"of_fused_adamw": ratio}

    times = [row("torch AdamW fused", 2.0, 1.0), row("AvaGrad fused", 0.5), row("x", 3.0, 7.0, "b"), row("y", None)]
    found = bars_of(*times, {}, {"parameters": 3, "milliseconds": -1})
    first, second = found.groups.values()
    assert [(bar.ratio, bar.is_ours) for bar in first] == [(1.0, False), (0.25, True)]
    assert first[1].label == "0.5 ms, 0.25 x"
    assert second[0].ratio == 7.0
    assert found.span == (0.25, 7.0)
    assert step_times.numbers(Collection("a", step_times=(StepTimes("a", {}, (row("AvaGrad fused", 0.5),)),))) == []


def test_titles_that_are_the_same_are_distinct_names() -> None:
    assert distinct_names(["a", "a"], [{"x": [1]}, {}]) == ["a, x=[1]", "a"]
    assert distinct_names(["a", "a"], [{"x": 1}, {"x": 2}], ["s", "t"]) == ["a", "a"]
    assert distinct_names([], []) == []
