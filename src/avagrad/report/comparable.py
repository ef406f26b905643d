"""Which runs and which sweeps may be compared, and names that say what differs between them.

A name begins with the method. Options, settings of the task, seeds and the number of points follow where two of the
same name differ in them. A folder is never a part of a name.
"""

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from avagrad.lab.methods import METHODS
from avagrad.lab.tasks import TASKS, task_class
from avagrad.report.reading import Run, Sweep
from avagrad.report.values import grouped, mean_of_all, number
from avagrad.tune.space import Cell

__all__ = ["comparable", "comparable_sweeps", "distinct_names", "names_of", "task_name"]

# What makes errors comparable, besides the task's own options and data; and what a method is tuned by.
_COMPARED = ("task", "objective", "preset", "epochs", "milestones", "factor", "clip", "precision")
_TUNED = ("lr", "eps", "weight_decay", "optimizer_options")
_NAMED = 3  # methods in the name of a group whose task is not known


def unit_of(task: str) -> str:
    """Return the unit of a task's error; empty if the task is not one of ours."""
    return task_class(task).unit if task in TASKS else ""


def task_name(config: Mapping[str, Any]) -> str:
    """Return a task's name with its model and preset.

    >>> task_name({"task": "digits", "preset": "quick", "task_options": {"model": "mlp"}}), task_name({})
    ('digits (mlp)', 'unknown task')
    """
    named = [_options(config, "task_options").get("model"), config.get("preset")]
    shown = [str(name) for name in named if name and name not in ("quick", "none")]
    task = str(config.get("task") or "unknown task")
    return f"{task} ({', '.join(shown)})" if shown else task


def distinct_names(
    names: Sequence[str], details: Sequence[Mapping[str, Any]], among: Sequence[str] | None = None, few: bool = False
) -> list[str]:
    """Return the names, with the details in which those of the same name differ.

    With ``among``, only names that have the same entry there need to differ. With ``few``, no more details are added
    than it takes.

    >>> distinct_names(["a", "b", "b"], [{}, {"x": 1, "y": 2, "z": 1}, {"x": 1, "y": 3, "z": True}])
    ['a', 'b, y=2, z=1', 'b, y=3, z']
    >>> distinct_names(["b", "b"], [{"x": 1, "y": 2}, {"x": 2, "y": 3}], few=True)
    ['b, x=1', 'b, x=2']
    """
    found = list(names)
    within = among or [""] * len(names)
    for places in grouped(range(len(names)), lambda i: (within[i], names[i])).values():
        keys = dict.fromkeys(key for i in places for key in details[i])
        added: list[str] = []
        for key in keys:
            base = added if few else []
            kinds = [{tuple(_text(details[i].get(x)) for x in xs) for i in places} for xs in (base, [*base, key])]
            if len(kinds[1]) > len(kinds[0]):
                added.append(key)
        for i in places:
            shown = [_detail(key, details[i][key]) for key in added if details[i].get(key) is not None]
            found[i] = ", ".join([names[i], *shown])
    return found


def _detail(key: str, value: object) -> str:
    if key in ("seeds", "points"):
        return f"{value} {key if value != 1 else key[:-1]}"
    return key if value is True else f"{key}={value if isinstance(value, bool) else _text(value)}"


def names_of(sweeps: Sequence[Sweep]) -> list[str]:
    """Return names of sweeps that say what differs: the method, its options, the task's settings, seeds, points.

    >>> adam = [Sweep(place, "adam", (), {"optimizer": "adam"}, {}, "minimize") for place in ("a", "b")]
    >>> names_of(adam[:1]), names_of(adam)
    (['Adam'], ['Adam (1)', 'Adam (2)'])
    """
    tasks = [sweep.task for sweep in sweeps]
    names = [_method(sweep) for sweep in sweeps]
    for details in (
        [_method_details(sweep.config) for sweep in sweeps],
        [_details(sweep.config, sweep.about) for sweep in sweeps],
        [{"seeds": len({record.seed for record in sweep.records})} for sweep in sweeps],
        [{"points": len(sweep.known.cells)} for sweep in sweeps],
    ):
        names = distinct_names(names, details, tasks)
    return _numbered(names, [sweep.place for sweep in sweeps], tasks)


def _method(sweep: Sweep) -> str:
    name = str(sweep.config.get("optimizer") or "")
    return METHODS[name].title if name in METHODS else name or sweep.name


