"""The search space: axes of values for lr and eps, the grid that they span, and the paper's grids.

Every value is rounded to 12 significant digits: a point is found again by its key, in any file and on any machine.
"""

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

__all__ = ["NAMES", "USUAL_AXES", "Axis", "Cell", "Point", "Space", "axes_of", "axis", "axis_value", "shown"]

NAMES = ("lr", "eps")
_START_EPS = 0.1  # where AvaGrad's lr and eps were most separable: far from both Adam (small eps) and SGD (large eps)
SMALLEST_EPS = 1e-8  # below it all values are level: what one seed finds there is rounding noise
# These start at their usual eps: on nearly all recorded maps that takes fewer trials, or ends at a better cell.
_SMALL_START_EPS = {"avastep": 1e-8, "adam": 1e-8, "adamw": 1e-8}
MAX_VALUES = 10_000  # a longer axis is a typing error
_MIN, _MAX = 1e-300, 1e300  # the range that Optuna accepts


def _decades(factors: tuple[int, ...], first: float, last: float) -> tuple[float, ...]:
    values = (float(f"{factor}e{k}") for k in range(-9, 5) for factor in factors)
    return tuple(value for value in values if first <= value <= last)


_PAPER = {
    "paper": {"lr": _decades((1, 5), 5e-7, 5e3), "eps": _decades((1, 2), 1e-8, 1e2)},
    "paper-chars": {"lr": _decades((2,), 2e-4, 2e3), "eps": _decades((1, 5), 1e-8, 1e2)},
}
_FORMATS = f"{', '.join(map(repr, _PAPER))}, 'low:high:count' such as '1e-4:1e3:15', or numbers such as '0.1, 1, 10'"

# The default values of lr and of eps for each optimizer.
_STEP, _SCALED, _EPS = "1e-4:1:9", "1e-3:1e3:13", "1e-8:100:11"
USUAL_AXES: dict[str, tuple[str, str | None]] = {
    "avastep": (_STEP, _EPS),
    "avagrad": (_SCALED, _EPS),
    "avagradw": (_SCALED, _EPS),
    "adam": ("1e-5:10:13", _EPS),
    "adamw": ("1e-5:10:13", _EPS),
    "sgd": ("1e-4:10:11", None),
}


def rounded(value: float) -> float:
    """Return a value rounded to 12 significant digits."""
    return float(shown(value))


def shown(value: float) -> str:
    """Return a value as text that is read as the same value.

    >>> shown(1000.0), shown(1e-8), shown(0.1 + 0.2)
    ('1000', '1e-08', '0.3')
    """
    return f"{value:.12g}"


class Cell(NamedTuple):
    """One lr and one eps; None for an absent axis.

    >>> str(Cell(lr=1.0, eps=1e-8)), str(Cell(lr=None, eps=0.1))
    ('lr 1, eps 1e-08', 'eps 0.1')
    """

    lr: float | None
    eps: float | None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in zip(NAMES, self, strict=True) if value is not None)


