"""The progress and the result of a search."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from avagrad.tune.records import Record
from avagrad.tune.separability import Separability
from avagrad.tune.space import Cell

__all__ = ["Best", "Progress", "Result", "Verdict"]


@dataclass(frozen=True)
class Progress:
    """The progress of a search.

    >>> Progress(3, 47, 1, "line over lr at eps 0.1", Cell(1.0, 0.1), 0.25, 88.0).summary()
    'line over lr at eps 0.1: 3 of 47 done, best 0.25 at lr 1, eps 0.1, 1 running, 1:28 left'
    """

    done: int
    total: int
    running: int
    stage: str
    at: Cell | None
    best: float | None
    seconds_left: float | None

    def summary(self) -> str:
        """Return the progress in one line."""
        parts = [f"{self.done} of {self.total} done"]
        if self.at is not None:
            parts.append(f"best {self.best:.4g} at {self.at}")
        if self.running:
            parts.append(f"{self.running} running")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
        return f"{self.stage}: {', '.join(parts)}"


@dataclass(frozen=True)
class Best:
    """The point that a search has picked; ``value`` is the mean over its seeds.

    >>> Best(1.0, 0.1, 0.25, (0.2, 0.3)).lr
    1.0
    """

    lr: float | None
    eps: float | None
    value: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether the neighbours of a pick confirm it, if there is no grid to measure on.

    >>> Verdict(True, 1, "No neighbour is better.").summary()
    'No neighbour is better.'
    """

    confirmed: bool | None
    rings: int  # how many were needed; lr and eps are separable if the first one confirms
    text: str

    def summary(self) -> str:
        """Return the verdict in a sentence."""
        return self.text


@dataclass(frozen=True)
class Result:
    """The result of a search.

    ``best`` is None if every point diverged or failed; ``trials`` are the records of this search's axes and seeds;
    ``failed`` has the points without a result, with the reasons.

    >>> Result(None, (), None, {}, ()).summary()
    'No point has given a finite value.'
    """

    best: Best | None
    trials: tuple[Record, ...]
    separability: Separability | Verdict | None
    failed: dict[str, str]
    path: tuple[Cell, ...]
    at_ends: tuple[str, ...] = ()  # the axes that have the pick at an end
    extended: tuple[str, ...] = ()  # the axes that the search has extended, and how far
    new: int | None = field(default=None, compare=False)  # how many of the trials were run in this call
    stage: str = ""  # how the search ended

    def summary(self) -> str:
        """Return the result in a few sentences."""
        failed = f"Without a result: {'; '.join(f'{key} ({why})' for key, why in self.failed.items())}."
        if self.best is None:
            nothing = f"No point has given a finite value{f': {self.stage}' if self.stage else ''}."
            return f"{nothing} {failed}" if self.failed else nothing
        cell, count = Cell(self.best.lr, self.best.eps), len(self.trials)
        before = f" ({count - self.new} from earlier runs)" if self.new is not None and self.new < count else ""
        parts = [
            f"Best: {cell}, with {self.best.value:.6g}, after {count} {'trial' if count == 1 else 'trials'}{before}."
        ]
        if count > 1 and len({record.value for record in self.trials}) == 1:
            parts.append("All trials have the same value: does the objective use the lr and eps of the trial?")
        elif self.separability is not None:
            parts += [self.separability.summary(), *self._without_effect()]
        if self.extended:
            parts.append(f"The best was at an end, so the search was extended: {', '.join(self.extended)}.")
        if self.at_ends:
            parts.append(f"It is at an end of the {' and the '.join(self.at_ends)} axis: try a wider one.")
        if self.failed:
            parts.append(failed)
        return " ".join(parts)

    def _without_effect(self) -> Iterator[str]:
        """Say of an axis whether its values are level at each value of the other."""
        for name, other in (("lr", "eps"), ("eps", "lr")):
            lines: defaultdict[tuple[float | None, int], dict[float | None, float]] = defaultdict(dict)
            for record in self.trials:
                lines[getattr(record, other), record.seed][getattr(record, name)] = record.value
            is_level = all(len(set(line.values())) == 1 for line in lines.values())
            if is_level and max(map(len, lines.values())) > 2:
                yield f"No value of {name} made a difference: does the objective use trial.{name}?"
