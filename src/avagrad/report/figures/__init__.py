"""The figures of a report, in the order of the page. To add one, write a module like the others and list it here."""

from collections.abc import Sequence
from typing import Any, Protocol

from avagrad.report.drawing import Figure
from avagrad.report.figures import budgets, figure_1, heat_maps, learning_curves, step_times, sweeps, table_1
from avagrad.report.reading import Collection
from avagrad.report.table import Table

__all__ = ["FIGURES"]


class FigureModule(Protocol):
    """What a module of a figure has. A table is a figure, too."""

    NAME: str  # of its files: heat-maps-1.png
    CHAPTER: str  # under which it is on the page
    NOTE: str  # how to read it; may be empty

    def numbers(self, collection: Collection, /) -> Sequence[Any]:
        """Return what is to be drawn, a thing for each drawing; each has a ``title``.

        A thing may have ``hover``, texts for the shapes of the groups that have these ids in the drawing; that of a
        table may have ``origins``, the run or the sweep of each row.
        """

    def caption(self, drawn: Any, /) -> str:
        """Return what one of these things shows, in sentences."""

    def draw(self, drawn: Any, /) -> Figure | Table:
        """Draw it."""


FIGURES: list[FigureModule] = [heat_maps, budgets, sweeps, table_1, learning_curves, figure_1, step_times]
