"""The command ``avagrad``."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from avagrad import __version__
from avagrad.cli import lab, report, tuning
from avagrad.lab.command import EXPECTED
from avagrad.stopping import Stopped
from avagrad.tune.loop import TuningError
from avagrad.tune.storage import StorageError
from avagrad.tune.workers.base import WorkerError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Prints how to resume: typer would treat Stopped as Ctrl-C, and abort without a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Stopped as stopped:
            typer.echo(str(stopped), err=True)
            raise typer.Exit(stopped.exit_code) from None


app = typer.Typer(
    cls=_Commands,
    help="Find the learning rate and epsilon of a training; train with the methods of 'Domain-independent Dominance of "
    "Adaptive Methods', and check its results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (tuning, lab, report):
    app.add_typer(module.app)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"avagrad {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error is printed as one line, and the exit code is 2.

    >>> main(["train", "digitz"])
    Traceback (most recent call last):
    ...
    SystemExit: 2
    """
    usual = warnings.formatwarning
    folder = Path(__file__).parent.parent

    def shown(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
        is_ours = folder in Path(filename).parents
        return f"warning: {message}\n" if is_ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    try:
        app(arguments)
    except (*EXPECTED, TuningError, WorkerError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        warnings.formatwarning = usual
