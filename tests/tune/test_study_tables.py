"""Tables of what is known, on one grid or on several."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from avagrad.tune.scores import Score
from avagrad.tune.space import Cell
from avagrad.tune.tables import grids, tables, whole_grid

Line = frozenset[float | None]
VALUES = st.sampled_from([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])
AXIS = st.one_of(st.just(frozenset([None])), st.frozensets(VALUES, min_size=1))
GRID = st.tuples(AXIS, AXIS).filter(lambda axes: set().union(*axes) != {None})


def grid(lrs: "list[float | None]", epses: "list[float | None]") -> dict[Cell, Score]:
    """Return a grid on which lr 1 and eps 0.01 are the best."""
    cells = itertools.starmap(Cell, itertools.product(lrs, epses))
    return {cell: Score(abs(math.log10(cell.lr or 1)) + abs(math.log10(cell.eps or 1) + 2)) for cell in cells}


def test_two_grids_that_share_values_are_one_table() -> None:
    known = grid([0.01, 0.1], [0.1, 1]) | grid([0.1, 1], [0.01, 0.1])
    assert grids(known) == [known]
    *lines, parts = tables(known).splitlines()
    assert lines == [
        "3 lr x 3 eps, 7 of 9 cells; - was not run",
        "lr \\ eps  0.01  0.1  1",
        "    0.01     -    3  4",
        "     0.1     1    2  3",
        "       1     0    1  -",
    ]
    assert parts.startswith("2 lr x 2 eps of these are complete. The best lr is 1 over eps from 0.01 to 0.1 (")


def test_two_grids_that_share_none_are_two_tables() -> None:
    first, second = grid([0.01, 0.1], [0.1, 1]), grid([3, 30], [0.03, 0.3])
    assert grids(first | second) == [first, second]
    assert tables(first).startswith("2 lr x 2 eps\n")


def test_a_line_over_lr_alone_is_a_table_of_its_own() -> None:
    plane, line = grid([0.1, 1], [0.1, 1]), grid([0.1, 1, 10], [None])
    assert grids(plane | line) == [plane, line]
    assert tables(line).splitlines() == ["3 lr", " lr  value", "0.1      3", "  1      2", " 10      3"]
    assert tables(grid([None], [0.01, 0.1])).splitlines() == ["2 eps", " eps  value", "0.01      0", " 0.1      1"]


def test_cells_that_share_nothing_are_a_list() -> None:
    known = {Cell(3.0, 0.3): Score(5), Cell(1.0, 0.1): Score(2), Cell(2.0, None): Score(math.inf)}
    square = grid([0.1, 10], [0.01, 1])
    assert grids(known | square) == [square, known]
    assert tables(known).splitlines() == [
        "3 single cells; inf diverged",
        "2    lr 1, eps 0.1",
        "5    lr 3, eps 0.3",
        "inf  lr 2",
    ]


def test_what_diverged_or_was_pruned_is_marked() -> None:
    known = {Cell(1.0, None): Score(math.inf), Cell(2.0, None): Score(-0.5, pruned=True), Cell(3.0, None): Score(-0.25)}
    assert tables(known, direction="maximize").splitlines() == [
        "3 lr; -inf diverged; * was pruned",
        "lr  value",
        " 1   -inf",
        " 2   0.5*",
        " 3   0.25",
    ]


def test_values_have_three_digits_or_all_before_the_point() -> None:
    known = {Cell(lr, None): Score(loss) for lr, loss in ((1.0, 0.12345), (2.0, 1234.5), (3.0, 1e5), (4.0, -0.5))}
    assert [line.split()[1] for line in tables(known).splitlines()[2:]] == ["0.123", "1234", "1e+05", "-0.5"]


def test_a_mean_over_seeds_is_called_so() -> None:
    known = {Cell(1.0, None): Score(0.5, count=3), Cell(2.0, None): Score(0.25)}
    assert tables(known).splitlines()[0] == "2 lr; means over 1 to 3 seeds"
    known = {Cell(1.0, None): Score(0.5, count=3)}
    assert tables(known).splitlines() == ["1 single cell; means over 3 seeds", "0.5  lr 1"]


def test_columns_that_do_not_fit_go_below() -> None:
    known = grid([0.1, 1], [1e-4, 1e-3, 1e-2, 0.1, 1])
    lines = tables(known, width=30).splitlines()
    assert lines[1:-1] == [
        "lr \\ eps  0.0001  0.001  0.01",
        "     0.1       3      2     1",
        "       1       2      1     0",
        "",
        "lr \\ eps  0.1  1",
        "     0.1    2  3",
        "       1    1  2",
    ]
    assert len(tables(known, width=1).split("\n\n")) == 5  # one column each, however wide


def test_values_that_look_alike_are_told_apart() -> None:
    assert tables(grid([1.00001, 1.00002], [None])).splitlines()[2:] == ["1.00001      2", "1.00002      2"]


def test_the_whole_grid_is_the_one_with_the_best_cell() -> None:
    low, high = grid([0.001, 0.01, 0.1], [0.01, 0.1, 1]), grid([0.01, 0.1, 1], [0.01, 0.1])
    space = whole_grid(low | high)
    assert space is not None
    assert set(space.cells()) == {cell for cell in low | high if cell.eps != 1}  # 8 cells; low has 9, but not the best
    space = whole_grid(low | {Cell(1.0, 0.001): Score(0)})  # which is on no grid
    assert space is not None
    assert set(space.cells()) == low.keys()
    whole = whole_grid(grid([0.01, 0.1, 1], [0.1, 1]) | grid([0.01, 0.1, 1], [0.01]))
    assert whole is not None
    assert whole.shape == (3, 3)


def test_a_cross_is_no_grid() -> None:
    lrs: list[float | None] = [1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, 1e3, 1e4]
    cross = grid(lrs, [0.01]) | grid([1.0], lrs)
    assert whole_grid(cross) is None
    assert whole_grid(cross | grid([0.1, 1, 10], [0.001, 0.01, 0.1])) is None  # the ring around its best cell
    assert whole_grid(grid(lrs, [None])) is None


@given(st.lists(GRID, min_size=1, max_size=4))
def test_no_cell_is_lost_whatever_the_grids(
    axes: "list[tuple[frozenset[float | None], frozenset[float | None]]]",
) -> None:
    known: dict[Cell, Score] = {}
    for lrs, epses in axes:
        known |= grid([*lrs], [*epses])
    losses = itertools.count(101)
    known = {cell: Score(next(losses)) for cell in known}  # three digits each, none twice
    parts = grids(known)
    assert sorted(itertools.chain.from_iterable(parts), key=str) == sorted(known, key=str)
    for part in parts:
        assert part.items() <= known.items()
        text = tables(part, width=40)
        assert all(f" {known[cell].loss:g}" in text or f"\n{known[cell].loss:g}  " in text for cell in part)
        space = whole_grid(part)
        assert space is None or (set(space.cells()) <= part.keys() and 2 * len(space) >= len(part))


@given(*[st.frozensets(VALUES, min_size=2)] * 4)
def test_of_two_grids_one_is_always_found(
    lrs: frozenset[float], epses: frozenset[float], more: frozenset[float], others: frozenset[float]
) -> None:
    known = grid([*lrs], [*epses]) | grid([*more], [*others])
    assert any(whole_grid(part) is not None for part in grids(known))
