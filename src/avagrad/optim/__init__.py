"""Drop-in PyTorch optimizers; torch is the only dependency. The rules themselves are in rules.py."""

from avagrad.optim.adabound import AdaBound
from avagrad.optim.adashift import AdaShift
from avagrad.optim.adopt import ADOPT
from avagrad.optim.avagrad import AvaGrad, AvaGradW, DelayedAdam
from avagrad.optim.avastep import AvaStep
from avagrad.optim.param_groups import no_decay_groups

__all__ = ["ADOPT", "AdaBound", "AdaShift", "AvaGrad", "AvaGradW", "AvaStep", "DelayedAdam", "no_decay_groups"]
