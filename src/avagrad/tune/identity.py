"""What an objective is: its name, whether it is found again under that name, and a digest of its code."""

import dis
import functools
import hashlib
import inspect
import platform
import sys
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, NoneType

# A digest of code, and the number of results of the study when that code was first used.
Entry = tuple[str, int]


def name_of(objective: object) -> str:
    """Return the name of an objective: its module, or the running script, and its name there.

    >>> import math
    >>> name_of(math.sqrt)
    'math:sqrt'
    """
    named = objective if hasattr(objective, "__qualname__") else type(objective)
    module = getattr(named, "__module__", None) or "__main__"
    if module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        module = Path(script).stem if script and script != "<stdin>" else "main"
    return f"{module}:{getattr(named, '__qualname__', 'objective')}"


def is_found_by_name(objective: object) -> bool:
    """Return whether an objective is what its module has under its name; else others may have the same name.

    A lambda, an instance, a bound method, a partial function and a function inside of another one are not.

    >>> import math
    >>> is_found_by_name(math.sqrt), is_found_by_name(lambda trial: 1.0), is_found_by_name("a".upper)
    (True, False, False)
    """
    try:
        module = sys.modules.get(objective.__module__ or "__main__")
        return attrgetter(objective.__qualname__)(module) is objective  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return False


def digest_of(objective: object) -> str | None:
    """Return the version of Python and a digest of the code of an objective; None if none of it is Python code.

    Defaults of arguments count if they are plain values. Comments and line breaks do not, nor does what the code calls.

    >>> digest_of(lambda trial: 1.0) == digest_of(lambda trial: (1.0))  # a comment
    True
    >>> digest_of(lambda trial: 1.0) == digest_of(lambda trial: 2.0)
    False
    """
    texts = [text for function in _functions(objective) for text in _texts(function)]
    version = ".".join(platform.python_version_tuple()[:2])
    return f"{version}:{hashlib.sha256(repr(texts).encode()).hexdigest()[:16]}" if texts else None


def with_code(history: list[Entry], digest: str, count: int) -> tuple[list[Entry], int]:
    """Add code to the history of a study that has so many results; also return how many of them are of other code.

    Code without a result is left out, and code of another version of Python is not compared.

    >>> with_code([("3.11:a", 0), ("3.11:b", 2)], "3.11:c", 5)
    ([('3.11:a', 0), ('3.11:b', 2), ('3.11:c', 5)], 5)
    >>> with_code([("3.11:a", 0), ("3.11:b", 2)], "3.11:a", 2), with_code([("3.12:a", 0)], "3.11:a", 2)[1]
    (([('3.11:a', 0)], 0), 0)
    """
    ends = [*(start for _, start in history[1:]), count]
    used = [(entry, end - entry[1]) for entry, end in zip(history, ends, strict=False) if end > entry[1]]
    version = digest.partition(":")[0]
    others = sum(results for (code, _), results in used if code != digest and code.partition(":")[0] == version)
    kept = [entry for entry, _ in used]
    return kept if kept and kept[-1][0] == digest else [*kept, (digest, count)], others


def _texts(function: FunctionType) -> Iterator[str]:
    """Yield the code of a function, and the defaults of its arguments if they are plain values."""
    yield _text(function.__code__)
    defaults = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    if plain := tuple(filter(_is_plain, defaults)):
        yield _text(plain)


def _is_plain(value: object) -> bool:
    kinds = (int, float, complex, str, bytes, NoneType)
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, kinds)


def _functions(objective: object) -> Iterator[FunctionType]:
    """Yield a function, and what it wraps; that of a method, a partial function or a callable object."""
    if isinstance(objective, functools.partial):
        yield from _functions(objective.func)
    elif inspect.ismethod(objective):
        yield from _functions(objective.__func__)
    elif inspect.isfunction(objective):
        yield objective
    elif inspect.isfunction(call := getattr(type(objective), "__call__", None)):  # noqa: B004  # it is not called
        yield from _functions(call)
    # Not by getattr: an object may answer to any name.
    wrapped = getattr(objective, "__dict__", {}).get("__wrapped__")
    if wrapped is not None:
        yield from _functions(wrapped)


def _text(constant: object) -> str:
    """Return code, or a constant of it, as a text that is the same in every process."""
    if isinstance(constant, CodeType):
        return f"code({_instructions(constant)}, {constant.co_names}, {_text(constant.co_consts)})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_text, constant))})"
    if isinstance(constant, frozenset):
        return f"{{{', '.join(sorted(map(_text, constant)))}}}"
    return repr(constant)


def _instructions(code: CodeType) -> list[tuple[str, int | None]]:
    """Return the instructions without those that do nothing: line breaks leave some. Jumps are to one of the others."""
    found = [each for each in dis.get_instructions(code) if each.opname not in ("NOP", "EXTENDED_ARG")]
    places = [each.offset for each in found]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [(each.opname, bisect_left(places, each.argval) if each.opcode in jumps else each.arg) for each in found]
