"""What is in results/ can be read, and the documents say what it says."""

import json
import math
import re
import runpy
import statistics
from pathlib import Path

import pytest

from avagrad.report.figures import budgets
from avagrad.report.figures.heat_maps import heat_map
from avagrad.report.known import known_of
from avagrad.report.reading import Collection, Sweep, collect
from avagrad.tune.records import Record, read_records
from avagrad.tune.ridges import ridge
from avagrad.tune.search import replay, scores
from avagrad.tune.space import Space

ROOT = Path(__file__).parent.parent
METHODS = ("adam", "avagrad", "avagrad-active")
PARTS = ("validation", "test")


@pytest.fixture(scope="module")
def held() -> Collection:
    return collect(ROOT / "results")


@pytest.fixture(scope="module")
def sweeps(held: Collection) -> dict[str, Sweep]:
    return {sweep.place: sweep for sweep in held.sweeps}


def row_of(document: str, beginning: str) -> list[str]:
    """Return the cells of the one row of a table that begins so."""
    lines = [line for line in (ROOT / document).read_text().splitlines() if line.startswith(f"| {beginning} |")]
    assert len(lines) == 1, (document, beginning, lines)
    return [cell.strip() for cell in lines[0].strip("| ").split("|")][1:]


def rows_of(document: str, beginning: str) -> list[list[str]]:
    lines = [line for line in (ROOT / document).read_text().splitlines() if line.startswith(f"| {beginning} |")]
    return [[cell.strip() for cell in line.strip("| ").split("|")][1:] for line in lines]


def test_everything_can_be_read(held: Collection) -> None:
    assert held.problems == ()
    assert len(held.runs) >= 3
    assert len(held.sweeps) >= 11
    assert held.synthetics
    assert len(held.step_times) == 3


@pytest.mark.parametrize(
    ("folder", "place", "cells"), [("cifar10-jpeg-small", 0, 441), ("tinyshakespeare-small", 1, 168)]
)
def test_the_table_of_maps_is_what_the_records_say(
    sweeps: dict[str, Sweep], folder: str, place: int, cells: int
) -> None:
    document = "docs/reproduce.md"
    moves = rows_of(document, "steps that it moves; slope over all eps, large eps")[place]
    lines = [
        line for line in (ROOT / document).read_text().splitlines() if line.startswith("| two lines and rings: tr")
    ]
    found = [cell.strip() for cell in lines[place].strip("| ").split("|")][1:]
    for i, method in enumerate(METHODS):
        sweep = sweeps[f"{folder}/{method}"]
        assert len(sweep.records) == cells
        parts = heat_map(method, sweep.records).separability
        assert parts is not None
        assert parts.slope is not None
        assert parts.slope_at_large_eps is not None
        assert parts.pick is not None
        slopes = f"{parts.slope + 0.0:.2f}, {round(parts.slope_at_large_eps, 2) + 0.0:.2f}"
        assert moves[i] == f"{parts.moves}; {slopes}"
        digits = 1 if place == 0 else 2
        unit = " %" if place == 0 else ""
        assert found[i] == (
            f"{parts.trials}: {parts.pick.lr:g}, {parts.pick.eps:g}: {parts.pick_loss:.{digits}f}{unit}"
        )


@pytest.mark.parametrize(
    ("title", "folder", "digits"),
    [("CIFAR-10", "cifar10-jpeg-small", 1), ("Tiny Shakespeare, bits", "tinyshakespeare-small", 3)],
)
def test_the_table_of_equal_budgets_is_what_the_records_say(
    sweeps: dict[str, Sweep], title: str, folder: str, digits: int
) -> None:
    cells = row_of("docs/reproduce.md", title)
    matches = [re.match(r"([\d.]+) %? ?after (\d+)", cell) for cell in cells]
    numbers = [(found[1], int(found[2])) for found in matches if found is not None]
    fixed = [record for record in sweeps[f"{folder}/adam"].records if record.eps == 1e-8]
    there = tuple(sweep for place, sweep in sweeps.items() if place.startswith(f"{folder}/"))
    (chart,) = budgets.numbers(Collection("a", sweeps=there))
    ends = {line.title: line.band for line in chart.lines if line.kind != "random"}
    expected = [
        (ends["SGD"].middle[-1], len(ends["SGD"].x)),
        (min(record.value for record in fixed), len(fixed)),
        (ends["AvaGrad"].middle[-1], len(ends["AvaGrad"].x)),
        (ends["Adam"].middle[-1], len(ends["Adam"].x)),
    ]
    assert numbers == [(f"{value:.{digits}f}", trials) for value, trials in expected]


