"""A search that a study keeps: the report says of it what the search said when it ended."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from avagrad.report.comparable import comparable_sweeps
from avagrad.report.figures import budgets, heat_maps, sweeps
from avagrad.report.figures.heat_maps import HeatMap
from avagrad.report.findings import findings
from avagrad.report.reading import Collection, Sweep, collect
from avagrad.tune import Trial, tune
from avagrad.tune.result import Result, Verdict
from avagrad.tune.scores import scores
from avagrad.tune.separability import counted
from avagrad.tune.space import Cell
from avagrad.tune.stored_search import stored_search
from avagrad.tune.tables import tables


class Noisy:
    """A valley with so much noise that a cell's first seed often looks better than the mean of all."""

    def __init__(self, draw: int, sign: float = 1.0) -> None:
        self.draw, self.sign = draw, sign

    def __call__(self, trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        away = 0.2 * math.log10(trial.lr) ** 2 + 0.05 * (math.log10(trial.eps) + 2) ** 2
        return self.sign * (away + random.Random(f"{self.draw}{trial.key}").gauss(0, 0.3))


def search(folder: Path, draw: int = 1, *, sign: float = 1.0, **given: Any) -> Result:
    options = {"lr": "1e-4:1e3:8", "eps": "1e-8:1e2:11", "name": "mine", "about": {}, "extend": False}
    direction = "minimize" if sign > 0 else "maximize"
    return tune(Noisy(draw, sign), storage=folder / "a.journal", **{"direction": direction, **options, **given})


def read(folder: Path) -> tuple[Collection, Sweep, HeatMap]:
    collection = collect(folder)
    (sweep,), (drawn,) = collection.sweeps, heat_maps.numbers(collection)
    return collection, sweep, drawn


def at_star(drawn: HeatMap) -> Cell:
    assert drawn.best is not None
    return Cell(drawn.lr[drawn.best[0]], drawn.eps[drawn.best[1]])


def texts_of(collection: Collection) -> dict[str, str]:
    """Return the first row of the table of sweeps, by its columns."""
    table = sweeps.draw(sweeps.numbers(collection)[0])
    return dict(zip(table.columns, (cell.text for cell in table.rows[0]), strict=True))


def assert_same(folder: Path, result: Result) -> None:
    """Every part of the page that names a best point names that of the search."""
    collection, sweep, drawn = read(folder)
    assert result.best is not None
    best, trials = Cell(result.best.lr, result.best.eps), len(result.trials)
    (line,) = [line for line in findings(collection) if line.startswith("The search for")]
    assert line.startswith(f"The search for mine: {trials} trials found {best}: {result.best.value:.3g}")
    assert (f"(mean of {len(result.best.values)} seeds)" in line) == (len(result.best.values) > 1)
    assert at_star(drawn) == best
    assert drawn.path[-1] == drawn.best
    assert drawn.best_value == pytest.approx(result.best.value)
    row = texts_of(collection)
    assert float(row["best lr"]) == pytest.approx(best.lr)
    assert float(row["best eps"]) == pytest.approx(best.eps)
    assert row["trials"] == str(trials)
    assert sweep.known.value(sweep.known.best) == pytest.approx(result.best.value)


@pytest.mark.parametrize("method", ["lines", "separable"])
@pytest.mark.parametrize("draw", [1, 3, 5, 6, 12])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_search_with_several_seeds_is_told_as_it_ended(tmp_path: Path, draw: int, method: str, sign: float) -> None:
    result = search(tmp_path, draw, sign=sign, seeds=3, method=method)
    assert_same(tmp_path, result)
    (chart,) = budgets.numbers(collect(tmp_path))
    assert result.best is not None
    assert f"mine: {result.best.value:.4g} after {len(result.trials)} trials." in budgets.caption(chart)


@pytest.mark.parametrize("draw", [1, 5, 6, 12])
def test_a_grid_with_one_seed_and_then_a_search_with_three(tmp_path: Path, draw: int) -> None:
    search(tmp_path, draw, method="grid")
    result = search(tmp_path, draw, seeds=3)
    assert len(result.trials) < 88
    assert_same(tmp_path, result)
    assert read(tmp_path)[2].separability is None, "the grid has one seed, and the search three"


@pytest.mark.parametrize("draw", [1, 5, 6, 12])
def test_a_search_with_three_seeds_and_then_one_with_one(tmp_path: Path, draw: int) -> None:
    search(tmp_path, draw, seeds=3)
    assert_same(tmp_path, search(tmp_path, draw))


def test_a_search_with_other_seeds_and_margin(tmp_path: Path) -> None:
    assert_same(tmp_path, search(tmp_path, seeds=[7, 3], margin=0.2, start_lr=0.01, start_eps=1e-8))


def test_a_grid_is_measured_from_the_start_of_its_search(tmp_path: Path) -> None:
    result = search(tmp_path, method="grid", seeds=3, optimizer="adam", margin=0.1)
    collection, _, drawn = read(tmp_path)
    assert result.separability is not None
    assert result.best is not None
    assert result.separability.summary() in findings(collection)[0]
    assert f"Best: {Cell(result.best.lr, result.best.eps)}: {result.best.value:.3g}" in findings(collection)[0]
    assert len(findings(collection)) == 1
    assert at_star(drawn) == (result.best.lr, result.best.eps)
    assert (drawn.lr[drawn.path[0][0]], drawn.eps[drawn.path[0][1]]) == (0.1, 1e-8)


def shown(sweep: Sweep) -> str:
    """What `avagrad study show` prints of a study."""
    search = stored_search(sweep.search, sweep.records, sweep.direction)
    return tables(scores(sweep.records, direction=sweep.direction), direction=sweep.direction, search=search)


def test_a_study_is_shown_from_the_start_of_its_search(tmp_path: Path) -> None:
    result = search(tmp_path, method="grid", optimizer="adam", margin=0.1)
    collection, sweep, _ = read(tmp_path)
    assert result.separability is not None
    assert "from lr 0.1, eps 1e-08 find" in result.separability.summary()
    assert shown(sweep).endswith(result.separability.summary())
    assert result.separability.summary() in findings(collection)[0]
    assert "from lr 0.1, eps 0.1 find" in tables(sweep.known.cells), "of a study without a search"


@pytest.mark.parametrize("lr", ["1e-4:1e3:8", "1e-4:1e-1:4", "paper"])
def test_a_search_has_the_same_size_everywhere(tmp_path: Path, lr: str) -> None:
    """Also where it has extended an axis, and where it has run few cells of a large grid."""
    result = search(tmp_path, lr=lr, eps="paper", extend=True)
    collection, sweep, drawn = read(tmp_path)
    rows, columns = len(drawn.lr), len(drawn.eps)
    size = f"{len(result.trials)} of {rows * columns} cells"
    assert drawn.subtitle == size
    assert (rows > 4) == (lr != "1e-4:1e-1:4" or bool(result.extended))
    assert texts_of(collection)["lr x eps"] == f"{rows} x {columns}"
    assert f"{rows} lr x {columns} eps, {size}; - was not run" in shown(sweep)


def test_a_search_by_lines_is_told_in_its_own_words(tmp_path: Path) -> None:
    """It has no ring: it looks at the neighbours along the axes alone."""
    told = set()
    for draw in (1, 20):
        result = search(tmp_path / f"{draw}", draw)
        assert isinstance(result.separability, Verdict)
        (line,) = findings(collect(tmp_path / f"{draw}"))
        more = ", but two lines were not enough" if result.separability.rings > 1 else ""
        assert line.endswith(f" (no neighbour along lr or eps is better{more}).")
        told.add(more)
    assert len(told) == 2
    search(tmp_path / "ring", method="separable")
    (line,) = findings(collect(tmp_path / "ring"))
    assert "ring" in line.partition(" (")[2]


def test_a_whole_grid_and_a_search_on_it_have_a_line_each(tmp_path: Path) -> None:
    found = set()
    for draw in range(6):
        folder = tmp_path / str(draw)
        grid, result = search(folder, draw, method="grid"), search(folder, draw)
        assert grid.best is not None
        assert result.best is not None
        lines = findings(collect(folder))
        assert f" Best: {Cell(grid.best.lr, grid.best.eps)}: {grid.best.value:.3g}." in lines[0]
        if same := grid.best == result.best:
            assert len(lines) == 1
        else:
            assert_same(folder, result)
            assert lines[1].endswith(f"; the best of the grid's 88 is {Cell(grid.best.lr, grid.best.eps)}: "
                                     f"{grid.best.value:.3g}.")  # fmt: skip
        found.add(same)
    assert found == {True, False}


def test_an_unfinished_search_ranks_no_cell_above_those_with_more_seeds(tmp_path: Path) -> None:
    search(tmp_path, 1, seeds=3)
    collection, sweep, _ = read(tmp_path)
    cut = replace(sweep, records=sweep.records[:-1])
    (line,) = findings(replace(collection, sweeps=(cut,)))
    (drawn,) = heat_maps.numbers(replace(collection, sweeps=(cut,)))
    score = cut.known.cells[at_star(drawn)]
    assert score.count == 3
    assert line.startswith(f"The search for mine: {len(cut.records)} trials, the best of them {at_star(drawn)}: ")
    first = replace(sweep, records=sweep.records[:4])
    assert {score.count for score in first.known.cells.values()} == {1}
    assert first.known.best is not None


def test_a_search_has_no_path_before_its_end(tmp_path: Path) -> None:
    search(tmp_path, 5, seeds=3)
    collection, sweep, _ = read(tmp_path)
    for count in range(1, len(sweep.records)):
        cut = replace(collection, sweeps=(replace(sweep, records=sweep.records[:count]),))
        assert heat_maps.numbers(cut)[0].path == ()
        assert heat_maps.numbers(cut)[0].best is not None
        assert all(f": {counted(count, 'trial')}, the best of them" in line for line in findings(cut))


def test_a_search_over_lr_alone_has_its_pick_in_the_table(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        return abs(math.log10(trial.lr)) + random.Random(f"2{trial.key}").gauss(0, 1)

    result = tune(objective, lr="1e-4:1e3:15", seeds=3, storage=tmp_path / "a.journal", extend=False)
    collection = collect(tmp_path)
    row = texts_of(collection)
    assert result.best is not None
    assert row["trials"] == str(len(result.trials))
    assert float(row["best lr"]) == pytest.approx(result.best.lr, 1e-3)
    assert float(row["best value"]) == pytest.approx(result.best.value, 1e-3)
    assert heat_maps.numbers(collection) == []
    found = f"found {Cell(result.best.lr, None)}: {result.best.value:.3g} (mean of 3 seeds)."
    (line,) = findings(collection)
    assert line.endswith(f"objective: {len(result.trials)} trials {found}")


def test_a_first_line_that_all_diverged_has_a_sentence(tmp_path: Path) -> None:
    tune(lambda trial: math.nan, lr="1e-4:1e3:8", eps="1e-8:1e2:11", name="lost", storage=tmp_path / "a.journal")
    assert findings(collect(tmp_path)) == ["The search for lost: 8 trials of which all diverged."]
    assert [budgets.caption(chart) for chart in budgets.numbers(collect(tmp_path))] == ["No trial has a finite value."]


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_search_with_failed_points_is_told_as_it_ended(tmp_path: Path, seeds: int) -> None:
    """And its failed points are named, with the reason."""

    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        if (trial.lr > 10 or trial.eps == 1e-4) and trial.seed != 7:
            raise ValueError("too large for this machine")
        return abs(math.log10(trial.lr)) + abs(math.log10(trial.eps) + 3)

    options: dict[str, Any] = {"lr": "1e-4:1e3:8", "eps": "1e-8:1e2:11", "name": "mine", "retries": 0, "seeds": seeds}
    other = {**options, "lr": [1.0, 1000.0], "eps": [1e-4, 1e-3], "seeds": [7]}  # whose points are not of this search
    tune(objective, storage=tmp_path / "a.journal", extend=False, **other)
    result = tune(objective, storage=tmp_path / "a.journal", extend=False, **options)
    assert result.failed
    assert_same(tmp_path, result)
    (problem,) = collect(tmp_path).problems
    assert str(problem).startswith(f"a.journal: without a result: {next(iter(result.failed))} (objective raised Value")
    assert "too large for this machine" in problem.why


def test_one_trial_is_one(tmp_path: Path) -> None:
    tune(lambda trial: 3.0, lr=0.1, name="one", storage=tmp_path / "a.journal")
    assert findings(collect(tmp_path)) == ["The search for one: 1 trial found lr 0.1: 3."]
    (chart,) = budgets.numbers(collect(tmp_path))
    assert budgets.caption(chart) == "one: 3 after 1 trial."


def test_the_best_possible_share_of_0_has_no_sign(tmp_path: Path) -> None:
    tune(lambda trial: 0.0, lr="1e-3:1:4", eps=0.1, name="none", direction="maximize", storage=tmp_path / "a.journal")
    collection, sweep, drawn = read(tmp_path)
    (chart,) = budgets.numbers(collection)
    told = [
        *findings(collection),
        heat_maps.caption(drawn),
        *drawn.hover["cells-0"],
        texts_of(collection)["best value"],
    ]
    assert "-0" not in " ".join([*told, budgets.caption(chart), shown(sweep)]).split()


ODD: list[dict[str, Any]] = [
    {"method": 3}, {"method": []}, {"lr": "x"}, {"lr": []}, {"lr": {"a": 1}}, {"eps": 3}, {"seeds": 3}, {"seeds": []},
    {"seeds": [[1]]}, {"start": None}, {"start": [1]}, {"margin": -1}, {"margin": 10**400}, {"extend": None},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_odd_search_takes_nothing_from_the_page(tmp_path: Path, odd: dict[str, Any]) -> None:
    search(tmp_path, seeds=3)
    collection, sweep, _ = read(tmp_path)
    given = replace(collection, sweeps=(replace(sweep, search=dict(sweep.search) | odd),))
    assert len(findings(given)) == 1
    assert heat_maps.numbers(given)[0].best is not None
    assert budgets.numbers(given)[0].lines


def test_a_cell_says_of_how_many_seeds_it_is_the_mean(tmp_path: Path) -> None:
    result = search(tmp_path, seeds=3)
    drawn = read(tmp_path)[2]
    assert result.best is not None
    (best,) = [text for text in drawn.hover["cells-0"] if text.endswith("the best")]
    assert f"{result.best.value:.5g}, mean of 3 seeds, the best" in best
    assert sum("1 seed" in text for text in drawn.hover["cells-0"]) > 3


def test_points_in_bins_have_the_star_where_the_search_ended(tmp_path: Path) -> None:
    result = search(tmp_path, 5, seeds=3, method="separable", lr="1e-4:1e3:50")
    drawn = read(tmp_path)[2]
    assert result.best is not None
    assert drawn.records
    assert drawn.best_point == (result.best.lr, result.best.eps)
    assert drawn.best_value == pytest.approx(result.best.value)


# --- what may be compared ---


def test_studies_of_different_objectives_share_no_scale(tmp_path: Path) -> None:
    for name, about in (("a", {"objective": "f"}), ("b", {"objective": "g"}), ("c", {"objective": "f"})):
        search(tmp_path / name, name=name, about=about)
        (tmp_path / name / "a.journal").rename(tmp_path / f"{name}.journal")
    collection = collect(tmp_path)
    assert [chart.title for chart in budgets.numbers(collection)] == ["a, c", "b"]
    assert {drawn.name: drawn.title for drawn in heat_maps.numbers(collection)} == {"a": "a, c", "c": "a, c", "b": "b"}


def adam(trial: Trial) -> float:
    return 2 + abs(math.log10(trial.lr or 1))


def objective(trial: Trial) -> float:
    return 1 + abs(math.log10(trial.lr or 1) + 1)


def test_functions_of_one_module_share_a_heading_and_a_scale(tmp_path: Path) -> None:
    """As `avagrad tune mine:adam` and `avagrad tune mine:objective` leave them."""
    for each in (adam, objective):
        tune(each, lr="1e-3:1:4", eps="1e-8:1:3", storage=tmp_path / f"{each.__name__}.journal")
    tune(adam, lr="1e-3:1:4", eps=1, direction="maximize", storage=tmp_path / "up.journal")
    tune(adam, lr="1e-3:1:4", eps=1, about={"epochs": 3}, storage=tmp_path / "longer.journal")
    maps = heat_maps.numbers(collect(tmp_path))
    by_title: dict[str, list[HeatMap]] = {}
    for drawn in maps:
        by_title.setdefault(drawn.title, []).append(drawn)
    (one, other), *others = sorted(by_title.values(), key=len, reverse=True)
    assert [len(each) for each in others] == [1, 1]
    assert sorted(drawn.name.rpartition(":")[2] for drawn in (one, other)) == ["adam", "objective"]
    assert one.shade == other.shade
    assert {1.0, 2.0} <= one.shade.keys()
    for chart in budgets.numbers(collect(tmp_path)):
        assert len({line.label for line in chart.lines}) == len(chart.lines)


def test_searches_of_other_modules_are_apart(tmp_path: Path) -> None:
    """In a folder for all: functions of one module may be compared, of several modules not."""
    for name in ("lstm:objective", "cnn:objective", "cnn:objective-2"):
        search(tmp_path / name.replace(":", "-"), name=name)
        (tmp_path / name.replace(":", "-") / "a.journal").rename(tmp_path / f"{name.replace(':', '-')}.journal")
    groups = comparable_sweeps(collect(tmp_path).sweeps)
    assert sorted(sorted(sweep.name for sweep in group) for _, group in groups) == [
        ["cnn:objective", "cnn:objective-2"],
        ["lstm:objective"],
    ]
