"""The checks of the arguments of a search: what a dry run rejects as well."""

import json
import operator
import os
from collections.abc import Sequence
from typing import Any

from avagrad.checks import is_number, is_whole, require, require_json
from avagrad.tune.leases import LEASE
from avagrad.tune.methods import METHODS
from avagrad.tune.study import DIRECTIONS, pruner_named


def check_search(
    *,
    method: Any = "lines",
    direction: Any = "minimize",
    storage: Any = None,
    workers: Any = 0,
    seeds: Any = 1,
    timeout: Any = None,
    retries: Any = 2,
    margin: Any = 0.0,
    extend: Any = True,
    pruner: Any = None,
    slots_per_gpu: Any = 1,
    ray: Any = None,
    name: Any = None,
    about: Any = None,
    lease: Any = LEASE,
    together: Any = None,
    watcher: Any = None,
) -> None:
    """Reject invalid arguments of a search; they are those of :func:`avagrad.tune.tune`."""
    require(isinstance(method, str) and method in METHODS, "method", method, f"one of {', '.join(METHODS)}")
    require(direction in DIRECTIONS, "direction", direction, f"one of {', '.join(DIRECTIONS)}")
    require(workers is None or is_whole(workers, 0), "workers", workers, "a whole number of at least 0")
    require(is_whole(retries, 0), "retries", retries, "a whole number of at least 0")
    require(is_whole(slots_per_gpu, 1), "slots_per_gpu", slots_per_gpu, "a whole number of at least 1")
    seconds = "a number of seconds above 0"
    require(timeout is None or (is_number(timeout) and timeout > 0), "timeout", timeout, seconds)
    require(is_number(lease) and lease > 0, "lease", lease, seconds)
    require(is_number(margin) and margin >= 0, "margin", margin, "a finite number of at least 0")
    require(isinstance(extend, bool), "extend", extend, "True or False")
    require(ray is None or (isinstance(ray, str) and ray != ""), "ray", ray, "the address of a cluster, such as 'auto'")
    require(name is None or (isinstance(name, str) and name.strip() != ""), "name", name, "a text that is not empty")
    require(together is None or callable(together), "together", together, "a function of a list of points")
    require(watcher is None or callable(watcher), "watcher", watcher, "a function of the progress")
    pruner_named(pruner)
    seeds_from(seeds)
    _check_about(about)
    if timeout is not None and workers == 0 and ray is None:
        raise ValueError(f"timeout is {timeout!r}, but a process cannot kill itself: it needs at least one worker.")
    if not isinstance(storage, (str, os.PathLike, type(None))):
        raise TypeError(f"storage is {storage!r}, but must be a file, or a database URL.")
    if str(storage).startswith("sqlite") and (workers != 0 or ray is not None):
        raise ValueError(
            f"storage is {str(storage)!r} with workers={workers!r}, but SQLite lets two workers take the same "
            "point: use a journal file or PostgreSQL, or workers=0."
        )


def seeds_from(given: Any) -> tuple[int, ...]:
    """Return the seeds: so many, or these; NumPy's whole numbers are welcome.

    >>> seeds_from(2), seeds_from([5, -3])
    ((0, 1), (5, -3))
    """
    plain = given.tolist() if hasattr(given, "tolist") else given
    count = _whole(plain)
    listed = list(range(count)) if count is not None else plain
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)) or not listed:
        raise ValueError(f"seeds is {given!r}, but must be a whole number of at least 1, or a list of seeds.")
    seeds = tuple(seed for seed in map(_whole, listed) if seed is not None)
    require(len(set(seeds)) == len(listed), "seeds", given, "different whole numbers")
    return seeds


def _whole(value: Any) -> int | None:
    """Return a whole number of any type as Python's, None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _check_about(about: Any) -> None:
    require(about is None or isinstance(about, dict), "about", about, "a dict of settings")
    require_json("about", about)
    constants: list[str] = []
    json.loads(json.dumps(about), parse_constant=constants.append)
    require("NaN" not in constants, "about", about, "without NaN, which is not equal to itself")
