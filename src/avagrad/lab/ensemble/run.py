"""Many runs at once on one device, each with its own lr and eps: a whole heat map as one computation.

Each run gives the numbers of the trainer with the same settings and seed, up to the last digits. It needs only torch
and numpy (and scikit-learn for the digits)::

    python -m avagrad.lab.ensemble cifar --data cifar-10 --device cuda -o model=small --optimizer adam \
        --lr paper --eps paper --epochs 20 --out runs/map

The folder has ``records.jsonl``, a line for each point, and the files of a run (:mod:`avagrad.lab.folder`).
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from avagrad.checks import is_whole, require
from avagrad.lab.config import Config, optimizer_arguments
from avagrad.lab.ensemble.stack import Stack
from avagrad.lab.environment import seeded
from avagrad.lab.folder import CHECKPOINT
from avagrad.lab.methods import method
from avagrad.lab.run import CHECKS_EVERY, Callback, OpenRun, Run, new_task, open_run
from avagrad.lab.tasks import task_class
from avagrad.lab.tasks.base import Task
from avagrad.lab.tasks.classification import Classification
from avagrad.tune.records import Record, read_records, write_records
from avagrad.tune.space import Point, axis

RECORDS = "records.jsonl"
# Parameters, and inputs, of all members together that fit well enough in a CPU's caches; with fewer members, calling
# the operations takes longer than computing them.
_PARAMETERS, _INPUTS = 2**19, 2**20
_PROBE = 8  # members with which the memory use is measured
_SHARE = 0.85  # fraction of a GPU's free memory that is used


def train_ensemble(
    config: Config,
    points: Sequence[Point | tuple[float | None, float | None, int]],
    out: str | Path,
    *,
    resume: bool = False,
    callback: Callback | None = None,
    save_every: float = 30.0,
    members_at_once: int | None = None,
    compile: bool | None = None,
    download: bool = False,
) -> list[Record]:
    """Train a model at each point, all of a seed together, and return a record for each, in the order of the points.

    A point whose loss is not finite has diverged, at the same step as its own run would have; the others continue.
    After a kill at any moment, the same call with ``resume`` gives the same numbers (to the bit on a CPU).

    Args:
        config: what all points share; a point's lr, eps and seed replace its own (unless they are None). All threads
            are used, unless their number is given.
        points: lr, eps and seed of each point.
        out: the folder of the run; it must not contain anything else.
        resume: resume the run in ``out``, or begin if it is empty.
        callback: called during the run.
        save_every: seconds between checkpoints.
        members_at_once: the number of points that are trained together; None chooses by the device's memory or caches.
        compile: compile the whole step; None does so for images on CUDA.
        download: allow the task to download its data.

    >>> import tempfile
    >>> from avagrad.lab.config import configure
    >>> with tempfile.TemporaryDirectory() as place:
    ...     records = train_ensemble(configure("digits", "adam", epochs=2), [(0.001, 1e-8, 0), (0.01, 0.1, 0)], place)
    >>> [record.point.key for record in records], all(record.value < 90 for record in records)
    (['lr=0.001 eps=1e-08 seed=0', 'lr=0.01 eps=0.1 seed=0'], True)
    """
    points = _checked(points)
    fits = members_at_once is None or is_whole(members_at_once, 1)
    require(fits, "members_at_once", members_at_once, "a whole number of at least 1, or None")
    if config.sources.get("threads") != "given":  # a preset's number is meant for one of many processes
        config = dataclasses.replace(config, threads=torch.get_num_threads())
    configs = [config.at(*point) for point in points]
    for one in configs:
        method(one.optimizer).build([torch.zeros(1)], optimizer_arguments(one))  # rejects invalid values early
    if config.task_options.get("full"):
        raise ValueError("full is True, but must be False in an ensemble, whose records have the validation error.")
    if task_class(config.task).scores is Task.scores:
        raise ValueError(f"task is {config.task!r}, but must be one that implements scores().")
    task = new_task(configs[0], download)
    compiles = (task.on_cuda and isinstance(task, Classification)) if compile is None else compile
    in_products = compiles or task.on_cuda
    on_axes = {name for name in Point._fields if all(getattr(point, name) is not None for point in points)}
    identity = {name: value for name, value in config.as_json().items() if name not in on_axes}
    identity |= {"points": [point.key for point in points], "compile": compiles}
    identity["convolution"] = "bmm" if in_products else "grouped"  # as in folders of earlier versions
    with open_run(config, task, out, identity=identity, resume=resume, save_every=save_every) as opened:
        if opened.result is not None:
            return read_records(opened.folder.path / RECORDS)
        options = {"in_products": in_products, "compile": compiles, "graph": config.graph}
        return Ensemble(configs, points, task, opened, callback, members_at_once, options).run()


def _checked(given: Sequence[Point | tuple[float | None, float | None, int]]) -> list[Point]:
    """Return the points with rounded values, or reject them."""
    points: dict[Point, None] = {}
    for lr, eps, seed in given:
        lines = axis(lr, "lr"), axis(eps, "eps")  # rejects invalid values
        lr, eps = (None if line is None else line.values[0] for line in lines)
        point = Point(lr, eps, seed)
        require(is_whole(seed, 0), "seed", seed, "a whole number of at least 0")
        if point in points:
            raise ValueError(f"points has {point.key} twice, but must have each point once.")
        points[point] = None
    if not points:
        raise ValueError("points is empty, but must have at least one point.")
    return list(points)


class Ensemble(Run):
    """The training of all points, a group of one seed at a time; run by :func:`train_ensemble`."""

    def __init__(
        self,
        configs: list[Config],
        points: list[Point],
        task: Task,
        opened: OpenRun,
        callback: Callback | None,
        at_once: int | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__(opened, callback)
        self.configs, self.points, self.task, self.at_once, self.options = configs, points, task, at_once, options
        self.fitting: int | None = at_once
        self.found: dict[int, dict[str, Any]] = {}  # the results of finished points, by index
        self.current: list[int] = []  # the indices of the points that are being trained
        self.members: Stack | None = None
        self.step = 0  # steps taken by the current points
        self.last: dict[str, list[float]] = {}  # their scores at the end of the last epoch
        self.load()

    @property
    def total(self) -> int:
        """The number of steps of a point."""
        return self.configs[0].epochs * self.task.steps_per_epoch

    def run(self) -> list[Record]:
        """Train all remaining points; return the records of all points."""
        while len(self.found) < len(self.points):
            if self.members is None:
                self._choose()
            self._train()
        records = self._write_records()
        diverged = sum(record.diverged for record in records)
        seconds = sum(record.seconds or 0.0 for record in records)
        result = {"status": "finished", "points": len(records), "diverged": diverged, "seconds": seconds}
        self.folder.write_result(result | {"measure": self.task.measure, "remarks": self.facts["remarks"]})
        (self.folder.path / CHECKPOINT).unlink(missing_ok=True)
        return records

    # --- which points are trained together ---

    def _choose(self) -> None:
        """Choose the next points of one seed, as many as are trained at once, in groups of about the same size."""
        left = [i for i in range(len(self.points)) if i not in self.found]
        seed = self.points[left[0]].seed
        same = [i for i in left if self.points[i].seed == seed]
        self._set_seed(seed)
        if self.fitting is None:
            self.fitting = self._members_that_fit(same)
        groups = math.ceil(len(same) / self.fitting)
        self.current = same[: math.ceil(len(same) / groups)]
        self.members = self._made(self.current, **self.options)
        self.step, self.last = 0, {}
        self.set_clock(0.0)

    def _set_seed(self, seed: int) -> None:
        if self.task.seed != seed:
            self.task = dataclasses.replace(self.task, seed=seed)

    def _made(self, places: list[int], **options: Any) -> Stack:
        noise = seeded(self.task.seed, self.task.device)
        return Stack(self.task, [self.configs[i] for i in places], noise, **options)

    def _members_that_fit(self, places: list[int]) -> int:
        """Return the default number of members that are trained together: by memory on a GPU, by caches on a CPU."""
        probe = self._made(places[: _PROBE if self.task.on_cuda else 1], in_products=self.options["in_products"])
        batch = self.task.batch(self.task.order(0), 0)
        if not self.task.on_cuda:
            parameters = sum(x.numel() for x in probe.w.values())
            return max(2, min(_PARAMETERS // parameters, _INPUTS // batch[0].numel()))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        probe.begin(0)
        probe.step(batch)
        need = (torch.cuda.max_memory_allocated() - before) / probe.members
        del probe
        torch.cuda.empty_cache()
        return max(1, int(_SHARE * torch.cuda.mem_get_info()[0] / need))

    # --- training ---

    def _train(self) -> None:
        members, per_epoch = self.members, self.task.steps_per_epoch
        assert members is not None
        self.callback.on_start(self.configs[self.current[0]], self._done(), self.total * len(self.points))
        while self.step < self.total and bool(members.alive.any()):
            epoch, index = divmod(self.step, per_epoch)
            members.begin(epoch, new=index == 0)
            order = self.task.order(epoch)
            for i in range(index, per_epoch):
                if self.configs[0].lr_changes_within_epochs:
                    members.set_lr(epoch, i)
                members.step(self.task.batch(order, i))
                self.step += 1
                self.callback.on_step(self._done())
                if i + 1 < per_epoch and (not self.task.on_cuda or self.step % CHECKS_EVERY == 0):
                    self.save_if_due()
            self._record(epoch)
            self.save_if_due()
        self._conclude()

    def _done(self) -> int:
        """Return the number of steps taken so far by all points."""
        return len(self.found) * self.total + len(self.current) * self.step

    def _scores(self, part: str) -> tuple[list[float], list[float]]:
        """Evaluate all members; one whose loss is not finite has diverged."""
        assert self.members is not None
        # A few at a time if the whole part is one batch, which is larger than one of training.
        chunks = 1 if self.task.scores_in_batches else 8
        losses, errors = self.members.scores(part, math.ceil(self.members.members / chunks))
        self.members.mark_diverged(~losses.isfinite(), self.step)
        return losses.tolist(), errors.tolist()

    def _record(self, epoch: int) -> None:
        """Write a line of the metrics at the end of an epoch: the best member's numbers, and all members'."""
        assert self.members is not None
        losses = self.members.losses.means().tolist()
        validation, errors = self._scores("validation")
        bad = self.members.first_bad.tolist()
        self.last = {"loss": losses, "error": errors}
        going = [i for i, step in enumerate(bad) if not step]
        per_epoch = self.task.steps_per_epoch
        best = min(going, key=lambda i: errors[i], default=None)
        row = {
            "seed": self.task.seed,
            "step": self.step,
            "epoch": epoch + 1,
            "loss": None if best is None else losses[best],
            "error": None if best is None else errors[best],
            "lr": None if best is None else self.configs[self.current[best]].lr_at(epoch, per_epoch - 1, per_epoch),
            "seconds": self.seconds,
            "diverged": not going,
            "points": [self.points[i].key for i in self.current],
            "losses": [None if step else x for x, step in zip(losses, bad, strict=True)],
            "validation_losses": [None if step else x for x, step in zip(validation, bad, strict=True)],
            "errors": [None if step else x for x, step in zip(errors, bad, strict=True)],
        }
        self.write(row)

    def _conclude(self) -> None:
        """Store the results, and free the members."""
        assert self.members is not None
        if self.step == self.total:
            _, tests = self._scores("test")
        for place, (i, bad) in enumerate(zip(self.current, self.members.first_bad.tolist(), strict=True)):
            found: dict[str, Any] = {"diverged_at": bad or None, "seconds": self.seconds / len(self.current)}
            if not bad:
                found |= {"value": self.last["error"][place], "test": tests[place], "loss": self.last["loss"][place]}
            self.found[i] = found
        self.members, self.current = None, []
        self.step = 0
        self.save()
        self._write_records()

    def _write_records(self) -> list[Record]:
        records = []
        for i, found in sorted(self.found.items()):
            config, end = self.configs[i], {"value": math.inf, "diverged_at": found["diverged_at"]}
            if not found["diverged_at"]:
                facts = {"test": found["test"], "loss": found["loss"], "epochs": config.epochs}
                end = {"value": found["value"], "facts": facts}
            records.append(Record(config.lr, config.eps, config.seed, seconds=found["seconds"], **end))
        write_records(self.folder.path / RECORDS, records)
        return records

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {
            "found": self.found,
            "fitting": self.fitting,
            "current": self.current,
            "members": None if self.members is None else self.members.state_dict(),
            "step": self.step,
            "last": self.last,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.found, self.current = state["found"], state["current"]
        if self.at_once is None and not self.task.on_cuda:
            self.fitting = state["fitting"]
        if state["members"] is not None:
            self._set_seed(self.points[self.current[0]].seed)
            self.members = self._made(self.current, **self.options)
            self.members.load_state_dict(state["members"])
            self.step, self.last = state["step"], state["last"]
            self.set_clock(state["seconds"])
