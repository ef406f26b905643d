"""Searches over lr and eps on the lab's tasks: the objective is a training run."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avagrad.checks import require
from avagrad.lab.config import Config
from avagrad.lab.folder import CHECKPOINT
from avagrad.lab.methods import method
from avagrad.lab.run import Callback
from avagrad.lab.train import train
from avagrad.tune.records import Record
from avagrad.tune.space import USUAL_AXES, Axis, Point

__all__ = ["check_sweep", "comparable", "default_axes", "sweep"]

ENGINES = ("runs", "ensemble")
STUDY = "study.journal"  # in the folder of a sweep, beside its runs
# Settings that differ between points, or that change results only in the last digits.
_MAY_DIFFER = {"lr", "eps", "seed", "sources", "data", "device", "threads", "graph", "compile", "deterministic"}


class _Reports(Callback):
    """Reports the validation error of each epoch to the trial."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_record(self, row: dict[str, Any]) -> None:
        """Report a line of the metrics."""
        if row["error"] is not None:
            self.trial.report(row["epoch"], row["error"])


@dataclass(frozen=True)
class TaskObjective:
    """Trains a task at a point, in its own folder, and returns the validation error at the end.

    A point that is run again resumes from its last checkpoint. The weights of a finished run are not kept.
    """

    config: Config  # of all points, except for lr, eps and seed
    folder: str = "runs"

    def __call__(self, trial: Any) -> float:
        """Evaluate a point."""
        from avagrad.tune import Diverged

        out = Path(self.folder, trial.key.replace(" ", "_"))
        result = train(self.config.at(trial.lr, trial.eps, trial.seed), out, resume=True, callback=_Reports(trial))
        (out / CHECKPOINT).unlink(missing_ok=True)
        if result["status"] == "diverged":
            raise Diverged(result["diverged_at"])
        trial.note(test=result["test"]["error"], loss=result["loss"], epochs=result["epochs"])
        return float(result["validation"]["error"])


def comparable(config: Config) -> dict[str, Any]:
    """Return the settings that two runs must share for their errors to be comparable.

    >>> from avagrad.lab.config import configure
    >>> comparable(configure("digits", lr=1)) == comparable(configure("digits", lr=2, seed=7))
    True
    """
    return {name: value for name, value in config.as_json().items() if name not in _MAY_DIFFER}


def default_axes(task: str, optimizer: str) -> dict[str, str | None]:
    """Return the paper's axes for a task; if lr is the size of a step, four decades of it are enough.

    >>> default_axes("digits", "adam"), default_axes("chars", "sgd")
    ({'lr': 'paper', 'eps': 'paper'}, {'lr': 'paper-chars', 'eps': None})
    >>> default_axes("chars", "avastep")
    {'lr': '1e-4:1:9', 'eps': '1e-8:100:11'}
    """
    if optimizer == "avastep":
        return dict(zip(("lr", "eps"), USUAL_AXES["avastep"], strict=True))
    grid = "paper-chars" if task == "chars" else "paper"
    return {"lr": grid, "eps": grid if method(optimizer).has_eps else None}


def check_sweep(config: Config, *, eps: Axis | None, engine: str, search: Mapping[str, Any]) -> None:
    """Reject a search that :func:`sweep` cannot make; its arguments.

    >>> from avagrad.lab.config import configure
    >>> check_sweep(configure("digits"), eps=None, engine="ensemble", search={"workers": 2})
    Traceback (most recent call last):
    ValueError: engine is 'ensemble' with workers, ray, timeout or pruner, but it runs in this process.
    """
    require(engine in ENGINES, "engine", engine, f"one of {', '.join(ENGINES)}")
    if eps is not None and not method(config.optimizer).has_eps:
        raise ValueError(f"eps has {len(eps)} values, but {config.optimizer} has no eps.")
    if config.task_options.get("full"):
        raise ValueError("full is True, but must be False in a search, which selects by the validation error.")
    if engine == "ensemble" and any(search.get(name) for name in ("workers", "ray", "timeout", "pruner")):
        raise ValueError("engine is 'ensemble' with workers, ray, timeout or pruner, but it runs in this process.")


def sweep(
    config: Config,
    *,
    lr: Axis | None,
    eps: Axis | None,
    storage: str | Path | None = None,
    folder: str | Path | None = None,
    engine: str = "runs",
    members_at_once: int | None = None,
    callback: Callback | None = None,
    **search: Any,
) -> Any:
    """Search over lr and eps on a task; ``search`` is passed to :func:`avagrad.tune.tune`, whose result is returned.

    ``config`` is the Config of all points; values of an axis replace its lr and eps. With the engine "runs" each point
    is a training run; with "ensemble" the points of a stage are trained as one computation in this process,
    ``members_at_once`` at a time (None chooses), with ``callback``.

    >>> import tempfile
    >>> from avagrad.lab.config import configure
    >>> from avagrad.tune.space import axis
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result = sweep(configure("digits", epochs=1), lr=axis("0.1,1", "lr"), eps=None, folder=place, extend=False)
    >>> len(result.trials)
    2
    """
    from avagrad.tune import tune

    task, optimizer = config.task, config.optimizer
    place = Path(folder) if folder is not None else Path("runs", f"sweep-{task.replace(':', '-')}-{optimizer}")
    objective = TaskObjective(config, str((place / "runs").resolve()))
    check_sweep(config, eps=eps, engine=engine, search=search)
    if engine == "ensemble":

        def together(points: list[Point]) -> list[Record]:
            from avagrad.lab.ensemble import train_ensemble

            points = sorted(points, key=lambda point: point.key)  # the same points use the same folder, to resume in
            name = hashlib.sha256("\n".join(point.key for point in points).encode()).hexdigest()[:12]
            options: dict[str, Any] = {"callback": callback, "members_at_once": members_at_once}
            return train_ensemble(config, points, place / "ensembles" / name, resume=True, **options)

        search["together"] = together
    return tune(
        objective,
        lr=lr,
        eps=eps,
        # A name would add an eps axis.
        optimizer=optimizer if eps is not None and optimizer in USUAL_AXES else None,
        storage=storage or place / STUDY,
        name=search.pop("name", None) or f"{task}-{optimizer}",
        about=comparable(config),
        **search,
    )
