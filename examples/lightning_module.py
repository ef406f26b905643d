"""Train with Lightning and AvaStep: a warm-up by steps, mixed precision, clipping, and a checkpoint.

Run: python examples/lightning_module.py
     python examples/lightning_module.py runs/lightning/checkpoints/last.ckpt 8    # resumes from there, to epoch 8

Needs lightning.
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from avagrad import create_optimizer
from avagrad.integrations import LightningCallback


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A small network that says which of four numbers is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule, which goes by steps: "epoch" is Lightning's default."""
        optimizer = create_optimizer(self, "avastep", lr=1e-2, weight_decay=0.1)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return 16 batches, the same in every run."""
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)


def main(folder: Path = Path("runs/lightning"), resume: Path | None = None, epochs: int = 4) -> list[float]:
    """Train up to an epoch, from a checkpoint if one is given; return the losses of the batches seen."""
    lightning.seed_everything(0, verbose=False)
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        precision="bf16-mixed",  # "16-mixed" goes with clipping, too
        gradient_clip_val=1.0,
        log_every_n_steps=8,
        logger=CSVLogger(folder, name=None),
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True), LightningCallback(every=16)],
        devices=1,
    )
    trainer.fit(module, data(), ckpt_path=resume)
    return module.losses


if __name__ == "__main__":
    given = sys.argv[1:]
    losses = main(resume=Path(given[0]) if given else None, epochs=int(given[1]) if len(given) > 1 else 4)
    print(*[f"{loss:.3f}" for loss in losses])
