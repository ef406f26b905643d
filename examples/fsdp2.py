"""Train with fully sharded parameters (FSDP2). AvaGrad's norm runs over the shards of all ranks by itself.

Run: torchrun --nproc-per-node 2 examples/fsdp2.py

On GPUs where there are any, else on the CPU. Run it again with another number of processes: it resumes from the
checkpoint, which knows nothing of how many there were.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from avagrad import AvaGrad

VOCABULARY, LENGTH, WIDTH = 16, 12, 32


class Model(nn.Module):
    """A small transformer that learns to say the token before each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of saying ``y`` to ``x``."""
        h = self.tokens(x) + self.places.weight
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def save(state: dict[str, Any], checkpoint: Path) -> None:
    """Save from all ranks, over a group whose threads end with it.

    DTensor caches the mesh, so the threads of the default group live until Python exits. A thread that then still
    holds a tensor aborts the process.
    """
    group = dist.new_group(backend="gloo")
    dcp.save(state, checkpoint_id=checkpoint, process_group=group)  # type: ignore[attr-defined]
    dist.destroy_process_group(group)


def main() -> None:
    """Load the checkpoint if there is one, train, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/fsdp2"))
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")  # torchrun has set what it needs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    torch.manual_seed(0)  # the same model on all ranks, before each keeps its shards
    model = Model().to(device)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AvaGrad(model.parameters(), lr=1.0, eps=0.1)  # after fully_shard, which replaces the parameters

    start = torch.zeros((), dtype=torch.int64)
    if args.checkpoint.exists():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": start}
        dcp.load(state, checkpoint_id=args.checkpoint)  # type: ignore[attr-defined]
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    random = torch.Generator().manual_seed(1000 * int(start) + rank)  # each rank has data of its own
    for step in range(int(start), args.steps):
        x = torch.randint(VOCABULARY, (16, LENGTH), generator=random).to(device)
        loss = model(x, x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(max(args.steps, int(start)))}
    save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
