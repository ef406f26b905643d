"""What a page says of a folder, in which order: sentences, figures, tables. Nothing is drawn or written here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath

from avagrad.report.captions import told_of_bars, told_of_budgets, told_of_figure_1, told_of_learning
from avagrad.report.charts import draw_budgets, draw_figure_1, draw_learning_curves, draw_step_bars
from avagrad.report.curves import budget_curves, figure_1, learning_curves, step_bars
from avagrad.report.figures import Draw, draw_heat_maps
from avagrad.report.findings import findings
from avagrad.report.groups import comparable_sweeps
from avagrad.report.heatmaps import HeatMap, heat_map, shades
from avagrad.report.reading import Collection, Run, StepTimes, Sweep, Synthetic
from avagrad.report.tables import Table, table_1, table_of_sweeps

__all__ = ["Chapter", "Contents", "Panel", "Picture", "contents"]


@dataclass(frozen=True)
class Panel:
    """A drawing on the page: what is said beneath it, what draws it, and what is shown over its parts, by their ids.

    Where nothing draws it, it is the whole figure.

    >>> Panel("nothing").hover
    {}
    """

    caption: str
    draw: Draw | None = None
    hover: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A figure: the whole of it, in files beside the page, and its panels, on the page.

    >>> Picture("maps", "Maps", lambda: draw_heat_maps([]), ()).name
    'maps'
    """

    name: str  # of its files
    title: str
    draw: Draw
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Chapter:
    """A part of a page: figures, and tables with the names of their files.

    >>> Chapter("Heat maps", ()).note
    ''
    """

    title: str
    parts: tuple[Picture | tuple[str, Table], ...]
    note: str = ""


@dataclass(frozen=True)
class Contents:
    """All that a page says.

    >>> Contents(("Adam's best lr moves.",), ()).pictures
    []
    """

    findings: tuple[str, ...]
    chapters: tuple[Chapter, ...]

    @property
    def pictures(self) -> list[Picture]:
        """All figures, in order."""
        return [part for chapter in self.chapters for part in chapter.parts if isinstance(part, Picture)]

    @property
    def tables(self) -> list[tuple[str, Table]]:
        """All tables, each with the name of its files."""
        return [part for chapter in self.chapters for part in chapter.parts if not isinstance(part, Picture)]


def contents(collection: Collection) -> Contents:
    """Return what there is to say of a collection; a chapter without anything in it is left out.

    >>> contents(Collection("nothing")).chapters
    ()
    """
    runs, sweeps = collection.runs, collection.sweeps
    chapters = (
        Chapter("How the best lr moves with eps", tuple(_heat_maps(sweeps)), _READING_A_MAP),
        Chapter(
            "What a search finds for its trials", (*_budgets(sweeps), *_table_of_sweeps(sweeps)), _READING_A_BUDGET
        ),
        Chapter("Methods beside each other", (*_table_1(runs), *_learning_curves(runs))),
        Chapter("The problem of Theorem 1", tuple(_figures_1(collection.synthetics)), _READING_FIGURE_1),
        Chapter("What a step costs", tuple(_step_bars(collection.step_times))),
    )
    return Contents(tuple(findings(collection)), tuple(chapter for chapter in chapters if chapter.parts))


_READING_A_MAP = (
    "A cell is a training: eps from left to right, lr from bottom to top. Colours go by rank over all maps of a row,"
    " bright is good. The line, the ridge, joins the best lr of each eps; the thick ring is the best of all. Squares,"
    " joined by dots, are where a search by two lines goes. Hatched cells diverged, blank ones were not run."
)


_READING_FIGURE_1 = (
    "Means over time, as in the paper's Figure 1: lines are averages over replicas, bands hold the middle 80 % of them."
)
_READING_A_BUDGET = (
    "The best value after so many trials: of the search by two lines and a ring, and of as many cells of the same grid"
    " drawn at random (the median)."
)


def _heat_maps(sweeps: Sequence[Sweep]) -> Iterator[Picture]:
    names: set[str] = set()
    for number, (title, group) in enumerate(comparable_sweeps(sweeps), 1):
        maps = [found for sweep in group if (found := _heat_map(sweep)) is not None]
        if not maps:
            continue
        first = group[0]
        scale = shades(maps, direction=first.direction)
        panels = tuple(
            Panel(each.summary(), _draw([each], scale, first), each.hover(0, first.measure)) for each in maps
        )
        # After the folder in which they lie, so that it is the same when there are others beside it.
        folder = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(first.place).parent.name.lower()).strip("-")
        name = f"heat-maps-{folder}" if folder and f"heat-maps-{folder}" not in names else f"heat-maps-{number}"
        names.add(name)
        yield Picture(name, title, _draw(maps, scale, first), panels)


def _heat_map(sweep: Sweep) -> HeatMap | None:
    records = [record for record in sweep.records if record.lr is not None and record.eps is not None]
    return heat_map(sweep.title, records, direction=sweep.direction) if records else None


def _draw(maps: Sequence[HeatMap], scale: Mapping[float, float], first: Sweep) -> Draw:
    return lambda: draw_heat_maps(maps, measure=first.measure, direction=first.direction, shade=scale)


def _budgets(sweeps: Sequence[Sweep]) -> Iterator[Picture]:
    for number, chart in enumerate(budget_curves(sweeps), 1):
        yield Picture(f"budgets-{number}", chart.title, partial(draw_budgets, chart), (Panel(told_of_budgets(chart)),))


def _table_of_sweeps(sweeps: Sequence[Sweep]) -> Iterator[tuple[str, Table]]:
    if sweeps:
        yield "sweeps", table_of_sweeps(sweeps)


def _table_1(runs: Sequence[Run]) -> Iterator[tuple[str, Table]]:
    if runs:
        yield "table-1", table_1(runs)


def _learning_curves(runs: Sequence[Run]) -> Iterator[Picture]:
    for number, chart in enumerate(learning_curves(runs), 1):
        caption = told_of_learning(chart)
        yield Picture(f"learning-curves-{number}", chart.title, partial(draw_learning_curves, chart), (Panel(caption),))


def _figures_1(synthetics: Sequence[Synthetic]) -> Iterator[Picture]:
    for number, synthetic in enumerate(synthetics, 1):
        starts = figure_1(synthetic)
        caption = told_of_figure_1(starts)
        yield Picture(f"figure-1-{number}", synthetic.place, partial(draw_figure_1, starts), (Panel(caption),))


def _step_bars(all_times: Sequence[StepTimes]) -> Iterator[Picture]:
    for number, times in enumerate(all_times, 1):
        groups = step_bars(times)
        about = ", ".join(f"{key} {value}" for key, value in times.about.items())
        caption = f"{told_of_bars(groups)} {about}".strip()
        yield Picture(f"step-times-{number}", times.place, partial(draw_step_bars, groups), (Panel(caption),))
