"""A race of searches on the recorded maps: what each has found after so many trials.

Run: python benchmarks/searches.py --json results/searches.json   (ten minutes on one core)

A map is a grid of finished runs, so a trial is looked up instead of run; with several seeds its value is their mean.
Ours starts at four eps; the others are repeated with other seeds. TPE and GP are Optuna's samplers: they choose any lr
and eps of the map's range, and get the nearest cell. "ratio" is ours with the line over eps taken along a constant
ratio of lr and eps, as suits Adam. Regret is how much worse than the best cell of the map the best one so far is.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna

from avagrad.tune.records import read_records
from avagrad.tune.search import Score, best_so_far, replay, scores
from avagrad.tune.space import Axis, Cell, Space

RESULTS = Path(__file__).parents[1] / "results"
TRIALS = (8, 12, 16, 24, 45)
Known = dict[Cell, Score]


def maps() -> Iterator[tuple[str, Space, Known]]:
    """Yield each complete map of two axes: its name, its space and its scores."""
    for file in sorted(RESULTS.glob("*/*/records.jsonl")):
        records = read_records(file)
        known = scores(records)
        axes = [sorted({value for cell in known if (value := cell[i]) is not None}) for i in range(2)]
        if min(map(len, axes)) > 1 and len(known) == len(axes[0]) * len(axes[1]):
            space = Space(Axis("lr", tuple(axes[0])), Axis("eps", tuple(axes[1])))
            yield f"{file.parts[-3]}/{file.parts[-2]}", space, known


def starts(space: Space) -> list[float]:
    """Return four eps, evenly spaced over the axis."""
    assert space.eps is not None
    values = space.eps.values
    return [values[round(k * (len(values) - 1) / 3)] for k in range(4)]


def by_lines(space: Space, known: Known) -> list[list[float]]:
    """Search by lines from each start."""
    found = [replay("lines", space, known, start=space.start(start_eps=eps)) for eps in starts(space)]
    return [list(one.curve) for one in found]


def by_ratio(space: Space, known: Known) -> list[list[float]]:
    """Search by lines where lr is multiplied as eps is; a cell that is then beyond the map counts as failed."""
    assert space.lr is not None
    lrs, curves = space.lr.values, []
    for start_eps in starts(space):
        sheared = {}
        for cell in known:
            assert cell.lr is not None
            assert cell.eps is not None
            lr = cell.lr * cell.eps / start_eps
            near = Cell(min(lrs, key=lambda value: abs(math.log(value / lr))), cell.eps)
            sheared[cell] = known[near] if lrs[0] / 2 < lr < 2 * lrs[-1] else Score(math.inf)
        curves.append(list(replay("lines", space, sheared, start=space.start(start_eps=start_eps)).curve))
    return curves


def at_random(space: Space, known: Known, repetitions: int) -> list[list[float]]:
    """Take cells at random, none twice."""
    most = min(max(TRIALS), len(space))
    return [best_so_far(random.Random(seed).sample(space.cells(), most), known) for seed in range(repetitions)]


def by_sampler(
    space: Space, known: Known, make: Callable[[int], Any], repetitions: int, most: int
) -> list[list[float]]:
    """Let one of Optuna's samplers choose."""
    assert space.lr is not None
    assert space.eps is not None
    lrs, all_eps = space.lr.values, space.eps.values
    worst = max(score.loss for score in known.values() if not score.failed)
    curves = []
    for seed in range(repetitions):
        study = optuna.create_study(sampler=make(seed))
        order = []
        for _ in range(most):
            trial = study.ask()
            lr = trial.suggest_float("lr", lrs[0], lrs[-1], log=True)
            eps = trial.suggest_float("eps", all_eps[0], all_eps[-1], log=True)
            cell = Cell(_nearest(lrs, lr), _nearest(all_eps, eps))
            order.append(cell)
            study.tell(trial, min(known[cell].loss, worst))
        curves.append(best_so_far(order, known))
    return curves


def _nearest(values: tuple[float, ...], value: float) -> float:
    return min(values, key=lambda other: abs(math.log(other / value)))


def regrets(curves: list[list[float]], known: Known, most: int) -> dict[str, list[float | None]]:
    """Return the median and the worst quarter of the regret after each number of trials; None beyond the last one."""
    losses = [score.loss for score in known.values() if not score.failed]
    rows: dict[str, list[float | None]] = {"median": [], "worst_quarter": []}
    for trials in TRIALS:
        found = [min(curve[min(trials, len(curve)) - 1], max(losses)) - min(losses) for curve in curves]
        _, median, worst = statistics.quantiles(found, n=4, method="inclusive")
        rows["median"].append(median if trials <= most else None)
        rows["worst_quarter"].append(worst if trials <= most else None)
    return rows


def race(space: Space, known: Known) -> dict[str, Any]:
    """Run all searches on a map."""
    most = max(TRIALS)
    runs: dict[str, tuple[list[list[float]], int]] = {
        "lines": (by_lines(space, known), most),
        "ratio": (by_ratio(space, known), most),
        "random": (at_random(space, known, 50), most),
        "tpe": (by_sampler(space, known, lambda seed: optuna.samplers.TPESampler(seed=seed), 50, most), most),
        "gp": (by_sampler(space, known, lambda seed: optuna.samplers.GPSampler(seed=seed), 10, 24), 24),
    }
    found: dict[str, Any] = {"shape": space.shape, "best": min(score.loss for score in known.values())}
    for name, (curves, trials) in runs.items():
        found[name] = regrets(curves, known, trials)
    found["lines"]["trials"] = [len(curve) for curve in runs["lines"][0]]
    return found


def main() -> None:
    """Race on each map, and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "searches.json", help="where the regrets go")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: dict[str, Any] = {"optuna": optuna.__version__, "trials": TRIALS, "maps": {}}
    for name, space, known in maps():
        found["maps"][name] = race(space, known)
        at_16 = {each: found["maps"][name][each]["median"][2] for each in ("lines", "ratio", "random", "tpe", "gp")}
        print(name, {each: round(value, 4) for each, value in at_16.items()}, flush=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
