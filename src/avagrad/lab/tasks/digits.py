"""Handwritten digits: 1,797 images of 8 x 8 pixels that come with scikit-learn. Quick enough for a full grid."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from avagrad.lab.models.small import DigitsConv, DigitsMLP
from avagrad.lab.tasks.base import Batch, stream
from avagrad.lab.tasks.classification import Classification
from avagrad.names import look_up

_MODELS: dict[str, type[nn.Module]] = {"mlp": DigitsMLP, "conv": DigitsConv}
# The split is the same for every seed: a choice made on the validation part is valid for all.
_VALIDATION, _TEST = 297, 500


@dataclass(kw_only=True)
class Digits(Classification):
    """1,000 images to train on, 297 for validation, 500 for the test; ``model`` is "mlp" or "conv".

    >>> task = Digits(batch_size=100)
    >>> task.steps_per_epoch, {part: len(labels) for part, (_, labels) in task.parts.items()}
    (10, {'train': 1000, 'validation': 297, 'test': 500})
    """

    name: ClassVar[str] = "digits"
    precision_on_cuda: ClassVar[str] = "float32"
    channels_last_on_cuda: ClassVar[bool] = False
    model: str = "mlp"

    def __post_init__(self) -> None:
        if self.data is not None or self.download:
            given = "download" if self.data is None else f"data is {self.data!r}, which"
            raise ValueError(f"digits: {given} is not allowed: the images come with scikit-learn.")
        self.require("batch_size", self.batch_size >= 2, "at least 2, for BatchNorm")
        self.make_model = look_up("digits: model", self.model, _MODELS)
        self.parts = self._load()
        self.check_batch_size()

    def _load(self) -> dict[str, tuple[Tensor, Tensor]]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ModuleNotFoundError(
                "digits: the images come with scikit-learn, which is not installed: pip install scikit-learn."
            ) from error
        raw = load_digits()
        images = torch.tensor(raw.data).reshape(-1, 1, 8, 8).to(self.dtype)
        labels = torch.tensor(raw.target)
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(stream(0, "digits", "parts")))
        test, validation, train = shuffled.tensor_split([_TEST, _TEST + _VALIDATION])
        if self.full:
            train = torch.cat([train, validation])
        mean, std = images[train].mean(), images[train].std()
        images = (images - mean) / std
        return {
            part: (images[index].to(self.device), labels[index].to(self.device))
            for part, index in (("train", train), ("validation", validation), ("test", test))
        }

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        return self.make_model()

    def order(self, epoch: int) -> Tensor:
        """Return a random order of the training images."""
        generator = torch.Generator().manual_seed(stream(self.seed, "order", epoch))
        return torch.randperm(self.training_images, generator=generator).to(self.device)

    def batch(self, order: Tensor, index: int) -> Batch:
        """Return one batch of an epoch: images and labels."""
        images, labels = self.parts["train"]
        chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
        return images[chosen], labels[chosen]

    def scores(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return loss and error on the "validation" or the "test" part, on the device; the model is in eval mode."""
        images, labels = self.parts[part]
        scores = model(images)
        wrong = (scores.argmax(1) != labels).double().mean()
        return F.cross_entropy(scores, labels).double(), 100 * wrong
