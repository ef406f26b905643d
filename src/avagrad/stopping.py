"""Signals that ask a run or a search to save and stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["StopRequest", "Stopped", "catch_signals", "interrupt_on_sigterm"]

_GRACE = 5.0  # seconds


class Stopped(KeyboardInterrupt):
    """A run or a search was asked to stop (Ctrl-C, SIGTERM), and has saved everything; the message says how to resume.

    ``folder`` is the folder of a run. ``exit_code`` is the signal's usual exit code, which the commands return.

    >>> Stopped("stopped", number=signal.SIGTERM).exit_code
    143
    """

    def __init__(self, message: str, *, number: int = signal.SIGINT, folder: Path | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.folder = 128 + number, folder


class StopRequest:
    """The signal that asked the run to stop, if any.

    >>> StopRequest().signal is None
    True
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.since = 0.0


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT, and record the first.

    Further signals within a few seconds are ignored: they must not end the process while it saves. Later ones have
    their usual effect, and so does one that came too late for the run to stop.

    >>> with catch_signals() as stop:
    ...     stop.signal is None
    True
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals can be caught only there
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


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[StopRequest]:
    """Make SIGTERM, which schedulers send, raise KeyboardInterrupt as Ctrl-C does, and record it.

    >>> with interrupt_on_sigterm() as stop, contextlib.suppress(KeyboardInterrupt):
    ...     os.kill(os.getpid(), signal.SIGTERM)
    >>> stop.signal == signal.SIGTERM
    True
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals can be caught only there
        yield stop
        return
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def handle(number: int, _: object) -> None:
        stop.signal = number
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