class Point(NamedTuple):
    """A cell and a seed: the input of one trial.

    >>> Point(lr=0.1, eps=1e-8, seed=0).key, Point(lr=0.1, eps=None, seed=2).key
    ('lr=0.1 eps=1e-08 seed=0', 'lr=0.1 seed=2')
    >>> Point.from_key("lr=0.1 eps=1e-08 seed=0").cell
    Cell(lr=0.1, eps=1e-08)
    """

    lr: float | None
    eps: float | None
    seed: int

    @property
    def cell(self) -> Cell:
        """The point without its seed."""
        return Cell(self.lr, self.eps)

    @property
    def key(self) -> str:
        """The point as text, always the same for the same point; absent axes are left out."""
        parts = [f"{name}={shown(value)}" for name, value in zip(NAMES, self.cell, strict=True) if value is not None]
        return " ".join([*parts, f"seed={self.seed}"])

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Return the point that has this key."""
        try:
            parts = dict(part.split("=") for part in key.split(" "))
            found = {name: float(parts[name]) if name in parts else None for name in NAMES}
            point = cls(found["lr"], found["eps"], int(parts["seed"]))
        except (AttributeError, KeyError, ValueError):
            point = None
        # Comparing the texts also rejects near misses: another order, other digits, more parts.
        if point is None or point.key != key:
            raise ValueError(f"key is {key!r}, but must be the key of a point such as 'lr=0.1 eps=1e-08 seed=0'.")
        return point


@dataclass(frozen=True)
class Axis:
    """The values that lr or eps may take, in ascending order.

    >>> Axis("lr", (0.01, 0.1, 1)).values
    (0.01, 0.1, 1.0)
    >>> Axis("lr", (1, 0.1))
    Traceback (most recent call last):
    ...
    ValueError: lr has 0.1 after 1, but its values must ascend.
    """

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"name is {self.name!r}, but must be 'lr' or 'eps'.")
        if isinstance(self.values, (str, bytes, Mapping)) or not isinstance(self.values, Iterable):
            raise TypeError(f"{self.name} is {self.values!r}, but must be a sequence of numbers.")
        values = tuple(axis_value(self.name, value) for value in self.values)
        if not values:
            raise ValueError(f"{self.name} is {self.values!r}, but must have at least one value.")
        for before, after in itertools.pairwise(values):
            if before == after:
                raise ValueError(f"{self.name} has {shown(after)} twice, but its values must be distinct.")
            if before > after:
                raise ValueError(f"{self.name} has {shown(after)} after {shown(before)}, but its values must ascend.")
        object.__setattr__(self, "values", values)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def middle(self) -> float:
        """The value in the middle, the lower one of two."""
        return self.values[(len(self.values) - 1) // 2]

    def index(self, value: float, called: str | None = None) -> int:
        """Return the index of a value on the axis, or raise an error that names the nearest values."""
        called = called or self.name
        value = axis_value(called, value)
        if value in self.values:
            return self.values.index(value)
        near = sorted(sorted(self.values, key=lambda other: abs(math.log(other) - math.log(value)))[:3])
        raise ValueError(
            f"{called} is {shown(value)}, but must be on the {self.name} axis, where the nearest"
            f" {'values are' if len(near) > 1 else 'value is'} {', '.join(map(shown, near))}."
        )

    def extended(self, end: float) -> "Axis":
        """Return the axis with two more values beyond an end, spaced like the last ones; the same if it is not an end.

        An axis of eps is extended down to :data:`SMALLEST_EPS` at most.

        >>> Axis("lr", (0.01, 0.1, 1)).extended(1.0).values, Axis("lr", (0.01, 0.1, 1)).extended(0.1).values
        ((0.01, 0.1, 1.0, 10.0, 100.0), (0.01, 0.1, 1.0))
        """
        if len(self) < 2 or end not in (self.values[0], self.values[-1]):
            return self
        upwards = end == self.values[-1]
        values = list(self.values) if upwards else list(reversed(self.values))
        for _ in range(2):  # uses the ratio over two steps, which continues {1, 5} x 10^k
            back = 2 if len(values) > 3 else 1
            values.append(values[-back] * (values[-back] / values[-2 * back]))
        if self.name == "eps":
            least = min(SMALLEST_EPS, self.values[0])
            values = list(dict.fromkeys(max(rounded(value), least) for value in values))
        try:
            return Axis(self.name, tuple(values if upwards else reversed(values)))
        except ValueError:  # beyond the range of floats, or values that were not spaced evenly
            return self


def axis(given: Axis | float | str | Iterable[float] | None, name: str) -> Axis | None:
    """Return an axis from a number, numbers, or a text; None for an absent axis.

    A text is a number, comma-separated numbers, ``low:high:count`` (log-spaced, both ends included), or the name of a
    grid:

    - ``"paper"``, the CIFAR grid, 21 values each: lr is 5e-7 and then {1, 5} x 10^k from 1e-6 to 5e3; eps is
      {1, 2} x 10^k from 1e-8 to 20, and then 100 (200 is not in it);
    - ``"paper-chars"``, the Penn Treebank grid: lr is 2 x 10^k from 2e-4 to 2e3, 8 values (the paper's text ends at 20,
      but its best lr is 200); eps is {1, 5} x 10^k from 1e-8 to 50, and then 100, 21 values.

    >>> axis("1e-4:1e-1:4", "eps").values
    (0.0001, 0.001, 0.01, 0.1)
    >>> axis("paper", "lr").values[:4], len(axis("paper", "lr")), len(axis("paper", "eps"))
    ((5e-07, 1e-06, 5e-06, 1e-05), 21, 21)
    >>> axis("0.1, 1", "lr") == axis([0.1, 1], "lr"), axis(0.1, "lr").values, axis(None, "lr")
    (True, (0.1,), None)
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}, but must be 'lr' or 'eps'.")
    if given is None:
        return None
    if isinstance(given, Axis):
        if given.name != name:
            raise ValueError(f"{name} is an axis of {given.name}, but must be one of {name}.")
        return given
    if isinstance(given, str):
        return Axis(name, _from_text(given, name))
    return Axis(name, given if isinstance(given, Iterable) else (given,))  # type: ignore[arg-type]  # becomes a tuple


