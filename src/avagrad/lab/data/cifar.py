"""Reading CIFAR-10 and CIFAR-100: the official archives, packed or unpacked, or folders of images.

The official files are of two forms: records of bytes (.bin), or pickles. Nothing that a pickle names is imported or
called: a stub stores the arguments, and arrays are made afterwards.
"""

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import pickle
import pickletools
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy.typing

from avagrad.lab.data.download import download

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
    for names in parts.values()
    for name in names
    for end in ("", ".bin")
}
# Maximum bytes of a file and of an archive's content: a little more than the official ones.
_LARGEST = {10: 32_000_000, 100: 160_000_000}
_UNPACKED = 200_000_000

Array = numpy.typing.NDArray[Any]
Part = tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.int64]]


class Images(NamedTuple):
    """The two parts: pixels, (images, height, width, 3), and labels."""

    train: Part
    test: Part
    names: tuple[str, ...]  # of the classes, if folders name them
    remarks: tuple[str, ...]  # on the data, for readers of the results


def read_images(path: str | Path, classes: int = 10) -> Images:
    """Read CIFAR-10 or CIFAR-100 from an official archive or a folder, in any of the forms.

    An unusual number of images is allowed, with a remark. Classes are numbered as in the official files; those of
    folders in the order of their names, which is the same.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("train.bin", "test.bin"):
    ...         _ = Path(folder, name).write_bytes((bytes([3, 70]) + bytes(3072)) * 4)
    ...     images = read_images(folder, classes=100)
    >>> images.train[0].shape, images.test[1].tolist()
    ((4, 32, 32, 3), [70, 70, 70, 70])
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"cifar: data is {str(path)!r}, which does not exist. {WANTED}")
    if path.is_file():
        content = _unpack(path)
        return _read_official(path, list(content), content.__getitem__, classes)
    files = _find(path, classes)
    archives = [path / f"cifar-{classes}-{form}.tar.gz" for form in ("python", "binary")]
    packed = [archive for archive in archives if archive.is_file()]
    if packed and not files:
        return read_images(packed[0], classes)
    if files and files[0].name not in _CLASSES:
        return _read_folders(path, files, classes)
    return _read_official(path, files or _find(path, 110 - classes), functools.partial(_load, path), classes)


def _find(folder: Path, classes: int) -> list[Path]:
    """Return the official files in the folder or a subfolder, or else the images, as paths relative to the folder."""
    names = [name for pattern in ("*", "*/*") for name in sorted(glob.glob(pattern, root_dir=folder))]
    official = [file for file in map(Path, names) if _CLASSES.get(file.name) == classes and (folder / file).is_file()]
    if official:
        return official
    names = [name for part in COMPLETE for name in glob.glob(f"{part}/*/*", root_dir=folder)]
    return sorted(Path(name) for name in names if name.lower().endswith(_IMAGES))


def _read_official(path: Path, files: list[Path], load: Callable[[Path], bytes], classes: int) -> Images:
    """Read the official files of both parts, in the form and the folder of the first one found."""
    if not files:
        raise FileNotFoundError(f"cifar: {str(path)!r} has no files of CIFAR-{classes}. {WANTED}")
    first = next((file for file in files if _CLASSES[file.name] == classes), None)
    if first is None:
        other = 110 - classes
        raise ValueError(f"cifar: {str(path)!r} is CIFAR-{other}, but classes is {classes}: set classes={other}.")
    parts = {part: [first.with_name(name + first.suffix) for name in names] for part, names in _FILES[classes].items()}
    if missing := [file.name for part in parts.values() for file in part if file not in files]:
        lacks = f"lacks {', '.join(missing)} next to the other files in {str(first.parent)!r}"
        raise FileNotFoundError(f"cifar: {str(path)!r} {lacks}. {WANTED}")
    found: dict[str, Part] = {}
    remarks: list[str] = []
    for part, chosen in parts.items():
        complete = COMPLETE[part] // len(chosen)
        pieces = [_read_file(file, load(file), classes, complete) for file in chosen]
        for file, (_, labels) in zip(chosen, pieces, strict=True):
            remarks += _count_remarks(str(file), len(labels), complete)
        found[part] = numpy.concatenate([piece[0] for piece in pieces]), numpy.concatenate([p[1] for p in pieces])
    return Images(found["train"], found["test"], (), tuple(remarks))


def _read_folders(folder: Path, files: list[Path], classes: int) -> Images:
    """Read the images of both parts, which must have the same folders."""
    parts = {part: [file for file in files if file.parts[0] == part] for part in COMPLETE}
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
    names = sorted(train)
    found: dict[str, Part] = {}
    remarks: list[str] = []
    for part, images in parts.items():
        pixels = numpy.stack([_read_image(file, _load(folder, file)) for file in images])
        found[part] = pixels, numpy.array([names.index(file.parent.name) for file in images], numpy.int64)
        remarks += _count_remarks(f"{part}/", len(images), COMPLETE[part])
    if any(file.suffix.lower() != ".png" for file in files):
        remarks.append(
            "The images were compressed as JPEG, which changes them: errors on them can be compared with each other, "
            "and only roughly with those on the official files."
        )
    return Images(found["train"], found["test"], tuple(names), tuple(remarks))


def _count_remarks(name: str, count: int, complete: int) -> list[str]:
    remark = f"{name} has {count:,} images, but the complete one has {complete:,}: it is another version, or truncated."
    return [] if count == complete else [remark]


def _load(folder: Path, file: Path) -> bytes:
    _check_size(file, (folder / file).stat().st_size)
    return (folder / file).read_bytes()


def _unpack(archive: Path) -> dict[Path, bytes]:
    """Return the content of an archive's official files."""
    content = {}
    try:
        with gzip.open(archive) as whole:  # checks size and checksum before tar trusts its headers
            whole.seek(_UNPACKED)
            if whole.read(1):
                problem = f"unpacks to more than {_UNPACKED:,} bytes, but an official archive has fewer"
                raise ValueError(f"cifar: {str(archive)!r} {problem}: it is another kind of file. {WANTED}")
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name)
                # A sparse member can have more bytes than the archive.
                if name.name in _CLASSES and member.isfile() and not member.issparse():
                    _check_size(name, member.size)
                    file = tar.extractfile(member)
                    content[name] = file.read() if file else b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        problem = f"cannot be read to its end as a .tar.gz ({error}): it is truncated, or another kind of file"
        raise ValueError(f"cifar: {str(archive)!r} ({archive.stat().st_size:,} bytes) {problem}. {WANTED}") from error
    return content


