"""The interface of a task: data, a model, a loss, and an error measure. The trainer uses nothing else."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from avagrad.checks import is_number, require, require_like
from avagrad.names import look_up

__all__ = ["Score", "Task", "digest", "stream"]

Batch = tuple[Tensor, ...]
Carry = tuple[Tensor, ...]
_OF_RUN = ("data", "download", "seed", "device", "dtype")  # the fields that are not options


class Score(NamedTuple):
    """The loss and the error of a model on one part of the data.

    >>> Score(loss=0.5, error=12.5).error
    12.5
    """

    loss: float
    error: float


def stream(seed: int, *names: object) -> int:
    """Return a seed for one use of randomness, independent of all other uses.

    >>> stream(0, "order", 1) == stream(0, "order", 1), stream(0, "order", 1) == stream(0, "order", 2)
    (True, False)
    """
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of some data.

    >>> digest([torch.zeros(2)]) == digest([torch.zeros(2)]), digest([torch.zeros(2)]) == digest([torch.zeros(3)])
    (True, False)
    """
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.cpu().contiguous().view(-1).numpy().data)  # without a copy: it may be a mapped file
    return total.hexdigest()


@dataclass(kw_only=True)
class Task(ABC):
    """Base class of tasks; the fields of a subclass are its options.

    For a task of your own, write a file like digits.py, and use ``module:Class`` as the name of the task.

    The order of an epoch is a function of the seed and the epoch's number, so a position in the data is two numbers;
    randomness inside a step comes from a generator that the trainer passes and saves.

    >>> class MyTask(Task): ...
    >>> MyTask.name, MyTask.measure
    ('mytask', 'error')
    """

    name: ClassVar[str]  # by default that of the class, in lower case
    measure: ClassVar[str] = "error"  # a description of `error`
    unit: ClassVar[str] = ""  # of `error`
    precision_on_cuda: ClassVar[str] = "bf16"
    data_wanted: ClassVar[str | None] = None  # the data that the paper's presets need, if they are optional otherwise
    no_decay: ClassVar[bool] = False  # whether to use avagrad.optim.no_decay_groups
    scores_in_batches: ClassVar[bool] = False  # scores() needs no more memory than a training step
    fits_a_graph: ClassVar[bool] = True  # every step runs the same operations, on data that is on the device

    data: str | None = None
    download: bool = False
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    remarks: tuple[str, ...] = field(default=(), init=False)  # on the data, for readers of the results
    batch_size: int = 64
    full: bool = False  # also train on the validation part: for final runs, after all choices have been made

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the options of this task with their defaults: numbers, strings, tuples, or None for any value.

        >>> from avagrad.lab.tasks import task_class
        >>> task_class("digits").options()
        {'batch_size': 64, 'full': False, 'model': 'mlp'}
        """
        found = {item.name: item.default for item in fields(cls) if item.init and item.name not in _OF_RUN}
        for name, default in found.items():
            if default is not None and not isinstance(default, (bool, str, tuple)) and not is_number(default):
                allowed = "a finite number, a string, a tuple or None"
                raise ValueError(f"{cls.name}: the default of {name} is {default!r}, but must be {allowed}.")
        return found

    @classmethod
    def check_options(cls, options: dict[str, Any]) -> None:
        """Reject an option that the task does not have, or whose value is of another type than the default.

        >>> from avagrad.lab.tasks import task_class
        >>> task_class("digits").check_options({"modle": "conv"})
        Traceback (most recent call last):
        ...
        ValueError: digits: an option is 'modle', which is not known; did you mean 'model'? Choose from: batch_size, ...
        """
        known = cls.options()
        for name, value in options.items():
            require_like(f"{cls.name}: {name}", value, look_up(f"{cls.name}: an option", name, known))
        size = options.get("batch_size", 1)
        require(size >= 1, f"{cls.name}: batch_size", size, "at least 1")

    def require(self, name: str, fits: bool, allowed: str) -> None:
        """Reject the value of an option that is not allowed."""
        require(fits, f"{self.name}: {name}", getattr(self, name), allowed)

    def require_at_least(self, least: int, *names: str) -> None:
        """Reject options below a minimum."""
        for name in names:
            self.require(name, getattr(self, name) >= least, f"at least {least}")

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""

    def order(self, epoch: int) -> Any:
        """Return the order of an epoch's data, for :meth:`batch`: a function only of the seed and the epoch."""
        return None

    @abstractmethod
    def batch(self, order: Any, index: int) -> Batch:
        """Return one batch of an epoch, on the device; calls are in order, from any first index."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the data: the same if and only if they are the same."""

    def start(self, model: nn.Module) -> Carry:
        """Return the carry, tensors that are passed from step to step, at the start of an epoch."""
        return ()

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, carry: Carry, noise: torch.Generator) -> tuple[Tensor, Carry]:
        """Return the loss of a batch, and the next carry."""

    def scores(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return loss and error on the "validation" or the "test" part, on the device; the model is in eval mode.

        The ensemble runs this, and :meth:`loss`, under ``torch.func.vmap``: they must not read from the device.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scores(), but must implement it, or evaluate().")

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Return further results at the end of a run, as JSON; the model is in eval mode."""
        return {}

    def evaluate(self, model: nn.Module, part: str) -> Score:
        """Return the score on the "validation" or the "test" part; the model is in eval mode."""
        loss, error = torch.stack(self.scores(model, part)).tolist()  # the only synchronisation with the device
        return Score(loss, error)

    def new_model(self) -> nn.Module:
        """Make the model of this seed, on the device: the weights are the same on every device.

        >>> from avagrad.lab.tasks import task_class
        >>> one, same = (task_class("digits")(seed=1).new_model() for _ in range(2))
        >>> all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters()))
        True
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(self.seed, "init"))
            return self.build().to(device=self.device, dtype=self.dtype)