Values = Axis | float | str | Iterable[float] | None


def axes_of(lr: Values, eps: Values, optimizer: str | None = None) -> tuple[Axis | None, Axis | None]:
    """Return both axes; one that is not given is the default one of an optimizer, or absent without an optimizer.

    >>> [len(line) for line in axes_of([0.1, 1], None, "avastep")], axes_of([0.1, 1], None)[1]
    ([2, 11], None)
    >>> axes_of(None, None, "lion")
    Traceback (most recent call last):
    ...
    ValueError: optimizer is 'lion', but must be one of avastep, avagrad, ...; or pass lr and eps without it.
    """
    if not isinstance(optimizer, (str, type(None))):
        raise TypeError(f"optimizer is {optimizer!r}, but must be a name, such as 'avastep'.")
    if optimizer is not None:
        if optimizer.lower() not in USUAL_AXES:
            known = ", ".join(USUAL_AXES)
            raise ValueError(f"optimizer is {optimizer!r}, but must be one of {known}; or pass lr and eps without it.")
        usual_lr, usual_eps = USUAL_AXES[optimizer.lower()]
        lr, eps = usual_lr if lr is None else lr, usual_eps if eps is None else eps
    return axis(lr, "lr"), axis(eps, "eps")


@dataclass(frozen=True)
class Space:
    """The cells of a search: every lr with every eps, or one line if an axis is absent.

    >>> space = Space(axis("paper", "lr"), axis("paper", "eps"))
    >>> len(space), [len(line) for line in space.axes], str(space.start())
    (441, [21, 21], 'lr 0.05, eps 0.1')
    >>> [str(cell) for cell in Space(axis([1, 2], "lr"), None).cells()]
    ['lr 1', 'lr 2']
    >>> Space.of([2, 1, 2], [None]) == Space(axis([1, 2], "lr"), None)
    True
    """

    lr: Axis | None
    eps: Axis | None

    def __post_init__(self) -> None:
        for name, given in zip(NAMES, (self.lr, self.eps), strict=True):
            if given is not None and not isinstance(given, Axis):
                raise TypeError(f"{name} is {given!r}, but must be an Axis or None.")
            axis(given, name)
        if not self.axes:
            raise ValueError("lr and eps are not given, but at least one of them must be an axis, or optimizer a name.")

    @classmethod
    def of(cls, lrs: Iterable[float | None], epses: Iterable[float | None]) -> Self:
        """Return the space of all values that occur, in any order; an axis without values is absent."""
        columns = ({value for value in values if value is not None} for values in (lrs, epses))
        return cls(*(axis(sorted(column) or None, name) for name, column in zip(NAMES, columns, strict=True)))

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __contains__(self, cell: object) -> bool:
        return isinstance(cell, tuple) and len(cell) == 2 and all(map(tuple.__contains__, self._columns, cell))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that are not absent: lr first."""
        return tuple(line for line in (self.lr, self.eps) if line is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of lr and of eps values; an absent axis counts as one."""
        return len(self._columns[0]), len(self._columns[1])

    def cells(self) -> tuple[Cell, ...]:
        """Return all cells, row by row: all eps of the first lr first."""
        return tuple(itertools.starmap(Cell, itertools.product(*self._columns)))

    def indices(self, cell: Cell) -> tuple[int, int]:
        """Return the indices of a cell on the lr axis and on the eps axis: 0 for an absent axis.

        >>> Space(axis([1, 2, 3], "lr"), axis([0.1, 0.2], "eps")).indices(Cell(3.0, 0.1))
        (2, 0)
        """
        row, column = itertools.starmap(self._index, zip(NAMES, cell, (self.lr, self.eps), strict=True))
        return row, column

    def neighbours(self, cell: Cell) -> tuple[Cell, ...]:
        """Return the cells around a cell, in the order of :meth:`cells`: eight, fewer at a border.

        >>> [str(cell) for cell in Space(axis([1, 2, 3], "lr"), axis([0.1, 0.2], "eps")).neighbours(Cell(1.0, 0.1))]
        ['lr 1, eps 0.2', 'lr 2, eps 0.1', 'lr 2, eps 0.2']
        """
        near = (values[max(i - 1, 0) : i + 2] for values, i in zip(self._columns, self.indices(cell), strict=True))
        return tuple(other for other in itertools.starmap(Cell, itertools.product(*near)) if other != cell)

    def along(self, name: str, cell: Cell) -> tuple[Cell, ...]:
        """Return the cells of the line through a cell along an axis.

        >>> [str(cell) for cell in Space(axis([1, 2, 3], "lr"), axis([0.1, 0.2], "eps")).along("eps", Cell(2.0, 0.1))]
        ['lr 2, eps 0.1', 'lr 2, eps 0.2']
        """
        return tuple(cell._replace(**{name: value}) for value in self._columns[NAMES.index(name)])

    def extended(self, name: str, cell: Cell) -> "Space":
        """Return the space with an axis extended beyond a cell at its end; the same if the cell is not at an end.

        >>> Space(axis([1, 10, 100], "lr"), None).extended("lr", Cell(100.0, None)).lr.values
        (1.0, 10.0, 100.0, 1000.0, 10000.0)
        """
        line = getattr(self, name)
        return self if line is None else replace(self, **{name: line.extended(getattr(cell, name))})

    def start(
        self, start_lr: float | None = None, start_eps: float | None = None, optimizer: str | None = None
    ) -> Cell:
        """Return the cell where a search begins.

        By default eps is 1e-8 for Adam, AdamW and AvaStep, else 0.1; if that is not on the axis, its middle, as for lr.

        >>> space = Space(axis("1e-4:1:5", "lr"), axis("1e-8:1:9", "eps"))
        >>> str(space.start()), str(space.start(optimizer="avastep"))
        ('lr 0.01, eps 0.1', 'lr 0.01, eps 1e-08')
        >>> space.start(start_lr=0.5)
        Traceback (most recent call last):
        ...
        ValueError: start_lr is 0.5, but must be on the lr axis, where the nearest values are 0.01, 0.1, 1.
        """
        usual = _SMALL_START_EPS.get((optimizer or "").lower(), _START_EPS)
        found: list[float | None] = []
        for name, given, line in zip(NAMES, (start_lr, start_eps), (self.lr, self.eps), strict=True):
            if line is None:
                if given is not None:
                    raise ValueError(f"start_{name} is {given!r}, but must be None without an {name} axis.")
                found.append(None)
            elif given is not None:
                as_shown = {float(f"{value:.4g}"): value for value in line.values}  # in results, with four digits
                found.append(line.values[line.index(as_shown.get(given, given), f"start_{name}")])
            else:
                found.append(usual if name == "eps" and usual in line.values else line.middle)
        return Cell(*found)

    @property
    def _columns(self) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        return (self.lr.values if self.lr else (None,)), (self.eps.values if self.eps else (None,))

    @staticmethod
    def _index(name: str, value: float | None, line: Axis | None) -> int:
        if line is None and value is None:
            return 0
        if line is None or value is None:
            allowed = "None: there is no such axis" if line is None else "a value of its axis"
            raise ValueError(f"{name} is {value!r}, but must be {allowed}.")
        return line.index(value)


