"""The paper's Table 1 from runs, next to the paper's own numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from avagrad.lab.methods import METHODS
from avagrad.report.comparable import Group, Setting, comparable, unit_of
from avagrad.report.reading import Collection, Run
from avagrad.report.table import Table, TableCell
from avagrad.report.values import grouped, mean_of_all, rounded

__all__ = ["CHAPTER", "NAME", "NOTE", "caption", "draw", "numbers", "results"]

NAME, CHAPTER, NOTE = "table-1", "Methods compared", ""
_REMARKS = 3  # that a caption has room for


@dataclass(frozen=True)
class Entry:
    """What a method reached: the test error of the setting with the least validation error, over its seeds."""

    setting: str
    mean: float | None
    deviation: float | None  # of the sample; None with one seed
    seeds: int
    diverged: int
    settings: int  # among which this one was chosen


@dataclass(frozen=True)
class Column:
    """The entries of runs that can be compared, by the methods' titles, and the paper's name for the experiment."""

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
    by_method = grouped(group.settings, lambda setting: setting.method)
    entries = {str(method): _entry(settings) for method, settings in by_method.items()}
    return Column(group.title, unit_of(group.task), _paper_name(group), entries)


def _entry(settings: Sequence[Setting]) -> Entry:
    """Choose by validation error, among what has ended."""
    ended = [setting for setting in settings if setting.ended]
    if not ended:
        return Entry(settings[0].title, None, None, 0, 0, len(settings))
    chosen = min(ended, key=lambda each: math.inf if each.validation is None else each.validation)
    errors = [run.test for run in chosen.ended if run.test is not None]
    mean = None if chosen.diverged else mean_of_all([run.test for run in chosen.ended])
    deviation = statistics.stdev(errors) if mean is not None and len(errors) > 1 else None
    return Entry(chosen.title, mean, deviation, len(chosen.ended), chosen.diverged, len(ended))


def _paper_name(group: Group) -> str | None:
    classes, preset = group.details.get("classes"), group.details.get("preset")
    if group.task == "cifar" and classes in (10, 100):
        return f"CIFAR-{classes}"
    if group.task == "chars" and preset in ("paper", "paper-search"):
        return "Penn Treebank"
    return "ImageNet" if group.task == "imagenet" else None


@dataclass(frozen=True)
class Table1:
    """The columns of all runs, and what the runs remark."""

    columns: tuple[Column, ...]
    remarks: tuple[str, ...]
    title: str = ""


def numbers(collection: Collection) -> list[Table1]:
    """Return the table of all runs; nothing if there are none.

    >>> numbers(Collection("nothing"))
    []
    """
    return [Table1(tuple(results(runs)), _remarks(runs))] if (runs := collection.runs) else []


def draw(numbers: Table1) -> Table:
    """Return the table, next to the paper's own numbers.

    >>> end = {"status": "finished", "validation": {"error": 2.0}, "test": {"error": 3.0}}
    >>> config = {"task": "cifar", "optimizer": "sgd", "task_options": {"classes": 10}}
    >>> print(draw(numbers(Collection("a", (Run("a", config, {}, (), 1, end),)))[0]).csv(), end="")
    method,"cifar, test error, %","paper, CIFAR-10"
    SGD,3.00 (1 seed),3.86 (0.08)
    """
    titles = _methods_in_order(numbers.columns)
    columns = {"method": [TableCell(title) for title in titles]}
    for column in numbers.columns:
        means = [entry.mean for entry in column.entries.values() if entry.mean is not None]
        lowest = rounded(min(means, default=None), column.unit)  # what reads the same is a tie
        columns[column.heading] = [_cell(column.entries.get(title), column.unit, lowest) for title in titles]
        if column.paper is not None:
            columns[f"paper, {column.paper}"] = [TableCell(_papers(title, column.paper)) for title in titles]
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)), caption(numbers))


def _methods_in_order(columns: Sequence[Column]) -> list[str]:
    known = [record.title for record in METHODS.values()]

    def order(title: str) -> tuple[int, str]:
        base = title.partition(", ")[0]  # what follows are options
        return known.index(base) if base in known else len(known), title

    return sorted({title for column in columns for title in column.entries}, key=order)


def _cell(entry: Entry | None, unit: str, lowest: str) -> TableCell:
    if entry is None:
        return TableCell("")
    if entry.seeds == 0 or entry.diverged:
        return TableCell(f"diverged ({entry.diverged} of {entry.seeds})" if entry.diverged else "unfinished")
    error = rounded(entry.mean, unit)
    spread = "(1 seed)" if entry.seeds == 1 else f"({rounded(entry.deviation, unit)}, {entry.seeds} seeds)"
    return TableCell(f"{error} {spread}" if error else "", bold=error == lowest)


def _papers(title: str, experiment: str) -> str:
    return next((record.paper_errors.get(experiment, "") for record in METHODS.values() if record.title == title), "")


def caption(numbers: Table1) -> str:
    """Return how the entries were chosen, and what the runs remark.

    >>> caption(Table1((), ("The images were changed.",)))
    'Test error at the end of training, the best of a column in bold. The images were changed.'
    """
    entries = [entry for column in numbers.columns for entry in column.entries.values()]
    several = [entry.settings for entry in entries if entry.settings > 1]
    sentences = ["Test error at the end of training, the best of a column in bold."]
    if any(entry.seeds > 1 for entry in entries):
        sentences.append("In brackets the sample standard deviation over seeds.")
    if several:
        low, high = min(several), max(several)
        sentences.append(
            "Of a method with several settings, the one with the least mean validation error is taken: of"
            f" {low if low == high else f'{low} to {high}'} settings."
        )
    if any(column.paper for column in numbers.columns):
        sentences.append("The paper's numbers are from its Table 1.")
    return " ".join([*sentences, *numbers.remarks])


def _remarks(runs: Sequence[Run]) -> tuple[str, ...]:
    lists = [(run.result or {}).get("remarks") for run in runs]
    texts = [text for found in lists if isinstance(found, list) for text in found if isinstance(text, str)]
    return tuple(dict.fromkeys(texts))[:_REMARKS]
