"""A study that is killed again and again: the command that test_kills.py runs, and looks at."""

import sys
import time
from functools import partial
from pathlib import Path

from waiting import until

from avagrad.tune import Trial, tune


def objective(gate: Path, trial: Trial) -> float:
    """Take a while; ten points wait until all kills are over, so that the study does not end before."""
    time.sleep(0.3)
    assert trial.lr is not None
    assert trial.eps is not None
    if trial.eps == 6:
        until(gate.exists)
    return trial.lr + trial.eps


if __name__ == "__main__":
    tune(
        partial(objective, Path(sys.argv[2])), lr="1:10:10", eps="1:6:6", method="grid", storage=sys.argv[1],
        name="killed", workers=4,
    )  # fmt: skip
