"""Reading ImageNet: finding the image files, reading, cropping and flipping them in workers, and changing colours.

The augmentation is that of fb.resnet.torch (Gross and Wilber), which the paper follows: a crop of random area and
aspect, scaled bicubically; brightness, contrast and saturation; noise along the principal components of ImageNet's
colours; a flip. Scaling is Pillow's, which averages when an image shrinks, and uses pixels beyond a crop's edges.
"""

import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.utils.data import Dataset

PAGE = "https://image-net.org"
COMPLETE = {"train": 1_281_167, "val": 50_000}  # images
CLASSES = 1000
WANTED = (
    "Expected: a folder with the images in train/CLASS/*.JPEG and val/CLASS/*.JPEG (or .jpg, .png). They are "
    f"available from {PAGE} after registration; there is no automatic download."
)

_SUFFIXES = (".jpeg", ".jpg", ".png")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GRAY = (0.299, 0.587, 0.114)
_JITTER, _LIGHTING = 0.4, 0.1
# Eigenvalues and eigenvectors (columns) of the colours of ImageNet's pixels, between 0 and 1.
_VALUES = numpy.array([0.2175, 0.0188, 0.0045])
_VECTORS = numpy.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the file
Key = tuple[int, numpy.typing.NDArray[numpy.int64]]  # the epoch, and the numbers of images
Read = tuple[Tensor, Tensor, Tensor, Tensor]  # pixels, labels, factors, shifts


class Part(NamedTuple):
    """The images of a part, in the order of their classes."""

    names: numpy.typing.NDArray[numpy.bytes_]  # paths from the root, with slashes
    sizes: numpy.typing.NDArray[numpy.int64]  # in bytes
    labels: numpy.typing.NDArray[numpy.int64]


def find_images(root: Path) -> tuple[list[str], dict[str, Part]]:
    """List the classes, and the images of both parts.

    >>> find_images(Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: imagenet: data is '/nowhere', which has no folder 'train'. Expected: a folder with ...
    """
    found = {}
    for part in COMPLETE:
        if not (root / part).is_dir():
            raise FileNotFoundError(f"imagenet: data is {str(root)!r}, which has no folder {part!r}. {WANTED}")
        folders = sorted(child for child in (root / part).iterdir() if child.is_dir())
        with ThreadPoolExecutor(16) as pool:  # reading sizes is slow on a network disk
            listed = dict(zip((child.name for child in folders), pool.map(_images, folders), strict=True))
        found[part] = {name: images for name, images in listed.items() if images}
        if not found[part]:
            raise FileNotFoundError(
                f"imagenet: {str(root / part)!r} has no folders with images, one for each class (an image's class is "
                f"its folder). {WANTED}"
            )
    if differing := sorted(found["train"].keys() ^ found["val"].keys()):
        raise ValueError(
            f"imagenet: train and val in {str(root)!r} should have the same folders, but only one of them has images "
            f"in {', '.join(differing[:12])}{', ...' if len(differing) > 12 else ''}."
        )
    return list(found["train"]), {part: _part(part, listed) for part, listed in found.items()}


