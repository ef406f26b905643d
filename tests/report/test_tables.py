"""Tables: the numbers in them, and that no text can break out of its cell."""

import csv
import io
import math
import re
import statistics
from typing import Any

import pytest

from avagrad.lab.methods import METHODS
from avagrad.report.figures import sweeps, table_1
from avagrad.report.figures.sweeps import Sweeps
from avagrad.report.figures.table_1 import Table1, results
from avagrad.report.reading import Collection, Run, Sweep
from avagrad.report.table import Table, TableCell
from avagrad.report.values import duration
from avagrad.tune.records import Record
from avagrad.tune.space import Cell

HOSTILE = "a|b\nc & 5 % _x_ #1 $y$ {z} \\ ~ ^ <script> `q` [l](m)"


def run(test: float | None, validation: float | None = 1.0, *, status: str = "finished", **config: Any) -> Run:
    settings = {"task": "digits", "optimizer": "adam", "lr": 0.1, "eps": 0.1, "seed": 0} | config
    result = {"status": status, "validation": {"error": validation}, "test": {"error": test}}
    return Run("a", settings, {}, (), 1, None if status == "unfinished" else result)


def table_of_runs(runs: list[Run]) -> Table:
    return table_1.draw((table_1.numbers(Collection("a", tuple(runs))) or [Table1((), ())])[0])


def table_of_sweeps(given: list[Sweep]) -> Table:
    return sweeps.draw((sweeps.numbers(Collection("a", sweeps=tuple(given))) or [Sweeps((), ())])[0])


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


# --- rendering ---


def test_hostile_text_stays_in_its_cell() -> None:
    table = Table(("a", HOSTILE), ((TableCell(HOSTILE), TableCell(HOSTILE, bold=True)),), HOSTILE)
    lines = table.markdown().split("\n")
    assert len(lines) == 5  # caption, blank, headings, rule, row
    for line in lines[2:]:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert "<" not in table.markdown()
    assert r"a\|b c &amp; 5 % \_x\_ #1 \$y\$ {z} \\ \~ ^ &lt;script&gt; \`q\` \[l\](m)" in lines[4]


def test_csv_gives_every_text_back_but_no_formula() -> None:
    cells = [HOSTILE, 'say "x", y', "=1+1", "+cmd", "-x", "@y", " =z", "-1.5", "+2e3", ""]
    table = Table(tuple("abcdefghij"), (tuple(map(TableCell, cells)),))
    _, row = csv.reader(io.StringIO(table.csv(), newline=""))
    assert row == [*cells[:2], "'=1+1", "'+cmd", "'-x", "'@y", "' =z", "-1.5", "+2e3", ""]


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match="rows must have 2 cells each"):
        Table(("a", "b"), ((TableCell("c"),),))


def test_durations() -> None:
    found = [duration(seconds) for seconds in (0, 9.5, 59.6, 3599.6, 90061, math.inf, math.nan, -1, None, 1e50)]
    assert found == ["0 s", "9.5 s", "0:01:00", "1:00:00", "1 day, 1:01:01", "", "", "", "", ""]


# --- Table 1 ---


def test_means_and_deviations_over_seeds() -> None:
    errors = [1.4, 1.6, 2.2]
    (column,) = results([run(error, seed=seed) for seed, error in enumerate(errors)])
    entry = column.entries["Adam"]
    assert entry.mean == pytest.approx(statistics.mean(errors))
    assert entry.deviation == pytest.approx(statistics.stdev(errors))
    assert (entry.seeds, entry.settings, entry.diverged) == (3, 1, 0)
    assert column.heading == "digits, test error, %"


def test_the_setting_is_chosen_by_validation_and_not_by_test() -> None:
    runs = [run(9.0, 1.0), run(2.0, 3.0, lr=1.0), run(1.0, status="diverged", lr=5.0)]
    runs += [run(0.0, status="unfinished", lr=7.0)]
    (column,) = results(runs)
    assert column.entries["Adam"].setting == "Adam, lr 0.1, eps 0.1"
    assert column.entries["Adam"].mean == 9.0
    assert column.entries["Adam"].settings == 3
    assert "the least mean validation error is taken: of 3 settings" in table_of_runs(runs).caption


