"""Keep the optimizer's state on the CPU between steps, with fully sharded parameters (FSDP2).

Run: torchrun --nproc-per-node 2 examples/fsdp2_offload.py

On GPUs where there are any, else on the CPU. The moments, two thirds of what AvaStep and its parameters need, are on
the GPU during a step alone. It trains with offloading and without: the losses are the same to the bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from avagrad import AvaStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def move_state(optimizer: AvaStep, device: str) -> None:
    """Move the moments of all parameters. Every rank calls this."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(device, copy=True)  # copied on the CPU as well, to show that it works there
    optimizer.refresh()  # lets go of the tensors that were moved, so that their memory is free


def train(offload: bool, steps: int = 20) -> list[float]:
    """Train, and return the losses of this rank."""
    torch.manual_seed(0)  # the same model on all ranks, before each keeps its shards
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    model: Any = nn.Sequential(*blocks, nn.Linear(32, 4)).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for block in [*blocks, model]:
        fully_shard(block, mesh=mesh)
    optimizer = AvaStep(model.parameters(), lr=1e-2, weight_decay=0.01)  # after fully_shard
    random = torch.Generator().manual_seed(dist.get_rank())  # each rank has data of its own
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=random).to(DEVICE)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if offload:
            move_state(optimizer, DEVICE)
        optimizer.step()
        if offload:
            move_state(optimizer, "cpu")
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float]]:
    """Train with offloading and without, and return the losses of both."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")  # torchrun has set what it needs
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    offloaded, kept = train(offload=True), train(offload=False)
    if dist.get_rank() == 0:
        print("offloaded", *offloaded)
        print("kept", *kept, flush=True)
    dist.destroy_process_group()
    return offloaded, kept


if __name__ == "__main__":
    main()
