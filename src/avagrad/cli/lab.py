"""The commands of the lab: train, resume, queue, synthetic, list; and bench."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from avagrad import bench
from avagrad.cli.options import with_options
from avagrad.lab.command import run, summary
from avagrad.lab.config import Config
from avagrad.lab.folder import CONFIG, RunFolder
from avagrad.lab.methods import METHODS, Sourced
from avagrad.lab.names import look_up
from avagrad.lab.options import OPTIONS, config_from, describe
from avagrad.lab.presets import PRESETS
from avagrad.lab.queue import work_off
from avagrad.lab.resume import resume_run
from avagrad.lab.run import Callback
from avagrad.lab.synthetic_folder import run_into
from avagrad.lab.tasks import TASKS, task_class
from avagrad.lab.tasks import synthetic as toy
from avagrad.progress import Bar

__all__ = ["add_to"]

_PLAIN: dict[str, Any] = {"title_justify": "left", "box": None, "pad_edge": False}  # of a table
bench_app = typer.Typer(help="Measure what a step costs.", no_args_is_help=True)


class RunBar(Bar, Callback):
    """Watches a training run."""

    def on_start(self, config: Config, done: int, total: int) -> None:
        self.at(f"{config.task}, {config.optimizer}", done, total)

    def on_step(self, done: int) -> None:
        self.bar.update(self.task, completed=done)

    def on_record(self, row: dict[str, Any]) -> None:
        if row["error"] is not None:
            self.bar.update(self.task, last=f"epoch {row['epoch']}: loss {row['loss']:.4g}, error {row['error']:.4g}")


def train(task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")], given: dict[str, Any]) -> None:
    """Train a model, and leave a folder with its settings, metrics, checkpoint and result.

    What is not given comes from the preset; `avagrad list TASK` shows them, with their sources. Killed or stopped,
    `avagrad resume FOLDER` goes on, to the same numbers.
    """
    if given["dry_run"]:
        typer.echo(describe(config_from(task, given)))
        return
    with RunBar(Console(stderr=True)) as bar:
        result, folder = run(task, given, bar)
    _show(result, task_class(task).unit, folder)


def resume(folder: Annotated[Path, typer.Argument(help="the folder of a run or an ensemble")]) -> None:
    """Go on with a run or an ensemble that was stopped, with the settings that it was begun with."""
    with RunBar(Console(stderr=True)) as bar:
        result = resume_run(folder, bar)
    _show(result, task_class(RunFolder(folder).read_json(CONFIG)["config"]["task"]).unit, folder)


def queue(
    file: Annotated[Path, typer.Argument(help="a run on each line, in the words of `avagrad train`")],
    out: Annotated[Path | None, typer.Option(help="the folder of all runs", show_default=False)] = None,
    minutes: Annotated[float | None, typer.Option(help="stop then, and save", show_default=False)] = None,
    save_every: Annotated[float, typer.Option(help=OPTIONS["save_every"].help)] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=OPTIONS["dry_run"].help)] = False,
) -> None:
    """Work off a list of runs, a part at a time: the next one that is not finished is run, or gone on with.

    Killed or stopped, the same command goes on. Several processes may work on one list at once.
    """
    with RunBar(Console(stderr=True)) as bar:
        work_off(file, out, minutes, save_every, dry_run, bar)


def _show(result: Mapping[str, Any], unit: str, folder: Path) -> None:
    if "points" in result:
        typer.echo(f"{result['points']} points, {result['diverged']} diverged, in {result['seconds']:.1f} s")
    else:
        typer.echo(summary(result, unit))
    for remark in result["remarks"]:
        typer.echo(f"note: {remark}")
    typer.echo(f"in {folder}")


def synthetic(
    w1: Annotated[list[float] | None, typer.Option(help="where w starts; may be given several times")] = None,
    steps: Annotated[int, typer.Option(help="how many steps")] = 1_000_000,
    replicas: Annotated[int, typer.Option(help="how many independent runs")] = 100,
    methods: Annotated[str, typer.Option(help="methods, with commas between them")] = ",".join(toy.METHODS),
    c: Annotated[float, typer.Option("--c", help="C of the problem")] = 999.0,
    delta: Annotated[float, typer.Option(help="delta of the problem")] = 1.0,
    lr: Annotated[float, typer.Option(help="learning rate")] = 1e-5,
    beta2: Annotated[float, typer.Option(help="beta2")] = 0.99,
    eps: Annotated[float, typer.Option(help="epsilon")] = 1e-8,
    seed: Annotated[int, typer.Option(help="fixes everything that is random")] = 0,
    bias_correction: Annotated[bool, typer.Option(help="of Delayed Adam and AvaGrad")] = True,
    out: Annotated[str | None, typer.Option(help="a folder for the curves", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=OPTIONS["dry_run"].help)] = False,
) -> None:
    """Run the problem of Theorem 1: the paper's Figure 1, from w = 0.5 and from w = 0.

    The steps are compiled first, for half a minute. Over the 10^6 steps Adam moves to w = 1, where the squared gradient
    is about 1; AMSGrad and Delayed Adam go to w* = 0.4995. The bound is Theorem 2's, for what the run recorded; above
    the largest value there is, it says nothing.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    runs = [
        toy.Settings(
            C=c, delta=delta, lr=lr, beta2=beta2, eps=eps, w1=start, steps=steps, replicas=replicas, seed=seed,
            bias_correction=bias_correction,
        )
        for start in dict.fromkeys(w1 or (0.5, 0.0))
    ]  # fmt: skip
    for name in names:
        look_up("methods: a method", name, toy.METHODS)
    if dry_run:
        for settings in runs:
            typer.echo(f"{', '.join(names)}: {settings}")
        return
    show = partial(_run_and_show, Console())
    if out is None:
        for settings in runs:
            show(settings, names)
        return
    run_into(out, runs, names, run=show)
    typer.echo(f"in {out}")


