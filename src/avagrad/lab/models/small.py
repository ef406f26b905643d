"""Small networks, quick enough to train hundreds of them at once: for 8 x 8 digits, and for CIFAR."""

from collections.abc import Iterator

from torch import Tensor, nn


class DigitsMLP(nn.Sequential):
    """64-32-32-10, with BatchNorm after each hidden layer and no bias before it.

    A bias there would have no effect, and a gradient of rounding noise: its rates would spoil AvaGrad's norm.

    >>> import torch
    >>> DigitsMLP()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(64, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )


class DigitsConv(nn.Module):
    """Three 3 x 3 convolutions, the last two strided instead of pooled, BatchNorm after each, one linear layer.

    >>> import torch
    >>> DigitsConv()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(*convolutions(1, width), nn.Flatten())
        self.classify = nn.Linear(4 * width * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the ten digits."""
        scores: Tensor = self.classify(self.features(images))
        return scores


class SmallConv(nn.Module):
    """Three 3 x 3 convolutions, the last two strided, BatchNorm and ReLU after each, average pool, one linear layer.

    >>> import torch
    >>> sum(p.numel() for p in SmallConv().parameters())
    24346
    >>> SmallConv(100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(*convolutions(3, width))
        self.classify = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.classify(self.features(images).mean((2, 3)))
        return scores


def convolutions(before: int, width: int) -> Iterator[nn.Module]:
    """Make three 3 x 3 convolutions, the last two strided, with BatchNorm and ReLU after each."""
    for after, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        yield from (nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        before = after
