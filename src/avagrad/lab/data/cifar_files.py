"""Reading one official file of CIFAR, in the binary form or the python form, which is a pickle.

Nothing that a pickle names is looked up or called: a stand-in keeps what it is given, and arrays are made afterwards.
"""

import io
import pickle
import pickletools
from typing import Any

import numpy
import numpy.typing

__all__ = ["read_file"]

SIDE = 32
_PIXELS = 3 * SIDE * SIDE  # bytes of an image

Part = tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.int64]]


def read_file(name: str, raw: bytes, classes: int, complete: int) -> Part:
    """Return pixels, (images, height, width, 3), and labels of a file, of which the complete one has so many images.

    >>> pixels, labels = read_file("test_batch.bin", (bytes([7]) + bytes(3072)) * 2, classes=10, complete=10_000)
    >>> pixels.shape, labels
    ((2, 32, 32, 3), array([7, 7]))
    """
    pixels, labels = (_from_records if name.endswith(".bin") else _from_pickle)(name, raw, classes, complete)
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise ValueError(f"cifar: {name} has an image with label {wrong[0]}, but labels should be 0 to {classes - 1}.")
    planes = pixels.reshape(-1, 3, SIDE, SIDE)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels.astype(numpy.int64)


def _from_records(name: str, raw: bytes, classes: int, complete: int) -> tuple[Any, Any]:
    """Read the binary form: a byte for the label (CIFAR-100: the coarse one, then the fine one), then the pixels."""
    size = (1 if classes == 10 else 2) + _PIXELS
    if not raw or len(raw) % size:
        raise ValueError(
            f"cifar: {name} has {len(raw):,} bytes, but should have {complete * size:,} ({complete:,} records of "
            f"{size:,}): it has been cut off, or is something else."
        )
    records = numpy.frombuffer(raw, numpy.uint8).reshape(-1, size)
    return records[:, -_PIXELS:], records[:, -_PIXELS - 1]


def _from_pickle(name: str, raw: bytes, classes: int, complete: int) -> tuple[Any, Any]:
    """Read the python form: a dictionary with the pixels, (images, 3072), and the labels."""
    content = _unpickle(name, raw)
    key = "labels" if classes == 10 else "fine_labels"
    should = f"should be a dictionary with data, {complete:,} x {_PIXELS:,} bytes, and as many {key}."
    if not isinstance(content, dict):
        raise ValueError(f"cifar: {name} holds {_kind(content)}, but {should}")
    pixels, labels = (_array(content.get(each.encode(), content.get(each))) for each in ("data", key))
    if pixels is None or pixels.dtype != numpy.uint8 or pixels.shape[1:] != (_PIXELS,) or not len(pixels):
        raise ValueError(f"cifar: {name} holds as data {_kind(pixels)}, but {should}")
    if labels is None or labels.shape != pixels.shape[:1]:
        raise ValueError(f"cifar: {name} holds as {key} {_kind(labels)}, but {should}")
    return pixels, labels


def _kind(thing: object) -> str:
    if isinstance(thing, numpy.ndarray):
        return f"{' x '.join(f'{n:,}' for n in thing.shape)} numbers of type {thing.dtype}"
    return "nothing" if thing is None else f"an object of type {type(thing).__name__}"


class _Given:
    """Stands in for what a pickle calls to make an array or its dtype; no pickle can change the class."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        if len(state) == 5:  # an array's, in all protocols but the newest; a dtype's is longer
            _, shape, dtype, columns_first, raw = state
            self.given = raw, dtype, shape, "F" if columns_first else "C"


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Given,
    ("numpy", "dtype"): _Given,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Given for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Given for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is neither an array nor a list nor text")
        return _STAND_INS[module, name]


def _unpickle(name: str, raw: bytes) -> object:
    try:
        for operation, argument, _ in pickletools.genops(raw):
            # As many places are made as the largest number of one says: more than the file can fill would be gigabytes.
            if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
                raise pickle.UnpicklingError(f"it asks for {argument:,} places to remember things in")
        return _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise ValueError(
            f"cifar: {name} ({len(raw):,} bytes) cannot be read as a pickle of arrays, lists and text ({error}): "
            "it has been cut off, or is something else."
        ) from error


def _array(thing: object) -> numpy.typing.NDArray[Any] | None:
    """Make an array of bytes, or of a list of integers; None if it is neither."""
    try:
        if isinstance(thing, list) and all(type(number) is int for number in thing):
            return numpy.array(thing, numpy.int64)
        if isinstance(thing, _Given):
            raw, dtype, shape, order = thing.given
            if dtype.given[0] in ("u1", b"u1"):
                return numpy.frombuffer(raw, numpy.uint8).reshape(shape, order=order)
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):
        pass
    return None
