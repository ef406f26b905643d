"""Separability, on landscapes whose ridge is known."""

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avagrad.tune.search import Plan, Score, plan
from avagrad.tune.separability import separability, verdict
from avagrad.tune.space import Cell, Space, axis

PAPER = Space(axis("paper", "lr"), axis("paper", "eps"))
EVEN = Space(axis("1e-4:1e4:9", "lr"), axis("1e-4:1e4:9", "eps"))


def landscape(space: Space, loss: Callable[[float, float], float]) -> dict[Cell, Score]:
    """Return a score for each cell, from a function of log10 lr and log10 eps."""
    return {
        cell: Score(loss(math.log10(cell.lr), math.log10(cell.eps))) for cell in space.cells() if cell.lr and cell.eps
    }


def test_a_flat_ridge() -> None:
    known = landscape(PAPER, lambda lr, eps: lr**2 + (eps + 5) ** 2 / 10)
    found = separability(PAPER, known, start=PAPER.start())
    assert PAPER.eps is not None
    assert found.ridge == tuple((eps, 1.0) for eps in PAPER.eps.values)
    assert (found.moves, found.slope, found.slope_at_large_eps, found.share) == (0, 0.0, 0.0, 1.0)
    assert found.stays == (1e-8, 100)
    assert found.best == found.pick == Cell(1, 1e-5)
    assert found.best_loss == found.pick_loss == known[found.best].loss
    assert (found.regret, found.trials, found.rings, found.confirmed, found.cells) == (0.0, 47, 1, True, 441)
    assert found.summary() == (
        "The best lr does not move over eps from 1e-08 to 100 (slope 0.00; 0.00 at large eps). It is the overall best"
        " at 100 % of the eps and stays within one step of it from 1e-08 to 100. Two lines and a ring from lr"
        " 0.05, eps 0.1 find lr 1, eps 1e-05 in 47 trials instead of 441, the best of the grid."
    )


@pytest.mark.parametrize("end", [-4, 4])
def test_a_ridge_at_the_end_of_the_lr_axis_is_not_said_to_stay(end: int) -> None:
    """The true best may lie outside, where nothing was run."""
    known = landscape(EVEN, lambda lr, eps: abs(lr - 3 * end) + eps**2)
    found = separability(EVEN, known, start=EVEN.start())
    assert (found.moves, found.at_ends) == (0, 9)
    assert found.summary().startswith(
        f"The best lr is {10.0**end:g} over eps from 0.0001 to 10000 (slope 0.00; 0.00 at large eps). At 9 of 9 eps the"
        " best lr is at an end of its axis, so it may move more than this. It is the overall best at 100 % of the eps"
    )


def test_eps_at_which_the_best_lr_is_at_an_end_are_counted() -> None:
    known = landscape(EVEN, lambda lr, eps: math.inf if eps == -4 else (lr - eps - 2) ** 2 + 0.01 * (eps - 1) ** 2)
    found = separability(EVEN, known, start=EVEN.start())
    assert (found.moves, found.at_ends) == (5, 3)
    assert "The best lr moves by 5 steps over eps from 0.001 to 10000" in found.summary()
    assert "At 3 of 8 eps the best lr is at an end of its axis, so it may move more than this." in found.summary()


def test_a_ridge_of_slope_one() -> None:
    known = landscape(EVEN, lambda lr, eps: (lr - eps) ** 2 + 0.01 * (eps - 2) ** 2)
    found = separability(EVEN, known, start=EVEN.start(start_eps=1e-4))
    assert found.slope == pytest.approx(1)
    assert found.slope_at_large_eps == pytest.approx(1)
    assert found.moves == 8
    assert found.share == pytest.approx(1 / 9)
    assert found.stays == (10, 1000)
    assert found.best == found.pick == Cell(100, 100)  # it walks there, and pays for that
    assert found.rings == 7
    assert found.trials > 9 + 8 + 6
    assert "Two lines and 7 rings from lr 1, eps 0.0001 find lr 100, eps 100" in found.summary()


def test_a_ridge_of_slope_one_on_the_papers_axes() -> None:
    """Their steps differ, so the ridge follows the slope in stairs."""
    known = landscape(PAPER, lambda lr, eps: (lr - eps - 1) ** 2 + 1e-3 * (eps + 3) ** 2)
    found = separability(PAPER, known, start=PAPER.start())
    assert found.slope == pytest.approx(1, abs=0.05)


def test_regret_where_the_search_is_content_too_early() -> None:
    """Two valleys: the lines go down the nearer one."""
    known = landscape(EVEN, lambda lr, eps: min(abs(lr - 3) + abs(eps - 3), 0.25 + abs(lr + 3) + abs(eps + 3)))
    found = separability(EVEN, known, start=EVEN.start(start_eps=1e-4))
    assert found.best == Cell(1000, 1000)
    assert found.pick == Cell(0.001, 0.001)
    assert (found.best_loss, found.pick_loss, found.regret) == (0, 0.25, 0.25)
    assert found.confirmed is True
    assert found.summary().endswith("in 21 trials instead of 81, 0.25 worse than the best of the grid.")


