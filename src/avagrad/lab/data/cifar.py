"""Reading CIFAR-10 and CIFAR-100: the official archives, packed or unpacked, or folders of images.

The arrays are cached next to the data, if that place is writable, so that the next read is fast.
"""

import contextlib
import glob
import gzip
import hashlib
import tarfile
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import numpy

from avagrad.files import write_atomic
from avagrad.lab.data.cifar_files import SIDE, SUFFIXES, Part, read_file

__all__ = ["SIDE", "WANTED", "Images", "download_cifar", "read_images"]

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

_FILES = {  # of the python format; those of the binary format end in .bin
    10: {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    100: {"train": ["train"], "test": ["test"]},
}
_NAMES = {n: [name + end for names in _FILES[n].values() for name in names for end in ("", ".bin")] for n in _FILES}
# Maximum bytes of files and of an archive's content: a little more than the official ones.
_LARGEST = dict.fromkeys(_NAMES[10], 32_000_000) | dict.fromkeys(_NAMES[100], 160_000_000)
_UNPACKED = 200_000_000
_CACHE_VERSION = 3  # increment when the format of the cache changes


class Images(NamedTuple):
    """The two parts: pixels, (images, height, width, 3), and labels.

    >>> none = numpy.zeros((0, 32, 32, 3), numpy.uint8), numpy.zeros(0, numpy.int64)
    >>> Images(none, none, ("cat", "dog"), ()).names
    ('cat', 'dog')
    """

    train: Part
    test: Part
    names: tuple[str, ...]  # of the classes, if folders name them
    remarks: tuple[str, ...]  # on the data, for readers of the results


def read_images(path: str | Path, classes: int = 10) -> Images:
    """Read CIFAR-10 or CIFAR-100 from an official archive or a folder, in any of the formats.

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
    files = _find(path, classes) if path.is_dir() else [Path()]
    archives = [path / f"cifar-{classes}-{form}.tar.gz" for form in ("python", "binary")]
    packed = [archive for archive in archives if archive.is_file()]
    if packed and not files:
        return read_images(packed[0], classes)
    about: list[object] = [_CACHE_VERSION, path.resolve()]
    for file in files:
        facts = (path / file).stat()
        about += [file, facts.st_size, facts.st_mtime_ns]
    key = hashlib.sha256(repr(about).encode()).hexdigest()
    name = f"cifar-{classes}.avagrad.npz"
    place = path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")
    images = _read_cache(place, key)
    if images is None:
        images = _read(path, classes, files)
        _write_cache(place, key, images)
    return images


def _find(folder: Path, classes: int) -> list[Path]:
    """Return the official files in the folder or a subfolder, or else the images, as paths relative to the folder."""
    names = [name for pattern in ("*", "*/*") for name in sorted(glob.glob(pattern, root_dir=folder))]
    official = [file for file in map(Path, names) if file.name in _NAMES[classes] and (folder / file).is_file()]
    if official:
        return official
    names = [name for part in COMPLETE for name in glob.glob(f"{part}/*/*", root_dir=folder)]
    return sorted(Path(name) for name in names if name.lower().endswith(SUFFIXES))


def _read(path: Path, classes: int, files: list[Path]) -> Images:
    """Read an archive, or the files of a folder, and collect remarks on them."""
    unpacked = _unpack(path) if path.is_file() else {}
    names = sorted({file.parent.name for file in files if file.name.lower().endswith(SUFFIXES)})
    if names:
        parts = _image_parts(path, files, classes)
    else:
        available = list(unpacked) if path.is_file() else files or _find(path, 110 - classes)
        parts = _official_parts(path, available, classes)
    found, remarks = {}, []
    for part, chosen in parts.items():
        complete = COMPLETE[part] if names else COMPLETE[part] // len(chosen)
        pieces = []
        for file in chosen:
            raw = unpacked[file] if unpacked else _load(path, file)
            pieces.append(read_file(str(file), raw, classes, complete))
        counts = {str(file): len(labels) for file, (_, labels) in zip(chosen, pieces, strict=True)}
        pixels, labels = (numpy.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if names:
            counts = {f"{part}/": len(chosen)}
            labels = numpy.array([names.index(file.parent.name) for file in chosen], numpy.int64)
        for name, count in counts.items():
            if count != complete:
                message = f"{name} has {count:,} images, but the complete one has {complete:,}"
                remarks.append(f"{message}: it is another version, or truncated.")
        found[part] = pixels, labels
    if names and any(file.suffix.lower() != ".png" for file in files):
        remarks.append(
            "The images were compressed as JPEG, which changes them: errors on them can be compared with each other, "
            "and only roughly with those on the official files."
        )
    return Images(found["train"], found["test"], tuple(names), tuple(remarks))


def _official_parts(path: Path, files: list[Path], classes: int) -> dict[str, list[Path]]:
    """Return the official files of both parts, in the format and the folder of the first one found."""
    if not files:
        raise FileNotFoundError(f"cifar: {str(path)!r} has no files of CIFAR-{classes}. {WANTED}")
    first = next((file for file in files if file.name in _NAMES[classes]), None)
    if first is None:
        other = 110 - classes
        raise ValueError(f"cifar: {str(path)!r} is CIFAR-{other}, but classes is {classes}: set classes={other}.")
    parts = {part: [first.with_name(name + first.suffix) for name in names] for part, names in _FILES[classes].items()}
    if missing := [file.name for part in parts.values() for file in part if file not in files]:
        lacks = f"lacks {', '.join(missing)} next to the other files in {str(first.parent)!r}"
        raise FileNotFoundError(f"cifar: {str(path)!r} {lacks}. {WANTED}")
    return parts


def _image_parts(path: Path, files: list[Path], classes: int) -> dict[str, list[Path]]:
    """Return the images of both parts, which must have the same folders."""
    parts = {part: [file for file in files if file.parts[0] == part] for part in COMPLETE}
    train, test = ({file.parent.name for file in images} for images in parts.values())
    if not train or not test:
        raise FileNotFoundError(f"cifar: {str(path)!r} lacks images in {'test' if train else 'train'}/CLASS. {WANTED}")
    if len(train) != classes:
        has = f"has {len(train)} folders with images ({', '.join(sorted(train)[:12])})"
        raise ValueError(f"cifar: train in {str(path)!r} {has}, but should have one for each of {classes} classes.")
    if train != test:
        only = f"only one of them has images in {', '.join(sorted(train ^ test)[:12])}"
        raise ValueError(f"cifar: train and test in {str(path)!r} should have the same folders, but {only}.")
    return parts


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
                if name.name in _LARGEST and member.isfile() and not member.issparse():
                    _check_size(name, member.size)
                    file = tar.extractfile(member)
                    content[name] = file.read() if file else b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        problem = f"cannot be read to its end as a .tar.gz ({error}): it is truncated, or another kind of file"
        raise ValueError(f"cifar: {str(archive)!r} ({archive.stat().st_size:,} bytes) {problem}. {WANTED}") from error
    return content


def _check_size(file: Path, size: int) -> None:
    most = _LARGEST.get(file.name, 32_000_000)  # also of an image
    if size > most:
        raise ValueError(f"cifar: {file} has {size:,} bytes, but should have at most {most:,}.")


def _read_cache(place: Path, key: str) -> Images | None:
    try:
        with place.open("rb") as file, numpy.load(file, allow_pickle=False) as kept:
            if str(kept["arr_0"]) != key:
                return None
            _, names, remarks, *arrays = (kept[name] for name in kept)
            pixels, labels, test_pixels, test_labels = arrays
            return Images((pixels, labels), (test_pixels, test_labels), tuple(names.tolist()), tuple(remarks.tolist()))
    except Exception:  # missing or broken: it is made again
        return None


def _write_cache(place: Path, key: str, images: Images) -> None:
    texts = [numpy.array(text, str) for text in (key, images.names, images.remarks)]
    with contextlib.suppress(OSError):  # if nothing can be written, the data are read again next time
        write_atomic(place, lambda file: numpy.savez(file, *texts, *images.train, *images.test), shared=True)


def download_cifar(folder: str | Path, classes: int = 10, address: str | None = None) -> None:
    """Download the official archive into a folder, unless it has data, or is a file.

    >>> download_cifar("/tmp/x", 10, "ftp-of-old://nowhere")
    Traceback (most recent call last):
    ...
    OSError: cifar: 'ftp-of-old://nowhere' could not be downloaded (...); put the file into '/tmp/x' manually...
    """
    folder = Path(folder)
    name, digest = ARCHIVES[classes]
    if folder.is_file() or (folder / name).is_file() or (folder.is_dir() and _find(folder, classes)):
        return
    address = address or ADDRESS + name
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            content = response.read(_UNPACKED)
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != digest:
            raise ValueError(f"its {len(content):,} bytes have the md5 digest {found}, but should have {digest}")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, lambda file: file.write(content), shared=True)
    except (OSError, ValueError, HTTPException) as error:
        manually = f"put the file into {str(folder)!r} manually"
        raise OSError(f"cifar: {address!r} could not be downloaded ({error}); {manually}. {WANTED}") from error
