"""What a folder holds: runs, records of sweeps over lr and eps, the synthetic problem, step times.

Only regular files are read. What cannot be read is listed as a problem, and the rest is read all the same.
"""

import json
import os
import shutil
import stat
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from avagrad.files import thinned_lines
from avagrad.lab.folder import CONFIG, METRICS, RESULT
from avagrad.lab.methods import METHODS
from avagrad.lab.sweep import STUDY
from avagrad.lab.tasks import TASKS, task_class
from avagrad.report.known import Known, known_of
from avagrad.report.values import number
from avagrad.tune.records import Record, read_records
from avagrad.tune.space import NAMES

__all__ = ["Collection", "Run", "Sweep", "collect", "method_title"]

T = TypeVar("T")

OUTPUT = "report-files"  # next to the page, and never read
_ROWS = 2000  # of a file of metrics that are kept, evenly spaced
_CURVES, _RECORDS = "curves.jsonl", "records.jsonl"
_STEP_KEYS = {"parameters", "optimizer", "milliseconds"}
FILES = (".journal", ".jsonl")  # that may be read alone
_NAMED = 5  # bad lines of a file, or failed points, that are named one by one
_USUAL = {"betas", "momentum"}  # options that are not part of a method's title


@dataclass(frozen=True)
class Problem:
    """A file that could not be read, or a part of it, or points of a study that have failed; and why."""

    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


@dataclass(frozen=True)
class Run:
    """A training run; ``rows`` are its metrics, every ``every``-th of them. Without a result it is unfinished.

    >>> run = Run("a", {"task": "digits", "optimizer": "adam", "lr": 0.1, "eps": 1e-8, "seed": 3}, {}, (), 1, None)
    >>> run.title, run.seed, run.status, run.test
    ('Adam', 3, 'unfinished', None)
    """

    place: str
    config: Mapping[str, Any]
    about: Mapping[str, Any]  # versions, commit, machine
    rows: tuple[Mapping[str, Any], ...]
    every: int
    result: Mapping[str, Any] | None

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.config.get("task", ""))

    @property
    def title(self) -> str:
        """The method's title, with the options that it does not usually have."""
        return method_title(self.config)

    @property
    def seed(self) -> int:
        """The seed."""
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else 0

    @property
    def status(self) -> str:
        """One of "finished", "diverged" and "unfinished"."""
        return "unfinished" if self.result is None else str(self.result.get("status"))

    @property
    def validation(self) -> float | None:
        """The validation error at the end."""
        return _error_in(self.result, "validation")

    @property
    def test(self) -> float | None:
        """The test error at the end."""
        return _error_in(self.result, "test")


