"""Reading CIFAR-10 and CIFAR-100: the official archives, packed or unpacked, or folders of images.

The official files are of two forms: records of bytes (.bin), or pickles. Nothing that a pickle names is imported or
called: a stub stores the arguments, and arrays are made afterwards.
"""

import hashlib
import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from avagrad.lab.data.download import download, unpack

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
WANTED = (
    "Expected: cifar-10-python.tar.gz or cifar-10-binary.tar.gz (for CIFAR-100: cifar-100-...) from "
    f"{ADDRESS}cifar.html, packed or unpacked, or a folder with train/CLASS/*.png and test/CLASS/*.png (or .jpg); "
    "--download downloads the first into the folder data."
)
ARCHIVES = {  # for --download, with the digest on the official page
    10: ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    100: ("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}
COMPLETE = {"train": 50_000, "test": 10_000}  # images
SIDE = 32

_PIXELS = 3 * SIDE * SIDE  # bytes of an image
_IMAGES = (".png", ".jpg", ".jpeg")
_FILES = {  # the pickles; the names of records end in .bin
    10: {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    100: {"train": ["train"], "test": ["test"]},
}
_CLASSES = {  # by the name of an official file
    name + end: classes
    for classes, parts in _FILES.items()
    for name in parts["train"] + parts["test"]
    for end in ("", ".bin")
}
# Maximum bytes of a file and of an archive's content: a little more than the official ones.
_LARGEST = {name: 32_000_000 if classes == 10 else 160_000_000 for name, classes in _CLASSES.items()}
_UNPACKED = 200_000_000

Array = numpy.ndarray[Any, Any]
Part = tuple[Array, Array]  # pixels, (images, height, width, 3), and labels


class Images(NamedTuple):
    """The images of the two parts."""

    train: Part
    test: Part
    remarks: tuple[str, ...]  # on the data, for readers of the results


def read_images(path: str | Path, classes: int = 10) -> Images:
    """Read CIFAR-10 or CIFAR-100 from an official archive or a folder, in any of the forms.

    An unusual number of images is allowed, with a remark. Classes are numbered as in the official files; those of
    folders in the order of their names, which is the same.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"cifar: data is {str(path)!r}, which does not exist. {WANTED}")
    if path.is_file():
        with path.open("rb") as archive:
            try:
                content = unpack(archive, _LARGEST, _UNPACKED)
            except ValueError as error:
                raise ValueError(f"cifar: {str(path)!r} {error}. {WANTED}") from error
        return _read_official(path, content, classes)
    files = _find(path, classes) or _find(path, 100 if classes == 10 else 10)
    if files and files[0].suffix == ".gz":
        return read_images(files[0], classes)
    if files and files[0].name not in _CLASSES:
        return _read_folders(path, files, classes)
    return _read_official(path, {file.relative_to(path): _load(file) for file in files}, classes)


def _find(folder: Path, classes: int) -> list[Path]:
    """Return the official files in the folder or one subfolder, or else its images, or else its archives."""
    names = [name for name in _CLASSES if _CLASSES[name] == classes]
    files = [file for place in ("", "[!.]*/") for name in names for file in sorted(folder.glob(place + name))]
    if official := [file for file in files if file.is_file()]:
        return [file for file in official if file.parent == official[0].parent]
    files = sorted(file for part in COMPLETE for file in folder.glob(f"{part}/[!.]*/[!.]*"))  # none that is hidden
    archives = [folder / f"cifar-{classes}-{form}.tar.gz" for form in ("python", "binary")]
    return [file for file in files if file.suffix.lower() in _IMAGES] or [file for file in archives if file.is_file()]


def _read_official(path: Path, content: dict[Path, bytes], classes: int) -> Images:
    """Read the official files of both parts, in the form and the folder of the first one."""
    if not content:
        raise FileNotFoundError(f"cifar: {str(path)!r} has no files of CIFAR-{classes}. {WANTED}")
    first = min(content, key=lambda file: _CLASSES[file.name] != classes)
    if (other := _CLASSES[first.name]) != classes:
        raise ValueError(f"cifar: {str(path)!r} is CIFAR-{other}, but classes is {classes}: set classes={other}.")
    parts = {part: [first.with_name(name + first.suffix) for name in names] for part, names in _FILES[classes].items()}
    if missing := [file.name for part in parts.values() for file in part if file not in content]:
        lacks = f"lacks {', '.join(missing)} next to the other files in {str(first.parent)!r}"
        raise FileNotFoundError(f"cifar: {str(path)!r} {lacks}. {WANTED}")
    found: dict[str, Part] = {}
    remarks: list[str] = []
    for part, files in parts.items():
        complete = COMPLETE[part] // len(files)
        pixels, labels = zip(*(_read_file(file, content[file], classes, complete) for file in files), strict=True)
        found[part] = numpy.concatenate(pixels), numpy.concatenate(labels)
        for file, piece in zip(files, labels, strict=True):
            remarks += _count_remarks(str(file), len(piece), complete)
    return Images(**found, remarks=tuple(remarks))


def _read_folders(folder: Path, files: list[Path], classes: int) -> Images:
    """Read the images of both parts, which must have the same folders."""
    parts = {part: [file for file in files if file.parts[-3] == part] for part in COMPLETE}
    train, test = ({file.parent.name for file in images} for images in parts.values())
    if not train or not test:
        lacks = f"lacks images in {'test' if train else 'train'}/CLASS"
        raise FileNotFoundError(f"cifar: {str(folder)!r} {lacks}. {WANTED}")
    if len(train) != classes:
        has = f"has {len(train)} folders with images ({', '.join(sorted(train)[:12])})"
        raise ValueError(f"cifar: train in {str(folder)!r} {has}, but should have one for each of {classes} classes.")
    if train != test:
        only = f"only one of them has images in {', '.join(sorted(train ^ test)[:12])}"
        raise ValueError(f"cifar: train and test in {str(folder)!r} should have the same folders, but {only}.")
    found: dict[str, Part] = {}
    remarks: list[str] = []
    for part, images in parts.items():
        _, labels = numpy.unique([file.parent.name for file in images], return_inverse=True)
        found[part] = numpy.stack([_read_image(file) for file in images]), labels
        remarks += _count_remarks(f"{part}/", len(images), COMPLETE[part])
    if any(file.suffix.lower() != ".png" for file in files):
        remarks.append("The images were compressed as JPEG: errors are only roughly those on the official files.")
    return Images(**found, remarks=tuple(remarks))


def _count_remarks(name: str, count: int, complete: int) -> list[str]:
    remark = f"{name} has {count:,} images, but the complete one has {complete:,}: it is another version, or truncated."
    return [] if count == complete else [remark]


def _load(file: Path) -> bytes:
    size, most = file.stat().st_size, _LARGEST.get(file.name, 32_000_000)
    if size > most:
        raise ValueError(f"cifar: {file} has {size:,} bytes, but should have at most {most:,}.")
    return file.read_bytes()


def _read_image(file: Path) -> Array:
    raw = _load(file)
    try:
        from PIL import Image

        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
            if image.size != (SIDE, SIDE):  # checked before anything is decoded
                raise ValueError(f"it has {image.width} x {image.height} pixels, but should have {SIDE} x {SIDE}")
            return numpy.asarray(image.convert("RGB"))
    except ImportError as error:
        raise ModuleNotFoundError("cifar: images are decoded by Pillow: pip install pillow.") from error
    except Exception as error:  # a broken file may raise anything
        raise ValueError(f"cifar: {file} ({len(raw):,} bytes) cannot be decoded as an image ({error}).") from error


def _read_file(file: Path, raw: bytes, classes: int, complete: int) -> Part:
    """Return pixels and labels of an official file, which should have ``complete`` images."""
    is_binary = file.suffix == ".bin"
    try:
        pixels, labels = (_from_records if is_binary else _from_pickle)(raw, classes, complete)
        if len(wrong := labels[(labels < 0) | (labels >= classes)]):
            raise ValueError(f"an image has label {wrong[0]}, but labels should be 0 to {classes - 1}")
    except Exception as error:  # a broken file may raise anything
        form = "records of labels and pixels" if is_binary else "a pickle of arrays, lists and text"
        problem = f"cannot be read as {form} ({error}): it is truncated, or another kind of file"
        raise ValueError(f"cifar: {file} ({len(raw):,} bytes) {problem}.") from error
    planes = pixels.reshape(-1, 3, SIDE, SIDE)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels.astype(numpy.int64)


def _from_records(raw: bytes, classes: int, complete: int) -> tuple[Array, Array]:
    """Read the binary form: a byte for the label (CIFAR-100: the coarse one, then the fine one), then the pixels."""
    size = (1 if classes == 10 else 2) + _PIXELS
    if not raw or len(raw) % size:
        should = f"{complete * size:,} ({complete:,} records of {size:,})"
        raise ValueError(f"it has {len(raw):,} bytes, but should have {should}")
    records = numpy.frombuffer(raw, numpy.uint8).reshape(-1, size)
    return records[:, -_PIXELS:], records[:, -_PIXELS - 1]


def _from_pickle(raw: bytes, classes: int, complete: int) -> Part:
    """Read the python form: a dictionary with the pixels, (images, 3072), and the labels."""
    for operation, argument, _ in pickletools.genops(raw):
        # The memo is as large as the largest index: one beyond the size of the file could take gigabytes.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise ValueError(f"it uses {argument:,} as a memo index")
    content = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    key = "labels" if classes == 10 else "fine_labels"
    should = f"should be a dictionary with data, {complete:,} x {_PIXELS:,} bytes, and as many {key}"
    if not isinstance(content, dict):
        raise ValueError(f"it is an object of type {type(content).__name__}, but {should}")
    pixels, labels = (_array(content.get(name.encode(), content.get(name))) for name in ("data", key))
    images = 0 if pixels is None else len(pixels)
    for name, array, shape in (("data", pixels, (images, _PIXELS)), (key, labels, (images,))):
        if array is None:
            raise ValueError(f"it has nothing usable as {name}, but {should}")
        if array.shape != shape or not images:
            size = " x ".join(f"{n:,}" for n in array.shape)
            raise ValueError(f"it has {size} numbers of type {array.dtype} as {name}, but {should}")
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
    def find_class(self, module: str, name: str) -> type:
        of_arrays = r"numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct|_?core\.numeric\._frombuffer)"
        if not re.fullmatch(of_arrays, f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is neither an array nor a list nor text")
        return _Stub


def _array(thing: object) -> Any:
    """Return an array of bytes, or of a list of integers; None if it is neither."""
    if isinstance(thing, list) and all(type(number) is int for number in thing):
        return numpy.array(thing, numpy.int64)
    if isinstance(thing, _Stub):
        raw, dtype, shape, order = thing.given
        if dtype.given[0] in ("u1", b"u1"):
            return numpy.frombuffer(raw, numpy.uint8).reshape(shape, order=order)
    return None


def download_cifar(folder: str | Path, classes: int = 10) -> None:
    """Download the official archive into a folder, unless it has data, or is a file."""
    folder = Path(folder)
    name, digest = ARCHIVES[classes]

    def checked(content: bytes) -> dict[str, bytes]:
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != digest:
            raise ValueError(f"its {len(content):,} bytes have the md5 digest {found}, but should have {digest}")
        return {name: content}

    if not (folder.is_file() or _find(folder, classes)):
        download(ADDRESS + name, folder, checked, "cifar", WANTED)
