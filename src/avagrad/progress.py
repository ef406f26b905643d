"""Progress: a bar on a terminal, and occasional lines elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["Bar"]


class _StepRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} steps/s" if speed else "")


class Bar(Progress):
    """A context manager that shows progress on standard error.

    On a terminal it shows a bar; elsewhere only ``line`` prints.

    >>> with Bar() as bar:
    ...     bar.at("run", 1, 2)
    """

    COUNTS_STEPS = True  # steps are many and quick; other units are few and slow, and have no rate
    EVERY = 30.0  # minimum seconds between lines

    def __init__(self) -> None:
        console = Console(stderr=True)
        quick = [BarColumn(), TextColumn("{task.percentage:>3.0f} %"), _StepRate(), TimeElapsedColumn()]
        super().__init__(
            TextColumn("{task.description}"),
            *(quick if self.COUNTS_STEPS else ()),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task_id = self.add_task("", total=None, last="")
        self.last_line = time.monotonic()

    def at(self, what: str, done: int, total: int, last: str = "") -> None:
        """Show the progress and the last result."""
        self.update(self.task_id, description=what, completed=done, total=total, last=last)

    def line(self, text: str, *, now: bool = False) -> None:
        """Print a line if there is no terminal: ``now``, or if the last one was long enough ago."""
        if not self.console.is_terminal and (now or time.monotonic() - self.last_line > self.EVERY):
            self.last_line = time.monotonic()
            print(text, file=sys.stderr, flush=True)
