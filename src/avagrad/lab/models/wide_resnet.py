"""The network of the paper's CIFAR experiments: a Wide ResNet (Zagoruyko and Komodakis, 2016), without dropout.

The initialisation is that of the authors' code: convolutions normal with variance 2 / (k k outputs), He's rule for the
backward pass ("fan-out"), BatchNorm with scale 1 and shift 0, the linear layer as torch's but with a bias of zero.
"""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)


class WideBlock(nn.Module):
    """Twice BatchNorm, ReLU and a 3 x 3 convolution, and a shortcut around them.

    If the shape changes, the shortcut is a 1 x 1 convolution of the output of the first BatchNorm and ReLU.
    """

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        changes = before != after or stride != 1
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the shortcut and the convolutions' output."""
        active = F.relu(self.bn1(x))
        skipped = x if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return added + skipped


class WideResNet(nn.Module):
    """A convolution, three groups of blocks, ``width`` times as wide as a ResNet's, average pool, linear layer.

    >>> import torch
    >>> with torch.device("meta"):
    ...     models = WideResNet(28, 4), WideResNet(28, 10)
    >>> [sum(p.numel() for p in model.parameters()) for model in models]
    [5849050, 36479194]
    >>> WideResNet(10, 1, classes=100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, depth: int = 28, width: int = 4, classes: int = 10) -> None:
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"depth is {depth}, but must be 6n + 4 with n of at least 1: 10, 16, 22, 28, 34, 40, ...")
        if width < 1:
            raise ValueError(f"width is {width}, but must be at least 1.")
        super().__init__()
        blocks = (depth - 4) // 6
        channels = (16, 16 * width, 32 * width, 64 * width)
        self.conv = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.groups = nn.Sequential(
            *(
                nn.Sequential(WideBlock(before, after, stride), *(WideBlock(after, after) for _ in range(blocks - 1)))
                for before, after, stride in zip(channels, channels[1:], (1, 2, 2), strict=False)
            )
        )
        self.bn = nn.BatchNorm2d(channels[-1])
        self.fc = nn.Linear(channels[-1], classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = F.relu(self.bn(self.groups(self.conv(images))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores
