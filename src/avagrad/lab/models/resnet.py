"""The network of the paper's ImageNet experiment: ResNet-50, as torchvision has it.

The stride of a block is in its 3 x 3 convolution (the original paper has it in the first 1 x 1). The names of the
parameters are torchvision's, so weights can be copied in both directions. So is the initialisation: convolutions
normal with variance 2 / (k k outputs), BatchNorm with scale 1 and shift 0, the linear layer as torch's.
"""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 (with the stride) and 1 x 1, each with BatchNorm, and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        middle = after // 4
        self.conv1 = nn.Conv2d(before, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential()
        if before != after:
            self.downsample.append(nn.Conv2d(before, after, 1, stride=stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the shortcut and the convolutions' output, after a ReLU."""
        added = F.relu(self.bn1(self.conv1(x)))
        added = F.relu(self.bn2(self.conv2(added)))
        added = self.bn3(self.conv3(added))
        return F.relu(added + self.downsample(x))


class ResNet(nn.Sequential):
    """ResNet-50: ``layers`` are the numbers of blocks in the four groups; (3, 4, 23, 3) is a ResNet-101.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = ResNet()
    >>> sum(p.numel() for p in model.parameters())
    25557032
    >>> ResNet(classes=10, layers=(1, 1, 1, 1), width=8)(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 1000, layers: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        if len(layers) != 4 or min(layers) < 1:
            raise ValueError(f"layers is {layers}, but must be four numbers of at least 1.")
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _group(width, 4 * width, layers[0], stride=1)
        self.layer2 = _group(4 * width, 8 * width, layers[1], stride=2)
        self.layer3 = _group(8 * width, 16 * width, layers[2], stride=2)
        self.layer4 = _group(16 * width, 32 * width, layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(32 * width, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _group(before: int, after: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Bottleneck(before, after, stride), *(Bottleneck(after, after) for _ in range(blocks - 1)))
