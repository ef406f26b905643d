"""Axes, cells and points, by hand and as properties."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avagrad.tune.space import Axis, Cell, Point, Space, axes_of, axis, rounded, shown

values = st.floats(min_value=1e-300, max_value=1e300)


def made(given: Any, name: str = "lr") -> Axis:
    found = axis(given, name)
    assert found is not None
    return found


# --- axes ----------------------------------------------------------------------------------------


def test_the_papers_cifar_axes() -> None:
    """All of {1, 5} x 10^k and {1, 2} x 10^k in the stated ranges, counted with exact fractions."""
    for name, factors, low, high in (("lr", (1, 5), "5e-7", "5e3"), ("eps", (1, 2), "1e-8", "1e2")):
        exact = sorted(Fraction(f) * Fraction(10) ** k for f, k in itertools.product(factors, range(-20, 20)))
        wanted = tuple(float(x) for x in exact if Fraction(low) <= x <= Fraction(high))
        assert made("paper", name).values == wanted
        assert len(wanted) == 21
    assert made("paper", "lr").values[::10] == (5e-7, 0.05, 5000)
    assert made("paper", "eps").values[-3:] == (10, 20, 100)


def test_the_papers_character_axes() -> None:
    assert made("paper-chars", "lr").values == (2e-4, 2e-3, 0.02, 0.2, 2, 20, 200, 2000)
    eps = made("paper-chars", "eps").values
    assert eps[:3] == (1e-8, 5e-8, 1e-7)
    assert eps[-3:] == (10, 50, 100)
    assert len(eps) == 21


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("1e-4:1e3:8", (0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000)),
        ("1e-8:1e2:11", tuple(float(f"1e{k}") for k in range(-8, 3))),
        ("1:100:2", (1, 100)),
        ("1:100:5", (1, 3.16227766017, 10, 31.6227766017, 100)),
        ("0.1, 1,10", (0.1, 1, 10)),
        (" 0.1 ", (0.1,)),
        (0.1, (0.1,)),
        (1, (1.0,)),
        ([0.1 + 0.2, 1], (0.3, 1)),
        (range(1, 4), (1, 2, 3)),
        (iter((0.5, 0.75)), (0.5, 0.75)),
        (Axis("lr", (1, 2)), (1, 2)),
    ],
)
def test_what_an_axis_is_made_of(given: Any, wanted: tuple[float, ...]) -> None:
    found = made(given)
    assert found.values == wanted
    assert all(isinstance(value, float) for value in found.values)
    assert len(found) == len(wanted)


def test_an_absent_axis_is_none() -> None:
    assert axis(None, "eps") is None


@given(low=st.integers(-12, 5), decades=st.integers(1, 10), each=st.integers(1, 7))
def test_powers_of_ten_come_out_exactly(low: int, decades: int, each: int) -> None:
    found = made(f"1e{low}:1e{low + decades}:{decades * each + 1}").values
    assert found[::each] == tuple(float(f"1e{k}") for k in range(low, low + decades + 1))
    steps = [math.log10(after / before) for before, after in itertools.pairwise(found)]
    assert steps == pytest.approx([1 / each] * (decades * each), rel=1e-9)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], r"lr is \[\], but must have at least one value\."),
        ("", "lr is '', but must be one of 'paper', 'paper-chars', "),
        ("papre", "lr is 'papre', but must be one of 'paper', "),
        ("0.1,,1", "lr is '0.1,,1', but must be one of"),
        ("1e-4:1e3", "lr is '1e-4:1e3', but must be one of"),
        ("1e-4:1e3:2.5", "but must be one of"),
        ("1e-4:1e3:1", "lr is '1e-4:1e3:1', but must have a count from 2 to 10000"),
        ("1e-4:1e3:99999999", "but must have a count from 2 to 10000"),
        ("1e3:1e-4:15", "lr is '1e3:1e-4:15', but must have its low end, 1000, below its high end"),
        ("1:1:5", "must have its low end, 1, below"),
        ("0:1:5", "lr has the value 0.0, but a value must be finite and above 0"),
        ("1:inf:5", "lr has the value inf"),
        ("-1", "lr has the value -1.0"),
        ("nan", "lr has the value nan"),
        ([0.1, 0.0], "lr has the value 0.0"),
        ([-0.1], "lr has the value -0.1"),
        ([math.nan], "lr has the value nan"),
        ([math.inf], "lr has the value inf"),
        ([10**400], "lr has the value inf"),
        ([1, 0.1], "lr has 0.1 after 1, but its values must ascend"),
        ("10, 1", "lr has 1 after 10, but its values must ascend"),
        ([0.1, 1, 1], "lr has 1 twice, but its values must be distinct"),
        ([0.3, 0.1 + 0.2], "lr has 0.3 twice"),  # the same to twelve digits
        (Axis("eps", (1,)), "lr is an axis of eps, but must be one of lr"),
    ],
)
def test_what_an_axis_rejects(given: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        axis(given, "lr")


@pytest.mark.parametrize("given", [["a"], [None], [True], True, 1j, object(), b"paper", {0.1: 1}])
def test_what_is_no_number_is_no_axis(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^lr .*but .*must be a .*number"):
        axis(given, "lr")


def test_the_name_of_an_axis() -> None:
    with pytest.raises(ValueError, match="name is 'beta', but must be 'lr' or 'eps'"):
        Axis("beta", (1,))
    with pytest.raises(ValueError, match="name is 'beta', but must be 'lr' or 'eps'"):
        axis(1, "beta")
    with pytest.raises(TypeError, match="lr is 'paper', but must be a sequence of numbers"):
        Axis("lr", "paper")  # type: ignore[arg-type]


# --- points and their keys -----------------------------------------------------------------------


@given(value=values)
def test_a_value_and_its_text_are_the_same_thing(value: float) -> None:
    assert float(shown(rounded(value))) == rounded(value) == rounded(rounded(value))
    assert rounded(value) == pytest.approx(value, rel=1e-11)


@given(lr=st.none() | values.map(rounded), eps=st.none() | values.map(rounded), seed=st.integers())
def test_a_point_comes_back_from_its_key(lr: float | None, eps: float | None, seed: int) -> None:
    point = Point(lr, eps, seed)
    assert Point.from_key(point.key) == point
    assert point.cell == Cell(lr, eps)


def test_keys_by_hand() -> None:
    assert Point(0.1, 1e-8, 0).key == "lr=0.1 eps=1e-08 seed=0"
    assert Point(1000.0, None, 3).key == "lr=1000 seed=3"
    assert Point(None, 2e-8, 3).key == "eps=2e-08 seed=3"


@pytest.mark.parametrize(
    "key",
    ["", "lr=0.1", "seed=x", "eps=1 lr=1 seed=0", "lr=0.10 seed=0", "lr=1 seed=0 a=2", "lr=1 lr=1 seed=0", "lr", None],
)
def test_what_is_no_key(key: Any) -> None:
    with pytest.raises(ValueError, match=r"key is .*, but must be the key of a point"):
        Point.from_key(key)


# --- spaces --------------------------------------------------------------------------------------


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    lr = draw(st.none() | st.lists(values.map(rounded), min_size=1, max_size=5, unique=True).map(sorted))
    eps = draw(st.lists(values.map(rounded), min_size=1, max_size=5, unique=True).map(sorted))
    if lr is not None and draw(st.booleans()):
        return Space(axis(lr, "lr"), None)
    return Space(axis(lr, "lr"), axis(eps, "eps"))


@given(space=spaces())
def test_neighbours_against_brute_force(space: Space) -> None:
    cells = space.cells()
    assert len(cells) == len(set(cells)) == len(space) == math.prod(space.shape)
    assert [space.indices(cell) for cell in cells] == list(itertools.product(*map(range, space.shape)))
    for cell in cells:
        assert cell in space
        here = space.indices(cell)
        near = [
            other for other in cells if max(abs(a - b) for a, b in zip(here, space.indices(other), strict=True)) == 1
        ]
        assert list(space.neighbours(cell)) == near
        assert all(cell in space.neighbours(other) for other in near)
    assert space.start() in space


def test_the_start() -> None:
    paper = Space(axis("paper", "lr"), axis("paper", "eps"))
    assert paper.start() == Cell(0.05, 0.1)
    assert paper.start(start_lr=1, start_eps=1e-8) == Cell(1, 1e-8)
    assert paper.start(start_eps=0.1 + 1e-15) == Cell(0.05, 0.1)
    half_decades = Space(axis("1e-4:1:9", "lr"), None)
    assert half_decades.start(start_lr=0.03162) == Cell(0.0316227766017, None)  # as results show it
    with pytest.raises(ValueError, match=r"start_lr is 0\.031622, but must be on the lr axis"):
        half_decades.start(start_lr=0.031622)
    assert Space(axis([1, 2, 3, 4], "lr"), axis([0.01, 1], "eps")).start() == Cell(2, 0.01)
    assert Space(None, axis([0.01, 0.1, 1, 10, 100], "eps")).start() == Cell(None, 0.1)
    assert Space(axis([1, 2, 3], "lr"), None).start() == Cell(2, None)


def test_a_start_off_the_axis() -> None:
    space = Space(axis("1e-4:1e4:9", "lr"), axis([1], "eps"))
    with pytest.raises(ValueError, match=r"^start_lr is 0\.2, but must be on the lr axis, .* are 0\.01, 0\.1, 1\.$"):
        space.start(start_lr=0.2)
    with pytest.raises(ValueError, match=r"^start_eps is 2, but .* where the nearest value is 1\.$"):
        space.start(start_eps=2)
    with pytest.raises(ValueError, match=r"start_lr has the value -1\.0"):
        space.start(start_lr=-1)
    with pytest.raises(ValueError, match="start_eps is 2, but must be None without an eps axis"):
        Space(axis([1], "lr"), None).start(start_eps=2)


def test_what_a_space_rejects() -> None:
    with pytest.raises(ValueError, match="lr and eps are not given, but at least one"):
        Space(None, None)
    with pytest.raises(TypeError, match="lr is 'paper', but must be an Axis or None"):
        Space("paper", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps is an axis of lr"):
        Space(None, axis([1], "lr"))


def test_cells_that_are_not_in_a_space() -> None:
    space = Space(axis([1, 2], "lr"), None)
    for cell in (Cell(3, None), Cell(None, None), Cell(1, 1)):
        assert cell not in space
        with pytest.raises(ValueError, match=r"(lr|eps) is .*, but must be"):
            space.indices(cell)
    assert "lr" not in space
    assert (1.0, None) in space


def test_an_optimizer_may_be_named_as_its_class() -> None:
    assert axes_of(None, None, "AvaStep") == axes_of(None, None, "avastep")
    space = Space(axis("1e-3:10:5", "lr"), axis("1e-8:1:5", "eps"))
    assert space.start(optimizer="AvaStep") == space.start(optimizer="avastep") != space.start()
