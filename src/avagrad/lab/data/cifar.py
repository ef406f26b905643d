"""Reading CIFAR-10 and CIFAR-100: the official archives, packed or unpacked, or folders of images.

What has been read is kept as arrays beside the data, where these may be written to, so the next time takes a moment.
"""

import contextlib
import glob
import gzip
import hashlib
import http.client
import os
import secrets
import tarfile
import urllib.request
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy

from avagrad.lab.data.cifar_files import SIDE, Part, read_file
from avagrad.lab.data.cifar_folders import read_folders

__all__ = ["SIDE", "Images", "download_cifar", "read_images", "wanted"]

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ADDRESS = "https://www.cs.toronto.edu/~kriz/"
# What --download fetches, with the digest that the page gives.
ARCHIVES = {
    10: ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    100: ("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}
COMPLETE = {"train": 50_000, "test": 10_000}  # images

# The python form's files; those of the binary form end in .bin.
_FILES = {
    10: {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    100: {"train": ["train"], "test": ["test"]},
}
_NAMES = {n: [name + end for part in _FILES[n].values() for name in part for end in ("", ".bin")] for n in _FILES}
_LARGEST = {10: 32_000_000, 100: 160_000_000}  # bytes of a file, a little more than the official ones have
_UNPACKED = 200_000_000  # bytes of an archive's content, likewise
_SUFFIXES = (".png", ".jpg", ".jpeg")
_KEEPING = 2  # counted up when what is kept changes


class Images(NamedTuple):
    """The two parts: pixels, (images, height, width, 3), and labels.

    >>> none = numpy.zeros((0, 32, 32, 3), numpy.uint8), numpy.zeros(0, numpy.int64)
    >>> Images(none, none, ("cat", "dog"), ()).names
    ('cat', 'dog')
    """

    train: Part
    test: Part
    names: tuple[str, ...]  # of the classes, where folders name them
    remarks: tuple[str, ...]  # what a reader of the results should know about the data


def wanted(classes: int) -> str:
    """Say which files are wanted, and where people get them.

    >>> wanted(100)
    'Wanted is cifar-100-python.tar.gz or cifar-100-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, ...'
    """
    return (
        f"Wanted is cifar-{classes}-python.tar.gz or cifar-{classes}-binary.tar.gz from {PAGE}, packed or unpacked, "
        f"or a folder with train/CLASS/*.png and test/CLASS/*.png (or .jpg); "
        f"--download fetches {ARCHIVES[classes][0]} into the folder that data names."
    )


def read_images(path: str | Path, classes: int = 10) -> Images:
    """Read CIFAR-10 or CIFAR-100 from an official archive or a folder, in whichever form it is there.

    Any number of images will do, and is remarked on. Classes are numbered as the official files number them, and
    those of folders in the order of their names, which is the same.

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
        raise FileNotFoundError(f"cifar: data is {str(path)!r}, which does not exist. {wanted(classes)}")
    files = _listed(path, classes) if path.is_dir() else [""]
    for form in () if files else ("python", "binary"):
        if (packed := path / f"cifar-{classes}-{form}.tar.gz").is_file():
            return read_images(packed, classes)
    name = f"cifar-{classes}.avagrad.npz"
    place = path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")
    facts = [(file, (path / file).stat()) for file in files]
    about = [_KEEPING, path.resolve(), *((file, fact.st_size, fact.st_mtime_ns) for file, fact in facts)]
    key = hashlib.sha256("\n".join(map(str, about)).encode()).hexdigest()
    if (images := _kept(place, key)) is None:
        images = _read(path, classes, files)
        _keep(place, key, images)
    return images


def _listed(folder: Path, classes: int) -> list[str]:
    """Return the official files, or else the images, in the folder or in one inside it, as paths from the folder."""
    places = ["", *sorted(f"{child.name}/" for child in folder.iterdir() if child.is_dir())]
    files = [place + name for place in places for name in _NAMES[classes]]
    if found := [file for file in files if os.path.isfile(folder / file)]:
        return found
    for place in places:
        files = [file for part in COMPLETE for file in glob.glob(f"{part}/*/*", root_dir=folder / place)]
        if images := [place + file.replace(os.sep, "/") for file in files if file.lower().endswith(_SUFFIXES)]:
            return sorted(images, key=lambda file: file.split("/"))
    return []


def _unpacked(path: Path, classes: int) -> dict[str, bytes]:
    """Return the official files of an archive; those of the other CIFAR are empty."""
    content, size = {}, 0
    try:
        with gzip.open(path) as whole:  # its size and checksum, before tar believes what its members claim
            while piece := whole.read(1 << 20):
                if (size := size + len(piece)) > _UNPACKED:
                    raise ValueError(
                        f"cifar: {str(path)!r} unpacks to more than {_UNPACKED:,} bytes, but an official archive has "
                        f"fewer: it is something else. {wanted(classes)}"
                    )
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
                base = name.rpartition("/")[2]
                if not member.isfile() or member.issparse():  # one that is sparse can have more bytes than the archive
                    continue
                if base in _NAMES[classes]:
                    _check_size(name, member.size, classes)
                    file = tar.extractfile(member)
                    assert file is not None
                    content[name] = file.read()
                elif base in _NAMES[110 - classes]:
                    content[name] = b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise ValueError(
            f"cifar: {str(path)!r} ({path.stat().st_size:,} bytes) cannot be read to its end as a .tar.gz ({error}): "
            f"it has been cut off, or is something else. {wanted(classes)}"
        ) from error
    return content


def _check_size(name: str, size: int, classes: int) -> None:
    if size > _LARGEST[classes]:
        raise ValueError(f"cifar: {name} has {size:,} bytes, but should have at most {_LARGEST[classes]:,}.")


def _official(path: Path, classes: int, there: Collection[str]) -> dict[str, list[str]]:
    """Return the official files of both parts, in the form and the place of the first that is there."""
    first = next((file for file in there if file.rpartition("/")[2] in _NAMES[classes]), None)
    if first is None and (there or (path.is_dir() and _listed(path, 110 - classes))):
        other = 110 - classes
        raise ValueError(f"cifar: {str(path)!r} holds CIFAR-{other}, but classes is {classes}: set classes={other}.")
    if first is None:
        raise FileNotFoundError(f"cifar: {str(path)!r} holds no files of CIFAR-{classes}. {wanted(classes)}")
    place, slash, base = first.rpartition("/")
    suffix = ".bin" if base.endswith(".bin") else ""
    parts = {part: [place + slash + name + suffix for name in names] for part, names in _FILES[classes].items()}
    if missing := [file.rpartition("/")[2] for files in parts.values() for file in files if file not in there]:
        inside = f" beside the other files in {place!r}" if place else ""
        raise FileNotFoundError(f"cifar: {str(path)!r} lacks {', '.join(missing)}{inside}. {wanted(classes)}")
    return parts


def _read(path: Path, classes: int, files: list[str]) -> Images:
    if files and files[0].lower().endswith(_SUFFIXES):
        return _read_folders(path, classes, files)
    packed = None if path.is_dir() else _unpacked(path, classes)
    parts, remarks = {}, []
    for part, names in _official(path, classes, files if packed is None else packed).items():
        pieces, complete = [], COMPLETE[part] // len(names)
        for name in names:
            if packed is None:
                _check_size(name, (path / name).stat().st_size, classes)
            raw = (path / name).read_bytes() if packed is None else packed[name]
            pieces.append(read_file(name, raw, classes, complete))
            remarks += _remark(name, len(pieces[-1][1]), complete)
        pixels, labels = zip(*pieces, strict=True)
        parts[part] = numpy.concatenate(pixels), numpy.concatenate(labels)
    return Images(parts["train"], parts["test"], (), tuple(remarks))


def _read_folders(path: Path, classes: int, files: list[str]) -> Images:
    parts, names = read_folders(path, files, classes)
    remarks = [says for part in parts for says in _remark(f"{part}/", len(parts[part][1]), COMPLETE[part])]
    if any(not file.lower().endswith(".png") for file in files):
        remarks.append(
            "The images were compressed as JPEG, which changes them: errors on them can be compared with each other, "
            "and only roughly with those on the official files."
        )
    return Images(parts["train"], parts["test"], names, tuple(remarks))


def _remark(name: str, count: int, complete: int) -> list[str]:
    says = f"{name} has {count:,} images where the complete one has {complete:,}: it is another version, or cut off."
    return [] if count == complete else [says]


def _kept(place: Path, key: str) -> Images | None:
    try:
        with place.open("rb") as file, numpy.load(file, allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            train, test = ((kept[f"{part}_pixels"], kept[f"{part}_labels"]) for part in COMPLETE)
            return Images(train, test, tuple(map(str, kept["names"])), tuple(map(str, kept["remarks"])))
    except Exception:  # not there, or broken in whichever way: it is made again
        return None


def _keep(place: Path, key: str, images: Images) -> None:
    arrays = {name: numpy.array(getattr(images, name), str) for name in ("names", "remarks")}
    for part, (pixels, labels) in (("train", images.train), ("test", images.test)):
        arrays |= {f"{part}_pixels": pixels, f"{part}_labels": labels}
    scratch = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    # Where nothing may be written, or there is no space, the data are read anew the next time.
    with contextlib.suppress(OSError):
        try:
            with scratch.open("xb") as file:
                numpy.savez(file, allow_pickle=False, key=numpy.array(key), **arrays)
            scratch.replace(place)  # at once: other runs may be reading, or keeping the same
        finally:
            scratch.unlink(missing_ok=True)


def download_cifar(folder: str | Path, classes: int = 10, address: str | None = None) -> None:
    """Fetch the official archive into a folder, unless there are data in it, or it is a file.

    >>> download_cifar("/tmp/x", 10, "ftp-of-old://nowhere")
    Traceback (most recent call last):
    ...
    OSError: cifar: 'ftp-of-old://nowhere' could not be fetched (...); the file can be put into '/tmp/x' by hand...
    """
    folder = Path(folder)
    name, digest = ARCHIVES[classes]
    if folder.is_file() or (folder / name).is_file() or (folder.is_dir() and _listed(folder, classes)):
        return
    address = address or ADDRESS + name
    scratch = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        total, size = hashlib.md5(usedforsecurity=False), 0
        with urllib.request.urlopen(address, timeout=60) as response:
            folder.mkdir(parents=True, exist_ok=True)
            with scratch.open("xb") as file:
                while piece := response.read(1 << 20):
                    total.update(piece)
                    file.write(piece)
                    size += len(piece)
        if total.hexdigest() != digest:
            raise ValueError(f"its {size:,} bytes have the md5 digest {total.hexdigest()}, but should have {digest}")
        scratch.replace(folder / name)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise OSError(
            f"cifar: {address!r} could not be fetched ({error}); the file can be put into {str(folder)!r} by hand. "
            f"{wanted(classes)}"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
