"""ImageNet: images are what they should be, the same however they are read, and each is counted once."""

import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from short_runs import StopAt
from short_runs import assert_same as assert_same_runs
from torch import Tensor, nn

from avagrad.lab.command import main
from avagrad.lab.config import configure
from avagrad.lab.data.imagenet import Reader, center_box, random_box, read_image, recoloured
from avagrad.lab.models.resnet import ResNet
from avagrad.lab.tasks import imagenet
from avagrad.lab.tasks.base import stream
from avagrad.lab.tasks.imagenet import ImageNet
from avagrad.lab.train import Stopped, train

Image = pytest.importorskip("PIL.Image")

SIZE = 32
MEAN, STD = numpy.array([0.485, 0.456, 0.406]), numpy.array([0.229, 0.224, 0.225])


def picture(width: int, height: int, seed: int) -> Any:
    coarse = numpy.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("imagenet")
    sizes = [(64, 48), (48, 64), (40, 40), (300, 200), (33, 90), (20, 25)]
    for part, each in (("train", 6), ("val", 3)):
        for label in ("bee", "ant", "cow"):
            (root / part / label).mkdir(parents=True)
            for i in range(each):
                image = picture(*sizes[i], seed=10 * len(part) + i)
                image.save(root / part / label / f"{label}_{i}.JPEG", quality=90)
        (root / part / "bee" / "._bee_0.JPEG").write_bytes(b"a Mac's note")
        (root / part / "bee" / "list.txt").write_text("no image")
    picture(50, 60, 90).convert("L").save(root / "train" / "ant" / "ant_1.JPEG")
    picture(50, 60, 91).convert("CMYK").save(root / "train" / "bee" / "bee_1.JPEG")
    picture(50, 60, 92).convert("RGBA").save(root / "train" / "cow" / "cow_1.png")
    picture(50, 60, 93).convert("P").save(root / "val" / "cow" / "cow_1.png", transparency=bytes(9))
    picture(50, 60, 94).save(root / "val" / "ant" / "ant_1.JPEG", format="PNG")  # there is one of these
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


