"""CIFAR-10 and CIFAR-100: the paper's search for learning rate and epsilon, and its comparison of the best.

Images stay on the device as bytes. The augmentation of an epoch (order, flips, crops) is drawn on the CPU, from only
the seed and the epoch's number; on a GPU a whole epoch is then made at once, on a CPU one batch at a time.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from avagrad.lab.data.cifar import SIDE, WANTED, Images, download_cifar, read_images
from avagrad.lab.models.small import SmallConv
from avagrad.lab.models.wide_resnet import WideResNet
from avagrad.lab.tasks.base import Batch, stream
from avagrad.lab.tasks.classification import Classification

PAD = 4
_EVALUATION_BATCH = 1000
_CHUNK = 5000  # images that are made at a time on a GPU: this takes a few times their memory


class Moves(NamedTuple):
    """The augmentation of an epoch's images, in their order: each may be flipped, then is shifted in its padding."""

    chosen: Tensor  # the image's number
    flipped: Tensor  # 1 or 0
    down: Tensor  # where the crop begins in the padded image, 0 to 8
    right: Tensor


class Epoch(NamedTuple):
    """An epoch: its moves and labels, and its images if they are all made at once."""

    moves: Moves
    labels: Tensor
    images: Tensor | None


def draw_moves(images: int, seed: int) -> Tensor:
    """Draw the augmentation of so many images, one row for each field of :class:`Moves`.

    >>> moves = draw_moves(1000, seed=0)
    >>> moves.shape, [(row.min().item(), row.max().item()) for row in moves]
    (torch.Size([4, 1000]), [(0, 999), (0, 1), (0, 8), (0, 8)])
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(images, generator=generator)
    flipped = torch.randint(2, (1, images), generator=generator)
    begins = torch.randint(2 * PAD + 1, (2, images), generator=generator)
    return torch.cat([chosen[None], flipped, begins])


def crop(padded: Tensor, moves: Moves) -> Tensor:
    """Crop the chosen images from the padded ones, (images, height, width, channels), and flip those to be flipped.

    >>> padded = torch.arange(40 * 40).reshape(1, 40, 40, 1)
    >>> both = crop(padded, Moves(*torch.tensor([[0, 0], [0, 1], [2, 2], [5, 5]])))
    >>> both.shape, both[:, 0, 0, 0] - 2 * 40
    (torch.Size([2, 32, 32, 1]), tensor([ 5, 34]))
    """
    _, height, width, channels = padded.shape
    steps = torch.arange(SIDE, device=padded.device)
    rows, columns = moves.down[:, None] + steps, moves.right[:, None] + steps
    # The padding is the same on both sides, so a crop of the flipped image is a flipped crop.
    columns = torch.where(moves.flipped[:, None] == 1, width - 1 - columns, columns)
    pixels = (moves.chosen[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]
    return padded.reshape(-1, channels).index_select(0, pixels.flatten()).view(-1, SIDE, SIDE, channels)


@dataclass(kw_only=True)
class Cifar(Classification):
    """CIFAR-10 or (``classes=100``) CIFAR-100, from ``data``.

    ``model`` is "wrn-D-W", a Wide ResNet, or "small", three convolutions; an ensemble trains hundreds of these at once.

    A tenth of the training images, the same for every seed, is for validation: 45,000 and 5,000 of the complete set.
    Training images are flipped with probability 1/2, padded by 4 black pixels, and cropped at random; all are
    normalised by each channel's mean and standard deviation over the images that are trained on.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("1", "2", "3", "4", "5"):
    ...         _ = Path(folder, f"data_batch_{name}.bin").write_bytes(bytes(3073) * 20)
    ...     _ = Path(folder, "test_batch.bin").write_bytes(bytes(3073) * 30)
    ...     task = Cifar(data=folder, batch_size=25, model="wrn-10-1")
    >>> task.steps_per_epoch, {part: len(labels) for part, (_, labels) in task.parts.items()}
    (3, {'train': 90, 'validation': 10, 'test': 30})
    >>> images, labels = task.batch(task.order(0), 2)
    >>> images.shape, labels.shape
    (torch.Size([25, 3, 32, 32]), torch.Size([25]))
    """

    name: ClassVar[str] = "cifar"
    batch_size: int = 128
    model: str = "wrn-28-4"
    classes: int = 10

    def __post_init__(self) -> None:
        self.require("classes", self.classes in (10, 100), "10 or 100")
        self.size = None if self.model == "small" else self._size()
        self.whole_epochs = self.on_cuda
        if self.data is None:
            raise ValueError(f"cifar: data is not given, but must be: the task has no default data. {WANTED}")
        if self.download:
            download_cifar(self.data, self.classes)
        images = read_images(self.data, self.classes)
        self.remarks = images.remarks
        self._take(images)
        self.check_batch_size()

    def _size(self) -> tuple[int, int]:
        """Return depth and width of a Wide ResNet from its name."""
        found = re.fullmatch(r"wrn-([1-9]\d{0,3})-([1-9]\d{0,3})", self.model, re.ASCII)
        depth, width = (int(number) for number in found.groups()) if found else (0, 0)
        deep = "wrn-D-W, with a depth D of 10, 16, 22, 28, ... (6n + 4) and a width W of at least 1"
        allowed = f"{deep}, such as wrn-28-4 and wrn-28-10; or small, three convolutions"
        self.require("model", depth >= 10 and depth % 6 == 4, allowed)
        return depth, width

    def _take(self, images: Images) -> None:
        """Split the images, move them to the device, and compute the mean and the standard deviation."""
        pixels, labels = (torch.from_numpy(array) for array in images.train)
        tests, test_labels = (torch.from_numpy(array) for array in images.test)
        if len(labels) < 10:
            raise ValueError(f"cifar: there are {len(labels)} images besides the test part, but must be at least 10.")
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(stream(0, "cifar", "parts")))
        validation, train = shuffled.tensor_split([len(labels) // 10])
        if self.full:
            train = torch.cat([train, validation])
        chosen = pixels.index_select(0, train)
        # Bytes are normalised in at least 32 bits, then rounded once.
        self.mean, self.std = (value.to(self.device, self.wide) for value in _statistics(chosen))
        side = SIDE + 2 * PAD
        self.padded = torch.zeros(len(train), side, side, 3, dtype=torch.uint8, device=self.device)
        inside = self.padded[:, PAD:-PAD, PAD:-PAD]
        inside.copy_(chosen)
        self.parts = {
            "train": (inside, labels[train].to(self.device)),
            "validation": (pixels[validation].to(self.device), labels[validation].to(self.device)),
            "test": (tests.to(self.device), test_labels.to(self.device)),
        }

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        return SmallConv(self.classes) if self.size is None else WideResNet(*self.size, self.classes)

    def order(self, epoch: int) -> Epoch:
        """Return an epoch: a function only of the seed and the number."""
        images, labels = self.parts["train"]
        drawn = draw_moves(len(images), stream(self.seed, "order", epoch)).to(self.device)
        moves = Moves(*drawn[:, : self.steps_per_epoch * self.batch_size])
        made = self._made_in_chunks(moves) if self.whole_epochs else None
        return Epoch(moves, labels[moves.chosen], made)

    def batch(self, order: Any, index: int) -> Batch:
        """Return one batch of an epoch: images and labels."""
        assert isinstance(order, Epoch)
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        if order.images is not None:
            return order.images[part], order.labels[part]
        return self._made(Moves(*(row[part] for row in order.moves))), order.labels[part]

    def _made(self, moves: Moves) -> Tensor:
        return self._normalised(crop(self.padded, moves))

    def _made_in_chunks(self, moves: Moves) -> Tensor:
        count = len(moves.chosen)
        made = torch.empty(
            (count, 3, SIDE, SIDE), dtype=self.dtype, device=self.device, memory_format=self.memory_format
        )
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            made[part] = self._made(Moves(*(row[part] for row in moves)))
        return made

    def _normalised(self, images: Tensor) -> Tensor:
        """Convert bytes, (images, height, width, 3), to the model's input, (images, 3, height, width)."""
        values = images.to(self.wide).sub_(self.mean).div_(self.std).to(self.dtype)
        return values.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)

    def scores(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return loss and error on the "validation" or the "test" part, on the device; the model is in eval mode."""
        images, labels = self.parts[part]
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, len(labels), _EVALUATION_BATCH):
            right = labels[start : start + _EVALUATION_BATCH]
            scores = model(self._normalised(images[start : start + _EVALUATION_BATCH])).to(self.wide)
            loss = F.cross_entropy(scores, right, reduction="sum")
            sums = sums + torch.stack([loss, (scores.argmax(1) != right).sum()])
        return sums[0] / len(labels), 100 * sums[1] / len(labels)


def _statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, from a histogram of its bytes."""
    values = torch.arange(256, dtype=torch.float64)
    found = []
    for channel in images.unbind(-1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = shares @ values
        std = (shares @ (values - mean).square()).sqrt()
        found.append(torch.stack([mean, std if std > 0 else torch.ones_like(std)]))  # all values are equal
    means, stds = torch.stack(found, 1)
    return means, stds
