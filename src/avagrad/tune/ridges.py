"""How far the best learning rate moves over eps: the numbers of docs/avastep.md, from the records of a map."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import linear_regression

from avagrad.tune.records import Record

__all__ = ["Ridge", "ridge"]


@dataclass(frozen=True)
class Ridge:
    """The best lr of each eps, and what it costs to keep one lr for all of them.

    - ``eps``, ``lrs``: each eps with its best lr, refined by a parabola through the best cell of the row and its
      neighbours, in logarithms of lr
    - ``losses``: the loss of each eps at the best lr that was run
    - ``spread``: how far it moves, in powers of ten; ``slope``: the least-squares slope of log lr against log eps
    - ``at_an_end``: how many rows have their best cell at an end of the lr axis, so that the true best may lie outside
    - ``lr``, ``best``: of the best cell of the map; ``excess``: how much worse, at worst over eps, that lr is than the
      best of its row

    >>> Ridge((1e-8, 1.0), (0.01, 0.01), (2.2, 2.3), 0.0, 0.0, 0, 0.01, 2.2, 0.0).spread
    0.0
    """

    eps: tuple[float, ...]
    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    spread: float
    slope: float
    at_an_end: int
    lr: float
    best: float
    excess: float


def ridge(records: Iterable[Record]) -> Ridge:
    """Return the ridge of a map with one seed.

    >>> cells = [(lr, eps) for lr in (0.001, 0.01, 0.1) for eps in (1e-8, 1.0)]
    >>> found = ridge(Record(lr, eps, seed=0, value=abs(math.log10(lr) + 2)) for lr, eps in cells)
    >>> found.spread, found.slope, found.excess, round(found.lr, 3)
    (0.0, 0.0, 0.0, 0.01)
    """
    rows: dict[float, dict[float, float]] = {}
    for record in records:
        if record.lr is None or record.eps is None:
            raise ValueError("ridge: a record has no lr or no eps, but must have both.")
        row = rows.setdefault(record.eps, {})
        if record.lr in row:
            raise ValueError(f"ridge: lr {record.lr:g} and eps {record.eps:g} are there twice, but must be once.")
        row[record.lr] = record.value
    if len(rows) < 2 or len({frozenset(row) for row in rows.values()}) > 1:
        raise ValueError(f"ridge: there are {len(rows)} eps, but must be at least 2, each with the same lrs.")
    best, lr = min((value, lr) for row in rows.values() for lr, value in row.items())
    epss = sorted(rows)
    places, ends = [], 0
    for eps in epss:
        lrs = sorted(rows[eps])
        values = [rows[eps][x] for x in lrs]
        i = min(range(len(lrs)), key=values.__getitem__)
        ends += i in (0, len(lrs) - 1)
        places.append(_vertex([math.log10(x) for x in lrs], values, i))
    slope = linear_regression([math.log10(eps) for eps in epss], places).slope
    finite = [eps for eps in epss if math.isfinite(min(rows[eps].values()))]  # the others have no best
    excess = max((rows[eps][lr] - min(rows[eps].values()) for eps in finite), default=math.inf)
    refined = tuple(10.0**x for x in places)
    losses = tuple(min(rows[eps].values()) for eps in epss)
    return Ridge(tuple(epss), refined, losses, max(places) - min(places), slope, ends, lr, best, excess)


def _vertex(xs: list[float], ys: list[float], i: int) -> float:
    """Return where the parabola through a smallest value and its neighbours is smallest; at an end, that place."""
    if i in (0, len(xs) - 1) or not all(math.isfinite(y) for y in ys[i - 1 : i + 2]):
        return xs[i]
    (a, b, c), (p, q, r) = xs[i - 1 : i + 2], ys[i - 1 : i + 2]
    above = (b - a) ** 2 * (q - r) - (b - c) ** 2 * (q - p)
    below = (b - a) * (q - r) - (b - c) * (q - p)
    return b if below == 0 else b - above / (2 * below)
