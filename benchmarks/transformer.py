"""Time and memory of a training step of the lab's transformer (task gpt), and its share of the GPU's bf16 rate.

Peak memory is what torch has allocated at most during a step, parameters and state included. The rate is that of a
product of two matrices of 8192 x 8192, on the same GPU. Operations are those of matrix products: 6 for each weight and
token, and of attention those below the diagonal.

Run: python benchmarks/transformer.py --preset base --json transformer.json
"""

import argparse
import dataclasses
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avagrad import bench
from avagrad.lab.config import Config, configure, optimizer_arguments
from avagrad.lab.methods import method
from avagrad.lab.stepping import GraphStep, Losses, Step
from avagrad.lab.tasks.gpt import Gpt
from avagrad.optim.param_groups import no_decay_groups

WARM_UP, STEPS = 8, 30


def milliseconds(work: Any, count: int) -> float:
    """Return the median time of a call on the GPU."""
    pairs = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs))


def dense_rate(size: int = 8192) -> float:
    """Return the bf16 operations of a plain matrix product in a second."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UP):
        a @ b
    return 2 * size**3 / milliseconds(lambda: a @ b, STEPS) * 1e3


def operations(task: Gpt) -> float:
    """Return the operations of a training step."""
    weights = 12 * task.layers * task.width**2 + task.size * task.width
    attention = task.layers * task.context * task.width
    return 6.0 * (weights + attention) * task.batch_size * task.context


class InBackward(Step):
    """Takes steps within backward."""

    def __call__(self, batch: tuple[Tensor, ...]) -> None:
        """Take a step."""
        with self.optimizer.step_in_backward():  # type: ignore[attr-defined]
            loss = self._forward(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()


def measure(config: Config, task: Gpt, way: str) -> dict[str, Any]:
    """Train for some steps and return what they took; ``way`` is "graph", "plain" or "in backward"."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = task.new_model()
    if config.compile:
        model.compile()
    params = no_decay_groups(model, weight_decay=config.weight_decay)
    optimizer = method(config.optimizer).build(params, optimizer_arguments(config), on_cuda=True)
    kind = {"graph": GraphStep, "plain": Step, "in backward": InBackward}[way]
    noise = torch.Generator(task.device).manual_seed(0)
    step = kind(task, model, optimizer, noise, Losses(task.device), clip=config.clip, precision=config.precision)
    batch = task.batch(task.order(0), 0)
    step.start(())
    for _ in range(WARM_UP):
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    taken = milliseconds(lambda: step(batch), STEPS)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"ms": taken, "peak_mb": None if way == "graph" else peak}  # what a graph holds is not in this count


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    rate, rows = dense_rate(), []
    print(f"dense bf16: {rate / 1e12:.0f} TFLOP/s")
    first = configure("gpt", "adamw", preset=arguments.preset, device="cuda", compile=not arguments.no_compile)
    task = Gpt(**first.task_options, device="cuda")
    for optimizer, way, clip in (
        ("adamw", "graph", 1.0),
        ("avastep", "graph", 1.0),
        ("adamw", "graph", None),
        ("avastep", "graph", None),
        ("adamw", "plain", None),
        ("avastep", "plain", None),
        ("avastep", "in backward", None),
    ):
        config = configure(
            "gpt", optimizer, preset=arguments.preset, device="cuda", compile=first.compile, no_clipping=clip is None
        )
        found = measure(config, task, way)
        share = operations(task) / (found["ms"] / 1e3) / rate
        tokens = task.batch_size * task.context / (found["ms"] / 1e3)
        row = {"optimizer": optimizer, "way": way, "clip": clip, **found, "tokens_per_second": tokens, "share": share}
        rows.append(row)
        print(", ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items()))
    if arguments.json:
        about = bench.describe(torch.device("cuda")) | {"dense_bf16": rate, "preset": arguments.preset}
        about |= {"compile": first.compile, "task": dataclasses.asdict(task) | {"dtype": str(task.dtype)}}
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
