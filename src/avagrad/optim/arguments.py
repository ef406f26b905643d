"""Validation of an optimizer's arguments, and its error messages."""

import difflib
import functools
import inspect
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor

from avagrad.optim.rounding import ROUNDINGS

_P = ParamSpec("_P")

# For each key what is allowed: a description and a predicate.
Allowed: TypeAlias = Mapping[str, tuple[str, Callable[[Any], bool]]]

# Other libraries' names for our arguments, spelled too differently for _nearest().
_SYNONYMS = {"learningrate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas", "wd": "weight_decay"}

# Arguments of torch's optimizers that these do not have, and what to use instead.
_INSTEAD = {"differentiable": "autograd can follow the functions of avagrad.optim.rules."}


def plain_number(x: Any) -> Any:
    """Return a number of any library as a Python number, so that ``weights_only`` can load it; else ``x`` itself."""
    if isinstance(x, (tuple, list)):
        return tuple(plain_number(y) for y in x)
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    return int(x) if isinstance(x, numbers.Integral) else float(x)


def check_values(owner: str, group: Mapping[str, Any], allowed: Allowed) -> None:
    """Reject a parameter group with a value that its key does not allow.

    >>> check_values("AvaGrad", {"lr": float("nan")}, ALLOWED)
    Traceback (most recent call last):
    ...
    ValueError: AvaGrad: lr is nan, but must be a finite number of at least 0, or a float tensor that holds one.
    """
    for key, value in group.items():
        description, accepts = allowed.get(key, ("", None))
        if accepts is not None and not accepts(value):
            raise ValueError(f"{owner}: {key} is {_show(value)}, but must be {description}.")
    if group.get("foreach") and group.get("fused"):
        raise ValueError(f"{owner}: foreach is True and fused is True, but only one of them may be True.")


def check_group_keys(owner: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Reject a key of a parameter group that looks like a misspelled known key.

    All other keys are the user's own (``initial_lr``, ``name``, ...) and are left alone.
    """
    for key in keys:
        near = None if key in known else _nearest(str(key), known)
        if near is not None:
            raise ValueError(
                f"{owner}: a parameter group has the key {key!r}, which looks like a misspelled {near!r}: "
                f"write {near!r}, or rename the key if it is your own."
            )


def explain_unknown_keywords(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate ``__init__``: the error about an unknown keyword names the nearest known one, or all."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for key, value in kwargs.items():
            if key not in known:
                near = _nearest(key, known)
                hint = f"did you mean {near!r}?" if near else f"the keywords are {', '.join(known)}."
                about = f"{type(args[0]).__name__}: {key}={_show(value)} is not an argument of this class"
                raise TypeError(f"{about}; {_INSTEAD.get(key, hint)}")
        init(*args, **kwargs)

    return checked


def callers_level() -> int:
    """Return the ``stacklevel`` at which a warning names the first line outside of torch and this package."""
    ours = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
    frames = enumerate(traceback.walk_stack(sys._getframe(1)), 1)
    return next((level for level, (frame, _) in frames if not frame.f_code.co_filename.startswith(ours)), 1)


def is_finite(x: Any) -> bool:
    """Return whether a value is a finite number; a bool is none."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return False
    largest: Any = sys.float_info.max  # an integer may be larger
    return bool(-largest <= x <= largest)


def _is_lr(x: Any) -> bool:
    if isinstance(x, Tensor):
        if x.numel() != 1 or not x.is_floating_point():
            return False
        if x.is_meta or (type(x) is not Tensor and not isinstance(x, torch.nn.Parameter)):
            return True  # it has no value to check
        return _is_lr(x.item())
    return is_finite(x) and x >= 0


def _is_pair_of_betas(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and all(is_finite(b) and 0 <= b < 1 for b in x)


BOOL = ("True or False", lambda x: isinstance(x, bool))
_BOOL_OR_NONE = ("True, False or None", lambda x: x is None or isinstance(x, bool))

# What all classes share; a class adds its own keys.
ALLOWED: Allowed = {
    "lr": ("a finite number of at least 0, or a float tensor that holds one", _is_lr),
    "betas": ("two numbers from 0 up to, but not including, 1", _is_pair_of_betas),
    "eps": (
        "a number from 1e-15 to 1e+15: a rate may be 1 / eps, and its square has to fit into float32",
        lambda x: is_finite(x) and 1e-15 <= x <= 1e15,
    ),
    "weight_decay": ("a finite number of at least 0", lambda x: is_finite(x) and x >= 0),
    "maximize": BOOL,
    "capturable": BOOL,
    "rounding": ("'nearest', 'stochastic' or 'kahan'", lambda x: isinstance(x, str) and x in ROUNDINGS),
    "rounding_seed": (
        "a whole number from 0 to 2^32 - 1",
        lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**32,
    ),
    "foreach": _BOOL_OR_NONE,
    "fused": _BOOL_OR_NONE,
}


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else str(value)
    return repr(value)


def _nearest(word: str, known: Collection[str]) -> str | None:
    bare = word.lower().replace("_", "").replace("-", "")
    if _SYNONYMS.get(bare) in known:
        return _SYNONYMS[bare]
    for candidate in known:
        other = candidate.replace("_", "")
        if sorted(bare) == sorted(other) or bare in (other[:-1], other + "s", other + other[-1]):
            return candidate
        # One other letter in a short name may make another name, which may be the user's own.
        if len(other) >= 6 and difflib.SequenceMatcher(None, bare, other).ratio() > 0.85:
            return candidate
    return None
