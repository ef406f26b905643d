"""One training run of any task by any method: resumable at any moment, traceable, reproducible.

>>> import tempfile
>>> from avagrad.lab.config import configure
>>> with tempfile.TemporaryDirectory() as place:
...     result = train(configure("digits", "avagrad", epochs=2), place)
>>> result["status"], result["steps"]
('finished', 30)

``python -m avagrad.lab.train digits --optimizer avagrad --lr 1 --out runs/x`` needs only torch and numpy (and
scikit-learn for the digits).
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

import avagrad
from avagrad.lab.config import Config, optimizer_arguments
from avagrad.lab.environment import generator_states, seeded, set_generator_states
from avagrad.lab.methods import method
from avagrad.lab.run import CHECKS_EVERY, Callback, OpenRun, Run, new_task, open_run
from avagrad.lab.stepping import GraphStep, Losses, Step, autocast
from avagrad.lab.tasks.base import Task
from avagrad.optim.param_groups import no_decay_groups
from avagrad.stopping import Stopped

__all__ = ["Stopped", "train"]

T = TypeVar("T")


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    callback: Callback | None = None,
    save_every: float = 30.0,
    deadline: float | None = None,
    download: bool = False,
) -> dict[str, Any]:
    """Start or resume the run that a Config describes, and return the content of its ``result.json``.

    A run that diverges (its loss is not finite) stops at once (on a GPU within 64 steps), and that is its result:
    ``status`` is "diverged", ``diverged_at`` the step. With ``resume`` a run in ``out`` continues, to the same numbers
    as if it had never stopped (to the bit on a CPU), and a finished one is not run again.

    Args:
        config: from :func:`avagrad.lab.config.configure`.
        out: the folder of the run; it must not contain anything else.
        resume: resume the run in ``out``, or begin if it is empty.
        callback: called during the run.
        save_every: seconds between checkpoints.
        deadline: the value of ``time.monotonic()`` at which it saves and stops, as after a signal.
        download: allow the task to download its data.

    >>> import tempfile
    >>> from avagrad.lab.config import configure
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result = train(configure("digits", "sgd", lr=1e30, epochs=2), place)
    >>> result["status"], result["diverged_at"], result["test"]
    ('diverged', 2, None)
    """
    task = new_task(config, download)
    with open_run(config, task, out, resume=resume, save_every=save_every, deadline=deadline) as opened:
        if opened.result is not None:
            return opened.result
        return Training(config, task, opened, callback).run()


class Training(Run):
    """The training of one model, run by :func:`train`."""

    def __init__(self, config: Config, task: Task, opened: OpenRun, callback: Callback | None) -> None:
        super().__init__(opened, callback)
        self.config, self.task = config, task
        self.device = task.device
        self.noise = seeded(config.seed, self.device)
        self.model = task.new_model()
        arguments = optimizer_arguments(config)
        if config.graph:  # a graph reads the learning rate from the device
            self.lr = arguments["lr"] = torch.tensor(config.lr, device=self.device)
        decay, model = config.weight_decay, self.model
        params = no_decay_groups(model, weight_decay=decay) if task.no_decay else model.parameters()
        self.optimizer = method(config.optimizer).build(params, arguments, on_cuda=task.on_cuda)
        self.carry = task.start(self.model)
        self.losses = Losses(self.device)
        self.step = 0  # steps taken
        self.last: dict[str, Any] = {}  # the last record
        self.best: dict[str, Any] = {}  # the record with the smallest error
        self.resumed_with: list[str] = []
        state = self.load()
        self._note_changes(opened.first_facts if state is None else state["about"])
        self.total = config.epochs * task.steps_per_epoch
        if config.compile:
            self.model.compile()
        kind = GraphStep if config.graph else Step
        options: dict[str, Any] = {"clip": config.clip, "precision": config.precision}
        self.take_step = kind(task, self.model, self.optimizer, self.noise, self.losses, **options)
        self.set_clock(0.0 if state is None else state["seconds"])

    # --- the loop ---

    def run(self) -> dict[str, Any]:
        """Train to the end."""
        self.callback.on_start(self.config, self.step, self.total)
        per_epoch = self.task.steps_per_epoch
        while self.step < self.total:
            epoch, index = divmod(self.step, per_epoch)
            if index == 0:
                self.carry = self.task.start(self.model)
            self.take_step.start(self.carry)
            order = self.task.order(epoch)
            self.model.train()
            for i in range(index, per_epoch):
                if i == index or self.config.lr_changes_within_epochs:
                    self._set_lr(self.config.lr_at(epoch, i, per_epoch))
                self.take_step(self.task.batch(order, i))
                self.step += 1
                self.callback.on_step(self.step)
                is_last = i + 1 == per_epoch
                if is_last or not self.task.on_cuda or self.step % CHECKS_EVERY == 0:
                    if first_bad := int(self.losses.first_bad.item()):
                        return self._diverged(first_bad)
                    if not is_last:
                        self.save_if_due()
            if not self._record():
                return self._diverged(self.step)
            self.save_if_due()
        return self._finished()

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr.fill_(lr) if self.config.graph else lr

    def _evaluate(self, measure: Callable[..., T], *arguments: Any) -> T:
        self.model.eval()
        with torch.no_grad(), autocast(self.config.precision, self.device):
            return measure(self.model, *arguments)

    def _record(self) -> bool:
        """Write a line of the metrics at the end of an epoch; return whether its numbers are finite."""
        score = self._evaluate(self.task.evaluate, "validation")
        if not math.isfinite(score.loss):
            return False
        epoch = self.step // self.task.steps_per_epoch
        self.last = {
            "step": self.step,
            "epoch": epoch,
            "loss": self.losses.means().float().item(),  # rounded, as in all records so far
            "validation_loss": score.loss,
            "error": score.error,
            "lr": self.config.lr_at(epoch - 1, self.task.steps_per_epoch - 1, self.task.steps_per_epoch),
            "gamma": _gamma(self.optimizer),
            "seconds": self.seconds,
        }
        if not self.best or score.error < self.best["error"]:
            self.best = self.last
        self.write(self.last)
        return True

    # --- the ends ---

    def _diverged(self, step: int) -> dict[str, Any]:
        epoch, index = divmod(step - 1, self.task.steps_per_epoch)
        self.step = step
        row = {"step": step, "epoch": epoch, "loss": None, "validation_loss": None, "error": None}
        lr = self.config.lr_at(epoch, index, self.task.steps_per_epoch)
        self.write({**row, "lr": lr, "gamma": None, "seconds": self.seconds, "diverged": True})
        return self._conclude("diverged", None, None)

    def _finished(self) -> dict[str, Any]:
        self.save()
        test = self._evaluate(self.task.evaluate, "test")
        if not math.isfinite(test.loss):
            return self._diverged(self.step)
        validation = {"loss": self.last["validation_loss"], "error": self.last["error"]}
        return self._conclude("finished", validation, test._asdict())

    def _conclude(self, status: str, validation: Any, test: Any) -> dict[str, Any]:
        result = {
            "status": status,
            "diverged_at": self.step if status == "diverged" else None,
            "steps": self.step,
            "epochs": self.step / self.task.steps_per_epoch,
            "measure": self.task.measure,
            "loss": self.last.get("loss"),
            "validation": validation,
            "test": test,
            "best": {key: self.best[key] for key in ("step", "epoch", "error")} if self.best else None,
            "details": self._evaluate(self.task.details) if status == "finished" else {},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "remarks": [*self.facts["remarks"], *self.resumed_with],
            "seconds": self.seconds,
        }
        self.folder.write_result(result)
        return self.folder.read_result() or result  # the same digits as when it is read later

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {
            "config": self.config.as_json(),
            "about": self.facts,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": generator_states(self.device) | {"noise": self.noise.get_state()},
            "carry": list(self.take_step.carry),
            "step": self.step,
            "loss_sums": [self.losses.total.item()],  # a list: earlier versions had several processes
            "losses": int(self.losses.count),
            "last": self.last,
            "best": self.best,
            "seconds": self.seconds,
            "resumed_with": self.resumed_with,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_generator_states(self.device, state["generators"])
        self.noise.set_state(state["generators"]["noise"])
        self.carry = tuple(part.to(self.device) for part in state["carry"])
        self.step = state["step"]
        sums = state["loss_sums"]
        self.losses = Losses(self.device, self.step, sum(sums) / len(sums), state["losses"])
        self.last, self.best = state["last"], state["best"]
        self.resumed_with = state["resumed_with"]
        if len(sums) > 1:
            self.resumed_with += [f"from step {self.step} on it ran in one process instead of {len(sums)}."]

    def _note_changes(self, before: dict[str, Any]) -> None:
        then, now = ({key: facts.get(key) for key in ("versions", "commit")} for facts in (before, self.facts))
        if then != now:
            self.resumed_with = [*self.resumed_with, f"from step {self.step} on it ran with {now} instead of {then}."]


def _gamma(optimizer: Optimizer) -> float | None:
    """Return the gamma of the next step, for the methods that have one."""
    return optimizer.gamma() if isinstance(optimizer, (avagrad.AvaGrad, avagrad.AvaGradW, avagrad.AvaStep)) else None


if __name__ == "__main__":
    from avagrad.lab.command import main

    sys.exit(main())
