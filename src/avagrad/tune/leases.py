"""Who holds a point, and whether that one is still alive.

A holder renews its lease by counting up. Whoever watches needs no clock that agrees with the holder's: a lease has run
out when it has not moved for so long by the watcher's own clock. On one and the same machine a dead process is seen
at once.
"""

import contextlib
import os
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["LEASE", "Watch", "holder", "is_dead"]

LEASE = 20.0  # seconds without a sign of life after which a point is taken back; renewed four times in that time
# A point that has been taken is signed at once; one without a signature was taken by a process that died in between.
UNSIGNED = 5.0


def _machine() -> str:
    """Return what two processes share if one can see the other: a boot of a machine, and its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """Return when a process was started, in the kernel's own unit; None if there is none, or it has ended."""
    try:
        # The name, in brackets, may hold anything; what follows it does not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def holder(worker: str) -> dict[str, Any]:
    """Return what a lease says about the process that holds it.

    >>> holder("a")["worker"], is_dead(holder("a"))
    ('a', False)
    """
    return {"worker": worker, "machine": _machine(), "pid": os.getpid(), "born": _born(os.getpid())}


def is_dead(lease: Mapping[str, Any]) -> bool:
    """Tell whether a lease's holder ran on this machine, and no longer does.

    >>> is_dead(holder("a") | {"born": "1"})
    True
    >>> is_dead(holder("a") | {"machine": "another", "born": "1"})
    False
    """
    here = _machine()
    return bool(here) and lease.get("machine") == here and _born(int(lease.get("pid", 0))) != lease.get("born")


class Watch:
    """Looks at leases again and again, and says which have run out.

    >>> watch = Watch(lease=0.0)
    >>> other = {"machine": "another", "beat": 1}
    >>> watch.has_run_out("a point", other), watch.has_run_out("a point", other | {"beat": 2})
    (False, False)
    """

    def __init__(self, lease: float = LEASE) -> None:
        self.lease = lease
        self.seen: dict[Hashable, tuple[Any, float]] = {}

    def has_run_out(self, what: Hashable, lease: Mapping[str, Any] | None) -> bool:
        """Tell whether nobody holds ``what`` any more."""
        if lease is not None and is_dead(lease):
            return True
        now, beat = time.monotonic(), None if lease is None else (lease.get("worker"), lease.get("beat"))
        known, since = self.seen.get(what, (None, None))
        if since is None or known != beat:
            self.seen[what] = beat, now
            return False
        return now - since > (self.lease if lease is not None else min(self.lease, UNSIGNED))

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
