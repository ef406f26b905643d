"""Many runs at once on one device, each with its own lr and eps: a whole heat map as one computation."""

from avagrad.lab.ensemble.run import RECORDS, train_ensemble

__all__ = ["RECORDS", "train_ensemble"]
