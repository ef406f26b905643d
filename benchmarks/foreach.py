"""The foreach path compared with torch's foreach Adam on ResNet-50's parameters, steps taken in turn.

The time is the host's, which varies between machines and minutes by more than the methods differ: a step of each, one
after the other, is what can be compared.

Run: python benchmarks/foreach.py --json foreach.json
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

import avagrad
from avagrad import bench

WARM_UP, STEPS = 20, 100


def parameters(device: torch.device) -> list[Tensor]:
    """Return parameters with gradients."""
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in bench.SETS["resnet50"][0]]
    for p in params:
        p.grad = torch.randn_like(p)
    return list(params)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    makes = {"torch Adam": torch.optim.Adam, "AvaGrad": avagrad.AvaGrad, "AvaGradW": avagrad.AvaGradW}
    makes |= {"AvaStep": avagrad.AvaStep}
    optimizers = {name: make(parameters(device), foreach=True) for name, make in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(WARM_UP + STEPS):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name}: {value:.2f} ms, {value / medians['torch Adam']:.2f} of torch's")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": bench.describe(device), "ms": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
