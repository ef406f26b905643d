"""The command that shows all of it in three minutes."""

import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from avagrad.lab.demo import jobs
from avagrad.lab.folder import RESULT
from avagrad.lab.stopping import Stopped
from avagrad.lab.worker_pool import Job, run_jobs
from avagrad.progress import Bar

__all__ = ["add_to"]


def demo(
    out: Annotated[Path, typer.Option(help="a folder for all that is run")] = Path("runs/demo"),
    workers: Annotated[int, typer.Option(help="processes, each with one thread")] = 2,
    show: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be run, and run nothing")] = False,
) -> None:
    """Run the paper's experiments in small, on data that are there, and write a page about what came out.

    The synthetic problem, three heat maps of 441 trainings, a search by two lines, and all methods on digits and
    characters: three minutes on two cores. Killed or stopped, the same command goes on.
    """
    todo = jobs()
    if dry_run:
        _say_what_would_run(todo, out)
        return
    _check_that_it_can_be_written_to(out)
    with _told_when_stopped():
        with _Shown(todo, out) as shown:
            failed = run_jobs(todo, out, workers=workers, on_progress=shown)
        page, lines = _report(out, todo)
    for line in lines:
        typer.echo(line)
    typer.echo(f"the page is {page}")
    for name, why in failed.items():
        typer.echo(f"failed: {name}: {why}", err=True)
    if show:
        webbrowser.open(page.resolve().as_uri())
    if failed:
        typer.echo(f"{len(failed)} of {len(todo)} jobs failed; the same command tries them again", err=True)
        raise typer.Exit(1)


def _say_what_would_run(todo: Sequence[Job], out: Path) -> None:
    for job in todo:
        state = "is there already" if job.is_done(out) else f"about {job.cost:g} s on one core"
        typer.echo(f"{out / job.name}: {state}")
    typer.echo(f"{len(todo)} jobs, about {sum(job.cost for job in todo if not job.is_done(out)):.0f} s on one core")


def _check_that_it_can_be_written_to(out: Path) -> None:
    """Say at once what each job would say otherwise."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OSError(f"out is {str(out)!r}, where nothing can be written ({error}).") from error


def _report(out: Path, todo: Sequence[Job]) -> tuple[Path, list[str]]:
    """Write the page, unless it is younger than all that it tells of; return where it is, and the findings."""
    from avagrad.report.findings import six_lines
    from avagrad.report.page import PAGE, write_report
    from avagrad.report.reading import collect

    page = out / PAGE
    results = [out / job.name / RESULT for job in todo if job.is_done(out)]
    if not page.exists() or any(result.stat().st_mtime > page.stat().st_mtime for result in results):
        print("writing the page", file=sys.stderr, flush=True)
        page = write_report(out).page
    return page, six_lines(collect(out))


@contextmanager
def _told_when_stopped() -> Iterator[None]:
    """Say how to go on after Ctrl-C or SIGTERM, which typer would end without a word."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    try:
        yield
    except (Stopped, KeyboardInterrupt):
        typer.echo("stopped; what was done is kept, and the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class _Shown(Bar):
    """Shows how far all jobs are together: a bar on a terminal, else lines."""

    EVERY = 10.0  # seconds between two lines, at most

    def __init__(self, todo: Sequence[Job], out: Path) -> None:
        self.costs = {job.name: job.cost for job in todo}
        self.shares = {job.name: 1.0 for job in todo if job.is_done(out)}
        super().__init__(Console(stderr=True), unit="")
        self.began = self.last = time.monotonic()
        there = len(self.shares)
        told = f"all {there} jobs were there already" if there == len(todo) else f"{len(todo)} jobs"
        self._say(f"{told}, {there} of them are there already" if 0 < there < len(todo) else told)

    def __call__(self, name: str, share: float) -> None:
        """Hear how far a job is."""
        ended = share == 1.0 != self.shares.get(name)
        self.shares[name] = share
        if self.console.is_terminal:
            self.at(f"{self._told()}: {self._under_way()}", round(1000 * self._share()), 1000)
        elif ended:
            self._say(f"{self._told()}: {name} is done")
        elif time.monotonic() - self.last > self.EVERY:
            self._say(f"{self._told()}: {self._under_way()}")

    def _say(self, line: str) -> None:
        self.last = time.monotonic()
        print(line, file=sys.stderr, flush=True)

    def _under_way(self) -> str:
        return " and ".join(name for name, share in self.shares.items() if share < 1.0)

    def _share(self) -> float:
        """Return how much of all is done, by what it costs."""
        return sum(self.costs[name] * share for name, share in self.shares.items()) / sum(self.costs.values())

    def _told(self) -> str:
        ended, seconds = sum(share == 1.0 for share in self.shares.values()), time.monotonic() - self.began
        return f"{100 * self._share():3.0f} %, {ended} of {len(self.costs)} jobs after {seconds:.0f} s"


def add_to(app: typer.Typer) -> None:
    """Add the command to a command line.

    >>> app = typer.Typer()
    >>> add_to(app)
    >>> [command.callback.__name__ for command in app.registered_commands]
    ['demo']
    """
    app.command()(demo)
