"""Records of finished points, in JSON Lines files.

A run that diverged is a result, not a gap: its value is the worst one, infinity (minus infinity when maximizing).
JSON has no infinity, so its line has ``"value": null, "diverged": true``. NaN is also read as divergence.
"""

import json
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from avagrad.checks import is_number, is_whole, require
from avagrad.files import plain, write_atomic
from avagrad.tune.space import NAMES, Point, axis_value

__all__ = ["Record", "check_facts", "read_records", "sign_of", "worst", "write_records"]

_OWN = (*NAMES, "seed", "value", "diverged", "diverged_at", "pruned", "seconds")


def worst(direction: str) -> float:
    """Return the value of a run that diverged.

    >>> worst("minimize"), worst("maximize")
    (inf, -inf)
    """
    if direction not in ("minimize", "maximize"):
        raise ValueError(f"direction is {direction!r}, but must be 'minimize' or 'maximize'.")
    return math.inf if direction == "minimize" else -math.inf


def sign_of(direction: str) -> float:
    """Return the sign that makes a value a loss, of which less is better.

    >>> sign_of("minimize"), sign_of("maximize")
    (1.0, -1.0)
    """
    return math.copysign(1.0, worst(direction))


def check_facts(facts: Mapping[str, Any]) -> None:
    """Reject facts that have the name of a record's own field.

    >>> check_facts({"seconds": 3})
    Traceback (most recent call last):
    ...
    ValueError: a key of facts is 'seconds', but must be a text other than ('lr', 'eps', 'seed', 'value', ...).
    """
    require(isinstance(facts, Mapping), "facts", facts, "a mapping")
    for key in facts:
        require(isinstance(key, str) and key not in _OWN, "a key of facts", key, f"a text other than {_OWN}")


@dataclass(frozen=True)
class Record:
    """One finished point and its value. An infinite value means that it diverged.

    ``facts`` has other results, such as a test error; its values must be valid JSON.

    >>> Record(lr=0.1, eps=1e-8, value=0.25, facts={"test": 0.3}).point.key
    'lr=0.1 eps=1e-08 seed=0'
    >>> Record(lr=1e3, eps=None, value=float("inf"), diverged_at=12).diverged
    True
    >>> Record(lr=0.1, eps=1e-8, value=float("nan"))
    Traceback (most recent call last):
    ...
    ValueError: value is nan, but must be a number, infinite if the run diverged.
    """

    lr: float | None
    eps: float | None
    seed: int = 0
    value: float = field(kw_only=True)
    diverged_at: int | None = field(default=None, kw_only=True)
    pruned: bool = field(default=False, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)
    facts: dict[str, Any] = field(default_factory=dict, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        for name in NAMES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, axis_value(name, getattr(self, name)))
        if self.lr is None and self.eps is None:
            raise ValueError("lr and eps are None, but at least one of them must be a number.")
        require(is_whole(self.seed), "seed", self.seed, "a whole number")
        require(_number(self.value), "value", self.value, "a number, infinite if the run diverged")
        object.__setattr__(self, "value", float(self.value))
        if self.diverged_at is not None:
            allowed = is_whole(self.diverged_at, 0)
            require(allowed, "diverged_at", self.diverged_at, "a whole number of at least 0, or None")
            require(self.diverged, "diverged_at", self.diverged_at, "None if the value is finite")
        require(isinstance(self.pruned, bool), "pruned", self.pruned, "True or False")
        if self.seconds is not None:
            allowed = is_number(self.seconds) and self.seconds >= 0
            require(allowed, "seconds", self.seconds, "a finite number of at least 0, or None")
        check_facts(self.facts)
        object.__setattr__(self, "facts", dict(self.facts))  # a private copy

    @property
    def diverged(self) -> bool:
        """Whether the run diverged."""
        return math.isinf(self.value)

    @property
    def point(self) -> Point:
        """The point that was run."""
        return Point(self.lr, self.eps, self.seed)


