"""How far the authors' public release is from the paper, by the description in docs/algorithm.md.

One small network is trained by the paper's rule and by the rule with each difference alone, from the same start on
the same batches, with the functions of avagrad.optim.rules. Run: python benchmarks/release.py
"""

from typing import Any

import torch
from torch import Tensor, nn

from avagrad.optim import no_decay_groups, rules
from avagrad.optim.rules import bias_correction_of

STEPS, BETA1, BETA2, DECAY = 300, 0.9, 0.999, 5e-4


def network(seed: int) -> nn.Module:
    """Return a network with the two groups that everyone has: weights, and all else."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return a classification problem with inputs of very different sizes and noisy labels."""
    rng = torch.Generator().manual_seed(seed)
    teacher = torch.randn(32, 10, generator=rng)
    sizes = torch.exp(1.5 * torch.randn(32, generator=rng))
    made = []
    for _ in range(STEPS):
        x = torch.randn(128, 32, generator=rng)
        labels = (x @ teacher + torch.randn(128, 10, generator=rng)).argmax(1)
        made.append((x * sizes, labels))
    return made


def gamma_of(vs: list[Tensor], past: float, corrected_for: float, eps: float) -> float:
    """Return gamma over the given second moments, corrected as if they had seen ``corrected_for`` gradients."""
    if past == 0 and corrected_for == 0:
        return 1.0
    etas = [1 / ((v / bias_correction_of(BETA2, corrected_for)).sqrt() + eps) for v in vs]
    total = torch.stack([(eta.double() ** 2).sum() for eta in etas]).sum()
    return rules.scale(total, sum(v.numel() for v in vs)).item()


def train(variant: str, lr: float, eps: float, seed: int) -> tuple[float, list[list[float]]]:
    """Return the mean loss of the last 50 steps, and each step's gamma for each of the two groups."""
    model = network(seed)
    groups = [group["params"] for group in no_decay_groups(model, weight_decay=DECAY)]
    params = [p for group in groups for p in group]
    ms, vs = ([torch.zeros_like(p) for p in params] for _ in range(2))
    older = [v.clone() for v in vs]
    losses, gammas = [], []
    for t, (x, labels) in enumerate(batches(seed), 1):
        loss = nn.functional.cross_entropy(model(x), labels)
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, params)
        source, past = (older, t - 2) if variant == "second delay" else (vs, t - 1)
        n = len(groups[0])
        parts = [source[:n], source[n:]] if variant == "norm per group" else [source, source]
        now = [gamma_of(part, past, t - 1, eps) for part in parts]
        gammas.append(now)
        older = [v.clone() for v in vs]
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            in_first = i < n
            eta = rules.rates(rules.gradient_sizes(vs[i], t - 1, beta2=BETA2), t - 1, eps=eps)
            hyper: dict[str, Any] = {
                "lr": lr,
                "beta1": BETA1,
                "beta2": BETA2,
                "weight_decay": DECAY if in_first else 0.0,
            }
            gamma = now[0] if in_first else now[1]
            w, ms[i], vs[i] = rules.delayed_step(p.detach(), g, ms[i], vs[i], t, eta, gamma, **hyper)
            p.data.copy_(w)
    return sum(losses[-50:]) / 50, gammas


def main() -> None:
    """Print one table: losses, and gamma as a multiple of the paper's."""
    print(f"torch {torch.__version__}; {STEPS} steps, mean of 3 seeds; gamma as a multiple of the paper's at that step")
    print("| eps | variant | loss at the end | gamma at step 2 | at step 10 | at step 100 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for eps in (1e-8, 1e-3, 0.1):
        exact = [train("paper", 0.1, eps, seed) for seed in range(3)]
        for variant in ("paper", "second delay", "norm per group"):
            runs = exact if variant == "paper" else [train(variant, 0.1, eps, seed) for seed in range(3)]
            loss = sum(end for end, _ in runs) / 3
            cells = []
            for t in (2, 10, 100):
                ratios = [
                    torch.tensor([run[1][t - 1][i] / want[1][t - 1][i] for run, want in zip(runs, exact, strict=True)])
                    for i in (0, 1)
                ]
                means = [ratio.log().mean().exp().item() for ratio in ratios]
                per_group = variant == "norm per group"
                cells.append(f"{means[0]:.3g} / {means[1]:.3g}" if per_group else f"{means[0]:.3g}")
            print(f"| {eps:g} | {variant} | {loss:.3f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
