"""A run: its folder, its clock, its checkpoints, and the signals that stop it.

A training (:mod:`avagrad.lab.train`) and an ensemble (:mod:`avagrad.lab.ensemble`) are both a :class:`Run`.
:func:`open_run` makes what a run lives in, for the length of a ``with`` block: a folder that nobody else writes to, the
threads and the precision it computes with, and ears for SIGTERM and SIGINT.
"""

import contextlib
import dataclasses
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from avagrad.lab.config import Config
from avagrad.lab.environment import about, computing_with
from avagrad.lab.folder import Follower, RunFolder
from avagrad.lab.processes import Processes
from avagrad.lab.tasks.base import Task
from avagrad.stopping import Stopped, StopRequest, catch_signals

__all__ = ["Callback", "OpenRun", "Run", "open_run"]

# A run that goes on may find its data elsewhere (they are compared by content), and keeps its number of threads.
_MAY_DIFFER = {"sources", "data", "threads"}
_DEFAULTS = {x.name: x.default for x in dataclasses.fields(Config) if x.default is not dataclasses.MISSING}
CHECKS_EVERY = 64  # steps between two reads of a GPU's counters, each of which waits for it


class Callback:
    """Callbacks of a run; the base class ignores them.

    >>> Callback().on_record({"step": 1})
    """

    def on_start(self, config: Config, done: int, total: int) -> None:
        """Called when a run begins, or goes on after ``done`` of ``total`` steps."""

    def on_step(self, done: int) -> None:
        """Called after each step."""

    def on_record(self, row: dict[str, Any]) -> None:
        """Called with each line of the metrics."""


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """What a run lives in, while it is open.

    >>> OpenRun(RunFolder(Path("runs/x")), {}, {}, None, StopRequest(), Processes(), 30.0, None).folder.path.name
    'x'
    """

    folder: RunFolder
    facts: dict[str, Any]  # about this process: versions, commit, data, remarks
    begun_with: dict[str, Any]  # the same, of the process that began the run
    result: dict[str, Any] | None  # of a run that is finished
    stop: StopRequest
    processes: Processes
    save_every: float
    deadline: float | None  # of time.monotonic()


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
    processes: Processes | None = None,
) -> Iterator[OpenRun]:
    """Open the run that a Config describes, new or to go on with.

    Args:
        config: of the run.
        task: its data are compared with those that the run was begun on.
        out: the folder.
        identity: what makes the run this run, as JSON; by default the Config.
        resume: ``out`` may hold this same run.
        save_every: seconds between checkpoints.
        deadline: the time of ``time.monotonic()`` at which the run saves and stops, as if a signal had come.
        processes: those that share the run; the first one writes.

    >>> import tempfile
    >>> from avagrad.lab.config import configure
    >>> from avagrad.lab.tasks import task_class
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with open_run(configure("digits"), task_class("digits")(), place) as opened:
    ...         opened.result is None, sorted(path.name for path in Path(place).iterdir())
    (True, ['config.json'])
    """
    processes = processes or Processes()
    facts = about() | {"data": task.fingerprint(), "remarks": list(task.remarks)}
    may_differ = _MAY_DIFFER - ({"threads"} if config.sources.get("threads") == "given" else set())
    identity = identity or config.as_json()
    claim = RunFolder.claim(out, identity, facts, resume=resume, may_differ=may_differ, defaults=_DEFAULTS)
    with contextlib.ExitStack() as stack:
        folder = processes.first(lambda: stack.enter_context(claim)) or Follower(Path(out))
        written = folder.begun_on(facts["data"], config.data)
        result = folder.read_result()
        stop = StopRequest()
        if result is None:
            threads, precision = int(written["config"]["threads"]), config.precision
            stack.enter_context(computing_with(threads, precision=precision, deterministic=config.deterministic))
            stop = stack.enter_context(catch_signals())
        yield OpenRun(folder, facts, written["about"], result, stop, processes, save_every, deadline)


class Run(ABC):
    """A run in progress. All that changes while it goes on is in :meth:`state_dict`.

    >>> sorted(Run.__abstractmethods__)
    ['load_state_dict', 'run', 'state_dict']
    """

    def __init__(self, opened: OpenRun, callback: Callback | None = None) -> None:
        self.folder, self.facts, self.processes = opened.folder, opened.facts, opened.processes
        self.callback = callback if callback is not None and opened.processes.rank == 0 else Callback()
        self._stop, self._save_every, self._deadline = opened.stop, opened.save_every, opened.deadline
        self.set_clock(0.0)

    @abstractmethod
    def run(self) -> Any:
        """Run to the end, from where the run is."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    # --- the clock ---

    def set_clock(self, seconds: float) -> None:
        """Count seconds from here on, beginning at these."""
        self._seconds_before, self._began = seconds, time.monotonic()
        self._saved = self._began

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken so far, in all processes that it ran in."""
        return self._seconds_before + time.monotonic() - self._began

    # --- checkpoints ---

    def load(self) -> dict[str, Any] | None:
        """Go on from the checkpoint, if there is one, and return it."""
        state = self.folder.load()
        if state is not None:
            try:
                self.load_state_dict(state)
            except (KeyError, TypeError, AttributeError, RuntimeError) as error:
                raise ValueError(f"the checkpoint in {self.folder.path} is not one of this run ({error!r}).") from error
        return state

    def save(self) -> None:
        """Write a checkpoint."""
        self.folder.save(self.state_dict())
        self._saved = time.monotonic()

    def save_if_due(self) -> None:
        """Write a checkpoint where it is time for one; where a signal came, raise Stopped after it."""
        now = time.monotonic()
        is_over = self._deadline is not None and now >= self._deadline
        is_due = now - self._saved >= self._save_every
        number = self._stop.signal or (signal.SIGTERM if is_over else int(is_due))  # no signal that comes here is 1
        wanted = self.processes.largest(number)
        if wanted:
            self.save()
        if wanted > 1:
            path = self.folder.path
            raise Stopped(f"stopped and saved; avagrad resume {path} goes on", number=wanted, folder=path)


def check_save_every(seconds: float) -> None:
    """Reject what is not a number of seconds."""
    if not seconds >= 0:
        raise ValueError(f"save_every is {seconds!r}, but must be a number of seconds of at least 0.")
