"""Memory and time of a whole training step, with and without stepping in backward, on a transformer like GPT-2 medium.

MB are 2**20 bytes. Memory is what torch has allocated above the parameters and the optimizer's state.

Run: python benchmarks/backward.py --json backward.json
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import avagrad
from avagrad import bench

WARM_UP, STEPS, ROUNDS = 3, 5, 9
Megabytes = tuple[float | None, float | None, float | None]
ORDINARY = "AvaGrad"  # which the others are compared with


class Block(nn.Module):
    """Causal attention in heads of 64, and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next layer's input."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder whose output projection is its embedding of tokens."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight)


@dataclass
class Row:
    """One way to train at one batch size."""

    tokens: str  # batch x length
    variant: str
    milliseconds: float  # of a whole step: forward, backward and optimizer
    of_ordinary: float  # the same over the ordinary AvaGrad step
    peak_megabytes: float | None  # at most during a step
    after_backward_megabytes: float | None  # at the end of backward, before the optimizer's step
    between_steps_megabytes: float | None  # what stays with no gradient alive: cuBLAS's and the optimizer's workspaces
    loss: float  # after the warm-up; nearly the same for both ways of AvaGrad


class Training:
    """A model and its optimizer, which steps after backward or within it."""

    def __init__(self, model: Callable[[], nn.Module], make: Callable[[Iterable[Tensor]], Any], within: bool) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.opt = make(self.model.parameters())
        self.within = within

    def stepping(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context to train in."""
        return self.opt.step_in_backward() if self.within else contextlib.nullcontext()

    def loss(self, tokens: Tensor) -> Tensor:
        """Run forward, in bfloat16 on CUDA."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
            logits = self.model(tokens[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def finish(self) -> None:
        """Run what follows backward: the optimizer's step, and freeing the gradients that are still there."""
        self.opt.step()
        if not self.within:
            self.opt.zero_grad(set_to_none=True)

    def steps(self, tokens: Tensor, count: int) -> None:
        """Run some whole steps back to back."""
        with self.stepping():
            for _ in range(count):
                self.loss(tokens).backward()  # type: ignore[no-untyped-call]
                self.finish()

    def known_bytes(self) -> int:
        """Return the bytes of the parameters and the optimizer's state on the parameters' device."""
        params = list(self.model.parameters())
        state = [x for s in self.opt.state.values() for x in s.values() if isinstance(x, Tensor)]
        storages = [x.untyped_storage() for x in params + state if x.device == params[0].device]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # shared ones count once

    def memory(self, tokens: Tensor) -> tuple[float, Megabytes]:
        """Return the loss, and MB at the peak of a step, after its backward and after it; with nothing else alive."""
        self.steps(tokens, WARM_UP)
        if tokens.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        known = self.known_bytes() + tokens.numel() * tokens.element_size()
        with self.stepping():
            loss = self.loss(tokens)
            value = loss.item()
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            after = torch.cuda.memory_allocated() if tokens.is_cuda else None
            self.finish()
        if after is None:
            return value, (None, None, None)
        torch.cuda.synchronize()
        peak, between = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        return value, ((peak - known) / 2**20, (after - known) / 2**20, (between - known) / 2**20)

    def time(self, tokens: Tensor) -> float:
        """Return milliseconds of a step, over some steps."""
        if not tokens.is_cuda:
            start = time.perf_counter()
            self.steps(tokens, STEPS)
            return (time.perf_counter() - start) / STEPS * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        self.steps(tokens, STEPS)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / STEPS


def variants(model: Callable[[], nn.Module]) -> dict[str, Callable[[], Training]]:
    """Return the ways to train."""

    def ava(params: Iterable[Tensor]) -> Any:
        return avagrad.AvaGrad(params, lr=0.1, fused=True)

    return {
        ORDINARY: lambda: Training(model, ava, within=False),
        "AvaGrad in backward": lambda: Training(model, ava, within=True),
        "torch AdamW fused": lambda: Training(model, lambda p: torch.optim.AdamW(p, fused=True), within=False),
    }


def free(device: torch.device) -> None:
    """Give back what deleted models held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(ways: dict[str, Callable[[], Training]], tokens: Tensor) -> list[Row]:
    """Measure memory with one model alive at a time, then time with all alive and in turn, so that drift hits all."""
    found = {}
    for name, make in ways.items():
        free(tokens.device)
        found[name] = make().memory(tokens)
    free(tokens.device)
    trainings = {name: make() for name, make in ways.items()}
    for training in trainings.values():
        training.steps(tokens, WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, training in trainings.items():
            times[name].append(training.time(tokens))
    medians = {name: statistics.median(values) for name, values in times.items()}
    size = f"{tokens.shape[0]} x {tokens.shape[1] - 1}"
    rows = []
    for name, (loss, megabytes) in found.items():
        rows.append(Row(size, name, medians[name], medians[name] / medians[ORDINARY], *megabytes, loss))
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        [
            row.tokens,
            row.variant,
            bench.cell(row.milliseconds, 2),
            bench.cell(row.of_ordinary, 3),
            bench.cell(row.peak_megabytes, 1),
            bench.cell(row.after_backward_megabytes, 1),
            bench.cell(row.between_steps_megabytes, 1),
            bench.cell(row.loss, 3),
        ]
        for row in rows
    ]
    headings = ["tokens", "variant", "ms", "of ordinary", "peak MB", "after backward MB", "between steps MB", "loss"]
    return bench.markdown(headings, lines)


def main() -> None:
    """Measure, print one table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024, help="64 for each head")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)

    def model() -> nn.Module:
        with device:
            return Transformer(arguments.layers, arguments.width, arguments.vocabulary, arguments.length)

    sizes = [p.numel() * p.element_size() / 2**20 for p in model().parameters()]
    rows = []
    for batch in arguments.batches:
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(arguments.vocabulary, (batch, arguments.length + 1), generator=rng).to(device)
        rows += measure(variants(model), tokens)
    about = bench.describe(device)
    everything, largest = sum(sizes), max(sizes)
    print(f"gradients {everything:.1f} MB, the largest {largest:.1f} MB; ", end="")
    print(f"largest + 5 % of all: {largest + 0.05 * everything:.1f} MB")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(table(rows))
    if arguments.json:
        found = {"about": about, "gradients_mb": everything, "largest_gradient_mb": largest}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
