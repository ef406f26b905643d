"""Reading ImageNet: finding the image files, reading, cropping and flipping images, and changing their colours.

The augmentation is that of fb.resnet.torch (Gross and Wilber), which the paper follows: a crop of random area and
aspect, scaled bicubically; brightness, contrast and saturation; noise along the principal components of ImageNet's
colours; a flip. Scaling is Pillow's, which averages when an image shrinks, and uses pixels beyond a crop's edges.
"""

import glob
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

WANTED = (
    "Expected: a folder with the images in train/CLASS/*.JPEG and val/CLASS/*.JPEG (or .jpg, .png). They are "
    "available from https://image-net.org after registration; there is no automatic download."
)

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GRAY = (0.299, 0.587, 0.114)
# Eigenvalues and eigenvectors (columns) of the colours of ImageNet's pixels, between 0 and 1.
_VALUES = numpy.array([0.2175, 0.0188, 0.0045])
_VECTORS = numpy.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])

Array = numpy.typing.NDArray[Any]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the file


class Part(NamedTuple):
    """The images of a part."""

    names: list[str]  # paths from the root
    labels: list[int]


def find_images(root: Path) -> tuple[list[str], dict[str, Part]]:
    """List the classes, and the images of both parts."""
    found = {}
    for part in ("train", "val"):
        if not (root / part).is_dir():
            what = f"has no folder {part!r}" if root.is_dir() else "is not a folder"
            raise FileNotFoundError(f"imagenet: data is {str(root)!r}, which {what}. {WANTED}")
        names = glob.iglob(f"{part}/*/*", root_dir=root)  # without hidden files
        found[part] = sorted(name for name in names if name.lower().endswith((".jpeg", ".jpg", ".png")))
        if not found[part]:
            where = str(root / part)
            raise FileNotFoundError(f"imagenet: {where!r} has no folders with images, one for each class. {WANTED}")
    folders = {part: [Path(name).parent.name for name in names] for part, names in found.items()}
    if differing := sorted(set(folders["train"]) ^ set(folders["val"])):
        raise ValueError(
            f"imagenet: train and val in {str(root)!r} should have the same folders, but only one of them has images "
            f"in {', '.join(differing[:12])}{', ...' if len(differing) > 12 else ''}."
        )
    labels = {folder: label for label, folder in enumerate(sorted(set(folders["train"])))}
    return list(labels), {part: Part(found[part], [labels[folder] for folder in folders[part]]) for part in found}


def random_box(width: int, height: int, size: int, draw: random.Random) -> Box:
    """Draw a box of 0.08 to 1 of the area, with an aspect of 3/4 to 4/3; after ten failures, return the center."""
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
    """Return the center box of ``size`` pixels, of the image scaled to a shorter side of ``shorter`` pixels."""
    scale = shorter / min(width, height)
    wide, high = max(shorter, int(width * scale)), max(shorter, int(height * scale))
    left, top = math.ceil((wide - size) / 2), math.ceil((high - size) / 2)
    across, down = width / wide, height / high
    return left * across, top * down, min((left + size) * across, width), min((top + size) * down, height)


class Reader(Dataset[Any]):
    """Reads batches of images, given by file, label and seed; for a broken file, it returns an error message."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, images: list[tuple[Path, int, int | None]]) -> list[Tensor] | str:
        """Return pixels, factors and shifts of the colours, and labels; or the message."""
        read = []
        for path, label, seed in images:
            try:
                read.append((*read_image(path, self.size, None if seed is None else random.Random(seed)), label))
            except Exception as error:  # Pillow raises many types for broken files
                about = f"the image {str(path)!r} cannot be read ({error})"
                return f"imagenet: {about}: it is truncated, or another kind of file."
        batch: list[Tensor] = default_collate(read)
        return batch


def read_image(path: Path, size: int, draw: random.Random | None = None) -> tuple[Array, Array, Array]:
    """Return the pixels of an image's center, or of a crop that ``draw`` chooses, and what :func:`recoloured` needs."""
    from PIL import Image

    with Image.open(path) as image:
        if draw is None:
            box = center_box(*image.size, size, round(size * 256 / 224))
        else:
            box = random_box(*image.size, size, draw)
        whole = image.convert("RGBA") if "transparency" in image.info else image
        cut = whole.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box=box)
    if draw is None:
        return numpy.array(cut), numpy.ones(3), numpy.zeros(3)
    if draw.random() < 0.5:
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    factors = numpy.array([draw.uniform(0.6, 1.4) for _ in range(3)])
    lighting = numpy.array([draw.gauss(0, 0.1) for _ in range(3)])
    return numpy.array(cut), factors, _VECTORS @ (_VALUES * lighting)


def recoloured(pixels: Tensor, factors: Tensor, shifts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Change brightness, contrast and saturation by (images, 3) factors, shift the colours, and normalise.

    ``pixels`` are bytes, (images, height, width, 3); the result is (images, 3, height, width), channels last in memory.
    Each of the three is a mixture with black, with the image's mean gray, or with each pixel's own gray. They are
    linear, without clipping in between, so their order does not matter; fb.resnet.torch draws one at random.
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
