"""ImageNet: the paper's largest experiment, ResNet-50 on 1.28 million images of 1,000 classes.

Images stay in their files. Worker processes read, crop and flip them, and hand over bytes; colours are changed on the
device, for a whole batch at once. What is drawn for an image is a function of the seed, the epoch and its number alone,
so that images are the same whatever the number of workers or processes, and wherever a run goes on.

The changes are those of fb.resnet.torch (Gross and Wilber), which the paper follows: a crop of random area and aspect,
scaled bicubically; brightness, contrast and saturation; noise along the principal components of ImageNet's colours; a
flip. Scaling is Pillow's, which averages where an image gets smaller, and at a crop's edges sees what lies beyond them.
"""

import atexit
import hashlib
import math
import os
import random
import signal
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812  (torch's own habit)
from torch.utils.data import DataLoader, Dataset

from avagrad.lab.models.resnet import ResNet
from avagrad.lab.names import look_up
from avagrad.lab.tasks.base import Score, stream
from avagrad.lab.tasks.classification import Classification

__all__ = ["Epoch", "ImageNet", "center_box", "random_box", "recoloured"]

PAGE = "https://image-net.org"
COMPLETE = {"train": 1_281_167, "val": 50_000}  # images
CLASSES = 1000

_MODELS: dict[str, type[nn.Module]] = {"resnet50": ResNet}
_SUFFIXES = (".jpeg", ".jpg", ".png")
_MOST_WORKERS = 8
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GRAY = (0.299, 0.587, 0.114)
_JITTER, _LIGHTING = 0.4, 0.1
# Of the colours of ImageNet's pixels, between 0 and 1: how they vary (eigenvalues), and along what (columns).
_VALUES = numpy.array([0.2175, 0.0188, 0.0045])
_VECTORS = numpy.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
_WANTED = (
    "Wanted is a folder with the images in train/CLASS/*.JPEG and val/CLASS/*.JPEG (or .jpg, .png). People get them "
    f"from {PAGE} after registering; there is no download here."
)

Box = tuple[float, float, float, float]  # left, top, right, bottom, in the pixels of the file
Key = tuple[int, numpy.typing.NDArray[numpy.int64]]  # the epoch, and the numbers of images
Read = tuple[Tensor, Tensor, Tensor, Tensor]  # pixels, labels, factors, shifts


class Epoch(NamedTuple):
    """An epoch: its number, and all the training images' numbers in its order.

    >>> Epoch(3, numpy.array([1, 0])).number
    3
    """

    number: int
    images: numpy.typing.NDArray[numpy.int64]


# --- where to cut ---


def random_box(width: int, height: int, size: int, draw: random.Random) -> Box:
    """Draw a box of 0.08 to 1 of the area, with an aspect of 3/4 to 4/3 or its inverse; after ten misses, the center.

    >>> random_box(500, 375, 224, random.Random(0))
    (155, 100, 394, 350)
    """
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1)
        aspect = draw.uniform(3 / 4, 4 / 3)
        wide, high = max(1, round(math.sqrt(area * aspect))), max(1, round(math.sqrt(area / aspect)))
        if draw.random() < 0.5:
            wide, high = high, wide
        if wide <= width and high <= height:
            top, left = draw.randint(0, height - high), draw.randint(0, width - wide)
            return left, top, left + wide, top + high
    return center_box(width, height, size, size)


def center_box(width: int, height: int, size: int, shorter: int) -> Box:
    """Return the box that is the center, of so many pixels, of the image scaled to so long a shorter side.

    >>> center_box(500, 375, 224, 256)
    (86.5..., 23.4..., 414.9..., 351.5...)
    """
    scale = shorter / min(width, height)
    wide, high = max(shorter, int(width * scale)), max(shorter, int(height * scale))
    left, top = math.ceil((wide - size) / 2), math.ceil((high - size) / 2)
    across, down = width / wide, height / high
    return left * across, top * down, min((left + size) * across, width), min((top + size) * down, height)


# --- colours ---


