"""Reading one file of CIFAR: the official binary format, the official python format (a pickle), or an image.

Nothing that a pickle names is imported or called: a stub stores the arguments, and arrays are made afterwards.
"""

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

__all__ = ["read_file"]

SIDE = 32
SUFFIXES = (".png", ".jpg", ".jpeg")  # of images
_PIXELS = 3 * SIDE * SIDE  # bytes of an image

Array = numpy.typing.NDArray[Any]
Part = tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.int64]]


def read_file(name: str, raw: bytes, classes: int, complete: int) -> Part:
    """Return pixels, (images, height, width, 3), and labels of a file; ``complete`` is the official number of images.

    The label of an image file is 0: its folder gives the real one.

    >>> pixels, labels = read_file("test_batch.bin", (bytes([7]) + bytes(3072)) * 2, classes=10, complete=10_000)
    >>> pixels.shape, labels
    ((2, 32, 32, 3), array([7, 7]))
    """
    read, form = _FORMS[Path(name).suffix.lower()]
    try:
        pixels, labels = read(raw, classes, complete)
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong):
            raise ValueError(f"an image has label {wrong[0]}, but labels should be 0 to {classes - 1}")
    except ImportError as error:
        raise ModuleNotFoundError("cifar: images are decoded by Pillow: pip install pillow.") from error
    except Exception as error:  # a broken file may raise anything
        problem = f"cannot be {form} ({error}): it is truncated, or another kind of file"
        raise ValueError(f"cifar: {name} ({len(raw):,} bytes) {problem}.") from error
    planes = pixels.reshape(-1, 3, SIDE, SIDE)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels.astype(numpy.int64)


def _from_records(raw: bytes, classes: int, complete: int) -> tuple[Array, Array]:
    """Read the binary format: a byte for the label (CIFAR-100: the coarse one, then the fine one), then the pixels."""
    size = (1 if classes == 10 else 2) + _PIXELS
    if not raw or len(raw) % size:
        should = f"{complete * size:,} ({complete:,} records of {size:,})"
        raise ValueError(f"it has {len(raw):,} bytes, but should have {should}")
    records = numpy.frombuffer(raw, numpy.uint8).reshape(-1, size)
    return records[:, -_PIXELS:], records[:, -_PIXELS - 1]


def _from_image(raw: bytes, classes: int, complete: int) -> tuple[Array, Array]:
    from PIL import Image

    with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
        if image.size != (SIDE, SIDE):  # checked before anything is decoded
            raise ValueError(f"it has {image.width} x {image.height} pixels, but should have {SIDE} x {SIDE}")
        return numpy.asarray(image.convert("RGB")).transpose(2, 0, 1), numpy.zeros(1)


def _from_pickle(raw: bytes, classes: int, complete: int) -> tuple[Array, Array]:
    """Read the python format: a dictionary with the pixels, (images, 3072), and the labels."""
    for operation, argument, _ in pickletools.genops(raw):
        # The memo is as large as the largest index: one beyond the size of the file could take gigabytes.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise ValueError(f"it uses {argument:,} as a memo index")
    content = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    key = "labels" if classes == 10 else "fine_labels"
    should = f"should be a dictionary with data, {complete:,} x {_PIXELS:,} bytes, and as many {key}"
    if not isinstance(content, dict):
        raise ValueError(f"it is an object of type {type(content).__name__}, but {should}")
    pixels, labels = (_array(content.get(each.encode(), content.get(each))) for each in ("data", key))
    if pixels is None or pixels.shape[1:] != (_PIXELS,) or not len(pixels):
        raise ValueError(f"it has {_described(pixels)} as data, but {should}")
    if labels is None or labels.shape != pixels.shape[:1]:
        raise ValueError(f"it has {_described(labels)} as {key}, but {should}")
    return pixels, labels


class _Stub:
    """Replaces everything that a pickle calls to make an array or its dtype; no pickle can change the class."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        if len(state) == 5:  # an array's, in all protocols but the newest; a dtype's is longer
            _, shape, dtype, columns_first, raw = state
            self.given = raw, dtype, shape, "F" if columns_first else "C"


class _Unpickler(pickle.Unpickler):
    called = re.compile(r"numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct|_?core\.numeric\._frombuffer)")

    def find_class(self, module: str, name: str) -> type:
        if not self.called.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is neither an array nor a list nor text")
        return _Stub


def _array(thing: object) -> Array | None:
    """Return an array of bytes, or of a list of integers; None if it is neither."""
    if isinstance(thing, list) and all(type(number) is int for number in thing):
        return numpy.array(thing, numpy.int64)
    if isinstance(thing, _Stub):
        raw, dtype, shape, order = thing.given
        if dtype.given[0] in ("u1", b"u1"):
            return numpy.frombuffer(raw, numpy.uint8).reshape(shape, order=order)
    return None


def _described(array: Array | None) -> str:
    if array is None:
        return "nothing usable"
    return f"{' x '.join(f'{n:,}' for n in array.shape)} numbers of type {array.dtype}"


_FORMS = {
    "": (_from_pickle, "read as a pickle of arrays, lists and text"),
    ".bin": (_from_records, "read as records of labels and pixels"),
    **dict.fromkeys(SUFFIXES, (_from_image, "decoded as an image")),
}