@pytest.mark.slow
def test_figures_of_the_documents_are_drawn_from_the_records(held: Collection, tmp_path: Path) -> None:
    """The same pixels where matplotlib is the same; every figure that a document shows is among them."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))
    drawn = script["draw_documents_figures"](held, tmp_path)
    shown = {
        Path(name).name
        for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", document.read_text())
    }
    assert shown == {path.name for path in drawn} == {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    for path in drawn:
        assert path.read_bytes() == (ROOT / "docs" / "figures" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("beginning", "folder"),
    [
        ("SGD | 0.1", "cifar10/sgd"),
        ("SGD, seed 1 | 0.1", "cifar10/sgd-seed1"),
        ("Adam | 0.1, 0.1", "cifar10/adam"),
        ("AMSGrad | 0.1, 0.1", "cifar10/amsgrad"),
        ("AvaGrad | 1, 10", "cifar10/avagrad"),
        ("Adam, its usual eps | 0.001, 1e-8", "cifar10/adam-eps-1e-8"),
        ("AvaStep, L2 decay | 0.001, 0.1", "cifar10/avastep"),
        ("SGD, CIFAR-100 | 0.1", "cifar100/sgd"),
        ("Adam, CIFAR-100 | 0.1, 0.1", "cifar100/adam"),
        ("AvaGrad, CIFAR-100 | 1, 10", "cifar100/avagrad"),
        ("AvaStep, L2 decay, CIFAR-100 | 0.001, 1", "cifar100/avastep"),
    ],
)
def test_the_table_of_cifar_is_what_the_records_say(beginning: str, folder: str) -> None:
    result = json.loads((ROOT / "results" / folder / "result.json").read_text())
    assert result["epochs"] == 200
    cells = row_of("docs/reproduce.md", beginning)
    assert cells[1:3] == [f"{result[part]['error']:.2f}" for part in PARTS]


@pytest.mark.parametrize(
    ("name", "folder", "text"),
    [
        ("SGD", "sgd", "sgd"),
        ("Adam", "adam", "adam"),
        ("AMSGrad", "amsgrad", "amsgrad"),
        ("AdaBound", "adabound", "adabound"),
        ("AdaShift", "adashift", "adashift"),
        ("AdamW", "adamw", "adamw"),
        ("AvaGrad", "avagrad", "avagrad"),
        ("AvaGradW", "avagradw", "avagradw"),
        ("AvaStep (ours)", "avastep", "avastep-lr-0.005"),
    ],
)
def test_table_1_is_what_the_records_say(name: str, folder: str, text: str) -> None:
    expected = []
    for place in (f"cifar10/{folder}", f"cifar100/{folder}", f"penn-treebank/{text}"):
        file = ROOT / "results" / place / "result.json"
        error = json.loads(file.read_text())["test"]["error"] if file.exists() else None
        if error is None:
            expected.append("not run")
        elif place.startswith("penn"):
            expected.append(f"{error:.3f}")
        else:
            expected.append(f"{error:.2f} ({math.sqrt(error * (100 - error) / 10_000):.2f})")
    (cells,) = (cells for cells in rows_of("docs/reproduce.md", name) if len(cells) == 6)
    assert cells[1::2] == expected


def test_the_sentence_on_cifar_100_is_what_the_records_say() -> None:
    values = []
    for eps in ("0.1", "1", "10"):
        folder = ROOT / "results" / "cifar100-line" / f"avastep-lr-0.001-eps-{eps}"
        values.append(json.loads((folder / "result.json").read_text())["validation"]["error"])
    sentence = "validation {:.2f} at eps 0.1, {:.2f} at 1 and {:.2f} at 10".format(*values)
    assert sentence in " ".join((ROOT / "docs" / "reproduce.md").read_text().split())


@pytest.mark.parametrize("lr", ["0.0003", "0.001", "0.002", "0.003", "0.01"])
def test_avasteps_lines_on_cifar_are_what_the_records_say(lr: str) -> None:
    lines = ROOT / "results" / "cifar10-line"
    folders = [lines / f"avastep-lr-{lr}-eps-{eps}" for eps in ("1e-06", "0.001", "0.1", "1", "10")]
    results = [json.loads((one / "result.json").read_text()) if one.exists() else None for one in folders]
    expected = [f"{result['validation']['error']:.2f}" if result else "" for result in results]
    (cells,) = rows_of("docs/reproduce.md", lr)
    assert (cells + [""] * 5)[:5] == expected


def test_avasteps_decoupled_lines_on_cifar_are_what_the_records_say() -> None:
    folders = sorted((ROOT / "results" / "cifar10-line").glob("avastep-decoupled-*"))
    assert len(folders) == 5
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())["config"]
        setting = ", ".join(f"{config[name]:g}" for name in ("lr", "eps", "weight_decay"))
        result = json.loads((folder / "result.json").read_text())
        assert row_of("docs/reproduce.md", setting) == [f"{result[part]['error']:.2f}" for part in PARTS]


@pytest.mark.parametrize("epoch", [1, 60, 120, 121, 160, 200])
def test_the_schedule_that_gamma_makes_is_what_the_records_say(epoch: int) -> None:
    rows = {}
    for method, eps in (("avastep", 1.0), ("avagrad", 10.0)):
        folder = ROOT / "results" / "cifar100" / method
        assert json.loads((folder / "config.json").read_text())["config"]["eps"] == eps
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (rows[method],) = (row | {"as sgd": row["lr"] * row["gamma"] / eps} for row in metrics if row["epoch"] == epoch)
    ours, theirs = rows["avastep"], rows["avagrad"]
    rates = [f"{row['as sgd']:.3g}" if row["as sgd"] < 1 else f"{row['as sgd']:.2f}" for row in (ours, theirs)]
    expected = [f"{ours['lr']:g}", f"{ours['gamma']:.0f}", *rates, *(f"{row['error']:.1f}" for row in (ours, theirs))]
    (found,) = (row for row in rows_of("docs/reproduce.md", str(epoch)) if len(row) == len(expected))
    assert [float(cell) for cell in found] == [float(cell) for cell in expected]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("SGD", "sgd"),
        ("Adam", "adam"),
        ("AvaGrad", "avagrad"),
        ("AvaGradW", "avagradw"),
        ("AvaStep with Adam's lr and eps", "avastep"),
        ("AvaStep", "avastep-lr-0.005"),
        ("AvaStep with a larger eps", "avastep-lr-0.005-eps-0.001"),
    ],
)
def test_the_table_of_penn_treebank_is_what_the_records_say(name: str, folder: str) -> None:
    result = json.loads((ROOT / "results" / "penn-treebank" / folder / "result.json").read_text())
    assert result["epochs"] == 75
    cells = row_of("docs/reproduce.md", f"{name}, Penn Treebank")
    assert cells[1:] == [f"{result[part]['error']:.3f}" for part in PARTS]


def test_what_random_cells_find_is_what_the_records_say(sweeps: dict[str, Sweep]) -> None:
    text = " ".join((ROOT / "docs" / "reproduce.md").read_text().split())
    median: dict[tuple[str, str], float] = {}
    for folder in ("cifar10-jpeg-small", "tinyshakespeare-small"):
        there = tuple(sweep for place, sweep in sweeps.items() if place.startswith(f"{folder}/"))
        (chart,) = budgets.numbers(Collection("a", sweeps=there))
        taken = {line.title: len(line.band.x) for line in chart.lines if line.kind == "separable"}
        for line in chart.lines:
            if line.kind == "random":
                value = line.band.middle[taken[line.title] - 1]
                assert value is not None
                median[folder, line.title] = value
    images, texts = (
        [median[folder, name] for name in ("AvaGrad", "Adam")] for folder in sorted({f for f, _ in median})
    )
    assert f"{images[0]:.2f} % for AvaGrad and {images[1]:.2f} % for Adam on CIFAR-10" in text
    assert f"{texts[0]:.3f} and {texts[1]:.3f} bits on the text" in text


@pytest.mark.parametrize("method", ["Adam", "AvaGrad", "AvaStep"])
def test_the_table_of_figure_3_is_what_the_records_say(method: str) -> None:
    records = read_records(ROOT / "results" / "penn-treebank-small" / method.lower() / "records.jsonl")
    known = known_of(records)
    assert known.parts is not None
    assert known.best is not None
    ridge_of = dict(known.parts.ridge)
    shown = [f"{ridge_of[eps]:.3g}" for eps in (1e-8, 1e-4, 1e-2, 1.0, 100.0)]
    shown = [text.replace("2e+03", "2000") for text in shown]
    best = f"{known.best.lr:.3g}, {known.best.eps:.3g}"
    expected = [*shown, f"{ridge(records).spread:.2f}", best, f"{known.value(known.best):.3f}"]
    (row,) = (row for row in rows_of("docs/reproduce.md", method) if len(row) == len(expected))
    assert row == expected


# --- docs/choosing-lr-and-eps.md ---


@pytest.mark.parametrize(
    ("title", "folder", "adam"),
    [
        ("CIFAR-10, convolutional network", "cifar10-small", "adam"),
        ("Tiny Shakespeare, LSTM", "tinyshakespeare-wide", "adam"),
        ("Penn Treebank, LSTM, one seed", "penn-treebank-small", "adam"),
        ("film reviews, transformer", "gpt-quick", "adamw"),
        ("digits, small network", "digits-wide", "adam"),
    ],
)
def test_the_short_table_of_moves_is_what_the_records_say(title: str, folder: str, adam: str) -> None:
    shown = []
    for method in (adam, "avagrad", "avastep"):
        seeds: dict[int, list[Record]] = {}
        for record in read_records(ROOT / "results" / folder / method / "records.jsonl"):
            seeds.setdefault(record.seed, []).append(record)
        ridges = [ridge(records) for records in seeds.values()]
        one = " (one seed)" if len(seeds) == 1 and "one seed" not in title else ""
        end = ", at the end of its axis" if any(each.at_an_end for each in ridges) else ""
        shown.append(f"{statistics.mean(each.spread for each in ridges):.2f}{one}{end}")
    assert row_of("docs/choosing-lr-and-eps.md", title) == shown


# --- docs/benchmarks.md ---


@pytest.mark.parametrize(
    ("title", "record", "parameters"),
    [
        ("H200: ResNet-50 (the host's time, for all)", "step-h200.json", "resnet50"),
        ("H200: GPT-2, 124 M", "step-h200.json", "gpt2-124M"),
        ("H200: 1.5 billion parameters", "step-h200.json", "gpt-1.5B"),
        ("CPU, 2 threads: ResNet-50", "in-turn-cpu.json", "resnet50"),
        ("CPU, 2 threads: 4 matrices of 4096 x 4096", "in-turn-cpu.json", "4x4096x4096"),
    ],
)
def test_the_short_table_of_step_times_is_what_was_recorded(title: str, record: str, parameters: str) -> None:
    rows = json.loads((ROOT / "results" / record).read_text())["rows"]
    times = {row["optimizer"]: row["milliseconds"] for row in rows if row["parameters"] == parameters}
    ours = ("AvaStep fused", "AvaGrad fused", "AvaGradW fused", "pytorch_optimizer AvaGrad")
    wanted = [times.get(name) for name in ("torch AdamW fused", "torch Adam fused", *ours)]
    shown = ["" if ms is None else f"{ms:.{2 if ms < 2 else 1}f}" for ms in wanted]
    cells = row_of("docs/benchmarks.md", title)
    assert cells + [""] * (len(shown) - len(cells)) == shown


# --- docs/avastep.md ---

AVASTEP_TASKS = (
    ("CIFAR-10, % error", "cifar10-small", 1),
    ("Tiny Shakespeare, bits", "tinyshakespeare-wide", 3),
    ("transformer, bits", "gpt-quick", 3),
    ("digits, % error", "digits-wide", 2),
)
AVASTEP_METHODS = {"adam": "Adam", "adamw": "AdamW", "avagrad": "AvaGrad", "avastep": "AvaStep", "adopt": "ADOPT"}
AVASTEP_METHODS["rms-adam"] = "Adam by its RMS"
CHOICES = {
    "clip_update=1 (the default)": "c1",
    "clip_update=None": "none",
    "clip_update=0.5": "c05",
    "clip_update=2": "c2",
    "clip_update=4": "c4",
    "clip_moment=10": "k10",
    "norm=1": "p1",
}


def mean_and_range(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


@pytest.mark.parametrize(("title", "folder", "digits"), AVASTEP_TASKS)
def test_how_far_the_best_lr_moves_is_what_the_records_say(title: str, folder: str, digits: int) -> None:
    rows = {row[0]: row[1:] for row in rows_of("docs/avastep.md", title)}
    measured = {AVASTEP_METHODS[path.name] for path in (ROOT / "results" / folder).iterdir()}
    assert rows.keys() == measured
    for method, name in AVASTEP_METHODS.items():
        if name not in measured:
            continue
        seeds: dict[int, list[Record]] = {}
        for record in read_records(ROOT / "results" / folder / method / "records.jsonl"):
            seeds.setdefault(record.seed, []).append(record)
        ridges = [ridge(records) for records in seeds.values()]
        assert not any(each.at_an_end for each in ridges), "an axis is too short"
        assert rows[name] == [
            mean_and_range([each.spread for each in ridges], 2),
            mean_and_range([each.slope for each in ridges], 2),
            mean_and_range([each.best for each in ridges], digits),
            mean_and_range([each.excess for each in ridges], 2),
        ]


def test_the_table_of_the_bad_batch_is_what_the_record_says() -> None:
    record = json.loads((ROOT / "results" / "shock.json").read_text())["nats per character"]
    for name, row in record.items():
        parts = ("without, at the end", "with, before", "with, after", "with, at the end")
        values = [[f"{row['lr']:g}", *(f"{row[part]:.3f}" for part in parts)]]
        assert [found for found in rows_of("docs/avastep.md", name) if len(found) == 5] == values


def test_the_choice_of_avasteps_defaults_is_what_the_records_say() -> None:
    scores: dict[str, dict[str, float]] = {}
    for task in ("cifar10", "tinyshakespeare", "digits"):
        for name, folder in CHOICES.items():
            by_lr: dict[float | None, list[float]] = {}
            for record in read_records(ROOT / "results" / "avastep-choices" / task / folder / "records.jsonl"):
                by_lr.setdefault(record.lr, []).append(record.value)
            scores.setdefault(task, {})[name] = min(statistics.mean(values) for values in by_lr.values())
    for name in CHOICES:
        relative = statistics.mean(each[name] / min(each.values()) for each in scores.values())
        shown = [f"{scores['cifar10'][name]:.2f} %", f"{scores['tinyshakespeare'][name]:.3f}"]
        shown += [f"{scores['digits'][name]:.2f} %", f"{relative:.4f}"]
        assert row_of("docs/avastep.md", name) == shown


def test_the_tables_of_the_race_are_what_was_recorded() -> None:
    found = json.loads((ROOT / "results" / "searches.json").read_text())["maps"]
    assert len(found) == 28
    searches = ("lines", "random", "tpe", "gp")
    ours = {place.removesuffix("/avastep"): race for place, race in found.items() if place.endswith("/avastep")}
    for place, race in ours.items():
        taken = race["lines"]["trials"]
        rows, columns = race["shape"]
        tables = [(place, [f"{rows} x {columns}", f"{min(taken)} to {max(taken)}"], race)]
        if "unseen" in race:
            tables.append((f"{place}, unseen", [], race["unseen"]))
        for title, cells, regrets in tables:
            numbers = [regrets[search] for search in searches]
            shown = [f"{each['median'][2]:.3f} ({each['worst_quarter'][2]:.3f})" for each in numbers]
            assert row_of("docs/tuning.md", title) == [*cells, *shown]
    assert sum("unseen" in race for race in ours.values()) == 4


def test_the_search_by_lines_is_the_one_that_raced() -> None:
    searches = runpy.run_path(str(ROOT / "benchmarks" / "searches.py"))
    found = json.loads((ROOT / "results" / "searches.json").read_text())["maps"]
    for place, space, records in searches["maps"]():
        known = scores(records)
        orders = searches["by_lines"](space, known)
        assert [len(order) for order in orders] == found[place]["lines"]["trials"]
        regrets = searches["regrets"](orders, known, known)
        assert searches["summary"](regrets, 45)["median"] == found[place]["lines"]["median"]


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        ("cifar10-small", 14),
        ("digits-wide", 14),
        ("tinyshakespeare-wide", 16),
        ("penn-treebank-small", 19),
        ("gpt-quick", 19),
    ],
)
def test_few_trials_find_avasteps_best_from_every_eps(folder: str, most: int) -> None:
    records = read_records(ROOT / "results" / folder / "avastep" / "records.jsonl")
    known = scores(records)
    space = Space.of((cell.lr for cell in known), (cell.eps for cell in known))
    best = min(known.values(), key=lambda score: score.rank)
    assert space.eps is not None
    for eps in space.eps.values:
        found = replay("lines", space, known, start=space.start(start_eps=eps))
        assert found.trials <= most
        assert found.score is not None
        assert found.score.loss - best.loss <= best.error


def test_the_default_start_is_the_one_that_the_document_recommends() -> None:
    searches = runpy.run_path(str(ROOT / "benchmarks" / "searches.py"))
    trials, losses = {}, {}
    for place, space, records in searches["maps"]():
        known, optimizer = scores(records), place.rpartition("/")[2]
        if optimizer not in ("avastep", "adam", "adamw"):
            continue
        found = {
            eps: replay("lines", space, known, start=space.start(start_eps=eps, optimizer=optimizer))
            for eps in (None, min(space.eps.values, key=lambda value: abs(math.log(value / 0.1))))
        }
        trials[place] = [one.trials for one in found.values()]
        losses[place] = [one.curve[-1] for one in found.values()]
    ours = [counts for place, counts in trials.items() if place.endswith("avastep")]
    theirs = [pair for place, pair in losses.items() if not place.endswith("avastep")]
    text = " ".join((ROOT / "docs" / "tuning.md").read_text().split())
    least, most = ([f(column) for column in zip(*ours, strict=True)] for f in (min, max))
    assert len(ours) == 5
    assert f"{least[0]} to {most[0]} trials on all of AvaStep's maps ({least[1]} to {most[1]} from 0.1)" in text
    assert (sum(one <= other for one, other in theirs), len(theirs)) == (6, 7)


# --- docs/transformers.md ---

LRS = ("0.0005", "0.001", "0.002", "0.004", "0.008")


def losses(folder: str, name: str, seeds: int, steps: int = 1800) -> list[float]:
    """Return the validation losses of a run's seeds."""
    names = [name, *(f"{name}-seed-{seed}" for seed in range(1, seeds))]
    results = [json.loads((ROOT / "results" / folder / one / "result.json").read_text()) for one in names]
    assert all(result["steps"] == steps for result in results)
    return [result["validation"]["error"] for result in results]


