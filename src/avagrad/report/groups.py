"""Which runs and which sweeps can be compared, and what they are called; and what is a number."""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

from avagrad.lab.methods import METHODS
from avagrad.lab.tasks import TASKS, task_class
from avagrad.report.reading import Run, Sweep
from avagrad.tune.space import Cell

__all__ = [
    "Group",
    "Setting",
    "comparable",
    "comparable_sweeps",
    "direction_of",
    "grouped",
    "mean",
    "mean_of_all",
    "number",
    "titles_of",
    "told_apart",
    "unit_of",
]

T = TypeVar("T")

LARGEST = 1e100  # nobody can read what is beyond, and the arithmetic of an axis would overflow
# What makes errors comparable, beside the task's own options and data; and what a method is tuned by.
_COMPARED = ("task", "preset", "epochs", "milestones", "factor", "clip", "precision")
_TUNED = ("lr", "eps", "weight_decay", "optimizer_options")


def number(value: object) -> float | None:
    """Return a value as a number that can be worked with; None where it is none, or beyond all use.

    >>> number(3), number("3"), number(True), number(float("nan")), number(1e308)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        return None
    return float(value)


def mean(values: Sequence[float]) -> float:
    """Return the mean, of large numbers too.

    >>> mean([1.0, 2.0]), mean([1.5e308, 1.5e308])
    (1.5, 1.5e+308)
    """
    return math.fsum(value / len(values) for value in values)


def mean_of_all(values: Sequence[object]) -> float | None:
    """Return the mean; None where there is nothing, or where one is no number.

    >>> mean_of_all([1, 2]), mean_of_all([1, None]), mean_of_all([])
    (1.5, None, None)
    """
    found = [known for value in values if (known := number(value)) is not None]
    return mean(found) if found and len(found) == len(values) else None


def unit_of(task: str) -> str:
    """Return the unit of a task's error; empty where the task is not one of ours.

    >>> unit_of("digits"), unit_of("chars"), unit_of("my_module:MyTask")
    ('%', 'bits', '')
    """
    return task_class(task).unit if task in TASKS else ""


def direction_of(sweep: Sweep) -> str:
    """Return which way a sweep goes; what is not known is taken as less is better.

    >>> direction_of(Sweep("a", "a", (), {}, {}, "up"))
    'minimize'
    """
    return "maximize" if sweep.direction == "maximize" else "minimize"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def grouped(things: Iterable[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[T]]:
    """Return things that have the same key together, in the order in which they come.

    >>> grouped([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[Hashable, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def _options(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    options = config.get(name)
    return {str(key): value for key, value in options.items()} if isinstance(options, Mapping) else {}


def _place_of(name: str, names: Mapping[str, object]) -> int:
    return list(names).index(name) if name in names else len(names)


def told_apart(
    titles: Sequence[str], details: Sequence[Mapping[str, Any]], among: Sequence[str] | None = None
) -> list[str]:
    """Return the titles, those that are the same with the details in which they differ.

    With ``among``, only titles that have the same one need to differ.

    >>> told_apart(["a", "b", "b"], [{}, {"x": 1, "y": 2}, {"x": 1, "y": 3}])
    ['a', 'b, y=2', 'b, y=3']
    """
    told = list(titles)
    within = among or [""] * len(titles)
    for places in grouped(range(len(titles)), lambda i: (within[i], titles[i])).values():
        keys = dict.fromkeys(key for i in places for key in details[i])
        differing = [key for key in keys if len({_text(details[i].get(key)) for i in places}) > 1]
        for i in places:
            there = [key for key in differing if details[i].get(key) is not None]
            told[i] = ", ".join([titles[i], *(f"{key}={_text(details[i][key])}" for key in there)])
    return told


@dataclass(frozen=True)
class Setting:
    """A method with its lr, eps and options, and a run for each seed.

    >>> run = Run("a", {"optimizer": "adam", "lr": 0.1, "eps": 1e-8}, {}, (), 1, {"status": "diverged"})
    >>> Setting("Adam, lr 0.1, eps 1e-08", "Adam", "adam", (run,)).validation
    inf
    """

    title: str
    method: str  # its title
    optimizer: str
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
        """The mean validation error of those that ended: infinite where one diverged, None where one has none."""
        return math.inf if self.diverged else mean_of_all([run.validation for run in self.ended])


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the method, its settings and the seed.

    >>> Group("digits (mlp)", "digits", {}, ()).settings
    ()
    """

    title: str
    task: str
    details: Mapping[str, Any]
    settings: tuple[Setting, ...]


def comparable(runs: Sequence[Run]) -> list[Group]:
    """Return the runs in groups that can be compared, each with its settings in the order of the methods.

    The same data at another path is the same data, where the runs noted what they read. Of several runs of one seed,
    one that ended is taken, else the first.

    >>> run = Run("a", {"task": "digits", "optimizer": "sgd", "lr": 0.1, "seed": 0}, {}, (), 1, None)
    >>> [(group.title, [setting.title for setting in group.settings]) for group in comparable([run, run])]
    [('digits', ['SGD, lr 0.1'])]
    """
    groups = list(grouped(runs, lambda run: _key(run.config, run.about)).values())
    details = [_details(group[0].config, group[0].about) for group in groups]
    titles = told_apart([_group_title(group[0].config) for group in groups], details)
    found = [
        Group(title, group[0].task, detail, _settings(group))
        for title, group, detail in zip(titles, groups, details, strict=True)
    ]
    return sorted(found, key=lambda group: (_place_of(group.task, TASKS), group.title))


def _key(config: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    details = _details(config, about)
    if "hash" in details:
        del details["data"]  # its name says less
    return _text(details)


def _details(config: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    details = {key: config[key] for key in _COMPARED if config.get(key) is not None} | _options(config, "task_options")
    if data := config.get(
        "data"
    ):  # else they are those that come with the task, and a study does not note what it read
        details["data"] = PurePath(str(data)).name
        read = about.get("data")
        details |= {"hash": read[:8]} if isinstance(read, str) else {}
    return details


def _group_title(config: Mapping[str, Any]) -> str:
    named = [_options(config, "task_options").get("model"), config.get("preset")]
    told = [str(name) for name in named if name and name not in ("quick", "none")]
    task = str(config.get("task") or "unknown task")
    return f"{task} ({', '.join(told)})" if told else task


def _settings(runs: Sequence[Run]) -> tuple[Setting, ...]:
    found = list(
        grouped(runs, lambda run: _text({key: run.config.get(key) for key in ("optimizer", *_TUNED)})).values()
    )
    found.sort(key=lambda same: _order(same[0]))
    methods = [same[0].title or "unknown method" for same in found]
    plain = [", ".join(filter(None, (title, str(_cell(same[0]))))) for title, same in zip(methods, found, strict=True)]
    details = [_method_details(same[0].config) for same in found]
    return tuple(
        Setting(title, method, same[0].optimizer, _one_for_each_seed(same))
        for title, method, same in zip(told_apart(plain, details), methods, found, strict=True)
    )


def _cell(run: Run) -> Cell:
    return Cell(number(run.config.get("lr")), number(run.config.get("eps")))


def _order(run: Run) -> tuple[int, str, float, float]:
    lr, eps = _cell(run)
    return _place_of(run.optimizer, METHODS), run.title, lr or 0.0, eps or 0.0


def _one_for_each_seed(runs: Sequence[Run]) -> tuple[Run, ...]:
    by_seed = grouped(runs, lambda run: run.seed)
    return tuple(min(same, key=lambda run: run.status == "unfinished") for same in by_seed.values())


def comparable_sweeps(sweeps: Sequence[Sweep]) -> list[tuple[str, list[Sweep]]]:
    """Return the sweeps in groups that can be compared, each with a title.

    >>> sweep = Sweep("maps/adam.jsonl", "adam", (), {}, {}, "minimize")
    >>> [(title, len(group)) for title, group in comparable_sweeps([sweep, sweep])]
    [('maps', 2)]
    """
    groups = list(grouped(sweeps, _sweep_key).values())
    details = [_details(group[0].config, group[0].about) for group in groups]
    titles = told_apart([_sweeps_title(group[0]) for group in groups], details)
    return list(zip(titles, groups, strict=True))


def _sweep_key(sweep: Sweep) -> Hashable:
    # Where nothing is known of the settings, what lies in one folder was put there to be compared.
    where = "" if sweep.task else str(PurePath(sweep.place).parent)
    return where, direction_of(sweep), sweep.measure, _key(sweep.config, sweep.about)


def _sweeps_title(sweep: Sweep) -> str:
    folder = PurePath(sweep.place).parent.name or sweep.name
    return _group_title(sweep.config) if sweep.task else folder


def titles_of(sweeps: Sequence[Sweep]) -> list[str]:
    """Return the titles of sweeps; where those of one task are the same, with what they differ in, or their places.

    >>> sweep = Sweep("a", "adam", (), {}, {}, "minimize")
    >>> titles_of([sweep, Sweep("b", "adam", (), {}, {}, "minimize")])
    ['adam, in=a', 'adam, in=b']
    """
    titles, tasks = [sweep.title for sweep in sweeps], [sweep.task for sweep in sweeps]
    for details in (
        [_method_details(sweep.config) for sweep in sweeps],
        [_details(sweep.config, sweep.about) for sweep in sweeps],
        [{"in": sweep.place} for sweep in sweeps],
    ):
        titles = told_apart(titles, details, tasks)
    return titles


def _method_details(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight_decay": config.get("weight_decay"), **_options(config, "optimizer_options")}
