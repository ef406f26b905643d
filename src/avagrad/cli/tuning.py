"""The commands that search over lr and eps: tune and sweep; and study, for their results."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from avagrad.checks import require
from avagrad.cli.lab import RunBar, Task
from avagrad.cli.options import with_options
from avagrad.lab.options import OPTIONS, SEARCH_OPTIONS, Option, config_from
from avagrad.lab.sweep import ENGINES, check_sweep, default_axes, sweep
from avagrad.names import imported
from avagrad.progress import Bar
from avagrad.tune.arguments import check_search
from avagrad.tune.records import read_records, sign_of, write_records
from avagrad.tune.result import Progress, Result
from avagrad.tune.scores import scores
from avagrad.tune.search import plan
from avagrad.tune.space import USUAL_AXES, Axis, Space, axes_of, axis
from avagrad.tune.storage import described
from avagrad.tune.stored_search import stored_search
from avagrad.tune.study import Study
from avagrad.tune.tables import tables
from avagrad.tune.tuner import tune

__all__ = ["app"]

app = typer.Typer()
study_app = typer.Typer(help="Import, export and show the records of a study.", no_args_is_help=True)
app.add_typer(study_app, name="study")

_DIRECTION = Option("direction", str, "one of minimize, maximize", default="minimize")
_TUNE = [
    Option("lr", str, "1e-4:1e3:15, paper, or 0.1,1,10"),
    Option("eps", str, "1e-8:1e2:11, paper, or 0.1,1,10"),
    Option("optimizer", str, f"its axes are used if none is given, and its eps to start at: {', '.join(USUAL_AXES)}"),
    _DIRECTION,
    *SEARCH_OPTIONS.values(),
    OPTIONS["dry_run"],
]
_EXCLUDED = ("lr", "eps", "seed", "resume", "save_every", "download")  # set for each point
_SWEEP = [
    Option("lr", str, "1e-4:1e3:15, 0.1,1,10, ...; default: the paper's"),
    Option("eps", str, "likewise; 'preset' for only the preset's value"),
    *SEARCH_OPTIONS.values(),
    Option("engine", str, f"one of {', '.join(ENGINES)}: all points at once", default="runs"),
    Option("members_at_once", int, "points of an ensemble that are trained together; chosen automatically by default"),
    *(option for option in OPTIONS.values() if option.name not in _EXCLUDED),
]
_Storage = Annotated[str, typer.Argument(help="a file or a database URL")]
_Name = Annotated[str | None, typer.Option(help=SEARCH_OPTIONS["name"].help)]


@app.command("tune")
@with_options(_TUNE)
def tune_command(
    objective: Annotated[str, typer.Argument(help="a function of a trial, as module:function")], **given: Any
) -> None:
    """Find the best lr and eps for a training function of your own.

    After a stop or a kill, the same command resumes. The same command on other machines, with a database as storage,
    shares the work.
    """
    function = imported("objective", "function", objective)
    require(callable(function), "objective", objective, f"a function of a trial, not {function!r}")
    lr, eps = axes_of(given.pop("lr"), given.pop("eps"), given["optimizer"])
    if given.pop("dry_run"):
        _show_plan(lr, eps, given)
        return
    if given["name"] is None:  # what is typed finds it again, whatever it is
        given["name"] = objective
    with _SearchBar() as bar:
        about = {"objective": objective.rpartition(":")[2]}
        result = tune(function, lr=lr, eps=eps, about=about, watcher=bar, **given)
    _show_result(result)


@app.command("sweep")
@with_options(_SWEEP)
def sweep_command(task: Task, **given: Any) -> None:
    """Search over lr and eps on a task of the lab: the paper's heat maps, or two lines of them."""
    usual = default_axes(task, given["optimizer"] or "avagrad")
    lr = axis(given["lr"] or usual["lr"], "lr")
    eps = None if given["eps"] == "preset" else axis(given["eps"] or usual["eps"], "eps")
    config = config_from(task, given | Space(lr, eps).cells()[0]._asdict())
    if given["dry_run"]:
        check_sweep(config, eps=eps, engine=given["engine"], search=given)
        _show_plan(lr, eps, given)
        return
    search = {name: given[name] for name in (*SEARCH_OPTIONS, "engine", "members_at_once")} | {"folder": given["out"]}
    # The points of an ensemble all finish at its end, so the bar counts steps.
    bar = RunBar() if given["engine"] == "ensemble" else _SearchBar()
    search["callback" if isinstance(bar, RunBar) else "watcher"] = bar
    with bar:
        result = sweep(config, lr=lr, eps=eps, **search)
    _show_result(result)