@dataclass(frozen=True)
class Sweep:
    """Records over lr and eps that belong together, whoever made them; ``config`` is what is known of their settings.

    >>> sweep = Sweep("a.jsonl", "a", (Record(0.1, 1e-8, value=3, seconds=2.0),), {"task": "digits"}, {}, "minimize")
    >>> sweep.title, sweep.measure, sweep.seconds
    ('a', 'validation error, %', 2.0)
    """

    place: str
    name: str
    records: tuple[Record, ...]
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    direction: str  # less is better, unless it says "maximize"
    search: Mapping[str, Any] = field(default_factory=dict)  # its axes, start and options, if a search made it

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", "maximize" if self.direction == "maximize" else "minimize")

    @cached_property
    def known(self) -> Known:
        """The axes, and the score of each cell."""
        return known_of(self.records, self.direction, self.search)

    @property
    def task(self) -> str:
        """The task's name, empty where it is not known."""
        return str(self.config.get("task", ""))

    @property
    def title(self) -> str:
        """The method's title where it is known, else the name."""
        return method_title(self.config) or self.name

    @property
    def measure(self) -> str:
        """What the values are."""
        if self.task in TASKS:
            unit = task_class(self.task).unit
            return f"validation error, {unit}" if unit == "%" else f"validation, {task_class(self.task).measure}"
        return "value"

    @property
    def seconds(self) -> float | None:
        """What all of them cost together, as far as the records tell."""
        known = [record.seconds for record in self.records if record.seconds is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Synthetic:
    """A run of the problem of Theorem 1: its rows are those of :meth:`avagrad.lab.tasks.synthetic.Curve.rows`."""

    place: str
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class StepTimes:
    """What ``python -m avagrad.bench --json`` wrote."""

    place: str
    about: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Collection:
    """All that a folder holds.

    >>> Collection("runs").summary()
    'nothing'
    """

    folder: str
    runs: tuple[Run, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    synthetics: tuple[Synthetic, ...] = ()
    step_times: tuple[StepTimes, ...] = ()
    problems: tuple[Problem, ...] = ()

    def summary(self) -> str:
        """Return how much there is of each kind."""
        kinds = (
            (self.runs, "run{}"),
            (self.sweeps, "sweep{} over lr and eps"),
            (self.synthetics, "run{} of the synthetic problem"),
            (self.step_times, "table{} of step times"),
            (self.problems, "problem{}"),
        )
        counts = (f"{len(found)} {name.format('s' * (len(found) != 1))}" for found, name in kinds if found)
        return ", ".join(counts) or "nothing"


def method_title(config: Mapping[str, Any]) -> str:
    """Return a method's title with the options that it does not usually have; empty where no method is named.

    >>> method_title({"optimizer": "avagrad", "optimizer_options": {"active_only": True, "norm": 1}})
    'AvaGrad, active_only, norm=1'
    >>> method_title({"optimizer": "lion"}), method_title({})
    ('lion', '')
    """
    name = str(config.get("optimizer") or "")
    title = METHODS[name].title if name in METHODS else name
    usual = {key: value.value for key, value in METHODS[name].defaults.items()} if name in METHODS else {}
    options = config.get("optimizer_options")
    shown = [
        key if value is True else f"{key}={value}"
        for key, value in sorted(options.items() if isinstance(options, Mapping) else ())
        if key not in _USUAL and usual.get(key) != value
    ]
    return ", ".join([title, *shown]) if title else ""


def collect(folder: str | os.PathLike[str]) -> Collection:
    r"""Read all that a folder and the folders in it hold; or one study, or one file of records.

    A folder with ``config.json`` is a run, an ensemble or the synthetic problem; a ``.journal`` is a study; another
    ``.jsonl`` holds records. The runs of a sweep (the folders ``runs`` and ``ensembles`` next to its study) are not
    shown by themselves.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = Path(place, "mine.jsonl").write_text('{"lr": 0.1, "value": 3}\n{"lr": 1, "va')
    ...     found = collect(place)
    >>> [record.lr for record in found.sweeps[0].records], str(found.problems[0])
    ([0.1], 'mine.jsonl: line 2: the last line does not end with a line break, so it is half-written, ...')
    """
    if "://" in os.fspath(folder):
        from avagrad.tune.storage import described

        raise ValueError(f"folder is {described(folder)!r}, a database: run `avagrad study export` first.")
    root = Path(folder)
    if root.is_file() and root.suffix in FILES:
        reader = _Reader(root.parent, root.name)
        reader.read_folder(root.parent, [root.name])
        return reader.collection()
    if not root.is_dir():
        is_there, files = "is a file" if root.exists() else "does not exist", " or ".join(FILES)
        raise ValueError(f"folder is {str(folder)!r}, which {is_there}, but must be a folder or a {files} file.")
    reader = _Reader(root, root.resolve().name)
    for place, names in _walked(root):
        reader.read_folder(place, names)
    return reader.collection()


def _walked(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders in the order of their names, without those that are parts of the one above."""
    for place, folders, names in os.walk(root):
        parts = {"runs", "ensembles"} if STUDY in names else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in parts | {OUTPUT})
        if CONFIG in names:
            folders.clear()
        yield Path(place), sorted(names)


class _Reader:
    """Reads one folder after the other, and keeps what it finds."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.found: dict[str, list[Any]] = defaultdict(list)
        self.problems: list[Problem] = []

    def collection(self) -> Collection:
        found = {kind: tuple(things) for kind, things in self.found.items()}
        return Collection(self.name, **found, problems=tuple(self.problems))

    def read_folder(self, place: Path, names: Sequence[str]) -> None:
        if CONFIG in names:
            self._read_run_folder(place, names)
            return
        for name in names:
            path = place / name
            if name.endswith(".journal"):
                self._read_journal(path)
            elif name.endswith(".jsonl"):
                if records := self._records(path):
                    config = {"optimizer": path.stem} if path.stem in METHODS else {}
                    self.found["sweeps"].append(Sweep(self._name(path), path.stem, records, config, {}, "minimize"))
            elif name.endswith(".json"):
                self._read_step_times(path)

    def _read_run_folder(self, place: Path, names: Sequence[str]) -> None:
        written = self._json(place / CONFIG)
        if written is None:
            return
        config, about = written.get("config"), written.get("about")
        if not isinstance(config, dict):
            self._problem(place / CONFIG, "it is not one that a run has written: 'config' is missing")
            return
        about = about if isinstance(about, dict) else {}
        own = self._name(place), config, about
        if config.get("task") == "synthetic":
            if _CURVES in names:
                self.found["synthetics"].append(Synthetic(*own, self._rows(place / _CURVES, 10**9)[0]))
            else:
                self._problem(place, "the run is not finished: there are no curves yet")
        elif "points" in config or _RECORDS in names:
            records = self._records(place / _RECORDS) if _RECORDS in names else ()
            if records:
                self.found["sweeps"].append(Sweep(own[0], place.name, records, config, about, "minimize"))
            else:
                self._problem(place, "the ensemble is not finished: there are no records yet")
        else:
            rows, every = self._rows(place / METRICS) if METRICS in names else ((), 1)
            self.found["runs"].append(Run(*own, rows, every, self._json(place / RESULT) if RESULT in names else None))

    def _read_journal(self, path: Path) -> None:
        """Read the studies of a journal, in a copy: opening one writes to it."""
        from avagrad.tune.storage import open_storage
        from avagrad.tune.study import Study

        def read(path: Path) -> list[Sweep]:
            copy = shutil.copy(path, place)
            names = [each.study_name for each in open_storage(copy, create=False).get_all_studies()]
            if not names:
                raise ValueError("there is no study in it")
            own, sweeps = self._name(path), []
            for study in (Study(copy, name, create=False) for name in names):
                seen = study.snapshot()
                sweeps.append(Sweep(own, study.name, seen.records, study.about, {}, study.direction, study.search))
                if failed := [f"{key} ({reason})" for key, reason in seen.without_result().items()]:
                    self._problem(path, f"without a result: {'; '.join(_first(failed, 'points'))}")
            return sweeps

        with tempfile.TemporaryDirectory() as place:
            for sweep in self._try(path, read, f"{place}{os.sep}") or ():
                if sweep.records:
                    self.found["sweeps"].append(sweep)
                else:
                    self._problem(path, f"the study {sweep.name!r} has no finished points yet")

    def _read_step_times(self, path: Path) -> None:
        content = self._json(path, must_be_object=False)
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            return  # somebody else's
        rows = tuple(row for row in content["rows"] if isinstance(row, dict) and row.keys() >= _STEP_KEYS)
        if rows:
            about = content.get("about")
            self.found["step_times"].append(StepTimes(self._name(path), about if isinstance(about, dict) else {}, rows))

    def _records(self, path: Path) -> tuple[Record, ...]:
        bad: list[str] = []
        records = tuple(self._try(path, lambda path: read_records(path, bad=bad)) or ())
        # A misspelt key would make a record of a sweep without an lr, or an eps, among those that have one.
        for name in NAMES:
            without = [record for record in records if getattr(record, name) is None]
            if 0 < len(without) < len(records):
                bad.append(f"{len(without)} of {len(records)} records have no {name}, and are left out")
                records = tuple(record for record in records if getattr(record, name) is not None)
        for line in _first(bad, "lines"):
            self._problem(path, line)
        return records

    def _rows(self, path: Path, most: int = _ROWS) -> tuple[tuple[Mapping[str, Any], ...], int]:
        """Return lines of a file that are objects; the others are problems, a last one that is being written is not."""
        lines, every = self._try(path, lambda path: thinned_lines(path, most)) or ([], 1)
        rows, bad = [], []
        for at, line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                bad.append(f"line {at}" + ("" if line.endswith(b"\n") else ", the last, which is half-written"))
        if bad:
            more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
            self._problem(path, f"{'; '.join(bad[:_NAMED])}{more}: not an object in JSON")
        return tuple(rows), every

    def _json(self, path: Path, must_be_object: bool = True) -> dict[str, Any] | None:
        for content in self._try(path, lambda path: [json.loads(path.read_bytes())]) or ():
            if isinstance(content, dict):
                return content
            if must_be_object:
                self._problem(path, "it is not an object in JSON")
        return None

    def _try(self, path: Path, read: Callable[[Path], T], hide: str = "") -> T | None:
        """Return what a file holds. Whatever goes wrong becomes a problem, so that the rest is still read."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, and a device may never end
                raise OSError("it is not a regular file")
            return read(path)
        except Exception as error:  # Optuna, for one, raises whatever a file makes it raise
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._problem(path, f"it cannot be read ({why.replace(hide, '').strip().rstrip('.')})")
            return None

    def _problem(self, path: Path, why: str) -> None:
        self.problems.append(Problem(self._name(path), f"{why.rstrip('.')}."))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _first(found: list[str], what: str) -> list[str]:
    """Return the first few of a list, and how many more there are."""
    return [*found[:_NAMED], *([f"and {len(found) - _NAMED} more {what}"] if len(found) > _NAMED else [])]


def _error_in(result: Mapping[str, Any] | None, part: str) -> float | None:
    found = (result or {}).get(part)
    return number(found.get("error")) if isinstance(found, Mapping) else None
