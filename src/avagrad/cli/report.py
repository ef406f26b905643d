"""The command that makes a page of a folder."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer()
Open = Annotated[bool, typer.Option("--open", help="open the page in a browser")]
_NAMED = 10  # problems that are named


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a folder with runs, sweeps, records, measurements")],
    out: Annotated[
        Path | None, typer.Option(help="the page's file; report.html in the folder by default", show_default=False)
    ] = None,
    show: Open = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what the folder holds, and write nothing")] = False,
) -> None:
    """Write one page about all that a folder holds: heat maps, curves, tables, runs with their settings.

    The page needs no network. Its figures (PNG, SVG) and tables (Markdown, CSV) are written beside it.
    """
    from avagrad.report.page import write_report
    from avagrad.report.reading import collect

    if dry_run:
        found = collect(folder)
        typer.echo(f"{folder} holds {found.summary()}")
        for problem in found.problems:
            typer.echo(f"cannot be read: {problem}")
        return
    written = write_report(folder, out)
    for line in written.findings:
        typer.echo(line)
    if not written.files:
        typer.echo(f"nothing to show was found in {folder}")
    for problem in written.problems[:_NAMED]:
        typer.echo(f"cannot be read: {problem}", err=True)
    if len(written.problems) > _NAMED:
        typer.echo(f"and {len(written.problems) - _NAMED} more, which the page names", err=True)
    typer.echo(f"{len(written.files)} files of figures and tables are in {written.beside}")
    show_page(written.page, in_browser=show)


def show_page(page: Path, *, in_browser: bool) -> None:
    """Print where a page is, and open it in a browser if that is wanted."""
    typer.echo(f"the page is {page}")
    if in_browser:
        webbrowser.open(page.resolve().as_uri())
