"""What a folder's data say, in sentences; each number in them is read off the data."""

import itertools
from collections.abc import Iterator, Sequence

from avagrad.report.comparable import comparable_sweeps, unit_of
from avagrad.report.figures.figure_1 import starts_of
from avagrad.report.figures.table_1 import Column, Entry, results
from avagrad.report.reading import Collection, Sweep, Synthetic, method_title
from avagrad.report.values import number
from avagrad.tune.search import plan
from avagrad.tune.separability import counted
from avagrad.tune.space import Cell

__all__ = ["findings", "six_lines"]


def findings(collection: Collection) -> list[str]:
    """Return a sentence or two for each thing that there is: the synthetic problem, comparisons, maps, searches.

    >>> from avagrad.tune.records import Record
    >>> records = tuple(Record(lr, eps, value=lr / eps) for lr in (1, 10) for eps in (0.1, 1))
    >>> for line in findings(Collection("a", sweeps=(Sweep("a", "Mine", records, {}, {}, "minimize"),))):
    ...     print(line)
    Mine, 2 x 2: The best lr is 1 over eps from 0.1 to 1 (slope 0.00; unknown at large eps). At 2 of 2 eps the ...
    """
    return [
        *map(_synthetic, collection.synthetics),
        *map(_comparison, results(collection.runs)),
        *(line for _, line in _maps(collection.sweeps)),
        *_searches(collection.sweeps),
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


def _synthetic(synthetic: Synthetic) -> str:
    last: dict[tuple[float | None, str], float] = {}  # where each method is at the last of its steps
    most = 0.0
    for row in sorted(synthetic.rows, key=lambda row: number(row.get("step")) or 0.0):
        w = row["w"].get("mean") if isinstance(row.get("w"), dict) else None
        if (step := number(row.get("step"))) is not None and (mean := number(w)) is not None:
            last[number(row.get("w1")), method_title({"optimizer": row.get("method")})] = mean
            most = max(most, step)
    sentences = []
    for start in starts_of(synthetic):
        ends = [f"{line.title} at {last[key]:.3f}" for line in start.lines if (key := (start.w1, line.title)) in last]
        best = "" if start.minimiser is None else f" (w* = {start.minimiser:.4f})"
        sentences += [f"{start.title}{best} {', '.join(ends)}"] if ends else []
    length = f" after {most:,.0f} steps" if last else ""
    return f"The synthetic problem, w{length}: {'; '.join(sentences) or 'nothing was recorded'}."


def _maps(sweeps: Sequence[Sweep]) -> Iterator[tuple[str, str]]:
    """Yield the titles of the whole grids, and a few sentences for each."""
    for sweep in sweeps:
        known = sweep.known
        if known.parts is not None and known.space is not None:
            best = f" Best: {_at(sweep, known.parts.best)}." if known.parts.best else ""
            yield sweep.title, f"{_of(sweep)}, {' x '.join(map(str, known.space.shape))}: {known.parts.summary()}{best}"


def _searches(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """Yield what each search found, and the best of the grid that was run in the same way, if there is one."""
    for sweep in sweeps:
        known = sweep.known
        is_stated = known.parts is not None and known.parts.best == known.best  # as the best of a whole grid
        if known.space is None or is_stated:
            continue
        line = f"The search for {_of(sweep)}: {counted(known.trials, 'trial')}{_found(sweep)}"
        for grid in sweeps:
            parts = grid.known.parts if grid.title == sweep.title else None
            if parts is not None and parts.best is not None and len(comparable_sweeps([grid, sweep])) == 1:
                line += f"; the best of the grid's {len(grid.known.cells)} is {_at(grid, parts.best)}"
                break
        yield f"{line}."


def _found(sweep: Sweep) -> str:
    known = sweep.known
    if known.best is None or known.space is None:
        return " of which all diverged"
    search = known.search.plan if known.search else plan("separable", known.space, known.cells, **known.options)
    if not search.done or search.pick is None:
        return f", the best of them {_at(sweep, known.best)}"
    rings = {0: "", 1: " (the first ring confirmed it)"}.get(search.rings, f" (after {search.rings} rings)")
    if known.search and known.search.method == "lines" and search.rings:  # its neighbours are along the axes alone
        rings = f" (no neighbour along lr or eps is better{', but two lines were not enough' * (search.rings > 1)})"
    return f" found {_at(sweep, search.pick)}{rings}"


def _comparison(column: Column) -> str:
    """Say which method has the least test error, which comes next and which last."""
    there = {title: entry for title, entry in column.entries.items() if entry.mean is not None}
    gone = [title for title in column.entries if title not in there]
    missing = f"; without a result, or diverged: {', '.join(gone)}" if gone else ""
    ordered = sorted(there.items(), key=lambda item: item[1].mean or 0.0)
    groups = [list(same) for _, same in itertools.groupby(ordered, lambda item: item[1].mean)]
    if not groups:
        return f"{column.heading}: no method has a result{missing}."
    best, *others = (f"{' and '.join(_entry(*item) for item in same)}" for same in groups)
    more = [f"next {others[0]}"] if others else []
    more += [f"most {others[-1]}"] if others[1:] else []
    order = ", ".join([f"least {best}", *more])
    return f"{column.heading}, mean (sd): {order}, of {len(column.entries)} methods{missing}."


def _entry(title: str, entry: Entry) -> str:
    deviation = "one seed" if entry.deviation is None else f"{entry.deviation:.2g}, {entry.seeds} seeds"
    return f"{title} {entry.mean:.4g} ({deviation})"


def _of(sweep: Sweep) -> str:
    return f"{sweep.title} on {sweep.task}" if sweep.task else sweep.title


def _at(sweep: Sweep, cell: Cell) -> str:
    count = sweep.known.cells[cell].count if sweep.known.search else 1
    at = f"{cell}: {sweep.known.value(cell):.3g} {unit_of(sweep.task)}".rstrip()
    return f"{at} (mean of {count} seeds)" if count > 1 else at
