"""The commands of the lab: train, resume, queue, synthetic, list."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from avagrad.cli.options import DryRun, with_options
from avagrad.lab.command import resume_run, run, summary
from avagrad.lab.config import Config
from avagrad.lab.folder import CONFIG, RunFolder
from avagrad.lab.methods import METHODS, Sourced
from avagrad.lab.options import OPTIONS, Option, config_from, describe
from avagrad.lab.presets import PRESETS
from avagrad.lab.queue import QUEUE_OPTIONS, run_file
from avagrad.lab.run import Callback
from avagrad.lab.tasks import TASKS, task_class
from avagrad.lab.tasks import synthetic as toy
from avagrad.names import look_up
from avagrad.progress import Bar

__all__ = ["app"]

app = typer.Typer()
Task = Annotated[str, typer.Argument(help=f"one of {', '.join(TASKS)}, or module:Class")]


class RunBar(Bar, Callback):
    """Shows the progress of a run."""

    def on_start(self, config: Config, done: int, total: int) -> None:
        self.at(f"{config.task}, {config.optimizer}", done, total)

    def on_step(self, done: int) -> None:
        self.update(self.task_id, completed=done)

    def on_record(self, row: dict[str, Any]) -> None:
        if row["error"] is not None:
            self.update(self.task_id, last=f"epoch {row['epoch']}: loss {row['loss']:.4g}, error {row['error']:.4g}")


@app.command()
@with_options(OPTIONS.values())
def train(task: Task, **given: Any) -> None:
    """Train a model, and write its settings, metrics, checkpoint and result to a folder.

    Settings that are not given come from the preset; `avagrad list TASK` shows them, with their sources. After a stop
    or a kill, `avagrad resume FOLDER` continues, to the same numbers.
    """
    if given["dry_run"]:
        typer.echo(describe(config_from(task, given)))
        return
    with RunBar() as bar:
        result, folder = run(task, given, bar)
    _show(result, task, folder)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="the folder of a run or an ensemble")]) -> None:
    """Resume a run or an ensemble that was stopped, with its original settings."""
    with RunBar() as bar:
        result = resume_run(folder, bar)
    _show(result, RunFolder(folder).read_json(CONFIG)["config"]["task"], folder)


def _show(result: Mapping[str, Any], task: str, folder: Path) -> None:
    typer.echo(summary(result, task_class(task).unit))
    for remark in result["remarks"]:
        typer.echo(f"note: {remark}")
    typer.echo(f"in {folder}")


@app.command()
@with_options(QUEUE_OPTIONS)
def queue(
    file: Annotated[Path, typer.Argument(help="a run on each line, with the arguments of `avagrad train`")],
    **given: Any,
) -> None:
    """Process a queue of runs, a part at a time: the next one that is not finished is started or resumed.

    After a stop or a kill, the same command resumes. Several processes may share one queue.
    """
    with RunBar() as bar:
        code = run_file(file, callback=bar, **given)
    raise typer.Exit(code)


_SYNTHETIC = [
    Option("steps", int, "number of steps", default=toy.Settings.steps),
    Option("replicas", int, "number of independent runs", default=toy.Settings.replicas),
    Option("C", float, "C of the problem", default=toy.Settings.C),
    Option("delta", float, "delta of the problem", default=toy.Settings.delta),
    Option("lr", float, "learning rate", default=toy.Settings.lr),
    Option("beta2", float, "beta2", default=toy.Settings.beta2),
    Option("eps", float, "epsilon", default=toy.Settings.eps),
    Option("seed", int, "random seed", default=toy.Settings.seed),
    Option("bias_correction", bool, "of Delayed Adam and AvaGrad", default=toy.Settings.bias_correction),
]


@app.command()
@with_options(_SYNTHETIC)
def synthetic(
    w1: Annotated[list[float] | None, typer.Option(help="initial w; may be repeated")] = None,
    methods: Annotated[str, typer.Option(help="comma-separated methods")] = ",".join(toy.METHODS),
    out: Annotated[str | None, typer.Option(help="a folder for the curves")] = None,
    dry_run: DryRun = False,
    **given: Any,
) -> None:
    """Run the problem of Theorem 1: the paper's Figure 1, from w = 0.5 and from w = 0.

    The steps are compiled first, for about ten seconds. Over the 10^6 steps Adam moves to w = 1, where the squared
    gradient is about 1; AMSGrad and Delayed Adam go to w* = 0.4995. The bound is Theorem 2's, for the recorded run;
    above the largest possible value it is vacuous.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names:
        look_up("methods: a method", name, toy.METHODS)
    runs = [toy.Settings(w1=start, **given) for start in dict.fromkeys(w1 or (0.5, 0.0))]
    if dry_run:
        for settings in runs:
            typer.echo(f"{', '.join(names)}: {settings}")
    elif out is None:
        for settings in runs:
            _run_and_show(settings, names)
    else:
        toy.run_into(out, runs, names, run=_run_and_show)
        typer.echo(f"in {out}")


