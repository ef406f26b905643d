"""The command ``report``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer()
Open = Annotated[bool, typer.Option("--open", help="open the page in a browser")]
_NAMED = 10  # problems that are listed


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a folder with runs, sweeps, records, measurements")],
    out: Annotated[
        Path | None, typer.Option(help="file of the page; default: report.html in the folder", show_default=False)
    ] = None,
    show: Open = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the folder's contents, write nothing")] = False,
) -> None:
    """Write one page about everything in a folder: heat maps, curves, tables, runs with their settings.

    The page needs no network. Its figures (PNG, SVG) and tables (Markdown, CSV) are written next to it.
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
    typer.echo(f"{len(written.files)} files of figures and tables are in {written.figures}")
    show_page(written.page, in_browser=show)


def show_page(page: Path, *, in_browser: bool) -> None:
    """Print the path of a page, and open it in a browser if requested."""
    typer.echo(f"the page is {page}")
    if in_browser:
        webbrowser.open(page.resolve().as_uri())
