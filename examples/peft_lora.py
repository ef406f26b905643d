"""Fine-tune a small Llama by LoRA with AvaStep, at the lr that AdamW has there, and with AdamW to compare.

Run: python examples/peft_lora.py

Needs transformers and peft.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from avagrad import create_optimizer


def sequences(seed: int, stride: int) -> torch.Tensor:
    """Return sequences that count by a stride."""
    first = torch.randint(32, (16, 1), generator=torch.Generator().manual_seed(seed))
    return (first + stride * torch.arange(16)) % 32


def pretrained() -> LlamaForCausalLM:
    """Return a model that counts by one. Yours is LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    optimizer = create_optimizer(model, "adamw", lr=1e-2)
    for step in range(60):
        tokens = sequences(step, stride=1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(name: str = "avastep", lr: float = 3e-3, steps: int = 60) -> list[float]:
    """Teach it to count by three, and return the losses."""
    model = get_peft_model(pretrained(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]  # the adapters alone have a state
    optimizer = create_optimizer(trained, name, lr=lr)
    losses = []
    for step in range(steps):
        tokens = sequences(step, stride=3)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for name in ("adamw", "avastep"):
        losses = main(name)
        print(name, *[f"{losses[step]:.3f}" for step in (0, 1, 2, 5, 10, 20, 30, 40, 50, 59)])