def _images(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of a folder's images, in order."""
    with os.scandir(folder) as entries:
        return sorted(
            (entry.name, entry.stat().st_size)
            for entry in entries
            # "._x.jpg" is a macOS metadata file.
            if entry.name.lower().endswith(_SUFFIXES) and not entry.name.startswith(".") and entry.is_file()
        )


def _part(part: str, listed: dict[str, list[tuple[str, int]]]) -> Part:
    names = [os.fsencode(f"{part}/{label}/{name}") for label, images in listed.items() for name, _ in images]
    sizes = [size for images in listed.values() for _, size in images]
    labels = numpy.repeat(numpy.arange(len(listed)), [len(images) for images in listed.values()])
    return Part(numpy.array(names), numpy.array(sizes, numpy.int64), labels)


def random_box(width: int, height: int, size: int, draw: random.Random) -> Box:
    """Draw a box of 0.08 to 1 of the area, with an aspect of 3/4 to 4/3 or its inverse; after ten failures, the center.

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
    """Return the center box of ``size`` pixels, of the image scaled to a shorter side of ``shorter`` pixels.

    >>> center_box(500, 375, 224, 256)
    (86.5..., 23.4..., 414.9..., 351.5...)
    """
    scale = shorter / min(width, height)
    wide, high = max(shorter, int(width * scale)), max(shorter, int(height * scale))
    left, top = math.ceil((wide - size) / 2), math.ceil((high - size) / 2)
    across, down = width / wide, height / high
    return left * across, top * down, min((left + size) * across, width), min((top + size) * down, height)


class Reader(Dataset[Read | str]):
    """Reads images by their numbers; for a broken file, it returns an error message.

    ``seed_of`` is for training images: it returns the seed of the augmentation, from the epoch and an image's number.
    Names are one array: a list would soon be copied in every worker, since reading it changes reference counts.

    >>> part = Part(numpy.array([b"train/cat/1.jpg"]), numpy.array([5000]), numpy.array([0]))
    >>> Reader(Path("/nowhere"), part, size=224)[0, numpy.array([0])]
    "imagenet: the image '/nowhere/train/cat/1.jpg' cannot be read (...): it is truncated, or another kind of file."
    """

    def __init__(self, root: Path, part: Part, size: int, seed_of: Callable[[int, int], int] | None = None) -> None:
        self.root, self.names, self.labels, self.size, self.seed_of = root, part.names, part.labels, size, seed_of
        self.shorter = round(size * 256 / 224)

    def __getitem__(self, key: Key) -> Read | str:
        epoch, numbers = key
        pixels = numpy.empty((len(numbers), self.size, self.size, 3), numpy.uint8)
        factors = numpy.ones((len(numbers), 3))
        alphas = numpy.zeros((len(numbers), 3))
        for i, number in enumerate(numbers):
            path = self.root / os.fsdecode(self.names[number])
            draw = None if self.seed_of is None else random.Random(self.seed_of(epoch, number))
            try:
                cut = self._cut(path, draw)
            except Exception as error:  # Pillow raises many types for broken files
                about = f"the image {str(path)!r} cannot be read ({error})"
                return f"imagenet: {about}: it is truncated, or another kind of file."
            if draw is not None:
                cut = cut[:, ::-1] if draw.random() < 0.5 else cut
                factors[i] = [1 + draw.uniform(-_JITTER, _JITTER) for _ in range(3)]
                alphas[i] = [draw.gauss(0, _LIGHTING) for _ in range(3)]
            pixels[i] = cut
        shifts = (alphas * _VALUES) @ _VECTORS.T
        labels = torch.from_numpy(self.labels[numbers])
        return torch.from_numpy(pixels), labels, torch.from_numpy(factors), torch.from_numpy(shifts)

    def _cut(self, path: Path, draw: random.Random | None) -> numpy.typing.NDArray[numpy.uint8]:
        """Read a file, and return its box, scaled."""
        from PIL import Image

        with Image.open(path) as image:
            if draw is None:
                box = center_box(*image.size, self.size, self.shorter)
            else:
                box = random_box(*image.size, self.size, draw)
            whole = image.convert("RGBA") if "transparency" in image.info else image
            cut = whole.convert("RGB").resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        return numpy.asarray(cut)


def recoloured(pixels: Tensor, factors: Tensor, shifts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Change brightness, contrast and saturation by (images, 3) factors, shift the colours, and normalise.

    ``pixels`` are bytes, (images, height, width, 3); the result is (images, 3, height, width), channels last in memory.
    Each of the three is a mixture with black, with the image's mean gray, or with each pixel's own gray. They are
    linear, without clipping in between, so their order does not matter; fb.resnet.torch draws one at random.

    >>> pixels = torch.full((1, 2, 2, 3), 255, dtype=torch.uint8)
    >>> recoloured(pixels, torch.ones(1, 3), torch.zeros(1, 3))[0, :, 0, 0]
    tensor([2.2489, 2.4286, 2.6400])
    """
    values = pixels.permute(0, 3, 1, 2).to(dtype)
    brightness, contrast, saturation = factors.to(values)[:, :, None, None, None].unbind(1)
    mean, std = (values.new_tensor(row)[:, None, None] for row in (_MEAN, _STD))
    gray = sum(weight * values[:, i : i + 1] for i, weight in enumerate(_GRAY))
    assert isinstance(gray, Tensor)
    level = brightness * (1 - contrast) * gray.mean((2, 3), keepdim=True) / 255
    offset = (level + shifts.to(values)[:, :, None, None] - mean) / std
    both = brightness * contrast / (255 * std)
    return values.mul_(both * saturation).addcmul_(gray, both * (1 - saturation)).add_(offset)