class Tiny(nn.Module):
    """Scores of images from their mean colours, and a list of what it has seen."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, classes)
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images.detach().clone())
        scores: Tensor = self.linear(images.mean((2, 3)))
        return scores


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "ResNet", Tiny)


def task_on(root: Path, **options: Any) -> ImageNet:
    return ImageNet(data=str(root), **({"batch_size": 4, "size": SIZE, "workers": 0} | options))


def epochs(task: ImageNet, count: int = 2) -> list[tuple[Tensor, ...]]:
    return [task.batch(task.order(epoch), i) for epoch in range(count) for i in range(task.steps_per_epoch)]


def assert_same(these: list[tuple[Tensor, ...]], those: list[tuple[Tensor, ...]]) -> None:
    for (images, labels), (other_images, other_labels) in zip(these, those, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


# --- finding ---


def test_classes_are_in_order_and_only_images_count(original: Path) -> None:
    task = task_on(original)
    assert task.classes == ["ant", "bee", "cow"]
    assert {part: numpy.bincount(found.labels).tolist() for part, found in task.parts.items()} == {
        "train": [6, 6, 7],
        "val": [3, 3, 4],
    }
    assert task.steps_per_epoch == 4  # of 19 images
    assert list(task.parts["train"].names) == sorted(task.parts["train"].names)
    assert "train/ has 19 images, but ImageNet (ILSVRC 2012) has 1,281,167." in task.remarks
    assert "data has 3 classes, but ImageNet (ILSVRC 2012) has 1,000." in task.remarks


def test_the_fingerprint_is_of_names_and_sizes(original: Path, root: Path) -> None:
    one = task_on(original).fingerprint()
    assert task_on(root, seed=3, batch_size=2).fingerprint() == one
    (root / "train" / "ant" / "ant_0.JPEG").rename(root / "train" / "ant" / "ant_00.JPEG")
    renamed = task_on(root).fingerprint()
    with (root / "train" / "ant" / "ant_00.JPEG").open("ab") as file:
        file.write(b"\0")
    assert len({one, renamed, task_on(root).fingerprint()}) == 3


def test_every_epoch_has_its_own_order(original: Path) -> None:
    task, other = task_on(original, batch_size=19), task_on(original, batch_size=19, seed=1)
    orders = [epoch.batches[0] for epoch in (task.order(0), task.order(1), other.order(0))]
    assert all(sorted(order) == list(range(19)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_model_has_an_output_for_each_class(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "ResNet", ResNet)
    model = task_on(original).new_model()
    assert isinstance(model, ResNet)
    assert model.fc.out_features == 3


# --- the same images, however they are read ---


def test_workers_make_no_difference(original: Path) -> None:
    alone = epochs(task_on(original))
    before = torch.get_rng_state()
    for workers in (1, 2):
        assert_same(epochs(task_on(original, workers=workers)), alone)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(alone[0][0], alone[4][0])


def test_going_on_in_the_middle_reads_only_what_is_left(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = epochs(task_on(original))
    task = task_on(original)
    read: list[str] = []

    get = Reader.__getitem__

    def counted(reader: Any, given: Any) -> Any:
        read.extend(path.name for path, *_ in given)
        return get(reader, given)

    monkeypatch.setattr(Reader, "__getitem__", counted)
    order = task.order(1)
    assert_same([task.batch(order, 2), task.batch(order, 3)], alone[6:])
    assert len(read) == 8
    assert_same([task.batch(task.order(0), i) for i in (3, 1, 2)], [alone[i] for i in (3, 1, 2)])


def test_seed_and_dtype(original: Path) -> None:
    images, labels = task_on(original, batch_size=19).batch(task_on(original).order(0), 0)
    wide, same = task_on(original, batch_size=19, dtype=torch.float64).batch(task_on(original).order(0), 0)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(images.double(), wide, rtol=0, atol=1e-5)
    assert torch.equal(labels, same)
    other, _ = task_on(original, batch_size=19, seed=1).batch(task_on(original).order(0), 0)
    assert not torch.allclose(images, other)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_a_signal_to_all(original: Path, number: signal.Signals) -> None:
    task = task_on(original, workers=1)
    order = task.order(0)
    task.batch(order, 0)
    batches: Any = task._batches
    os.kill(batches._workers[0].pid, number)
    for index in range(1, 4):
        task.batch(order, index)
    for epoch in (1, 2):
        task.batch(task.order(epoch), 0)


# --- where images are cut ---


def plain_box(width: int, height: int, draw: random.Random) -> tuple[int, ...] | None:
    for _ in range(10):
        target, aspect = draw.uniform(0.08, 1.0) * width * height, draw.uniform(0.75, 4 / 3)
        w, h = round((target * aspect) ** 0.5), round((target / aspect) ** 0.5)
        if draw.random() < 0.5:
            w, h = h, w
        if w <= width and h <= height:
            y = draw.randint(0, height - h)
            x = draw.randint(0, width - w)
            return x, y, x + w, y + h
    return None


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (224, 224), (1200, 100), (60, 900)])
def test_random_boxes(width: int, height: int) -> None:
    areas, missed = [], 0
    for seed in range(2000):
        box = random_box(width, height, 224, random.Random(seed))
        plain = plain_box(width, height, random.Random(seed))
        if plain is None:
            missed += 1
            side = min(width, height)
            expected = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
            assert box == pytest.approx(expected, abs=2)
        else:
            assert box == plain
            areas.append((box[2] - box[0]) * (box[3] - box[1]) / (width * height))
            aspect = (box[2] - box[0]) / (box[3] - box[1])
            assert 0.73 < aspect < 1.37
        assert 0 <= box[0] < box[2] <= width
        assert 0 <= box[1] < box[3] <= height
    assert (missed > 0) == (max(width, height) > 1000 or width == 60)
    assert min(areas) == pytest.approx(0.08, abs=0.01)


@pytest.mark.parametrize("side", [1, 2, 3])
def test_boxes_of_the_smallest_images(side: int) -> None:
    for seed in range(50):
        left, top, right, bottom = random_box(side, 1, 224, random.Random(seed))
        assert right - left >= 1
        assert bottom - top >= 1


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (256, 256), (40, 31), (1024, 333)])
def test_the_center_is_that_of_the_scaled_image(root: Path, width: int, height: int) -> None:
    path = root / "image.png"
    picture(width, height, 1).save(path)
    scale = 256 / min(width, height)
    wide, high = (256, int(height * scale)) if width <= height else (int(width * scale), 256)
    scaled = Image.open(path).resize((wide, high), Image.Resampling.BICUBIC)
    left, top = math.ceil((wide - 224) / 2), math.ceil((high - 224) / 2)
    expected = numpy.asarray(scaled.crop((left, top, left + 224, top + 224))).astype(int)
    off = abs(read_image(path, 224)[0].astype(int) - expected)
    assert off.max() <= 2
    assert off.mean() < 0.02
    assert center_box(width, height, 224, 256)[2] <= width


@pytest.mark.parametrize(("width", "height"), [(500, 375), (3000, 2001)])
@pytest.mark.parametrize("draw", [None, 5, 6])
def test_pixels_are_those_of_the_box(root: Path, width: int, height: int, draw: int | None) -> None:
    """Red is where a pixel is across, green where it is down."""
    across = numpy.broadcast_to((numpy.arange(width) + 0.5) / width * 255, (height, width))
    down = numpy.broadcast_to(((numpy.arange(height) + 0.5) / height * 255)[:, None], (height, width))
    pixels = numpy.stack([across, down, numpy.full((height, width), 128.0)], 2).round().astype(numpy.uint8)
    path = root / "image.jpg"
    Image.fromarray(pixels).save(path, quality=98, subsampling=0)
    cut, *_ = read_image(path, 224, None if draw is None else random.Random(draw))
    same = random.Random(draw)
    box = center_box(width, height, 224, 256) if draw is None else random_box(width, height, 224, same)
    if draw is not None and same.random() < 0.5:
        cut = cut[:, ::-1]
    steps = (numpy.arange(224) + 0.5) / 224
    for channel, (start, stop, whole) in enumerate([(box[0], box[2], width), (box[1], box[3], height)]):
        expected = (start + steps * (stop - start)) / whole * 255
        assert abs(cut.mean(channel)[:, channel] - expected).max() < 1.5


# --- colours ---


def plain_colours(image: Any, order: list[int], factors: Any, alphas: Any) -> Any:
    """fb.resnet.torch's way: one after the other, in some order, on one image of numbers between 0 and 1."""
    values = image / 255
    for which in order:
        gray = values @ numpy.array([0.299, 0.587, 0.114])
        other = [numpy.zeros_like(gray), numpy.full_like(gray, gray.mean()), gray][which]
        values = factors[which] * values + (1 - factors[which]) * other[:, :, None]
    for channel, vector in enumerate(
        [(-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203)]
    ):
        values[:, :, channel] += sum(
            v * alpha * value for v, alpha, value in zip(vector, alphas, (0.2175, 0.0188, 0.0045), strict=True)
        )
    return ((values - MEAN) / STD).transpose(2, 0, 1)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]])