def read_records(
    path: str | os.PathLike[str], *, direction: str = "minimize", bad: list[str] | None = None
) -> list[Record]:
    r"""Return the records of a file, in its order; empty lines are skipped, and unknown keys become facts.

    An invalid line is an error; with ``bad`` it is skipped, and the reason is appended to ``bad``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "records.jsonl")
    ...     _ = path.write_text('{"lr": 0.1, "value": 2, "test": 3}\n{"lr": 1, "value": NaN}\n')
    ...     [(record.lr, record.value, record.facts) for record in read_records(path)]
    [(0.1, 2.0, {'test': 3}), (1.0, inf, {})]
    """
    diverged = worst(direction)
    found: dict[Point, tuple[int, Record]] = {}
    *lines, rest = Path(path).read_bytes().split(b"\n")

    def reject(at: int, why: str) -> None:
        if bad is None:
            raise ValueError(f"{path}, line {at}: {why}")
        bad.append(f"line {at}: {why}")

    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record(json.loads(line.decode()), diverged)
        except (TypeError, ValueError, RecursionError) as error:
            reject(at, f"{str(error).rstrip('.')}.")
            continue
        earlier, _ = found.setdefault(record.point, (at, record))
        if earlier != at:
            reject(
                at,
                f"there is a record for {record.point.key} on line {earlier} already, but there must be one for each"
                " point.",
            )
    if rest.strip():
        reject(
            len(lines) + 1,
            "the last line does not end with a line break, so it is half-written, and must be completed or deleted.",
        )
    return [record for _, record in found.values()]


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    r"""Write records to a file, one line each. The file is replaced atomically.

    Non-finite numbers among the facts become null.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_records(Path(folder, "a"), [Record(lr=1, eps=0.1, seed=3, value=float("inf"), diverged_at=7)])
    ...     Path(folder, "a").read_text()
    '{"lr": 1.0, "eps": 0.1, "seed": 3, "value": null, "diverged": true, "diverged_at": 7}\n'
    """
    lines: dict[Point, str] = {}
    for record in records:
        if record.point in lines:
            raise ValueError(f"records has {record.point.key} twice, but must have one record for each point.")
        lines[record.point] = _line(record)
    path = Path(path)
    write_atomic(path, lambda file: file.writelines(line.encode() for line in lines.values()), shared=True)


def _line(record: Record) -> str:
    line: dict[str, Any] = {name: getattr(record, name) for name in NAMES if getattr(record, name) is not None}
    line |= {"seed": record.seed, "value": None if record.diverged else record.value}
    if record.diverged:
        line["diverged"] = True
    # Default values are left out.
    line |= {name: getattr(record, name) for name in ("diverged_at", "seconds") if getattr(record, name) is not None}
    if record.pruned:
        line["pruned"] = True
    try:
        return json.dumps(line | plain(record.facts), allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        what = f"facts of {record.point.key} is {record.facts!r}"
        raise TypeError(f"{what}, which is not JSON serializable: {error}.") from None


def _record(line: Any, diverged: float) -> Record:
    """Return the record of a line. ``diverged`` is the value of a run that diverged."""
    require(isinstance(line, dict), "the line", line, "an object in braces")
    if "value" not in line:
        raise ValueError('value is missing, but is required: null, beside "diverged": true, if the run diverged.')
    has_diverged, value = line.get("diverged", False), line["value"]
    require(isinstance(has_diverged, bool), "diverged", has_diverged, "true or false")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
        require(value is not None and not math.isfinite(value), "value", line["value"], "a number, or 'inf' or 'nan'")
    if value is None:
        require(has_diverged, "value", value, 'a number, unless there is "diverged": true')
        value = diverged
    elif isinstance(value, float) and not math.isfinite(value):
        value = diverged
    elif has_diverged:
        require(False, "value", value, 'null if there is "diverged": true')
    own = {key: line[key] for key in ("seed", "diverged_at", "pruned", "seconds") if key in line}
    facts = {key: item for key, item in line.items() if key not in _OWN}
    return Record(line.get("lr"), line.get("eps"), value=value, facts=facts, **own)


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