def bits(folder: str, name: str, seeds: int = 1) -> str:
    """Return a validation loss as the document has it; with seeds, their mean and range."""
    return mean_and_range(losses(folder, name, seeds), 4)


@pytest.mark.parametrize(
    ("row", "folder", "lr", "seeds"),
    [(f"10.8 M parameters | 1,800 | {lr}", "gpt-small", lr, 3 if lr == "0.002" else 1) for lr in LRS]
    + [("85.4 M parameters | 1,800 | 0.001", "gpt-base", "0.001", 2)],
)
def test_the_table_of_the_same_settings_is_what_the_records_say(row: str, folder: str, lr: str, seeds: int) -> None:
    both = [bits(folder, f"{name}-lr-{lr}", seeds) for name in ("adamw", "avastep")]
    assert row_of("docs/transformers.md", row)[2:] == both


def test_adopts_line_is_what_the_records_say() -> None:
    text = " ".join((ROOT / "docs" / "transformers.md").read_text().split())
    line = ", ".join(bits("gpt-small", f"adopt-lr-{lr}") for lr in LRS)
    assert f"smaller model: {line}." in text
    assert f"three seeds: {bits('gpt-small', 'adopt-lr-0.0005', 3)}" in text
    assert f"{bits('gpt-small', 'adopt-lr-0.00025')} at 0.00025" in text


