"""Tables: Table 1 of the paper from runs, and what sweeps found; as Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from avagrad.lab.methods import METHODS
from avagrad.report.curves import known_of
from avagrad.report.groups import (
    Group,
    Setting,
    comparable,
    direction_of,
    mean_of_all,
    number,
    titles_of,
    unit_of,
)
from avagrad.report.reading import Run, Sweep
from avagrad.tune.search import Score, best
from avagrad.tune.separability import Separability, separability, two_digits
from avagrad.tune.space import Cell

__all__ = [
    "Column",
    "Entry",
    "SweepRow",
    "Table",
    "TableCell",
    "duration",
    "results",
    "sweep_rows",
    "table_1",
    "table_of_sweeps",
]

_IN_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_IN_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after a line's end it would begin an argument
    **{letter: f"\\{letter}" for letter in "&%_#${}"},
}
_DIGITS = {"%": 2, "bits": 3}
_REMARKS = 3  # that a caption has room for


# --- a table, whatever is in it ------------------------------------------------------------------


@dataclass(frozen=True)
class TableCell:
    """A text, and whether it is bold.

    >>> TableCell("3.64 (0.06)", bold=True).text
    '3.64 (0.06)'
    """

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    r"""Columns with their headings, rows of cells, and a caption. The first columns, ``left`` of them, are words.

    >>> table = Table(("method", "error, %"), ((TableCell("A_1"), TableCell("3.5", bold=True)),), "A|B")
    >>> print(table.markdown())
    A\|B
    <BLANKLINE>
    | method | error, % |
    | :--- | ---: |
    | A\_1 | **3.5** |
    >>> print(table.csv(), end="")
    method,"error, %"
    A_1,3.5
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    caption: str = ""
    left: int = 1

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"rows must have {len(self.columns)} cells each, as many as there are columns.")

    def markdown(self) -> str:
        r"""Return the table in Markdown, below its caption.

        >>> Table(("a\nb",), ()).markdown()
        '| a b |\n| :--- |'
        """
        lines = [
            [_markdown(name) for name in self.columns],
            [":---" if i < self.left else "---:" for i in range(len(self.columns))],
            *([_bold(_markdown(cell.text), cell, "**", "**") for cell in row] for row in self.rows),
        ]
        caption = [_markdown(self.caption), ""] if self.caption else []
        return "\n".join([*caption, *(f"| {' | '.join(line)} |" for line in lines)])

    def latex(self) -> str:
        r"""Return the table in LaTeX, for the package booktabs.

        >>> print(Table(("a",), ((TableCell("50 %"),),), "b").latex())
        \begin{table}
        \centering
        \caption{b}
        \begin{tabular}{l}
        \toprule
        a \\
        \midrule
        50 \% \\
        \bottomrule
        \end{tabular}
        \end{table}
        """
        kinds = "".join("l" if i < self.left else "r" for i in range(len(self.columns)))
        heading = _line_of_latex([_latex(name) for name in self.columns])
        rows = [_line_of_latex([_bold(_latex(cell.text), cell, r"\textbf{", "}") for cell in row]) for row in self.rows]
        return "\n".join(
            [
                *(r"\begin{table}", r"\centering"),
                *([f"\\caption{{{_latex(self.caption)}}}"] if self.caption else []),
                *(f"\\begin{{tabular}}{{{kinds}}}", r"\toprule", heading, r"\midrule"),
                *rows,
                *(r"\bottomrule", r"\end{tabular}", r"\end{table}"),
            ]
        )

    def csv(self) -> str:
        r"""Return the table as CSV, without the caption. What a spreadsheet would take for a formula becomes a text.

        >>> Table(("a", "b"), ((TableCell("=1+1"), TableCell("-1.5")),)).csv()
        "a,b\r\n'=1+1,-1.5\r\n"
        """
        file = io.StringIO()
        lines = [self.columns, *([cell.text for cell in row] for row in self.rows)]
        csv.writer(file).writerows([_no_formula(text) for text in line] for line in lines)
        return file.getvalue()


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _markdown(text: str) -> str:
    safe = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _IN_MARKDOWN.sub(r"\\\1", safe)


def _latex(text: str) -> str:
    return "".join(_IN_LATEX.get(letter, letter) for letter in _one_line(text))


