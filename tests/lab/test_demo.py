"""The demonstration: all jobs, killed and stopped, and what it says at the end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_jobs import fail, tiny_jobs, training, waiting
from typer.testing import CliRunner
from waiting import until

from avagrad.cli import app
from avagrad.lab.config import configure
from avagrad.lab.demo import jobs
from avagrad.lab.folder import RunFolder
from avagrad.lab.methods import METHODS
from avagrad.lab.worker_pool import Job, run_jobs
from avagrad.report.findings import findings, six_lines
from avagrad.report.reading import Collection, Run, Sweep, Synthetic, collect, method_title
from avagrad.tune.records import Record


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files, with their times."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_the_demonstration_is_what_it_says() -> None:
    by_name = {job.name: job for job in jobs()}
    assert len(by_name) == 1 + 3 + 1 + 2 * 2 * len(METHODS)
    maps = [by_name[f"maps/{name}"] for name in ("adam", "avagrad", "avastep")]
    assert [len(job.arguments["points"]) for job in maps] == [441] * 3
    titles = [method_title(job.arguments["config"].as_json()) for job in maps]
    assert six_lines(Collection("empty"))[1:4] == [f"The map of {title}: not there." for title in titles]
    assert sum(job.cost for job in by_name.values()) < 270  # three minutes on two cores, with the page


@pytest.mark.slow
def test_all_kinds_run_and_are_not_run_again(tmp_path: Path) -> None:
    reported: dict[str, list[float]] = {}
    todo = tiny_jobs()
    assert run_jobs(todo, tmp_path, on_progress=lambda name, share: reported.setdefault(name, []).append(share)) == {}
    assert all(job.is_done(tmp_path) for job in todo)
    assert reported.keys() == {job.name for job in todo}
    assert all(shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares) for shares in reported.values())
    found = collect(tmp_path)
    assert (len(found.synthetics), len(found.sweeps), len(found.runs), found.problems) == (1, 2, 1, ())
    before = contents(tmp_path)
    assert run_jobs(todo, tmp_path, on_progress=lambda name, share: pytest.fail(name)) == {}
    assert contents(tmp_path) == before


def can_be_claimed(folder: Path) -> bool:
    try:
        with RunFolder.claim(folder, {}, {}, resume=True):
            return True
    except BlockingIOError:
        return False


@pytest.mark.slow
def test_other_settings_are_run_anew(tmp_path: Path) -> None:
    """A finished job is not taken for one whose settings have changed since."""
    assert run_jobs([training()], tmp_path, workers=1) == {}
    other = {"config": configure("digits", "sgd", epochs=2)}
    changed = dataclasses.replace(training(), arguments=other, cost=7.0)
    assert dataclasses.replace(training(), cost=7.0).is_done(tmp_path)
    assert not changed.is_done(tmp_path)
    assert run_jobs([changed], tmp_path, workers=1) == {}
    assert changed.is_done(tmp_path)
    assert json.loads((tmp_path / changed.name / "result.json").read_text())["epochs"] == 2


@pytest.mark.slow
def test_killed_it_leaves_nobody_behind_and_continues(tmp_path: Path) -> None:
    todo = [training(), waiting()]
    path = os.pathsep.join(sys.path)
    script = [sys.executable, str(Path(__file__).with_name("demo_jobs.py")), str(tmp_path)]
    process = subprocess.Popen(script, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    try:
        until(lambda: todo[0].is_done(tmp_path) and (tmp_path / "waiting" / "config.json").exists())
        assert not can_be_claimed(tmp_path / "waiting")
    finally:
        process.kill()
        process.wait()
    until(lambda: can_be_claimed(tmp_path / "waiting"))  # its worker has ended too
    before = contents(tmp_path / "runs")
    (tmp_path / "go").touch()
    assert run_jobs(todo, tmp_path) == {}
    assert todo[1].is_done(tmp_path)
    assert contents(tmp_path / "runs") == before


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_continue(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "avagrad", "demo", "--out", str(tmp_path / "x"), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "x" / "maps" / "avastep" / "metrics.jsonl"
    try:
        until(metrics.exists)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, output = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "run it again to resume" in output
    assert "Traceback" not in output
    assert metrics.with_name("checkpoint.pt").exists()


@pytest.mark.slow
def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = [Job("fails", 3.0, fail, {"dies": False}), Job("dies", 2.0, fail, {"dies": True}), training()]
    monkeypatch.setattr("avagrad.cli.report.jobs", lambda: todo)
    arguments = ("demo", "--out", str(tmp_path / "x"), "--workers", "1")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "failed: fails: there is no go" in result.stderr
    assert "failed: dies: its process was killed: Killed" in result.stderr
    assert todo[2].is_done(tmp_path / "x")
    page = tmp_path / "x" / "report.html"
    assert len(result.stdout.splitlines()) == 7
    assert result.stdout.splitlines()[-1] == f"the page is {page}"
    (tmp_path / "x" / "go").touch()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert "3 jobs, 1 of them already done" in again.stderr
    before = contents(tmp_path / "x")
    third = CliRunner().invoke(app, arguments)
    assert third.stdout == again.stdout
    assert third.stderr == "all 3 jobs were already done\n"
    assert contents(tmp_path / "x") == before


def test_what_would_run_is_said_without_running_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ("demo", "--dry-run", "--out", str(tmp_path / "x")))
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(jobs()) + 1
    assert not (tmp_path / "x").exists()


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    result = CliRunner().invoke(app, ("demo", "--out", str(tmp_path / "x")))
    assert isinstance(result.exception, OSError)
    assert "where nothing can be written" in str(result.exception)


# --- findings ---

CONFIG = {"task": "digits", "optimizer": "avagrad"}


def sweep(values: dict[tuple[float, float], float], place: str = "maps/a") -> Sweep:
    records = tuple(Record(lr, eps, value=value) for (lr, eps), value in values.items())
    return Sweep(place, place, records, CONFIG, {}, "minimize")


def a_run(optimizer: str, seed: int, error: float | None) -> Run:
    config = {"task": "digits", "optimizer": optimizer, "lr": 0.1, "seed": seed}
    ended = {"status": "finished", "validation": {"error": error}, "test": {"error": error}}
    result = {"status": "diverged", "validation": None, "test": None} if error is None else ended
    return Run(f"runs/{optimizer}-{seed}", config, {}, (), 1, result)


LRS, EPSES = (0.01, 0.1, 1.0, 10.0, 100.0), (0.001, 0.01, 0.1, 1.0, 10.0)


def test_a_ridge_that_moves_and_one_that_stays() -> None:
    moves = sweep({(lr, eps): max(lr / eps, eps / lr) for lr in LRS for eps in EPSES})
    stays = sweep({(lr, eps): abs(lr - 1) + eps for lr in LRS for eps in EPSES})
    one, other = findings(Collection("x", sweeps=(moves, stays)))
    assert one.startswith("AvaGrad on digits, 5 x 5: The best lr moves by 3 steps over eps from 0.001 to 10 (slope")
    assert "The best lr does not move over eps from 0.001 to 10 (slope 0.00; 0.00 at large eps)" in other
    assert other.endswith("Best: lr 1, eps 0.001: 0.001 %.")


def test_a_search_is_told_beside_its_grid() -> None:
    whole = {(lr, eps): 1 + abs(lr - 1) + abs(eps - 0.1) for lr in LRS for eps in EPSES}
    ring = {(lr, eps) for lr in (0.1, 1.0, 10.0) for eps in (0.01, 0.1, 1.0)}
    part = {(lr, eps): value for (lr, eps), value in whole.items() if lr == 1 or eps == 0.1 or (lr, eps) in ring}
    *_, finding = findings(Collection("x", sweeps=(sweep(whole), sweep(part, "search/a"))))
    assert finding == (
        "The search for AvaGrad on digits: 13 trials found lr 1, eps 0.1: 1 % (the first ring confirmed it); "
        "the best of the grid's 25 is lr 1, eps 0.1: 1 %."
    )
    started = sweep({(1.0, 0.1): 3.0, (10.0, 0.1): 2.0, (1.0, 1.0): 4.0}, "search/a")
    (so_far,) = findings(Collection("x", sweeps=(started,)))
    assert "3 trials, the best of them lr 10, eps 0.1: 2 %" in so_far


def test_methods_are_compared_by_their_means() -> None:
    errors = {"sgd": (2.0, 3.0), "adam": (1.0, 1.5), "avagrad": (1.0, 1.5), "adamw": (None, 2.0)}
    runs = tuple(a_run(name, seed, error) for name, both in errors.items() for seed, error in enumerate(both))
    (finding,) = findings(Collection("x", runs=runs))
    assert finding == (
        "digits, test error, %, mean (sd): least Adam 1.25 (0.35, 2 seeds) and AvaGrad 1.25 (0.35, 2 seeds), "
        "next SGD 2.5 (0.71, 2 seeds), of 4 methods; without a result, or diverged: AdamW."
    )


def test_where_the_synthetic_problem_ended() -> None:
    rows = tuple(
        {"w1": 0.0, "method": name, "step": step, "w": {"mean": w * step / 10}, "mean_w": {"mean": 0.3}}
        for name, w in (("adam", 1.0), ("delayed-adam", 0.5))
        for step in (1, 10)
    )
    config = {"runs": [{"w1": 0.0, "C": 999.0, "delta": 1.0}]}
    (finding,) = findings(Collection("x", synthetics=(Synthetic("synthetic", config, {}, rows),)))
    assert finding == (
        "The synthetic problem, w after 10 steps: from w = 0 (w* = 0.4995) Adam at 1.000, Delayed Adam at 0.500."
    )


def test_what_diverged_or_is_missing_is_said() -> None:
    all_gone = sweep({(lr, eps): float("inf") for lr in LRS for eps in EPSES})
    lost = sweep({(1.0, 0.1): float("inf"), (10.0, 0.1): float("inf"), (1.0, 1.0): float("inf")})
    odd = Synthetic("synthetic", {}, {}, ({"w": None}, {"step": "x"}, {}))
    held = Collection("x", (a_run("sgd", 0, None),), (all_gone, lost), (odd,))
    assert findings(held) == [
        "The synthetic problem, w: nothing was recorded.",
        "digits, test error, %: no method has a result; without a result, or diverged: SGD.",
        "AvaGrad on digits, 5 x 5: All 25 cells of the grid diverged or failed, so nothing is known about lr and eps.",
        "The search for AvaGrad on digits: 3 trials of which all diverged.",
    ]
    lines = six_lines(held)
    assert len(lines) == len(six_lines(Collection("x"))) == 6
    assert lines[1] == "The map of Adam: not there."
    json.dumps(lines)  # plain texts
