"""Train with Accelerate and AvaStep: gradient accumulation, clipping, a warm-up, and a checkpoint.

Run: python examples/accelerate_loop.py, or on several devices: accelerate launch examples/accelerate_loop.py

Needs accelerate. Run it again: it resumes from the checkpoint.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from avagrad import create_optimizer


def main(folder: Path = Path("runs/accelerate"), epochs: int = 4) -> list[float]:
    """Train up to a number of epochs, from the checkpoint if there is one; return the losses of the batches seen."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(256, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)  # of each process
    optimizer = create_optimizer(model, "avastep", lr=1e-2, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 8))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if folder.exists():
        accelerator.load_state(str(folder))

    losses = []
    for _ in range(progress.epochs, epochs):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # a step of AvaStep in every second batch
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        progress.epochs += 1
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        print("gamma:", optimizer.optimizer.gamma())  # what Accelerate has wrapped is optimizer.optimizer
    accelerator.end_training()
    return losses


class Progress:
    """How many epochs there have been: saved and loaded with the rest."""

    epochs = 0

    def state_dict(self) -> dict[str, int]:
        """Return what is saved."""
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was saved."""
        self.epochs = state["epochs"]


if __name__ == "__main__":
    print(*[f"{loss:.3f}" for loss in main()])
