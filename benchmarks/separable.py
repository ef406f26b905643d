"""What the separable search finds, and what the full grid has: the pick and the best cell of each method, new seeds.

Run: python benchmarks/separable.py --task digits --methods avagrad adam --out results/separable-digits
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from avagrad import bench
from avagrad.lab.config import configure
from avagrad.lab.sweep import sweep
from avagrad.tune.records import write_records
from avagrad.tune.search import replay, scores
from avagrad.tune.separability import separability
from avagrad.tune.space import Cell, Space, axis

NEW_SEEDS = range(100, 105)


def measured(task: str, method: str, place: Path, workers: int, epochs: int | None) -> dict[str, Any]:
    """Make the grid and the search (which costs nothing after the grid), and run both picks again."""
    space = Space(axis("paper", "lr"), axis("paper", "eps"))
    config = configure(task, method, epochs=epochs)
    began = time.monotonic()
    whole = sweep(config, lr=space.lr, eps=space.eps, method="grid", folder=place, workers=workers)
    seconds = time.monotonic() - began
    known = scores(whole.trials)
    start = space.start()
    found = separability(space, known, start=start)
    search = replay("separable", space, known, start=start)
    assert search.pick is not None
    assert found.best is not None
    picks: dict[str, Any] = {}
    for name, cell in (("pick", search.pick), ("best", found.best)):
        again = sweep(
            config, lr=axis(cell.lr, "lr"), eps=axis(cell.eps, "eps"), method="grid", folder=place,
            workers=workers, seeds=list(NEW_SEEDS),
        )  # fmt: skip
        errors = [record.value for record in again.trials]
        tests = [record.facts["test"] for record in again.trials]
        picks[name] = {
            "lr": cell.lr,
            "eps": cell.eps,
            "found": known[cell].loss,
            "validation": statistics.fmean(errors),
            "standard_error": statistics.stdev(errors) / math.sqrt(len(errors)),
            "test": statistics.fmean(tests),
            "test_standard_error": statistics.stdev(tests) / math.sqrt(len(tests)),
        }
    line = {cell: known[cell] for cell in known if cell.eps == 1e-8}
    at_small_eps = min(line, key=lambda cell: line[cell].rank)
    return {
        "method": method,
        "told": found.summary(),
        "seconds": seconds,
        "trials": search.trials,
        "rings": search.rings,
        "confirmed": search.confirmed,
        "slope": found.slope,
        "slope_at_large_eps": found.slope_at_large_eps,
        "moves": found.moves,
        "share": found.share,
        "stays": found.stays,
        "regret": found.regret,
        "line_at_eps_1e-8": {"lr": Cell(*at_small_eps).lr, "found": line[at_small_eps].loss},
        **picks,
        "records": [record for record in whole.trials if record.seed == 0],
    }


def main() -> None:
    """Measure, print, and write the records next to the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--methods", nargs="+", default=["avagrad", "adam"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs", "separable"), help="where the runs are made")
    parser.add_argument("--out", type=Path, help="where records and numbers go")
    given = parser.parse_args()
    rows = []
    for method in given.methods:
        row = measured(given.task, method, given.runs / f"{given.task}-{method}", given.workers, given.epochs)
        records = row.pop("records")
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            write_records(given.out / f"{method}.jsonl", records)
        rows.append(row)
        print(f"{method}: {row['told']}", flush=True)
    cells = [
        [row["method"], name, f"{row[name]['lr']:g}", f"{row[name]['eps']:g}", f"{row[name]['found']:.2f}",
         f"{row[name]['validation']:.2f} ({row[name]['standard_error']:.2f})",
         f"{row[name]['test']:.2f} ({row[name]['test_standard_error']:.2f})"]
        for row in rows
        for name in ("pick", "best")
    ]  # fmt: skip
    print(bench.markdown(["method", "point", "lr", "eps", "found", "validation, new seeds", "test, new seeds"], cells))
    if given.out:
        (given.out / "separable.json").write_text(json.dumps({"task": given.task, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
