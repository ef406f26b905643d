"""Text tables of scores: one for each grid.

A study may have been run on several grids, one after the other. Those that share values of lr or eps form one table.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from avagrad.tune.records import sign_of, worst
from avagrad.tune.scores import Score, best
from avagrad.tune.separability import separability
from avagrad.tune.space import NAMES, Axis, Cell, Space, shown
from avagrad.tune.stored_search import StoredSearch

__all__ = ["grids", "tables", "whole_grid"]


def tables(
    known: Mapping[Cell, Score], *, direction: str = "minimize", width: int = 120, search: StoredSearch | None = None
) -> str:
    r"""Return all values as tables: rows of lr, columns of eps; columns that do not fit in the width go below.

    If most of a table is one whole grid, a summary of how separable lr and eps are there follows. ``search`` is the one
    that a study stores: the table of its cells has all of its axes, and the summary starts where it did.

    >>> known = {Cell(0.1, 0.1): Score(0.5), Cell(1.0, 0.1): Score(0.25), Cell(1.0, 1.0): Score(float("inf"))}
    >>> print(tables(known))
    2 lr x 2 eps, 3 of 4 cells; - was not run; inf diverged
    lr \ eps   0.1    1
         0.1   0.5    -
           1  0.25  inf
    """
    sign = sign_of(direction)
    texts = {
        cell: _short(sign * score.loss + 0.0) + ("*" if score.pruned and not score.failed else "")
        for cell, score in known.items()
    }
    diverged = f"{worst(direction)}"
    return "\n\n".join(_section(grid, texts, diverged, width, search) for grid in grids(known))


def grids(known: Mapping[Cell, Score]) -> list[dict[Cell, Score]]:
    """Split the known cells into grids, in the order in which they were begun.

    Cells with the same axes are on one grid if shared values of lr or eps link them, directly or through other cells.
    Cells that share no value come last, together.

    >>> cells = [Cell(1.0, 0.1), Cell(2.0, 0.1), Cell(3.0, 0.3), Cell(1.0, None), Cell(2.0, None)]
    >>> [[str(cell) for cell in grid] for grid in grids(dict.fromkeys(cells, Score(1)))]
    [['lr 1, eps 0.1', 'lr 2, eps 0.1'], ['lr 1', 'lr 2'], ['lr 3, eps 0.3']]
    """
    lines: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in known:
        for line in _lines(cell):
            lines[line].append(cell)
    found: list[list[Cell]] = []
    single: list[Cell] = []
    seen: set[Cell] = set()
    for first in known:
        if first in seen:
            continue
        grid = [first]
        for cell in grid:  # it grows in the loop; each line is followed once
            seen.add(cell)
            linked = [other for line in _lines(cell) for other in lines.pop(line, ())]
            grid += [other for other in dict.fromkeys(linked) if other not in seen]
            seen.update(linked)
        if len(grid) > 1:
            found.append(grid)
        else:
            single += grid
    return [{cell: known[cell] for cell in grid} for grid in (*found, single) if grid]


def whole_grid(known: Mapping[Cell, Score]) -> Space | None:
    """Return the largest complete grid; one with the best cell is preferred to a larger one without it.

    None if it has a single lr or eps, or less than half of the known cells: the cross of a search by lines is no grid.

    >>> cells = [Cell(lr, eps) for lr in (0.1, 1.0, 10.0) for eps in (0.1, 1.0)]
    >>> whole_grid(dict.fromkeys([*cells, Cell(1.0, 10.0)], Score(1))).shape
    (3, 2)
    """
    top = best(known, known)
    found: list[Space] = []
    for along, across in ((0, 1), (1, 0)):
        lines: dict[float | None, set[float | None]] = defaultdict(set)
        for cell in known:
            lines[cell[across]].add(cell[along])
        for line in dict.fromkeys(map(frozenset, lines.values())):
            sides = {along: line, across: {value for value, values in lines.items() if line <= values}}
            if min(len(sides[0]), len(sides[1])) > 1 and 2 * len(sides[0]) * len(sides[1]) >= len(known):
                found.append(Space.of(sides[0], sides[1]))
    return max(found, key=lambda space: (top in space, len(space)), default=None)


def _section(
    grid: Mapping[Cell, Score], texts: Mapping[Cell, str], diverged: str, width: int, search: StoredSearch | None
) -> str:
    notes = _notes(grid.values(), diverged)
    if len({line for cell in grid for line in _lines(cell)}) == 2 * len(grid):  # they share no values
        cells = sorted(grid, key=lambda cell: grid[cell].rank)
        room = max(len(texts[cell]) for cell in cells)
        size = f"{len(cells)} single cell{'s' if len(cells) > 1 else ''}"
        return "\n".join(["; ".join([size, *notes]), *(f"{texts[cell]:<{room}}  {cell}" for cell in cells)])
    space, whole = Space.of((cell.lr for cell in grid), (cell.eps for cell in grid)), whole_grid(grid)
    if search is not None and any(cell in search.plan.space for cell in grid):
        space = search.with_axes(space)
    size, part = _size(space), ""
    if len(grid) < len(space):
        size += f", {len(grid)} of {len(space)} cells; - was not run"
        part = f"{_size(whole)} of these are complete. " if whole is not None else ""
    parts = []
    if whole is not None:
        options = {"start": whole.start()} if search is None else search.options(whole)
        parts = [part + separability(whole, grid, **options).summary()]
    return "\n".join(["; ".join([size, *notes]), _table(space, texts, width), *parts])


def _lines(cell: Cell) -> list[tuple[object, ...]]:
    """Return the two lines that a cell is on. Cells with other axes are never on the same line."""
    axes = tuple(value is None for value in cell)
    return [(axes, name, value) for name, value in zip(NAMES, cell, strict=True)]


def _size(space: Space) -> str:
    return " x ".join(f"{len(line)} {line.name}" for line in space.axes)


def _notes(scores: Iterable[Score], diverged: str) -> list[str]:
    """Return notes on the values of a table."""
    scores = list(scores)
    least, most = (pick(score.count for score in scores) for pick in (min, max))
    return [
        *([f"{diverged} diverged"] if any(score.failed for score in scores) else []),
        *(["* was pruned"] if any(score.pruned and not score.failed for score in scores) else []),
        *([f"means over {least if least == most else f'{least} to {most}'} seeds"] if most > 1 else []),
    ]


def _table(space: Space, texts: Mapping[Cell, str], width: int) -> str:
    """Return the rows of a table, in as many blocks as its columns need."""
    down, corner, heads = space.lr or space.eps, "lr \\ eps", [("value", space.cells()[0])]
    assert down is not None  # a space has an axis
    if space.lr is None or space.eps is None:
        corner = down.name
    else:
        heads = list(zip(_labels(space.eps), space.along("eps", space.cells()[0]), strict=True))
    first = _column([corner, *_labels(down)])
    columns = [_column([head, *(texts.get(cell, "-") for cell in space.along(down.name, at))]) for head, at in heads]
    blocks: list[list[list[str]]] = []
    for column in columns:
        if not blocks or sum(2 + len(each[0]) for each in blocks[-1]) + len(column[0]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    return "\n\n".join("\n".join(map("  ".join, zip(*block, strict=True))) for block in blocks)


def _labels(line: Axis) -> list[str]:
    short = [f"{value:.4g}" for value in line.values]
    return short if len(set(short)) == len(short) else [shown(value) for value in line.values]


def _short(value: float) -> str:
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"


def _column(texts: list[str]) -> list[str]:
    room = max(map(len, texts))
    return [text.rjust(room) for text in texts]
