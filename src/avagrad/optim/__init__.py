"""Drop-in PyTorch optimizers; torch is the only dependency. The rules themselves are in rules.py."""

from avagrad.optim.adabound import AdaBound
from avagrad.optim.adashift import AdaShift
from avagrad.optim.delayed import AvaGrad, AvaGradW, DelayedAdam
from avagrad.optim.groups import no_decay_groups

__all__ = ["AdaBound", "AdaShift", "AvaGrad", "AvaGradW", "DelayedAdam", "no_decay_groups"]