def recoloured(pixels: Tensor, factors: Tensor, shifts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Change brightness, contrast and saturation by (images, 3) factors, shift the colours, and normalise.

    ``pixels`` are bytes, (images, height, width, 3); the result is (images, 3, height, width), channels last in memory.
    Each of the three is a mixture with black, with the image's mean gray, or with each pixel's own gray. Nothing is
    cut off between them, so they are linear, and their order makes no difference: fb.resnet.torch draws one.

    >>> pixels = torch.full((1, 2, 2, 3), 255, dtype=torch.uint8)
    >>> recoloured(pixels, torch.ones(1, 3), torch.zeros(1, 3))[0, :, 0, 0]
    tensor([2.2489, 2.4286, 2.6400])
    """
    values = pixels.permute(0, 3, 1, 2).to(torch.promote_types(dtype, torch.float32))
    brightness, contrast, saturation = factors.to(values)[:, :, None, None, None].unbind(1)
    mean, std = (values.new_tensor(row)[:, None, None] for row in (_MEAN, _STD))
    gray = sum(weight * values[:, i : i + 1] for i, weight in enumerate(_GRAY))
    assert isinstance(gray, Tensor)
    level = brightness * (1 - contrast) * gray.mean((2, 3), keepdim=True) / 255
    offset = (level + shifts.to(values)[:, :, None, None] - mean) / std
    both = brightness * contrast / (255 * std)
    return values.mul_(both * saturation).addcmul_(gray, both * (1 - saturation)).add_(offset).to(dtype)


# --- reading, in the workers ---


class _Reader(Dataset[Read | str]):
    """Reads images by their numbers, to train on if there is a seed; of a file that is broken, it returns a sentence.

    Names are one array: of a list, every worker would soon have a copy, as reading it counts references.
    """

    def __init__(self, root: Path, part: "_Part", size: int, seed: int | None = None) -> None:
        self.root, self.names, self.labels, self.size, self.seed = root, part.names, part.labels, size, seed
        self.shorter = round(size * 256 / 224)

    def __getitem__(self, key: Key) -> Read | str:
        epoch, numbers = key
        pixels = numpy.empty((len(numbers), self.size, self.size, 3), numpy.uint8)
        factors = numpy.ones((len(numbers), 3))
        alphas = numpy.zeros((len(numbers), 3))
        for i, number in enumerate(numbers):
            path = self.root / os.fsdecode(self.names[number])
            draw = None if self.seed is None else random.Random(stream(self.seed, "image", epoch, number))
            try:
                cut = self._cut(path, draw)
            except Exception as error:  # Pillow has many ways to say that a file is broken
                return f"imagenet: the image {str(path)!r} cannot be read ({error}): it is cut off, or something else."
            if draw is not None:
                cut = cut[:, ::-1] if draw.random() < 0.5 else cut
                factors[i] = [1 + draw.uniform(-_JITTER, _JITTER) for _ in range(3)]
                alphas[i] = [draw.gauss(0, _LIGHTING) for _ in range(3)]
            pixels[i] = cut
        shifts = (alphas * _VALUES) @ _VECTORS.T
        labels = torch.from_numpy(self.labels[numbers])
        return torch.from_numpy(pixels), labels, torch.from_numpy(factors), torch.from_numpy(shifts)

    def _cut(self, path: Path, draw: random.Random | None) -> numpy.typing.NDArray[numpy.uint8]:
        """Read a file, and return what is in its box, scaled."""
        from PIL import Image

        with Image.open(path) as image:
            width, height = image.size
            if draw is None:
                box = center_box(width, height, self.size, self.shorter)
            else:
                box = random_box(width, height, self.size, draw)
            # A JPEG can be read at a half, a quarter or an eighth of its size, as long as the box keeps the pixels that
            # are wanted. That is quicker for boxes of twice the size or more: large images, not the usual 500 x 375.
            # Pixels then come as means of blocks, and differ from those of the whole image by one in 255 on average.
            wide, high = box[2] - box[0], box[3] - box[1]
            enough = math.ceil(width * self.size / wide), math.ceil(height * self.size / high)
            drafted = image.draft(None, enough)
            if drafted is not None:
                shrunk = drafted[1][2] / width
                box = (box[0] * shrunk, box[1] * shrunk, box[2] * shrunk, box[3] * shrunk)
            whole: Image.Image = image
            if "transparency" in image.info:
                whole = whole.convert("RGBA")
            if whole.mode != "RGB":
                whole = whole.convert("RGB")
            cut = whole.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        return numpy.asarray(cut)


def _outlive_signals(_: int) -> None:
    """Let a worker go on when a signal goes to all processes: the run takes its step, saves, and then ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))  # the worker's end, if nothing else ends it


# --- finding ---


class _Part(NamedTuple):
    names: numpy.typing.NDArray[numpy.bytes_]  # beginning with the part's own, with slashes
    sizes: numpy.typing.NDArray[numpy.int64]  # in bytes
    labels: numpy.typing.NDArray[numpy.int64]