def test_rows_stand_in_the_order_of_methods_and_the_best_are_bold() -> None:
    active = run(2.0, optimizer="avagrad", optimizer_options={"active_only": True})
    runs = [active, run(1.0, optimizer="lion"), run(3.0, optimizer="avagrad")]
    table = table_of_runs([*runs, run(1.0 + 1e-9), run(4.0, optimizer="sgd", eps=None)])
    assert texts(table) == [
        ["SGD", "4.00 (1 seed)"],
        ["Adam", "1.00 (1 seed)"],
        ["AvaGrad", "3.00 (1 seed)"],
        ["AvaGrad, active_only", "2.00 (1 seed)"],
        ["lion", "1.00 (1 seed)"],
    ]
    assert [row[1].bold for row in table.rows] == [False, True, False, False, True]


def test_how_many_seeds_there_are_is_said() -> None:
    runs = [run(1.0 + seed, seed=seed, optimizer=name) for name in ("sgd", "adam") for seed in range(3)]
    runs += [run(2.0 + seed, seed=seed, optimizer="avagrad") for seed in range(2)]
    table = table_of_runs(runs)
    assert [row[1] for row in texts(table)] == ["2.00 (1.00, 3 seeds)", "2.00 (1.00, 3 seeds)", "2.50 (0.71, 2 seeds)"]
    assert "In brackets the sample standard deviation over seeds" in table.caption


def test_what_has_no_number_says_why() -> None:
    runs = [run(1.0), run(None, None, status="diverged", seed=1), run(2.0, optimizer="sgd", status="unfinished")]
    runs += [run(None, optimizer="lion"), run(1.0, task="chars", optimizer="lion")]
    assert texts(table_of_runs(runs)) == [
        ["SGD", "unfinished", ""],
        ["Adam", "diverged (1 of 2)", ""],
        ["lion", "", "1.000 (1 seed)"],
    ]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"task": "cifar", "task_options": {"classes": 10, "model": "wrn-28-4"}}, "CIFAR-10"),
        ({"task": "cifar", "task_options": {"classes": 100}}, "CIFAR-100"),
        ({"task": "imagenet"}, "ImageNet"),
        ({"task": "chars", "preset": "paper-search"}, "Penn Treebank"),
        ({"task": "chars", "preset": "quick"}, None),
        ({"task": "digits"}, None),
        ({"task": "cifar", "task_options": {"classes": [10]}}, None),
    ],
)
def test_the_papers_numbers_stand_beside_its_experiments(config: dict[str, Any], name: str | None) -> None:
    table = table_of_runs([run(1.0, **config), run(1.0, optimizer="avagrad", optimizer_options={"norm": 1}, **config)])
    if name is None:
        assert len(table.columns) == 2
    else:
        assert table.columns[2] == f"paper, {name}"
        assert [row[2] for row in texts(table)] == [METHODS["adam"].paper_errors[name], ""]


def test_columns_say_what_they_are() -> None:
    cifar = run(1.0, task="cifar", preset="paper-search", task_options={"model": "w"})
    runs = [cifar, run(1.0, task_options={"model": "mlp"})]
    assert table_of_runs(runs).columns[1:] == ("digits (mlp), test error, %", "cifar (w, paper-search), test error, %")


def test_remarks_are_in_the_caption() -> None:
    result = {"status": "finished", "test": {"error": 1.0}, "remarks": ["The images were changed.", 3]}
    assert table_of_runs([Run("a", {}, {}, (), 1, result)]).caption.endswith("The images were changed.")


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [Run("a", {}, {}, (), 1, None)],
        [Run("a", {}, {}, (), 1, {})],
        [Run("a", {"task": HOSTILE, "optimizer": HOSTILE, "lr": [], "task_options": 3}, {}, (), 1, {"remarks": 3})],
        [run(1e308, 1e308), run(-1e308, seed=1), run(math.nan, seed=2), run(1e99, lr=2.0)],
        [run(None, None, status="diverged", seed=seed) for seed in range(3)],
    ],
)
def test_odd_runs_give_a_table(runs: list[Run]) -> None:
    table = table_of_runs(runs)
    assert len(table.rows) == (1 if runs else 0)
    assert max(map(len, table.markdown().split("\n"))) < 700


