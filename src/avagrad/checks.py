"""Checks of values; a bool is not a number."""

import json
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeGuard

__all__ = ["is_number", "is_whole", "require", "require_json", "require_like"]


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number.

    >>> is_number(1), is_number(0.5), is_number(True), is_number(math.inf), is_number("1")
    (True, True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False


def is_whole(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is a whole number, of at least ``least``.

    >>> is_whole(1), is_whole(1.0), is_whole(False), is_whole(0, 1)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def require(fits: bool, name: str, value: Any, allowed: str) -> None:
    """Reject a value that is not allowed.

    >>> require(False, "epochs", 0, "a whole number of at least 1")
    Traceback (most recent call last):
    ...
    ValueError: epochs is 0, but must be a whole number of at least 1.
    """
    if not fits:
        raise ValueError(f"{name} is {value!r}, but must be {allowed}.")


def require_json(name: str, value: Any, *, shown: Callable[[Any], str] = repr) -> None:
    """Reject a value that is not JSON serializable; ``shown`` makes it a text for the message.

    >>> require_json("about", {"betas": {0.9, 0.999}}, shown=lambda value: "a dict")
    Traceback (most recent call last):
    ...
    TypeError: about is a dict, which is not JSON serializable: Object of type set is not JSON serializable.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} is {shown(value)}, which is not JSON serializable: {error}.") from None


def require_like(name: str, value: Any, default: Any) -> None:
    """Reject a value of another type than a default. A default of None allows any value.

    >>> require_like("momentum", "high", 0.9)
    Traceback (most recent call last):
    ...
    ValueError: momentum is 'high', but must be a finite number, as its default 0.9 is.
    """
    kinds = {
        bool: ("true or false", isinstance(value, bool)),
        int: ("a whole number", is_whole(value)),
        float: ("a finite number", is_number(value)),
        str: ("a string", isinstance(value, str)),
        tuple: ("a list", isinstance(value, (tuple, list))),
    }
    allowed, fits = kinds.get(type(default), ("", True))
    require(fits, name, value, f"{allowed}, as its default {default!r} is")
