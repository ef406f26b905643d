"""The commands that search: tune, and study."""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from avagrad.progress import Bar
from avagrad.tune.records import read_records, write_records
from avagrad.tune.search import METHODS, plan, scores
from avagrad.tune.separability import separability
from avagrad.tune.space import Axis, Space, axis
from avagrad.tune.storage import described, open_storage
from avagrad.tune.study import DIRECTIONS, GIVEN_BACK, PRUNERS, Study
from avagrad.tune.trial import Objective
from avagrad.tune.tuner import Progress, Result, Stopped, tune

__all__ = ["SearchBar", "add_to"]

study_app = typer.Typer(help="Bring records into a study, and get them out.", no_args_is_help=True)

# Options that both searches share.
Method = Annotated[str, typer.Option(help=f"one of {', '.join(METHODS)}")]
Storage = Annotated[
    str | None, typer.Option(help="a file, or a database's URL; in runs/ by default", show_default=False)
]
Workers = Annotated[int | None, typer.Option(help="processes; 0 is this one")]
Seeds = Annotated[int, typer.Option(help="how many seeds each point is run with")]
StartLr = Annotated[float | None, typer.Option(help="where cross draws its line over eps", show_default=False)]
StartEps = Annotated[float | None, typer.Option(help="where the first line over lr is drawn", show_default=False)]
Timeout = Annotated[
    float | None,
    typer.Option(help="seconds after which a trial is killed; needs --workers", show_default=False),
]
Retries = Annotated[int, typer.Option(help="how often a failed point is run again")]
Margin = Annotated[float, typer.Option(help="by how much a neighbour must be better for the search to move there")]
Pruner = Annotated[str | None, typer.Option(help=f"one of {', '.join(PRUNERS)}", show_default=False)]
SlotsPerGpu = Annotated[int, typer.Option("--slots-per-gpu", help="how many workers share a GPU")]
Ray = Annotated[str | None, typer.Option(help="the address of a Ray cluster to work on", show_default=False)]
Name = Annotated[str | None, typer.Option(help="of the study; a database may hold many", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be run, and run nothing")]
Lr = Annotated[str | None, typer.Option("--lr", help="1e-4:1e3:15, paper, or 0.1,1,10", show_default=False)]
Eps = Annotated[str | None, typer.Option("--eps", help="1e-8:1e2:11, paper, or 0.1,1,10", show_default=False)]


def tune_command(
    objective: Annotated[str, typer.Argument(help="a function of a trial, as module:function")],
    lr: Lr = None,
    eps: Eps = None,
    method: Method = "separable",
    direction: Annotated[str, typer.Option(help=f"one of {', '.join(DIRECTIONS)}")] = "minimize",
    storage: Storage = None,
    workers: Workers = 0,
    seeds: Seeds = 1,
    start_lr: StartLr = None,
    start_eps: StartEps = None,
    timeout: Timeout = None,
    retries: Retries = 2,
    margin: Margin = 0.0,
    pruner: Pruner = None,
    slots_per_gpu: SlotsPerGpu = 1,
    ray: Ray = None,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Find the best lr and eps for a training function of your own.

    Killed or stopped, the same command goes on. The same command on other machines, with a database as storage, shares
    the work.
    """
    search = {
        "method": method, "workers": workers, "seeds": seeds, "start_lr": start_lr, "start_eps": start_eps,
        "timeout": timeout, "retries": retries, "margin": margin, "pruner": pruner, "slots_per_gpu": slots_per_gpu,
        "ray": ray, "name": name,
    }  # fmt: skip
    function = _imported(objective)
    axes = {"lr": axis(lr, "lr"), "eps": axis(eps, "eps")}
    if dry_run:
        show_plan(axes, search)
        return
    with exits_when_stopped(), SearchBar() as shown:
        result = tune(function, **axes, direction=direction, storage=storage, watcher=shown, **search)  # type: ignore[arg-type]
    show_result(result)


@study_app.command("import")
def import_records(
    file: Annotated[Path, typer.Argument(help="records in JSON lines: lr, eps, seed, value")],
    storage: Annotated[str | None, typer.Option(help="beside the file by default", show_default=False)] = None,
    name: Annotated[str, typer.Option(help="of the study")] = "imported",
    direction: Annotated[str, typer.Option(help=f"one of {', '.join(DIRECTIONS)}")] = "minimize",
) -> None:
    """Make a study of records that were made elsewhere, or add them to one; finished points stay as they are."""
    records = read_records(file, direction=direction)
    place = storage or str(file.with_suffix(".journal"))
    study = Study(place, name, direction=direction)
    new = study.add(records)
    study.close()
    typer.echo(f"{new} of {len(records)} records are new in the study {name!r} in {described(place)}")


@study_app.command("export")
def export_records(
    storage: Annotated[str, typer.Argument(help="a file, or a database's URL")],
    file: Annotated[Path, typer.Argument(help="where the records go, in JSON lines")],
    name: Name = None,
) -> None:
    """Write the records of a study to a file of JSON lines."""
    study = _opened(storage, name)
    records = study.look().records
    study.close()
    write_records(file, records)
    typer.echo(f"{len(records)} records of the study {study.name!r} are in {file}")


@study_app.command("show")
def show(
    storage: Annotated[str, typer.Argument(help="a file, or a database's URL")],
    name: Name = None,
) -> None:
    """Say what a study holds: what is finished, what has failed, the best point, and how far lr and eps part."""
    study = _opened(storage, name)
    seen = study.look()
    study.close()
    typer.echo(f"{study.name}, to {study.direction}; {json.dumps(study.about)}")
    diverged = sum(record.diverged for record in seen.records)
    typer.echo(
        f"{len(seen.records)} finished ({diverged} diverged), {len(seen.held)} under way, {len(seen.waiting)} waiting"
    )
    for key, reasons in seen.failures.items():
        # What was given back, as its worker was stopped, will be run again.
        if key not in {record.point.key for record in seen.records} and not reasons[-1].startswith(GIVEN_BACK):
            typer.echo(f"failed: {key}: {reasons[-1]}")
    known = scores(seen.records, direction=study.direction)
    sign = 1 if study.direction == "minimize" else -1
    ranked = sorted(known, key=lambda cell: known[cell].rank)
    for cell in ranked[:5]:
        shown = "diverged" if known[cell].failed else f"{sign * known[cell].loss:.6g}"
        typer.echo(f"{shown:<12} {cell}")
    values = [sorted({value for cell in known if (value := cell[i]) is not None}) for i in (0, 1)]
    if min(map(len, values)) > 1:
        space = Space(axis(values[0], "lr"), axis(values[1], "eps"))
        if len(space) == len(known):
            typer.echo(separability(space, known, start=space.start()).told())


def _opened(storage: str, name: str | None) -> Study:
    if name is None:
        names = [study.study_name for study in open_storage(storage, create=False).get_all_studies()]
        if len(names) != 1:
            raise ValueError(f"name is not given, but {described(storage)!r} holds {len(names)} studies: {names}.")
        (name,) = names
    return Study(storage, name, create=False)


@contextmanager
def exits_when_stopped() -> Iterator[None]:
    """Say how to go on after Ctrl-C, which typer would end without a word."""
    try:
        yield
    except Stopped as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(130) from None


def _imported(text: str) -> Objective:
    module, colon, function = text.partition(":")
    if not colon or not module or not function or module.endswith(".py"):
        raise ValueError(f"objective is {text!r}, but must be module:function, such as train:objective, without .py.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        raise ValueError(f"objective is {text!r}, but there is no module {module!r} here or on the path.") from None
    for part in function.split("."):
        if not hasattr(found, part):
            raise ValueError(f"objective is {text!r}, but {module!r} has no {function!r}.")
        found = getattr(found, part)
    return found  # type: ignore[return-value]  # the tuner looks whether it can be called


def show_plan(axes: dict[str, Axis | None], search: dict[str, Any]) -> None:
    """Print what a search would run."""
    space = Space(axes["lr"], axes["eps"])
    first = plan(search["method"], space, {}, start=space.start(search["start_lr"], search["start_eps"]))
    for line in (space.lr, space.eps):
        if line is not None:
            values = ", ".join(f"{value:.4g}" for value in line.values)
            typer.echo(f"{line.name}: {values}")
    count = first.at_most * search["seeds"]
    rest = "" if search["method"] == "grid" else f" if the first ring confirms, of {len(space) * search['seeds']}"
    typer.echo(f"{search['method']}: at most {count} trials{rest}; first the {first.stage}")


def show_result(result: Result) -> None:
    """Print what a search has found; exit with code 1 if it has found nothing, or a point has failed."""
    typer.echo(result.told())
    if result.failed or result.best is None:
        raise typer.Exit(1)


class SearchBar:
    """Shows progress: a bar on a terminal, else a line now and then.

    >>> with SearchBar() as bar:
    ...     bar.console.stderr
    True
    """

    EVERY = 30.0  # seconds

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar = Bar(self.console, unit="")
        self.last = time.monotonic()

    def __enter__(self) -> "SearchBar":
        with ExitStack() as stack:
            stack.enter_context(self.bar)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __call__(self, progress: Progress) -> None:
        """Show how far the search is."""
        if self.console.is_terminal:
            best = "" if progress.at is None else f"best {progress.best:.4g} at {progress.at}"
            counts = f"{progress.done} of {progress.total}"
            self.bar.at(f"{progress.stage}: {counts}", progress.done, progress.total, best)
        elif time.monotonic() - self.last > self.EVERY:
            self.last = time.monotonic()
            print(progress.told(), file=sys.stderr, flush=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands to a command line.

    >>> app = typer.Typer()
    >>> add_to(app)
    >>> [command.name for command in app.registered_commands]
    ['tune']
    """
    app.command("tune")(tune_command)
    app.add_typer(study_app, name="study")
