"""The presets of the experiments, as data: each value with its source.

``quick``, ``small`` and ``base`` presets are ours; the quick ones learn in under a minute on two cores. The ``paper``
presets are the paper's final runs, ``paper-search`` its searches over lr and epsilon. The best learning rates are in
:data:`avagrad.lab.methods.METHODS`.
"""

from collections.abc import Mapping
from typing import Any

from avagrad.lab.methods import Sourced


def _preset(**by_source: Mapping[str, Any]) -> dict[str, Sourced]:
    return {name: Sourced(value, source) for source, values in by_source.items() for name, value in values.items()}


_PENN_TREEBANK = {
    "epochs": 500,
    "milestones": (300, 400),
    "factor": 0.1,
    "weight_decay": 1.2e-6,
    "batch_size": 128,
    "bptt": 150,
    "embedding": 200,
    "layers": 3,
    "weight_drop": 0.5,
    "dropout_outside": 0.1,
    "dropout_between": 0.25,
    "dropout_embedding": 0.1,
}
_CIFAR = {"epochs": 200, "milestones": (60, 120, 160), "factor": 0.2, "weight_decay": 5e-4, "batch_size": 128}
_NO_CLIPPING: dict[str, Any] = {"clip": None}
# The paper does not mention clipping; the code that it follows clips (Merity, Keskar and Socher, 2018).
_AWD_CLIPPING = {"clip": 0.25}

# The usual recipe of transformers: AdamW's, with warm-up and cosine.
_GPT: dict[str, Any] = {"schedule": "cosine", "end_factor": 0.1, "warmup": 100, "milestones": (), "factor": 0.1}
_GPT |= {"weight_decay": 0.1, "clip": 1.0, "epochs": 20, "steps": 100}

PRESETS: dict[str, dict[str, dict[str, Sourced]]] = {
    "digits": {
        "quick": _preset(
            ours={"epochs": 30, "milestones": (10, 20, 25), "factor": 0.2, "weight_decay": 5e-4, "threads": 1}
            | _NO_CLIPPING
        ),
    },
    "chars": {
        "quick": _preset(
            ours={"epochs": 4, "milestones": (3,), "factor": 0.1, "weight_decay": 1.2e-6, "clip": 0.25, "threads": 1}
        ),
        "paper": _preset(paper=_PENN_TREEBANK | {"hidden": 1000}, awd=_AWD_CLIPPING),
        "paper-search": _preset(paper=_PENN_TREEBANK | {"hidden": 300}, awd=_AWD_CLIPPING),
    },
    "gpt": {
        "quick": _preset(ours=_GPT | {"epochs": 6, "threads": 2, "eval_tokens": 16_384}),
        "small": _preset(ours=_GPT | {"batch_size": 128, "context": 256, "layers": 6, "heads": 6, "width": 384}),
        "base": _preset(ours=_GPT | {"batch_size": 64, "context": 512, "layers": 12, "heads": 12, "width": 768}),
    },
    "cifar": {
        "paper-search": _preset(paper=_CIFAR | {"model": "wrn-28-4", "full": False}, ours=_NO_CLIPPING),
        "paper": _preset(paper=_CIFAR | {"model": "wrn-28-10", "full": True}, ours=_NO_CLIPPING),
    },
    "imagenet": {
        "paper": _preset(
            paper={"epochs": 100, "milestones": (30, 60, 90), "factor": 0.1, "weight_decay": 1e-4, "batch_size": 256},
            ours=_NO_CLIPPING,
        ),
    },
}

# For users' own tasks. The number of epochs and the learning rate must be given.
OWN = {
    "none": {
        name: Sourced(value, "default")
        for name, value in {"milestones": (), "factor": 0.1, "weight_decay": 0.0, "clip": None}.items()
    }
}


def default_preset(task: str) -> str:
    """Return the default preset of a task: the first one."""
    return next(iter(PRESETS.get(task, OWN)))
