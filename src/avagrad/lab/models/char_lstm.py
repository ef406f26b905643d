"""The language model of the paper's Penn Treebank experiment: a 3-layer LSTM over characters.

It follows the AWD-LSTM (Merity, Keskar and Socher, 2018): embedding and output are tied, so the last layer is as wide
as the embedding; hidden-to-hidden weights, rows of the embedding, and activations are dropped, with masks that stay
the same over a whole sequence. The masks are drawn by :meth:`CharLSTM.draw_masks` and passed to ``forward``, so that
the caller controls the randomness, and many models can share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

State = tuple[Tensor, ...]  # h and c of each layer, in turn, each (batch, width)


@dataclass(frozen=True)
class Dropouts:
    """Dropout probabilities; the defaults are the paper's."""

    weight: float = 0.5  # of the hidden-to-hidden weights
    outside: float = 0.1  # of the first layer's input and of the last layer's output
    between: float = 0.25  # of the layers' other outputs
    embedding: float = 0.1  # of the rows of the embedding


class Masks(NamedTuple):
    """The dropout masks of one step, already divided by the probability of being kept."""

    embedding: Tensor  # (vocabulary, 1)
    activations: tuple[Tensor, ...]  # of the input, then of each layer's output: (batch, width)
    weights: tuple[Tensor, ...]  # each layer's hidden-to-hidden


class CharLSTM(nn.Module):
    """Embedding -> ``layers`` LSTM layers of ``hidden`` units, the last as wide as the embedding -> its transpose.

    13.8 million parameters at the paper's final size:

    >>> model = CharLSTM(vocabulary=50, embedding=200, hidden=1000)
    >>> sum(p.numel() for p in model.parameters())
    13787650
    >>> model = CharLSTM(vocabulary=5, embedding=4, hidden=8)
    >>> logits, state = model(torch.zeros(7, 2, dtype=torch.long), model.zero_state(2))
    >>> logits.shape
    torch.Size([7, 2, 5])

    With ``in_products`` a layer is written as matrix products, which run under ``torch.func.vmap``, unlike torch's own
    LSTM; the numbers are the same up to the last digits.
    """

    in_products = False

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 200,
        hidden: int = 1000,
        layers: int = 3,
        dropouts: Dropouts | None = None,
    ) -> None:
        super().__init__()
        self.dropouts = dropouts or Dropouts()
        self.widths = [embedding] + [hidden] * (layers - 1) + [embedding]
        self.embedding = nn.Parameter(torch.empty(vocabulary, embedding).uniform_(-0.1, 0.1))
        self.output_bias = nn.Parameter(torch.zeros(vocabulary))
        self.layers = nn.ModuleList(
            nn.LSTM(before, after) for before, after in zip(self.widths, self.widths[1:], strict=False)
        )

    def zero_state(self, batch: int) -> State:
        """Return the state at the start of a text."""
        like = self.embedding
        return tuple(like.new_zeros(batch, width) for width in self.widths[1:] for _ in range(2))

    def draw_masks(self, batch: int, generator: torch.Generator | None = None) -> Masks:
        """Draw the dropout masks of one step."""
        drop, like = self.dropouts, self.embedding

        def mask(shape: Sequence[int], p: float) -> Tensor:
            kept = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
            return kept.bernoulli_(1 - p, generator=generator).div_(1 - p)

        between = [drop.outside] + [drop.between] * (len(self.widths) - 2) + [drop.outside]
        return Masks(
            mask((like.shape[0], 1), drop.embedding),
            tuple(mask((batch, width), p) for width, p in zip(self.widths, between, strict=True)),
            tuple(mask(layer.weight_hh_l0.shape, drop.weight) for layer in self.layers),  # type: ignore[arg-type]
        )

    def forward(self, tokens: Tensor, state: State, masks: Masks | None = None) -> tuple[Tensor, State]:
        """Return the scores of each next character, (time, batch, vocabulary), and the state at the end."""
        embedding = self.embedding if masks is None else self.embedding * masks.embedding
        x = F.embedding(tokens, embedding)
        after: list[Tensor] = []
        if masks is not None:
            x = x * masks.activations[0]
        for i, layer in enumerate(self.layers):
            w_ih, w_hh, b_ih, b_hh = (
                getattr(layer, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            if masks is not None:
                w_hh = w_hh * masks.weights[i]
            h, c = (part.unsqueeze(0) for part in state[2 * i : 2 * i + 2])
            weights = [w_ih, w_hh, b_ih, b_hh]
            if self.in_products:
                x, h, c = _lstm(x, h, c, *weights)
            else:
                weights = _in_one_piece(weights) if x.is_cuda else weights
                x, h, c = torch.lstm(x, (h, c), weights, True, 1, 0.0, self.training, False, False)
            after += [h.squeeze(0), c.squeeze(0)]
            if masks is not None:
                x = x * masks.activations[i + 1]
        return F.linear(x, self.embedding, self.output_bias), tuple(after)


def _lstm(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer over (time, batch, width) like torch.lstm, with one product for all inputs and one per character."""
    gates, w_hh = F.linear(x, w_ih, b_ih + b_hh), w_hh.t()
    h, c, outputs = h[0], c[0], []
    for from_input in gates.unbind(0):
        enter, keep, new, leave = (from_input + h @ w_hh).chunk(4, -1)
        c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
        h = leave.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs), h.unsqueeze(0), c.unsqueeze(0)


def _in_one_piece(weights: list[Tensor]) -> list[Tensor]:
    """Copy weights to contiguous memory, as cuDNN needs them; it would do so itself, and warn."""
    whole = torch.cat([weight.flatten() for weight in weights])
    pieces = torch.split_with_sizes(whole, [weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]