def _run_and_show(console: Console, settings: toy.Settings, names: Sequence[str]) -> dict[str, toy.Curve]:
    """Run the methods from one start, with a bar, and show a table of what came out."""
    with Bar(Console(stderr=True)) as bar:
        curves = toy.run(settings, names, bar.at)
    table = Table(
        title=f"From w = {settings.w1:g}, after {settings.steps:,} steps: means over time and "
        f"{settings.replicas} replicas; w* = {settings.problem.minimiser:.4f}"
    )
    for column in ("method", "last w", "mean w", "mean squared gradient", "bound of Theorem 2"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, curve in curves.items():
        numbers = (curve.w, curve.mean_w, curve.mean_squared_gradient)
        bounds = curve.bound(settings)
        bound = None if bounds is None else bounds[-1].mean().item()
        most = settings.problem.largest_gradient**2
        shown = "" if bound is None else f"{bound:.4f}" if bound < most else f"none below {most:.3g}"
        table.add_row(
            METHODS[name].title if name in METHODS else name, *(f"{x[-1].mean():.4f}" for x in numbers), shown
        )
    console.print(table)
    return curves


def list_all(
    task: Annotated[str | None, typer.Argument(help="show all that is known of this task")] = None,
) -> None:
    """Show tasks and methods; of one task its options, presets and settings, each with its source."""
    console = Console()
    if task is not None:
        _show_task(console, task)
        return
    tasks = Table("task", "what it is", "presets", title="Tasks; `avagrad list TASK` shows more", **_PLAIN)
    for name, (_, _, what) in TASKS.items():
        tasks.add_row(name, what, ", ".join(PRESETS[name]))
    tasks.add_row("synthetic", "the problem of Theorem 1: avagrad synthetic", "")
    console.print(tasks)
    columns = list(METHODS["sgd"].paper_errors)
    title = "Methods; Table 1 of the paper: test errors in %, bits per character"
    methods = Table("method", *columns, title=title, **_PLAIN)
    for record in METHODS.values():
        methods.add_row(record.name, *record.paper_errors.values())
    console.print(methods)


def _show_task(console: Console, name: str) -> None:
    cls = task_class(name)
    typer.echo(f"{name}: the error is the {cls.measure}")
    options = ", ".join(f"{key}={value}" for key, value in cls.options().items())
    typer.echo(f"options, with their defaults: {options}")
    presets = Table("preset", "settings", "source", title="Presets (the first is the default)", **_PLAIN)
    for preset, protocol in PRESETS.get(name, {}).items():
        for source in dict.fromkeys(value.source for value in protocol.values()):
            presets.add_row(preset, _settings(protocol, source), source)
    console.print(presets)
    methods = Table("method", "presets", "settings", "source", title="Settings of methods", **_PLAIN)
    for record in METHODS.values():
        for (task, settings, source), presets_of in _grouped(record.settings).items():
            if task == name:
                methods.add_row(record.name, ", ".join(presets_of), settings, source)
    console.print(methods)
    console.print(
        "Sources: paper, 'Domain-independent Dominance of Adaptive Methods'; awd, the code of the AWD-LSTM, which its "
        "language model follows; release, the authors' code; ours."
    )


def _grouped(settings: Mapping[tuple[str, str], Mapping[str, Sourced]]) -> dict[tuple[str, str, str], list[str]]:
    """Return for each task, settings and source the presets that have them."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for (task, preset), found in settings.items():
        for source in dict.fromkeys(value.source for value in found.values()):
            groups.setdefault((task, _settings(found, source), source), []).append(preset)
    return groups


def _settings(settings: Mapping[str, Sourced], source: str) -> str:
    return ", ".join(f"{name}={value.value}" for name, value in settings.items() if value.source == source)


@bench_app.command("step")
def bench_step(
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu", show_default=False)] = None,
    sets: Annotated[str | None, typer.Option(help=f"some of {','.join(bench.SETS)}", show_default=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="where to write the numbers", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=OPTIONS["dry_run"].help)] = False,
) -> None:
    """Measure a step's time and memory beside torch's optimizers, on the parameters of real models."""
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = [name.strip() for name in sets.split(",")] if sets else bench.fitting(on)
    for name in names:
        look_up("sets: a set", name, bench.SETS)
    if dry_run:
        typer.echo(f"on {on}: {', '.join(names)}")
        return
    rows = bench.run(on, names)
    typer.echo(", ".join(f"{key} {value}" for key, value in bench.describe(on).items()))
    typer.echo(bench.table(rows))
    if json_file is not None:
        bench.save(rows, on, json_file)


def add_to(app: typer.Typer) -> None:
    """Add these commands to a command line.

    >>> app = typer.Typer()
    >>> add_to(app)
    >>> [command.name or command.callback.__name__ for command in app.registered_commands]
    ['train', 'resume', 'queue', 'synthetic', 'list']
    """
    app.command()(with_options(train, OPTIONS.values()))
    app.command()(resume)
    app.command()(queue)
    app.command()(synthetic)
    app.command("list")(list_all)
    app.add_typer(bench_app, name="bench")
