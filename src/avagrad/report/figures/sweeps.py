"""What sweeps over lr and eps found, and whether lr and eps are separable: a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from avagrad.report.comparable import direction_of, known_of, names_of, unit_of
from avagrad.report.reading import Collection, Sweep
from avagrad.report.table import Table, TableCell
from avagrad.report.values import duration, rounded
from avagrad.tune.scores import Score, best
from avagrad.tune.separability import Separability, separability, two_digits
from avagrad.tune.space import Cell

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers", "sweep_rows"]

NAME, CHAPTER, NOTE = "sweeps", "What a search finds for its trials", ""


@dataclass(frozen=True)
class SweepRow:
    """What a sweep found. A trial is a cell, with all of its seeds; one of them that diverged makes it diverged.

    ``parts`` says how far lr and eps are separable, if the grid is whole.
    """

    method: str
    task: str
    unit: str
    axes: tuple[int, int]  # how many lr, how many eps
    trials: int
    seconds: float | None
    diverged: int
    best: Cell | None
    value: float | None  # of the best cell: the mean over its seeds
    parts: Separability | None
    found: float | None  # what two lines and a ring find


def sweep_rows(sweeps: Sequence[Sweep]) -> list[SweepRow]:
    """Return what each sweep found.

    >>> from avagrad.tune.records import Record
    >>> records = tuple(Record(lr, eps, value=lr + eps) for lr in (1, 2, 3) for eps in (0.1, 1, 2))
    >>> (row,) = sweep_rows([Sweep("a", "a", records, {}, {}, "minimize")])
    >>> str(row.best), row.value, row.parts.trials
    ('lr 1, eps 0.1', 1.1, 6)
    """
    return [_sweep_row(title, sweep) for title, sweep in zip(names_of(sweeps), sweeps, strict=True)]


def _sweep_row(title: str, sweep: Sweep) -> SweepRow:
    known = known_of(sweep)
    sign = -1.0 if direction_of(sweep) == "maximize" else 1.0
    whole = known.space is not None and known.is_whole
    parts = separability(known.space, known.cells, start=known.space.start()) if whole and known.space else None
    top = parts.best if parts else _best(known.cells)
    return SweepRow(
        method=title,
        task=sweep.task,
        unit=unit_of(sweep.task),
        axes=known.space.shape if known.space else (0, 0),
        trials=len(known.cells),
        seconds=sweep.seconds,
        diverged=sum(score.failed for score in known.cells.values()),
        best=top,
        value=None if top is None else sign * known.cells[top].loss,
        parts=parts,
        found=None if parts is None or parts.pick is None else sign * parts.pick_loss,
    )


def _best(known: Mapping[Cell, Score]) -> Cell | None:
    """Return the best cell; some may lack an lr or an eps that others have."""
    there = [cell for cell, score in known.items() if not score.failed]
    same_axes = len({tuple(value is None for value in cell) for cell in there}) == 1
    return best(there, known) if same_axes else min(there, key=lambda cell: known[cell].rank, default=None)


@dataclass(frozen=True)
class Sweeps:
    """The rows of the table."""

    rows: tuple[SweepRow, ...]
    title: str = ""


def numbers(collection: Collection) -> list[Sweeps]:
    """Return the table of all sweeps; nothing if there are none.

    >>> numbers(Collection("nothing"))
    []
    """
    return [Sweeps(tuple(sweep_rows(collection.sweeps)))] if collection.sweeps else []


def caption(sweeps: Sweeps) -> str:
    """Return what the columns are.

    >>> caption(Sweeps(()))[:27]
    'A trial is a cell of the gr'
    """
    return (
        "A trial is a cell of the grid, with all of its seeds; values are means over them. The ridge is the best lr at"
        " each eps: its slope is of log lr against log eps. The best lr stays where it is within a step of the best"
        " cell's."
    )


def draw(sweeps: Sweeps) -> Table:
    """Return the table; blank where a grid is not whole.

    >>> from avagrad.tune.records import Record
    >>> rows = sweep_rows([Sweep("a", "adam", (Record(0.1, 1e-8, value=3, seconds=2.0),), {}, {}, "minimize")])
    >>> [cell.text for cell in draw(Sweeps(tuple(rows))).rows[0]][:9]
    ['adam', '', '1 x 1', '1', '2 s', '0', '0.1', '1e-08', '3']
    """
    columns = (
        "method", "task", "lr x eps", "trials", "cost", "diverged", "best lr", "best eps", "best value",
        "slope of the ridge", "slope at large eps", "eps where the best lr stays", "two lines and a ring: trials",
        "two lines and a ring: value",
    )  # fmt: skip
    return Table(columns, tuple(tuple(map(TableCell, _texts(row))) for row in sweeps.rows), caption(sweeps), left=3)


def _texts(row: SweepRow) -> list[str]:
    lr, eps = row.best or Cell(None, None)
    parts = row.parts
    return [
        row.method,
        row.task,
        " x ".join(map(str, row.axes)),
        str(row.trials),
        duration(row.seconds),
        str(row.diverged),
        rounded(lr),
        rounded(eps),
        rounded(row.value, row.unit),
        "" if parts is None or parts.slope is None else two_digits(parts.slope),
        "" if parts is None or parts.slope_at_large_eps is None else two_digits(parts.slope_at_large_eps),
        "" if parts is None or parts.stays is None else " to ".join(map(rounded, parts.stays)),
        "" if parts is None else str(parts.trials),
        rounded(row.found, row.unit),
    ]
