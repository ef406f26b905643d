"""The function ``tune``: find the best lr and eps of an objective."""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from avagrad.checks import require
from avagrad.tune.arguments import check_search, seeds_from
from avagrad.tune.identity import digest_of, is_found_by_name, name_of
from avagrad.tune.leases import LEASE
from avagrad.tune.loop import SearchLoop
from avagrad.tune.result import Progress, Result
from avagrad.tune.space import Space, Values, axes_of
from avagrad.tune.storage import described, is_url
from avagrad.tune.study import Study
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
            objective's name, if it is a function that its module has under that name.
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
    check_search(
        method=method, direction=direction, storage=storage, workers=workers, seeds=seeds, timeout=timeout,
        retries=retries, margin=margin, extend=extend, pruner=pruner, slots_per_gpu=slots_per_gpu, ray=ray, name=name,
        about=about, lease=lease, together=together, watcher=watcher,
    )  # fmt: skip
    seeds, margin, lease = seeds_from(seeds), float(margin), float(lease)  # NumPy's are not JSON serializable
    called = name_of(objective) if name is None else name
    if storage is None:
        allowed = (
            "a function that its module has under its name, since its results are found by that: a lambda, a partial "
            "function, an instance, a method or an inner function needs a storage or a name"
        )
        require(name is not None or is_found_by_name(objective), "objective", objective, allowed)
        storage = Path("runs", re.sub(r"[^\w.-]+", "-", called) + ".journal")
    where = storage if is_url(storage) else Path(storage).expanduser().resolve()
    about = {"objective": name_of(objective).rpartition(":")[2]} if about is None else about
    job = None
    if workers != 0 or ray is not None:  # fail before anything is created
        job = Job.of(objective, os.fspath(where), called, pruner=pruner, lease=lease)
    study = Study(where, called, direction=direction, about=about, pruner=pruner)
    if code := digest_of(objective):
        earlier, count = study.note_code(code)
        if earlier:
            warnings.warn(
                f"{earlier} of {count} results in {described(where)} are of earlier code of {called}. They are kept "
                "and used: to start anew, name another storage, or in a database another name.",
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
