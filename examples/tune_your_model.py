"""Find the learning rate and epsilon of a model of your own.

Run: python examples/tune_your_model.py

The model, the data and the training loop are yours; the objective is what you wrote already, with two numbers from the
trial. Stop it with Ctrl-C, or kill it, and run it again: it resumes where it stopped.
"""

import argparse

import torch
from torch import nn

from avagrad import AvaStep
from avagrad.tune import Trial, tune


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points in the plane, and which of two spirals each is on."""
    random = torch.Generator().manual_seed(seed)
    turn = torch.rand(600, generator=random).sqrt() * 1.5 * torch.pi
    side = torch.arange(600) % 2
    angle = turn + side * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5
    return points + 0.02 * torch.randn(600, 2, generator=random), side


def objective(trial: Trial) -> float:
    """Train a network on some spirals, and return its loss on others."""
    assert trial.lr is not None
    assert trial.eps is not None
    torch.manual_seed(trial.seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = AvaStep(model.parameters(), lr=trial.lr, eps=trial.eps)
    (points, sides), (others, other_sides) = data(seed=1), data(seed=2)
    for step in range(500):
        batch = torch.randint(len(points), (64,))
        loss = nn.functional.cross_entropy(model(points[batch]), sides[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 49:
            trial.report(step + 1, loss.item())  # not a number: the trial ends here, and counts as diverged
    with torch.no_grad():  # not the error, which is the same for many models: 0
        return nn.functional.cross_entropy(model(others), other_sides).item()


def main() -> None:
    """Search, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", default="runs/spirals.journal")
    given = parser.parse_args()
    result = tune(objective, optimizer="avastep", storage=given.storage, workers=given.workers)
    print(result.summary())


if __name__ == "__main__":
    main()
