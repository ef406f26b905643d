"""The numbers behind curves and bars: learning, equal budgets, Figure 1, step times. Nothing is drawn here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from avagrad.report.groups import (
    LARGEST,
    Group,
    Setting,
    comparable,
    comparable_sweeps,
    direction_of,
    grouped,
    mean_of_all,
    number,
    titles_of,
    unit_of,
)
from avagrad.report.heatmaps import space_of
from avagrad.report.reading import Run, StepTimes, Sweep, Synthetic, method_title
from avagrad.theory import Problem
from avagrad.tune.records import Record
from avagrad.tune.search import Score, best_so_far, replay, scores
from avagrad.tune.space import Cell, Space

__all__ = [
    "Band",
    "Bar",
    "BarGroup",
    "BudgetChart",
    "BudgetLine",
    "Known",
    "LearningChart",
    "LearningLine",
    "Start",
    "SyntheticLine",
    "budget_curves",
    "figure_1",
    "known_of",
    "learning_curves",
    "random_search",
    "ratio_span",
    "step_bars",
    "wants_log",
]

MOST_LINES = 12  # that a chart can hold and still be read
_FEW = 30  # points of a line that are marked one by one
_LATE = 20  # trials after which a search should have found something
_REFERENCE = "torch AdamW fused"


# --- what all of them need -----------------------------------------------------------------------


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
        """The last point that is there."""
        there = [(x, y) for x, y in zip(self.x, self.middle, strict=True) if y is not None]
        return there[-1] if there else None

    @property
    def is_empty(self) -> bool:
        """Whether there is no point at all."""
        return self.last is None

    @property
    def is_sparse(self) -> bool:
        """Whether the points are so few that each should be marked."""
        return sum(y is not None for y in self.middle) <= _FEW

    @property
    def has_width(self) -> bool:
        """Whether the band is anywhere wider than the line."""
        return any(low != high for low, high in zip(self.low, self.high, strict=True))

    @property
    def values(self) -> list[float]:
        """All numbers of the line and the band, each once."""
        return list(dict.fromkeys(y for y in (*self.middle, *self.low, *self.high) if y is not None))


def wants_log(values: Iterable[float], span: float = 20.0) -> bool:
    """Return whether numbers are better shown on a logarithmic axis: all above 0, and far apart.

    >>> wants_log([0.1, 10]), wants_log([0.1, 0.2]), wants_log([0, 10]), wants_log([])
    (True, False, False, False)
    """
    found = list(values)
    return bool(found) and min(found) > 1 / LARGEST and max(found) > span * min(found)


# --- learning curves -----------------------------------------------------------------------------

QUANTITIES = {"loss": "training loss", "error": "validation error", "gamma": "gamma", "lr": "lr"}


@dataclass(frozen=True)
class LearningLine:
    """What one setting did, over the epochs: for each quantity the mean over seeds, and from the least to the most.

    >>> LearningLine("Adam", 3, 1, {"loss": Band((1,), (0.5,), (0.25,), (0.75,))}).label
    'Adam, 3 seeds, 1 diverged'
    """

    title: str
    seeds: int
    diverged: int
    bands: Mapping[str, Band]

    @property
    def label(self) -> str:
        """The title, with how many seeds there are and how many of them diverged."""
        seeds = [f"{self.seeds} seeds"] if self.seeds > 1 else []
        gone = ["diverged" if self.seeds == 1 else f"{self.diverged} diverged"] if self.diverged else []
        return ", ".join([self.title, *seeds, *gone])


@dataclass(frozen=True)
class LearningChart:
    """The lines of runs that can be compared, which of the quantities want a logarithmic axis, and what is left out.

    >>> LearningChart("digits", {"loss": "training loss"}, (), frozenset(), 3).note
    '3 more settings are not shown: their validation errors are higher.'
    """

    title: str
    quantities: Mapping[str, str]  # with their titles
    lines: tuple[LearningLine, ...]
    log: frozenset[str]
    left_out: int

    @property
    def note(self) -> str:
        """What is left out, in words."""
        if not self.left_out:
            return ""
        one = self.left_out == 1
        more, error = (
            ("setting is", "its validation error is") if one else ("settings are", "their validation errors are")
        )
        return f"{self.left_out} more {more} not shown: {error} higher."


def learning_curves(runs: Sequence[Run], *, most: int = MOST_LINES) -> list[LearningChart]:
    """Return a chart for each group of runs that can be compared, with the best settings by their validation error.

    Seeds are averaged where all of them have a record, so a line ends where its first seed diverges. A value that is
    missing for one seed is a gap.

    >>> rows = ({"epoch": 1, "loss": 2.0, "error": 50.0}, {"epoch": 2, "loss": 1.0, "error": 25.0})
    >>> config = {"task": "digits", "optimizer": "sgd", "lr": 0.1}
    >>> runs = [Run("a", config | {"seed": seed}, {}, rows, 1, None) for seed in (0, 1)]
    >>> (chart,) = learning_curves(runs)
    >>> chart.title, chart.lines[0].label, chart.lines[0].bands["loss"].middle
    ('digits', 'SGD, lr 0.1, 2 seeds', (2.0, 1.0))
    """
    return [_learning_chart(group, most) for group in comparable(runs)]


def _learning_chart(group: Group, most: int) -> LearningChart:
    found = [(setting, _learning_line(setting)) for setting in group.settings]
    kept = sorted(found, key=lambda pair: _at_the_end(*pair))[: max(most, 1)]
    lines = tuple(line for pair in found if pair in kept for line in pair[1:])  # in the order of the methods
    log = {
        name
        for name in ("loss", "gamma", "lr")
        if wants_log(value for line in lines for value in line.bands[name].values)
    }
    unit = unit_of(group.task)
    titles = QUANTITIES | {"error": f"validation error, {unit}" if unit else "validation error"}
    return LearningChart(group.title, titles, lines, frozenset(log), len(found) - len(lines))


def _learning_line(setting: Setting) -> LearningLine:
    # A run that has only begun has nothing to say yet, and would end the line of the others before it begins.
    runs = [run for run in setting.runs if run.rows or run.status != "unfinished"]
    tables = [_by_epoch(run) for run in runs]
    epochs = tuple(sorted(set.intersection(*map(set, tables)))) if tables else ()
    bands = {name: _band(epochs, [[table[at].get(name) for table in tables] for at in epochs]) for name in QUANTITIES}
    return LearningLine(setting.title, len(runs), setting.diverged, bands)


def _by_epoch(run: Run) -> dict[float, Mapping[str, Any]]:
    # The row that tells of a divergence has no values, and the number of the epoch before.
    rows = [row for row in run.rows if row.get("diverged") is not True]
    return {epoch: row for row in rows if (epoch := number(row.get("epoch"))) is not None}


def _band(x: tuple[float, ...], columns: Sequence[Sequence[object]]) -> Band:
    middle = tuple(mean_of_all(column) for column in columns)
    numbers = [[known for value in column if (known := number(value)) is not None] for column in columns]
    low, high = (
        tuple(None if at is None else pick(column) for at, column in zip(middle, numbers, strict=True))
        for pick in (min, max)
    )
    return Band(x, middle, low, high)


def _at_the_end(setting: Setting, line: LearningLine) -> tuple[bool, float]:
    last = line.bands["error"].last
    known = setting.validation if setting.validation is not None else last[1] if last else math.inf
    return setting.diverged > 0, known


# --- equal budgets -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What a sweep knows: its axes, the score of each cell in the order of their records, and whether that is a grid.

    >>> Known(None, {}).is_whole
    False
    """

    space: Space | None  # None where there are no records
    cells: Mapping[Cell, Score]

    @property
    def is_whole(self) -> bool:
        """Whether every lr was run with every eps, and there are at least two of each."""
        return (
            self.space is not None
            and min(self.space.shape) > 1
            and len(self.cells) == len(self.space)
            and all(cell in self.cells for cell in self.space.cells())
        )


