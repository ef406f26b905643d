"""The commands that need the laboratory: train, synthetic, list; and bench."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from avagrad import bench
from avagrad.lab.command import DRY_RUN, FLAGS, OPTIONS, SETTINGS, planned, run, summary
from avagrad.lab.config import Config
from avagrad.lab.methods import METHODS, Sourced
from avagrad.lab.names import look_up
from avagrad.lab.presets import PRESETS
from avagrad.lab.run import Callback
from avagrad.lab.synthetic_folder import run_into
from avagrad.lab.tasks import TASKS, task_class
from avagrad.lab.tasks import synthetic as toy
from avagrad.progress import Bar

__all__ = ["add_to"]

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


def _option(name: str, *, flag: str | None = None) -> Any:
    """Describe an option of a run in the words that both command lines share."""
    return typer.Option(flag or f"--{name.replace('_', '-')}", help=OPTIONS[name][1], show_default=False)


def train(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "avagrad",
    lr: Annotated[float | None, _option("lr")] = None,
    eps: Annotated[float | None, _option("eps")] = None,
    weight_decay: Annotated[float | None, _option("weight_decay")] = None,
    preset: Annotated[str | None, _option("preset")] = None,
    data: Annotated[str | None, _option("data")] = None,
    seed: Annotated[int, _option("seed")] = 0,
    out: Annotated[str | None, _option("out")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=FLAGS["resume"])] = False,
    epochs: Annotated[int | None, _option("epochs")] = None,
    milestones: Annotated[str | None, _option("milestones")] = None,
    factor: Annotated[float | None, _option("factor")] = None,
    schedule: Annotated[str | None, _option("schedule")] = None,
    warmup: Annotated[int | None, _option("warmup")] = None,
    clip: Annotated[float | None, _option("clip")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="an option of the task: NAME=VALUE", show_default=False)
    ] = None,
    optimizer_option: Annotated[
        list[str] | None, typer.Option(help="an option of the method: NAME=VALUE", show_default=False)
    ] = None,
    device: Annotated[str, _option("device")] = "cpu",
    threads: Annotated[int | None, _option("threads")] = None,
    precision: Annotated[str | None, _option("precision")] = None,
    no_graph: Annotated[bool, typer.Option("--no-graph", help=SETTINGS["no_graph"])] = False,
    compile: Annotated[bool, typer.Option("--compile", help=SETTINGS["compile"])] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help=SETTINGS["deterministic"])] = False,
    save_every: Annotated[float, _option("save_every")] = 30.0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help=FLAGS["tensorboard"])] = False,
    download: Annotated[bool, typer.Option("--download", help=FLAGS["download"])] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN["dry_run"])] = False,
) -> None:
    """Train a model, and leave a folder with its settings, metrics, checkpoint and result.

    What is not given comes from the preset; `avagrad list` shows them all, with their sources. Killed or stopped, the
    same command with --out and --resume goes on, to the same numbers.
    """
    if dry_run:
        typer.echo(planned(task, context.params, option or (), optimizer_option or ()))
        return
    with RunBar(Console(stderr=True)) as bar:
        result, folder = run(
            task,
            context.params,
            options=option or (),
            optimizer_options=optimizer_option or (),
            resume=resume,
            tensorboard=tensorboard,
            download=download,
            callback=bar,
        )
    typer.echo(summary(result, task_class(task).unit))
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN["dry_run"])] = False,
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
        told = "" if bound is None else f"{bound:.4f}" if bound < most else f"none below {most:.3g}"
        table.add_row(METHODS[name].title if name in METHODS else name, *(f"{x[-1].mean():.4f}" for x in numbers), told)
    console.print(table)
    return curves


def list_all() -> None:
    """Show tasks, methods and presets, with the source of every setting, and the paper's results."""
    console = Console()
    tasks = Table(title="Tasks", title_justify="left")
    for column in ("task", "what it is", "error is", "options, with their defaults"):
        tasks.add_column(column, overflow="fold")
    for name, (_, _, what) in TASKS.items():
        cls = task_class(name)
        tasks.add_row(name, what, cls.measure, ", ".join(f"{key}={value}" for key, value in cls.options().items()))
    tasks.add_row("synthetic", "the problem of Theorem 1: avagrad synthetic", "squared gradient", "")
    console.print(tasks)

    presets = Table(title="Presets (the first of a task is its default)", title_justify="left")
    for column in ("task", "preset", "settings", "source"):
        presets.add_column(column, overflow="fold")
    for task, protocols in PRESETS.items():
        for preset, protocol in protocols.items():
            for source in dict.fromkeys(value.source for value in protocol.values()):
                presets.add_row(task, preset, _told(protocol, source), source)
    console.print(presets)

    methods = Table(title="Methods, and the settings found for each task", title_justify="left")
    for column in ("method", "task", "preset", "settings", "source"):
        methods.add_column(column, overflow="fold")
    for record in METHODS.values():
        methods.add_row(record.name, "", "", _told(record.defaults, "paper"), "paper", style="bold")
        for (task, told, source), presets_of in _grouped(record.settings).items():
            methods.add_row("", task, ", ".join(presets_of), told, source)
    console.print(methods)

    console.print(
        "Sources: paper, 'Domain-independent Dominance of Adaptive Methods'; awd, the code of the AWD-LSTM, which its "
        "language model follows; release, the authors' code; ours."
    )
    paper = Table(title="Table 1 of the paper: test errors (ImageNet: validation), in %; bits per character")
    paper.add_column("method")
    for column in METHODS["sgd"].paper_errors:
        paper.add_column(column, justify="right")
    for record in METHODS.values():
        paper.add_row(record.title, *record.paper_errors.values())
    console.print(paper)


def _grouped(settings: Mapping[tuple[str, str], Mapping[str, Sourced]]) -> dict[tuple[str, str, str], list[str]]:
    """Return for each task, settings and source the presets that have them."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for (task, preset), found in settings.items():
        for source in dict.fromkeys(value.source for value in found.values()):
            groups.setdefault((task, _told(found, source), source), []).append(preset)
    return groups


def _told(settings: Mapping[str, Sourced], source: str) -> str:
    return ", ".join(f"{name}={value.value}" for name, value in settings.items() if value.source == source)


@bench_app.command("step")
def bench_step(
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu", show_default=False)] = None,
    sets: Annotated[str | None, typer.Option(help=f"some of {','.join(bench.SETS)}", show_default=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="where to write the numbers", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN["dry_run"])] = False,
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
    ['train', 'synthetic', 'list']
    """
    app.command()(train)
    app.command()(synthetic)
    app.command("list")(list_all)
    app.add_typer(bench_app, name="bench")
