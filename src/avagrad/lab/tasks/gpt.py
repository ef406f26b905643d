"""A transformer that predicts the next token: of any text as characters, or of token files.

Without ``data`` the text is the documentation that comes with Python, as for ``chars``.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from avagrad.lab.data.texts import read_texts, read_tokens
from avagrad.lab.models.gpt import GPT
from avagrad.lab.tasks.base import Batch, Carry, Task, digest, stream

_ON_DEVICE = 2**32  # bytes of tokens that are moved to the device; more are read from the file, batch by batch
_GROUPS = 10  # of tokens, by frequency
_PIECE = 2**26  # tokens that are counted at a time


@dataclass(kw_only=True)
class Gpt(Task):
    """Predict the next token in windows of ``context`` tokens.

    ``data`` is a text file, a folder of Penn Treebank's files, or a folder with ``train.bin`` and ``val.bin`` (uint16
    tokens). The windows of a pass over the data do not overlap and are in random order; each pass has another
    offset. An epoch is ``steps`` batches, after which the loss is evaluated; 0 is a whole pass.
    """

    name: ClassVar[str] = "gpt"
    measure: ClassVar[str] = "bits per token"
    unit: ClassVar[str] = "bits"
    no_decay: ClassVar[bool] = True
    scores_in_batches: ClassVar[bool] = True
    batch_size: int = 32
    context: int = 64
    steps: int = 0
    layers: int = 2
    heads: int = 4
    width: int = 128
    tied: bool = True
    vocabulary: int = 0  # of token files; 0: the largest token plus 1
    eval_tokens: int = 2**20  # maximum from the validation part, and from the test part
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        self.require_at_least(1, "context", "layers", "heads", "width", "eval_tokens")
        self.require_at_least(0, "steps", "vocabulary")
        self.require("width", self.width % self.heads == 0, f"a multiple of heads, which is {self.heads}")
        self.require("download", not self.download, "False: pass a text file, or a folder of tokens")
        parts = self._read()
        if self.full:
            parts["train"] = numpy.concatenate([parts["train"], parts["validation"]])
        for part, tokens in parts.items():
            least = (2 if part == "train" else 1) * self.context + 1
            if len(tokens) < least:
                raise ValueError(
                    f"gpt: the {part} part has {len(tokens)} tokens, but needs at least {least} for a context of "
                    f"{self.context}: the text is empty, truncated, or too short."
                )
        self.parts = {part: self._placed(tokens) for part, tokens in parts.items()}
        # One window fewer than would fit: a pass may begin anywhere in the first.
        self.windows = (len(parts["train"]) - 1) // self.context - 1
        if self.batch_size > self.windows:
            raise ValueError(
                f"gpt: batch_size is {self.batch_size}, but there are only {self.windows} windows of {self.context} "
                "tokens to train on."
            )

    def _read(self) -> dict[str, Any]:
        if self.data is not None and not Path(self.data).exists():
            raise FileNotFoundError(
                f"gpt: data is {self.data!r}, which does not exist, but must be a text file, or a folder with "
                "train.bin and val.bin, or with Penn Treebank's files."
            )
        if self.data is not None and (parts := read_tokens(self.data)):
            self.remarks = ("the second half of val.bin is the test part.",)
            largest = max(int(tokens.max(initial=0)) for tokens in parts.values())
            allowed = f"at least {largest + 1}, or 0: there is the token {largest} in {self.data!r}"
            self.require("vocabulary", not 0 < self.vocabulary <= largest, allowed)
            self.size = self.vocabulary or largest + 1
            return parts
        self.require("vocabulary", self.vocabulary == 0, "0 for a text")
        texts = read_texts(self.data, self.encoding)
        self.size, self.remarks = len(texts.alphabet), texts.remarks
        return texts.parts

    def _placed(self, tokens: Any) -> Tensor:
        if tokens.dtype.itemsize > 2:
            tokens = tokens.astype(numpy.int32)
        elif tokens.dtype.itemsize == 2:
            tokens = tokens.view(numpy.int16)  # the same bits: torch supports few operations on uint16
        placed = torch.from_numpy(tokens)
        return placed.to(self.device) if tokens.nbytes <= _ON_DEVICE else placed

    def fingerprint(self) -> str:
        """Return a digest of the tokens."""
        return digest([*self.parts.values(), torch.tensor(self.size)])

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self.steps or self.windows // self.batch_size

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        return GPT(self.size, self.context, self.layers, self.heads, self.width, tied=self.tied)

    def order(self, epoch: int) -> Tensor:
        """Return the start positions of an epoch's windows, a row for each batch."""
        count = self.steps_per_epoch * self.batch_size
        begin, starts = epoch * count % self.windows, []
        for number in range(epoch * count // self.windows, ((epoch + 1) * count - 1) // self.windows + 1):
            generator = torch.Generator().manual_seed(stream(self.seed, "order", number))
            offset = torch.randint(self.context, (), generator=generator)
            starts.append(torch.randperm(self.windows, generator=generator) * self.context + offset)
        chosen = torch.cat(starts)[begin : begin + count]
        return chosen.view(-1, self.batch_size).to(self.parts["train"].device)

    def batch(self, order: Tensor, index: int) -> Batch:
        """Return one batch of an epoch: windows, and the same windows shifted by one token."""
        return self._windows("train", order[index])

    def _windows(self, part: str, starts: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.parts[part]
        places = starts[:, None] + torch.arange(self.context + 1, device=starts.device)
        found = _unsigned(tokens[places].to(self.device))
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def loss(self, model: nn.Module, batch: Batch, carry: Carry, noise: torch.Generator) -> tuple[Tensor, Carry]:
        """Return the cross-entropy of a batch in nats."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()), ()

    def _eval_starts(self, part: str) -> Tensor:
        """Return the start positions of windows, evenly spaced over a part; all of them if they are not too many."""
        tokens = self.parts[part]
        total = (len(tokens) - 1) // self.context
        wanted = min(total, max(1, self.eval_tokens // self.context))
        wanted -= wanted % self.batch_size if wanted > self.batch_size else 0  # one batch shape, for a compiler
        return torch.arange(wanted, device=tokens.device) * total // wanted * self.context

    def scores(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return loss and error on the "validation" or the "test" part, on the device; the model is in eval mode."""
        starts = self._eval_starts(part)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for some in torch.split(starts, self.batch_size):
            inputs, targets = self._windows(part, some)
            total = total + F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (len(starts) * self.context)
        return loss, loss / math.log(2)

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Return the bits per token of ten groups of tokens on the test part, from the most frequent to the rarest.

        Each group is about a tenth of the training text; if one token is more than that, the next groups are empty.
        Tokens that the training text does not contain belong to the rarest group.
        """
        counts = torch.zeros(self.size, dtype=torch.int64)
        for some in torch.split(self.parts["train"], _PIECE):
            counts += torch.bincount(_unsigned(some), minlength=self.size).cpu()
        frequent = counts.argsort(descending=True, stable=True)
        before = counts[frequent].cumsum(0) - counts[frequent]
        group = torch.empty_like(counts)
        group[frequent] = (before * _GROUPS // counts.sum()).clamp_(max=_GROUPS - 1)
        group = group.to(self.device)
        totals = torch.zeros(2, _GROUPS, dtype=torch.float64, device=self.device)
        for some in torch.split(self._eval_starts("test"), self.batch_size):
            inputs, targets = self._windows("test", some)
            losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none").double()
            groups = group[targets.flatten()]
            totals[0].index_add_(0, groups, losses)
            totals[1].index_add_(0, groups, torch.ones_like(losses))
        bits = (totals[0] / totals[1] / math.log(2)).tolist()
        return {"bits_by_frequency": [x if math.isfinite(x) else None for x in bits]}


def _unsigned(tokens: Tensor) -> Tensor:
    return tokens.long() & 0xFFFF if tokens.dtype == torch.int16 else tokens.long()