@study_app.command("import")
def import_records(
    file: Annotated[Path, typer.Argument(help="records in JSON lines: lr, eps, seed, value")],
    storage: Annotated[str | None, typer.Option(help="default: next to the file")] = None,
    name: Annotated[str, typer.Option(help="name of the study")] = "imported",
    direction: Annotated[str, typer.Option(help=_DIRECTION.help)] = "minimize",
) -> None:
    """Make a study of records from elsewhere, or add them to one; points that are finished there are skipped."""
    records = read_records(file, direction=direction)
    place = storage or str(file.with_suffix(".journal"))
    with closing(Study(place, name, direction=direction)) as study:
        new = study.add(records)
    typer.echo(f"{new} of {len(records)} records are new in the study {name!r} in {described(place)}")


@study_app.command("export")
def export_records(
    storage: _Storage,
    file: Annotated[Path, typer.Argument(help="file for the records, in JSON lines")],
    name: _Name = None,
) -> None:
    """Write the records of a study to a file of JSON lines."""
    require(file.parent.is_dir(), "file", str(file), "in a folder that exists")
    if file.exists():
        require(file.is_file(), "file", str(file), "a regular file, or a new one")
        try:
            read_records(file)
        except ValueError:
            raise ValueError(f"file is {str(file)!r}, which is not a file of records: choose another one.") from None
    with closing(Study(storage, name, create=False)) as study:
        records = study.snapshot().records
    write_records(file, records)
    typer.echo(f"{len(records)} records of the study {study.name!r} are in {file}")


@study_app.command("show")
def show(storage: _Storage, name: _Name = None) -> None:
    """Show a study: finished and failed points, the best points, and a table of each grid.

    Grids that share values of lr or eps are one table, followed by a summary of how separable lr and eps are.
    """
    with closing(Study(storage, name, create=False)) as study:
        seen, found = study.snapshot(), study.search
    typer.echo(f"{study.name}, to {study.direction}; {json.dumps(study.about)}")
    diverged = sum(record.diverged for record in seen.records)
    typer.echo(
        f"{len(seen.records)} finished ({diverged} diverged), {len(seen.running)} running, {len(seen.waiting)} waiting"
    )
    for key, reason in seen.without_result().items():
        typer.echo(f"failed: {key}: {reason}")
    known = scores(seen.records, direction=study.direction)
    sign = sign_of(study.direction)
    several = any(score.count > 1 for score in known.values())
    for cell in sorted(known, key=lambda cell: known[cell].rank)[:5]:
        score = known[cell]
        value = "diverged" if score.failed else f"{sign * score.loss + 0.0:.6g}"  # adding 0 avoids -0
        notes = [f"{score.count} seed{'s' if score.count > 1 else ''}"] if several else []
        notes += ["pruned"] if score.pruned else []
        typer.echo(f"{value:<12} {cell}" + (f" ({', '.join(notes)})" if notes else ""))
    if known:
        width = shutil.get_terminal_size((120, 24)).columns
        search = stored_search(found, seen.records, study.direction)
        typer.echo("\n" + tables(known, direction=study.direction, width=width, search=search))


def _show_plan(lr: Axis | None, eps: Axis | None, search: dict[str, Any]) -> None:
    """Print what a search would run."""
    checked = {"direction", *SEARCH_OPTIONS} - {"start_lr", "start_eps"}
    check_search(**{name: search[name] for name in checked if name in search})
    space = Space(lr, eps)
    start = space.start(search["start_lr"], search["start_eps"], search["optimizer"])
    first = plan(search["method"], space, {}, start=start)
    for line in space.axes:
        typer.echo(f"{line.name}: {', '.join(f'{value:.4g}' for value in line.values)}")
    count = first.at_most * search["seeds"]
    lines = ", no axis is extended and no coarse line fails"
    unless = "no neighbour is better" + (lines if search["method"] == "lines" else "")
    rest = "" if search["method"] == "grid" else f" if {unless}, of {len(space) * search['seeds']}"
    typer.echo(f"{search['method']}: at most {count} trials{rest}; first the {first.stage}")


def _show_result(result: Result) -> None:
    """Print the result of a search; the exit code is 1 if there is none, or a point has failed."""
    typer.echo(result.summary())
    if result.failed or result.best is None:
        raise typer.Exit(1)


class _SearchBar(Bar):
    """Shows the progress of a search: a bar on a terminal, else a line for each stage and occasional ones between."""

    COUNTS_STEPS = False
    stage = ""

    def __call__(self, progress: Progress) -> None:
        best = "" if progress.at is None else f"best {progress.best:.4g} at {progress.at}"
        self.at(f"{progress.stage}: {progress.done} of {progress.total}", progress.done, progress.total, best)
        self.line(progress.summary(), now=progress.stage != self.stage)
        self.stage = progress.stage