def test_an_elbow_is_flat_at_small_eps_and_steep_at_large_eps() -> None:
    """As the paper has it for Adam: lr / eps matters once eps is above sqrt(v)."""
    known = landscape(PAPER, lambda lr, eps: (lr + 3 - max(0.0, eps + 3)) ** 2 + 0.001 * (eps + 8))
    found = separability(PAPER, known, start=PAPER.start())
    assert found.slope_at_large_eps == pytest.approx(1, abs=0.06)
    assert found.slope is not None
    assert 0.4 < found.slope < 0.6
    assert found.best == Cell(1e-3, 1e-8)
    assert found.stays == (1e-8, 2e-3)  # eps 0.01 asks for lr 0.01, two steps up
    assert 10 / 21 <= found.share <= 12 / 21


@given(st.data())
def test_ties_on_a_row_never_count_as_a_move(data: st.DataObject) -> None:
    """Every row's plateau holds the overall best lr, wherever it begins and ends."""
    rows, columns = EVEN.shape
    middle = data.draw(st.integers(0, rows - 1))
    known = {}
    for column in range(columns):
        low, high = data.draw(st.integers(0, middle)), data.draw(st.integers(middle, rows - 1))
        if column == columns - 1:
            low = high = middle
        for row in range(rows):
            # The last row is the lowest, so that its only cell is the overall best.
            known[EVEN.cells()[row * columns + column]] = Score(columns - column + (0 if low <= row <= high else 1))
    found = separability(EVEN, known, start=EVEN.start())
    assert (found.moves, found.share, found.slope) == (0, 1.0, 0.0)


@given(losses=st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf]), min_size=20, max_size=20))
def test_the_measures_against_brute_force(losses: list[float]) -> None:
    space = Space(axis([1, 2, 4, 8], "lr"), axis([1, 2, 4, 8, 16], "eps"))
    known = {cell: Score(loss) for cell, loss in zip(space.cells(), losses, strict=True)}
    found = separability(space, known, start=space.start())
    lowest = min(losses)
    if lowest == math.inf:
        assert (found.best, found.regret, found.stays) == (None, None, None)
        assert all(lr is None for _, lr in found.ridge)
        return
    assert found.best is not None
    assert known[found.best].loss == lowest == found.best_loss
    assert found.best.lr is not None
    assert found.best.eps is not None
    for eps, lr in found.ridge:
        row = {other: known[Cell(other, eps)].loss for other in (1.0, 2.0, 4.0, 8.0)}
        if min(row.values()) == math.inf:
            assert lr is None
            continue
        assert lr is not None
        tied = [other for other, loss in row.items() if loss == min(row.values())]
        assert lr in tied
        away = [abs(math.log2(other / found.best.lr)) for other in tied]
        assert abs(math.log2(lr / found.best.lr)) == min(away)
    there = [(math.log2(eps), math.log2(lr)) for eps, lr in found.ridge if lr is not None]
    assert found.moves == max(a[1] - b[1] for a, b in itertools.product(there, there))
    if len(there) > 1:
        mean = [sum(point[i] for point in there) / len(there) for i in (0, 1)]
        slope = sum((x - mean[0]) * (y - mean[1]) for x, y in there) / sum((x - mean[0]) ** 2 for x, _ in there)
        assert found.slope == pytest.approx(slope)
    else:
        assert found.slope is None
    assert found.share == sum(lr == found.best.lr for _, lr in found.ridge) / 5
    ridge = dict(found.ridge)
    inside = [found.best.eps]
    for factor in (0.5, 2.0):
        eps = found.best.eps * factor
        while (lr := ridge.get(eps)) is not None and 0.5 <= lr / found.best.lr <= 2:
            inside.append(eps)
            eps *= factor
    assert found.stays == (min(inside), max(inside))
    if found.pick is None:
        assert (found.regret, found.pick_loss) == (None, math.inf)
    else:
        assert found.regret == known[found.pick].loss - lowest
    lrs = [lr for _, lr in found.ridge if lr is not None]
    assert found.at_ends == lrs.count(1.0) + lrs.count(8.0)
    assert found.summary().count(". ") == 2 + (found.at_ends > 0)
    assert ("does not move" in found.summary()) == (found.moves == found.at_ends == 0)