def _find(root: Path) -> tuple[list[str], dict[str, _Part]]:
    """List the classes, and the images of both parts."""
    found = {}
    for part in COMPLETE:
        if not (root / part).is_dir():
            raise FileNotFoundError(f"imagenet: data is {str(root)!r}, which has no folder {part!r}. {_WANTED}")
        folders = sorted(child for child in (root / part).iterdir() if child.is_dir())
        with ThreadPoolExecutor(16) as pool:  # asking for sizes is waiting, on a disk that is not here
            listed = dict(zip((child.name for child in folders), pool.map(_images, folders), strict=True))
        found[part] = {name: images for name, images in listed.items() if images}
        if not found[part]:
            raise FileNotFoundError(
                f"imagenet: {str(root / part)!r} has no folders with images, one for each class (an image's class is "
                f"the folder that it is in). {_WANTED}"
            )
    if differing := sorted(found["train"].keys() ^ found["val"].keys()):
        raise ValueError(
            f"imagenet: train and val in {str(root)!r} should have the same folders, but only one of them has images "
            f"in {', '.join(differing[:12])}{', ...' if len(differing) > 12 else ''}."
        )
    classes = sorted(found["train"])
    return classes, {part: _part(part, [listed[name] for name in classes], classes) for part, listed in found.items()}


