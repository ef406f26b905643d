"""How much of AvaGrad's norm the largest 1 % of the rates make up, on a small character model and a small classifier.

Run: python benchmarks/heavy_tail.py (two minutes on one core)
"""

import pydoc_data.topics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from avagrad import AvaGrad

STEPS = 200


class CharacterModel(nn.Module):
    """Embedding, LSTM, and a linear layer to the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character at each position."""
        return self.head(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


def characters() -> tuple[nn.Module, Iterator[Tensor]]:
    """Return a character model and its losses, on CPython's own documentation."""
    text = "".join(pydoc_data.topics.topics.values())
    vocabulary = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([vocabulary[c] for c in text[:300_000]])
    model = CharacterModel(len(vocabulary))
    rng = torch.Generator().manual_seed(0)

    def losses() -> Iterator[Tensor]:
        while True:
            starts = torch.randint(len(data) - 51, (32,), generator=rng)
            rows = torch.stack([data[i : i + 51] for i in starts])
            yield nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return model, losses()


def classifier() -> tuple[nn.Module, Iterator[Tensor]]:
    """Return a classifier with constant inputs (as the corners of images are) and its losses."""
    rng = torch.Generator().manual_seed(0)
    teacher = torch.randn(64, 10, generator=rng)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    alive = (torch.arange(64) >= 8).float()

    def losses() -> Iterator[Tensor]:
        while True:
            x = torch.randn(128, 64, generator=rng) * alive
            yield nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))

    return model, losses()


def main() -> None:
    """Print a table of what ``diagnostics()`` says after some steps."""
    print(f"torch {torch.__version__}; after {STEPS} steps with lr 0.1")
    print("| task | eps | options | loss | gamma | share of the top 1 % | rates: median | largest |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    tasks: dict[str, Callable[[], tuple[nn.Module, Iterator[Tensor]]]] = {
        "classifier": classifier,
        "characters": characters,
    }
    for name, task in tasks.items():
        for eps in (1e-8, 1e-4, 0.1):
            for options in ({}, {"active_only": True}, {"active_only": True, "norm": 1}):
                torch.manual_seed(0)
                model, losses = task()
                opt = AvaGrad(model.parameters(), lr=0.1, eps=eps, **options)
                for _ in range(STEPS):
                    opt.zero_grad()
                    loss = next(losses)
                    loss.backward()  # type: ignore[no-untyped-call]
                    opt.step()
                said = opt.diagnostics()
                words = ", ".join(f"{key}={value}" for key, value in options.items()) or "the paper"
                share, rates = said["norm_share_of_top_1_percent"], (said["rate_median"], said["rate_max"])
                print(f"| {name} | {eps:g} | {words} | {loss.item():.2f} | {said['gamma']:.2g} ", end="")
                print(f"| {share:.0%} | {rates[0]:.2g} | {rates[1]:.2g} |", flush=True)


if __name__ == "__main__":
    main()
