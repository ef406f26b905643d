"""Common parameter groups."""

from typing import Any

from torch import nn

from avagrad.optim.arguments import ALLOWED, check_values, plain_number

__all__ = ["no_decay_groups"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # the first: Batch, Instance


def no_decay_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: weights with decay, and all other parameters without.

    Biases, the parameters of normalisation layers, and all parameters of at most one dimension have
    no decay. A parameter that several modules share appears once. Frozen parameters are included,
    so that they can be unfrozen later.

    >>> import torch
    >>> from avagrad import AvaGrad
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    >>> opt = AvaGrad(no_decay_groups(model, weight_decay=5e-4), lr=0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in opt.param_groups]
    [(0.0005, 1), (0.0, 3)]
    """
    weight_decay = plain_number(weight_decay)
    check_values("no_decay_groups", {"weight_decay": weight_decay}, ALLOWED)
    if not isinstance(model, nn.Module):
        raise TypeError(f"no_decay_groups: model is of type {type(model).__name__}, but must be a torch.nn.Module.")
    exempt = {
        id(p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if isinstance(module, _NORMS) or p.dim() <= 1 or name.rpartition(".")[2].startswith("bias")
    }
    params = list(model.parameters())
    return [
        {"params": [p for p in params if id(p) not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in params if id(p) in exempt], "weight_decay": 0.0},
    ]