def _images(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of a folder's images, in order."""
    with os.scandir(folder) as entries:
        return sorted(
            (entry.name, entry.stat().st_size)
            for entry in entries
            # "._x.jpg" is a Mac's note about x.jpg.
            if entry.name.lower().endswith(_SUFFIXES) and not entry.name.startswith(".") and entry.is_file()
        )


def _part(part: str, listed: list[list[tuple[str, int]]], classes: list[str]) -> _Part:
    pairs = list(zip(classes, listed, strict=True))
    return _Part(
        numpy.array([os.fsencode(f"{part}/{label}/{name}") for label, images in pairs for name, _ in images]),
        numpy.array([size for images in listed for _, size in images], numpy.int64),
        numpy.repeat(numpy.arange(len(classes)), [len(images) for images in listed]),
    )


# --- the task ---


@dataclass(kw_only=True)
class ImageNet(Classification):
    """ImageNet, or any images in ``train/CLASS`` and ``val/CLASS`` of the folder ``data``; ``model`` is "resnet50".

    There is no part for validation besides val, in the paper either: "validation" and "test" are both of it.
    ``batch_size`` is that of all processes together, ``size`` that of the crops in pixels, ``workers`` the number of
    processes that read images for each process that trains: 0 is none, -1 as many as there are cores, at most 8.

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
    fits_a_graph: ClassVar[bool] = False  # its batches come from elsewhere
    batch_size: int = 256
    model: str = "resnet50"
    size: int = 224
    workers: int = -1

    def __post_init__(self) -> None:
        self.make_model = look_up("imagenet: model", self.model, _MODELS)
        for name, least in (("batch_size", 1), ("size", 1), ("workers", -1)):
            if getattr(self, name) < least:
                raise ValueError(f"imagenet: {name} is {getattr(self, name)}, but must be at least {least}.")
        if self.full:
            raise ValueError("imagenet: full is True, but there are no images besides those that are trained on.")
        if self.batch_size % self.world:
            raise ValueError(
                f"imagenet: batch_size is {self.batch_size}, but must be divisible by the number of processes, "
                f"{self.world}: each takes its share."
            )
        if self.data is None:
            raise ValueError(f"imagenet: data is not given, but the task has none of its own. {_WANTED}")
        try:
            import PIL.Image  # noqa: F401  (the workers need it)
        except ImportError as error:
            raise ModuleNotFoundError(
                "imagenet: images are read with Pillow, which is not installed: pip install pillow."
            ) from error
        self.root = Path(self.data)
        if not self.root.is_dir():
            raise FileNotFoundError(f"imagenet: data is {self.data!r}, which is not a folder. {_WANTED}")
        self.classes, self.parts = _find(self.root)
        if self.batch_size > len(self.parts["train"].labels):
            raise ValueError(
                f"imagenet: batch_size is {self.batch_size}, but there are only {len(self.parts['train'].labels)} "
                "images to train on."
            )
        self.share = self.batch_size // self.world  # of a batch, for this process
        self._on_cuda = torch.device(self.device).type == "cuda"
        self._coming: Iterator[Read | str] | None = None
        self._next = -1  # the step whose batch comes next
        # Before multiprocessing ends them at the program's end, by a signal that they do not obey at once.
        atexit.register(_end_workers, weakref.ref(self))

    def fingerprint(self) -> str:
        """Return a digest of the images' names and sizes; to read all of them would take as long as an epoch."""
        total = hashlib.sha256()
        for part in self.parts.values():
            total.update(repr(part.names.dtype).encode() + part.names.tobytes() + part.sizes.tobytes())
        return total.hexdigest()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of the results should know about the images."""
        counts = {f"{part}/": (len(self.parts[part].labels), count, "images") for part, count in COMPLETE.items()}
        counts["data"] = len(self.classes), CLASSES, "classes"
        return tuple(
            f"{what} has {there:,} {things} where ImageNet (ILSVRC 2012) has {complete:,}."
            for what, (there, complete, things) in counts.items()
            if there != complete
        )

    @property
    def steps_per_epoch(self) -> int:
        """How many batches there are in an epoch; a last one that is not full is left out (BatchNorm)."""
        return len(self.parts["train"].labels) // self.batch_size

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        return self.make_model(classes=len(self.classes))

    def order(self, epoch: int) -> Epoch:
        """Return an epoch's order: a function of the seed and the number alone."""
        return _drawn(self.seed, epoch, len(self.parts["train"].labels))

    def batch(self, order: Any, index: int) -> tuple[Tensor, ...]:
        """Return this process's share of a batch: images and labels.

        Workers read ahead, from one epoch into the next; a batch that is not the next one starts them anew.
        """
        assert isinstance(order, Epoch)
        step = order.number * self.steps_per_epoch + index
        if self._coming is None or step != self._next:
            self._coming = None  # ends the old workers, before there are new ones
            reader = _Reader(self.root, self.parts["train"], self.size, self.seed)
            self._coming = self._read(reader, self._keys(order, index))
        coming, self._coming = self._coming, None  # gone, if reading fails
        made = self._made(next(coming))
        self._coming, self._next = coming, step + 1
        return made

    def _keys(self, order: Epoch, index: int) -> Iterator[Key]:
        """Say which images this process reads, from a batch on, without an end."""
        # Not a generator of its own: it would hold this task, which holds the loader, which holds the generator, and
        # workers whose loader is found as garbage, in a circle, are no longer told to end.
        slices = [
            slice(start, start + self.share)
            for start in range(self.rank * self.share, self.steps_per_epoch * self.batch_size, self.batch_size)
        ]
        return _endless(self.seed, order, slices, index)

    def _read(self, reader: _Reader, keys: Iterable[Key]) -> Iterator[Read | str]:
        workers = self.workers if self.workers >= 0 else min(_MOST_WORKERS, _cores())
        return iter(
            DataLoader(
                reader,
                batch_size=None,  # what is read at a time is a batch already
                sampler=keys,
                num_workers=workers,
                collate_fn=_as_it_is,
                pin_memory=self._on_cuda,
                worker_init_fn=_outlive_signals,
                generator=torch.Generator(),  # or it would draw from the global one
            )
        )

    def _made(self, read: Read | str) -> tuple[Tensor, Tensor]:
        """Move what has been read to the device, and make it what the model takes."""
        if isinstance(read, str):
            raise ValueError(read)
        pixels, labels, factors, shifts = (tensor.to(self.device, non_blocking=True) for tensor in read)
        images = recoloured(pixels, factors, shifts, self.dtype)
        return images.contiguous(memory_format=self.memory_format), labels

    def evaluate(self, model: nn.Module, part: str) -> Score:
        """Return the score on val, which both "validation" and "test" are; the model is in eval mode.

        Images are scaled to a shorter side of 256 (for ``size=224``), and their center is taken. Each process takes
        its share of them, and has the score of all.
        """
        look_up("imagenet: part", part, {"validation": None, "test": None})
        numbers = numpy.arange(len(self.parts["val"].labels))[self.rank :: self.world]
        keys = [(0, numbers[start : start + self.share]) for start in range(0, len(numbers), self.share)]
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for read in self._read(_Reader(self.root, self.parts["val"], self.size), keys):
            images, labels = self._made(read)
            scores = model(images).to(self.wide)
            loss = F.cross_entropy(scores, labels, reduction="sum")
            wrong = (scores.argmax(1) != labels).sum()
            sums += torch.stack([loss, wrong, torch.ones_like(loss) * len(labels)])
        if self.world > 1 and dist.is_initialized():
            dist.all_reduce(sums)
        loss_sum, wrong_sum, count = sums.tolist()  # the one time that the device is waited for
        return Score(loss_sum / count, 100 * wrong_sum / count)


def _drawn(seed: int, epoch: int, images: int) -> Epoch:
    generator = torch.Generator().manual_seed(stream(seed, "order", epoch))
    return Epoch(epoch, torch.randperm(images, generator=generator).numpy())


def _endless(seed: int, order: Epoch, slices: list[slice], index: int) -> Iterator[Key]:
    while True:
        for part in slices[index:]:
            yield order.number, order.images[part]
        order, index = _drawn(seed, order.number + 1, len(order.images)), 0


def _end_workers(task: "weakref.ref[ImageNet]") -> None:
    if (found := task()) is not None:
        found._coming = None


def _as_it_is(read: Any) -> Any:
    return read


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
