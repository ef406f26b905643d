"""Steps of our optimizers and of torch's, taken in turn: a step of each, one after the other, many times.

On a shared machine times vary between minutes by more than the methods differ. Steps taken in turn can be compared.

Run: python benchmarks/in_turn.py --json in-turn.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import avagrad
from avagrad import bench

OURS: dict[str, Callable[..., Any]] = {
    "AvaGrad": avagrad.AvaGrad,
    "AvaGradW": avagrad.AvaGradW,
    "AvaStep": avagrad.AvaStep,
}
# The first optimizer of a path is what the others are compared with.
PATHS: dict[str, dict[str, Callable[..., Any]]] = {
    "fused": {"torch AdamW": torch.optim.AdamW, "torch Adam": torch.optim.Adam, **OURS},
    "foreach": {"torch Adam": torch.optim.Adam, **OURS},
}


def medians(path: str, shapes: bench.Shapes, device: torch.device, *, steps: int, warm_up: int) -> dict[str, float]:
    """Return the median milliseconds of a step of each optimizer."""
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizers = {f"{name} {path}": make(params, **{path: True}) for name, make in PATHS[path].items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(warm_up + steps):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[warm_up:]) for name, values in times.items()}


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--sets", nargs="+", choices=list(bench.SETS), default=bench.fitting(torch.device("cpu")))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows: list[dict[str, Any]] = []
    for name in arguments.sets:
        for path in arguments.paths:
            counts = {"steps": arguments.steps, "warm_up": arguments.warm_up}
            found = medians(path, bench.SETS[name][0], device, **counts)
            first = next(iter(found.values()))
            rows += [
                {"parameters": name, "optimizer": optimizer, "milliseconds": value, "of_first": value / first}
                for optimizer, value in found.items()
            ]
    headings = ["parameters", "optimizer", "ms", "of torch's"]
    numbers = [(bench.cell(row["milliseconds"], 3), bench.cell(row["of_first"], 2)) for row in rows]
    lines = [[row["parameters"], row["optimizer"], *shown] for row, shown in zip(rows, numbers, strict=True)]
    print(bench.markdown(headings, lines))
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": bench.describe(device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
