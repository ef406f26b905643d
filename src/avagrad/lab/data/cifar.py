"""Reading CIFAR-10 and CIFAR-100: the official files in both forms, or a file for each image, packed or unpacked.

What has been read is kept as arrays beside the data, where these may be written to, so the next time takes a moment.
"""

import contextlib
import hashlib
import http.client
import io
import lzma
import os
import pickle
import secrets
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy.typing

__all__ = ["Images", "download_cifar", "read_images", "wanted"]

SIDE = 32
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ADDRESS = "https://www.cs.toronto.edu/~kriz/"
# What --download fetches, with the digest that the page gives.
ARCHIVES = {
    10: ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    100: ("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}
COMPLETE = {"train": 50_000, "test": 10_000}  # images

_PIXELS = 3 * SIDE * SIDE  # bytes of an image
_SUFFIXES = (".png", ".jpg", ".jpeg")
_CHUNK = 256  # images that a thread decodes at a time
_KEEPING = 1  # counted up when what is kept changes

Pixels = numpy.typing.NDArray[numpy.uint8]
Labels = numpy.typing.NDArray[numpy.int64]
Part = tuple[Pixels, Labels]


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
        f"or train/CLASS/*.png and test/CLASS/*.png (or .jpg), in a folder or in a .tar, .tar.gz or .tar.xz; "
        f"--download fetches {ARCHIVES[classes][0]} into the folder that data names."
    )


def read_images(path: str | Path, classes: int = 10) -> Images:
    """Read CIFAR-10 or CIFAR-100 from an archive or a folder, in whichever form it is there.

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
    if path.is_dir():
        listed = _listed(path)
        if not _looks_like_something(listed, classes):
            for form in ("python", "binary"):
                if (packed := path / f"cifar-{classes}-{form}.tar.gz").is_file():
                    return read_images(packed, classes)
        found = _find(str(path), listed, classes)
        key = _key(path, [listed[name] for name in (*found.train, *found.test)])
        return _kept(path, classes, key) or _keep(path, classes, key, _read(found, lambda n: listed[n].read_bytes()))
    if not path.exists():
        raise FileNotFoundError(f"cifar: data is {str(path)!r}, which does not exist. {wanted(classes)}")
    key = _key(path, [path])
    if (images := _kept(path, classes, key)) is None:
        content = dict(_unpacked(path, classes))
        found = _find(str(path), content, classes)
        images = _keep(path, classes, key, _read(found, content.__getitem__))
    return images


# --- finding: which of the files are the data ---


class _Found(NamedTuple):
    where: str
    classes: int
    train: list[str]
    test: list[str]
    form: "_Form | None"  # None: a file for each image
    names: tuple[str, ...] = ()


class _Form(NamedTuple):
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[str, bytes, int, int], Part]


def _listed(folder: Path) -> dict[str, Path]:
    """Return the files that may be the data: in the folder, or in one inside it, no deeper."""
    listed = {}
    for root in [folder, *sorted(child for child in folder.iterdir() if child.is_dir())]:
        places = [root]
        for part in ("train", "test"):
            if (root / part).is_dir():
                places += sorted(child for child in (root / part).iterdir() if child.is_dir())
        for place in places:
            try:
                with os.scandir(place) as entries:
                    files = sorted(entry.name for entry in entries if entry.is_file())
            except PermissionError:
                continue
            prefix = "".join(f"{name}/" for name in place.relative_to(folder).parts)
            listed.update({prefix + name: place / name for name in files})
    return listed


def _unpacked(path: Path, classes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive that may be the data, reading it once from end to end."""
    official = {name for form in _FORMS[classes] for name in (*form.train, *form.test)}
    other = {name for form in _FORMS[110 - classes] for name in (*form.train, *form.test)}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
                base = name.rpartition("/")[2]
                if base in official or _is_image(base):
                    file = tar.extractfile(member)
                    assert file is not None
                    yield name, file.read()
                elif base in other:
                    yield name, b""  # to be able to say that these are there
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(
            f"cifar: {str(path)!r} ({path.stat().st_size:,} bytes) cannot be read to its end as an archive ({error}): "
            f"it has been cut off, or is something else. {wanted(classes)}"
        ) from error


def _is_image(base: str) -> bool:
    return base.lower().endswith(_SUFFIXES) and not base.startswith(".")  # "._x.png" is a Mac's note about x.png


def _in_folders(names: Iterable[str]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the image files by the place where train and test are, by these, and by class."""
    roots: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name in sorted(names):
        *root, part, label, base = ["", "", *name.split("/")]
        if part in ("train", "test") and _is_image(base):
            roots.setdefault("/".join(root), {}).setdefault(part, {}).setdefault(label, []).append(name)
    return roots


def _lacking(names: Iterable[str], form: _Form) -> tuple[str, list[str]] | None:
    """Return where most of a form's files are, and those that are missing there; None if there are none at all."""
    files = (*form.train, *form.test)
    places: dict[str, set[str]] = {}
    for name in names:
        place, _, base = name.rpartition("/")
        if base in files:
            places.setdefault(place, set()).add(base)
    if not places:
        return None
    best = min(places, key=lambda place: (-len(places[place]), place.count("/"), place))
    return best, [name for name in files if name not in places[best]]


def _looks_like_something(names: Iterable[str], classes: int) -> bool:
    return any(_lacking(names, form) for form in _FORMS[classes]) or bool(_in_folders(names))


def _find(where: str, names: Iterable[str], classes: int) -> _Found:
    """Choose the data among the files: the official ones first."""
    lacking = {form: found for form in _FORMS[classes] if (found := _lacking(names, form))}
    for form, (place, missing) in lacking.items():
        if not missing:
            at = f"{place}/" if place else ""
            return _Found(where, classes, [at + name for name in form.train], [at + name for name in form.test], form)
    if roots := _in_folders(names):
        return _find_in_folders(where, roots, classes)
    if lacking:
        place, missing = min(lacking.values(), key=lambda found: len(found[1]))
        inside = f" beside the other files in {place!r}" if place else ""
        raise FileNotFoundError(f"cifar: {where!r} lacks {', '.join(missing)}{inside}. {wanted(classes)}")
    other = 110 - classes
    if any(_lacking(names, form) for form in _FORMS[other]):
        raise ValueError(f"cifar: {where!r} holds CIFAR-{other}, but classes is {classes}: set classes={other}.")
    raise FileNotFoundError(f"cifar: {where!r} holds no files of CIFAR-{classes}. {wanted(classes)}")


def _find_in_folders(where: str, roots: dict[str, dict[str, dict[str, list[str]]]], classes: int) -> _Found:
    root = min(roots, key=lambda root: (-len(roots[root]), root.count("/"), root))
    parts = roots[root]
    for part in ("train", "test"):
        if part not in parts:
            raise FileNotFoundError(f"cifar: {where!r} lacks images in {part}/CLASS. {wanted(classes)}")
    if len(parts["train"]) != classes:
        raise ValueError(
            f"cifar: train in {where!r} has {len(parts['train'])} folders with images "
            f"({_some(sorted(parts['train']))}), but should have one for each of {classes} classes (option classes)."
        )
    if differing := sorted(parts["train"].keys() ^ parts["test"].keys()):
        raise ValueError(
            f"cifar: train and test in {where!r} should have the same folders, but only one of them has images in "
            f"{_some(differing)}."
        )
    labels = tuple(sorted(parts["train"]))
    train, test = ([name for label in labels for name in parts[part][label]] for part in ("train", "test"))
    return _Found(where, classes, train, test, None, labels)


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


# --- reading ---


def _read(found: _Found, content: Callable[[str], bytes]) -> Images:
    parts, remarks = {}, []
    for part, files in (("train", found.train), ("test", found.test)):
        if found.form is None:
            parts[part] = _decode(found, files, content)
            counts = {f"{part}/": (len(files), COMPLETE[part])}
        else:
            complete = COMPLETE[part] // len(files)
            pieces = {name: found.form.read(name, content(name), found.classes, complete) for name in files}
            pixels, labels = zip(*pieces.values(), strict=True)
            parts[part] = numpy.concatenate(pixels), numpy.concatenate(labels)
            counts = {name: (len(labels), complete) for name, (_, labels) in pieces.items()}
        remarks += [
            f"{name} has {has:,} images where the complete one has {should:,}: it is another version, or cut off."
            for name, (has, should) in counts.items()
            if has != should
        ]
    if any(name.lower().endswith((".jpg", ".jpeg")) for name in found.train):
        remarks.append(
            "The images were compressed as JPEG, which changes them: errors on them can be compared with each other, "
            "and only roughly with those on the official files."
        )
    return Images(parts["train"], parts["test"], found.names, tuple(remarks))


def _from_records(name: str, raw: bytes, classes: int, complete: int) -> Part:
    """Read the binary form: a byte for the label (CIFAR-100: the coarse one, then the fine one), then the pixels."""
    size = (1 if classes == 10 else 2) + _PIXELS
    if not raw or len(raw) % size:
        raise ValueError(
            f"cifar: {name} has {len(raw):,} bytes, but should have {complete * size:,} ({complete:,} records of "
            f"{size:,}): it has been cut off, or is something else."
        )
    records = numpy.frombuffer(raw, numpy.uint8).reshape(-1, size)
    return _part(name, records[:, -_PIXELS:], records[:, -_PIXELS - 1], classes)


def _from_pickle(name: str, raw: bytes, classes: int, complete: int) -> Part:
    """Read the Python form: a dictionary with the pixels, (images, 3072), and the labels."""
    content = _unpickle(name, raw)
    should = f"should be a dictionary with data, {complete:,} x {_PIXELS:,} bytes, and as many "
    key = "labels" if classes == 10 else "fine_labels"
    if not isinstance(content, dict):
        raise ValueError(f"cifar: {name} holds {_kind(content)}, but {should}{key}.")
    pixels, labels = (_array(content.get(name.encode(), content.get(name))) for name in ("data", key))
    if pixels is None or pixels.dtype != numpy.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise ValueError(f"cifar: {name} holds as data {_kind(pixels)}, but {should}{key}.")
    if labels is None or labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1] or not len(labels):
        raise ValueError(f"cifar: {name} holds as {key} {_kind(labels)}, but {should}{key}.")
    return _part(name, pixels, labels, classes)


def _part(name: str, pixels: Any, labels: Any, classes: int) -> Part:
    if labels.min() < 0 or labels.max() >= classes:
        wrong = int(labels[(labels < 0) | (labels >= classes)][0])
        raise ValueError(f"cifar: {name} has an image with label {wrong}, but labels should be 0 to {classes - 1}.")
    planes = pixels.reshape(-1, 3, SIDE, SIDE)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels.astype(numpy.int64)


def _kind(thing: object) -> str:
    if isinstance(thing, numpy.ndarray):
        return f"{' x '.join(f'{n:,}' for n in thing.shape)} numbers of type {thing.dtype}"
    return "nothing" if thing is None else f"an object of type {type(thing).__name__}"


_TEN = tuple(f"data_batch_{i}" for i in range(1, 6))
_FORMS = {
    10: (
        _Form(_TEN, ("test_batch",), _from_pickle),
        _Form(tuple(f"{name}.bin" for name in _TEN), ("test_batch.bin",), _from_records),
    ),
    100: (_Form(("train",), ("test",), _from_pickle), _Form(("train.bin",), ("test.bin",), _from_records)),
}


# --- pickles that may come from anybody ---
# Nothing that a pickle names is looked up or called: arrays are put together from these stand-ins afterwards. All are
# classes with a __setstate__ of their own, so that a pickle cannot change them either.


class _Kind:
    """Stands in for numpy.dtype."""

    def __init__(self, code: object = "", *_: object) -> None:
        self.code, self.little = code, True

    def __setstate__(self, state: Any) -> None:
        self.little = state[1] not in (">", b">")


class _Array:
    """Stands in for numpy.ndarray, and for the function that makes an empty one."""

    def __init__(self, *_: object) -> None:
        self.shape, self.kind, self.columns, self.raw = (0,), _Kind("u1"), False, b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.kind, self.columns, self.raw = state


class _Buffer(_Array):
    """Stands in for the function that makes an array of bytes, in the newest protocol."""

    def __init__(self, raw: Any, kind: Any, shape: Any, order: Any) -> None:
        self.shape, self.kind, self.columns, self.raw = shape, kind, order == "F", raw


class _Bytes(bytes):
    """Stands in for codecs.encode, by which old protocols write bytes."""

    def __new__(cls, text: str, encoding: str = "latin1") -> "_Bytes":
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: Any) -> None:
        pass


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _Bytes,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which is neither an array nor a list nor text"
            ) from None


