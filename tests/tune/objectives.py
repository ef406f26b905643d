"""Objectives for the tests of the tuner: good ones and bad ones. Worker processes import them from here."""

import ctypes
import math
import os
import signal
import time
from pathlib import Path

from waiting import until

from avagrad.tune import Diverged, Trial


def bowl(trial: Trial) -> float:
    """Best at lr 1, eps 0.01; with lr above 100 it diverges at step 7."""
    assert trial.lr is not None
    assert trial.eps is not None
    if trial.lr > 100:
        for step in range(10):
            trial.report(step, math.nan if step == 7 else 1.0)
    return math.log10(trial.lr) ** 2 + (math.log10(trial.eps) + 2) ** 2


class Noted:
    """Says who has run it, and where. A point waits until two processes are at work, and the last one for the gate."""

    def __init__(self, folder: Path, last: float) -> None:
        self.folder, self.gate, self.last = folder, folder / "gate", last

    def __call__(self, trial: Trial) -> float:
        assert trial.lr is not None
        trial.note(process=os.getpid(), folder=os.getcwd(), cuda=os.environ.get("CUDA_VISIBLE_DEVICES"))
        (self.folder / f"{os.getpid()}.pid").touch()
        until(lambda: len(list(self.folder.glob("*.pid"))) >= 2)
        if trial.lr == self.last:
            until(self.gate.exists)
        return trial.lr


def counted(folder: Path, trial: Trial) -> int:
    """Leave a mark for each time that a point is run, and return how many there are."""
    with Path(folder, trial.key).open("a") as marks:
        marks.write("x")
    return Path(folder, trial.key).stat().st_size


class Counted:
    """Returns lr, after a while; each run leaves a mark."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self.folder, self.seconds = folder, seconds

    def __call__(self, trial: Trial) -> float:
        assert trial.lr is not None
        counted(self.folder, trial)
        time.sleep(self.seconds)
        return trial.lr


class Gated:
    """Returns lr, above ``free`` only when the file ``gate`` is there; each run leaves a mark beside that file."""

    def __init__(self, gate: Path, free: float) -> None:
        self.gate, self.free = gate, free

    def __call__(self, trial: Trial) -> float:
        assert trial.lr is not None
        counted(self.gate.parent, trial)
        if trial.lr > self.free:
            until(self.gate.exists)
        return trial.lr


class Waits:
    """Finishes small lrs at once; the others tell which processes they have made, and wait for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, trial: Trial) -> float:
        assert trial.lr is not None
        if trial.lr < 3:
            return trial.lr
        hang(self.folder)
        raise AssertionError


def hang(folder: Path) -> None:
    """Have a child, hear no SIGTERM, let no thread run, and never end."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    for pid in (child, os.getpid()):
        Path(folder, f"{pid}.pid").touch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        ctypes.PyDLL(None).sleep(1000)  # which keeps the lock of the interpreter


class Bad:
    """What it does depends on lr; lr 1 and 2 are good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, trial: Trial) -> object:
        assert trial.lr is not None
        times = counted(self.folder, trial)
        if trial.lr == 2:
            print("much" * 100_000)
            if times == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if trial.lr == 3:
            raise ValueError(f"no good\nat {trial.lr}")
        if trial.lr == 4:
            return None
        if trial.lr == 5:
            return [1.0, 2.0]
        if trial.lr == 6:
            return math.nan
        if trial.lr == 7:
            raise Diverged(12)
        if trial.lr == 8:
            if times == 1:
                os._exit(3)
            if times == 2:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGSEGV)
        if trial.lr == 9:
            hang(self.folder)
        if trial.lr == 10:
            trial.report(1.5, 1.0)  # type: ignore[arg-type]
        if trial.lr == 11:
            trial.note(what=object())
        return trial.lr


def lr_only(trial: Trial) -> float:
    assert trial.lr is not None
    return trial.lr


def raises(trial: Trial) -> float:
    raise ZeroDivisionError("of course")