def known_of(sweep: Sweep) -> Known:
    """Return what a sweep knows; of two records of one point the later one counts.

    >>> records = tuple(Record(lr, eps, value=lr) for lr in (1, 2) for eps in (1, 2))
    >>> known = known_of(Sweep("a", "a", records, {}, {}, "minimize"))
    >>> known.is_whole, known.cells[Cell(2.0, 1.0)].loss
    (True, 2.0)
    """
    records: dict[object, Record] = {}
    for record in sweep.records:
        records.pop(record.point, None)
        records[record.point] = record
    if not records:
        return Known(None, {})
    known = scores(records.values(), direction=direction_of(sweep))
    # A cell is known when the last of its seeds is.
    order = dict.fromkeys(record.point.cell for record in reversed(records.values()))
    return Known(space_of(tuple(records.values())), {cell: known[cell] for cell in reversed(order)})


@dataclass(frozen=True)
class BudgetLine:
    """The best value after each trial. ``kind`` is "separable", "random" (with a band), or "records".

    >>> BudgetLine("Adam", "separable", 0, Band((1, 2), (3.0, 2.0), (3.0, 2.0), (3.0, 2.0))).label
    'Adam, two lines and a ring'
    """

    title: str
    kind: str
    sweep: int  # lines of one sweep belong together
    band: Band

    @property
    def label(self) -> str:
        """The title, and how the cells were chosen."""
        how = {"separable": "two lines and a ring", "random": "cells at random"}
        return f"{self.title}, {how.get(self.kind, 'in the order of its records')}"


