"""How the tests of the tuner wait: for what is to happen, however long that takes; and a clock that they set."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something holds, and return it. There is no limit: how busy a machine is says nothing of a defect."""
    while not (result := condition()):
        time.sleep(0.02)
    return result


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def are_dead(pids: Iterable[int]) -> bool:
    return not any(map(is_alive, pids))


class Clock:
    """Stands for the module `time`: it goes on only when it is set, or when somebody sleeps, which takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class StoppedClock(Clock):
    """Goes on only when it is set; who sleeps does so."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
