"""Train with AvaStep where AdamW was, in a plain PyTorch loop: a warm-up, gradient clipping, and a checkpoint.

Run: python examples/plain_pytorch.py

The lr, the schedule and the weight decay are AdamW's. Run it again: it resumes from the checkpoint.
"""

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from avagrad import create_optimizer


def main(checkpoint: Path = Path("runs/plain_pytorch.pt"), steps: int = 100) -> list[float]:
    """Train up to a number of steps, from the checkpoint if there is one; return the losses of the steps taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
    # Biases and norms do not decay. Or AvaStep(model.parameters(), lr=1e-2, weight_decay=0.1), for one group.
    optimizer = create_optimizer(model, "avastep", lr=1e-2, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 10))  # from 0 to lr in 10 steps

    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    losses = []
    for step in range(start, steps):
        random = torch.Generator().manual_seed(step)  # each step's data are the same in every run
        x = torch.randn(32, 16, generator=random)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())

    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**states, "step": max(start, steps)}, checkpoint)
    return losses


if __name__ == "__main__":
    print(*[f"{loss:.3f}" for loss in main()])