@dataclass(frozen=True)
class BudgetChart:
    """What sweeps that can be compared found for their trials. A trial is a cell, with all of its seeds.

    ``closer`` is the part of the chart where searches end, as (first trial, last trial, lowest value, highest value):
    on the way there values fall so far that the differences at the end cannot be seen.

    >>> BudgetChart("digits", "validation error, %", (), False, None).note
    ''
    """

    title: str
    measure: str
    lines: tuple[BudgetLine, ...]
    log: bool  # of the values; trials always are
    closer: tuple[float, float, float, float] | None

    @property
    def note(self) -> str:
        """What the bands are, in words, where there are any."""
        if all(line.kind != "random" for line in self.lines):
            return ""
        return "Cells at random: the median of all draws; the band goes from the lucky quarter to the unlucky one."


def random_search(losses: Sequence[float], share: float = 0.5) -> list[float]:
    """Return what so many cells drawn at random, none twice, reach: the loss that a share of all draws is not above.

    It is exact. Of ``N`` cells the best of ``n`` is among the ``i`` best with probability
    ``1 - C(N - i, n) / C(N, n)``, so the ranks alone decide. A cell that diverged has an infinite loss and counts as
    the worst there is; the mean of the best would be infinite, and one over the lucky draws would hide the divergences.
    That is why it is the median (a half), with quarters around it.

    >>> random_search([3.0, 1.0, math.inf]), random_search([3.0, 1.0, math.inf], share=0.75)
    ([3.0, 1.0, 1.0], [inf, 3.0, 1.0])
    """
    ordered, total = sorted(losses), len(losses)
    found = []
    rank = total
    for drawn in range(1, total + 1):
        # More draws reach a better rank or the same, so it never has to go back. Odds that are equal must not be
        # missed by a rounding.
        while rank > 1 and _odds(total, rank - 1, drawn) >= share - 1e-9:
            rank -= 1
        found.append(ordered[rank - 1])
    return found


def _odds(total: int, best: int, drawn: int) -> float:
    """Return the probability that one of the best is among those that were drawn."""
    if drawn > total - best:
        return 1.0
    ways = (math.lgamma(k + 1) for k in (total - best, total - drawn, total - best - drawn, total))
    others, undrawn, neither, all_of_them = ways
    return -math.expm1(others + undrawn - neither - all_of_them)


def budget_curves(sweeps: Sequence[Sweep]) -> list[BudgetChart]:
    """Return a chart for each group of sweeps that can be compared: the best value against the trials spent.

    On a whole grid the separable search is replayed, beside :func:`random_search` on the same grid (the median, and
    from the lucky quarter to the unlucky one). What is no whole grid is shown in the order of its records. Before the
    first trial that did not diverge there is a gap.

    >>> records = tuple(Record(lr, eps, value=lr + eps) for lr in (1, 2, 3) for eps in (0.1, 1, 2))
    >>> (chart,) = budget_curves([Sweep("a", "a", records, {}, {}, "minimize")])
    >>> [(line.kind, line.band.last) for line in chart.lines]
    [('separable', (6, 1.1)), ('random', (9, 1.1))]
    """
    there = [sweep for sweep in sweeps if sweep.records]
    return [_budget_chart(title, group) for title, group in comparable_sweeps(there)]


