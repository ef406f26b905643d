"""The numbers behind heat maps, and that whatever is there can be drawn."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.text import Text

from avagrad.report.drawing import save
from avagrad.report.figures.heat_maps import HeatMap, caption, draw_heat_maps, heat_map, numbers, shades
from avagrad.report.known import known_of
from avagrad.report.reading import Collection, Sweep, collect
from avagrad.report.values import ticks
from avagrad.tune import Trial, tune
from avagrad.tune.records import Record
from avagrad.tune.search import replay, scores
from avagrad.tune.space import Space

PAPER = [factor * 10.0**k for k in range(-8, 3) for factor in (1, 2)][:-1]


def grid(lrs: list[float], epses: list[float], slope: float) -> list[Record]:
    """A valley whose floor is at log lr = slope log eps, and divergence above it."""
    records = []
    for lr in lrs:
        for eps in epses:
            away = math.log10(lr) - slope * math.log10(eps)
            value = math.inf if away > 3 else min(90.0, 10 + 5 * abs(away))
            records.append(Record(lr, eps, value=value, diverged_at=3 if away > 3 else None))
    return records


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_the_ridge_is_where_the_valley_is(slope: float) -> None:
    tens = [10.0**k for k in range(-8, 3)]
    found = heat_map("map", grid(tens, tens, slope))
    lowest = list(range(11)) if slope else [8] * 11
    assert list(found.ridge) == lowest
    assert found.separability is not None
    assert found.separability.slope == pytest.approx(slope, abs=1e-9)
    assert found.values[10][0] == (math.inf if slope else 20.0)
    assert found.path[0] == (5, 7)  # the middle lr, eps 0.1


def test_a_part_of_a_grid_has_holes_and_no_separability() -> None:
    found = heat_map("map", [Record(1, 0.1, value=3), Record(2, 0.2, value=4), Record(2, 0.1, value=math.inf)])
    assert found.values == ((3.0, None), (math.inf, 4.0))
    assert found.ridge == (0, None), "of one cell alone nothing can be said"
    assert found.best == (0, 0)
    assert found.separability is None
    assert found.path == ()


def test_seeds_are_averaged_and_more_may_be_better() -> None:
    records = [Record(lr, 0.1, seed, value=lr + seed) for lr in (1, 2) for seed in (0, 1)]
    found = heat_map("map", records, direction="maximize")
    assert found.values == ((1.5,), (2.5,))
    assert found.best == (1, 0)
    assert shades([found], direction="maximize") == {2.5: 0.0, 1.5: 1.0}


def test_maps_share_their_shades() -> None:
    one = heat_map("one", [Record(1, 0.1, value=1), Record(2, 0.1, value=5)])
    two = heat_map("two", [Record(1, 0.1, value=3), Record(2, 0.1, value=math.inf)])
    assert shades([one, two]) == {1.0: 0.0, 3.0: 0.5, 5.0: 1.0}
    assert shades([]) == {}


@pytest.mark.parametrize("count", [3, 12, 30])
def test_of_cells_that_tie_all_name_the_same(count: int) -> None:
    """On a part of a grid, and where points are in bins."""
    points = [(10.0**k, 10.0 ** ((7 * k) % count)) for k in range(count)]
    records = [Record(*points[0], value=2), *(Record(*point, value=1) for point in points[1:])]
    (found,) = numbers(Collection("a", sweeps=(Sweep("a", "a", tuple(records), {}, {}, "minimize"),)))
    best = known_of(records).best
    assert best is not None
    assert bool(found.records) == (count > 12)
    assert f"The best is {best}: 1." in caption(found)
    assert f"{count - 1} cells share the best value." in caption(found) or found.records


def test_few_values_are_shaded_by_value_and_many_by_rank() -> None:
    """Of the few that a search has run, one that is a little worse is not as dark as one that failed."""
    few = heat_map("few", [Record(10.0**k, 0.1, value=value) for k, value in enumerate((0.3, 0.304, 5.3))])
    assert shades([few]) == pytest.approx({0.3: 0.0, 0.304: 0.0008, 5.3: 1.0})
    scale = draw_heat_maps([few]).axes[-1]
    assert scale.get_xlabel().endswith("; colours by value")
    labels = dict(zip(scale.get_xticks(), (text.get_text() for text in scale.get_xticklabels()), strict=True))
    assert labels == {0.0: "0.3", 0.25: "1.55", 0.5: "2.8", 0.75: "4.05", 1.0: "5.3"}
    many = heat_map("many", [Record(10.0**k, eps, value=2.0**k + eps) for k in range(20) for eps in (0.1, 0.2)])
    assert list(shades([many]).values()) == pytest.approx([i / 39 for i in range(40)])
    assert draw_heat_maps([many]).axes[-1].get_xlabel().endswith("; colours by rank")
    up = heat_map("up", [Record(10.0**k, 0.1, value=k) for k in range(5)], direction="maximize")
    assert shades([up], direction="maximize") == {4.0: 0.0, 3.0: 0.25, 2.0: 0.5, 1.0: 0.75, 0.0: 1.0}
    far = heat_map("far", [Record(1, 0.1, value=-1.7e308), Record(2, 0.1, value=1.7e308), Record(3, 0.1, value=0)])
    assert shades([far]) == {-1.7e308: 0.0, 0.0: 0.5, 1.7e308: 1.0}
    assert len(draw_heat_maps([heat_map("one", [Record(1, 0.1, value=3)])]).axes[-1].get_xticks()) == 1


def test_lines_are_no_maps() -> None:
    with pytest.raises(ValueError, match="sgd: a heat map needs records with an lr and an eps"):
        heat_map("sgd", [Record(1, None, value=1)])


def test_ticks() -> None:
    assert [label for _, label in ticks(PAPER)][:3] == ["1e-8", "1e-7", "1e-6"]
    assert len(ticks([1.1**k for k in range(500)])) <= 11
    assert ticks([0.5]) == [(0, "0.5")]


NOTHING = HeatMap("nothing", (1.0,), (1.0,), ((None,),), (None,), None, (), None)


@pytest.mark.parametrize(
    "maps",
    [
        [],
        [NOTHING],
        [heat_map("one cell", [Record(1, 0.1, value=1)])],
        [heat_map("all diverged", [Record(lr, eps, value=math.inf) for lr in (1, 2) for eps in (1, 2)])],
        [heat_map("0 <script>", grid(PAPER, PAPER, 1.0)), heat_map("$x", grid(PAPER, PAPER, 0.0))],
    ],
    ids=["none", "nothing", "one cell", "all diverged", "two"],
)
def test_everything_can_be_drawn(maps: list[HeatMap], tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png"):
        save(draw_heat_maps(maps), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_search_that_was_run_has_its_path() -> None:
    """The cells of two lines and a ring alone, as a search leaves them."""
    tens = [10.0**k for k in range(-8, 3)]
    whole = grid(tens, tens, 0.0)
    path = heat_map("map", whole).path
    space = Space.of(tens, tens)
    order = replay("separable", space, scores(whole), start=space.start()).order
    part = [record for record in whole if record.point.cell in order]
    found = heat_map("map", part)
    assert len(part) < 30
    assert found.separability is None
    assert found.path == path
    assert len(path) >= 2
    assert found.subtitle == f"{len(part)} of 121 cells"
    begun = [record for record in part if record.point.cell != order[-1]]
    assert heat_map("map", begun).path == (), "a search that has not ended has none"


def test_a_search_by_lines_has_its_axes_and_its_path(tmp_path: Path) -> None:
    """As it was run, with an axis that it extended: the study says where it searched, and the records what it found."""

    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        return abs(math.log10(trial.lr) - 1) + abs(math.log10(trial.eps) + 3)

    result = tune(objective, lr="1e-4:1:5", eps="1e-8:1:9", storage=tmp_path / "mine.journal")
    (sweep,) = collect(tmp_path).sweeps
    (found,) = numbers(Collection("a", sweeps=(sweep,)))
    assert found.lr == (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0), "extended by two"
    assert len(found.eps) == 9, "all of the axis, though fewer were run"
    assert found.subtitle == f"{len(result.trials)} of 63 cells"
    path = [(found.lr[row], found.eps[column]) for row, column in found.path]
    assert path[0] == (0.01, 0.1), "the start"
    assert result.best is not None
    assert path[-1] == (result.best.lr, result.best.eps) == (10.0, 1e-3)
    assert found.way == "path of the search"
    cut = replace(sweep, records=sweep.records[:-1])
    assert numbers(Collection("a", sweeps=(cut,)))[0].path == (), "a search that has not ended has none"
    odd = replace(sweep, search={"method": "lines", "lr": "nonsense"})
    assert numbers(Collection("a", sweeps=(odd,)))[0].best is not None


def test_points_with_and_without_eps_can_be_mixed() -> None:
    mixed = [Record(1, None, value=0.5), Record(1, 0.1, value=3), Record(2, 0.1, value=4)]
    found = heat_map("map", mixed)
    assert found.values == ((3.0,), (4.0,))
    assert len(draw_heat_maps([found]).axes) == 2


def off_grid(count: int) -> list[Record]:
    draw = random.Random(0)
    points = [(10 ** draw.uniform(-4, 0), 10 ** draw.uniform(-8, 0)) for _ in range(count)]
    return [Record(lr, eps, value=abs(math.log10(lr) + 2) + 0.1 * abs(math.log10(eps))) for lr, eps in points]


@pytest.mark.parametrize(("count", "bins"), [(13, 6), (100, 12), (10_000, 24)])
def test_points_off_a_grid_are_put_into_bins(count: int, bins: int) -> None:
    records = off_grid(count)
    found = heat_map("random", records)
    assert (len(found.lr), len(found.eps), found.records) == (bins, bins, count)
    best = min(records, key=lambda record: record.value)
    assert found.best_value == best.value == min(found.finite)
    assert found.best_point == best.point.cell
    assert f"The best is {best.point.cell}: {best.value:.4g}" in caption(found)
    assert found.best is not None
    near = found.lr[found.best[0]], found.eps[found.best[1]]
    width = (4 / bins, 8 / bins)
    for middle, true, most in zip(near, best.point.cell, width, strict=True):
        assert true is not None
        assert abs(math.log10(middle / true)) <= most
    lowest = min(record.value for record in records)
    assert sum(len(row) for row in found.values) == bins * bins
    assert min(found.finite) == lowest


def test_a_long_axis_is_put_into_bins_and_a_short_one_is_not() -> None:
    found = heat_map("long", [Record(1.01**k, eps, value=k) for k in range(500) for eps in (0.1, 1.0)])
    assert (len(found.lr), found.eps) == (24, (0.1, 1.0))
    whole = heat_map("whole", [Record(1.1**k, 1.1**i, value=k) for k in range(40) for i in range(40)])
    assert whole.records == 0
    diverged = heat_map("gone", [replace(record, value=math.inf) for record in off_grid(50)])
    assert (diverged.best, diverged.finite) == (None, [])
    assert "All of them diverged" in caption(diverged)


def test_ticks_are_round() -> None:
    assert [text for _, text in ticks((0.0031623, 0.0100000706448, 0.0316, 0.1))] == ["0.01", "0.1"]
    assert [text for _, text in ticks([10.0**k for k in range(-8, 3)], 6)] == [
        "1e-8",
        "1e-6",
        "1e-4",
        "0.01",
        "1",
        "100",
    ]
    binned = heat_map("random", off_grid(1000))
    assert [text for _, text in ticks(binned.lr, bins=True)] == ["1e-3", "0.01", "0.1"]


def test_the_legend_names_what_is_on_the_map() -> None:
    tens = [10.0**k for k in range(-8, 3)]
    (legend,) = draw_heat_maps([heat_map("map", grid(tens, tens, 1.0))]).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "best cell: 10", "ridge: best lr of each eps", "path of two lines and a ring, from the square", "diverged",
    ]  # fmt: skip
    part = heat_map("map", [Record(1, 0.1, value=3), Record(2, 0.2, value=4)])
    assert [text.get_text() for text in draw_heat_maps([part]).legends[0].get_texts()] == ["best cell: 3", "not run"]


def test_text_on_a_map_can_be_read() -> None:
    """The page shows a map about as wide as it is drawn: what is 8 points high there is never 4 pixels high."""
    figure = draw_heat_maps([heat_map("map", grid(PAPER, PAPER, 1.0))])
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(float(text.get_fontsize()) for text in texts) >= 8
    assert figure.get_figwidth() <= 4.5
