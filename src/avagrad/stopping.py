"""Signals that ask a run to stop: it saves first."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["StopRequest", "Stopped", "catch_signals"]

_GRACE = 5.0  # seconds


class Stopped(SystemExit):
    """The run was asked to stop (SIGTERM, SIGINT), has saved everything, and can go on later.

    Uncaught, it ends the process with the code that the signal would have given.

    >>> Stopped(15, Path("runs/x")).code
    143
    """

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__(128 + number)
        self.folder = folder


class StopRequest:
    """The signal that asked the run to stop, if one did.

    >>> StopRequest().signal is None
    True
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.since = 0.0


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT, and remember the first.

    Within a few seconds more of them are one and the same: they must not end the process while it saves. Later ones do
    what they always do, and so does one that came too late for the run to stop.

    >>> with catch_signals() as stop:
    ...     stop.signal is None
    True
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only there can they be caught
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

    def handle(number: int, _: object) -> None:
        if stop.signal is None:
            stop.signal, stop.since = number, time.monotonic()
        elif time.monotonic() - stop.since > _GRACE:
            restore()
            os.kill(os.getpid(), number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
    if stop.signal is not None:
        os.kill(os.getpid(), stop.signal)
