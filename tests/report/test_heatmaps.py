"""The numbers behind heat maps, and that whatever is there can be drawn."""

import math
from pathlib import Path

import pytest

from avagrad.report.figures import draw_heat_maps, save
from avagrad.report.heatmaps import HeatMap, heat_map, shades, space_of, ticks
from avagrad.tune.records import Record
from avagrad.tune.search import replay, scores

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


def test_lines_are_no_maps() -> None:
    with pytest.raises(ValueError, match="sgd: a heat map needs records with an lr and an eps"):
        heat_map("sgd", [Record(1, None, value=1)])


def test_ticks() -> None:
    assert [label for _, label in ticks(PAPER)][:3] == ["1e-8", "1e-7", "1e-6"]
    assert len(ticks([1.1**k for k in range(500)])) <= 11
    assert ticks([0.5]) == [(0, "0.5")]


NOTHING = HeatMap("nothing", (1.0,), (1.0,), ((None,),), (None,), None, (), None)


@pytest.mark.parametrize("look", ["light", "dark"])
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
def test_everything_can_be_drawn(maps: list[HeatMap], look: str, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png"):
        save(draw_heat_maps(maps, look=look), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_search_that_was_run_has_its_path() -> None:
    """The cells of two lines and a ring alone, as a search leaves them."""
    tens = [10.0**k for k in range(-8, 3)]
    whole = grid(tens, tens, 0.0)
    path = heat_map("map", whole).path
    space = space_of(whole)
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
