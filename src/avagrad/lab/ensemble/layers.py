"""Layers that are fast for a stack of models, under ``torch.func.vmap``."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.nn.modules.batchnorm import _BatchNorm

from avagrad.lab.models.char_lstm import CharLSTM
from avagrad.lab.models.gpt import GPT


class ProductConv(nn.Conv2d):
    """A convolution as one matrix product; with channels last, a stack of them is one batched product.

    Under vmap torch turns a stack of convolutions into a grouped one, for which there are few fast kernels.

    >>> x, layer = torch.randn(2, 3, 5, 5), ProductConv(3, 4, 3, stride=2, padding=1)
    >>> torch.allclose(layer(x), F.conv2d(x, layer.weight, layer.bias, stride=2, padding=1), atol=1e-6)
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of a convolution, with the channels last in memory."""
        assert not isinstance(self.padding, str)
        (high, wide), (down, right), (pad_y, pad_x) = self.kernel_size, self.stride, self.padding
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, pad_x, pad_x, pad_y, pad_y))
        rows, columns = (x.shape[1] - high) // down + 1, (x.shape[2] - wide) // right + 1
        # Slices, not Tensor.unfold: the gradient of a slice is a sum that a compiler fuses. A few at a time: with more
        # than 8 it makes a kernel for each.
        x = torch.cat([x[:, :, j : j + (columns - 1) * right + 1 : right] for j in range(wide)], -1)
        x = torch.cat([x[:, i : i + (rows - 1) * down + 1 : down] for i in range(high)], -1)
        patches, weight = x.flatten(0, 2), self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        if patches.is_cuda and (lacking := -len(weight) % 8):  # tensor cores need rows of a multiple of 16 bytes
            patches, weight = F.pad(patches, (0, lacking)), F.pad(weight, (0, 0, 0, lacking))
        y = patches @ weight if self.bias is None else patches @ weight + self.bias
        return y.view(-1, rows, columns, self.out_channels).permute(0, 3, 1, 2)


class PlainBatchNorm(_BatchNorm):
    """BatchNorm as single operations, for any memory format.

    Under vmap torch's own copies the members' channels together and back, which costs more than everything else; and a
    compiler can fuse these operations.

    >>> x, layer, other = torch.randn(8, 3, 5, 5), PlainBatchNorm(3), nn.BatchNorm2d(3)
    >>> torch.allclose(layer(x), other(x), atol=1e-5), torch.allclose(layer.running_var, other.running_var)
    (True, True)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of BatchNorm, and update its statistics."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        others = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            mean = x.mean(others)
            centred = x - mean.view(shape)
            # The derivative of the variance by the mean is 0 (a sum of centred values). Detached, one pass over memory
            # is enough for all sums of the backward pass.
            away = x - mean.detach().view(shape)
            var = (away * away).mean(others)
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean)
                self.running_var.mul_(1 - self.momentum).add_(self.momentum * count / (count - 1) * var)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
        else:
            centred, var = x - self.running_mean.view(shape), self.running_var
        factor = (var + self.eps).rsqrt() * self.weight
        return torch.addcmul(self.bias.view(shape), centred, factor.view(shape)).to(dtype)


def stackable(model: nn.Module, *, in_products: bool = False) -> nn.Module:
    """Return the model with its layers changed to ones that run under vmap; parameters and buffers are unchanged.

    With ``in_products`` convolutions are matrix products: faster on a GPU, and with a compiler.
    """
    for layer in model.modules():
        if isinstance(layer, CharLSTM | GPT):
            layer.in_products = True
        elif in_products and type(layer) is nn.Conv2d and _is_plain(layer):
            layer.__class__ = ProductConv  # its attributes stay the same
        elif in_products and type(layer) is nn.BatchNorm2d and _is_usual(layer):
            layer.__class__ = PlainBatchNorm  # type: ignore[assignment]
    return model


def _is_plain(layer: nn.Conv2d) -> bool:
    simple = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return simple and not isinstance(layer.padding, str)


def _is_usual(layer: _BatchNorm) -> bool:
    return layer.track_running_stats and layer.affine and layer.momentum is not None
