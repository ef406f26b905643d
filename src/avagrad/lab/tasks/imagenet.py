"""ImageNet: the paper's largest experiment, ResNet-50 on 1.28 million images of 1,000 classes.

Worker processes read, crop and flip the images, and return bytes; colours are changed on the device, for a whole batch
at once. The augmentation of an image is a function only of the seed, the epoch and its number, so that images are the
same for any number of workers, and after a resume.
"""

import atexit
import hashlib
import importlib.util
import os
import signal
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from avagrad.lab.data.imagenet import WANTED, Reader, find_images, recoloured
from avagrad.lab.models.resnet import ResNet
from avagrad.lab.tasks.base import Batch, Score, stream
from avagrad.lab.tasks.classification import Classification

__all__ = ["ImageNet"]


class Epoch(NamedTuple):
    """An epoch: its number, and the numbers of the images in each batch."""

    number: int
    batches: list[list[int]]


@dataclass(kw_only=True)
class ImageNet(Classification):
    """ImageNet, or any images in ``train/CLASS`` and ``val/CLASS`` of the folder ``data``.

    As in the paper, val is used both as "validation" and as "test". ``size`` is the side of the crops in pixels,
    ``workers`` the number of processes that read images, at most one for each core, 0 for none.

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
    size: int = 224
    workers: int = 8

    def __post_init__(self) -> None:
        self.require_at_least(1, "batch_size", "size")
        self.require_at_least(0, "workers")
        self.require("full", not self.full, "False: there is no separate validation part")
        if self.data is None:
            raise ValueError(f"imagenet: data is not given, but must be: the task has no default data. {WANTED}")
        if importlib.util.find_spec("PIL") is None:
            raise ModuleNotFoundError(
                "imagenet: images are read with Pillow, which is not installed: pip install pillow."
            )
        self.root = Path(self.data)
        self.classes, self.parts = find_images(self.root)
        self.check_batch_size()
        counts = [
            ("train/", self.training_images, 1_281_167, "images"),
            ("val/", len(self.parts["val"].labels), 50_000, "images"),
            ("data", len(self.classes), 1000, "classes"),
        ]
        self.remarks = tuple(
            f"{what} has {found:,} {things}, but ImageNet (ILSVRC 2012) has {complete:,}."
            for what, found, complete, things in counts
            if found != complete
        )
        self._batches: Iterator[list[Tensor] | str] = iter(())
        self._next: tuple[int, int] | None = None  # epoch and index of the batch that comes next
        # Before multiprocessing terminates them at exit, by a signal that they do not obey at once.
        atexit.register(_end_workers, weakref.ref(self))

    def fingerprint(self) -> str:
        """Return a digest of the images' names and sizes; reading all of them would take as long as an epoch."""
        names = [name for part in self.parts.values() for name in part.names]
        with ThreadPoolExecutor(16) as pool:  # reading sizes is slow on a network disk
            sizes = list(pool.map(os.path.getsize, [f"{self.root}/{name}" for name in names]))
        return hashlib.sha256(repr((names, sizes)).encode()).hexdigest()

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        return ResNet(classes=len(self.classes))

    def order(self, epoch: int) -> Epoch:
        """Return an epoch's order: a function only of the seed and the number."""
        generator = torch.Generator().manual_seed(stream(self.seed, "order", epoch))
        shuffled = torch.randperm(self.training_images, generator=generator).tolist()
        return Epoch(epoch, list(BatchSampler(shuffled, self.batch_size, drop_last=True)))

    def batch(self, order: Epoch, index: int) -> Batch:
        """Return one batch of an epoch: images and labels.

        Workers read ahead to the end of the epoch; a batch that is not the next one restarts them.
        """
        if self._next != (order.number, index):
            self._batches = iter(())  # ends the old workers before new ones start
            self._batches = self._read("train", order.batches[index:], order.number)
        self._next = None  # if reading fails
        batch = self._made(next(self._batches))
        self._next = order.number, index + 1
        return batch

    def _read(self, part: str, batches: list[list[int]], epoch: int | None = None) -> Iterator[list[Tensor] | str]:
        """Read batches, augmented if they are of an epoch."""
        # Workers must not keep the task alive.
        root, task_seed, (names, labels) = self.root, self.seed, self.parts[part]

        def image(number: int) -> tuple[Path, int, int | None]:
            seed = None if epoch is None else stream(task_seed, "image", epoch, number)
            return root / names[number], labels[number], seed

        loader: DataLoader[Any] = DataLoader(
            Reader(self.size),
            batch_size=None,  # the reader returns whole batches
            sampler=([image(number) for number in numbers] for numbers in batches),
            num_workers=min(self.workers, os.cpu_count() or 1),
            pin_memory=self.on_cuda,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else it would draw from the global one
        )
        return iter(loader)

    def _made(self, read: list[Tensor] | str) -> Batch:
        """Move a batch to the device, and convert it to the model's input."""
        if isinstance(read, str):
            raise ValueError(read)
        pixels, factors, shifts, labels = (tensor.to(self.device, non_blocking=True) for tensor in read)
        images = recoloured(pixels, factors, shifts, self.wide).to(self.dtype)
        return images.contiguous(memory_format=self.memory_format), labels

    def evaluate(self, model: nn.Module, part: str) -> Score:
        """Return the score on val, for both "validation" and "test"; the model is in eval mode.

        Images are scaled to a shorter side of 256 (for ``size=224``), and center-cropped.
        """
        count = len(self.parts["val"].labels)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = list(BatchSampler(range(count), self.batch_size, drop_last=False))
        for read in self._read("val", batches):
            images, labels = self._made(read)
            sums += self.sums(model(images), labels)
        loss_sum, wrong_sum = sums.tolist()  # the only synchronisation with the device
        return Score(loss_sum / count, 100 * wrong_sum / count)


def _end_workers(task: "weakref.ref[ImageNet]") -> None:
    if (found := task()) is not None:
        found._batches = iter(())


def _ignore_signals(_: int) -> None:
    """Keep a worker alive when a signal is sent to all processes: the run finishes its step, saves, and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))  # ends the worker if nothing else does