def _budget_chart(title: str, sweeps: Sequence[Sweep]) -> BudgetChart:
    lines = tuple(
        line
        for i, (name, sweep) in enumerate(zip(titles_of(sweeps), sweeps, strict=True))
        for line in _budget_lines(name, i, sweep)
    )
    log = wants_log((value for line in lines for value in line.band.values), span=3.0)
    return BudgetChart(title, sweeps[0].measure, lines, log, _closer([line.band for line in lines]))


def _closer(bands: Sequence[Band]) -> tuple[float, float, float, float] | None:
    points = [
        (x, y) for band in bands for x, y in zip(band.x, band.middle, strict=True) if y is not None and x >= _LATE
    ]
    if len(points) < 2:
        return None
    trials, values = zip(*points, strict=True)
    room = 0.06 * (max(values) - min(values)) or 0.06 * abs(max(values)) or 1.0
    return _LATE, 1.1 * max(trials), min(values) - room, max(values) + room


def _budget_lines(title: str, place: int, sweep: Sweep) -> list[BudgetLine]:
    known = known_of(sweep)
    sign = -1.0 if direction_of(sweep) == "maximize" else 1.0

    def line(kind: str, lucky: Sequence[float], usual: Sequence[float], unlucky: Sequence[float]) -> BudgetLine:
        # An infinite loss is a gap: nothing that works has been found yet.
        low, middle, high = (tuple(number(sign * loss) for loss in curve) for curve in (lucky, usual, unlucky))
        return BudgetLine(title, kind, place, Band(tuple(range(1, len(middle) + 1)), middle, low, high))

    if not known.is_whole or known.space is None:
        return [line("records", *[best_so_far(known.cells, known.cells)] * 3)]
    found = replay("separable", known.space, known.cells, start=known.space.start())
    losses = [math.inf if score.pruned else score.loss for score in known.cells.values()]
    return [
        line("separable", *[found.curve] * 3),
        line("random", *(random_search(losses, q) for q in (0.25, 0.5, 0.75))),
    ]


# --- Figure 1 ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SyntheticLine:
    """What one method did on the problem of Theorem 1, and where Theorem 2's bound on it says something.

    >>> SyntheticLine("SGD", Band(), Band(), Band()).bound.is_empty
    True
    """

    title: str
    w: Band
    squared_gradient: Band
    bound: Band  # where it is below 1, the largest squared gradient there is


@dataclass(frozen=True)
class Start:
    """All methods from one start.

    >>> Start(0.0, 0.4995, (), "").title
    'from w = 0'
    """

    w1: float | None
    minimiser: float | None
    lines: tuple[SyntheticLine, ...]
    note: str

    @property
    def title(self) -> str:
        """Where w starts, in words."""
        return "" if self.w1 is None else f"from w = {self.w1:g}"


def figure_1(synthetic: Synthetic) -> list[Start]:
    """Return the paper's Figure 1: for each start, the lowest first, the mean iterate and the mean squared gradient.

    Lines are means over replicas, bands go from their 10 % to their 90 % quantile.

    >>> row = {"w1": 0.0, "method": "sgd", "step": 1, "mean_w": {"mean": 0.5, "q10": 0.25, "q90": 0.75}}
    >>> (start,) = figure_1(Synthetic("a", {"runs": [{"w1": 0.0, "C": 999.0, "delta": 1.0}]}, {}, (row,)))
    >>> start.title, round(start.minimiser, 4), start.lines[0].title, start.lines[0].w.middle
    ('from w = 0', 0.4995, 'SGD', (0.5,))
    """
    by_start = grouped(synthetic.rows, lambda row: number(row.get("w1")))
    starts = sorted(by_start, key=lambda w1: math.inf if w1 is None else w1)  # type: ignore[return-value, arg-type]
    return [_start(synthetic.config, number(w1), by_start[w1]) for w1 in starts]


def _start(config: Mapping[str, Any], w1: float | None, rows: Sequence[Mapping[str, Any]]) -> Start:
    by_method = grouped(rows, lambda row: str(row.get("method") or "unknown method"))
    lines = tuple(_synthetic_line(str(name), found) for name, found in by_method.items())
    has_bound = any(_quantity(row, "bound", "mean") is not None for row in rows)
    says_nothing = has_bound and all(line.bound.is_empty for line in lines)
    note = "Theorem 2's bound is nowhere below 1, the most that a squared gradient can be." if says_nothing else ""
    return Start(w1, _minimiser(config, w1), lines, note)


