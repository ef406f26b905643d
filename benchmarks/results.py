"""Draws what is in results/ anew, from its records alone: the page of all of it, and the figures of the documents.

python benchmarks/results.py
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean

from avagrad.lab.methods import method
from avagrad.report.comparable import names_of
from avagrad.report.drawing import Figure, finish_axes, legend, new_figure, save, styles_of
from avagrad.report.figures import figure_1, step_times
from avagrad.report.figures.heat_maps import draw_heat_maps, heat_map
from avagrad.report.page import write_report
from avagrad.report.reading import Collection, Sweep, collect
from avagrad.tune.records import Record, read_records
from avagrad.tune.ridges import Ridge, ridge

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
METHODS = ("adam", "avagrad", "avastep")
SEARCHES = {"lines": "lines", "random cells": "random", "TPE": "tpe", "GP": "gp"}
RACES = {
    "CIFAR-10, error in %": "cifar10-small/avastep",
    "Tiny Shakespeare, bits": "tinyshakespeare-wide/avastep",
    "digits, error in %": "digits-wide/avastep",
    "transformer, bits": "gpt-quick/avastep",
}
# The name of a figure of heat maps: what its values are, and the sweeps that are drawn side by side.
MAPS = {
    "cifar10-heat-maps": ("validation error, %", ("cifar10-jpeg-small/adam", "cifar10-jpeg-small/avagrad")),
    "text-heat-maps": (
        "validation, bits per character",
        ("tinyshakespeare-small/adam", "tinyshakespeare-small/avagrad"),
    ),
    "avastep-cifar10": (
        "validation error, %",
        tuple(f"cifar10-small/{name}" for name in METHODS),
    ),
    "avastep-text": (
        "validation, bits per character",
        tuple(f"tinyshakespeare-wide/{name}" for name in METHODS),
    ),
    "penn-treebank-heat-maps": (
        "validation, bits per character",
        tuple(f"penn-treebank-small/{name}" for name in METHODS),
    ),
    "transformer-heat-maps": (
        "validation, bits per character",
        tuple(f"gpt-quick/{name}" for name in ("adamw", "avagrad", "avastep")),
    ),
    "digits-heat-maps": ("validation error, %", ("separable-digits/adam.jsonl", "separable-digits/avagrad.jsonl")),
}


def draw_ridges(ridges: Mapping[str, Sequence[Ridge]], *, measure: str) -> Figure:
    """Draw the best lr and the best loss against eps: a line for each method, the mean of its seeds.

    >>> flat = Ridge((1e-8, 1.0), (0.01, 0.01), (2.2, 2.3), 0.0, 0.0, 0, 0.01, 2.2, 0.0)
    >>> len(draw_ridges({"AvaStep": [flat, flat]}, measure="bits").axes)
    2
    """
    figure = new_figure(9.6, 4.2)
    left, right = figure.subplots(1, 2)
    styles = styles_of(list(ridges))
    for title, seeds in ridges.items():
        lrs, losses = (list(zip(*(getattr(each, name) for each in seeds), strict=True)) for name in ("lrs", "losses"))
        left.plot(seeds[0].eps, [geometric_mean(each) for each in lrs], **styles[title], marker="o", ms=3)
        right.plot(seeds[0].eps, [fmean(each) for each in losses], **styles[title], marker="o", ms=3)
    finish_axes(left, x="eps", y="best lr", log_x=True, log_y=True)
    finish_axes(right, x="eps", y=f"{measure}, at the best lr", log_x=True)
    legend(figure, [(style, title) for title, style in styles.items()])
    return figure


def draw_documents_figures(held: Collection, to: Path) -> list[Path]:
    """Draw the figures that the documents show; return their paths."""
    sweeps: dict[str, Sweep] = {sweep.place: sweep for sweep in held.sweeps}
    drawn = {}
    for name, (measure, places) in MAPS.items():
        found = [sweeps[place] for place in places]
        named = zip(names_of(found), found, strict=True)  # without the path of a search: no caption explains it
        maps = [replace(heat_map(title, sweep.records), path=()) for title, sweep in named]
        drawn[name] = draw_heat_maps(maps, measure=measure)
    step_size = json.loads((ROOT / "results" / "step-size.json").read_text())
    drawn["step-size"] = draw_step_sizes(step_size["eps"], step_size["rms of a step over lr"])
    drawn["figure-1"] = figure_1.draw(figure_1.numbers(held)[0])
    h200 = tuple(times for times in held.step_times if times.place == "step-h200.json")
    drawn["step-times"] = step_times.draw(*step_times.numbers(replace(held, step_times=h200)))
    drawn["transformer-eps"] = draw_ridges(ridges_of("gpt-quick"), measure="bits per character")
    drawn["searches"] = draw_race(*race())
    to.mkdir(parents=True, exist_ok=True)
    paths = [to / f"{name}.png" for name in drawn]
    for path, figure in zip(paths, drawn.values(), strict=True):
        save(figure, path)
    return paths


def ridges_of(folder: str) -> dict[str, list[Ridge]]:
    """Return the ridges of the maps of a folder, one for each seed."""
    found: dict[str, list[Ridge]] = {}
    for name in ("adamw", "avagrad", "adopt", "avastep"):
        seeds: dict[int, list[Record]] = {}
        for record in read_records(ROOT / "results" / folder / name / "records.jsonl"):
            seeds.setdefault(record.seed, []).append(record)
        found[method(name).title] = [ridge(records) for records in seeds.values()]
    return found


def race() -> tuple[list[int], dict[str, dict[str, list[float | None]]]]:
    """Return the trials of the race of searches, and the median regrets on AvaStep's maps."""
    found = json.loads((ROOT / "results" / "searches.json").read_text())
    maps = {
        title: {search: found["maps"][place][key]["median"] for search, key in SEARCHES.items()}
        for title, place in RACES.items()
    }
    return found["trials"], maps


def draw_step_sizes(eps: Sequence[float], sizes: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the root mean square of a step, over lr, against eps: a line for each method."""
    figure = new_figure(6.4, 4.2, "The size of a step")
    axes = figure.subplots()
    styles = styles_of(list(sizes))
    for name, values in sizes.items():
        axes.plot(eps, values, **styles[name])
    finish_axes(axes, x="eps", y="RMS of a step / lr", log_x=True, log_y=True)
    legend(figure, [(style, name) for name, style in styles.items()])
    return figure


def draw_race(trials: Sequence[int], maps: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Figure:
    """Draw for each map the median regret of each search against the trials spent."""
    figure = new_figure(3.6 * len(maps), 3.6)
    styles = styles_of([name for searches in maps.values() for name in searches])
    for axes, (title, searches) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        for name, regrets in searches.items():
            known = [(n, regret) for n, regret in zip(trials, regrets, strict=True) if regret is not None]
            axes.plot(*zip(*known, strict=True), **styles[name], marker="o", ms=4)
        finish_axes(axes, x="trials", y="regret")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
    legend(figure, [(style | {"marker": "o", "ms": 4}, name) for name, style in styles.items()])
    return figure


def main() -> None:
    """Draw everything."""
    held = collect(ROOT / "results")
    for problem in held.problems:
        raise SystemExit(f"results/{problem}")
    for path in draw_documents_figures(held, FIGURES):
        print(path.relative_to(ROOT))
    report = write_report(ROOT / "results")
    print(f"{report.page.relative_to(ROOT)}, with {len(report.files)} files in {report.figures.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