@pytest.mark.parametrize(
    ("eps", "name", "seeds"),
    [
        ("1e-8", "", 3),
        ("1e-6", "-eps-1e-06", 3),
        ("1e-5", "-eps-1e-05", 1),
        ("1e-4", "-eps-0.0001", 1),
        ("1e-3", "-eps-0.001", 1),
        ("0.01", "-eps-0.01", 1),
        ("0.1", "-eps-0.1", 1),
    ],
)
def test_the_line_over_eps_is_what_the_records_say(eps: str, name: str, seeds: int) -> None:
    assert row_of("docs/transformers.md", eps) == [bits("gpt-small", f"avastep-lr-0.002{name}", seeds)]
    text = " ".join((ROOT / "docs" / "transformers.md").read_text().split())
    assert f"with both seeds: {bits('gpt-base', 'avastep-lr-0.001-eps-1e-06', 2)}." in text


@pytest.mark.parametrize(
    ("name", "optimizer", "way", "clip"),
    [
        ("torch AdamW, fused", "adamw", "graph", 1.0),
        ("AvaStep, fused", "avastep", "graph", 1.0),
        ("torch AdamW, fused, no graph", "adamw", "plain", None),
        ("AvaStep, fused, no graph", "avastep", "plain", None),
        ("AvaStep, in backward, no graph", "avastep", "in backward", None),
    ],
)
def test_the_table_of_the_transformers_speed_is_what_was_recorded(
    name: str, optimizer: str, way: str, clip: float | None
) -> None:
    record = json.loads((ROOT / "results" / "transformer-h200.json").read_text())
    (found,) = (row for row in record["rows"] if (row["optimizer"], row["way"], row["clip"]) == (optimizer, way, clip))
    expected = [f"{found['ms']:.1f}", f"{round(found['tokens_per_second'], -2):,.0f}", f"{100 * found['share']:.0f} %"]
    expected.append(f"{found['peak_mb'] / 1000:.2f}" if found["peak_mb"] else "not counted")
    assert row_of("docs/transformers.md", name) == expected
    assert found["share"] > 0.4


