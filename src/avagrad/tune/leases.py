"""Leases: which process holds a point, and whether it is still alive.

A holder renews its lease by incrementing a counter. Clocks need not agree: a lease has expired when its counter has
not changed for some time on the observer's own clock. On the same machine a dead process is detected at once, and a
live one gets more time: code that blocks all threads keeps it from renewing.
"""

import contextlib
import os
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

LEASE = 20.0  # seconds without renewal after which a point is reclaimed; at first renewed four times in that time
# A point is signed as soon as it is taken; one without a signature was taken by a process that died in between.
UNSIGNED = 5.0
_MAX_INTERVAL = 80.0  # seconds between renewals of a point that is held for long: each one adds a line to the journal
_FACTOR_IF_ALIVE = 10  # how much longer a lease lasts if its holder is known to be alive


def _machine() -> str:
    """Return an id of this boot and process namespace; processes with the same id can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str | None]:
    """Return a process's state, and its start time in kernel ticks: None if it has ended."""
    try:
        # The name, in brackets, may contain anything; the fields after it may not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", None
    return fields[0], None if fields[0] in "ZX" else fields[19]


def holder(worker: str) -> dict[str, Any]:
    """Return the signature of this process for a lease.

    >>> holder("a")["worker"], is_dead(holder("a"))
    ('a', False)
    """
    return {"worker": worker, "machine": _machine(), "pid": os.getpid(), "born": _state(os.getpid())[1]}


def renew_after(lease: float, age: float) -> float:
    """Return the seconds until the next renewal of a point that has been held for ``age`` seconds.

    The longer it is held, the rarer: a run of hours can wait for minutes until it is reclaimed.

    >>> renew_after(20.0, 0.0), renew_after(20.0, 160.0), renew_after(20.0, 1e6)
    (5.0, 20.0, 80.0)
    """
    return max(lease / 4, min(age / 8, _MAX_INTERVAL))


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


def _is_alive(lease: Mapping[str, Any]) -> bool:
    """Return whether a lease's holder is another process on this machine that is running, and not stopped."""
    pid = int(lease.get("pid", 0))
    if pid == os.getpid() or not _is_here(lease):
        return False
    state, born = _state(pid)
    return born == lease.get("born") and state not in "Tt"


class Watch:
    """Observes leases and decides which have expired.

    Only time between regular observations counts: while the storage does not respond or this process is stopped,
    holders may not be able to renew either.

    >>> watch = Watch(lease=0.0)
    >>> other = {"machine": "another", "beat": 1}
    >>> watch.has_expired("a point", other), watch.has_expired("a point", other | {"beat": 2})
    (False, False)
    """

    def __init__(self, lease: float = LEASE) -> None:
        self.lease = lease
        self.seen: dict[Hashable, tuple[Any, float, float]] = {}  # the last beat, its age, and when it was checked

    def has_expired(self, what: Hashable, lease: Mapping[str, Any] | None) -> bool:
        """Return whether the lease of ``what`` has expired."""
        if lease is not None and is_dead(lease):
            return True
        now, beat = time.monotonic(), None if lease is None else (lease.get("worker"), lease.get("beat"))
        known, waited, last = self.seen.get(what, (beat, 0.0, now))
        waited = waited + min(now - last, max(self.lease / 4, 1.0)) if known == beat else 0.0
        self.seen[what] = beat, waited, now
        if lease is None:
            return waited > min(self.lease, UNSIGNED)
        allowed = max(self.lease, 4 * float(lease.get("every", 0.0)))
        return waited > allowed * (_FACTOR_IF_ALIVE if _is_alive(lease) else 1)

    def keep_only(self, held: "set[Hashable]") -> None:
        """Forget everything that is no longer held.

        >>> watch = Watch()
        >>> watch.has_expired("a", None)
        False
        >>> watch.keep_only(set())
        >>> watch.seen
        {}
        """
        for what in set(self.seen) - held:
            with contextlib.suppress(KeyError):
                del self.seen[what]
