"""AvaGrad: optimizers whose learning rate and epsilon can be tuned one after the other."""

from avagrad._version import __version__
from avagrad.create import create_optimizer, optimizers
from avagrad.optim import ADOPT, AdaBound, AdaShift, AvaGrad, AvaGradW, AvaStep, DelayedAdam

__all__ = [
    "ADOPT",
    "AdaBound",
    "AdaShift",
    "AvaGrad",
    "AvaGradW",
    "AvaStep",
    "DelayedAdam",
    "__version__",
    "create_optimizer",
    "optimizers",
]
