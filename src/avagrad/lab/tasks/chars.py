"""Characters: the paper's language task, on Penn Treebank or on any text.

Without ``data`` the text is the documentation that comes with Python (``pydoc_data.topics``).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from avagrad.lab.data.texts import WANTED, download_penn_treebank, read_texts
from avagrad.lab.models.char_lstm import CharLSTM, Dropouts
from avagrad.lab.tasks.base import Batch, Carry, Task, digest

_EVALUATION_BATCH = 10


@dataclass(kw_only=True)
class Chars(Task):
    """Predict the next character, with the state carried from step to step through the whole text.

    The text is cut into ``batch_size`` rows that are read in parallel, ``bptt`` characters in a step. The default sizes
    are small, for a CPU; the presets have the paper's.
    """

    name: ClassVar[str] = "chars"
    measure: ClassVar[str] = "bits per character"
    unit: ClassVar[str] = "bits"
    precision_on_cuda: ClassVar[str] = "tf32"
    data_wanted: ClassVar[str | None] = WANTED
    scores_in_batches: ClassVar[bool] = True
    batch_size: int = 32
    bptt: int = 64
    embedding: int = 128
    hidden: int = 128
    layers: int = 1
    weight_drop: float = 0.0
    dropout_outside: float = 0.0
    dropout_between: float = 0.0
    dropout_embedding: float = 0.0
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        self.require_at_least(1, "bptt", "embedding", "hidden", "layers")
        for name in ("weight_drop", "dropout_outside", "dropout_between", "dropout_embedding"):
            self.require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        if self.download:
            if self.data is None:
                raise ValueError("chars: download is True, but data is not given: it must be the folder for the files.")
            download_penn_treebank(self.data)
        self.alphabet, parts, self.remarks = read_texts(self.data, self.encoding)
        idle = [("hidden", self.hidden != self.embedding), ("dropout_between", self.dropout_between > 0)]
        if names := [name for name, is_set in idle if is_set and self.layers == 1]:
            none = f"with one layer, which is as wide as the embedding, {' and '.join(names)} had no effect."
            self.remarks += (none,)
        if self.full:
            parts["train"] = numpy.concatenate([parts["train"], parts["validation"]])
        self.rows: dict[str, Tensor] = {}  # columns, (time, rows), so that a step reads a piece of each
        for part, tokens in parts.items():
            rows = self.batch_size if part == "train" else _EVALUATION_BATCH
            length = len(tokens) // rows
            if length < 2:  # one to read, one to predict
                raise ValueError(
                    f"chars: the {part} part has {len(tokens)} characters, but needs at least {2 * rows} "
                    f"({rows} rows of 2): the text is empty, truncated, or too short."
                )
            columns = torch.from_numpy(tokens[: length * rows]).view(rows, length).t()
            self.rows[part] = columns.contiguous().to(self.device)

    def fingerprint(self) -> str:
        """Return a digest of the text."""
        return digest([*self.rows.values(), torch.tensor([ord(letter) for letter in self.alphabet])])

    @property
    def steps_per_epoch(self) -> int:
        """The number of pieces of the rows; the last one may be shorter."""
        return math.ceil((len(self.rows["train"]) - 1) / self.bptt)

    def build(self) -> nn.Module:
        """Make the model, on the CPU, from torch's global generator."""
        dropouts = Dropouts(self.weight_drop, self.dropout_outside, self.dropout_between, self.dropout_embedding)
        return CharLSTM(len(self.alphabet), self.embedding, self.hidden, self.layers, dropouts)

    def batch(self, order: None, index: int) -> Batch:
        """Return the next piece of the rows, and the same piece shifted by one character."""
        return self._piece(self.rows["train"], index)

    def _piece(self, rows: Tensor, index: int) -> tuple[Tensor, Tensor]:
        start, stop = index * self.bptt, min((index + 1) * self.bptt, len(rows) - 1)
        return rows[start:stop].long(), rows[start + 1 : stop + 1].long()

    def start(self, model: nn.Module) -> Carry:
        """Return the state before the first character."""
        assert isinstance(model, CharLSTM)
        return model.zero_state(self.batch_size)

    def loss(self, model: nn.Module, batch: Batch, carry: Carry, noise: torch.Generator) -> tuple[Tensor, Carry]:
        """Return the cross-entropy of a piece in nats, and the state after it."""
        assert isinstance(model, CharLSTM)
        inputs, targets = batch
        logits, after = model(inputs, carry, model.draw_masks(self.batch_size, noise))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), tuple(part.detach() for part in after)

    def scores(self, model: nn.Module, part: str) -> tuple[Tensor, Tensor]:
        """Return loss and error on the "validation" or the "test" part, on the device; the model is in eval mode."""
        assert isinstance(model, CharLSTM)
        rows = self.rows[part]
        state, total = model.zero_state(rows.shape[1]), torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(math.ceil((len(rows) - 1) / self.bptt)):
            inputs, targets = self._piece(rows, index)
            logits, state = model(inputs, state)
            total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / ((len(rows) - 1) * rows.shape[1])
        return loss, loss / math.log(2)
