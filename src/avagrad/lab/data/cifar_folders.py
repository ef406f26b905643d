"""Reading CIFAR from image files, in a folder for each class under train and test."""

from collections.abc import Iterable
from pathlib import Path

import numpy
import numpy.typing

from avagrad.lab.data.cifar_files import SIDE, Part

__all__ = ["read_folders"]


def read_folders(root: Path, files: list[str], classes: int) -> tuple[dict[str, Part], tuple[str, ...]]:
    """Return pixels and labels of both parts, and the names of the classes; files are named from the root.

    >>> import tempfile
    >>> from PIL import Image
    >>> files = ["train/cat/1.png", "train/dog/1.png", "train/dog/2.png", "test/cat/3.png", "test/dog/4.png"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for file in files:
    ...         Path(folder, file).parent.mkdir(parents=True, exist_ok=True)
    ...         Image.new("RGB", (32, 32)).save(Path(folder, file))
    ...     parts, names = read_folders(Path(folder), files, classes=2)
    >>> parts["train"][0].shape, parts["train"][1].tolist(), names
    ((3, 32, 32, 3), [0, 1, 1], ('cat', 'dog'))
    """
    parts = {part: [file for file in files if file.split("/")[-3] == part] for part in ("train", "test")}
    for part, images in parts.items():
        if not images:
            raise FileNotFoundError(
                f"cifar: {str(root)!r} lacks images in {part}/CLASS, but has some in the other part."
            )
    train, test = ({_class(file) for file in images} for images in parts.values())
    if len(train) != classes:
        raise ValueError(
            f"cifar: train in {str(root)!r} has {len(train)} folders with images ({_some(train)}), but should have one "
            f"for each of {classes} classes (option classes)."
        )
    if train != test:
        raise ValueError(
            f"cifar: train and test in {str(root)!r} should have the same folders, but only one of them has images in "
            f"{_some(train ^ test)}."
        )
    labels = {name: i for i, name in enumerate(sorted(train))}
    return {
        part: (_decoded(root, images), numpy.array([labels[_class(file)] for file in images], numpy.int64))
        for part, images in parts.items()
    }, tuple(labels)


def _class(file: str) -> str:
    return file.split("/")[-2]


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:12]) + (", ..." if len(first) > 12 else "")


def _decoded(root: Path, files: list[str]) -> numpy.typing.NDArray[numpy.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ModuleNotFoundError(
            "cifar: image files are decoded by Pillow, which is not installed: pip install pillow."
        ) from error
    pixels = numpy.empty((len(files), SIDE, SIDE, 3), numpy.uint8)
    for i, file in enumerate(files):
        try:
            with Image.open(root / file, formats=("PNG", "JPEG")) as image:
                size = image.size  # known before anything is decoded
                if size == (SIDE, SIDE):
                    pixels[i] = numpy.asarray(image.convert("RGB"))
        except Exception as error:  # a broken image may raise anything
            raise ValueError(
                f"cifar: {file} in {str(root)!r} ({(root / file).stat().st_size:,} bytes) should be a PNG or JPEG "
                f"image, but cannot be decoded ({error})."
            ) from error
        if size != (SIDE, SIDE):
            raise ValueError(
                f"cifar: {file} in {str(root)!r} has {size[0]} x {size[1]} pixels, but should have {SIDE} x {SIDE}."
            )
    return pixels