def test_a_training_image_is_the_plain_one_with_the_numbers_that_are_drawn(original: Path, order: list[int]) -> None:
    task = task_on(original, seed=7, batch_size=19, dtype=torch.float64)
    epoch = task.order(2)
    images, labels = task.batch(epoch, 0)
    flips = 0
    for image, label, number in zip(images, labels, epoch.batches[0], strict=True):
        path = original / os.fsdecode(task.parts["train"].names[number])
        assert path.parent.name == task.classes[label]
        draw = random.Random(stream(7, "image", 2, number))
        with Image.open(path) as file:
            box = random_box(file.width, file.height, SIZE, draw)
            pixels = numpy.asarray(file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box))
        flipped = draw.random() < 0.5
        flips += flipped
        factors = [1 + draw.uniform(-0.4, 0.4) for _ in range(3)]
        alphas = [draw.gauss(0, 0.1) for _ in range(3)]
        expected = plain_colours(pixels[:, ::-1] if flipped else pixels, order, factors, alphas)
        if "_3" not in path.name:  # this one is large enough to be read at half its size
            numpy.testing.assert_allclose(image.numpy(), expected, rtol=0, atol=1e-12)
        else:
            assert abs(image.numpy() - expected).mean() < 0.05
    assert 0 < flips < 19


def test_without_changes_colours_are_normalised() -> None:
    pixels = torch.randint(256, (3, 5, 6, 3), dtype=torch.uint8)
    images = recoloured(pixels, torch.ones(3, 3), torch.zeros(3, 3))
    expected = (pixels.numpy() / 255 - MEAN) / STD
    numpy.testing.assert_allclose(images.numpy(), expected.transpose(0, 3, 1, 2), rtol=0, atol=2e-6)
    assert images.is_contiguous(memory_format=torch.channels_last)


# --- evaluation ---


def test_evaluation_counts_every_image_once(original: Path) -> None:
    task = task_on(original, batch_size=3)
    model: Any = task.new_model().eval()
    with torch.no_grad():
        score = task.evaluate(model, "validation")
        assert task.evaluate(model, "test") == score
        seen = torch.cat(model.seen)
        assert len(seen) == 2 * 10
        paths = [original / os.fsdecode(name) for name in task.parts["val"].names]
        for image, path in zip(seen, paths, strict=False):
            with Image.open(path) as file:
                whole = file.convert("RGBA").convert("RGB")
                box = center_box(whole.width, whole.height, SIZE, 37)
                cut = numpy.asarray(whole.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box))
            expected = ((cut / 255 - MEAN) / STD).transpose(2, 0, 1)
            assert abs(image.numpy() - expected).mean() < 0.02
        scores, labels = model(seen[:10]), torch.tensor(task.parts["val"].labels)
    assert score.loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-5)
    assert score.error == pytest.approx(100 * (scores.argmax(1) != labels).double().mean().item())


