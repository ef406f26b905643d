"""The commands that write a page: report and demo."""

import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from avagrad.cli.options import DryRun
from avagrad.lab.demo import jobs
from avagrad.lab.folder import RESULT
from avagrad.lab.worker_pool import Job, run_jobs
from avagrad.progress import Bar
from avagrad.stopping import interrupt_on_sigterm

__all__ = ["app"]

app = typer.Typer()
_Open = Annotated[bool, typer.Option("--open", help="open the page in a browser")]
_NAMED = 10  # problems that are listed


@app.command()
def report(
    folder: Annotated[
        str, typer.Argument(help="a folder with runs, sweeps, records, measurements; or one study (.journal)")
    ],
    out: Annotated[Path | None, typer.Option(help="file of the page; default: report.html in the folder")] = None,
    show: _Open = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the folder's contents, write nothing")] = False,
) -> None:
    """Write one page about everything in a folder: heat maps, curves, tables, runs with their settings.

    The page needs no network. Its figures (PNG, SVG) and tables (Markdown, CSV) are written next to it.
    """
    try:
        from avagrad.report.page import write_report
        from avagrad.report.reading import collect
    except ModuleNotFoundError as error:
        install = "pip install '.[lab]' in avagrad's folder"
        raise ValueError(f"a report needs {error.name}, which is not installed: {install}.") from error

    if dry_run:
        found = collect(folder)
        typer.echo(f"{folder} holds {found.summary()}")
        for problem in found.problems:
            typer.echo(f"problem: {problem}")
        return
    written = write_report(folder, out)
    for line in written.findings:
        typer.echo(line)
    for problem in written.problems[:_NAMED]:
        typer.echo(f"problem: {problem}", err=True)
    if len(written.problems) > _NAMED:
        typer.echo(f"and {len(written.problems) - _NAMED} more, which the page names", err=True)
    typer.echo(f"{len(written.files)} files of figures and tables are in {written.figures}")
    _show_page(written.page, in_browser=show)
    if not written.files:
        typer.echo(f"nothing to show was found in {folder}", err=True)
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs/demo"),
    workers: Annotated[int, typer.Option(help="number of processes, each with one thread")] = 2,
    show: _Open = False,
    dry_run: DryRun = False,
) -> None:
    """Run the paper's experiments at a small scale, on data that come with the packages, and write a report page.

    The synthetic problem, three heat maps of 441 trainings, a search by two lines, and all methods on digits and
    characters: three minutes on two cores. After a stop or a kill, the same command resumes.
    """
    todo = jobs()
    if dry_run:
        left = [job for job in todo if not job.is_done(out)]
        for job in todo:
            state = f"about {job.cost:g} s on one core" if job in left else "already done"
            typer.echo(f"{out / job.name}: {state}")
        typer.echo(f"{len(todo)} jobs, about {sum(job.cost for job in left):.0f} s on one core")
        return
    with interrupt_on_sigterm():
        with _JobsBar(todo, out) as shown:
            failed = run_jobs(todo, out, workers=workers, on_progress=shown)
        page, lines = _report(out, todo)
    typer.echo("\n".join(lines))
    _show_page(page, in_browser=show)
    for name, why in failed.items():
        typer.echo(f"failed: {name}: {why}", err=True)
    if failed:
        typer.echo(f"{len(failed)} of {len(todo)} jobs failed; run it again to retry them", err=True)
        raise typer.Exit(1)


def _show_page(page: Path, *, in_browser: bool) -> None:
    """Print the path of a page, and open it in a browser if requested."""
    typer.echo(f"the page is {page}")
    if in_browser:
        webbrowser.open(page.resolve().as_uri())


def _report(out: Path, todo: Sequence[Job]) -> tuple[Path, list[str]]:
    """Write the page, unless it is newer than all results; return its path, and the findings."""
    from avagrad.report.findings import six_lines
    from avagrad.report.page import PAGE, write_report
    from avagrad.report.reading import collect

    page = out / PAGE
    results = [out / job.name / RESULT for job in todo if job.is_done(out)]
    if not page.exists() or any(result.stat().st_mtime > page.stat().st_mtime for result in results):
        typer.echo("writing the page", err=True)
        write_report(out)
    return page, six_lines(collect(out))


class _JobsBar(Bar):
    """Shows the progress of all jobs together, weighted by their cost."""

    COUNTS_STEPS = False
    EVERY = 10.0

    def __init__(self, todo: Sequence[Job], out: Path) -> None:
        super().__init__()
        self.costs = {job.name: job.cost for job in todo}
        self.shares = {job.name: 1.0 for job in todo if job.is_done(out)}
        self.began = time.monotonic()
        already = f", {len(self.shares)} of them already done" if self.shares else ""
        is_done = len(self.shares) == len(todo)
        typer.echo(f"all {len(todo)} jobs were already done" if is_done else f"{len(todo)} jobs{already}", err=True)

    def __call__(self, name: str, share: float) -> None:
        ended = share == 1.0 != self.shares.get(name)
        self.shares[name] = share
        done = sum(self.costs[job] * part for job, part in self.shares.items()) / sum(self.costs.values())
        running = " and ".join(job for job, part in self.shares.items() if part < 1.0)
        finished, seconds = list(self.shares.values()).count(1.0), time.monotonic() - self.began
        summary = f"{100 * done:3.0f} %, {finished} of {len(self.costs)} jobs after {seconds:.0f} s"
        self.at(f"{summary}: {running}", round(1000 * done), 1000)
        self.line(f"{summary}: {name} is done" if ended else f"{summary}: {running}", now=ended)
