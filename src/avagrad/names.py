"""Lookup of names, with suggestions for misspelled ones."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["look_up", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to this one, if any is close.

    >>> nearest("avagard", ["adam", "avagrad"]), nearest("lion", ["adam", "avagrad"])
    ('avagrad', None)
    """
    bare = {other.lower().replace("_", "-"): other for other in known}
    found = difflib.get_close_matches(name.lower().replace("_", "-"), bare, n=1, cutoff=0.6)
    return bare[found[0]] if found else None


def look_up(what: str, name: str, known: Mapping[str, T]) -> T:
    """Return the value of a name, or raise an error that suggests the nearest name and lists all.

    >>> look_up("optimizer", "Adma", {"adam": 1, "sgd": 2})
    Traceback (most recent call last):
    ...
    ValueError: optimizer is 'Adma', which is not known; did you mean 'adam'? Choose from: adam, sgd.
    """
    if name in known:
        return known[name]
    near = nearest(str(name), known)
    hint = f"; did you mean {near!r}?" if near else "."
    raise ValueError(f"{what} is {name!r}, which is not known{hint} Choose from: {', '.join(known)}.")