def _synthetic_line(name: str, rows: Sequence[Mapping[str, Any]]) -> SyntheticLine:
    at = {step: row for row in rows if (step := number(row.get("step"))) is not None}
    steps = tuple(sorted(at))

    def band(quantity: str) -> Band:
        middle, low, high = (
            tuple(_quantity(at[step], quantity, part) for step in steps) for part in ("mean", "q10", "q90")
        )
        whole = not any(None in column for column in zip(low, high, strict=True))
        return Band(steps, middle, low, high) if whole else Band(steps, middle, middle, middle)

    bound = tuple(y if y is not None and y < 1 else None for y in band("bound").middle)
    title = method_title({"optimizer": name})
    return SyntheticLine(title, band("mean_w"), band("mean_squared_gradient"), Band(steps, bound, bound, bound))


def _quantity(row: Mapping[str, Any], quantity: str, part: str) -> float | None:
    told = row.get(quantity)
    return number(told.get(part)) if isinstance(told, Mapping) else None


def _minimiser(config: Mapping[str, Any], w1: float | None) -> float | None:
    runs = config.get("runs")
    for run in runs if isinstance(runs, Sequence) else ():
        if isinstance(run, Mapping) and number(run.get("w1")) == w1:
            C, delta = number(run.get("C")), number(run.get("delta"))
            try:
                return None if C is None or delta is None else Problem(C=C, delta=delta).minimiser
            except ValueError:  # there is no such problem
                return None
    return None


# --- step times ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """What a step of one optimizer costs, and how many times what torch's fused AdamW costs.

    >>> Bar("AvaGrad fused", 0.2134, 0.303, True).label
    '0.213 ms, 0.30 x'
    """

    title: str
    milliseconds: float
    ratio: float | None
    is_ours: bool

    @property
    def label(self) -> str:
        """Both numbers, in words."""
        time = f"{self.milliseconds:.3g} ms" if self.milliseconds < 1000 else f"{self.milliseconds:.0f} ms"
        return time if self.ratio is None else f"{time}, {_times(self.ratio)} x"


@dataclass(frozen=True)
class BarGroup:
    """The optimizers on one set of parameters.

    >>> BarGroup("resnet50", ()).bars
    ()
    """

    title: str
    bars: tuple[Bar, ...]


def step_bars(times: StepTimes) -> list[BarGroup]:
    """Return what a step costs, for each set of parameters, in the order in which they were measured.

    >>> rows = ({"parameters": "a", "optimizer": "torch AdamW fused", "milliseconds": 2.0},
    ...         {"parameters": "a", "optimizer": "AvaGrad fused", "milliseconds": 1.0})
    >>> [(bar.title, bar.ratio) for bar in step_bars(StepTimes("a", {}, rows))[0].bars]
    [('torch AdamW fused', 1.0), ('AvaGrad fused', 0.5)]
    """
    groups = grouped(times.rows, lambda row: str(row.get("parameters") or "unknown parameters"))
    found = [BarGroup(str(title), _bars(rows)) for title, rows in groups.items()]
    return [group for group in found if group.bars]


def ratio_span(groups: Sequence[BarGroup]) -> tuple[float, float]:
    """Return the least and the largest ratio, 1 included.

    >>> ratio_span([BarGroup("a", (Bar("b", 2.0, 0.5, True), Bar("c", 2.0, None, False)))])
    (0.5, 1.0)
    """
    ratios = [bar.ratio for group in groups for bar in group.bars if bar.ratio is not None]
    return min([1.0, *ratios]), max([1.0, *ratios])


def _bars(rows: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
    measured = [
        (str(row.get("optimizer") or "unknown optimizer"), _above_0(row.get("milliseconds")), row) for row in rows
    ]
    reference = next((time for name, time, _ in measured if name == _REFERENCE), None)
    return tuple(
        Bar(name, time, time / reference if reference else _above_0(row.get("of_fused_adamw")), _is_ours(name))
        for name, time, row in measured
        if time is not None
    )


def _above_0(value: object) -> float | None:
    known = number(value)
    return known if known is not None and known > 1 / LARGEST else None


def _is_ours(name: str) -> bool:
    return name.startswith(("AvaGrad", "AvaStep", "DelayedAdam"))


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.01 <= ratio < 10 else f"{ratio:.3g}"
