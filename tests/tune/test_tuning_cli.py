"""The commands tune, sweep and study, as people type them; and the example."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from waiting import until

from avagrad.cli import main
from avagrad.tune import Trial, tune
from avagrad.tune.records import Record
from avagrad.tune.space import Point
from avagrad.tune.study import Study

ROOT = Path(__file__).parent.parent.parent
OBJECTIVE = """
import math, sys

def objective(trial):
    trial.note(square=trial.lr**2)
    return abs(math.log10(trial.lr)) + abs(math.log10(trial.eps) + 2)

def wrong(trial):
    return None

def leaves(trial):
    sys.exit(0)
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
    assert all(re.search(r": \d+ of \d+ done", line) for line in done.stderr.splitlines()), done.stderr  # progress
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    (tmp_path / "raising.py").write_text("import json\n\nopen('nowhere.csv')\n")
    (tmp_path / "ending.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "unparsable.py").write_text("def objective(trial)\n")
    return tmp_path


SEARCH = ("tune", "mine:objective", "--lr", "1e-3:1e3:7", "--eps", "1e-4:1:5", "--storage", "a/mine.journal")


@pytest.mark.slow
def test_an_objective_in_a_module_here(project: Path) -> None:
    printed = avagrad(*SEARCH, "--workers", "2", cwd=project)
    assert printed.startswith("Best: lr 1, eps 0.01, with 0, after 10 trials. No neighbour of lr 1, eps 0.01 along")
    again = avagrad(*SEARCH, cwd=project)
    assert again == printed.replace("after 10 trials.", "after 10 trials (10 from earlier runs).")
    whole = avagrad(*SEARCH, "--method", "grid", cwd=project)
    assert "after 35 trials (10 from earlier runs)." in whole
    assert "The best lr does not move over eps" in whole
    shown = avagrad("study", "show", "a/mine.journal", cwd=project)
    assert shown.startswith('mine:objective, to minimize; {"format": 1, "objective": "objective"}\n35 finished (0 div')


def test_without_a_terminal_every_stage_has_a_line(project: Path) -> None:
    done = command("-m", "avagrad", *SEARCH, cwd=project)
    stages = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert [stage for stage in stages if stage.startswith("line over")][:2] == [
        "line over lr at eps 0.1",
        "line over eps at lr 1",
    ]


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
    assert "file is 'a/mine.journal', which is not a file of records: choose another one." in done.stderr
    assert journal.read_bytes() == before
    done = command("-m", "avagrad", "study", "export", "a/mine.journal", "/dev/stdout", cwd=project)  # a pipe here
    assert done.returncode == 2
    assert "file is '/dev/stdout', but must be a regular file, or a new one." in done.stderr
    for _ in range(2):  # records may be replaced
        avagrad("study", "export", "a/mine.journal", "out.jsonl", cwd=project)


def said_of(*typed: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command here; return the lines that it prints."""
    with pytest.raises(SystemExit) as end:
        main(typed)
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    return captured.out.splitlines()


def bowl(trial: Trial) -> float:
    return abs(math.log10(trial.lr or 1)) + abs(math.log10(trial.eps or 1) + 2)


@pytest.mark.parametrize("storage", ["s.journal", "sqlite:///s.db"])
def test_a_study_of_several_grids_shows_and_exports_them_all(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is gone on with on other axes, then with two more eps, and then over lr alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def search(lr: str, eps: str | None) -> list[str]:
        tune(bowl, lr=lr, eps=eps, method="grid", storage=storage, watcher=lambda progress: None)
        return said_of("study", "show", storage, capsys=capsys)

    search("1e-4:1e-1:4", "1e-4:1:5")
    shown = search("1e-3:1:4", "1e-4:1:5")
    assert shown[1] == "25 finished (0 diverged), 0 running, 0 waiting"
    assert shown[2] == "0            lr 1, eps 0.01"
    assert shown[7:] == [
        "",
        "5 lr x 5 eps",
        "lr \\ eps  0.0001  0.001  0.01  0.1  1",
        "  0.0001       6      5     4    5  6",
        "   0.001       5      4     3    4  5",
        "    0.01       4      3     2    3  4",
        "     0.1       3      2     1    2  3",
        "       1       2      1     0    1  2",
        shown[-1],
    ]
    assert shown[-1].startswith("The best lr is 1 over eps from 0.0001 to 1 (slope 0.00; 0.00 at large eps). At 5 of 5")
    shown = search("1e-3:1:4", "3e-3,3e-2")
    assert shown[8] == "5 lr x 7 eps, 33 of 35 cells; - was not run"
    assert shown[10] == "  0.0001       6      5      -     4      -    5  6"
    assert shown[-1].startswith("4 lr x 7 eps of these are complete. The best lr is 1 over eps from 0.0001")
    shown = search("0.1,10", None)
    assert shown[1] == "35 finished (0 diverged), 0 running, 0 waiting"
    assert shown[2] == "0            lr 1, eps 0.01"
    assert shown[-5:] == ["", "2 lr", " lr  value", "0.1      3", " 10      3"]
    assert "35 records" in said_of("study", "export", storage, "out.jsonl", capsys=capsys)[0]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({(line["lr"], line.get("eps")) for line in lines}) == len(lines) == 35
    assert "35 of 35 records are new" in said_of("study", "import", "out.jsonl", capsys=capsys)[0]
    assert said_of("study", "show", "out.journal", capsys=capsys)[1:] == shown[1:]


def test_as_many_cells_as_a_grid_has_need_not_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = str(tmp_path / "s.journal")
    with closing(Study(storage, "s", direction="minimize")) as study:
        study.add([Record(lr, eps, value=lr) for lr, eps in ((0.1, None), (1, None), (0.1, 0.1), (1, 1))])
    shown = said_of("study", "show", storage, capsys=capsys)
    assert shown[-8:-4] == ["2 lr", " lr  value", "0.1    0.1", "  1      1"]
    assert shown[-4:] == ["", "2 single cells", "0.1  lr 0.1, eps 0.1", "1    lr 1, eps 1"]


def test_the_best_points_say_what_they_are_the_mean_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One grid was run with one seed, another one with two, and a pruner."""
    storage = str(tmp_path / "s.journal")
    with closing(Study(storage, "s", direction="minimize")) as study:
        study.add([Record(1, 0.1, seed=seed, value=3 + seed) for seed in (0, 1)])
        study.add([Record(2, 0.1, value=3), Record(4, 0.1, value=1, pruned=True), Record(8, 0.1, value=math.inf)])
    shown = said_of("study", "show", storage, capsys=capsys)
    assert shown[2:6] == [
        "3            lr 2, eps 0.1 (1 seed)",
        "3.5          lr 1, eps 0.1 (2 seeds)",
        "1            lr 4, eps 0.1 (1 seed, pruned)",
        "diverged     lr 8, eps 0.1 (1 seed)",
    ]
    assert shown[7] == "4 lr x 1 eps; inf diverged; * was pruned; means over 1 to 2 seeds"


def test_zero_has_no_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = str(tmp_path / "s.journal")
    with closing(Study(storage, "s", direction="maximize")) as study:
        study.add([Record(1, 0.1, value=0.0), Record(2, 0.1, value=-1.0)])
    shown = said_of("study", "show", storage, capsys=capsys)
    assert shown[2] == "0            lr 1, eps 0.1"
    assert "-0" not in " ".join(" ".join(shown).split())


def test_a_point_that_was_queued_twice_has_not_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two searches want it at the same time; the second trial of it is ended, and the first one is under way."""
    storage = str(tmp_path / "s.journal")
    with closing(Study(storage, "s", direction="minimize")) as study:
        empty = study.snapshot()
        for _ in range(2):
            study.queue([Point(0.1, None, 0)], empty)
        study.withdraw()
    shown = said_of("study", "show", storage, capsys=capsys)
    assert shown[1:] == ["0 finished (0 diverged), 0 running, 1 waiting"]


def test_a_failure_stays_when_the_next_search_is_on_another_grid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = str(tmp_path / "s.journal")
    with closing(Study(storage, "s", direction="minimize")) as study:
        study.queue([Point(0.1, None, 0)])
        held = study.take("me")
        assert held is not None
        held.fail("ValueError: no")
        study.queue([Point(0.1, None, 0), Point(1, None, 0)])  # once more, and one that was never tried
        study.withdraw(set())
    shown = said_of("study", "show", storage, capsys=capsys)
    assert shown[1:] == ["0 finished (0 diverged), 0 running, 0 waiting", "failed: lr=0.1 seed=0: ValueError: no"]


def test_a_dry_run_runs_nothing(project: Path) -> None:
    printed = avagrad(*SEARCH, "--dry-run", "--seeds", "2", cwd=project)
    unless = "if no neighbour is better, no axis is extended and no coarse line fails"
    assert printed.endswith(f"at most 22 trials {unless}, of 70; first the line over lr at eps 0.1\n")
    printed = avagrad("sweep", "digits", "--method", "grid", "--dry-run", cwd=project)
    assert "grid: at most 441 trials" in printed
    assert not (project / "a").exists()
    assert not (project / "runs").exists()


WRONG = {
    "tune mine": "objective is 'mine', but must be module:function",
    "tune mine.py:objective": "objective is 'mine.py:objective', but must be module:function",
    "tune nowhere:objective --lr 1,2": "there is no module 'nowhere'",
    "tune ../mine:objective --lr 1,2": "a module is not a path: from its folder, write package.module:function",
    "tune sub/mine:objective --lr 1,2": "a module is not a path",
    "tune raising:objective --lr 1,2": "'raising' cannot be imported: FileNotFoundError: [Errno 2] No such file or "
    "directory: 'nowhere.csv' ({project}/raising.py:3).",
    "tune unparsable:objective --lr 1,2": "(unparsable.py, line 1) ({project}/unparsable.py:1).",
    "tune ending:objective --lr 1,2": "'ending' cannot be imported: it ends the process (SystemExit: 0) "
    "({project}/ending.py:3).",
    "tune mine:leaves --lr 1,2": "objective raised SystemExit: 0 ({project}/mine.py:12): at lr=1 seed=0, 3 of 3 times",
    "tune mine:nothing --lr 1,2": "'mine' has no 'nothing'",
    "tune mine:objective": "lr and eps are not given, but at least one of them must be an axis",
    "tune mine:objective --lr 3:1:5": "must have its low end",
    "tune mine:objective --lr -1,2": "lr has the value -1.0, but a value must be finite and above 0",
    "tune mine:objective --lr 1,2 --method best": "method is 'best', but must be one of lines, separable, grid",
    "tune mine:objective --lr 1,2 --direction up": "direction is 'up', but must be one of minimize, maximize",
    "tune mine:objective --lr 1,2 --direction up --dry-run": "direction is 'up', but must be one of minimize, maximize",
    "tune mine:objective --lr 1,2 --seeds -2 --dry-run": "seeds is -2, but must be a whole number of at least 1",
    "tune mine:objective --lr 1,2 --pruner foo --dry-run": "pruner is 'foo'",
    "tune mine:math --lr 1,2 --dry-run": "objective is 'mine:math', but must be a function of a trial, not <module",
    "tune mine:objective --lr 1,2 --timeout 3 --dry-run": "timeout is 3.0, but a process cannot kill itself",
    "tune mine:objective --lr 1,2 --storage sqlite:///z.db --workers 2 --dry-run": "but SQLite lets two workers take",
    "sweep digits --lr 1,2 --timeout 3 --dry-run": "timeout is 3.0, but a process cannot kill itself",
    "sweep digits --lr 1,2 --engine ensemble --workers 2 --dry-run": "engine is 'ensemble' with workers",
    "sweep digits --lr 1,2 --engine gpu --dry-run": "engine is 'gpu', but must be one of runs, ensemble",
    "sweep digits --optimizer sgd --lr 1,2 --eps 1,2 --dry-run": "but sgd has no eps",
    "sweep digits --lr 1,2 --margin -1 --dry-run": "margin is -1.0, but must be a finite number of at least 0",
    "tune mine:wrong --lr 1": "objective returned None, but must be a number",
    "tune mine:wrong --lr 1,2": "objective returned None, but must be a number",
    "sweep digitz": "digitz",
    "sweep digits --optimizer sgd --eps 1,2": "but sgd has no eps",
    "sweep digits --lr 1,2 -o full=true": "full is True, but must be False in a search",
    "study show nowhere.journal": "storage is 'nowhere.journal', which is missing",
    "study import nowhere.jsonl": "nowhere.jsonl",
    "study export nowhere.journal nowhere/x.jsonl": "file is 'nowhere/x.jsonl', but must be in a folder that exists",
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
    assert WRONG[typed].replace("{project}", str(project)) in last


@pytest.mark.slow
def test_a_sweep_of_a_task(tmp_path: Path) -> None:
    typed = ("sweep", "digits", "--optimizer", "sgd", "--lr", "0.01,0.1,1e30", "--epochs", "2", "--out", "s")
    printed = avagrad(*typed, "--workers", "2", cwd=tmp_path)
    assert re.match(r"Best: lr 0.1, with [\d.]+, after 3 trials.", printed)
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
    found = re.match(r"Best: lr ([\d.]+), eps ([\de.-]+), with ([\de.-]+), after (\d+) trials", done.stdout)
    assert found
    assert float(found[3]) < 0.01
    assert int(found[4]) <= 21


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_and_it_says_how_to_resume(project: Path, number: int, code: int) -> None:
    (project / "slow.py").write_text(SLOW)
    typed = [sys.executable, "-m", "avagrad", "tune", "slow:objective", "--lr", "1,2,3,4", "--storage", "s.journal"]
    typed += ["--method", "separable"]
    run = subprocess.Popen(typed, cwd=project, stderr=subprocess.PIPE, text=True)
    until(lambda: (project / "at the third").exists() or run.poll() is not None)
    run.send_signal(number)
    _, output = run.communicate()
    assert run.returncode == code
    progress, last = output.splitlines()
    assert re.fullmatch(r"line over lr: 0 of 4 done", progress)
    assert re.fullmatch(r"stopped: 2 finished points are kept in .*s.journal; run it again to resume.", last)
