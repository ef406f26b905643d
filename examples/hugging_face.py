"""Train a small GPT-2 by Hugging Face's Trainer with AvaStep: AdamW's lr, a warm-up from 0, and a checkpoint.

Run: python examples/hugging_face.py
     python examples/hugging_face.py runs/hugging_face/checkpoint-20     # resumes from there

Needs transformers and accelerate.
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from avagrad import create_optimizer
from avagrad.integrations import HuggingFaceCallback


def data(size: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return sequences in which each token follows from the one before it."""
    rows = [(torch.arange(16) * (1 + i % 3) + i) % 32 for i in range(size)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(folder: Path, steps: int = 40) -> Trainer:
    """Return a Trainer whose optimizer is ours; the schedule is the Trainer's."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="cosine",
        warmup_steps=4,  # the first step has lr 0
        max_grad_norm=1.0,
        save_steps=steps // 2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    # The lr is the optimizer's: the Trainer does not look at learning_rate and weight_decay then.
    optimizer = create_optimizer(model, "avastep", lr=3e-3, weight_decay=0.1)
    trainer = Trainer(model=model, args=arguments, train_dataset=data(), optimizers=(optimizer, None))
    trainer.add_callback(HuggingFaceCallback(trainer, every=10))
    return trainer


def main(folder: Path = Path("runs/hugging_face"), resume: Path | None = None) -> list[float]:
    """Train, from a checkpoint if one is given; return the losses that were logged, those before it too."""
    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(*main(resume=Path(sys.argv[1]) if len(sys.argv) > 1 else None))