def _run_and_show(settings: toy.Settings, names: Sequence[str]) -> dict[str, toy.Curve]:
    """Run the methods from one start, with a bar, and show a table of the results."""
    with Bar() as bar:
        curves = toy.run(settings, names, lambda done: bar.at("run", done, settings.steps))
    rows, most = [], settings.problem.largest_gradient**2
    for name, curve in curves.items():
        numbers = [f"{x[-1].mean():.4f}" for x in (curve.w, curve.mean_w, curve.mean_squared_gradient)]
        if (bounds := curve.bound(settings)) is not None:
            bound = bounds[-1].mean().item()
            numbers.append(f"{bound:.4f}" if bound < most else f"none below {most:.3g}")
        rows.append([METHODS[name].title if name in METHODS else name, *numbers])
    _show_table(
        f"From w = {settings.w1:g}, after {settings.steps:,} steps: means over time and {settings.replicas} replicas; "
        f"w* = {settings.problem.minimiser:.4f}",
        ("method", "last w", "mean w", "mean squared gradient", "bound of Theorem 2"),
        rows,
    )
    return curves


@app.command("list")
def list_all(task: Annotated[str | None, typer.Argument(help="show the details of this task")] = None) -> None:
    """Show tasks and methods; for one task its options, presets and settings, each with its source."""
    if task is not None:
        _show_task(task)
        return
    tasks = [(name, what, ", ".join(PRESETS[name])) for name, (_, _, what) in TASKS.items()]
    tasks.append(("synthetic", "the problem of Theorem 1: avagrad synthetic", ""))
    _show_table("Tasks; `avagrad list TASK` shows more", ("task", "description", "presets"), tasks)
    _show_table(
        "Methods; Table 1 of the paper: test errors in %, bits per character",
        ("method", *METHODS["sgd"].paper_errors),
        [(method.name, *method.paper_errors.values()) for method in METHODS.values()],
    )


def _show_task(name: str) -> None:
    cls = task_class(name)
    typer.echo(f"{name}: the error is the {cls.measure}")
    options = ", ".join(f"{key}={value}" for key, value in cls.options().items())
    typer.echo(f"options, with their defaults: {options}")
    presets = [(preset, *row) for preset, found in PRESETS.get(name, {}).items() for row in _by_source(found)]
    _show_table("Presets (the first is the default)", ("preset", "settings", "source"), presets)
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)  # the presets with the same settings
    for method in METHODS.values():
        for (task, preset), found in method.settings.items():
            for settings, source in _by_source(found) if task == name else ():
                groups[method.name, settings, source].append(preset)
    rows = [(method, ", ".join(names), settings, source) for (method, settings, source), names in groups.items()]
    _show_table("Settings of methods", ("method", "presets", "settings", "source"), rows)
    Console().print(
        "Sources: paper, 'Domain-independent Dominance of Adaptive Methods'; awd, the code of the AWD-LSTM, which its "
        "language model follows; ours."
    )


def _by_source(settings: Mapping[str, Sourced]) -> list[tuple[str, str]]:
    """Return the settings of each source, as text, and the source."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, (value, source) in settings.items():
        found[source].append(f"{name}={value}")
    return [(", ".join(texts), source) for source, texts in found.items()]


def _show_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