def test_training_continues_after_an_evaluation(original: Path) -> None:
    alone = epochs(task_on(original), 1)
    task = task_on(original, workers=1)
    order = task.order(0)
    task.batch(order, 0)
    model = task.new_model().eval()
    with torch.no_grad():
        task.evaluate(model, "validation")
    assert_same([task.batch(order, i) for i in (1, 2, 3)], alone[1:])
    loss, _ = task.loss(model, task.batch(task.order(1), 1), (), torch.Generator())
    assert loss.requires_grad


# --- runs ---


def test_a_process_ends_although_workers_read_ahead(original: Path) -> None:
    """Workers that multiprocessing had to terminate would be reported on stderr, after 20 seconds."""
    code = (
        "from avagrad.lab.tasks.imagenet import ImageNet\n"
        f"task = ImageNet(data={str(original)!r}, size=32, batch_size=2, workers=1)\n"
        "task.batch(task.order(0), 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_run_continues_to_the_same_numbers(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "ResNet", functools.partial(ResNet, layers=(1, 1, 1, 1), width=8))
    options = {"size": SIZE, "batch_size": 6, "workers": 1}
    settings: dict[str, Any] = {"epochs": 3, "milestones": (1,), "lr": 0.1, "eps": 0.1, "threads": 1}
    config = configure("imagenet", "avagrad", data=str(original), task_options=options, **settings)
    assert train(config, tmp_path / "whole")["steps"] == 9
    with pytest.raises(Stopped):
        train(config, tmp_path / "parts", callback=StopAt(4))
    train(config, tmp_path / "parts", resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_the_command_trains_a_resnet50(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imagenet, "ResNet", ResNet)
    run = ["imagenet", "--data", str(original), "--optimizer", "sgd", "--epochs", "1", "--lr", "0.01"]
    run += ["--threads", "1", "--out", str(tmp_path / "run")]
    run += ["--option", f"size={SIZE}", "--option", "batch_size=9", "--option", "workers=0"]
    assert main(run) == 0
    assert capsys.readouterr().out.count("test error") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"], result["parameters"]) == ("finished", 2, 23_514_179)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


# --- errors ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 20}, "batch_size is 20, but there are only 19 images to train on"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"size": 0}, "size is 0, but must be at least 1"),
        ({"workers": -2}, "workers is -2, but must be at least 0"),
        ({"full": True}, "full is True, but must be False"),
    ],
)
def test_options_that_make_no_sense(original: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        task_on(original, **options)


def test_folders_that_are_not_there(root: Path) -> None:
    with pytest.raises(ValueError, match=r"data is not given.*train/CLASS.*val/CLASS.*https://image-net.org"):
        ImageNet()
    with pytest.raises(FileNotFoundError, match=r"nowhere', which is not a folder\. Expected"):
        task_on(root / "nowhere")
    shutil.rmtree(root / "val" / "ant")
    with pytest.raises(ValueError, match="only one of them has images in ant"):
        task_on(root)
    shutil.rmtree(root / "val")
    with pytest.raises(FileNotFoundError, match=r"which has no folder 'val'\. Expected"):
        task_on(root)
    (root / "val").mkdir()
    shutil.copy(root / "train" / "bee" / "bee_0.JPEG", root / "val")
    with pytest.raises(FileNotFoundError, match="val' has no folders with images, one for each class"):
        task_on(root)


@pytest.mark.parametrize(
    ("content", "workers"), [("cut off", 0), ("cut off", 1), ("text", 0), ("empty", 0), ("gone", 0)]
)
def test_a_broken_image_is_named(root: Path, content: str, workers: int) -> None:
    task = task_on(root, workers=workers)
    path = root / "val" / "bee" / "bee_0.JPEG"
    if content == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut off": path.read_bytes()[:500], "text": b"no image", "empty": b""}[content])
    with torch.no_grad(), pytest.raises(ValueError, match=r"the image '.*val/bee/bee_0.JPEG' cannot be read \("):
        task.evaluate(task.new_model().eval(), "test")


def test_a_broken_image_can_be_mended(root: Path) -> None:
    task = task_on(root, batch_size=19)
    path = root / "train" / "cow" / "cow_1.png"
    content = path.read_bytes()
    path.write_bytes(content[:300])
    with pytest.raises(ValueError, match=r"train/cow/cow_1.png' cannot be read"):
        task.batch(task.order(0), 0)
    path.write_bytes(content)
    assert_same([task.batch(task.order(0), 0)], epochs(task_on(root, batch_size=19), 1))


def test_missing_pillow_is_said(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pillow"):
        task_on(original)
