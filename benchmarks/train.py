"""Seconds that an epoch of training takes, validation included: models, methods, with and without graph and compile.

Run: python benchmarks/train.py --cifar cifar-10-python.tar.gz --text ptb --json train.json
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from avagrad import bench
from avagrad.lab.config import configure
from avagrad.lab.folder import read_metrics
from avagrad.lab.run import Callback
from avagrad.lab.tasks import task_class
from avagrad.lab.train import train

Variant = tuple[str, str, str, dict[str, Any], dict[str, Any]]


def variants(cifar: str | None, text: str | None) -> list[Variant]:
    """Return what is measured: task, data, method, the task's options, and the run's."""
    found: list[Variant] = []
    if cifar:
        for model in ("wrn-28-4", "wrn-28-10"):
            methods = ("sgd", "adam", "avagrad", "avagradw", "delayed-adam")
            found += [("cifar", cifar, name, {"model": model}, {}) for name in methods]
            found.append(("cifar", cifar, "avagrad", {"model": model}, {"graph": False}))
            found.append(("cifar", cifar, "avagrad", {"model": model}, {"compile": True}))
    if text:
        found += [("chars", text, name, {}, {"preset": "paper"}) for name in ("sgd", "adam", "avagrad")]
        found.append(("chars", text, "avagrad", {}, {"preset": "paper", "graph": False}))
    return found


def described(variant: Variant) -> str:
    """Return what a variant is called on the command line, such as "cifar wrn-28-4 avagrad, graph"."""
    task, _, name, options, settings = variant
    words = ["graph"] if settings.get("graph", True) else ["no graph"]
    words += ["compiled"] if settings.get("compile") else []
    return ", ".join([" ".join([task, *options.values(), name]), *words])


class StepTimer(Callback):
    """Times the steps of an epoch from the first to the last, without validation."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began = steps, 0.0
        self.milliseconds: list[float] = []

    def on_step(self, done: int) -> None:
        """Look at the clock after an epoch's first step and after its last, when the device is done."""
        if done % self.steps == 1:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        elif done % self.steps == 0:
            torch.cuda.synchronize()
            self.milliseconds.append(1e3 * (time.perf_counter() - self.began) / (self.steps - 1))


def seconds_per_epoch(variant: Variant, epochs: int) -> dict[str, Any]:
    """Train for some epochs; the first, which compiles, chooses and records, does not count."""
    task, data, name, options, settings = variant
    settings = settings | {"epochs": epochs, "lr": 0.01, "eps": None if name == "sgd" else 0.1}
    config = configure(task, name, data=data, device="cuda", task_options=options, **settings)
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as place:
        task_options = {**config.task_options, "data": data, "device": "cuda"}
        timer = StepTimer(task_class(task)(**task_options).steps_per_epoch)
        train(config, place, callback=timer)
        rows = read_metrics(place)
    seconds = (rows[-1]["seconds"] - rows[0]["seconds"]) / (len(rows) - 1)
    return {
        "task": task,
        "model": options.get("model", "3-layer LSTM, 1000"),
        "method": name,
        "graph": config.graph,
        "compile": config.compile,
        "precision": config.precision,
        "seconds": seconds,
        "milliseconds": statistics.median(timer.milliseconds[1:]),
        "first": rows[0]["seconds"],
        "gigabytes": torch.cuda.max_memory_allocated() / 2**30,
    }


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key: [row[key] for row in rounds] for key in ("seconds", "milliseconds", "first", "gigabytes")}
    return rounds[0] | {key: statistics.median(values) for key, values in numbers.items()} | {"rounds": len(rounds)}


def main() -> None:
    """Measure, print one table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", help="CIFAR-10, in any form that the task reads")
    parser.add_argument("--text", help="Penn Treebank's folder, or a text file")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="measure all in turn, so often, and take medians")
    parser.add_argument("--only", nargs="+", default=[""], help='measure these, such as "wrn-28-4 avagrad, graph"')
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    every = [v for v in variants(arguments.cifar, arguments.text) if any(x in described(v) for x in arguments.only)]
    measured: dict[str, list[dict[str, Any]]] = {described(variant): [] for variant in every}
    for variant in every * arguments.rounds:
        try:
            row = seconds_per_epoch(variant, arguments.epochs)
        except RuntimeError as error:
            print(f"{described(variant)}: {str(error)[-1000:]}", flush=True)
        else:
            measured[described(variant)].append(row)
            print(json.dumps(row), flush=True)
    rows = [_median(rounds) for rounds in measured.values() if rounds]
    columns = ["task", "model", "method", "graph", "compile", "precision", "s an epoch", "ms a step", "first, s", "GB"]
    cells = [
        [
            *(str(row[key]) for key in ("task", "model", "method", "graph", "compile", "precision")),
            f"{row['seconds']:.2f}",
            f"{row['milliseconds']:.2f}",
            f"{row['first']:.1f}",
            f"{row['gigabytes']:.1f}",
        ]
        for row in rows
    ]
    facts = bench.describe(torch.device("cuda"))
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(bench.markdown(columns, cells))
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