# --- sweeps ---


def grid(sign: float = 1.0, seeds: int = 1) -> tuple[Record, ...]:
    tens = [10.0**k for k in range(-3, 4)]
    return tuple(
        Record(lr, eps, seed, value=sign * (1 + seed + abs(math.log10(lr / eps))), seconds=1.0)
        for lr in tens
        for eps in tens
        for seed in range(seeds)
    )


def test_a_whole_grid_tells_of_its_ridge() -> None:
    config = {"task": "digits", "optimizer": "avagrad"}
    table = table_of_sweeps([Sweep("a", "a", grid(), config, {}, "minimize")])
    (row,) = texts(table)
    # All cells of the diagonal are as good: the middle one is taken, and the ridge is the diagonal.
    assert row[:9] == ["AvaGrad", "digits", "7 x 7", "49", "0:00:49", "0", "1", "1", "1.00"]
    assert row[9:12] == ["1.00", "1.00", "0.1 to 10"]
    parts = Sweep("a", "a", grid(), config, {}, "minimize").known.parts
    assert parts is not None
    assert row[12:] == [str(parts.trials), "1.00"]


def test_seeds_are_averaged_and_more_may_be_better() -> None:
    sweep = Sweep("a", "a", grid(-1.0, seeds=2), {}, {}, "maximize")
    known = sweep.known
    assert known.parts is not None
    found = known.value(known.best), known.value(known.parts.pick), len(known.cells), sweep.seconds
    assert found == (-1.5, -1.5, 49, 98.0)


def test_what_is_no_whole_grid_has_blanks() -> None:
    line = tuple(Record(lr, None, value=math.inf if lr > 2 else lr) for lr in (1, 2, 3))
    part = grid()[:-1]
    first, second = texts(table_of_sweeps([Sweep(x, x, y, {}, {}, "minimize") for x, y in (("a", line), ("b", part))]))
    assert first == ["a", "3 x 1", "3", "", "1", "1", "", "1"]
    assert second[:3] == ["b", "7 x 7", "48"]


def test_columns_in_which_all_is_blank_are_left_out() -> None:
    line = Sweep("a", "a", (Record(1, None, value=2), Record(2, None, value=3)), {}, {}, "minimize")
    table = table_of_sweeps([line])
    assert table.columns == ("method", "lr x eps", "trials", "diverged", "best lr", "best value")
    assert (texts(table), table.left) == ([["a", "2 x 1", "2", "0", "1", "2"]], 2)
    assert "ridge" not in table.caption
    whole = table_of_sweeps([line, Sweep("b", "b", grid(), {"task": "digits"}, {}, "minimize")])
    assert whole.columns == sweeps._COLUMNS
    assert (texts(whole)[0][9:], whole.left) == ([""] * 5, 3)
    assert "The ridge is the best lr at each eps" in whole.caption


@pytest.mark.parametrize(
    ("records", "best"),
    [
        ([], None),
        ([Record(1, 0.1, value=math.inf)], None),
        ([Record(lr, eps, value=math.inf) for lr in (1, 2) for eps in (1, 2)], None),
        ([Record(1, None, value=3), Record(None, 1, value=2), Record(2, 2, value=3)], Cell(None, 1.0)),
        ([Record(1, 1, value=1), Record(1, 1, value=2)], Cell(1.0, 1.0)),
        ([Record(lr, eps, value=1.7e308) for lr in (1, 2) for eps in (1, 2)], Cell(1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("direction", ["minimize", "sideways"])
def test_odd_sweeps_give_a_table(records: list[Record], best: Cell | None, direction: str) -> None:
    sweep = Sweep("a", HOSTILE, tuple(records), {"task": HOSTILE}, {}, direction)
    assert sweep.known.best == best
    assert len(table_of_sweeps([sweep]).markdown().split("\n")) == 5
    assert table_of_sweeps([]).rows == ()
