"""A run: its folder, its clock, its checkpoints, and the signals that stop it.

A training (:mod:`avagrad.lab.train`) and an ensemble (:mod:`avagrad.lab.ensemble`) are both a :class:`Run`.
:func:`open_run` is a context manager that sets up a run: it locks the folder, sets the number of threads and the
precision, and catches SIGTERM and SIGINT.
"""

import contextlib
import dataclasses
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from avagrad.checks import require
from avagrad.lab.config import Config
from avagrad.lab.environment import about, computing_with
from avagrad.lab.folder import RunFolder
from avagrad.lab.tasks import task_class
from avagrad.lab.tasks.base import Task
from avagrad.stopping import Stopped, StopRequest, catch_signals

# A resumed run may find its data elsewhere (they are compared by content), and keeps its number of threads.
_MAY_DIFFER = {"sources", "data", "threads"}
_DEFAULTS = {x.name: x.default for x in dataclasses.fields(Config) if x.default is not dataclasses.MISSING}
CHECKS_EVERY = 64  # steps between reads of a GPU's counters, each of which synchronises


class Callback:
    """Callbacks of a run; the base class ignores them."""

    def on_start(self, config: Config, done: int, total: int) -> None:
        """Called when a run begins, or is resumed after ``done`` of ``total`` steps."""

    def on_step(self, done: int) -> None:
        """Called after each step."""

    def on_record(self, row: dict[str, Any]) -> None:
        """Called with each line of the metrics."""


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """The resources of an open run."""

    folder: RunFolder
    facts: dict[str, Any]  # about this process: versions, commit, data, remarks
    first_facts: dict[str, Any]  # the same, about the process that began the run
    result: dict[str, Any] | None  # of a run that is finished
    stop: StopRequest
    save_every: float
    deadline: float | None  # of time.monotonic()


def _may_differ(config: Config) -> set[str]:
    return _MAY_DIFFER - ({"threads"} if config.sources.get("threads") == "given" else set())


def check_same_run(config: Config, folder: RunFolder) -> None:
    """Raise an error if the folder contains another run than the one that a Config describes."""
    folder.check_same_run(config.as_json(), may_differ=_may_differ(config), defaults=_DEFAULTS)


@contextlib.contextmanager
def open_run(
    config: Config,
    task: Task,
    out: str | Path,
    *,
    identity: dict[str, Any] | None = None,
    resume: bool = False,
    save_every: float = 30.0,
    deadline: float | None = None,
) -> Iterator[OpenRun]:
    """Open the run that a Config describes, to begin or to resume it; the arguments are those of ``train``.

    The data of ``task`` are compared with those that the run was begun on. ``identity`` identifies the run, as JSON; by
    default it is the Config.
    """
    require(save_every >= 0, "save_every", save_every, "a number of seconds of at least 0")
    facts = about() | {"data": task.fingerprint(), "remarks": list(task.remarks)}
    identity = identity or config.as_json()
    may_differ = _may_differ(config)
    claim = RunFolder.claim(out, identity, facts, resume=resume, may_differ=may_differ, defaults=_DEFAULTS)
    with claim as folder, contextlib.ExitStack() as stack:
        written = folder.check_data(facts["data"], config.data)
        result = folder.read_result()
        stop = StopRequest()
        if result is None:
            threads, precision = int(written["config"]["threads"]), config.precision
            stack.enter_context(computing_with(threads, precision=precision, deterministic=config.deterministic))
            stop = stack.enter_context(catch_signals())
        yield OpenRun(folder, facts, written["about"], result, stop, save_every, deadline)


class Run(ABC):
    """A run in progress. Everything that changes during the run is in :meth:`state_dict`."""

    def __init__(self, opened: OpenRun, callback: Callback | None = None) -> None:
        self.folder, self.facts = opened.folder, opened.facts
        self.callback = callback or Callback()
        self._stop, self._save_every, self._deadline = opened.stop, opened.save_every, opened.deadline
        self.set_clock(0.0)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""

    # --- the clock ---

    def set_clock(self, seconds: float) -> None:
        """Start the clock at these seconds."""
        self._seconds_before, self._began = seconds, time.monotonic()
        self._saved = self._began

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken so far, including earlier processes."""
        return self._seconds_before + time.monotonic() - self._began

    # --- the folder ---

    def write(self, row: dict[str, Any]) -> None:
        """Write a line of the metrics."""
        self.folder.append(row)
        self.callback.on_record(row)

    def load(self) -> dict[str, Any] | None:
        """Resume from the checkpoint, if there is one, and return it."""
        state = self.folder.load()
        if state is not None:
            try:
                self.load_state_dict(state)
            except (KeyError, TypeError, AttributeError, RuntimeError) as error:
                raise ValueError(
                    f"the checkpoint in {self.folder.path} is of another run or of another version ({error!r}); to "
                    "start the run again from its beginning, remove it."
                ) from error
        return state

    def save(self) -> None:
        """Write a checkpoint."""
        self.folder.save(self.state_dict())
        self._saved = time.monotonic()

    def save_if_due(self) -> None:
        """Write a checkpoint if one is due; after a signal, write one and raise Stopped."""
        now = time.monotonic()
        is_over = self._deadline is not None and now >= self._deadline
        number = self._stop.signal or (signal.SIGTERM if is_over else None)
        if number or now - self._saved >= self._save_every:
            self.save()
        if number:
            path = self.folder.path
            raise Stopped(f"stopped and saved; to resume: avagrad resume {path}", number=number, folder=path)


def new_task(config: Config, download: bool) -> Task:
    """Make the task of a run."""
    cls = task_class(config.task)
    cls.check_options(dict(config.task_options))  # a run of an earlier version may have others
    options = {**config.task_options, "data": config.data, "seed": config.seed, "device": config.device}
    return cls(**options, download=download)