def test_a_row_that_diverged_everywhere() -> None:
    known = landscape(EVEN, lambda lr, eps: math.inf if eps == 4 else lr**2 + eps**2)
    found = separability(EVEN, known, start=EVEN.start())
    assert found.ridge[-1] == (1e4, None)
    assert found.stays == (1e-4, 1000)
    assert found.share == pytest.approx(8 / 9)
    assert (
        "over eps from 0.0001 to 1000 (slope 0.00; 0.00 at large eps; no lr works at 1 of the eps)" in found.summary()
    )
    # A search that begins on that row ends there.
    lost = separability(EVEN, known, start=EVEN.start(start_eps=1e4))
    assert (lost.pick, lost.pick_loss, lost.regret, lost.confirmed, lost.trials) == (None, math.inf, None, None, 9)
    assert lost.summary().endswith("The first line, of 9 trials, finds nothing: each of them diverged or failed.")


def test_where_everything_diverged() -> None:
    found = separability(EVEN, dict.fromkeys(EVEN.cells(), Score(math.inf)), start=EVEN.start())
    assert (found.moves, found.slope, found.slope_at_large_eps, found.share) == (0, None, None, 0.0)
    assert found.summary() == "All 81 cells of the grid diverged or failed, so nothing is known about lr and eps."


def test_pruned_cells_are_counted() -> None:
    known = landscape(EVEN, lambda lr, eps: lr**2 + eps**2)
    cut = [cell for cell in EVEN.cells() if cell.lr == EVEN.cells()[0].lr]
    known |= {cell: Score(known[cell].loss, pruned=True) for cell in cut}
    found = separability(EVEN, known, start=EVEN.start())
    assert found.pruned == 9
    assert found.summary().endswith(" 9 of 81 cells were pruned, so all of this is uncertain.")


def test_as_good_as_the_best() -> None:
    """A grid of ties, where the search picks another one of the best cells."""
    space = Space(axis([1, 2], "lr"), axis([1, 2], "eps"))
    known = dict.fromkeys(space.cells(), Score(1.0)) | {Cell(1, 1): Score(0.5), Cell(2, 2): Score(0.5)}
    found = separability(space, known, start=Cell(1, 2))
    assert (found.best, found.pick, found.regret) == (Cell(1, 1), Cell(2, 2), 0.0)
    assert found.summary().endswith("in 4 trials instead of 4, as good as the best of the grid.")
    assert "moves by 1 step over" in found.summary()


def test_what_it_rejects() -> None:
    for space in (Space(axis([1, 2], "lr"), None), Space(axis([1], "lr"), axis([1, 2], "eps"))):
        with pytest.raises(ValueError, match=r"space has . lr and . eps, but must have at least two of each"):
            separability(space, dict.fromkeys(space.cells(), Score(1.0)), start=space.start())
    known = landscape(EVEN, lambda lr, eps: 0.0)
    del known[Cell(1, 10)], known[Cell(1, 100)]
    with pytest.raises(ValueError, match="known lacks 2 of 81 cells, the first at lr 1, eps 10, but must have all"):
        separability(EVEN, known, start=EVEN.start())


# --- verdicts ------------------------------------------------------------------------------------


def plans(known: dict[Cell, Score], space: Space, start: Cell, method: str = "separable") -> list[Plan]:
    paid: dict[Cell, Score] = {}
    seen: list[Plan] = []
    while not seen or not seen[-1].done:
        seen.append(plan(method, space, paid, start=start))
        paid |= {cell: known[cell] for cell in seen[-1].cells}
    return seen


def test_verdicts() -> None:
    flat = landscape(EVEN, lambda lr, eps: lr**2 + (eps - 3) ** 2)
    assert [verdict(now) for now in plans(flat, EVEN, EVEN.start())] == [
        "There is no pick yet: line over lr at eps 0.1.",
        "The best so far is lr 1, eps 0.1, and its neighbours have not all been tried yet.",
        "The best so far is lr 1, eps 1000, and its neighbours have not all been tried yet.",
        "No neighbour of lr 1, eps 1000 along lr or eps is better.",
    ]
    steep = landscape(EVEN, lambda lr, eps: (lr - eps) ** 2 + 0.01 * (eps - 2) ** 2)
    verdicts = [verdict(now) for now in plans(steep, EVEN, EVEN.start(start_eps=1))]
    assert verdicts[3] == "A neighbour was better, so two lines are not enough here: the search moves to lr 10, eps 10."
    confirmed = "No neighbour of lr 100, eps 100 along lr or eps is better"
    assert verdicts[-1] == f"{confirmed}, but two lines were not enough: it took 3 rings."
    assert verdict(plans(flat, EVEN, EVEN.start(), "grid")[-1]) == "The best of the whole grid is lr 1, eps 1000."
    line = Space(axis([1, 2, 3], "lr"), None)
    known = {cell: Score(float(i)) for i, cell in enumerate(line.cells())}
    assert verdict(plans(known, line, line.start())[-1]) == "The best of the line is lr 1, and there is no other line."
    lost = dict.fromkeys(line.cells(), Score(math.inf))
    assert verdict(plans(lost, line, line.start())[-1]) == (
        "There is no pick: every point of the line over lr diverged or failed."
    )
