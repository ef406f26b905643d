"""Who holds a point, and whether that one is still alive.

A holder renews its lease by counting up. Whoever watches needs no clock that agrees with the holder's: a lease has run
out when it has not moved for so long by the watcher's own clock. On one and the same machine a dead process is seen
at once, and one that is seen to be alive is given more time: code that lets no thread run keeps it from renewing.
"""

import contextlib
import os
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["LEASE", "Watch", "holder", "is_dead", "renew_after"]

LEASE = (
    20.0  # seconds without a sign of life after which a point is taken back; renewed four times in that time, at first
)
# A point that has been taken is signed at once; one without a signature was taken by a process that died in between.
UNSIGNED = 5.0
_RAREST = 80.0  # seconds between two renewals of a point that is held for long: a journal has a line for each
_TIMES_IF_ALIVE = 10  # how much longer a lease lasts whose holder is seen to be alive


def _machine() -> str:
    """Return what two processes share if one can see the other: a boot of a machine, and its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str | None]:
    """Return a process's state, and when it was started in the kernel's own unit: None if it has ended."""
    try:
        # The name, in brackets, may hold anything; what follows it does not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", None
    return fields[0], None if fields[0] in "ZX" else fields[19]


def holder(worker: str) -> dict[str, Any]:
    """Return what a lease says about the process that holds it.

    >>> holder("a")["worker"], is_dead(holder("a"))
    ('a', False)
    """
    return {"worker": worker, "machine": _machine(), "pid": os.getpid(), "born": _state(os.getpid())[1]}


def renew_after(lease: float, age: float) -> float:
    """Return after how many seconds a point that has been held for so long is renewed next.

    The longer it is held, the more rarely: a run of hours can wait for minutes until it is taken back.

    >>> renew_after(20.0, 0.0), renew_after(20.0, 160.0), renew_after(20.0, 1e6)
    (5.0, 20.0, 80.0)
    """
    return max(lease / 4, min(age / 8, _RAREST))


def is_dead(lease: Mapping[str, Any]) -> bool:
    """Return whether a lease's holder ran on this machine, and no longer does.

    >>> is_dead(holder("a") | {"born": "1"})
    True
    >>> is_dead(holder("a") | {"machine": "another", "born": "1"})
    False
    """
    return _is_here(lease) and _state(int(lease.get("pid", 0)))[1] != lease.get("born")


def _is_here(lease: Mapping[str, Any]) -> bool:
    here = _machine()
    return bool(here) and lease.get("machine") == here


def _is_at_work(lease: Mapping[str, Any]) -> bool:
    """Return whether a lease's holder is another process of this machine that runs: it has not been stopped."""
    pid = int(lease.get("pid", 0))
    if pid == os.getpid() or not _is_here(lease):
        return False
    state, born = _state(pid)
    return born == lease.get("born") and state not in "Tt"


class Watch:
    """Looks at leases again and again, and says which have run out.

    Time counts only while it looks: where it could not, as the storage was away or this process was stopped, the
    holders may not have been able to renew either.

    >>> watch = Watch(lease=0.0)
    >>> other = {"machine": "another", "beat": 1}
    >>> watch.has_run_out("a point", other), watch.has_run_out("a point", other | {"beat": 2})
    (False, False)
    """

    def __init__(self, lease: float = LEASE) -> None:
        self.lease = lease
        self.seen: dict[Hashable, tuple[Any, float, float]] = {}  # the last beat, how long ago, and when that was said

    def has_run_out(self, what: Hashable, lease: Mapping[str, Any] | None) -> bool:
        """Return whether nobody holds ``what`` any more."""
        if lease is not None and is_dead(lease):
            return True
        now, beat = time.monotonic(), None if lease is None else (lease.get("worker"), lease.get("beat"))
        known, waited, last = self.seen.get(what, (beat, 0.0, now))
        waited = waited + min(now - last, max(self.lease / 4, 1.0)) if known == beat else 0.0
        self.seen[what] = beat, waited, now
        if lease is None:
            return waited > min(self.lease, UNSIGNED)
        allowed = max(self.lease, 4 * float(lease.get("every", 0.0)))
        return waited > allowed * (_TIMES_IF_ALIVE if _is_at_work(lease) else 1)

    def forget_all_but(self, held: "set[Hashable]") -> None:
        """Forget what is held no longer.

        >>> watch = Watch()
        >>> watch.has_run_out("a", None)
        False
        >>> watch.forget_all_but(set())
        >>> watch.seen
        {}
        """
        for what in set(self.seen) - held:
            with contextlib.suppress(KeyError):
                del self.seen[what]