def _unpickle(name: str, raw: bytes) -> object:
    try:
        return _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a broken pickle may raise anything
        raise ValueError(
            f"cifar: {name} ({len(raw):,} bytes) cannot be read as a pickle of arrays, lists and text ({error}): "
            "it has been cut off, or is something else."
        ) from error


def _array(thing: object) -> numpy.typing.NDArray[Any] | None:
    """Put an array together; None if that cannot be done."""
    try:
        if isinstance(thing, _Array):
            code = thing.kind.code.decode() if isinstance(thing.kind.code, bytes) else thing.kind.code
            if code not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"):
                return None
            dtype = numpy.dtype(str(code)).newbyteorder("<" if thing.kind.little else ">")
            return numpy.frombuffer(thing.raw, dtype).reshape(thing.shape, order="F" if thing.columns else "C")
        if isinstance(thing, list) and all(type(number) is int for number in thing):
            return numpy.array(thing, numpy.int64)
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    return None


# --- image files ---


def _decode(found: _Found, files: list[str], content: Callable[[str], bytes]) -> Part:
    """Decode image files on all cores."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ModuleNotFoundError(
            "cifar: image files are decoded by Pillow, which is not installed: pip install pillow."
        ) from error
    pixels = numpy.empty((len(files), SIDE, SIDE, 3), numpy.uint8)

    def decode_some(start: int) -> None:
        for i, name in enumerate(files[start : start + _CHUNK], start):
            raw = content(name)
            try:
                with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
                    size = image.size  # known before anything is decoded
                    if size == (SIDE, SIDE):
                        pixels[i] = numpy.asarray(image if image.mode == "RGB" else image.convert("RGB"))
            except Exception as error:  # a broken image may raise anything
                raise ValueError(
                    f"cifar: {name} in {found.where!r} ({len(raw):,} bytes) should be a PNG or JPEG image, "
                    f"but cannot be decoded ({error})."
                ) from error
            if size != (SIDE, SIDE):
                raise ValueError(
                    f"cifar: {name} in {found.where!r} has {size[0]} x {size[1]} pixels, but should have "
                    f"{SIDE} x {SIDE}."
                )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(decode_some, range(0, len(files), _CHUNK)):
            pass
    number = {label: i for i, label in enumerate(found.names)}
    return pixels, numpy.array([number[name.split("/")[-2]] for name in files], numpy.int64)


# --- keeping what has been read ---


def _key(path: Path, files: list[Path]) -> str:
    """Return what changes when the data do, or are other data."""
    total = hashlib.sha256(f"{_KEEPING} {path.resolve()}".encode())
    for file in files:
        facts = file.stat()
        total.update(f"\n{file.relative_to(path)} {facts.st_size} {facts.st_mtime_ns}".encode())
    return total.hexdigest()


def _place(path: Path, classes: int) -> Path:
    """Return where arrays are kept: beside the data."""
    name = f"cifar-{classes}.avagrad.npz"
    return path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")


def _kept(path: Path, classes: int, key: str) -> Images | None:
    try:
        with _place(path, classes).open("rb") as file, numpy.load(file, allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            parts = [(kept[f"{part}_pixels"], kept[f"{part}_labels"]) for part in ("train", "test")]
            names, remarks = (tuple(map(str, kept[name])) for name in ("names", "remarks"))
    except Exception:  # not there, or broken in whichever way: it is made again
        return None
    return Images(parts[0], parts[1], names, remarks)


def _keep(path: Path, classes: int, key: str, images: Images) -> Images:
    arrays: dict[str, Any] = {"key": numpy.array(key), "names": numpy.array(images.names, str)}
    arrays["remarks"] = numpy.array(images.remarks, str)
    for part, (pixels, labels) in (("train", images.train), ("test", images.test)):
        arrays |= {f"{part}_pixels": pixels, f"{part}_labels": labels}
    place = _place(path, classes)
    scratch = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    # Where nothing may be written, or there is no space, the data are read anew the next time.
    with contextlib.suppress(OSError):
        try:
            with scratch.open("xb") as file:
                numpy.savez(file, **arrays)
            scratch.replace(place)  # at once: other runs may be reading, or keeping the same
        finally:
            scratch.unlink(missing_ok=True)
    return images


# --- fetching ---


def download_cifar(folder: str | Path, classes: int = 10, address: str | None = None) -> None:
    """Fetch the official archive into a folder, unless there are data in it, or it is a file.

    >>> download_cifar("/tmp/x", 10, "ftp-of-old://nowhere")
    Traceback (most recent call last):
    ...
    OSError: cifar: 'ftp-of-old://nowhere' could not be fetched (...); the file can be put into '/tmp/x' by hand...
    """
    folder = Path(folder)
    name, digest = ARCHIVES[classes]
    if folder.is_file() or (folder / name).is_file():
        return
    if folder.is_dir() and _looks_like_something(_listed(folder), classes):
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
