"""A bad batch: the loss times 1e4 in one step, in the middle of a training. How long does each method suffer?

    python benchmarks/shock.py --json results/shock.json

A one-layer LSTM on Python's own documentation, 1,200 steps, the shock at step 600, three seeds. Each method has an lr
from a line of its own, chosen without the shock. The loss is that of the training batches, a mean over 50 steps: before
the shock, right after it, and at the end; the same training without it is the comparison.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

import avagrad

STEPS, SHOCK_AT, WINDOW, SCALE = 1200, 600, 50, 1e4
LRS = (0.001, 0.003, 0.01, 0.03)
METHODS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "AdamW": (torch.optim.AdamW, LRS),
    "AvaGradW": (avagrad.AvaGradW, (3.0, 10.0, 30.0, 100.0)),
    "AvaStep": (avagrad.AvaStep, LRS),
    "AvaStep, clip_moment=10": (lambda p, **options: avagrad.AvaStep(p, clip_moment=10.0, **options), LRS),
}


class Model(nn.Module):
    """An LSTM over characters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, 48)
        self.lstm = nn.LSTM(48, 96, batch_first=True)
        self.out = nn.Linear(96, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        return self.out(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


def text() -> tuple[Tensor, int]:
    """Return Python's documentation as numbers, and how many there are."""
    characters = "".join(topics[key] for key in sorted(topics))
    names = {character: i for i, character in enumerate(sorted(set(characters)))}
    return torch.tensor([names[character] for character in characters]), len(names)


def train(make: Callable[..., Any], lr: float, seed: int, *, shock: bool) -> list[float]:
    """Return the loss of each step."""
    data, size = text()
    torch.manual_seed(seed)
    model = Model(size)
    opt = make(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for t in range(STEPS):
        starts = torch.randint(len(data) - 49, (16,))
        batch = torch.stack([data[i : i + 49] for i in starts.tolist()])
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.item())
        (loss * SCALE if shock and t == SHOCK_AT else loss).backward()  # type: ignore[no-untyped-call]
        opt.step()
    return losses


def main() -> None:
    """Train, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    out = parser.parse_args().json
    found = {}
    for name, (make, lrs) in METHODS.items():
        ends = {lr: statistics.mean(train(make, lr, 0, shock=False)[-WINDOW:]) for lr in lrs}
        lr = min(ends, key=ends.__getitem__)
        row: dict[str, Any] = {"lr": lr}
        for shock in (False, True):
            runs = [train(make, lr, seed, shock=shock) for seed in (0, 1, 2)]
            for part, first in (("before", SHOCK_AT - WINDOW), ("after", SHOCK_AT + 1), ("at the end", STEPS - WINDOW)):
                means = [statistics.mean(losses[first : first + WINDOW]) for losses in runs]
                row[f"{'with' if shock else 'without'}, {part}"] = round(statistics.mean(means), 4)
        found[name] = row
        print(name, row, flush=True)
    if out is not None:
        about = {"torch": str(torch.__version__), "avagrad": avagrad.__version__}
        out.write_text(json.dumps({"about": about, "nats per character": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
