"""The command `avagrad`, as people type it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from short_runs import StopAt
from typer.testing import CliRunner

import avagrad
from avagrad.cli import app, main
from avagrad.lab.config import configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.methods import METHODS
from avagrad.lab.presets import PRESETS
from avagrad.lab.tasks import TASKS
from avagrad.lab.train import Stopped, train
from avagrad.tune.records import read_records

ROOT = Path(__file__).parent.parent.parent


def avagrad_command(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "avagrad", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        check=False,
    )


@pytest.mark.slow
def test_train_runs_and_continues(tmp_path: Path) -> None:
    run = ("train", "digits", "--optimizer", "avagrad", "--lr", "1", "--eps", "10", "--seed", "3", "--epochs", "2")
    done = avagrad_command(*run, "--out", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"test error [\d.]+ %, validation error [\d.]+ %", done.stdout)
    assert done.stderr == ""  # quiet where there is no terminal
    config = json.loads((tmp_path / "x" / "config.json").read_text())["config"]
    assert (config["lr"], config["eps"], config["seed"], config["epochs"]) == (1, 10, 3, 2)
    again = avagrad_command(*run, "--out", "x", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("error: out is 'x', which already contains")
    more = avagrad_command(*run, "--out", "x", "--resume", cwd=tmp_path)
    assert more.stdout == done.stdout


@pytest.mark.slow
def test_without_out_every_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        done = avagrad_command("train", "digits", "--epochs", "1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert avagrad_command("train", "chars", "--data", "nowhere", cwd=tmp_path).returncode == 2  # leaves none
    assert sorted(os.listdir(tmp_path / "runs")) == ["digits-avagrad-seed0", "digits-avagrad-seed0-2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "digitz"), "task is 'digitz', which is not known; did you mean 'digits'?"),
        (("train", "synthetic"), "`avagrad synthetic` runs it"),
        (("train", "digits", "--optimizer", "avagard"), "did you mean 'avagrad'?"),
        (("train", "digits", "--preset", "paper"), "preset is 'paper', which is not known. Choose from: quick"),
        (("train", "digits", "-o", "modle=conv"), "did you mean 'model'?"),
        (("train", "digits", "-o", "model"), "option is 'model', but must be name=value"),
        (("train", "digits", "--milestones", "a,b"), "milestones is 'a,b', but must be comma-separated epochs"),
        (
            ("train", "digits", "--epochs", "4", "--milestones", "2,4"),
            "milestones is (2, 4), but must be epochs before",
        ),
        (("train", "digits", "--resume"), "resume is given without out"),
        (("train", "chars", "--data", "nowhere"), "which does not exist"),
        (("train", "chars", "--optimizer", "adabound", "--preset", "paper"), "no source has one for adabound"),
        (("synthetic", "--methods", "adma"), "did you mean 'adam'?"),
        (("synthetic", "--w1", "2"), "w1 is 2.0, but must be a number from 0 to 1"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert says in str(result.exception)


def test_errors_end_the_process_with_code_2() -> None:
    done = avagrad_command("train", "digitz")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: task is 'digitz', which is not known; did you mean 'digits'?")


def test_unknown_commands_and_options_suggest_the_nearest() -> None:
    assert "Did you mean 'train'?" in CliRunner().invoke(app, ["trian"]).output
    assert "--optimizer" in CliRunner().invoke(app, ["train", "digits", "--optimzer", "sgd"]).output


def test_list_shows_everything() -> None:
    done = avagrad_command("list")
    assert done.returncode == 0, done.stderr
    for name in (*TASKS, *METHODS, *(preset for protocols in PRESETS.values() for preset in protocols)):
        assert name in done.stdout
    for number in ("3.64 (0.06)", "18.76 (0.20)", "23.45", "1.175"):
        assert number in done.stdout
    assert len(done.stdout.splitlines()) <= 40  # a screen


def test_list_shows_all_of_a_task() -> None:
    done = avagrad_command("list", "chars")
    assert done.returncode == 0, done.stderr
    for part in ("bits per character", "hidden=128", "lr=200.0, eps=1e-08", "ours", "paper", "awd", *PRESETS["chars"]):
        assert part in done.stdout
    wrong = avagrad_command("list", "char")
    assert wrong.returncode == 2
    assert "task is 'char', which is not known; did you mean 'chars'?" in wrong.stderr


@pytest.mark.slow
def test_resume_continues_with_a_training_and_an_ensemble(tmp_path: Path) -> None:
    """With the folder alone, to the same numbers, also where it was written before a setting was there."""
    config = configure("digits", "adam", epochs=3, threads=1)
    points = [(0.001, 1e-8, 0), (0.01, 1e-3, 0), (0.01, 1e-3, 1)]
    whole = train(config, tmp_path / "whole")
    records = train_ensemble(config, points, tmp_path / "whole-map")
    with pytest.raises(Stopped):
        train(config, tmp_path / "run", callback=StopAt(20))
    with pytest.raises(Stopped):
        train_ensemble(config, points, tmp_path / "map", callback=StopAt(20))
    for folder in ("run", "map"):
        path = tmp_path / folder / "config.json"
        written = json.loads(path.read_text())
        for name in ("schedule", "warmup"):
            del written["config"][name]
        path.write_text(json.dumps(written))
        done = avagrad_command("resume", folder, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {**result, "seconds": 0} == {**whole, "seconds": 0}
    found = read_records(tmp_path / "map" / "records.jsonl")
    assert [(x.point, x.value, x.facts) for x in found] == [(x.point, x.value, x.facts) for x in records]


def test_resume_names_what_is_no_run(tmp_path: Path) -> None:
    done = avagrad_command("resume", str(tmp_path))
    assert done.returncode == 2
    assert f"'{tmp_path}' has no config.json, so there is no run in it to resume." in done.stderr
    (tmp_path / "config.json").write_text('{"config": {"task": "synthetic"}}')
    assert "is not from a training or an ensemble" in avagrad_command("resume", str(tmp_path)).stderr


def test_help_reads_well() -> None:
    for arguments in ((), ("train",), ("synthetic",), ("list",)):
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output
    assert avagrad.__version__ in CliRunner().invoke(app, ["--version"]).output


def test_synthetic_shows_figure_1_and_writes_its_curves(tmp_path: Path) -> None:
    """Small here; the numbers of the whole figure are tested with the task itself."""
    small = ("synthetic", "--steps", "300", "--replicas", "4", "--lr", "1e-3", "--methods", "delayed-adam,sgd")
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path / "x")])
    assert result.exit_code == 0, result.output
    assert "From w = 0.5" in result.output
    assert "From w = 0," in result.output
    rows = [json.loads(line) for line in (tmp_path / "x" / "curves.jsonl").read_text().splitlines()]
    assert {(row["w1"], row["method"]) for row in rows} == {(w, m) for w in (0.5, 0.0) for m in ("delayed-adam", "sgd")}
    last = json.loads((tmp_path / "x" / "result.json").read_text())["last"]
    assert all(row["step"] == 300 for row in last)
    again = CliRunner().invoke(app, [*small, "--out", str(tmp_path / "x")])
    assert "already contains" in str(again.exception)


def test_without_typer_the_command_says_what_to_install() -> None:
    script = (
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'typer' else find(name, *rest)\n"
        "from avagrad.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs typer: pip install '.[lab]' in avagrad's folder" in done.stderr


def test_a_report_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "avagrad.report.page", None)  # importing it raises ModuleNotFoundError
    with pytest.raises(SystemExit):
        main(["report", "."])
    message = (
        "error: a report needs avagrad.report.page, which is not installed: pip install '.[lab]' in avagrad's folder.\n"
    )
    assert capsys.readouterr().err == message
