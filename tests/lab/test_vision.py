"""CIFAR and the networks of the paper's vision experiments: every form of the data is read right, or refused."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from web import serving

from avagrad.lab.data import cifar as images
from avagrad.lab.data.cifar import Images, download_cifar, read_images
from avagrad.lab.models.resnet import ResNet
from avagrad.lab.models.wide_resnet import WideBlock, WideResNet
from avagrad.lab.tasks import cifar
from avagrad.lab.tasks.cifar import Cifar, Epoch, Moves, draw_moves

Data = dict[str, tuple[Any, Any]]


# --- the models ---


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("depth", "width", "classes"), [(28, 4, 10), (28, 10, 100), (16, 1, 10), (40, 2, 10)])
def test_a_wide_resnet_has_the_layers_of_its_definition(depth: int, width: int, classes: int) -> None:
    expected, before = 3 * 16 * 9, 16
    for after in (16 * width, 32 * width, 64 * width):
        for _ in range((depth - 4) // 6):
            expected += 2 * before + 9 * before * after + 2 * after + 9 * after * after
            expected += before * after if before != after else 0
            before = after
    with torch.device("meta"):
        model = WideResNet(depth, width, classes)
    assert count(model) == expected + 2 * before + before * classes + classes
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert sum(layer.kernel_size == (3, 3) for layer in convolutions) == depth - 3
    assert all(layer.bias is None for layer in convolutions)
    assert sum(layer.stride == (2, 2) for layer in convolutions) == 4


def test_a_wide_block_is_its_equations() -> None:
    torch.manual_seed(0)
    for before, after, stride in ((4, 4, 1), (4, 6, 1), (4, 6, 2)):
        block = WideBlock(before, after, stride).double().eval()
        x = torch.randn(2, before, 8, 8, dtype=torch.float64)
        active = (x / (1 + 1e-5) ** 0.5).relu()
        inner = F.conv2d(active, block.conv1.weight, stride=stride, padding=1) / (1 + 1e-5) ** 0.5
        expected = F.conv2d(inner.relu(), block.conv2.weight, padding=1)
        if before == after:
            assert block.shortcut is None
            expected = expected + x
        else:
            assert block.shortcut is not None
            expected = expected + F.conv2d(active, block.shortcut.weight, stride=stride)
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("model", [WideResNet(10, 2, 7), ResNet(7, (1, 2, 1, 1), width=8)])
def test_shapes_starts_and_gradients(model: nn.Module) -> None:
    torch.manual_seed(0)
    scores = model(torch.randn(4, 3, 64, 64))
    assert scores.shape == (4, 7)
    F.cross_entropy(scores, torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.any(), name
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 1000:
            fan_out = layer.out_channels * layer.weight[0, 0].numel()
            assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), name


def test_sizes_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="depth is 4, but must be 6n"):
        WideResNet(4)
    with pytest.raises(ValueError, match="width is 0, but must be at least 1"):
        WideResNet(28, 0)
    with pytest.raises(ValueError, match=r"layers is \(3, 4, 6\), but must be four numbers"):
        ResNet(layers=(3, 4, 6))


def test_resnet_50_has_torchvisions_names_and_strides() -> None:
    with torch.device("meta"):
        model = ResNet()
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["conv1.weight", *(f"bn1.{name}" for name in norm)]
    for group, blocks in enumerate((3, 4, 6, 3), 1):
        for block in range(blocks):
            for i in (1, 2, 3):
                names += [f"layer{group}.{block}.conv{i}.weight"]
                names += [f"layer{group}.{block}.bn{i}.{name}" for name in norm]
            if block == 0:
                names += [f"layer{group}.0.downsample.0.weight"]
                names += [f"layer{group}.0.downsample.1.{name}" for name in norm]
    assert list(model.state_dict()) == [*names, "fc.weight", "fc.bias"]
    first: list[Any] = [group[0] for group in (model.layer1, model.layer2, model.layer3, model.layer4)]
    assert [block.conv2.stride for block in first] == [(1, 1), (2, 2), (2, 2), (2, 2)]
    assert {(block.conv1.stride, block.conv3.stride) for block in first} == {((1, 1), (1, 1))}
    assert model(torch.zeros(1, 3, 224, 224, device="meta")).shape == (1, 1000)


def test_resnet_50_computes_what_torchvisions_does() -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    theirs, ours = torchvision.models.resnet50().double(), ResNet().double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))  # with the batch's statistics, which both take over
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


# --- data in every form ---


def make(classes: int, train: int = 20, test: int = 10) -> Data:
    """Random images, (images, 3, 32, 32), in the order of their classes."""
    random = numpy.random.default_rng(classes)
    sizes = {"train": max(train, classes), "test": max(test, classes)}
    return {
        part: (random.integers(0, 256, (n, 3, 32, 32), numpy.uint8), numpy.arange(n) * classes // n)
        for part, n in sizes.items()
    }


def files_of(data: Data, classes: int, suffix: str = "") -> dict[str, tuple[Any, Any]]:
    """The records of each official file."""
    if classes == 100:
        return {f"{part}{suffix}": data[part] for part in ("train", "test")}
    pixels, labels = data["train"]
    pieces = zip(numpy.array_split(pixels, 5), numpy.array_split(labels, 5), strict=True)
    return {f"data_batch_{i}{suffix}": piece for i, piece in enumerate(pieces, 1)} | {
        f"test_batch{suffix}": data["test"]
    }


def python_2(content: dict[str, Any]) -> bytes:
    """A pickle as Python 2 and its numpy wrote it: the official files are such."""

    def text(value: bytes) -> bytes:
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))) + value

    def thing(value: Any) -> bytes:
        if isinstance(value, list):
            return b"](" + b"".join(b"K" + bytes([number]) for number in value) + b"e"
        if isinstance(value, str):
            return text(value.encode())
        shape = b"".join(b"J" + struct.pack("<i", n) for n in value.shape) + b"\x86"
        kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        return made + b"(K\x01" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    return b"\x80\x02}(" + b"".join(text(key.encode()) + thing(value) for key, value in content.items()) + b"u."


def write_python(folder: Path, data: Data, classes: int, protocol: int | None = None, keys: type = str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in files_of(data, classes).items():
        content = {"batch_label": "a batch", "data": pixels.reshape(len(pixels), -1)}
        if classes == 100:
            content |= {"coarse_labels": [0] * len(labels), "fine_labels": labels.tolist()}
        else:
            content["labels"] = labels.tolist()
        if protocol is None:
            (folder / name).write_bytes(python_2(content))
        else:
            other = content if keys is str else {key.encode(): value for key, value in content.items()}
            (folder / name).write_bytes(pickle.dumps(other, protocol))


def write_binary(folder: Path, data: Data, classes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in files_of(data, classes, ".bin").items():
        coarse = b"" if classes == 10 else b"\x07"
        records = (coarse + bytes([label]) + image.tobytes() for image, label in zip(pixels, labels, strict=True))
        (folder / name).write_bytes(b"".join(records))


def write_folders(folder: Path, data: Data, suffix: str = "png") -> None:
    image = pytest.importorskip("PIL.Image")
    for part, (pixels, labels) in data.items():
        for i, (planes, label) in enumerate(zip(pixels, labels, strict=True)):
            place = folder / part / f"class-{label:03}"
            place.mkdir(parents=True, exist_ok=True)
            image.fromarray(planes.transpose(1, 2, 0)).save(place / f"{i:04}.{suffix}")


def pack(folder: Path, archive: Path, inside: str = "") -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        for child in sorted(folder.iterdir(), reverse=True):
            tar.add(child, arcname=f"./{inside}{child.name}")
    return archive


def assert_same(found: Images, data: Data) -> None:
    for part, (pixels, labels) in data.items():
        got, got_labels = getattr(found, part)
        assert numpy.array_equal(got, pixels.transpose(0, 2, 3, 1))
        assert numpy.array_equal(got_labels, labels)
        assert got_labels.dtype == numpy.int64


@pytest.mark.parametrize("classes", [10, 100])
def test_every_form_gives_the_same_images(tmp_path: Path, classes: int) -> None:
    data = make(classes)
    folder = "cifar-10-batches-py" if classes == 10 else "cifar-100-python"
    write_python(tmp_path / "python" / folder, data, classes)
    write_binary(tmp_path / "binary", data, classes)
    write_folders(tmp_path / "folders", data)
    sources = [
        tmp_path / "python",  # torchvision's root
        tmp_path / "python" / folder,
        pack(tmp_path / "python", tmp_path / f"cifar-{classes}-python.tar.gz"),
        tmp_path / "binary",
        pack(tmp_path / "binary", tmp_path / f"cifar-{classes}-binary.tar.gz", "cifar-bin/"),
        tmp_path / "folders",
    ]
    for source in sources:
        assert_same(read_images(source, classes), data)
    (tmp_path / "python" / folder).rename(tmp_path / "python" / ".hidden")
    with pytest.raises(FileNotFoundError, match="has no files of CIFAR"):
        read_images(tmp_path / "python", classes)
    (tmp_path / "python" / ".hidden").rename(tmp_path / "python" / folder)
    fingerprints = {Cifar(data=str(source), classes=classes, batch_size=4).fingerprint() for source in sources}
    assert len(fingerprints) == 1


@pytest.mark.parametrize("keys", [str, bytes])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickles_that_were_written_anew(tmp_path: Path, protocol: int, keys: type) -> None:
    data = make(10)
    write_python(tmp_path, data, 10, protocol, keys)
    assert_same(read_images(tmp_path), data)


def test_jpeg_files_are_read_and_remarked_on(tmp_path: Path) -> None:
    data = make(10)
    for pixels, _ in data.values():
        pixels[:] = pixels[:, :, :1, :1]  # of one colour: little is lost
    write_folders(tmp_path, data, "jpg")
    (tmp_path / "train" / "class-000" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "class-000" / "._0000.jpg").write_text("a Mac's")
    found = read_images(tmp_path)
    assert abs(found.train[0].astype(int) - data["train"][0].transpose(0, 2, 3, 1)).max() <= 3
    assert "train/ has 20 images, but the complete one has 50,000" in found.remarks[0]
    assert "compressed as JPEG" in found.remarks[-1]
    assert Cifar(data=str(tmp_path), batch_size=2).remarks == found.remarks


def test_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_folders(tmp_path, make(10))
    image.new("L", (32, 32), 77).save(tmp_path / "train" / "class-000" / "0000.png")
    image.new("RGBA", (32, 32), (1, 2, 3, 4)).save(tmp_path / "train" / "class-000" / "0001.png")
    pixels, _ = read_images(tmp_path).train
    assert (pixels[0] == 77).all()
    assert (pixels[1] == [1, 2, 3]).all()


def test_complete_files_are_not_remarked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(tmp_path, make(10), 10)
    assert "data_batch_1.bin has 4 images, but the complete one has 10,000" in read_images(tmp_path).remarks[0]
    monkeypatch.setattr(images, "COMPLETE", {"train": 20, "test": 10})
    assert read_images(tmp_path).remarks == ()


# --- what is refused ---


class Hostile:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.made = (call, arguments)

    def __reduce__(self) -> Any:
        return self.made


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    goal = tmp_path / "goal"
    write_python(tmp_path, make(10), 10)
    for call, arguments in (
        (os.system, (f"touch {goal}",)),
        (eval, (f"open({str(goal)!r}, 'w')",)),
        (open, (str(goal), "w")),
        (numpy.save, (str(goal), 1)),
        (getattr, ("text", "join")),
    ):
        for protocol in (0, 2, 5):
            raw = pickle.dumps({"data": Hostile(call, *arguments), "labels": []}, protocol)
            (tmp_path / "data_batch_3").write_bytes(raw)
            with pytest.raises(ValueError, match=r"data_batch_3 .* cannot be read as a pickle of arrays.*refers to"):
                read_images(tmp_path)
    assert not goal.exists()
    assert not goal.with_suffix(".npy").exists()


@pytest.mark.parametrize("name", [b"numpy\nndarray", b"numpy\ndtype", b"_codecs\nencode"])
@pytest.mark.parametrize("state", [b"}U\x05shapeK\x01s", b"N}U\x05shapeK\x01s\x86"])
def test_a_hostile_pickle_cannot_change_what_stands_in(name: bytes, state: bytes) -> None:
    before = dict(vars(images._Stub))
    with pytest.raises(ValueError, match=r"cannot be read as a pickle(?!.*it holds)"):  # it is not even made
        images._read_file(Path("x"), b"\x80\x02c" + name + b"\n" + state + b"b.", classes=10, complete=10_000)
    assert dict(vars(images._Stub)) == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1], "is an object of type list, but should be a dictionary with data, 10,000 x 3,072 bytes"),
        ({"labels": [1]}, "has nothing usable as data, but should be"),
        (
            {"data": numpy.zeros((2, 3000), numpy.uint8), "labels": [1, 2]},
            "has 2 x 3,000 numbers of type uint8 as data",
        ),
        ({"data": numpy.zeros((2, 3072)), "labels": [1, 2]}, "has nothing usable as data"),
        ({"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [1]}, "has 1 numbers of type int64 as labels"),
        ({"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [1.5, 2]}, "has nothing usable as labels"),
        ({"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [1, 10]}, "label 10, but labels should be 0 to 9"),
        ({"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [-1, 1]}, "label -1, but labels should be 0 to 9"),
    ],
)
def test_pickles_of_something_else_are_rejected(tmp_path: Path, content: Any, says: str) -> None:
    write_python(tmp_path, make(10), 10)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=f"cifar: data_batch_3 .*{says}"):
        read_images(tmp_path)


def test_files_that_are_cut_off_are_named(tmp_path: Path) -> None:
    for write, name in ((write_python, "data_batch_2"), (write_binary, "test_batch.bin")):
        place = tmp_path / name
        write(place, make(10), 10)
        whole = (place / name).read_bytes()
        for size in (0, 1, 100, len(whole) - 1):
            (place / name).write_bytes(whole[:size])
            with pytest.raises(ValueError, match=rf"cifar: {name} .*{size:,} bytes.* truncated"):
                read_images(place)
    with pytest.raises(ValueError, match=r"has 30,729 bytes, but should have 30,730,000 \(10,000 records of 3,073\)"):
        read_images(tmp_path / "test_batch.bin")


def test_archives_that_are_cut_off_or_none_are_rejected(tmp_path: Path) -> None:
    write_binary(tmp_path / "binary", make(10), 10)
    archive = pack(tmp_path / "binary", tmp_path / "data.tar.gz")
    whole = archive.read_bytes()
    for content in (b"", b"no archive", whole[:700], whole[: len(whole) // 2], whole[: len(whole) * 9 // 10]):
        archive.write_bytes(content)
        with pytest.raises((ValueError, FileNotFoundError), match=r"cannot be read to its end|lacks|has no files"):
            read_images(archive)


class Zeros(io.RawIOBase):
    """A file of zeros without an end."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def pack_zeros(archive: Path, name: str, size: int, kind: bytes = tarfile.REGTYPE) -> Path:
    """Write an archive with one member, of zeros."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        member = tarfile.TarInfo(name)
        member.size, member.type = size, kind
        tar.addfile(member, Zeros())
    return archive


def peak_of_refusal(archive: Path, classes: int, says: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            read_images(archive, classes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("data_batch_1", tarfile.REGTYPE),
        ("cifar-10-batches-py/test_batch", tarfile.REGTYPE),
        ("other", tarfile.REGTYPE),
        ("data_batch_1", tarfile.GNUTYPE_LONGNAME),  # which tarfile reads as a name
    ],
)
def test_a_gzip_bomb_is_rejected_before_it_is_in_memory(tmp_path: Path, name: str, kind: bytes) -> None:
    archive = pack_zeros(tmp_path / "data.tar.gz", name, 400_000_000, kind)
    says = r"data\.tar\.gz' unpacks to more than 200,000,000 bytes, but an official archive has fewer"
    assert peak_of_refusal(archive, 10, says) < 20_000_000


@pytest.mark.parametrize(("classes", "name", "most"), [(10, "data_batch_1", 32_000_000), (100, "train", 160_000_000)])
@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_a_member_that_claims_too_much_is_rejected(
    tmp_path: Path, classes: int, name: str, suffix: str, most: int
) -> None:
    for size in (most + 1, 1 << 40):
        member = tarfile.TarInfo(f"x/{name}{suffix}")
        member.size = size
        archive = tmp_path / "data.tar.gz"
        archive.write_bytes(gzip.compress(member.tobuf() + bytes(1024)))  # the header, and nothing of what it claims
        says = rf"{name}{suffix} has {size:,} bytes, but should have at most {most:,}"
        assert peak_of_refusal(archive, classes, says) < 20_000_000


def test_sparse_members_are_not_read(tmp_path: Path) -> None:
    headers = b""
    for i in range(100):
        member = tarfile.TarInfo(f"{i}/data_batch_1")
        member.type = tarfile.GNUTYPE_SPARSE
        header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        header[483:495] = b"%011o\0" % 30_000_000  # the size with its holes
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        headers += header
    (tmp_path / "data.tar.gz").write_bytes(gzip.compress(headers + bytes(1024)))
    with tarfile.open(tmp_path / "data.tar.gz") as tar:
        assert [member.size for member in tar] == [30_000_000] * 100
    assert peak_of_refusal(tmp_path / "data.tar.gz", 10, "has no files of CIFAR-10") < 20_000_000


def test_an_archive_of_images_is_rejected(tmp_path: Path) -> None:
    write_folders(tmp_path / "x", make(10))
    with pytest.raises(FileNotFoundError, match=r"no files of CIFAR-10\. Expected: .* or a folder with train/CLASS"):
        read_images(pack(tmp_path / "x", tmp_path / "x.tar.gz"))


def test_a_file_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    write_binary(tmp_path, make(10), 10)
    with (tmp_path / "data_batch_2.bin").open("r+b") as file:
        file.truncate(3073 * 1_000_000)  # takes no space
    says = r"data_batch_2\.bin has 3,073,000,000 bytes, but should have at most 32,000,000"
    assert peak_of_refusal(tmp_path, 10, says) < 20_000_000


def test_a_small_pickle_takes_little_memory(tmp_path: Path) -> None:
    write_python(tmp_path, make(10), 10)
    (tmp_path / "data_batch_3").write_bytes(b"\x80\x02Nr\xff\xff\xff\x07.")  # one object, put in place 134,217,727
    assert peak_of_refusal(tmp_path, 10, "data_batch_3 .*it uses 134,217,727 as a memo index") < 20_000_000


def test_missing_files_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    page = r"cifar-10-python\.tar\.gz or .* from https://www\.cs\.toronto\.edu/~kriz/cifar\.html.*--download downloads"
    with pytest.raises(ValueError, match=f"cifar: data is not given.*{page}"):
        Cifar()
    with pytest.raises(FileNotFoundError, match=f"which does not exist.*{page}"):
        Cifar(data=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=f"has no files of CIFAR-10.*{page}"):
        Cifar(data=str(tmp_path))
    write_python(tmp_path / "x", make(10), 10)
    (tmp_path / "x" / "data_batch_4").unlink()
    (tmp_path / "x" / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_4, test_batch next to the other files in 'x'"):
        Cifar(data=str(tmp_path))
    write_binary(tmp_path / "y", make(100), 100)
    for source in (tmp_path / "y", pack(tmp_path / "y", tmp_path / "y.tar.gz")):
        with pytest.raises(ValueError, match="is CIFAR-100, but classes is 10: set classes=100"):
            Cifar(data=str(source))


def test_image_folders_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    write_folders(tmp_path, make(10))
    with pytest.raises(ValueError, match=r"has 10 folders with images \(class-000, .*one for each of 100 classes"):
        read_images(tmp_path, 100)
    (tmp_path / "test" / "class-003").rename(tmp_path / "test" / "other")
    with pytest.raises(ValueError, match="only one of them has images in class-003, other"):
        read_images(tmp_path)
    (tmp_path / "test").rename(tmp_path / "val")
    with pytest.raises(FileNotFoundError, match="lacks images in test/CLASS"):
        read_images(tmp_path)


def test_image_files_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    write_folders(tmp_path, make(10))
    place = tmp_path / "train" / "class-002" / "0004.png"
    whole = place.read_bytes()
    image.new("RGB", (64, 32)).save(place)
    with pytest.raises(ValueError, match=r"class-002/0004\.png .*has 64 x 32 pixels, but should have 32 x 32"):
        read_images(tmp_path)
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        place.write_bytes(content)
        with pytest.raises(ValueError, match=rf"class-002/0004\.png .*{len(content):,} bytes.* cannot be decoded"):
            read_images(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pillow"):
        read_images(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"classes": 20}, "classes is 20, but must be 10 or 100"),
        ({"model": "wrn-28"}, "model is 'wrn-28', but must be wrn-D-W"),
        ({"model": "wrn-27-4"}, "model is 'wrn-27-4', but must be wrn-D-W, with a depth D of 10, 16"),
        ({"model": "wrn-4-4"}, "model is 'wrn-4-4'"),
        ({"model": "wrn-28-0"}, "model is 'wrn-28-0'"),
        ({"batch_size": 19}, "batch_size is 19, but there are only 18 images to train on"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    write_binary(tmp_path, make(10), 10)
    with pytest.raises(ValueError, match=says):
        Cifar(data=str(tmp_path), **options)


# --- fetching ---


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    with serving(tmp_path / "www") as address:
        yield f"{address}/", tmp_path / "www"


@pytest.mark.parametrize("classes", [10, 100])
def test_the_archive_is_fetched_only_when_asked(
    tmp_path: Path, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, classes: int
) -> None:
    address, root = served
    data = make(classes)
    name, _ = images.ARCHIVES[classes]
    write_python(tmp_path / "x" / "folder", data, classes)
    archive = pack(tmp_path / "x", root / name)
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(images, "ADDRESS", address)
    monkeypatch.setitem(images.ARCHIVES, classes, (name, digest))
    goal = tmp_path / "data"
    options: dict[str, Any] = {"data": str(goal), "classes": classes, "batch_size": 4}
    with pytest.raises(FileNotFoundError, match="--download"):
        Cifar(**options)
    assert not goal.exists()
    task = Cifar(**options, download=True)
    assert_same(read_images(goal, classes), data)
    assert [path.name for path in goal.iterdir()] == [name]
    archive.unlink()
    assert Cifar(**options, download=True).fingerprint() == task.fingerprint()  # all is there: nothing is fetched
    assert Cifar(**{**options, "data": str(tmp_path / "x")}, download=True).fingerprint() == task.fingerprint()
    assert Cifar(**{**options, "data": str(goal / name)}, download=True).fingerprint() == task.fingerprint()


@pytest.mark.parametrize("content", [None, b"", b"something else"])
def test_a_download_that_fails_leaves_nothing(
    tmp_path: Path, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    address, root = served
    monkeypatch.setattr(images, "ADDRESS", address)
    if content is not None:
        (root / images.ARCHIVES[10][0]).write_bytes(content)
    with pytest.raises(OSError, match=r"not be downloaded .*(md5 digest .* but should have c58f3|404).* manually"):
        download_cifar(tmp_path / "data", 10)
    assert list(tmp_path.glob("data/*")) == []


# --- the task ---


@pytest.fixture
def small(tmp_path: Path) -> str:
    write_binary(tmp_path / "small", make(10, train=200, test=30), 10)
    return str(tmp_path / "small")


def reference(task: Cifar, moves: Moves, i: int) -> torch.Tensor:
    """One image of an epoch, step by step: flip, pad with black, crop, normalise."""
    chosen, flipped, down, right = (int(row[i]) for row in moves)
    images: torch.Tensor = task.parts["train"][0]
    picture = images[chosen].permute(2, 0, 1)
    if flipped:
        picture = picture.flip(2)
    picture = F.pad(picture, (4, 4, 4, 4), value=0)[:, down : down + 32, right : right + 32]
    pixels = images.double()
    mean, std = (x[:, None, None] for x in (pixels.mean((0, 1, 2)), pixels.std((0, 1, 2), correction=0)))
    return (picture.double() - mean) / std


@pytest.mark.parametrize("whole", [False, True])
def test_images_are_flipped_padded_with_black_and_cropped(
    small: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "_CHUNK", 37)
    task = Cifar(data=small, batch_size=16, dtype=torch.float64)
    task.whole_epochs = whole
    epoch = task.order(0)
    assert (epoch.images is not None) == whole
    assert sorted(draw_moves(180, 5)[0].tolist()) == list(range(180))
    assert {int(x) for x in epoch.moves.flipped} == {0, 1}
    assert {int(x) for x in epoch.moves.down} == {int(x) for x in epoch.moves.right} == set(range(9))
    assert len(epoch.labels) == 11 * 16  # the last batch would not be full
    for index in range(task.steps_per_epoch):
        pictures, labels = task.batch(epoch, index)
        assert pictures.is_contiguous()
        for i in range(16):
            torch.testing.assert_close(
                pictures[i], reference(task, epoch.moves, index * 16 + i), rtol=1e-12, atol=1e-12
            )
            assert labels[i] == task.parts["train"][1][epoch.moves.chosen[index * 16 + i]]


def test_padding_is_black_before_normalisation(small: str) -> None:
    task = Cifar(data=small, batch_size=1)
    moves = Moves(*torch.tensor([[0], [0], [0], [8]]))
    pictures, _ = task.batch(Epoch(moves, torch.zeros(1), None), 0)
    black = -(task.mean / task.std)
    assert torch.equal(pictures[0, :, :4, :], black[:, None, None].expand(3, 4, 32))  # above
    assert torch.equal(pictures[0, :, :, 28:], black[:, None, None].expand(3, 32, 4))  # on the right
    assert not torch.equal(pictures[0, :, 4:, :28], black[:, None, None].expand(3, 28, 28))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batches_do_not_depend_on_how_they_are_made(
    small: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, whole, wide = (Cifar(data=small, batch_size=32, seed=3, dtype=dtype) for _ in range(3))
    whole.whole_epochs = wide.whole_epochs = True
    wide.memory_format = torch.channels_last
    monkeypatch.setattr(cifar, "_CHUNK", 50)
    epochs = [each.order(7) for each in (task, whole, wide)]
    for index in range(task.steps_per_epoch):
        (one, labels), *others = (each.batch(e, index) for each, e in zip((task, whole, wide), epochs, strict=True))
        assert one.dtype == dtype
        for other, other_labels in others:
            assert torch.equal(one, other)
            assert torch.equal(labels, other_labels)
        assert others[-1][0].is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_is_a_function_of_seed_and_number(small: str) -> None:
    begun = Cifar(data=small, batch_size=16, seed=1)
    for number in range(3):
        begun.order(number)
        torch.rand(3)  # whatever else is drawn
    resumed = Cifar(data=small, batch_size=16, seed=1)
    for one, other in zip(begun.batch(begun.order(3), 5), resumed.batch(resumed.order(3), 5), strict=True):
        assert torch.equal(one, other)
    others = [resumed.order(4), Cifar(data=small, batch_size=16, seed=2).order(3)]
    for epoch in others:
        for row, before in zip(epoch.moves, begun.order(3).moves, strict=True):
            assert not torch.equal(row, before)


def test_the_parts_do_not_overlap_and_do_not_depend_on_the_seed(small: str) -> None:
    one, other, full = Cifar(data=small, seed=1), Cifar(data=small, seed=2), Cifar(data=small, full=True)
    assert one.fingerprint() == other.fingerprint() != full.fingerprint()
    assert {part: len(labels) for part, (_, labels) in one.parts.items()} == {
        "train": 180,
        "validation": 20,
        "test": 30,
    }
    parts = {part: {pixels.numpy().tobytes() for pixels in found} for part, (found, _) in one.parts.items()}
    assert len(set.union(*parts.values())) == 230
    assert len(full.parts["train"][1]) == 200
    assert {pixels.numpy().tobytes() for pixels in full.parts["train"][0]} == parts["train"] | parts["validation"]
    known = dict(zip((p.tobytes() for p in read_images(small).train[0]), read_images(small).train[1], strict=True))
    for part in ("train", "validation"):
        for pixels, label in zip(*one.parts[part], strict=True):
            assert known[pixels.numpy().tobytes()] == label


def test_normalisation_is_by_the_training_part(small: str) -> None:
    for task in (Cifar(data=small), Cifar(data=small, full=True)):
        values = task._normalised(task.parts["train"][0]).double()
        torch.testing.assert_close(values.mean((0, 2, 3)), torch.zeros(3).double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(values.std((0, 2, 3)), torch.ones(3).double(), rtol=0, atol=1e-5)
    assert not torch.equal(Cifar(data=small).mean, Cifar(data=small, full=True).mean)


def test_scores_are_those_of_the_whole_part(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Cifar(data=small, model="wrn-10-1")
    model = task.new_model().eval()
    pixels, labels = task.parts["test"]
    with torch.no_grad():
        scores = model(task._normalised(pixels))
        for size in (1000, 30, 7):
            monkeypatch.setattr(cifar, "_EVALUATION_BATCH", size)
            found = task.evaluate(model, "test")
            assert found.loss == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)
            assert found.error == pytest.approx(100 * (scores.argmax(1) != labels).double().mean().item())


def test_models_are_the_ones_named(small: str) -> None:
    tasks = {name: Cifar(data=small, model=name) for name in ("wrn-28-4", "wrn-28-10")}
    with torch.device("meta"):
        models = {name: task.build() for name, task in tasks.items()}
    assert {name: round(count(model) / 1e6, 2) for name, model in models.items()} == {
        "wrn-28-4": 5.85,
        "wrn-28-10": 36.48,
    }


def test_images_are_learnt(tmp_path: Path) -> None:
    data = make(10, train=200, test=50)
    colours = numpy.random.default_rng(0).integers(0, 200, (10, 3, 1, 1), numpy.uint8)
    for pixels, labels in data.values():
        pixels[:] = pixels // 5 + colours[labels]
    write_binary(tmp_path, data, 10)
    task = Cifar(data=str(tmp_path), batch_size=30, model="wrn-10-1")
    model = task.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(8):
        epoch = task.order(number)
        for index in range(task.steps_per_epoch):
            loss, _ = task.loss(model, task.batch(epoch, index), (), torch.Generator())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        assert task.evaluate(model.eval(), "test").error < 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_makes_the_same_images(small: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "_CHUNK", 50)
    on_cpu, on_gpu = (Cifar(data=small, batch_size=16, dtype=dtype, device=device) for device in ("cpu", "cuda"))
    one, other = on_cpu.order(2), on_gpu.order(2)
    assert on_cpu.fingerprint() == on_gpu.fingerprint()
    for index in range(on_cpu.steps_per_epoch):
        pictures, labels = on_gpu.batch(other, index)
        assert pictures.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(pictures.cpu(), on_cpu.batch(one, index)[0])
        assert torch.equal(labels.cpu(), on_cpu.batch(one, index)[1])
    model = on_gpu.new_model()
    loss, _ = on_gpu.loss(model, on_gpu.batch(other, 0), (), torch.Generator("cuda"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters())
