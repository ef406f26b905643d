"""A decoder-only transformer: pre-norm blocks, learned positions, no biases (Radford et al., 2019)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

_STD = 0.02  # of the initial weights


class GPT(nn.Module):
    """Token and position embedding -> ``layers`` blocks of attention and MLP -> normalisation -> output.

    The output is the transpose of the token embedding if ``tied``, else a separate matrix. 12 blocks of width 768 have
    85 million parameters:

    >>> model = GPT(vocabulary=96, context=512, layers=12, heads=12, width=768)
    >>> sum(p.numel() for p in model.blocks.parameters())
    84953088
    >>> model = GPT(vocabulary=5, context=8, layers=1, heads=2, width=4)
    >>> model(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 8, 5])

    With ``in_products`` attention is written as matrix products, which run under ``torch.func.vmap``; the numbers are
    the same up to the last digits.
    """

    in_products = False

    def __init__(
        self, vocabulary: int, context: int, layers: int, heads: int, width: int, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.output = nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # projections to the residual stream are smaller, since it is a sum over all blocks
                is_last = name.endswith(("attend.weight", "shrink.weight"))
                nn.init.normal_(p, std=_STD / math.sqrt(2 * layers) if is_last else _STD)
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of each next token, (batch, time, vocabulary); ``tokens`` are (batch, time)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.heads, self.in_products)
        scores: Tensor = self.output(self.norm(x))
        return scores


class Block(nn.Module):
    """Attention and an MLP four times as wide, each with its normalisation before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attend = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, heads: int, in_products: bool = False) -> Tensor:
        """Return the residual stream, (batch, time, width), after this block."""
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        attention = causal_attention if in_products else _fused_attention
        x = x + self.attend(attention(q, k, v).transpose(1, 2).flatten(-2))
        added: Tensor = self.shrink(F.gelu(self.expand(self.norm_2(x))))
        return x + added


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal scaled_dot_product_attention: each token attends to itself and those before it."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
    return torch.softmax(scores.masked_fill(later, -math.inf), -1) @ v
