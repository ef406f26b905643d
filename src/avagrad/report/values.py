"""Numbers that can be drawn: what counts as one, means, lines with bands, and how they are written."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np

__all__ = ["Band", "duration", "number", "ticks"]

T = TypeVar("T")

LARGEST = 1e100  # unreadable beyond, and the arithmetic of an axis would overflow
_DIGITS = {"%": 2, "bits": 3}


def number(value: object) -> float | None:
    """Return a value as a float; None if it is not a number, or too large to be drawn.

    >>> number(3), number("3"), number(True), number(float("nan")), number(1e308)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        return None
    return float(value) + 0.0  # adding 0 avoids -0.0


def mean_of_all(values: Sequence[object]) -> float | None:
    """Return the mean; None if there are no values, or if one is not a number."""
    found = [known for value in values if (known := number(value)) is not None]
    return math.fsum(found) / len(found) if found and len(found) == len(values) else None


def grouped(things: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    """Return things by their key, in the order in which they come."""
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def wants_log(values: Iterable[float], span: float = 20.0) -> bool:
    """Return whether an axis should be logarithmic: all values are above 0, and they are far apart."""
    found = list(values)
    return bool(found) and min(found) > 1 / LARGEST and max(found) > span * min(found)


def rounded(value: float | None, unit: str = "") -> str:
    """Return a number with as many digits as its unit deserves; empty for None and infinity."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.{_DIGITS[unit]}f}" if unit in _DIGITS and abs(value) < 1e5 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return a time as hours, minutes and seconds; empty if it is not known.

    >>> duration(288.2), duration(0.25), duration(None)
    ('0:04:48', '0.25 s', '')
    """
    known = number(seconds)
    if known is None or not 0 <= known < 1e9:
        return ""
    return str(timedelta(seconds=round(known))) if known >= 10 else f"{known:.2g} s"


def ticks(values: Sequence[float], most: int = 11, *, bins: bool = False) -> list[tuple[float, str]]:
    """Return where an axis has its labels, and their texts: powers of ten if there are two of them, else every so many.

    With ``bins``, values are the middles of bins, and powers of ten are between them.

    >>> ticks((5e-7, 1e-6, 5e-6, 1.00001e-5))
    [(1, '1e-6'), (3, '1e-5')]
    >>> ticks((0.2, 2, 20)), ticks((0.0316, 0.316, 3.16), bins=True)
    ([(0, '0.2'), (1, '2'), (2, '20')], [(0.5..., '0.1'), (1.5..., '1')])
    """
    logs = [math.log10(value) for value in values]
    found: list[tuple[float, str]]
    if bins and len(logs) > 1:
        tens = range(math.ceil(logs[0]), math.floor(logs[-1]) + 1)
        found = [(float(np.interp(k, logs, range(len(logs)))), _power(k)) for k in tens]
    else:
        found = [(i, _power(round(at))) for i, at in enumerate(logs) if abs(at - round(at)) < 1e-4]
    if len(found) < 2:
        found = [(i, short(value)) for i, value in enumerate(values)]
    return found[:: -(-len(found) // most)]


def _power(k: int) -> str:
    return f"{10.0**k:g}" if -3 < k < 4 else f"1e{k}"


def short(value: float, digits: int = 3) -> str:
    mantissa, e, exponent = f"{float(f'{value:.{digits}g}'):g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


@dataclass(frozen=True)
class Band:
    """A line, and a band around it. None is a gap.

    >>> line = Band((1, 2, 3), (0.5, 0.25, None), (0.5, 0.125, None), (0.5, 0.375, None))
    >>> line.last, line.is_empty, line.values
    ((2, 0.25), False, [0.5, 0.25, 0.125, 0.375])
    """

    x: tuple[float, ...] = ()
    middle: tuple[float | None, ...] = ()
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    @property
    def last(self) -> tuple[float, float] | None:
        """The last point that is not a gap."""
        there = [(x, y) for x, y in zip(self.x, self.middle, strict=True) if y is not None]
        return there[-1] if there else None

    @property
    def is_empty(self) -> bool:
        """Whether there is no point at all."""
        return self.last is None

    @property
    def values(self) -> list[float]:
        """All numbers of the line and the band, each once."""
        return list(dict.fromkeys(y for y in (*self.middle, *self.low, *self.high) if y is not None))