def axis_value(name: str, value: Any) -> float:
    """Return a value of lr or eps, rounded, or reject it.

    >>> axis_value("lr", 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} has the value {value!r}, but a value must be a number.")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name} has the value {number!r}, but a value must be finite and above 0.")
    if not _MIN <= number <= _MAX:
        raise ValueError(f"{name} has the value {number!r}, but a value must be from {_MIN:g} to {_MAX:g}.")
    return rounded(number)


def _from_text(text: str, name: str) -> tuple[float, ...]:
    word = text.strip()
    if word in _PAPER:
        return _PAPER[word][name]
    try:
        if ":" not in word:
            return tuple(float(part) for part in word.split(","))
        low, high, count = (read(part) for read, part in zip((float, float, int), word.split(":"), strict=True))
    except ValueError:
        raise ValueError(f"{name} is {text!r}, but must be one of {_FORMATS}.") from None
    low, high = axis_value(name, low), axis_value(name, high)
    if not low < high:
        raise ValueError(f"{name} is {text!r}, but must have its low end, {shown(low)}, below its high end.")
    if not 2 <= count <= MAX_VALUES:
        raise ValueError(f"{name} is {text!r}, but must have a count from 2 to {MAX_VALUES}.")
    first, last = math.log10(low), math.log10(high)
    between = (10 ** (first + (last - first) * i / (count - 1)) for i in range(1, int(count) - 1))
    return (low, *between, high)
