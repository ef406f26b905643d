"""Searches: against a second telling of the rules in plain indices, on landscapes made by hand and at random."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avagrad.tune.records import Record
from avagrad.tune.scores import best_so_far
from avagrad.tune.search import METHODS, Plan, Score, best, better, plan, replay, scores
from avagrad.tune.space import Cell, Space, axis

PAPER = Space(axis("paper", "lr"), axis("paper", "eps"))
SMALL = Space(axis("1e-3:1e3:7", "lr"), axis("1e-8:1:9", "eps"))
DIVERGED = Score(math.inf)


def logs(cell: Cell) -> tuple[float, float]:
    assert cell.lr is not None
    assert cell.eps is not None
    return math.log10(cell.lr), math.log10(cell.eps)


def landscape(space: Space, loss: Callable[[float, float], float]) -> dict[Cell, Score]:
    """Return a score for each cell, from a function of log10 lr and log10 eps."""
    return {cell: Score(loss(*logs(cell))) for cell in space.cells()}


# --- the oracle ----------------------------------------------------------------------------------


class Told(NamedTuple):
    pick: tuple[int, int] | None
    paid: set[tuple[int, int]]
    rings: int


def oracle(method: str, table: list[list[Score]], start: tuple[int, int], margin: float) -> Told:
    """Tell a search again, on a table of at least 2 x 2 scores, with loops."""
    rows, columns = len(table), len(table[0])
    paid: set[tuple[int, int]] = set()

    def value(place: tuple[int, int]) -> tuple[int, float]:
        paid.add(place)
        score = table[place[0]][place[1]]
        return (2, 0.0) if score.loss == math.inf else (int(score.pruned), score.loss)

    def scored(place: tuple[int, int]) -> float:
        return table[place[0]][place[1]].loss

    def winner(places: list[tuple[int, int]]) -> tuple[int, int] | None:
        lowest = min(value(place) for place in places)
        if lowest[0] == 2:
            return None
        tied = [place for place in places if value(place) == lowest]
        tied_rows = sorted({row for row, _ in tied})
        row = tied_rows[(len(tied_rows) - 1) // 2]
        tied_columns = sorted(column for r, column in tied if r == row)
        return row, tied_columns[(len(tied_columns) - 1) // 2]

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        (kind_a, loss_a), (kind_b, loss_b) = value(a), value(b)
        if kind_a != kind_b:
            return kind_a < kind_b
        noise = math.sqrt(table[a[0]][a[1]].error ** 2 + table[b[0]][b[1]].error ** 2)
        return kind_a < 2 and loss_a < loss_b and loss_a + margin + noise < loss_b

    def lr_line(column: int) -> list[tuple[int, int]]:
        return [(row, column) for row in range(rows)]

    def eps_line(row: int) -> list[tuple[int, int]]:
        return [(row, column) for column in range(columns)]

    if method == "grid":
        return Told(winner([(r, c) for r in range(rows) for c in range(columns)]), paid, 0)

    def ends_to_pass(line: list[tuple[int, int]], coarse: list[int], taken: set[int]) -> list[int]:
        """The places beyond which a line over lr goes on: its best so far, or all while every one has failed."""
        won = winner([line[coarse[k]] for k in sorted(taken)])
        return list(taken) if won is None or len(taken) == 1 else [coarse.index(line.index(won))]

    def coarse_to_fine(line: list[tuple[int, int]], at: int, name: str) -> tuple[int, int] | None:
        stride = 4 if len(line) > 16 else 2
        coarse = list(range(at % stride, len(line), stride))
        if name == "lr":  # outward, one at a time, until the best so far has a neighbour on each side
            i = coarse.index(at)
            taken = {i}
            while wanted := {
                k
                for k in range(len(coarse))
                if k not in taken and any(abs(k - j) == 1 for j in ends_to_pass(line, coarse, taken))
            }:
                taken |= wanted
            coarse = [coarse[k] for k in sorted(taken)]
        first = winner([line[i] for i in coarse])
        if first is None:
            return winner(line)
        k = coarse.index(line.index(first))
        losses = [value(line[i]) for i in coarse]
        dip = [
            line[coarse[i]]
            for i in range(len(coarse))
            if abs(i - k) > 1
            and (i == 0 or losses[i] <= losses[i - 1])
            and (i == len(coarse) - 1 or losses[i] <= losses[i + 1])
        ]
        second = winner(dip) if dip and name == "eps" else None
        if second is not None:  # only if it is above the best by no more than the height of its walls
            at_second = coarse.index(line.index(second))
            walls = [scored(line[coarse[i]]) for i in (at_second - 1, at_second + 1) if 0 <= i < len(coarse)]
            if scored(second) - scored(first) > max(walls) - scored(second):
                second = None
        found = []
        for place in filter(None, (first, second)):
            for step in [2, 1] if stride == 4 else [1]:
                i = line.index(place)
                near = winner([line[n] for n in (i - step, i, i + step) if 0 <= n < len(line)])
                assert near is not None
                place = near
            found.append(place)
        return winner(found)

    by_lr = winner(lr_line(start[1])) if method == "separable" else coarse_to_fine(lr_line(start[1]), start[0], "lr")
    if by_lr is None:
        return Told(None, paid, 0)
    line = eps_line(by_lr[0])
    pick = winner(line) if method == "separable" else coarse_to_fine(line, start[1], "eps")
    assert pick is not None
    for rings in range(1, 1000):
        row, column = pick
        ring = [
            (r, c)
            for r in range(max(row - 1, 0), min(row + 2, rows))
            for c in range(max(column - 1, 0), min(column + 2, columns))
            if (r, c) != pick and (method == "separable" or r == row or c == column)
        ]
        won = [place for place in ring if beats(place, pick)]
        if not won:
            return Told(pick, paid, rings)
        to = winner(won)
        assert to is not None
        pick = winner(eps_line(to[0])) if method == "separable" else to
        assert pick is not None
    raise AssertionError("the search does not end")


# Few values, so that there are many ties.
some_scores = st.builds(
    Score,
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0, math.inf]) | st.floats(-10, 10),
    st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    st.just(3),
    st.sampled_from([False, False, False, True]),
)


class Case(NamedTuple):
    space: Space
    known: dict[Cell, Score]
    start: Cell
    margin: float


@st.composite
def cases(draw: st.DrawFn, least: int = 1, absent: bool = True) -> Case:
    lengths = st.integers(least, 6) | st.integers(15, 18)
    lr, eps = (axis([float(i) for i in range(1, 1 + draw(lengths))], name) for name in ("lr", "eps"))
    gone = draw(st.sampled_from(["", "", "lr", "eps"])) if absent else ""
    space = Space(None if gone == "lr" else lr, None if gone == "eps" else eps)
    table = draw(st.lists(some_scores, min_size=len(space), max_size=len(space)))
    start = draw(st.sampled_from(space.cells()))
    return Case(space, dict(zip(space.cells(), table, strict=True)), start, draw(st.sampled_from([0.0, 0.0, 0.15])))


methods = st.sampled_from(list(METHODS))


@settings(max_examples=300)
@given(method=methods, case=cases(least=2, absent=False))
def test_searches_against_the_oracle(method: str, case: Case) -> None:
    space = case.space
    rows, columns = space.shape
    cells = iter(space.cells())
    table = [[case.known[next(cells)] for _ in range(columns)] for _ in range(rows)]
    expected = oracle(method, table, space.indices(case.start), case.margin)
    found = replay(method, space, case.known, start=case.start, margin=case.margin)
    assert (None if found.pick is None else space.indices(found.pick)) == expected.pick
    assert {space.indices(cell) for cell in found.order} == expected.paid
    assert found.rings == expected.rings


@settings(max_examples=300)
@given(method=methods, case=cases(), data=st.data())
def test_a_search_asks_for_nothing_twice_and_ends_with_a_pick_that_no_neighbour_beats(
    method: str, case: Case, data: st.DataObject
) -> None:
    space, known, start, margin = case
    # Some cells are known from elsewhere, and answers come in any order, some at a time.
    paid = {cell: known[cell] for cell in data.draw(st.lists(st.sampled_from(space.cells()), unique=True))}
    for _ in range(len(space) + 1):
        now = plan(method, space, paid, start=start, margin=margin)
        assert not set(now.cells) & set(paid)
        assert len(set(now.cells)) == len(now.cells)
        assert set(now.cells) <= set(space.cells())
        assert len(now.cells) <= now.at_most <= len(space)
        assert now.done == (not now.cells)
        assert now.path[0] == start
        assert now.pick is None or now.pick in paid
        assert now.pick is None or not paid[now.pick].failed
        if now.done:
            break
        for cell in data.draw(st.lists(st.sampled_from(now.cells), min_size=1, unique=True)):
            paid[cell] = known[cell]
    assert now.done
    if now.pick is None:
        assert now.confirmed is None
        assert "diverged or failed" in now.stage
        return
    assert now.path[-1] == now.pick
    assert now.confirmed is (None if method == "grid" and 1 not in space.shape else True)
    for near in space.neighbours(now.pick):
        on_a_line = near.lr == now.pick.lr or near.eps == now.pick.eps
        assert (method == "lines" and not on_a_line) or not better(known[near], known[now.pick], margin)
    # What was known beforehand changes what is paid, never what is found.
    alone = replay(method, space, known, start=start, margin=margin)
    assert (alone.pick, alone.path, alone.confirmed, alone.rings) == (now.pick, now.path, now.confirmed, now.rings)


@given(case=cases(least=2, absent=False))
def test_where_the_first_ring_confirms_no_search_pays_more_than_it_said(case: Case) -> None:
    for method in METHODS:
        found = replay(method, case.space, case.known, start=case.start, margin=case.margin)
        first = plan(method, case.space, {}, start=case.start, margin=case.margin)
        assert found.trials <= first.at_most or found.rings > 1
        if method == "grid":
            assert found.trials == first.at_most == len(case.space)


# --- landscapes by hand --------------------------------------------------------------------------


@pytest.mark.parametrize("best_eps", [-8, -5, 1])
def test_a_separable_landscape_takes_two_lines_and_a_ring(best_eps: int) -> None:
    known = landscape(PAPER, lambda lr, eps: (lr - 0) ** 2 + (eps - best_eps) ** 2 / 10)
    found = replay("separable", PAPER, known, start=PAPER.start())
    grid = replay("grid", PAPER, known, start=PAPER.start())
    assert found.pick == grid.pick == Cell(1, 10.0**best_eps)
    assert found.score == known[found.pick]
    assert found.trials == (47 if best_eps > -8 else 45)  # at the border a ring has two cells fewer
    assert (found.confirmed, found.rings) == (True, 1)
    assert found.path == (Cell(0.05, 0.1), Cell(1, 0.1), Cell(1, 10.0**best_eps))
    assert (grid.trials, grid.confirmed, grid.rings) == (441, None, 0)
    for one in (found, grid):
        losses = [known[cell].loss for cell in one.order]
        assert list(one.curve) == [min(losses[: i + 1]) for i in range(one.trials)]


def test_the_stages_of_a_separable_search() -> None:
    known = landscape(PAPER, lambda lr, eps: lr**2 + (eps + 5) ** 2)
    paid: dict[Cell, Score] = {}
    seen: list[Plan] = []
    while not seen or not seen[-1].done:
        seen.append(plan("separable", PAPER, paid, start=PAPER.start()))
        paid |= {cell: known[cell] for cell in seen[-1].cells}
    assert [(now.stage, len(now.cells), str(now.pick), now.confirmed, now.at_most) for now in seen] == [
        ("line over lr at eps 0.1", 21, "None", None, 47),
        ("line over eps at lr 1", 20, "lr 1, eps 0.1", None, 47),
        ("ring around lr 1, eps 1e-05", 6, "lr 1, eps 1e-05", None, 47),
        ("ring around lr 1, eps 1e-05", 0, "lr 1, eps 1e-05", True, 47),
    ]


def test_the_stages_of_a_search_by_lines() -> None:
    space = Space(axis("1e-6:1:13", "lr"), axis("1e-8:100:11", "eps"))
    known = landscape(space, lambda lr, eps: (lr + 2) ** 2 + (eps + 5) ** 2)
    paid: dict[Cell, Score] = {}
    seen: list[Plan] = []
    while not seen or not seen[-1].done:
        seen.append(plan("lines", space, paid, start=space.start()))
        paid |= {cell: known[cell] for cell in seen[-1].cells}
    assert [(now.stage, len(now.cells), str(now.pick), now.coarse, now.at_most) for now in seen] == [
        ("line over lr at eps 0.1", 3, "None", True, 20),
        ("line over lr at eps 0.1", 1, "lr 0.01, eps 0.1", True, 20),
        ("line over lr at eps 0.1", 2, "lr 0.01, eps 0.1", False, 17),
        ("line over eps at lr 0.01", 4, "lr 0.01, eps 0.1", True, 16),
        ("line over eps at lr 0.01", 2, "lr 0.01, eps 1e-05", False, 14),
        ("neighbours of lr 0.01, eps 1e-05", 2, "lr 0.01, eps 1e-05", False, 14),
        ("neighbours of lr 0.01, eps 1e-05", 0, "lr 0.01, eps 1e-05", False, 14),
    ]
    assert seen[-1].path == (Cell(0.001, 0.1), Cell(0.01, 0.1), Cell(0.01, 1e-5))
    assert (seen[-1].confirmed, seen[-1].rings) == (True, 1)


@st.composite
def valleys(draw: st.DrawFn) -> tuple[Space, dict[Cell, Score], Cell, Cell]:
    """A loss that is the sum of two valleys, one along each axis; where it is lowest, and a start."""
    rows, columns = (draw(st.sampled_from([7, 9, 11, 13, 21])) for _ in range(2))
    space = Space(axis(list(range(1, rows + 1)), "lr"), axis(list(range(1, columns + 1)), "eps"))
    lowest = draw(st.sampled_from(space.cells()))
    slopes = [draw(st.floats(0.1, 10)) for _ in range(4)]

    def depth(value: float, bottom: float, left: float, right: float) -> float:
        return (bottom - value) * left if value < bottom else (value - bottom) * right

    known = {
        cell: Score(
            depth(cell.lr or 0, lowest.lr or 0, *slopes[:2]) + depth(cell.eps or 0, lowest.eps or 0, *slopes[2:])
        )
        for cell in space.cells()
    }
    return space, known, lowest, draw(st.sampled_from(space.cells()))


@given(case=valleys())
def test_lines_find_the_bottom_of_two_valleys_from_anywhere(
    case: tuple[Space, dict[Cell, Score], Cell, Cell],
) -> None:
    space, known, lowest, start = case
    found = replay("lines", space, known, start=start)
    assert (found.pick, found.rings) == (lowest, 1)
    assert found.trials <= {(13, 11): 18, (13, 13): 19, (21, 21): 22}.get(space.shape, 22)
    assert found.trials <= plan("lines", space, {}, start=start).at_most


def test_coarse_values_of_lr_are_taken_outward_until_the_best_is_between_worse_ones() -> None:
    line = Space(axis(range(1, 14), "lr"), None)

    def order(*losses: float) -> list[float | None]:
        known = {cell: Score(loss) for cell, loss in zip(line.cells(), losses, strict=True)}
        return [cell.lr for cell in replay("lines", line, known, start=Cell(7.0, None)).order]

    assert order(*(abs(i - 7) for i in range(1, 14))) == [5, 7, 9, 6, 8]
    assert order(*(abs(i - 4) for i in range(1, 14))) == [5, 7, 9, 3, 1, 2, 4]  # the first of the tied 3 and 5
    assert order(*(i for i in range(1, 14))) == [5, 7, 9, 3, 1, 2]
    # While all have failed, both ways.
    assert order(*(math.inf if i < 11 else i for i in range(1, 14))) == [5, 7, 9, 3, 11, 13, 10, 12]


def test_a_second_dip_that_is_too_shallow_is_not_refined() -> None:
    space = Space(axis([1, 2, 3], "lr"), axis(range(1, 14), "eps"))

    def trials(dip: float) -> int:
        along = [1.0, 1.0, 0.9, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, dip, dip, 1.0]  # the lowest at 3, another at 11
        known = {cell: Score(along[int(cell.eps or 0) - 1] + abs((cell.lr or 0) - 2)) for cell in space.cells()}
        return replay("lines", space, known, start=Cell(2.0, 1.0)).trials

    assert trials(0.96) == 3 + 6 + 2 + 2
    assert trials(0.94) == 3 + 6 + 2 + 2 + 2


def test_a_second_dip_along_eps_is_followed_up() -> None:
    space = Space(axis([1, 2, 3], "lr"), axis(range(1, 14), "eps"))
    along = [9.0, 8.0, 7.0, 5.0, 6.0, 1.0, 5.5, 8.0, 7.0, 6.0, 5.0, 4.5, 4.0]  # a wide dip at 13, a narrow one at 6
    known = {cell: Score(along[int(cell.eps or 0) - 1] + abs((cell.lr or 0) - 2)) for cell in space.cells()}
    found = replay("lines", space, known, start=Cell(2.0, 1.0))
    assert found.pick == Cell(2.0, 6.0)
    assert found.trials == 3 + 6 + (1 + 2) + 2


def test_coarse_values_need_one_seed() -> None:
    space = Space(axis("1e-3:1e3:7", "lr"), axis("1e-8:1:9", "eps"))
    known = landscape(space, lambda lr, eps: lr**2 + (eps + 4) ** 2)
    one: dict[Cell, Score] = {}
    every: dict[Cell, Score] = {}
    while not (now := plan("lines", space, every, by_first_seed=one, start=space.start())).done:
        one |= {cell: known[cell] for cell in now.cells}
        if not now.coarse:
            every |= {cell: known[cell] for cell in now.cells}
    assert now.pick == Cell(1, 1e-4)
    along_lr = {Cell(lr, 0.1) for lr in (0.1, 1, 10)}
    along_eps = {Cell(1, eps) for eps in (1e-6, 1e-5, 1e-4, 1e-3)}
    assert set(every) == along_lr | along_eps | {Cell(0.1, 1e-4), Cell(10, 1e-4)}
    assert set(one) - set(every) == {Cell(0.01, 0.1), Cell(100, 0.1), Cell(1, 1e-7)}


def test_a_lucky_first_seed_is_found_out() -> None:
    """The best by the first seed alone is not picked where its other seeds are bad."""
    line = Space(axis([1, 2, 3, 4, 5], "lr"), None)
    first = {Cell(lr, None): Score(loss) for lr, loss in ((1.0, 0.5), (2.0, 0.4), (3.0, 0.1), (4.0, 0.6), (5.0, 0.9))}
    every = first | {Cell(3.0, None): Score(0.7, 0.3, 3)}
    now = plan("lines", line, every, by_first_seed=first, start=Cell(3.0, None))
    assert (now.done, now.pick) == (True, Cell(2.0, None))


@pytest.mark.parametrize("values", [[1e-3, 1e-2], [1e-4, 1e-3, 1e-2]], ids=str)
def test_an_axis_is_not_extended_where_all_values_are_level(values: list[float]) -> None:
    space = Space(axis(values, "lr"), axis(values, "eps"))
    known = {cell: Score(1.0) for cell in space.cells()}
    found = plan("lines", space, known, start=space.start(), extend=True)
    assert found.done
    assert found.space == space


def test_an_axis_is_extended_where_the_pick_is_at_its_end() -> None:
    space = Space(axis("0.1:10:5", "lr"), axis("1e-4:1:5", "eps"))

    def found(best_lr: float, extend: bool) -> Plan:
        known: dict[Cell, Score] = {}
        while not (now := plan("lines", space, known, start=space.start(), extend=extend)).done:
            for cell in now.cells:
                lr, eps = logs(cell)
                known[cell] = Score((lr - best_lr) ** 2 + (eps + 2) ** 2)
        return now

    assert found(1.5, extend=False).pick == Cell(10, 0.01)
    inside = found(0.5, extend=True)
    assert (inside.pick, inside.space) == (Cell(3.16227766017, 0.01), space)
    once = found(1.5, extend=True)
    assert (once.pick, once.confirmed) == (Cell(31.6227766017, 0.01), True)
    assert once.space.lr is not None
    assert once.space.lr.values[-2:] == (31.6227766017, 100.0)
    assert once.space.eps == space.eps
    twice = found(9.0, extend=True)  # and no third time
    assert twice.pick == Cell(1000, 0.01)
    down = found(-1.4, extend=True)
    assert down.pick == Cell(0.0316227766017, 0.01)


def test_an_axis_continues_as_it_is_spaced() -> None:
    lr, eps = axis("paper", "lr"), axis("paper", "eps")
    assert lr is not None
    assert eps is not None
    assert lr.extended(5e3).values[-3:] == (5e3, 1e4, 5e4)
    assert lr.extended(5e-7).values[:3] == (5e-8, 1e-7, 5e-7)
    assert eps.extended(100.0).values[-3:] == (100, 200, 1000)
    assert eps.extended(0.1) == eps
    for first in (1e-6, 1e-5, 1e-4):  # not below 1e-8, also where that is not a value of the axis
        for count in range(3, 20):
            line = axis(f"{first}:1:{count}", "eps")
            assert line is not None
            longer = line.extended(first)
            assert longer.values[0] >= 1e-8
            assert len(longer) > len(line)
    assert axis(1.0, "lr").extended(1.0).values == (1.0,)  # type: ignore[union-attr]
    assert axis([1e290, 1e300], "lr").extended(1e300).values == (1e290, 1e300)  # type: ignore[union-attr]


def test_a_ridge_makes_the_search_walk() -> None:
    """Only lr / eps matters, almost: each ring finds a neighbour further up the ridge."""
    space = Space(axis("1e-4:1e4:9", "lr"), axis("1e-4:1e4:9", "eps"))
    known = landscape(space, lambda lr, eps: (lr - eps) ** 2 - 0.01 * (lr + eps))
    found = replay("separable", space, known, start=space.start(start_eps=1e-4))
    assert found.pick == Cell(1e4, 1e4)
    assert found.rings == 9
    assert found.path == (Cell(1, 1e-4), *(Cell(10.0**k, 10.0**k) for k in range(-4, 5)))
    walking = plan("separable", space, {c: known[c] for c in found.order[:30]}, start=space.start(start_eps=1e-4))
    assert (walking.confirmed, walking.done) == (False, False)
    # Where the climb is less than the margin, the first ring is content.
    content = replay("separable", space, known, start=space.start(start_eps=1e-4), margin=0.03)
    assert (content.pick, content.rings) == (Cell(1e-4, 1e-4), 1)


def test_the_middle_of_a_plateau() -> None:
    known = landscape(SMALL, lambda lr, eps: float(not (-2 <= lr <= 1 and -6 <= eps <= -3)))
    found = replay("separable", SMALL, known, start=SMALL.start(start_eps=1e-4))
    assert found.pick == Cell(0.1, 1e-5)  # the lower of two middles, on both axes
    assert found.rings == 1
    assert replay("grid", SMALL, known, start=SMALL.start()).pick == Cell(0.1, 1e-5)


def test_the_best_of_a_grid_with_ties_in_no_shape() -> None:
    space = Space(axis([1, 2, 3, 4], "lr"), axis([1, 2, 3], "eps"))
    known = dict.fromkeys(space.cells(), Score(1.0))
    for lr, eps in ((1, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 3)):
        known[Cell(lr, eps)] = Score(0.5)
    assert best(space.cells(), known) == Cell(3, 1)


def test_pruned_cells_come_after_complete_ones_and_failed_ones_last() -> None:
    line = [Cell(float(i), None) for i in range(1, 5)]
    known = {line[0]: Score(0.1, pruned=True), line[1]: Score(0.9), line[2]: DIVERGED, line[3]: Score(1.0)}
    assert best(line, known) == line[1]
    assert best([line[0], line[2]], known) == line[0]
    assert best([line[2]], known) is None
    assert best([], known) is None
    assert best_so_far(line, known) == [math.inf, 0.9, 0.9, 0.9]


def test_a_line_that_diverged_everywhere() -> None:
    known = landscape(SMALL, lambda lr, eps: math.inf if eps > -2 else lr**2)
    now = plan("separable", SMALL, known, start=SMALL.start())
    assert (now.pick, now.done, now.confirmed, now.cells) == (None, True, None, ())
    assert now.stage == "every point of the line over lr at eps 0.1 diverged or failed"
    assert replay("separable", SMALL, known, start=SMALL.start(start_eps=1e-4)).pick == Cell(1, 1e-5)


def test_where_the_coarse_values_diverged_all_others_are_tried() -> None:
    line = Space(axis([1, 2, 3, 4, 5, 6], "lr"), None)
    known = dict.fromkeys(line.cells(), DIVERGED) | {Cell(5.0, None): Score(0.5)}
    found = replay("lines", line, known, start=Cell(2.0, None))
    assert (found.pick, found.trials) == (Cell(5.0, None), 6)


@pytest.mark.parametrize("method", METHODS)
def test_where_everything_diverged(method: str) -> None:
    known = dict.fromkeys(SMALL.cells(), DIVERGED)
    now = plan(method, SMALL, known, start=SMALL.start())
    assert (now.pick, now.done, now.confirmed) == (None, True, None)
    assert now.stage.startswith("every point of the ")
    found = replay(method, SMALL, known, start=SMALL.start())
    assert (found.pick, found.score) == (None, None)
    assert set(found.curve) == {math.inf}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("space", "stage"),
    [
        (Space(axis("1e-2:1e2:5", "lr"), None), "line over lr"),
        (Space(None, axis("1e-2:1e2:5", "eps")), "line over eps"),
        (Space(axis("1e-2:1e2:5", "lr"), axis(0.1, "eps")), "line over lr at eps 0.1"),
        (Space(axis(3, "lr"), axis("1e-2:1e2:5", "eps")), "line over eps at lr 3"),
        (Space(axis(3, "lr"), axis(0.1, "eps")), "line over lr at eps 0.1"),
    ],
)
def test_a_single_line(method: str, space: Space, stage: str) -> None:
    first = plan(method, space, {}, start=space.start())
    assert first.stage == stage
    if method == "lines":
        assert first.at_most <= len(space)
        assert len(first.cells) <= first.at_most
    else:
        assert (first.cells, first.at_most) == (space.cells(), len(space))
    known = {cell: Score(float(i)) for i, cell in enumerate(space.cells())}
    known[space.cells()[0]] = DIVERGED
    last = plan(method, space, known, start=space.start())
    if len(space) == 1:
        assert (last.pick, last.done, last.stage) == (None, True, f"every point of the {stage} diverged or failed")
    else:
        assert (last.pick, last.done, last.confirmed, last.rings) == (space.cells()[1], True, True, 0)


# --- seeds, noise, margins -----------------------------------------------------------------------


def test_scores_are_means_over_seeds() -> None:
    values = [0.3, 0.5, 0.1]
    runs = [Record(1, 0.1, seed, value=value) for seed, value in enumerate(values)]
    other = Record(2, 0.1, 0, value=7, pruned=True)
    found = scores([*runs, other])
    mean = sum(values) / 3
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 2 / 3)
    assert found[Cell(1, 0.1)].loss == pytest.approx(mean)
    assert found[Cell(1, 0.1)].error == pytest.approx(error)
    assert found[Cell(1, 0.1)].count == 3
    assert found[Cell(2, 0.1)] == Score(7, 0.0, 1, True)
    assert set(scores([*runs, other], seeds=2)) == {Cell(1, 0.1)}
    assert scores([*runs, other], seeds=1) == found
    up = scores([*runs, other], direction="maximize")
    assert {cell: -score.loss for cell, score in up.items()} == {cell: score.loss for cell, score in found.items()}


@pytest.mark.parametrize(("direction", "value"), [("minimize", math.inf), ("maximize", -math.inf)])
def test_one_seed_that_diverged_is_enough(direction: str, value: float) -> None:
    runs = [Record(1, None, 0, value=0.5), Record(1, None, 1, value=value)]
    assert scores(runs, direction=direction) == {Cell(1, None): Score(math.inf, 0.0, 2)}


@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_no_values_are_too_large_for_a_score(values: list[float]) -> None:
    found = scores([Record(1, None, seed, value=value) for seed, value in enumerate(values)])[Cell(1, None)]
    assert min(values) * (1 - 1e-15) <= found.loss or found.loss == pytest.approx(min(values))
    assert found.error >= 0


def test_noise_that_explains_a_difference() -> None:
    """A neighbour that is better by less than the standard error of the difference does not move the pick."""
    space = Space(axis([1, 2, 3], "lr"), axis([1, 2, 3], "eps"))

    def runs(spread: float) -> list[Record]:
        losses = {Cell(2, 2): 0.5, Cell(3, 3): 0.4}
        return [
            Record(*cell, seed, value=losses.get(cell, 1.0) + spread * (seed - 1))
            for cell in space.cells()
            for seed in range(3)
        ]

    # The standard error of a mean of three is spread / sqrt(3), that of the difference spread * sqrt(2 / 3).
    for spread, pick in ((0.12, Cell(3, 3)), (0.13, Cell(2, 2))):
        known = scores(runs(spread), seeds=3)
        assert replay("separable", space, known, start=Cell(2, 2)).pick == pick
    one = scores([run for run in runs(0.13) if run.seed == 1])
    assert replay("separable", space, one, start=Cell(2, 2)).pick == Cell(3, 3)
    assert replay("separable", space, one, start=Cell(2, 2), margin=0.11).pick == Cell(2, 2)
    assert replay("separable", space, one, start=Cell(2, 2), margin=0.09).pick == Cell(3, 3)


def test_better_by_hand() -> None:
    assert better(Score(1.0), Score(2.0))
    assert not better(Score(1.0), Score(1.0))
    assert not better(Score(1.0), Score(1.5), margin=0.5)
    assert not better(Score(1.0, 3.0), Score(6.0, 4.0))  # by exactly the error of the difference
    assert better(Score(1.0, 3.0), Score(6.1, 4.0))
    assert better(Score(9.0), DIVERGED, margin=100)
    assert not better(DIVERGED, Score(9.0))
    assert not better(DIVERGED, Score(math.inf, pruned=True))
    assert better(Score(9.0), Score(1.0, pruned=True))
    assert not better(Score(1.0, pruned=True), Score(9.0))
    assert better(Score(1.0, pruned=True), Score(9.0, pruned=True))


# --- what is refused -----------------------------------------------------------------------------


def test_what_a_search_rejects() -> None:
    start = SMALL.start()
    with pytest.raises(ValueError, match="method is 'random', but must be one of lines, separable, grid"):
        plan("random", SMALL, {}, start=start)
    with pytest.raises(ValueError, match="start is lr 7, eps 1, but must be a cell of the space"):
        plan("grid", SMALL, {}, start=Cell(7, 1))
    for margin in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"margin is .*, but must be finite and at least 0"):
            plan("grid", SMALL, {}, start=start, margin=margin)
    with pytest.raises(
        ValueError, match=r"known has no lr 0\.001, eps 0\.1, but must have all cells of the separable search"
    ):
        replay("separable", SMALL, {}, start=start)
    with pytest.raises(ValueError, match="seeds is 0, but must be at least 1, or None"):
        scores([], seeds=0)
    with pytest.raises(ValueError, match="records has lr=1 seed=0 twice"):
        scores([Record(1, None, value=1), Record(1, None, value=1)])
    with pytest.raises(ValueError, match="direction is 'up'"):
        scores([], direction="up")
    for loss in (math.nan, -math.inf):
        with pytest.raises(ValueError, match=r"loss is .*, but must be a number, or inf"):
            Score(loss)
    with pytest.raises(ValueError, match="error is nan, but must be"):
        Score(0, math.nan)
    with pytest.raises(ValueError, match="count is 0, but must be at least 1"):
        Score(0, count=0)
