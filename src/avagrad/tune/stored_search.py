"""The search that a study stores, put together again from its options and records."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avagrad.tune.records import Record, worst
from avagrad.tune.scores import scores
from avagrad.tune.search import Plan, plan, replay
from avagrad.tune.space import NAMES, Cell, Point, Space, axis

__all__ = ["StoredSearch", "stored_search"]


@dataclass(frozen=True)
class StoredSearch:
    """The search that a study stores, as far as its records bring it.

    - ``start``, ``margin``: its options; ``plan``: where it is
    - ``complete``: the cells that have all of its seeds, or have failed; ``used``: those with results that it
      evaluated, if it has ended

    >>> search = {"method": "grid", "lr": [1, 2], "start": [1, None], "margin": 0, "extend": False, "seeds": [0]}
    >>> found = stored_search(search, [Record(1, None, value=3)])
    >>> found.plan.done, len(found.plan.space), found.complete, found.used
    (False, 2, frozenset({Cell(lr=1.0, eps=None)}), frozenset())
    """

    method: str
    start: Cell
    margin: float
    plan: Plan
    complete: frozenset[Cell]
    used: frozenset[Cell]

    def options(self, space: Space) -> dict[str, Any]:
        """Return where a search on a whole grid starts, and its margin: its own, if it could have been on this one."""
        return {"start": self.start, "margin": self.margin} if self.start in space else {"start": space.start()}

    def with_axes(self, space: Space) -> Space:
        """Return a space with all values of the search's axes, as far as they were extended."""
        both = ([line.values if line else () for line in (each.lr, each.eps)] for each in (space, self.plan.space))
        return Space.of(*map(itertools.chain, *both))


def stored_search(
    search: Mapping[str, Any], records: Sequence[Record], direction: str = "minimize"
) -> StoredSearch | None:
    """Return the search of :attr:`avagrad.tune.study.Study.search`; None if there is none, or not one that is known.

    >>> unknown = {"method": "none", "lr": [1], "start": [1, None], "margin": 0, "seeds": [0]}
    >>> stored_search({}, []), stored_search(unknown, [])
    (None, None)
    """
    # One that was written by another version, or by hand, is left out.
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        own = Space(*(axis(search[name], name) if search.get(name) else None for name in NAMES))
        failed = map(Point.from_key, search.get("failed", ()))
        done = {record.point for record in records if record.seed in search["seeds"]}
        every = [*records, *(Record(*point, value=worst(direction)) for point in failed if point not in done)]
        by_seed = [[record for record in every if record.seed == seed] for seed in search["seeds"]]
        complete = scores(itertools.chain(*by_seed), direction=direction, seeds=len(by_seed))
        start, margin = Cell(*search["start"]), float(search["margin"])
        first = scores(by_seed[0], direction=direction)
        given: dict[str, Any] = {"by_first_seed": first, "extend": bool(search["extend"])}
        given |= {"start": start, "margin": margin}
        now = plan(search["method"], own, complete, **given)
        order = replay(search["method"], own, complete, **given).order if now.done else ()
        used = {point.cell for point in done}.intersection(order)
        return StoredSearch(search["method"], start, margin, now, frozenset(complete), frozenset(used))
    return None
