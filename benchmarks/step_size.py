"""The size of a step over eps, for Adam, AvaGrad and AvaStep: the same gradients, lr 1.

    python benchmarks/step_size.py --json results/step-size.json

The gradients are those of a small network on scikit-learn's digits, trained by Adam for 300 steps. Each method is then
given the last 100 of them at every eps; what is measured is the root mean square of its last step, over lr.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import avagrad

METHODS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AvaGrad": avagrad.AvaGrad,
    "AvaStep": avagrad.AvaStep,
}


def gradients() -> list[list[Tensor]]:
    """Return the gradients of the last 100 of 300 steps."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(x) for x in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(model.parameters())
    kept = []
    for t in range(300):
        batch = torch.randint(len(images), (64,))
        opt.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        opt.step()
        if t >= 200:
            kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return kept


def step_size(make: Any, eps: float, grads: list[list[Tensor]]) -> float:
    """Return the root mean square of the last step, at lr 1."""
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads[0]]
    opt = make(params, lr=1.0, eps=eps)
    before: list[Tensor] = []
    for now in grads:
        before = [p.detach().clone() for p in params]
        for p, g in zip(params, now, strict=True):
            p.grad = g.clone()
        opt.step()
    moves = torch.cat([(p.detach() - q).flatten() for p, q in zip(params, before, strict=True)])
    return moves.double().square().mean().sqrt().item()


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    out = parser.parse_args().json
    grads, epss = gradients(), [10.0 ** (k / 2) for k in range(-20, 9)]
    sizes = {name: [step_size(make, eps, grads) for eps in epss] for name, make in METHODS.items()}
    for name, values in sizes.items():
        print(f"{name}: {min(values):.3g} to {max(values):.3g}")
    if out is not None:
        about = {"torch": str(torch.__version__), "avagrad": avagrad.__version__}
        out.write_text(json.dumps({"about": about, "eps": epss, "rms of a step over lr": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
