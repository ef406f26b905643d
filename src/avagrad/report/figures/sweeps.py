"""What sweeps over lr and eps found, and whether lr and eps are separable: a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from avagrad.report.comparable import names_of, unit_of
from avagrad.report.reading import Collection, Sweep
from avagrad.report.table import Table, TableCell
from avagrad.report.values import duration, rounded
from avagrad.tune.separability import two_digits
from avagrad.tune.space import Cell

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers"]

NAME, CHAPTER, NOTE = "sweeps", "What a search finds for its trials", ""
_COLUMNS = (
    "method", "task", "lr x eps", "trials", "cost", "diverged", "best lr", "best eps", "best value",
    "slope of the ridge", "slope at large eps", "eps where the best lr stays", "two lines and a ring: trials",
    "two lines and a ring: value",
)  # fmt: skip


@dataclass(frozen=True)
class Sweeps:
    """All sweeps, and their names."""

    names: Sequence[str]
    origins: Sequence[Sweep]
    title: str = ""


def numbers(collection: Collection) -> list[Sweeps]:
    """Return all sweeps with their names; nothing if there are none.

    >>> from avagrad.tune.records import Record
    >>> records = tuple(Record(lr, eps, value=lr + eps) for lr in (1, 2, 3) for eps in (0.1, 1, 2))
    >>> (found,) = numbers(Collection("a", sweeps=(Sweep("a", "mine", records, {}, {}, "minimize"),)))
    >>> found.names, [(str(sweep.known.best), sweep.known.parts.trials) for sweep in found.origins]
    (['mine'], [('lr 1, eps 0.1', 6)])
    """
    sweeps = collection.sweeps
    return [Sweeps(names_of(sweeps), sweeps)] if sweeps else []


def caption(sweeps: Sweeps) -> str:
    """Return what the columns are.

    >>> caption(Sweeps((), ()))[:27]
    'A trial is a cell of the gr'
    """
    parts = (
        "A trial is a cell of the grid, with all of its seeds; where a study keeps its search, each seed is a trial.",
        "Values are means over seeds. One seed that diverged makes the cell diverged.",
        "The ridge is the best lr at each eps: its slope is of log lr against log eps.",
        "The best lr stays where it is within a step of the best cell's.",
    )
    return " ".join(parts if any(sweep.known.parts for sweep in sweeps.origins) else parts[:2])


def draw(sweeps: Sweeps) -> Table:
    """Return the table; blank where a grid is not whole, without columns in which all is blank.

    >>> from avagrad.tune.records import Record
    >>> sweep = Sweep("a", "adam", (Record(0.1, 1e-8, value=3, seconds=2.0),), {}, {}, "minimize")
    >>> [cell.text for cell in draw(numbers(Collection("a", sweeps=(sweep,)))[0]).rows[0]]
    ['adam', '1 x 1', '1', '2 s', '0', '0.1', '1e-08', '3']
    """
    rows = [_texts(*row) for row in zip(sweeps.names, sweeps.origins, strict=True)]
    kept = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    cells = tuple(tuple(TableCell(row[i]) for i in kept) for row in rows)
    return Table(tuple(_COLUMNS[i] for i in kept), cells, caption(sweeps), left=sum(i < 3 for i in kept))


def _texts(name: str, sweep: Sweep) -> list[str]:
    known = sweep.known
    lr, eps = known.best or Cell(None, None)
    parts, unit = known.parts, unit_of(sweep.task)
    texts = [
        name,
        sweep.task,
        " x ".join(map(str, known.space.shape if known.space else (0, 0))),
        str(known.trials),
        duration(sweep.seconds),
        str(sum(score.failed for score in known.cells.values())),
        rounded(lr),
        rounded(eps),
        rounded(known.value(known.best), unit),
    ]
    if parts is None:
        return [*texts, "", "", "", "", ""]
    slopes = ["" if slope is None else two_digits(slope) for slope in (parts.slope, parts.slope_at_large_eps)]
    stays = "" if parts.stays is None else " to ".join(map(rounded, parts.stays))
    return [*texts, *slopes, stays, str(parts.trials), rounded(known.value(parts.pick), unit)]
