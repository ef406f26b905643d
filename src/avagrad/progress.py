"""A bar for whatever takes long: share done, rate, time left. Nothing at all where nobody watches a terminal."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from avagrad.lab.config import Config
from avagrad.lab.trainer import Watcher

__all__ = ["Bar"]


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} steps/s" if speed else "")


class Bar(Watcher):
    """Watches a run, or is told how far a computation is (:meth:`at`); a context manager.

    >>> import io
    >>> with Bar(Console(force_terminal=False, file=io.StringIO())) as bar:
    ...     bar.at("run", 1, 2)
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            _Rate(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=None, last="")

    def __enter__(self) -> "Bar":
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, value, trace)

    def started(self, config: Config, done: int, total: int) -> None:
        """See a run begin, or go on."""
        self.at(f"{config.task}, {config.optimizer}", done, total)

    def stepped(self, done: int) -> None:
        """See a step."""
        self.bar.update(self.task, completed=done)

    def recorded(self, row: dict[str, Any]) -> None:
        """See a line of the metrics."""
        if row["error"] is not None:
            self.bar.update(self.task, last=f"epoch {row['epoch']}: loss {row['loss']:.4g}, error {row['error']:.4g}")

    def at(self, what: str, done: int, total: int) -> None:
        """Show how far a computation is."""
        self.bar.update(self.task, description=what, completed=done, total=total)