def _numbered(names: Sequence[str], places: Sequence[str], among: Sequence[str]) -> list[str]:
    """Number names that are still the same, unless it is the same thing twice."""
    found = list(names)
    for same in grouped(range(len(names)), lambda i: (among[i], names[i])).values():
        order = list(dict.fromkeys(places[i] for i in same))
        for i in same if len(order) > 1 else ():
            found[i] = f"{names[i]} ({order.index(places[i]) + 1})"
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _options(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    options = config.get(name)
    return {str(key): value for key, value in options.items()} if isinstance(options, Mapping) else {}


def _method_details(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight_decay": config.get("weight_decay"), **_options(config, "optimizer_options")}


def _details(config: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    details = _options(config, "task_options") | {key: config[key] for key in _COMPARED if config.get(key) is not None}
    if data := config.get("data"):  # else they come with the task; a study does not note what it read
        details = {"data": PurePath(str(data)).name} | details  # first, since it says most
        return details | ({"hash": read[:8]} if isinstance(read := about.get("data"), str) else {})
    return details


def _key(config: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    details = _details(config, about)
    if "hash" in details:
        del details["data"]  # its name says less
    return _text(details)


@dataclass(frozen=True)
class Setting:
    """A method with its lr, eps and options, and a run for each seed."""

    title: str
    method: str  # its title
    runs: tuple[Run, ...]

    @property
    def ended(self) -> tuple[Run, ...]:
        """The runs that have a result."""
        return tuple(run for run in self.runs if run.status != "unfinished")

    @property
    def diverged(self) -> int:
        """How many of the runs diverged."""
        return sum(run.status == "diverged" for run in self.runs)

    @property
    def validation(self) -> float | None:
        """The mean validation error of those that ended: infinite if one diverged, None if one has none."""
        return math.inf if self.diverged else mean_of_all([run.validation for run in self.ended])


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the method, its settings and the seed."""

    title: str
    task: str
    details: Mapping[str, Any]
    settings: tuple[Setting, ...]


def comparable(runs: Sequence[Run]) -> list[Group]:
    """Return the runs in groups that may be compared, each with its settings in the order of the methods.

    The same data at another path is the same data, if the runs noted what they read. Of several runs of one seed, one
    that ended is taken, else the first.

    >>> run = Run("a", {"task": "digits", "optimizer": "sgd", "lr": 0.1, "seed": 0}, {}, (), 1, None)
    >>> [(group.title, [setting.title for setting in group.settings]) for group in comparable([run, run])]
    [('digits', ['SGD, lr 0.1'])]
    """
    groups = list(grouped(runs, lambda run: _key(run.config, run.about)).values())
    details = [_details(group[0].config, group[0].about) for group in groups]
    titles = distinct_names([task_name(group[0].config) for group in groups], details, few=True)
    named = zip(titles, groups, details, strict=True)
    found = [Group(title, group[0].task, detail, _settings(group)) for title, group, detail in named]
    return sorted(found, key=lambda group: (_place_of(group.task, TASKS), group.title))


def _settings(runs: Sequence[Run]) -> tuple[Setting, ...]:
    key = ("optimizer", *_TUNED)
    found = list(grouped(runs, lambda run: _text({name: run.config.get(name) for name in key})).values())
    found.sort(key=lambda same: _order(same[0]))
    methods = [same[0].title or "unknown method" for same in found]
    plain = [", ".join(filter(None, (title, str(_cell(same[0]))))) for title, same in zip(methods, found, strict=True)]
    titles = distinct_names(plain, [_method_details(same[0].config) for same in found])
    named = zip(titles, methods, found, strict=True)
    return tuple(Setting(title, method, _one_for_each_seed(same)) for title, method, same in named)


def _place_of(name: str, names: Mapping[str, object]) -> int:
    return list(names).index(name) if name in names else len(names)


def _cell(run: Run) -> Cell:
    return Cell(number(run.config.get("lr")), number(run.config.get("eps")))


def _order(run: Run) -> tuple[int, str, list[float]]:
    place = _place_of(str(run.config.get("optimizer")), METHODS)
    return place, run.title, [value or 0.0 for value in _cell(run)]


def _one_for_each_seed(runs: Sequence[Run]) -> tuple[Run, ...]:
    by_seed = grouped(runs, lambda run: run.seed)
    return tuple(min(same, key=lambda run: run.status == "unfinished") for same in by_seed.values())


def comparable_sweeps(sweeps: Sequence[Sweep]) -> list[tuple[str, list[Sweep]]]:
    """Return the sweeps in groups that may be compared, each with a title.

    >>> maps = [Sweep(f"maps/{name}.jsonl", name, (), {}, {}, "minimize") for name in ("mine", "other")]
    >>> [(title, len(group)) for title, group in comparable_sweeps(maps)]
    [('mine, other', 2)]
    """
    groups = list(grouped(sweeps, _sweep_key).values())
    details = [_details(group[0].config, group[0].about) for group in groups]
    titles = distinct_names([_sweeps_title(group) for group in groups], details, few=True)
    return list(zip(_numbered(titles, [group[0].place for group in groups], [""] * len(groups)), groups, strict=True))


def _sweep_key(sweep: Sweep) -> Hashable:
    if sweep.task:
        return "", sweep.direction, sweep.measure, _key(sweep.config, sweep.about)
    # If nothing is known of the settings, functions of one module, in one folder, were put there to be compared.
    module = sweep.name.rpartition(":")[0]
    config = {key: value for key, value in sweep.config.items() if key != "objective" or not module}
    return str(PurePath(sweep.place).parent), module, sweep.direction, sweep.measure, _key(config, sweep.about)


def _sweeps_title(sweeps: Sequence[Sweep]) -> str:
    if sweeps[0].task:
        return task_name(sweeps[0].config)
    names = list(dict.fromkeys(map(_method, sweeps)))
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])
