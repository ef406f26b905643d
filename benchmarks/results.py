"""Draws what is in results/ anew, from its records alone: the page of all of it, and the figures of the documents.

python benchmarks/results.py
"""

import json
from pathlib import Path

from avagrad.lab.methods import method
from avagrad.report.charts import draw_figure_1, draw_race, draw_ridges, draw_step_bars, draw_step_sizes
from avagrad.report.curves import figure_1, step_bars
from avagrad.report.figures import draw_heat_maps, save
from avagrad.report.heatmaps import heat_map
from avagrad.report.page import write_report
from avagrad.report.reading import Collection, Sweep, collect
from avagrad.report.ridges import Ridge, ridge
from avagrad.tune.records import Record, read_records

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
        tuple(f"cifar10-small/{name}" for name in ("adam", "avagrad", "avastep")),
    ),
    "avastep-text": (
        "validation, bits per character",
        tuple(f"tinyshakespeare-wide/{name}" for name in ("adam", "avagrad", "avastep")),
    ),
    "transformer-heat-maps": (
        "validation, bits per character",
        tuple(f"gpt-quick/{name}" for name in ("adamw", "avagrad", "avastep")),
    ),
    "digits-heat-maps": ("validation error, %", ("separable-digits/adam.jsonl", "separable-digits/avagrad.jsonl")),
}


def draw_documents_figures(held: Collection, to: Path) -> list[Path]:
    """Draw the figures that the documents show; return their paths."""
    sweeps: dict[str, Sweep] = {sweep.place: sweep for sweep in held.sweeps}
    drawn = {
        name: draw_heat_maps(
            [heat_map(sweeps[place].title, sweeps[place].records) for place in places], measure=measure
        )
        for name, (measure, places) in MAPS.items()
    }
    step_size = json.loads((ROOT / "results" / "step-size.json").read_text())
    drawn["step-size"] = draw_step_sizes(step_size["eps"], step_size["rms of a step over lr"])
    drawn["figure-1"] = draw_figure_1(figure_1(held.synthetics[0]))
    (h200,) = (times for times in held.step_times if times.place == "step-h200.json")
    drawn["step-times"] = draw_step_bars(step_bars(h200))
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


def main() -> None:
    """Draw everything."""
    held = collect(ROOT / "results")
    for problem in held.problems:
        raise SystemExit(f"results/{problem}")
    for path in draw_documents_figures(held, FIGURES):
        print(path.relative_to(ROOT))
    report = write_report(ROOT / "results")
    print(f"{report.page.relative_to(ROOT)}, with {len(report.files)} files in {report.beside.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
