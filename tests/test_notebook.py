"""The notebook runs as it is, and shows what its text says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Run as a plain script; what its cells have left behind is written to standard error.
SCRIPT = """
import json, runpy, sys
left = runpy.run_path(sys.argv[1])
rows = {name: [(r.lr, r.eps, r.value) for r in records] for name, records in left["maps"].items()}
search = {"trials": len(left["found"].trials), "lr": left["found"].best.lr, "value": left["found"].best.value}
json.dump({"maps": rows, "search": search, "figure": str(left["folder"] / "map.png")}, sys.stderr)
"""


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    environment = {**os.environ, "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "examples" / "notebook.py")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stderr)
    # The search: about 16 trials, and nothing on the whole grid is much better than what they found.
    assert 12 <= left["search"]["trials"] <= 18
    assert left["search"]["value"] <= 1.05 * min(value for _, _, value in left["maps"]["avastep"])
    # The map: AvaStep's best lr is in one row or the next at every eps, AdamW's moves by powers of ten.
    spread = {name: best_lrs(rows) for name, rows in left["maps"].items()}
    assert max(spread["avastep"]) / min(spread["avastep"]) < 10**0.51
    assert max(spread["adamw"]) / min(spread["adamw"]) > 10**2
    assert Path(left["figure"]).stat().st_size > 10_000
    # The trainings at lr 0.01: another eps stalls AdamW alone.
    losses = {line.partition(": ")[0]: float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()[:8]}
    assert losses["adamw    lr 0.01, eps 1     "] > 10 * losses["adamw    lr 0.01, eps 1e-08 "]
    assert losses["avastep  lr 0.01, eps 1     "] < 1.5 * losses["avastep  lr 0.01, eps 1e-08 "]


def best_lrs(rows: list[tuple[float, float, float]]) -> list[float]:
    """Return the best lr of each eps."""
    return [min((value, lr) for lr, eps, value in rows if eps == wanted)[1] for wanted in {eps for _, eps, _ in rows}]
