"""The function ``tune``: find the best lr and eps of an objective."""

import functools
import inspect
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from avagrad.checks import is_number, is_whole, require, require_json
from avagrad.tune.leases import LEASE
from avagrad.tune.loop import SearchLoop
from avagrad.tune.methods import METHODS
from avagrad.tune.result import Progress, Result
from avagrad.tune.space import Space, Values, axes_of
from avagrad.tune.storage import described, is_url
from avagrad.tune.study import DIRECTIONS, Study, pruner_named
from avagrad.tune.trial import Objective
from avagrad.tune.workers.base import Job, WorkerPool
from avagrad.tune.workers.batched import Batched, RunTogether
from avagrad.tune.workers.local import InProcess, LocalProcesses, device_slots
from avagrad.tune.workers.ray import RayTasks

__all__ = ["tune"]


def tune(
    objective: Objective,
    *,
    lr: Values = None,
    eps: Values = None,
    optimizer: str | None = None,
    method: Literal["lines", "separable", "grid"] = "lines",
    direction: Literal["minimize", "maximize"] = "minimize",
    storage: str | os.PathLike[str] | None = None,
    workers: int | None = 0,
    seeds: int | Sequence[int] = 1,
    start_lr: float | None = None,
    start_eps: float | None = None,
    timeout: float | None = None,
    retries: int = 2,
    margin: float = 0.0,
    extend: bool = True,
    pruner: Literal["median", "halving"] | None = None,
    slots_per_gpu: int = 1,
    ray: str | None = None,
    name: str | None = None,
    about: dict[str, Any] | None = None,
    lease: float = LEASE,
    together: RunTogether | None = None,
    watcher: Callable[[Progress], object] | None = None,
) -> Result:
    """Find the best lr and eps for an objective, in about 16 trials where a grid of 13 x 11 has 143.

    After an interruption or a kill, the same call resumes: finished points are never run again, those that were running
    or have failed are. Any number of processes may make the same call on the same storage, and share the work.

    Args:
        objective: a function of a :class:`~avagrad.tune.Trial`; it trains with ``trial.lr``, ``trial.eps`` and
            ``trial.seed`` and returns a number. NaN and infinity mean that the training diverged. It may call
            ``trial.report(step, value)`` while it trains, and suggest further parameters by ``trial.optuna``.
        lr: the values of the learning rate: ``"1e-4:1e3:15"``, ``"paper"``, or a list. None for no such axis.
        eps: the values of epsilon, likewise.
        optimizer: the name of the one that is tuned ("avastep", "avagrad", "adam", ...): its default values are used
            for lr and eps that are not given, and its usual eps to start at. Leave it out to tune lr alone.
        method: ``"lines"`` (a line over lr, a line over eps at its best, each from coarse to fine, and the neighbours
            of the pick), ``"separable"`` (both lines in full, and all eight neighbours), or ``"grid"`` (all points).
        direction: ``"minimize"`` or ``"maximize"``.
        storage: where results are stored: a file, or a database URL. By default a file in ``runs/`` with the
            objective's name, which a lambda or a partial function does not have.
        workers: the number of worker processes; 0 for this process alone; None for one per slot of each GPU.
        seeds: the number of seeds per cell (0, 1, ...), or the seeds themselves. The coarse values of ``"lines"`` are
            run with the first one only.
        start_lr: the value from which coarse ones are counted; by default the middle of the axis.
        start_eps: the eps of the first line over lr; by default 1e-8 for the optimizers adam, adamw and avastep, else
            0.1; if that is not on the axis, its middle.
        timeout: seconds after which a trial is killed and counts as failed; needs ``workers``.
        retries: how often a failed point is run again.
        margin: a neighbour of the pick must be better by more than this for the search to move there.
        extend: ``"lines"`` may extend an axis beyond its end, at most twice, if the best point is there.
        pruner: end trials early by the values that they report: ``"median"`` or ``"halving"``.
        slots_per_gpu: how many workers share a GPU.
        ray: the address of a Ray cluster, on which the workers are placed.
        name: the name of the study; by default the objective's. A database may have many studies.
        about: settings that must be the same for results to be comparable; a later call with other values is rejected.
        lease: seconds without renewal after which a worker's point is given to another worker.
        together: a function that takes all points to be run now, and returns a record for each; it is called instead
            of the objective.
        watcher: called with a :class:`Progress` from time to time; by default it is shown as a line on a terminal.

    >>> import math, tempfile
    >>> def objective(trial):
    ...     return (math.log10(trial.lr) - 1) ** 2 + (math.log10(trial.eps) + 3) ** 2
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result = tune(objective, lr="1e-4:1e3:8", eps="1e-8:100:11", storage=f"{place}/mine.journal")
    >>> result.best.lr, result.best.eps, result.best.value, len(result.trials)
    (10.0, 0.001, 0.0, 14)
    """
    space = Space(*axes_of(lr, eps, optimizer))
    start = space.start(start_lr, start_eps, optimizer)
    if not callable(objective):
        raise TypeError(f"objective is {objective!r}, but must be a function of a trial.")
    numbers: dict[str, Any] = {"timeout": timeout, "retries": retries, "margin": margin, "lease": lease}
    check_search(method, direction, workers, seeds=seeds, pruner=pruner, slots_per_gpu=slots_per_gpu, **numbers)
    margin, lease = float(margin), float(lease)  # NumPy's are not JSON serializable
    seeds = _seeds(seeds)
    if timeout is not None and workers == 0 and ray is None:
        raise ValueError(f"timeout is {timeout!r}, but a process cannot kill itself: it needs at least one worker.")
    called = name or _name_of(objective)
    if storage is None and name is None:
        has_name = not isinstance(objective, functools.partial) and not called.endswith("<lambda>")
        allowed = "a function with a name of its own if there is no storage or name: its results are found by it"
        require(has_name, "objective", objective, allowed)
    if storage is None:
        storage = Path("runs", re.sub(r"[^\w.-]+", "-", called) + ".journal")
    if not isinstance(storage, (str, os.PathLike)):
        raise TypeError(f"storage is {storage!r}, but must be a file, or a database URL.")
    if str(storage).startswith("sqlite") and (workers != 0 or ray is not None):
        raise ValueError(
            f"storage is {str(storage)!r} with workers={workers!r}, but SQLite lets two workers take the same "
            "point: use a journal file or PostgreSQL, or workers=0."
        )
    where = storage if is_url(storage) else Path(storage).expanduser().resolve()
    about = {"objective": _name_of(objective).rpartition(":")[2]} if about is None else about
    require_json("about", about)
    job = None
    if workers != 0 or ray is not None:  # fail before anything is created
        job = Job.of(objective, os.fspath(where), called, pruner=pruner, lease=lease)
    study = Study(where, called, direction=direction, about=about, pruner=pruner)
    if (source := _source_of(objective)) and study.note_source(source):
        warnings.warn(
            f"{called} has changed since its study in {described(where)} began. Earlier results are kept and used: to "
            "start anew, name another storage.",
            stacklevel=2,
        )
    pool: WorkerPool
    if together is not None:
        pool = Batched(together, study, lease=lease)
    elif job is None:
        pool = InProcess(objective, study, lease=lease, prunes=pruner is not None)
    elif ray is not None:
        pool = RayTasks(job, study, ray, workers or None, slots_per_gpu=slots_per_gpu, timeout=timeout)
    else:
        pool = LocalProcesses(job, study, device_slots(workers, slots_per_gpu), timeout=timeout)
    options = {"seeds": seeds, "retries": retries, "margin": margin, "lease": lease, "extend": extend}
    return SearchLoop(study, pool, space, start, method, **options).run(watcher or _terminal_line())  # type: ignore[arg-type]


