"""CIFAR-10 and CIFAR-100: the paper's search for learning rate and epsilon, and its comparison of the best.

Images stay on the device as bytes. The augmentation of an epoch (order, flips, crops) is drawn on the CPU, from only
the seed and the epoch's number; on a GPU a whole epoch is then made at once, on a CPU one batch at a time.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from avagrad.lab.data.cifar import SIDE, WANTED, download_cifar, read_images
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
    """Draw the augmentation of so many images, one row for each field of :class:`Moves`."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(images, generator=generator)
    flipped = torch.randint(2, (1, images), generator=generator)
    begins = torch.randint(2 * PAD + 1, (2, images), generator=generator)
    return torch.cat([chosen[None], flipped, begins])


def crop(padded: Tensor, moves: Moves) -> Tensor:
    """Crop the chosen images from the padded ones, (images, height, width, channels), and flip those to be flipped."""
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
    """

    name: ClassVar[str] = "cifar"
    batch_size: int = 128
    model: str = "wrn-28-4"
    classes: int = 10

    def __post_init__(self) -> None:
        self.require("classes", self.classes in (10, 100), "10 or 100")
        found = re.fullmatch(r"wrn-([1-9]\d{0,3})-([1-9]\d{0,3})", self.model, re.ASCII)
        self.depth, self.width = (int(number) for number in found.groups()) if found else (0, 0)
        deep = "wrn-D-W, with a depth D of 10, 16, 22, 28, ... (6n + 4) and a width W of at least 1"
        allowed = f"{deep}, such as wrn-28-4 and wrn-28-10; or small, three convolutions"
        self.require("model", self.model == "small" or (self.depth >= 10 and self.depth % 6 == 4), allowed)
        self.whole_epochs = self.on_cuda
        if self.data is None:
            raise ValueError(f"cifar: data is not given, but must be: the task has no default data. {WANTED}")
        if self.download:
            download_cifar(self.data, self.classes)
        train_part, test_part, self.remarks = read_images(self.data, self.classes)
        pixels, labels = map(torch.from_numpy, train_part)
        if len(labels) < 10:
            raise ValueError(f"cifar: there are {len(labels)} images besides the test part, but must be at least 10.")
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(stream(0, "cifar", "parts")))
        validation, train = shuffled.tensor_split([len(labels) // 10])
        if self.full:
            train = torch.cat([train, validation])
        chosen = pixels.index_select(0, train)
        # Bytes are normalised in at least 32 bits, then rounded once.
        self.mean, self.std = _statistics(chosen).to(self.device, self.wide)
        side = SIDE + 2 * PAD
        self.padded = torch.zeros(len(train), side, side, 3, dtype=torch.uint8, device=self.device)
        inside = self.padded[:, PAD:-PAD, PAD:-PAD]
        inside.copy_(chosen)
        parts = {
            "train": (inside, labels[train]),
            "validation": (pixels[validation], labels[validation]),
            "test": map(torch.from_numpy, test_part),
        }
        self.parts = {name: tuple(tensor.to(self.device) for tensor in part) for name, part in parts.items()}
        self.check_batch_size()

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        if self.model == "small":
            return SmallConv(self.classes)
        return WideResNet(self.depth, self.width, self.classes)

    def order(self, epoch: int) -> Epoch:
        """Return an epoch: a function only of the seed and the number."""
        images, labels = self.parts["train"]
        drawn = draw_moves(len(images), stream(self.seed, "order", epoch)).to(self.device)
        drawn = drawn[:, : self.steps_per_epoch * self.batch_size]
        moves, made = Moves(*drawn), None
        if self.whole_epochs:
            made = torch.cat([self._made(Moves(*some)) for some in torch.split(drawn, _CHUNK, dim=1)])
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

    def _normalised(self, images: Tensor) -> Tensor:
        """Convert bytes, (images, height, width, 3), to the model's input, (images, 3, height, width)."""
        values = images.to(self.wide).sub_(self.mean).div_(self.std).to(self.dtype)
        return values.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)

    def scores(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return loss and error on the "validation" or the "test" part, on the device; the model is in eval mode."""
        count = len(self.parts[part][1])
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for some, right in zip(*(torch.split(each, _EVALUATION_BATCH) for each in self.parts[part]), strict=True):
            sums = sums + self.sums(model(self._normalised(some)), right)
        return sums[0] / count, 100 * sums[1] / count


def _statistics(images: Tensor) -> Tensor:
    """Return mean and standard deviation of each channel, from a histogram of its bytes."""
    values = torch.arange(256, dtype=torch.float64)
    found = []
    for channel in images.unbind(-1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = shares @ values
        std = (shares @ (values - mean).square()).sqrt()
        found.append((mean.item(), std.item() or 1.0))  # 0 if all values are equal
    return torch.tensor(found, dtype=torch.float64).t().contiguous()
