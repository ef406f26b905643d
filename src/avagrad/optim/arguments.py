"""What an optimizer accepts, and the sentences it answers with when it is given something else."""

import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec

import torch
from torch import Tensor

from avagrad.optim.rounding import ROUNDINGS

__all__ = [
    "EPS_MAX",
    "EPS_MIN",
    "check_group_keys",
    "check_values",
    "explain_unknown_keywords",
    "plain_number",
]

EPS_MIN, EPS_MAX = 1e-15, 1e15
_P = ParamSpec("_P")

# Other libraries' words for ours: too far from them in letters to be found by spelling.
_SYNONYMS = {
    "learningrate": "lr",
    "epsilon": "eps",
    "beta1": "betas",
    "beta2": "betas",
    "wd": "weight_decay",
}


def plain_number(x: Any) -> Any:
    """Return a number of any library as a Python number, anything else as it is.

    A NumPy scalar in a parameter group would make a checkpoint unreadable with ``weights_only``.

    >>> import numpy
    >>> plain_number(numpy.float32(0.5)), plain_number(2), plain_number("a")
    (0.5, 2, 'a')
    """
    if isinstance(x, (tuple, list)):
        return tuple(plain_number(y) for y in x)
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    return int(x) if isinstance(x, numbers.Integral) else float(x)


def check_values(owner: str, group: Mapping[str, Any]) -> None:
    """Refuse a parameter group that holds a value outside of what its key allows.

    >>> check_values("AvaGrad", {"lr": float("nan")})
    Traceback (most recent call last):
    ...
    ValueError: AvaGrad: lr is nan, but must be a finite number of at least 0, or a float tensor that holds one.
    """
    for key, value in group.items():
        rule = _RULES.get(key)
        if rule is None:
            continue
        allowed, accepts = rule
        if not accepts(value):
            raise ValueError(f"{owner}: {key} is {_show(value)}, but must be {allowed}.")
    if group.get("foreach") and group.get("fused"):
        raise ValueError(f"{owner}: foreach is True and fused is True, but only one of them may be True.")
    if group.get("foreach") and group.get("differentiable"):
        raise ValueError(
            f"{owner}: foreach is True and differentiable is True, but autograd cannot follow foreach: "
            "leave foreach out, or set it to False."
        )


def check_group_keys(owner: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Refuse a key of a parameter group that nearly spells one that we know.

    All other keys are the user's own (``initial_lr``, ``name``, ...) and are left alone.

    >>> check_group_keys("AvaGrad", ["params", "name", "beta"], ["lr", "betas"])
    Traceback (most recent call last):
    ...
    ValueError: AvaGrad: a parameter group has the key 'beta', which nearly spells 'betas': ...
    """
    for key in keys:
        near = None if key in known else _nearest(str(key), known)
        if near is not None:
            raise ValueError(
                f"{owner}: a parameter group has the key {key!r}, which nearly spells {near!r}: "
                f"write {near!r}, or rename the key if it is your own."
            )


def explain_unknown_keywords(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate ``__init__``: an unknown keyword is answered with the nearest one, or with all."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for key, value in kwargs.items():
            if key not in known:
                near = _nearest(key, known)
                hint = f"did you mean {near!r}?" if near else f"the keywords are {', '.join(known)}."
                owner = type(args[0]).__name__
                raise TypeError(f"{owner}: {key}={_show(value)} is not an argument of this class; {hint}")
        init(*args, **kwargs)

    return checked


def _is_finite(x: Any) -> bool:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return False
    largest: Any = sys.float_info.max  # an integer may be larger
    return bool(-largest <= x <= largest)


def _is_lr(x: Any) -> bool:
    if isinstance(x, Tensor):
        if x.numel() != 1 or not x.is_floating_point():
            return False
        if x.is_meta or (type(x) is not Tensor and not isinstance(x, torch.nn.Parameter)):
            return True  # there is no value to look at
        return _is_lr(x.item())
    return _is_finite(x) and x >= 0


def _is_pair_of_betas(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and all(_is_finite(b) and 0 <= b < 1 for b in x)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def _is_bool_or_none(x: Any) -> bool:
    return x is None or isinstance(x, bool)


# key: (what is allowed, in words; the same as a predicate)
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("a finite number of at least 0, or a float tensor that holds one", _is_lr),
    "betas": ("two numbers from 0 up to, but not including, 1", _is_pair_of_betas),
    "eps": (
        f"a number from {EPS_MIN:g} to {EPS_MAX:g}: the rate of a coordinate without gradients is 1 / eps, "
        "and its square has to fit into float32",
        lambda x: _is_finite(x) and EPS_MIN <= x <= EPS_MAX,
    ),
    "weight_decay": ("a finite number of at least 0", lambda x: _is_finite(x) and x >= 0),
    "norm": ("1 or 2", lambda x: _is_finite(x) and x in (1, 2)),
    "bias_correction": ("True or False", _is_bool),
    "active_only": ("True or False", _is_bool),
    "maximize": ("True or False", _is_bool),
    "capturable": ("True or False", _is_bool),
    "differentiable": ("True or False", _is_bool),
    "rounding": ("'nearest', 'stochastic' or 'kahan'", lambda x: isinstance(x, str) and x in ROUNDINGS),
    "rounding_seed": (
        "a whole number from 0 to 2^32 - 1",
        lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**32,
    ),
    "foreach": ("True, False or None", _is_bool_or_none),
    "fused": ("True, False or None", _is_bool_or_none),
    "final_lr": ("a finite number of at least 0", lambda x: _is_finite(x) and x >= 0),
    "base_lr": ("a finite number of at least 0, or None", lambda x: x is None or (_is_finite(x) and x >= 0)),
    "gamma": ("a number above 0 and at most 1", lambda x: _is_finite(x) and 0 < x <= 1),
    "amsbound": ("True or False", _is_bool),
    "keep": ("a whole number of at least 1", lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 1),
    "reduce": ("'max' or None", lambda x: x is None or x == "max"),
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
        if bare == other or _swapped(bare, other) or bare in (other[:-1], other + "s", other + other[-1]):
            return candidate
        # In a short word another letter easily makes another word, that may be the user's own.
        if len(other) >= 6 and _slips_between(bare, other) <= (1 if len(other) < 10 else 2):
            return candidate
    return None


def _swapped(a: str, b: str) -> bool:
    """Tell whether two neighbouring letters have changed places."""
    return any(a == b[:i] + b[i + 1] + b[i] + b[i + 2 :] for i in range(len(b) - 1))


def _slips_between(a: str, b: str) -> int:
    """Count the letters that are added, dropped or replaced from a to b."""
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
        last = row
    return last[-1]
