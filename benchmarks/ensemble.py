"""What training a whole grid at once saves, against one run after the other.

``digits`` (a CPU): all points by the ensemble, a sample of them by the trainer's loop, in turn; no start-up.
``cifar`` (a GPU): milliseconds that a step takes for all members together, on images that are drawn at random.

Run: python benchmarks/ensemble.py digits --threads 2 --json ensemble-cpu.json
     python benchmarks/ensemble.py cifar --members 441 --conv bmm --steps 20
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from avagrad import bench
from avagrad.lab.config import Config, configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.ensemble.stack import Stack
from avagrad.lab.environment import computing_with, seeded
from avagrad.lab.methods import method
from avagrad.lab.tasks.cifar import Cifar
from avagrad.lab.train import train
from avagrad.tune.space import Axis, Cell, Point, Space, axis

STEPS_PER_EPOCH = 45_000 // 128


def cells_of(optimizer: str) -> tuple[Cell, ...]:
    """Return the paper's grid for a method."""
    lr, eps = axis("paper", "lr"), axis("paper", "eps") if method(optimizer).has_eps else None
    assert isinstance(lr, Axis)
    return Space(lr, eps).cells()


# --- digits, on a CPU ---


def digits_config(optimizer: str, cell: Cell, threads: int) -> Config:
    """Return a run of the `quick` preset."""
    return configure("digits", optimizer, lr=cell.lr, eps=cell.eps, threads=threads)


def seconds_of_the_ensemble(optimizer: str, cells: tuple[Cell, ...], threads: int) -> float:
    """Train all points together."""
    with tempfile.TemporaryDirectory() as place:
        points = [Point(*cell, 0) for cell in cells]
        records = train_ensemble(digits_config(optimizer, cells[0], threads), points, place)
    return sum(record.seconds or 0.0 for record in records)


def seconds_of_a_run(optimizer: str, sample: list[Cell], threads: int) -> float:
    """Train some points one after the other; return the mean, without those that diverge and end early."""
    found = []
    for cell in sample:
        with tempfile.TemporaryDirectory() as place:
            result = train(digits_config(optimizer, cell, threads), place)
        if result["status"] == "finished":
            found.append(float(result["seconds"]))
    return statistics.mean(found)


def seconds_of_one_of_two_runs(optimizer: str, sample: list[Cell]) -> float:
    """Train some points in each of two processes of one thread at the same time; return the mean."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import ensemble as e; from avagrad.tune.space import Cell"
    )
    code += "; print(e.seconds_of_a_run(sys.argv[2], [Cell(*c) for c in json.loads(sys.argv[3])], 1))"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), optimizer, json.dumps(sample)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return statistics.mean(float(process.communicate()[0]) for process in both)


def digits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in turn, some rounds, and return medians."""
    optimizer, threads = arguments.optimizer, arguments.threads
    cells = cells_of(optimizer)
    sample = list(cells[:: max(1, len(cells) // arguments.sample)])
    rows = []
    seconds_of_the_ensemble(optimizer, cells[:2], threads)  # what is loaded and made once
    for _ in range(arguments.rounds):
        row = {
            "ensemble": seconds_of_the_ensemble(optimizer, cells, threads),
            "one": seconds_of_a_run(optimizer, sample, threads) * len(cells),
            "two": seconds_of_one_of_two_runs(optimizer, sample) * len(cells) / 2,
        }
        row |= {"factor": row["one"] / row["ensemble"], "factor_two": row["two"] / row["ensemble"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    columns = ["method", "points", "ensemble, s", f"one process, {threads} threads, s", "factor"]
    columns += ["two processes, 1 thread each, s", "factor"]
    numbers = [medians[key] for key in ("ensemble", "one", "factor", "two", "factor_two")]
    print(bench.markdown(columns, [[optimizer, str(len(cells)), *(f"{number:.1f}" for number in numbers)]]))
    return {"method": optimizer, "points": len(cells), "threads": threads, "rounds": rows, **medians}


# --- CIFAR, on a GPU ---


def draw_images(folder: Path, count: int = 400) -> None:
    """Write binary files as CIFAR's, of random bytes."""
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = torch.randint(10, (count, 1), generator=generator)
        pixels = torch.randint(256, (count, 3072), generator=generator)
        (folder / f"{name}.bin").write_bytes(torch.cat([labels, pixels], 1).to(torch.uint8).numpy().tobytes())


def cifar(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time some steps of a stack of small networks, after those that compile and record."""
    on_cuda = arguments.device.startswith("cuda")
    with tempfile.TemporaryDirectory() as place:
        draw_images(Path(place))
        options: dict[str, Any] = {"data": place, "task_options": {"model": "small"}, "device": arguments.device}
        options |= {"precision": arguments.precision if on_cuda else "float32", "epochs": 1}
        cells = itertools.islice(itertools.cycle(cells_of(arguments.optimizer)), arguments.members)
        every = [configure("cifar", arguments.optimizer, lr=cell.lr, eps=cell.eps, **options) for cell in cells]
        task = Cifar(model="small", data=place, device=arguments.device)
    with computing_with(torch.get_num_threads(), precision=every[0].precision):
        forms = {"compile": arguments.compile, "graph": arguments.graph and on_cuda}
        members = Stack(task, every, seeded(0, arguments.device), in_products=arguments.conv == "bmm", **forms)
        members.begin(0)
        order, per_epoch = task.order(0), task.steps_per_epoch
        _wait(on_cuda)
        began = time.perf_counter()
        for i in range(5):
            members.step(task.batch(order, i % per_epoch))
        _wait(on_cuda)
        first = time.perf_counter() - began
        rounds = []
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            for i in range(arguments.steps):
                members.step(task.batch(order, i % per_epoch))
            _wait(on_cuda)
            rounds.append(1e3 * (time.perf_counter() - began) / arguments.steps)
        began = time.perf_counter()
        members.scores("validation", -(-arguments.members // 8))
        _wait(on_cuda)
        scored = time.perf_counter() - began
    step = statistics.median(rounds)
    row = {
        "members": arguments.members,
        "method": arguments.optimizer,
        "convolution": arguments.conv,
        **forms,
        "precision": every[0].precision,
        "milliseconds": step,
        "epoch_seconds": step * STEPS_PER_EPOCH / 1e3,
        "first_steps_seconds": first,
        "seconds_to_score_5000_images": scored * 5000 / len(task.parts["validation"][1]),
        "gigabytes": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None,
    }
    print(json.dumps(row), flush=True)
    return row


def _wait(on_cuda: bool) -> None:
    if on_cuda:
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("digits", "cifar"))
    parser.add_argument("--optimizer", default="avagrad")
    parser.add_argument("--rounds", type=int, default=3, help="measure in turn, so often, and take medians")
    parser.add_argument("--threads", type=int, default=2, help="digits: of the ensemble and of the one process")
    parser.add_argument("--sample", type=int, default=5, help="digits: so many points by the trainer's loop")
    parser.add_argument("--members", type=int, default=441, help="cifar: networks trained together")
    parser.add_argument("--steps", type=int, default=20, help="cifar: steps in a round")
    parser.add_argument("--conv", choices=("grouped", "bmm"), default="bmm")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    row = digits(arguments) if arguments.what == "digits" else cifar(arguments)
    if arguments.json:
        facts = bench.describe(torch.device("cpu" if arguments.what == "digits" else arguments.device))
        arguments.json.write_text(json.dumps({"about": facts, "row": row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
