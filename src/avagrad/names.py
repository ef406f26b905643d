"""Lookup of names, with suggestions for misspelled ones, and of your own code by ``module:name``."""

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["imported", "look_up", "nearest", "place_of"]

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


def imported(what: str, kind: str, text: str) -> Any:
    """Import ``module:name``, also from the current folder; an error says what is missing.

    >>> imported("objective", "function", "math:sqrt")(4.0)
    2.0
    >>> imported("objective", "function", "math:root")
    Traceback (most recent call last):
    ...
    ValueError: objective is 'math:root', but 'math' has no 'root'.
    """
    module, _, name = text.partition(":")
    if not module or not name or module.endswith(".py"):
        raise ValueError(f"{what} is {text!r}, but must be module:{kind}, such as train:{what}, without .py.")
    if "/" in module or module.startswith("."):
        raise ValueError(
            f"{what} is {text!r}, but a module is not a path: from its folder, write package.module:{kind}."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            why = f"there is no module {module!r} here or on the path"
        else:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if isinstance(error, SystemExit):
                reason = f"it ends the process ({reason})"
            why = f"{module!r} cannot be imported: {reason} ({place_of(error)})"
        raise ValueError(f"{what} is {text!r}, but {why}.") from error
    try:
        return attrgetter(name)(found)
    except AttributeError:
        raise ValueError(f"{what} is {text!r}, but {module!r} has no {name!r}.") from None


def place_of(error: BaseException) -> str:
    """Return the file and line where an error was raised: the last ones of the user's own code, if there are any.

    >>> try:
    ...     imported("objective", "function", "nowhere")
    ... except ValueError as error:
    ...     place_of(error).startswith("<doctest")
    True
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}"


def _is_installed(filename: str) -> bool:
    """Return whether a file is of Python, of an installed package or of this one. Projects may be anywhere else."""
    path = Path(filename)
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")} | {Path(__file__).parent}
    is_library = any(folder in library or folder.name in ("site-packages", "dist-packages") for folder in path.parents)
    return is_library or filename.startswith("<frozen ")
