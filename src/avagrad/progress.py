"""A bar for whatever takes long: share done, rate, time left. Nothing at all where nobody watches a terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["Bar"]


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self.unit}/s" if speed and self.unit else "")


class Bar:
    """Is told how far a computation is; a context manager.

    >>> import io
    >>> with Bar(Console(force_terminal=False, file=io.StringIO())) as bar:
    ...     bar.at("run", 1, 2)
    """

    def __init__(self, console: Console, unit: str = "steps") -> None:
        self.console = console
        # Steps are many and quick; whatever else is counted is few and slow, and says so itself.
        quick = [BarColumn(), TextColumn("{task.percentage:>3.0f} %"), _Rate(unit), TimeElapsedColumn()] if unit else []
        self.bar = Progress(
            TextColumn("{task.description}"),
            *quick,
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=None, last="")

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, value, trace)

    def at(self, what: str, done: int, total: int, last: str = "") -> None:
        """Show how far it is, and what came out last."""
        self.bar.update(self.task, description=what, completed=done, total=total, last=last)
