"""What the image tasks share: the parts, the loss, the error, and the memory format."""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from avagrad.lab.tasks.base import Batch, Carry, Task, digest


@dataclass(kw_only=True)
class Classification(Task):
    """A task whose batches are images and their labels."""

    measure: ClassVar[str] = "share of images that are classified wrongly, in %"
    unit: ClassVar[str] = "%"
    channels_last_on_cuda: ClassVar[bool] = True
    parts: dict[str, Any] = field(init=False, repr=False)  # the labels of each part are the last of its arrays

    @property
    def training_images(self) -> int:
        """The number of images to train on."""
        return len(self.parts["train"][-1])

    def check_batch_size(self) -> None:
        """Reject a batch size for which there are too few images."""
        if self.batch_size > self.training_images:
            raise ValueError(
                f"{self.name}: batch_size is {self.batch_size}, but there are only {self.training_images} images to "
                "train on."
            )

    def fingerprint(self) -> str:
        """Return a digest of the data."""
        return digest(tensor for part in self.parts.values() for tensor in part)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch; an incomplete last one is dropped (BatchNorm)."""
        return self.training_images // self.batch_size

    @property
    def wide(self) -> torch.dtype:
        """The precision of statistics and losses: the task's own, but at least 32 bits."""
        return torch.promote_types(self.dtype, torch.float32)

    @functools.cached_property
    def memory_format(self) -> torch.memory_format:
        """The memory format of the images and the model's weights."""
        return torch.channels_last if self.on_cuda and self.channels_last_on_cuda else torch.contiguous_format

    def new_model(self) -> nn.Module:
        """Make the model of this seed, on the device, in the memory format of the batches."""
        model: nn.Module = super().new_model().to(memory_format=self.memory_format)  # type: ignore[call-overload]
        return model

    def sums(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of some images, and the number of errors."""
        scores = scores.to(self.wide)
        return torch.stack([F.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) != labels).sum()])

    def loss(self, model: nn.Module, batch: Batch, carry: Carry, noise: torch.Generator) -> tuple[Tensor, Carry]:
        """Return the cross-entropy of a batch."""
        images, labels = batch
        return F.cross_entropy(model(images).to(self.wide), labels), carry