def _line_of_latex(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _bold(text: str, cell: TableCell, before: str, after: str) -> str:
    return f"{before}{text}{after}" if cell.bold and text else text


def _no_formula(text: str) -> str:
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _row(*texts: str) -> tuple[TableCell, ...]:
    return tuple(TableCell(text) for text in texts)


def _shown(value: float | None, unit: str = "") -> str:
    """Return a number with as many digits as its unit deserves; empty where there is none."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.{_DIGITS[unit]}f}" if unit in _DIGITS and abs(value) < 1e5 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return a time in words; empty where it is not known.

    >>> duration(288.2), duration(0.25), duration(7321), duration(None)
    ('4 min 48 s', '0.25 s', '2 h 2 min', '')
    """
    known = number(seconds)
    if known is None or known < 0:
        return ""
    whole = round(known)
    if known < 10:
        return f"{known:.2g} s"
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min {whole % 60} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


# --- Table 1 -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What a method reached: the test error of the setting with the least validation error, over its seeds.

    >>> Entry("AvaGrad, lr 1, eps 10", 3.8, 0.02, 3, 0, 5).settings
    5
    """

    setting: str
    mean: float | None
    deviation: float | None  # of the sample; None with one seed
    seeds: int
    diverged: int
    settings: int  # among which this one was chosen


@dataclass(frozen=True)
class Column:
    """The entries of runs that can be compared, by the methods' titles, and the paper's name for the experiment.

    >>> Column("digits (mlp)", "%", None, {}).heading
    'digits (mlp), test error, %'
    """

    title: str
    unit: str
    paper: str | None
    entries: Mapping[str, Entry]

    @property
    def heading(self) -> str:
        """The title, and what the numbers are."""
        return f"{self.title}, test error, {self.unit}" if self.unit else f"{self.title}, test error"


def results(runs: Sequence[Run]) -> list[Column]:
    """Return what each method reached, a column for each group of runs that can be compared.

    >>> end = {"status": "finished", "validation": {"error": 2.0}, "test": {"error": 3.0}}
    >>> run = Run("a", {"task": "digits", "optimizer": "sgd", "lr": 0.1}, {}, (), 1, end)
    >>> results([run])[0].entries["SGD"].mean
    3.0
    """
    return [_column(group) for group in comparable(runs)]


def _column(group: Group) -> Column:
    by_method: dict[str, list[Setting]] = {}
    for setting in group.settings:
        by_method.setdefault(setting.method, []).append(setting)
    entries = {method: _entry(settings) for method, settings in by_method.items()}
    return Column(group.title, unit_of(group.task), _paper_name(group), entries)


def _entry(settings: Sequence[Setting]) -> Entry:
    """Choose by validation error. What has not ended cannot be chosen where something has, nor what diverged."""
    ended = [setting for setting in settings if setting.ended]
    if not ended:
        return Entry(settings[0].title, None, None, 0, 0, len(settings))
    chosen = min(ended, key=lambda each: math.inf if each.validation is None else each.validation)
    errors = [run.test for run in chosen.ended]
    known = None if chosen.diverged else mean_of_all(errors)
    return Entry(
        setting=chosen.title,
        mean=known,
        deviation=None if known is None else _deviation([error for error in errors if error is not None]),
        seeds=len(chosen.ended),
        diverged=chosen.diverged,
        settings=len(ended),
    )


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _paper_name(group: Group) -> str | None:
    classes, preset = group.details.get("classes"), group.details.get("preset")
    if group.task == "cifar" and classes in (10, 100):
        return f"CIFAR-{classes}"
    if group.task == "chars" and preset in ("paper", "paper-search"):
        return "Penn Treebank"
    return "ImageNet" if group.task == "imagenet" else None


def table_1(runs: Sequence[Run]) -> Table:
    """Return the paper's Table 1 from runs, with the paper's own numbers beside those of its experiments.

    >>> end = {"status": "finished", "validation": {"error": 2.0}, "test": {"error": 3.0}}
    >>> config = {"task": "cifar", "optimizer": "sgd", "task_options": {"classes": 10}}
    >>> print(table_1([Run("a", config, {}, (), 1, end)]).csv(), end="")
    method,"cifar, test error, %","paper, CIFAR-10"
    SGD,3.00 (1 seed),3.86 (0.08)
    """
    columns = results(runs)
    usual = _usual_seeds(columns)
    headings = ["method"]
    titles = _methods_in_order(columns)
    lines = [[TableCell(title)] for title in titles]
    for column in columns:
        headings.append(column.heading)
        lowest = _lowest(column)
        for line, title in zip(lines, titles, strict=True):
            line.append(_cell_of(column.entries.get(title), column.unit, usual, lowest))
        if column.paper is not None:
            headings.append(f"paper, {column.paper}")
            for line, title in zip(lines, titles, strict=True):
                line.append(TableCell(_papers(title, column.paper)))
    return Table(tuple(headings), tuple(map(tuple, lines)), _caption(runs, columns, usual))


def _methods_in_order(columns: Sequence[Column]) -> list[str]:
    known = [record.title for record in METHODS.values()]

    def order(title: str) -> tuple[int, str]:
        base = title.partition(", ")[0]  # what follows are options
        return known.index(base) if base in known else len(known), title

    return sorted({title for column in columns for title in column.entries}, key=order)


def _usual_seeds(columns: Sequence[Column]) -> int:
    counts = Counter(entry.seeds for column in columns for entry in column.entries.values() if entry.seeds > 1)
    return counts.most_common(1)[0][0] if counts else 1


def _lowest(column: Column) -> str:
    """Return the least mean as it is shown: what looks the same is a tie."""
    means = [entry.mean for entry in column.entries.values() if entry.mean is not None]
    return _shown(min(means, default=None), column.unit)


def _cell_of(entry: Entry | None, unit: str, usual: int, lowest: str) -> TableCell:
    if entry is None:
        return TableCell("")
    if entry.seeds == 0:
        return TableCell("unfinished")
    if entry.diverged:
        return TableCell(f"diverged ({entry.diverged} of {entry.seeds})")
    error = _shown(entry.mean, unit)
    if not error:
        return TableCell("")
    if entry.seeds == 1:
        return TableCell(f"{error} (1 seed)", bold=error == lowest)
    other = "" if entry.seeds == usual else f", {entry.seeds} seeds"
    return TableCell(f"{error} ({_shown(entry.deviation, unit)}){other}", bold=error == lowest)


def _papers(title: str, experiment: str) -> str:
    return next((record.paper_errors.get(experiment, "") for record in METHODS.values() if record.title == title), "")


def _caption(runs: Sequence[Run], columns: Sequence[Column], usual: int) -> str:
    if not columns:
        return "There are no runs."
    several = [entry.settings for column in columns for entry in column.entries.values() if entry.settings > 1]
    told = ["Test error at the end of training, the best of a column in bold."]
    if usual > 1:
        told.append(f"Mean (sample standard deviation) over {usual} seeds where nothing else is said.")
    if several:
        told.append(
            "Where a method was run with several settings, the one with the least mean validation error is taken:"
            f" of {_from_to(several)} settings."
        )
    if any(column.paper for column in columns):
        told.append("The paper's numbers are from its Table 1.")
    return " ".join([*told, *_remarks(runs)])


def _from_to(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _remarks(runs: Sequence[Run]) -> list[str]:
    found: dict[str, None] = {}
    for run in runs:
        remarks = (run.result or {}).get("remarks")
        found |= {remark: None for remark in (remarks if isinstance(remarks, list) else []) if isinstance(remark, str)}
    return list(found)[:_REMARKS]


# --- sweeps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepRow:
    """What a sweep found. A trial is a cell, with all of its seeds; one of them that diverged makes it diverged.

    ``parts`` tells how far lr and eps part, where the grid is whole.

    >>> SweepRow("Adam", "digits", "%", (21, 21), 441, 60.0, 3, Cell(0.1, 0.1), 0.5, None, None).trials
    441
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
    return [_sweep_row(title, sweep) for title, sweep in zip(titles_of(sweeps), sweeps, strict=True)]


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
    """Return the best cell; not all of a space's are there, and some may lack what others have."""
    there = [cell for cell, score in known.items() if not score.failed]
    same_axes = len({tuple(value is None for value in cell) for cell in there}) == 1
    return best(there, known) if same_axes else min(there, key=lambda cell: known[cell].rank, default=None)


def table_of_sweeps(sweeps: Sequence[Sweep]) -> Table:
    """Return what sweeps found, and whether their lr and eps part; blank where a grid is not whole.

    >>> from avagrad.tune.records import Record
    >>> table = table_of_sweeps([Sweep("a", "adam", (Record(0.1, 1e-8, value=3, seconds=2.0),), {}, {}, "minimize")])
    >>> [cell.text for cell in table.rows[0]][:9]
    ['adam', '', '1 x 1', '1', '2 s', '0', '0.1', '1e-08', '3']
    """
    columns = (
        "method", "task", "lr x eps", "trials", "cost", "diverged", "best lr", "best eps", "best value",
        "slope of the ridge", "slope at large eps", "eps where the best lr stays", "two lines and a ring: trials",
        "two lines and a ring: value",
    )  # fmt: skip
    rows = tuple(_row(*_told_sweep(row)) for row in sweep_rows(sweeps))
    caption = (
        "A trial is a cell of the grid, with all of its seeds; values are means over them. The ridge is the best lr at"
        " each eps: its slope is of log lr against log eps. The best lr stays where it is within a step of the best"
        " cell's."
        if rows
        else "There are no sweeps."
    )
    return Table(columns, rows, caption, left=3)


def _told_sweep(row: SweepRow) -> list[str]:
    lr, eps = row.best or Cell(None, None)
    parts = row.parts
    stays = "" if parts is None or parts.stays is None else " to ".join(map(_short, parts.stays))
    return [
        row.method,
        row.task,
        " x ".join(map(str, row.axes)),
        str(row.trials),
        duration(row.seconds),
        str(row.diverged),
        _short(lr),
        _short(eps),
        _shown(row.value, row.unit),
        "" if parts is None else _slope(parts.slope),
        "" if parts is None else _slope(parts.slope_at_large_eps),
        stays,
        "" if parts is None else str(parts.trials),
        _shown(row.found, row.unit),
    ]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _slope(slope: float | None) -> str:
    return "" if slope is None else two_digits(slope)