def _check_size(file: Path, size: int) -> None:
    most = _LARGEST[_CLASSES.get(file.name, 10)]  # also of an image
    if size > most:
        raise ValueError(f"cifar: {file} has {size:,} bytes, but should have at most {most:,}.")


@contextlib.contextmanager
def _naming(file: Path, raw: bytes, form: str) -> Iterator[None]:
    """Name the file in an error."""
    try:
        yield
    except ImportError as error:
        raise ModuleNotFoundError("cifar: images are decoded by Pillow: pip install pillow.") from error
    except Exception as error:  # a broken file may raise anything
        problem = f"cannot be {form} ({error}): it is truncated, or another kind of file"
        raise ValueError(f"cifar: {file} ({len(raw):,} bytes) {problem}.") from error


def _read_image(file: Path, raw: bytes) -> Array:
    with _naming(file, raw, "decoded as an image"):
        from PIL import Image

        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
            if image.size != (SIDE, SIDE):  # checked before anything is decoded
                raise ValueError(f"it has {image.width} x {image.height} pixels, but should have {SIDE} x {SIDE}")
            return numpy.asarray(image.convert("RGB"))


def _read_file(file: Path, raw: bytes, classes: int, complete: int) -> Part:
    """Return pixels and labels of an official file, which should have ``complete`` images."""
    is_binary = file.suffix == ".bin"
    form = "records of labels and pixels" if is_binary else "a pickle of arrays, lists and text"
    with _naming(file, raw, f"read as {form}"):
        pixels, labels = (_from_records if is_binary else _from_pickle)(raw, classes, complete)
        wrong = labels[(labels < 0) | (labels >= classes)]
        if len(wrong):
            raise ValueError(f"an image has label {wrong[0]}, but labels should be 0 to {classes - 1}")
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


def _from_pickle(raw: bytes, classes: int, complete: int) -> tuple[Array, Array]:
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


def download_cifar(folder: str | Path, classes: int = 10, address: str | None = None) -> None:
    """Download the official archive into a folder, unless it has data, or is a file."""
    folder = Path(folder)
    name, digest = ARCHIVES[classes]

    def checked(content: bytes) -> dict[str, bytes]:
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != digest:
            raise ValueError(f"its {len(content):,} bytes have the md5 digest {found}, but should have {digest}")
        return {name: content}

    if not (folder.is_file() or (folder / name).is_file() or (folder.is_dir() and _find(folder, classes))):
        download(address or ADDRESS + name, folder, checked, "cifar", WANTED)
