"""The command ``avagrad``."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from avagrad import __version__
from avagrad.cli import tuning
from avagrad.tune.storage import StorageError
from avagrad.tune.tuner import Stopped, TuningError
from avagrad.tune.workers import WorkerError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Find the learning rate and epsilon of a training; train with the methods of 'Domain-independent Dominance of "
    "Adaptive Methods', and check what it says.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tuning.add_to(app)
try:
    from avagrad.cli import demo, lab, report, sweep
except ImportError as error:  # avagrad[tune] alone is there: its commands work without the rest
    _WITHOUT_LAB: ImportError | None = error
else:
    _WITHOUT_LAB = None
    lab.add_to(app)
    sweep.add_to(app)
    demo.add_to(app)
    report.add_to(app)


@app.callback(
    invoke_without_command=True,
    epilog=f"The commands of the lab and report need more: {_WITHOUT_LAB}. pip install 'avagrad[lab]'"
    if _WITHOUT_LAB
    else None,
)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"avagrad {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: what is wrong is said in a sentence, and ends it with code 2.

    >>> main(["train", "digitz"])
    Traceback (most recent call last):
    ...
    SystemExit: 2
    """
    try:
        app(arguments)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if folder := getattr(end, "folder", None):  # a training that was told to stop
            print(f"stopped and saved; avagrad resume {folder} goes on", file=sys.stderr)
        raise
    except (ValueError, TypeError, OSError, ImportError, TuningError, WorkerError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
