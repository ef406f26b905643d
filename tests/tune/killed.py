"""A study that is killed again and again: the command that test_kills.py runs, and looks at."""

import sys
import time

from avagrad.tune import Trial, tune


def objective(trial: Trial) -> float:
    time.sleep(0.3)
    assert trial.lr is not None
    assert trial.eps is not None
    return trial.lr + trial.eps


if __name__ == "__main__":
    tune(objective, lr="1:10:10", eps="1:6:6", method="grid", storage=sys.argv[1], name="killed", workers=4)
