"""A race of searches on the recorded maps: what each has found after so many trials.

Run: python benchmarks/searches.py --json results/searches.json   (half an hour on one core)

A map is a grid of finished runs, so a trial is looked up instead of run; with several seeds its value is their mean.
Ours starts at four eps; the others are repeated with other seeds. TPE and GP are Optuna's samplers: they choose any lr
and eps of the map's range, and get the nearest cell. Regret is how much worse than the best cell of the map the best
one so far is.

On a map of several seeds a search also runs on each seed alone, and the best cell so far is judged by the mean of the
other seeds ("unseen"): what a search finds is otherwise flattered by the noise that it has seen.
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

from avagrad.tune.records import Record, read_records
from avagrad.tune.search import Score, replay, scores
from avagrad.tune.space import Axis, Cell, Space

RESULTS = Path(__file__).parents[1] / "results"
TRIALS = (8, 12, 16, 24, 45)
MOST_GP = 24  # it is slow
SEARCHES = ("lines", "random", "tpe", "gp")
Known = dict[Cell, Score]
Orders = list[list[Cell]]  # of each repetition: the cells in the order in which it evaluates them


def maps() -> Iterator[tuple[str, Space, list[Record]]]:
    """Yield each complete map of two axes: its name, its space and its records."""
    for file in sorted(RESULTS.glob("*/*/records.jsonl")):
        records = read_records(file)
        known = scores(records)
        axes = [sorted({value for cell in known if (value := cell[i]) is not None}) for i in range(2)]
        if min(map(len, axes)) > 1 and len(known) == len(axes[0]) * len(axes[1]):
            space = Space(Axis("lr", tuple(axes[0])), Axis("eps", tuple(axes[1])))
            yield f"{file.parts[-3]}/{file.parts[-2]}", space, records


def starts(space: Space) -> list[float]:
    """Return four eps, evenly spaced over the axis."""
    assert space.eps is not None
    values = space.eps.values
    return [values[round(k * (len(values) - 1) / 3)] for k in range(4)]


def by_lines(space: Space, known: Known) -> Orders:
    """Search by lines from each start."""
    found = [replay("lines", space, known, start=space.start(start_eps=eps)) for eps in starts(space)]
    return [list(one.order) for one in found]


def at_random(space: Space, repetitions: int) -> Orders:
    """Take cells at random, none twice."""
    most = min(max(TRIALS), len(space))
    return [random.Random(seed).sample(space.cells(), most) for seed in range(repetitions)]


def by_sampler(space: Space, known: Known, make: Callable[[int], Any], repetitions: int, most: int) -> Orders:
    """Let one of Optuna's samplers choose."""
    assert space.lr is not None
    assert space.eps is not None
    lrs, all_eps = space.lr.values, space.eps.values
    worst = max(score.loss for score in known.values() if not score.failed)
    orders = []
    for seed in range(repetitions):
        study = optuna.create_study(sampler=make(seed))
        order = []
        for _ in range(most):
            trial = study.ask()
            lr = trial.suggest_float("lr", lrs[0], lrs[-1], log=True)
            eps = trial.suggest_float("eps", all_eps[0], all_eps[-1], log=True)
            order.append(Cell(_nearest(lrs, lr), _nearest(all_eps, eps)))
            study.tell(trial, min(known[order[-1]].loss, worst))
        orders.append(order)
    return orders


def _nearest(values: tuple[float, ...], value: float) -> float:
    return min(values, key=lambda other: abs(math.log(other / value)))


def regrets(orders: Orders, known: Known, judged: Known) -> list[list[float]]:
    """Return for each repetition the regret after each number of trials: of the best known cell, as it is judged."""
    losses = [score.loss for score in judged.values() if not score.failed]
    found = []
    for order in orders:
        best: list[Cell] = []
        for cell in order:
            best.append(min([*best[-1:], cell], key=lambda each: known[each].rank))
        picks = [best[min(trials, len(best)) - 1] for trials in TRIALS]
        found.append([min(judged[pick].loss, max(losses)) - min(losses) for pick in picks])
    return found


def summary(found: list[list[float]], most: int) -> dict[str, list[float | None]]:
    """Return the median and the worst quarter of regrets after each number of trials; None beyond the last one."""
    rows: dict[str, list[float | None]] = {"median": [], "worst_quarter": []}
    for trials, column in zip(TRIALS, zip(*found, strict=True), strict=True):
        _, median, worst = statistics.quantiles(column, n=4, method="inclusive")
        rows["median"].append(median if trials <= most else None)
        rows["worst_quarter"].append(worst if trials <= most else None)
    return rows


def orders_of(space: Space, known: Known, repetitions: int) -> dict[str, Orders]:
    """Run all searches on known scores; those that draw random numbers so many times, GP a fifth as many."""
    most = max(TRIALS)
    return {
        "lines": by_lines(space, known),
        "random": at_random(space, repetitions),
        "tpe": by_sampler(space, known, lambda seed: optuna.samplers.TPESampler(seed=seed), repetitions, most),
        "gp": by_sampler(space, known, lambda seed: optuna.samplers.GPSampler(seed=seed), repetitions // 5, MOST_GP),
    }


def race(space: Space, records: list[Record]) -> dict[str, Any]:
    """Run all searches on a map."""
    known = scores(records)
    limits = dict.fromkeys(SEARCHES, max(TRIALS)) | {"gp": MOST_GP}
    found: dict[str, Any] = {"shape": space.shape, "best": min(score.loss for score in known.values())}
    orders = orders_of(space, known, 50)
    for name in SEARCHES:
        found[name] = summary(regrets(orders[name], known, known), limits[name])
    found["lines"]["trials"] = [len(order) for order in orders["lines"]]
    seeds = sorted({record.seed for record in records})
    if len(seeds) > 1:
        unseen: dict[str, list[list[float]]] = {name: [] for name in SEARCHES}
        for seed in seeds:
            seen = scores(record for record in records if record.seed == seed)
            judged = scores(record for record in records if record.seed != seed)
            for name, order in orders_of(space, seen, 20).items():
                unseen[name] += regrets(order, seen, judged)
        found["unseen"] = {name: summary(unseen[name], limits[name]) for name in SEARCHES}
    return found


def main() -> None:
    """Race on each map, and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "searches.json", help="where the regrets go")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: dict[str, Any] = {"optuna": optuna.__version__, "trials": TRIALS, "maps": {}}
    for name, space, records in maps():
        found["maps"][name] = race(space, records)
        at_16 = {each: found["maps"][name][each]["median"][2] for each in SEARCHES}
        print(name, {each: round(value, 4) for each, value in at_16.items()}, flush=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
