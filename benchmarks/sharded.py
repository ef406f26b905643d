"""What a step costs where parameters are DTensors (fully_shard), compared with the same model with plain ones.

    torchrun --nproc-per-node 8 benchmarks/sharded.py --json sharded.json

Without torchrun it is one process, a group of one: what is measured then is the cost of DTensors, not of a network.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from avagrad import AvaGrad, AvaGradW, DelayedAdam, __version__

METHODS: dict[str, Callable[[Any], Optimizer]] = {
    "torch AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AvaGrad": AvaGrad,
    "AvaGradW": AvaGradW,
    "DelayedAdam": DelayedAdam,
}
ROUNDS, STEPS = 7, 20


def transformer(layers: int, width: int, device: str) -> nn.Sequential:
    """Return a stack of layers: 12 of width 768 are 144 tensors with 85 million parameters."""
    torch.manual_seed(0)
    made = (nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers))
    return nn.Sequential(*made).to(device)


def milliseconds(optimizer: Optimizer, device: str) -> tuple[float, float]:
    """Return the time of a step, and for how much of it the host is busy: medians."""

    def finished() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(5):
        optimizer.step()
    whole, host = [], []
    for _ in range(ROUNDS):
        began = finished()
        for _ in range(STEPS):
            optimizer.step()
        host.append((time.perf_counter() - began) / STEPS * 1e3)
        whole.append((finished() - began) / STEPS * 1e3)
    return statistics.median(whole), statistics.median(host)


def main() -> None:
    """Measure every method, with plain parameters and with sharded ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    rows = []
    for sharded in (False, True):
        for name, make in METHODS.items():
            model = transformer(args.layers, args.width, device)
            if sharded:
                for layer in model:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            params = list(model.parameters())
            for p in params:
                p.grad = torch.randn_like(p)
            whole, host = milliseconds(make(params), device)
            rows.append({"sharded": sharded, "optimizer": name, "milliseconds": whole, "host_milliseconds": host})
            if dist.get_rank() == 0:
                print(
                    f"{'fully_shard' if sharded else 'plain':12} {name:18} {whole:.3f} ms, host {host:.3f}", flush=True
                )
    if args.json is not None and dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        about = {"device": where, "ranks": dist.get_world_size(), "torch": torch.__version__, "avagrad": __version__}
        about |= {"tensors": len(params), "parameters": sum(p.numel() for p in params)}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
