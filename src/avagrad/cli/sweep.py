"""The command that searches over lr and eps on a task of the lab."""

from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console

from avagrad.cli import tuning
from avagrad.cli.lab import RunBar
from avagrad.cli.options import with_options
from avagrad.lab.options import OPTIONS, config_from
from avagrad.lab.sweep import ENGINES, default_axes, sweep
from avagrad.tune.space import Axis, axis

__all__ = ["add_to"]

# What a point has, or the search itself.
_NOT_HERE = ("lr", "eps", "seed", "resume", "save_every", "tensorboard", "download")


def sweep_command(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help="a task of `avagrad list`, or module:Class")],
    lr: Annotated[str | None, typer.Option("--lr", help="1e-4:1e3:15, 0.1,1,10, ...; the paper's by default")] = None,
    eps: Annotated[str | None, typer.Option("--eps", help="likewise; 'preset' for the preset's alone")] = None,
    method: tuning.Method = "separable",
    storage: tuning.Storage = None,
    workers: tuning.Workers = 0,
    seeds: tuning.Seeds = 1,
    start_lr: tuning.StartLr = None,
    start_eps: tuning.StartEps = None,
    timeout: tuning.Timeout = None,
    retries: tuning.Retries = 2,
    margin: tuning.Margin = 0.0,
    pruner: tuning.Pruner = None,
    slots_per_gpu: tuning.SlotsPerGpu = 1,
    ray: tuning.Ray = None,
    name: tuning.Name = None,
    engine: Annotated[str, typer.Option(help=f"one of {', '.join(ENGINES)}: all points at once")] = "runs",
    members_at_once: Annotated[int | None, typer.Option(help="of an ensemble; chosen by default")] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Search over lr and eps on a task of the lab: the paper's heat maps, or two lines of them."""
    usual = default_axes(task, given["optimizer"] or "avagrad")
    axes: dict[str, Axis | None] = {"lr": axis(lr or usual["lr"], "lr")}
    axes["eps"] = None if eps == "preset" else axis(eps or usual["eps"], "eps")
    search = {
        key: context.params[key]
        for key in ("method", "workers", "seeds", "start_lr", "start_eps", "timeout", "retries", "margin", "pruner",
                    "slots_per_gpu", "ray", "name")
    }  # fmt: skip
    if given["dry_run"]:
        tuning.show_plan(axes, search)
        return
    first = {key: values.values[0] for key, values in axes.items() if values is not None}
    config = config_from(task, given | first)
    with tuning.exits_when_stopped(), ExitStack() as stack:
        if engine == "ensemble":
            # An ensemble's points are all done at the end alone: what is shown is how far it is.
            shown: dict[str, Any] = {"callback": stack.enter_context(RunBar(Console(stderr=True)))}
        else:
            shown = {"watcher": stack.enter_context(tuning.SearchBar())}
        options = {"storage": storage, "folder": given["out"], "engine": engine, "members_at_once": members_at_once}
        result = sweep(config, lr=axes["lr"], eps=axes["eps"], **options, **shown, **search)
    tuning.show_result(result)


def add_to(app: typer.Typer) -> None:
    """Add the command to a command line.

    >>> app = typer.Typer()
    >>> add_to(app)
    >>> [command.name for command in app.registered_commands]
    ['sweep']
    """
    options = [option for option in OPTIONS.values() if option.name not in _NOT_HERE]
    app.command("sweep")(with_options(sweep_command, options))