@pytest.mark.parametrize(("vocabulary", "steps"), [(2000, 565), (32000, 396)])
@pytest.mark.parametrize("eps", [None, "1e-8", "1e-5", "1e-3", "1e-1"])
def test_the_table_of_vocabularies_is_what_the_records_say(vocabulary: int, steps: int, eps: str | None) -> None:
    row = f"{vocabulary:,}, AvaStep, eps {eps}" if eps else f"{vocabulary:,}, AdamW, eps 1e-8"
    found = {}
    for lr in LRS[1:4]:
        name = f"avastep-lr-{lr}-eps-{eps}" if eps else f"adamw-lr-{lr}"
        found[lr] = json.loads((ROOT / "results" / f"gpt-tokens-{vocabulary}" / name / "result.json").read_text())
        assert found[lr]["steps"] == steps
    bits = {lr: result["validation"]["error"] for lr, result in found.items()}
    best = min(bits, key=lambda lr: bits[lr])
    groups = found[best]["details"]["bits_by_frequency"]
    expected = [*(f"{value:.3f}" for value in bits.values()), best, f"{groups[0]:.2f}", f"{groups[-1]:.2f}"]
    assert row_of("docs/transformers.md", row) == expected


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("as above, seed 0", "{}"),
        ("seed 1", "{}-seed-1"),
        ("seed 2", "{}-seed-2"),
        ("warm-up of 100 steps", "{}-warmup-100"),
        ("beta2 = 0.99", "{}-beta2-0.99"),
        ("eps = 1e-12", "{}-eps-1e-12"),
        *((f"`clip_update={c}`", f"{{}}-clip-{'null' if c == 'None' else c}") for c in ("0.5", "0.7", "2", "None")),
    ],
)
def test_the_table_of_causes_is_what_the_records_say(row: str, name: str) -> None:
    folder = ROOT / "results" / "gpt-tokens-32000"
    ours = f"avastep-lr-0.002{'-eps-1e-8' if 'seed' in row else ''}"
    expected = []
    for place in (folder / name.format("adamw-lr-0.002"), folder / name.format(ours)):
        result = json.loads((place / "result.json").read_text()) if place.exists() else None
        expected.append(f"{result['validation']['error']:.3f}" if result else "")
    metrics = [json.loads(line) for line in (folder / name.format(ours) / "metrics.jsonl").read_text().splitlines()]
    gamma = metrics[-1].get("gamma")
    expected.append("not recorded" if gamma is None else f"{gamma:.3f}")
    assert row_of("docs/transformers.md", row) == expected
    assert all(1 <= value < 1.011 for line in metrics if (value := line.get("gamma")) is not None)


