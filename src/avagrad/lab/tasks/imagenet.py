"""ImageNet: the paper's largest experiment, ResNet-50 on 1.28 million images of 1,000 classes.

Worker processes read, crop and flip the images, and return bytes; colours are changed on the device, for a whole batch
at once. The augmentation of an image is a function only of the seed, the epoch and its number, so that images are the
same for any number of workers, and after a resume.
"""

import atexit
import functools
import hashlib
import os
import signal
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.utils.data import DataLoader

from avagrad.lab.data.imagenet import CLASSES, COMPLETE, WANTED, Key, Read, Reader, find_images, recoloured
from avagrad.lab.models.resnet import ResNet
from avagrad.lab.tasks.base import Batch, Score, stream
from avagrad.lab.tasks.classification import Classification
from avagrad.names import look_up

__all__ = ["ImageNet"]

_MODELS: dict[str, type[nn.Module]] = {"resnet50": ResNet}
_MAX_WORKERS = 8


class Epoch(NamedTuple):
    """An epoch: its number, and the numbers of all training images in its order."""

    number: int
    images: numpy.typing.NDArray[numpy.int64]


@dataclass(kw_only=True)
class ImageNet(Classification):
    """ImageNet, or any images in ``train/CLASS`` and ``val/CLASS`` of the folder ``data``; ``model`` is "resnet50".

    As in the paper, val is used both as "validation" and as "test". ``size`` is the side of the crops in pixels,
    ``workers`` the number of processes that read images: 0 for none, -1 for the number of cores, at most 8.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("train/cat/1.png", "train/dog/1.jpg", "train/dog/2.jpg", "val/cat/2.jpg", "val/dog/3.jpg"):
    ...         Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
    ...         Image.new("RGB", (80, 60)).save(Path(folder, name))
    ...     task = ImageNet(data=folder, batch_size=2, size=32, workers=0)
    ...     images, labels = task.batch(task.order(0), 0)
    >>> task.steps_per_epoch, task.classes, images.shape, labels.shape
    (1, ['cat', 'dog'], torch.Size([2, 3, 32, 32]), torch.Size([2]))
    """

    name: ClassVar[str] = "imagenet"
    fits_a_graph: ClassVar[bool] = False  # its batches come from the host
    batch_size: int = 256
    model: str = "resnet50"
    size: int = 224
    workers: int = -1

    def __post_init__(self) -> None:
        self.make_model = look_up("imagenet: model", self.model, _MODELS)
        self.require_at_least(1, "batch_size", "size")
        self.require_at_least(-1, "workers")
        self.require("full", not self.full, "False: there is no separate validation part")
        if self.data is None:
            raise ValueError(f"imagenet: data is not given, but must be: the task has no default data. {WANTED}")
        try:
            import PIL.Image  # noqa: F401  (the workers need it)
        except ImportError as error:
            raise ModuleNotFoundError(
                "imagenet: images are read with Pillow, which is not installed: pip install pillow."
            ) from error
        self.root = Path(self.data)
        if not self.root.is_dir():
            raise FileNotFoundError(f"imagenet: data is {self.data!r}, which is not a folder. {WANTED}")
        self.classes, self.parts = find_images(self.root)
        self.check_batch_size()
        counts = {f"{part}/": (len(self.parts[part].labels), count, "images") for part, count in COMPLETE.items()}
        counts["data"] = len(self.classes), CLASSES, "classes"
        self.remarks = tuple(
            f"{what} has {found:,} {things}, but ImageNet (ILSVRC 2012) has {complete:,}."
            for what, (found, complete, things) in counts.items()
            if found != complete
        )
        self._batches: Iterator[Read | str] = iter(())
        self._next: tuple[int, int] | None = None  # epoch and index of the batch that comes next
        # Before multiprocessing terminates them at exit, by a signal that they do not obey at once.
        atexit.register(_end_workers, weakref.ref(self))

    def fingerprint(self) -> str:
        """Return a digest of the images' names and sizes; reading all of them would take as long as an epoch."""
        total = hashlib.sha256()
        for part in self.parts.values():
            total.update(repr(part.names.dtype).encode() + part.names.tobytes() + part.sizes.tobytes())
        return total.hexdigest()

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        return self.make_model(classes=len(self.classes))

    def order(self, epoch: int) -> Epoch:
        """Return an epoch's order: a function only of the seed and the number."""
        generator = torch.Generator().manual_seed(stream(self.seed, "order", epoch))
        return Epoch(epoch, torch.randperm(self.training_images, generator=generator).numpy())

    def batch(self, order: Any, index: int) -> Batch:
        """Return one batch of an epoch: images and labels.

        Workers read ahead to the end of the epoch; a batch that is not the next one restarts them.
        """
        assert isinstance(order, Epoch)
        if self._next != (order.number, index):
            self._batches = iter(())  # ends the old workers before new ones start
            reader = Reader(self.root, self.parts["train"], self.size, functools.partial(stream, self.seed, "image"))
            rest = range(index * self.batch_size, self.steps_per_epoch * self.batch_size, self.batch_size)
            keys = [(order.number, order.images[start : start + self.batch_size]) for start in rest]
            self._batches = self._read(reader, keys)
        self._next = None  # if reading fails
        made = self._made(next(self._batches))
        self._next = order.number, index + 1
        return made

    def _read(self, reader: Reader, keys: list[Key]) -> Iterator[Read | str]:
        workers = self.workers if self.workers >= 0 else min(_MAX_WORKERS, _cores())
        return iter(
            DataLoader(
                reader,
                batch_size=None,  # the reader returns whole batches
                sampler=keys,
                num_workers=workers,
                pin_memory=self.on_cuda,
                worker_init_fn=_ignore_signals,
                generator=torch.Generator(),  # else it would draw from the global one
            )
        )

    def _made(self, read: Read | str) -> tuple[Tensor, Tensor]:
        """Move a batch to the device, and convert it to the model's input."""
        if isinstance(read, str):
            raise ValueError(read)
        pixels, labels, factors, shifts = (tensor.to(self.device, non_blocking=True) for tensor in read)
        images = recoloured(pixels, factors, shifts, self.wide).to(self.dtype)
        return images.contiguous(memory_format=self.memory_format), labels

    def evaluate(self, model: nn.Module, part: str) -> Score:
        """Return the score on val, for both "validation" and "test"; the model is in eval mode.

        Images are scaled to a shorter side of 256 (for ``size=224``), and center-cropped.
        """
        look_up("imagenet: part", part, {"validation": None, "test": None})
        count = len(self.parts["val"].labels)
        numbers = numpy.arange(count)
        keys = [(0, numbers[start : start + self.batch_size]) for start in range(0, count, self.batch_size)]
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for read in self._read(Reader(self.root, self.parts["val"], self.size), keys):
            images, labels = self._made(read)
            scores = model(images).to(self.wide)
            loss = F.cross_entropy(scores, labels, reduction="sum")
            sums += torch.stack([loss, (scores.argmax(1) != labels).sum()])
        loss_sum, wrong_sum = sums.tolist()  # the only synchronisation with the device
        return Score(loss_sum / count, 100 * wrong_sum / count)


def _end_workers(task: "weakref.ref[ImageNet]") -> None:
    if (found := task()) is not None:
        found._batches = iter(())


def _ignore_signals(_: int) -> None:
    """Keep a worker alive when a signal is sent to all processes: the run finishes its step, saves, and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))  # ends the worker if nothing else does


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
