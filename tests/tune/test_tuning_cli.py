"""The commands tune, sweep and study, as people type them; and the example."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from avagrad.cli import main

ROOT = Path(__file__).parent.parent.parent
OBJECTIVE = """
import math

def objective(trial):
    trial.note(square=trial.lr**2)
    return abs(math.log10(trial.lr)) + abs(math.log10(trial.eps) + 2)

def wrong(trial):
    return None
"""
SLOW = """
import threading
from pathlib import Path

def objective(trial):
    if trial.lr == 3:
        Path("at the third").touch()
        threading.Event().wait()
    return trial.lr
"""


def command(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=cwd, check=False
    )


def avagrad(*arguments: str, cwd: Path) -> str:
    done = command("-m", "avagrad", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    return tmp_path


SEARCH = ("tune", "mine:objective", "--lr", "1e-3:1e3:7", "--eps", "1e-4:1:5", "--storage", "a/mine.journal")


@pytest.mark.slow
def test_an_objective_in_a_module_here(project: Path) -> None:
    told = avagrad(*SEARCH, "--workers", "2", cwd=project)
    assert told.startswith("Best: lr 1, eps 0.01, with 0, after 10 trials. No neighbour of lr 1, eps 0.01 is better")
    again = avagrad(*SEARCH, cwd=project)
    assert again == told.replace("after 10 trials.", "after 10 trials (10 were there already).")
    whole = avagrad(*SEARCH, "--method", "grid", cwd=project)
    assert "after 35 trials (10 were there already)." in whole
    assert "The best lr does not move over eps" in whole
    shown = avagrad("study", "show", "a/mine.journal", cwd=project)
    assert shown.startswith('mine:objective, to minimize; {"format": 1, "objective": "objective"}\n35 finished (0 div')


@pytest.mark.slow
def test_records_go_out_and_come_in(project: Path) -> None:
    avagrad(*SEARCH, cwd=project)
    assert "10 records" in avagrad("study", "export", "a/mine.journal", "out.jsonl", cwd=project)
    lines = [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]
    assert {line["lr"]: line["square"] for line in lines}[10.0] == 100.0
    new = "10 of 10 records are new in the study 'imported' in out.journal\n"
    assert avagrad("study", "import", "out.jsonl", cwd=project) == new
    assert avagrad("study", "import", "out.jsonl", cwd=project).startswith("0 of 10 records are new")
    avagrad("study", "export", "out.journal", "again.jsonl", cwd=project)
    assert (project / "again.jsonl").read_text() == (project / "out.jsonl").read_text()


def test_an_export_replaces_records_alone(project: Path) -> None:
    avagrad(*SEARCH, cwd=project)
    journal = project / "a" / "mine.journal"
    before = journal.read_bytes()
    done = command("-m", "avagrad", "study", "export", "a/mine.journal", "a/mine.journal", cwd=project)
    assert done.returncode == 2
    assert "file is 'a/mine.journal', which holds something else than records: name another." in done.stderr
    assert journal.read_bytes() == before
    for _ in range(2):  # records may be replaced
        avagrad("study", "export", "a/mine.journal", "out.jsonl", cwd=project)


def test_a_dry_run_runs_nothing(project: Path) -> None:
    told = avagrad(*SEARCH, "--dry-run", "--seeds", "2", cwd=project)
    assert told.endswith("at most 22 trials if no neighbour is better, of 70; first the line over lr at eps 0.1\n")
    told = avagrad("sweep", "digits", "--method", "grid", "--dry-run", cwd=project)
    assert "grid: at most 441 trials" in told
    assert not (project / "a").exists()
    assert not (project / "runs").exists()


WRONG = {
    "tune mine": "objective is 'mine', but must be module:function",
    "tune mine.py:objective": "objective is 'mine.py:objective', but must be module:function",
    "tune nowhere:objective --lr 1,2": "there is no module 'nowhere'",
    "tune mine:nothing --lr 1,2": "'mine' has no 'nothing'",
    "tune mine:objective": "lr and eps are None, but at least one of them must be an axis",
    "tune mine:objective --lr 3:1:5": "must have its low end",
    "tune mine:objective --lr -1,2": "lr has the value -1.0, but a value must be finite and above 0",
    "tune mine:objective --lr 1,2 --method best": "method is 'best', but must be one of lines, separable, grid",
    "tune mine:objective --lr 1,2 --direction up": "direction is 'up', but must be one of minimize, maximize",
    "tune mine:wrong --lr 1,2": "objective returned None, but must be a number",
    "sweep digitz": "digitz",
    "sweep digits --optimizer sgd --eps 1,2": "but sgd has no eps",
    "sweep digits --lr 1,2 -o full=true": "full is True, but a search chooses by the validation error",
    "study show nowhere.journal": "storage is 'nowhere.journal', which is gone or was never there",
    "study import nowhere.jsonl": "nowhere.jsonl",
}


@pytest.mark.parametrize("typed", WRONG)
def test_what_is_wrong_is_said_in_a_sentence(
    typed: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert WRONG[typed] in last


@pytest.mark.slow
def test_a_sweep_of_a_task(tmp_path: Path) -> None:
    typed = ("sweep", "digits", "--optimizer", "sgd", "--lr", "0.01,0.1,1e30", "--epochs", "2", "--out", "s")
    told = avagrad(*typed, "--workers", "2", cwd=tmp_path)
    assert re.match(r"Best: lr 0.1, with [\d.]+, after 3 trials.", told)
    avagrad("study", "export", "s/study.journal", "s.jsonl", cwd=tmp_path)
    records = {line["lr"]: line for line in map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines())}
    assert records[1e30]["diverged"]
    assert records[1e30]["diverged_at"] == 2
    assert records[0.1]["epochs"] == 2
    run = tmp_path / "s" / "runs" / "lr=0.1_seed=0"
    result = json.loads((run / "result.json").read_text())
    assert records[0.1]["value"] == result["validation"]["error"]
    assert records[0.1]["test"] == result["test"]["error"]
    assert not (run / "checkpoint.pt").exists()
    other = command("-m", "avagrad", *typed[:-4], "--epochs", "3", "--out", "s", cwd=tmp_path)
    assert "was made with epochs 2, and now it is 3" in other.stderr


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    done = command(str(ROOT / "examples" / "tune_your_model.py"), "--storage", "s.journal", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.match(r"Best: lr ([\d.]+), eps ([\de.-]+), with ([\d.]+), after (\d+) trials", done.stdout)
    assert found
    assert float(found[3]) < 5
    assert int(found[4]) <= 27


@pytest.mark.slow
def test_a_sweep_by_an_ensemble_is_the_sweep_by_runs(tmp_path: Path) -> None:
    typed = ("sweep", "digits", "--optimizer", "adam", "--lr", "1e-3,1e-2,1e30", "--eps", "1e-8,1e-2", "--epochs", "2")
    found = {}
    for engine in ("runs", "ensemble"):
        avagrad(*typed, "--method", "grid", "--engine", engine, "--out", engine, cwd=tmp_path)
        avagrad("study", "export", f"{engine}/study.journal", f"{engine}.jsonl", cwd=tmp_path)
        lines = (tmp_path / f"{engine}.jsonl").read_text().splitlines()
        found[engine] = {(line["lr"], line["eps"]): line for line in map(json.loads, lines)}
    assert found["runs"].keys() == found["ensemble"].keys()
    for cell, line in found["runs"].items():
        other = found["ensemble"][cell]
        assert line.get("diverged_at") == other.get("diverged_at")
        assert line["value"] == pytest.approx(other["value"], abs=0.7)  # two images of 297
    done = command("-m", "avagrad", *typed, "--engine", "ensemble", "--workers", "2", "--out", "x", cwd=tmp_path)
    assert "engine is 'ensemble' with workers, ray, timeout or pruner" in done.stderr


def test_ctrl_c_says_how_to_go_on(project: Path) -> None:
    (project / "slow.py").write_text(SLOW)
    typed = [sys.executable, "-m", "avagrad", "tune", "slow:objective", "--lr", "1,2,3,4", "--storage", "s.journal"]
    typed += ["--method", "separable"]
    run = subprocess.Popen(typed, cwd=project, stderr=subprocess.PIPE, text=True)
    until(lambda: (project / "at the third").exists() or run.poll() is not None)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate()
    assert run.returncode == 130
    assert re.fullmatch(r"stopped: 2 finished points are kept in .*s.journal; the same command goes on.\n", said)
