"""What a folder's data say, in sentences; each number in them is read off the data."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from avagrad.report.comparable import comparable_sweeps, direction_of, known_of
from avagrad.report.figures.figure_1 import Start, starts_of
from avagrad.report.figures.sweeps import SweepRow, sweep_rows
from avagrad.report.figures.table_1 import Column, Entry, results
from avagrad.report.reading import Collection, Sweep, Synthetic, method_title
from avagrad.report.values import number
from avagrad.tune.search import plan
from avagrad.tune.separability import Separability, two_digits
from avagrad.tune.space import Cell

__all__ = ["findings", "six_lines"]


def findings(collection: Collection) -> list[str]:
    """Return a sentence or two for each thing that there is: the synthetic problem, maps, searches, comparisons.

    >>> from avagrad.tune.records import Record
    >>> records = tuple(Record(lr, eps, value=lr / eps) for lr in (1, 10) for eps in (0.1, 1))
    >>> for line in findings(Collection("a", sweeps=(Sweep("a", "Mine", records, {}, {}, "minimize"),))):
    ...     print(line)
    Mine, 2 x 2: the best lr is 1 at every eps (slope 0.00, at large eps unknown); it stays within one step of the best
    cell's for eps from 0.1 to 1. Best: lr 1, eps 1: 1.
    """
    return [
        *map(_synthetic, collection.synthetics),
        *(told for _, told in _maps(collection.sweeps)),
        *_searches(collection.sweeps),
        *map(_comparison, results(collection.runs)),
    ]


def six_lines(collection: Collection) -> list[str]:
    """Return what the demonstration has found, in six lines, whatever of it is there.

    >>> six_lines(Collection("a"))[0], len(six_lines(Collection("a")))
    ('The synthetic problem: not there.', 6)
    """
    maps = dict(_maps(collection.sweeps))
    titles = ("Adam", "AvaGrad", "AvaStep, decoupled_weight_decay=False")
    return [
        next(map(_synthetic, collection.synthetics), "The synthetic problem: not there."),
        *(maps.get(title, f"The map of {title}: not there.") for title in titles),
        next(_searches(collection.sweeps), "The search: not there."),
        " ".join(map(_comparison, results(collection.runs))) or "The comparison of the methods: not there.",
    ]


# --- the synthetic problem ---


def _synthetic(synthetic: Synthetic) -> str:
    rows = [row for row in synthetic.rows if isinstance(row.get("w"), Mapping) and number(row.get("step")) is not None]
    rows.sort(key=lambda row: row["step"])
    # The last row of a method is the one that stays.
    last = {(number(row.get("w1")), method_title({"optimizer": row.get("method")})): row for row in rows}
    told = "; ".join(filter(None, (_ends(start, last) for start in starts_of(synthetic))))
    length = f" after {rows[-1]['step']:,} steps" if rows else ""
    return f"The synthetic problem, w{length}: {told or 'nothing was recorded'}."


def _ends(start: Start, last: Mapping[tuple[float | None, str], Mapping[str, Any]]) -> str:
    rows = {line.title: last[key] for line in start.lines if (key := (start.w1, line.title)) in last}
    ends = {title: number(row["w"].get("mean")) for title, row in rows.items()}
    told = ", ".join(f"{title} at {w:.3f}" for title, w in ends.items() if w is not None)
    best = "" if start.minimiser is None else f" (w* = {start.minimiser:.4f})"
    return f"{start.title}{best} {told}" if told else ""


# --- maps ---


def _maps(sweeps: Sequence[Sweep]) -> Iterator[tuple[str, str]]:
    """Yield the titles of the whole grids, and what each of them says."""
    for sweep, row in zip(sweeps, sweep_rows(sweeps), strict=True):
        if row.parts is not None:
            yield sweep.title, f"{_of(sweep)}, {' x '.join(map(str, row.axes))}: {_ridge(row, row.parts)}"


def _ridge(row: SweepRow, parts: Separability) -> str:
    there = [(eps, lr) for eps, lr in parts.ridge if lr is not None]
    if parts.best is None or parts.stays is None or not there:
        return "all diverged."
    lrs = [lr for _, lr in there]
    if min(lrs) == max(lrs):
        where = f"is {_short(lrs[0])} at every eps"
    else:
        first, last = (f"{_short(lr)} at eps {_short(eps)}" for eps, lr in (there[0], there[-1]))
        where = f"goes from {first} to {last}"
        if {min(lrs), max(lrs)} != {lrs[0], lrs[-1]}:
            where += f", between {_short(min(lrs))} and {_short(max(lrs))}"
    slopes = f"slope {two_digits(parts.slope)}, at large eps {two_digits(parts.slope_at_large_eps)}"
    return (
        f"the best lr {where} ({slopes}); it stays within one step of the best cell's for eps from "
        f"{_short(parts.stays[0])} to {_short(parts.stays[1])}. Best: {_at(parts.best, row.value, row.unit)}."
    )


# --- searches ---


def _searches(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """Tell what each search found, beside the best of the grid that was run in the same way, where there is one."""
    rows = list(zip(sweeps, sweep_rows(sweeps), strict=True))
    for sweep, row in rows:
        if row.parts is not None or min(row.axes) < 2:
            continue
        told = f"The search for {_of(sweep)}: {row.trials} trials{_found(sweep, row)}"
        grids = (other for grid, other in rows if other.parts is not None and _same(grid, sweep))
        if (grid := next(grids, None)) is not None and grid.best is not None:
            told += f"; the best of the grid's {grid.trials} is {_at(grid.best, grid.value, grid.unit)}"
        yield f"{told}."


def _found(sweep: Sweep, row: SweepRow) -> str:
    known = known_of(sweep)
    if row.best is None or known.space is None:
        return " of which all diverged"
    search = plan("separable", known.space, known.cells, start=known.space.start())
    if not search.done or search.pick is None:
        return f", the best of them {_at(row.best, row.value, row.unit)}"
    sign = -1.0 if direction_of(sweep) == "maximize" else 1.0
    rings = "the first ring confirmed it" if search.rings == 1 else f"after {search.rings} rings"
    return f" found {_at(search.pick, sign * known.cells[search.pick].loss, row.unit)} ({rings})"


def _same(one: Sweep, other: Sweep) -> bool:
    return one.title == other.title and len(comparable_sweeps([one, other])) == 1


# --- comparisons ---


def _comparison(column: Column) -> str:
    """Tell which method has the least test error, which comes next and which last."""
    there = {title: entry for title, entry in column.entries.items() if entry.mean is not None}
    gone = [title for title in column.entries if title not in there]
    missing = f"; without a result, or diverged: {', '.join(gone)}" if gone else ""
    ordered = sorted(there.items(), key=lambda item: item[1].mean or 0.0)
    groups = [list(same) for _, same in itertools.groupby(ordered, lambda item: item[1].mean)]
    if not groups:
        return f"{column.heading}: no method has a result{missing}."
    best, *others = (f"{' and '.join(_entry(*item) for item in same)}" for same in groups)
    told = f"least {best}"
    if others:
        told += f", next {others[0]}" + (f", most {others[-1]}" if others[1:] else "")
    return f"{column.heading}, mean (sd): {told}, of {len(column.entries)} methods{missing}."


def _entry(title: str, entry: Entry) -> str:
    deviation = "one seed" if entry.deviation is None else f"{entry.deviation:.2g}, {entry.seeds} seeds"
    return f"{title} {entry.mean:.4g} ({deviation})"


# --- words ---


def _of(sweep: Sweep) -> str:
    return f"{sweep.title} on {sweep.task}" if sweep.task else sweep.title


def _at(cell: Cell, value: float | None, unit: str) -> str:
    return str(cell) if value is None else f"{cell}: {value:.3g}{' ' if unit else ''}{unit}"


def _short(value: float) -> str:
    return f"{value:.4g}"