# --- README.md ---


@pytest.mark.parametrize(
    ("row", "record", "parameters"),
    [
        ("optimizer step, GPT-2 124 M, H200", "step-h200.json", "gpt2-124M"),
        ("optimizer step, GPT-2 124 M in bfloat16, H200", "step-h200.json", "gpt2-124M-bf16"),
        ("optimizer step, 67 M parameters, CPU", "in-turn-cpu.json", "4x4096x4096"),
    ],
)
def test_the_readmes_step_times_are_what_was_recorded(row: str, record: str, parameters: str) -> None:
    rows = json.loads((ROOT / "results" / record).read_text())["rows"]
    times = {one["optimizer"]: one["milliseconds"] for one in rows if one["parameters"] == parameters}
    cells = row_of("README.md", row)
    digits = 2 if float(cells[0]) < 10 else 1
    assert cells == [f"{times[name]:.{digits}f}" for name in ("torch AdamW fused", "AvaStep fused")]


def test_the_readmes_transformers_are_what_was_recorded() -> None:
    rows = json.loads((ROOT / "results" / "transformer-h200.json").read_text())["rows"]
    times = {row["optimizer"]: f"{row['ms']:.1f}" for row in rows if (row["way"], row["clip"]) == ("graph", 1.0)}
    cells = row_of("README.md", "whole training step, 85 M transformer, H200")
    assert cells == [times[name] for name in ("adamw", "avastep")]
    text = " ".join((ROOT / "README.md").read_text().split())
    small = [statistics.mean(losses("gpt-small", f"{name}-lr-0.002", 3)) for name in ("adamw", "avastep")]
    base = [statistics.mean(losses("gpt-base", f"{name}-lr-0.001", 2)) for name in ("adamw", "avastep")]
    assert f"{small[1]:.3f} against {small[0]:.3f} bits per character with 11 M parameters, three seeds" in text
    assert f"{base[1]:.3f} against {base[0]:.3f} with 85 M, two seeds" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
