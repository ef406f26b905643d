"""What the image tasks share: the loss, the error, and the memory format."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from avagrad.lab.tasks.base import Carry, Task

__all__ = ["Classification"]


@dataclass(kw_only=True)
class Classification(Task):
    """A task whose batches are images and their labels.

    >>> from avagrad.lab.tasks import task_class
    >>> issubclass(task_class("cifar"), Classification)
    True
    """

    measure: ClassVar[str] = "share of images that are classified wrongly, in %"
    unit: ClassVar[str] = "%"
    channels_last_on_cuda: ClassVar[bool] = True

    @property
    def wide(self) -> torch.dtype:
        """The precision of statistics and losses: the task's own, but at least 32 bits."""
        return torch.promote_types(self.dtype, torch.float32)

    @functools.cached_property
    def memory_format(self) -> torch.memory_format:
        """The memory format of the images and the model's weights."""
        on_cuda = torch.device(self.device).type == "cuda"
        return torch.channels_last if on_cuda and self.channels_last_on_cuda else torch.contiguous_format

    def new_model(self) -> nn.Module:
        """Make the model of this seed, on the device, in the memory format of the batches."""
        model = super().new_model()
        if self.memory_format is torch.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, ...], carry: Carry, noise: torch.Generator
    ) -> tuple[Tensor, Carry]:
        """Return the cross-entropy of a batch."""
        images, labels = batch
        return F.cross_entropy(model(images).to(self.wide), labels), carry
