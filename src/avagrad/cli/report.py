"""The command that makes a page of a folder."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_to"]

_NAMED = 10  # problems that are named


def report(
    folder: Annotated[Path, typer.Argument(help="a folder with runs, sweeps, records, measurements")],
    out: Annotated[
        Path | None, typer.Option(help="the page's file; report.html in the folder by default", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what the folder holds, and write nothing")] = False,
) -> None:
    """Write one page about all that a folder holds: heat maps, curves, tables, runs with their settings.

    The page needs no network. Its figures (PNG, SVG) and tables (Markdown, LaTeX, CSV) are written beside it.
    """
    from avagrad.report.page import write_report
    from avagrad.report.reading import collect

    if dry_run:
        found = collect(folder)
        typer.echo(f"{folder} holds {found.told()}")
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
    typer.echo(f"the page is {written.page}")
    if show:
        webbrowser.open(written.page.resolve().as_uri())


def add_to(app: typer.Typer) -> None:
    """Add the command to a command line.

    >>> app = typer.Typer()
    >>> add_to(app)
    >>> [command.callback.__name__ for command in app.registered_commands]
    ['report']
    """
    app.command()(report)
