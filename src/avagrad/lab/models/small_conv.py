"""A small network for CIFAR, for ensembles of hundreds."""

import torch  # noqa: F401  (for the examples)
from torch import Tensor, nn

__all__ = ["SmallConv"]


class SmallConv(nn.Module):
    """Three 3 x 3 convolutions, the last two strided, BatchNorm and ReLU after each, average pool, one linear layer.

    >>> sum(p.numel() for p in SmallConv().parameters())
    24346
    >>> SmallConv(100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for before, after, stride in zip(channels, channels[1:], (1, 2, 2), strict=False):
            layers.append(nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False))
            layers += [nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.classify(self.features(images).mean((2, 3)))
        return scores