def check_search(
    method: str,
    direction: str = "minimize",
    workers: int | None = 0,
    *,
    seeds: int | Sequence[int] = 1,
    timeout: float | None = None,
    retries: int = 2,
    margin: float = 0.0,
    pruner: str | None = None,
    slots_per_gpu: int = 1,
    lease: float = LEASE,
) -> None:
    """Reject invalid arguments of a search; they are those of :func:`tune`."""
    require(method in METHODS, "method", method, f"one of {', '.join(METHODS)}")
    require(direction in DIRECTIONS, "direction", direction, f"one of {', '.join(DIRECTIONS)}")
    require(workers is None or is_whole(workers, 0), "workers", workers, "a whole number of at least 0")
    require(is_whole(retries, 0), "retries", retries, "a whole number of at least 0")
    require(is_whole(slots_per_gpu, 1), "slots_per_gpu", slots_per_gpu, "a whole number of at least 1")
    seconds = "a number of seconds above 0"
    require(timeout is None or (is_number(timeout) and timeout > 0), "timeout", timeout, seconds)
    require(is_number(lease) and lease > 0, "lease", lease, seconds)
    require(is_number(margin) and margin >= 0, "margin", margin, "a finite number of at least 0")
    pruner_named(pruner)
    _seeds(seeds)


def _seeds(given: int | Sequence[int]) -> tuple[int, ...]:
    seeds = tuple(range(given)) if is_whole(given) else given
    if not isinstance(seeds, Sequence) or isinstance(seeds, (str, bytes)) or not seeds:
        raise ValueError(f"seeds is {given!r}, but must be a whole number of at least 1, or a list of seeds.")
    fits = len(set(seeds)) == len(seeds) and all(map(is_whole, seeds))
    require(fits, "seeds", given, "different whole numbers")
    return tuple(seeds)


def _name_of(objective: object) -> str:
    """Return the name of an objective: its module, or the running script, and its name there."""
    named = objective if hasattr(objective, "__qualname__") else type(objective)
    module = getattr(named, "__module__", None) or "__main__"
    if module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        module = Path(script).stem if script and script != "<stdin>" else "main"
    return f"{module}:{getattr(named, '__qualname__', 'objective')}"


def _source_of(objective: object) -> str | None:
    """Return the source code of a function, None if there is none to read."""
    try:
        return inspect.getsource(objective) if inspect.isfunction(objective) else None
    except (OSError, TypeError):
        return None


def _terminal_line() -> Callable[[Progress], object]:
    return _Line() if sys.stderr.isatty() else lambda _: None


class _Line:
    """Shows progress as one line on a terminal."""

    def __init__(self) -> None:
        self.width = 0

    def __call__(self, progress: Progress) -> None:
        text = progress.summary()[: shutil.get_terminal_size().columns - 1]  # a longer one would start a new line
        sys.stderr.write(f"\r{text.ljust(self.width)}")
        sys.stderr.flush()
        self.width = len(text)

    def done(self) -> None:
        if self.width:
            sys.stderr.write("\n")
