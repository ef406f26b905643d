"""A list of runs, worked off a part at a time, by processes that are killed."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from avagrad.cli import app
from avagrad.lab.folder import RESULT, RunFolder, read_metrics
from avagrad.lab.queue import main, read_queue, run_queue
from avagrad.lab.run import Callback, Run
from avagrad.lab.train import Training

LIST = """
# four tiny runs
digits --optimizer sgd --epochs 3 --threads 1 --out sgd
digits --optimizer adam --epochs 3 --threads 1 --seed 1

digits --epochs 3 --threads 1 -o model=conv  # a convolutional network
digits --optimizer avastep --epochs 3 --threads 1 --milestones 1,2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "list.txt").write_text(LIST)
    return tmp_path / "list.txt"


def outcome(folder: Path, configs: Iterable[str]) -> list[Any]:
    """Return all that the runs leave, but for times."""
    found = []
    for name in configs:
        result = RunFolder(folder / name).read_result()
        assert result is not None
        rows = read_metrics(folder / name)
        assert not (folder / name / "checkpoint.pt").exists()
        found.append([{key: value for key, value in row.items() if key != "seconds"} for row in [result, *rows]])
    return found


def start(file: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "avagrad.lab.queue", str(file), "--out", str(out), "--save-every", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def lines_of_metrics(out: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in out.glob("*/metrics.jsonl"))


@pytest.mark.slow
def test_killed_three_times_it_ends_as_undisturbed(file: Path, tmp_path: Path) -> None:
    configs = read_queue(file)
    assert len(list(run_queue(configs, tmp_path / "whole"))) == 4
    out = tmp_path / "parts"
    for kill in range(3):
        before = lines_of_metrics(out)
        process = start(file, out)
        while lines_of_metrics(out) <= before + kill and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        process.communicate()
    output, _ = start(file, out).communicate()
    assert "4 of 4 runs are finished" in output
    assert outcome(out, configs) == outcome(tmp_path / "whole", configs)
    again, _ = start(file, out).communicate()  # nothing is left to do
    assert "finished in" in again
    assert "finished\n" not in again


@pytest.mark.slow
def test_two_at_once_share_the_list(file: Path, tmp_path: Path) -> None:
    configs, out = read_queue(file), tmp_path / "shared"
    processes = [start(file, out) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    shares = [{line.split(":")[0] for line in text.splitlines() if line.endswith(": finished")} for text in outputs]
    assert set.union(*shares) == configs.keys()
    assert len(list(run_queue(configs, tmp_path / "whole"))) == 4
    assert outcome(out, configs) == outcome(tmp_path / "whole", configs)


def test_it_ends_in_time_and_continues(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands at the deadline when the second step of the third run is done."""
    configs, out, clock = read_queue(file), tmp_path / "out", time.monotonic

    class Late(Callback):
        runs = 0

        def on_start(self, *_: Any) -> None:
            self.runs += 1

        def on_step(self, done: int) -> None:
            if self.runs == 3 and done == 2:
                monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)

    assert len(list(run_queue(configs, out, minutes=30, callback=Late()))) == 2
    monkeypatch.setattr(time, "monotonic", clock)
    assert [(out / name / RESULT).exists() for name in configs] == [True, True, False, False]
    assert (out / list(configs)[2] / "checkpoint.pt").exists()
    assert len(list(run_queue(configs, out))) == 2
    assert len(list(run_queue(configs, tmp_path / "whole"))) == 4
    assert outcome(out, configs) == outcome(tmp_path / "whole", configs)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("digitz", "line 2 of {file}: task is 'digitz', which is not known; did you mean 'digits'?"),
        ("digits --optimizer adan", "line 2 of {file}: optimizer is 'adan'"),
        ("digits --lr abc", "line 2 of {file}: argument --lr: invalid float value: 'abc'"),
        ("digits --width 3", "line 2 of {file}: unrecognized arguments: --width 3"),
        ("digits 'a", "line 2 of {file}: No closing quotation"),
        ("digits --epochs 3", "line 2 of {file}: the run 'digits-avagrad-seed0-"),
    ],
)
def test_a_bad_line_is_named(line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "list.txt"
    file.write_text(f"digits --epochs 3\n{line}\n")
    assert main([str(file)]) == 2
    assert says.format(file=file) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["list.txt"]


def test_bad_options_are_rejected(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    for option, value, says in (
        ("--minutes", "0", "minutes is 0.0, but must be a number above 0."),
        ("--save-every", "-1", "save_every is -1.0, but must be a number of seconds of at least 0."),
        ("--out", str(file), f"out is {str(file)!r}, but must be another path than that of the queue's file."),
    ):
        assert main([str(file), option, value, "--dry-run"]) == 2
        assert says in capsys.readouterr().err
    assert file.read_bytes() == before


def test_what_is_left_is_listed(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "0 of 4 runs are finished" in output
    assert output.count("left: ") == 4
    assert not (tmp_path / "out").exists()
    next(run_queue(read_queue(file), tmp_path / "out"))
    assert main([str(file), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "1 of 4 runs are finished" in capsys.readouterr().out
    file.write_text(LIST.replace("sgd --epochs 3", "sgd --epochs 2"))  # now it is another run
    assert main([str(file), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "0 of 4 runs are finished" in capsys.readouterr().out


def test_a_checkpoint_that_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "queue.txt").write_text("digits --epochs 1 --out only\n")
    configs = read_queue(tmp_path / "queue.txt")
    list(run_queue(configs, tmp_path))
    checkpoint = tmp_path / "only" / "checkpoint.pt"
    checkpoint.touch()
    assert list(run_queue(configs, tmp_path)) == []
    assert not checkpoint.exists()


def test_a_run_that_fails_does_not_hold_up_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "queue.txt", tmp_path / "queue"
    file.write_text("digits -o model=none --epochs 1 --out bad\ndigits --epochs 1 --out good\n")
    assert main([str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("bad: digits: model is 'none'")
    assert "bad: failed\ngood: finished\n1 of 2 runs are finished" in captured.out
    assert "left: bad" in captured.out
    assert (out / "good" / RESULT).exists()


def test_the_command_ends_with_1_if_a_run_fails(tmp_path: Path) -> None:
    (tmp_path / "queue.txt").write_text("digits -o model=none --epochs 1 --out bad\n")
    assert CliRunner().invoke(app, ["queue", str(tmp_path / "queue.txt")]).exit_code == 1
    (tmp_path / "queue.txt").write_text("digits --epochs 1 --out good\n")
    assert CliRunner().invoke(app, ["queue", str(tmp_path / "queue.txt")]).exit_code == 0


def test_a_missing_package_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    (tmp_path / "queue.txt").write_text("digits --epochs 1 --out a\n")
    assert main([str(tmp_path / "queue.txt")]) == 1
    assert capsys.readouterr().err.startswith("a: digits: the images come with scikit-learn, which is not installed")


def test_the_model_of_a_failed_run_is_freed_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.txt").write_text("digits --epochs 1 --out a\ndigits --epochs 1 --out b\n")
    seen: list[Any] = []
    run = Training.run

    def fails_once(self: Training) -> Any:
        gc.collect()
        seen.append([one() for one in seen])
        if len(seen) == 1:
            seen[0] = weakref.ref(self.model)
            raise RuntimeError("out of memory")
        return run(self)

    monkeypatch.setattr(Training, "run", fails_once)
    assert main([str(tmp_path / "queue.txt")]) == 1
    assert seen[1] == [None]


def test_after_a_stop_it_says_how_to_resume(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = Run.save_if_due

    def stopped(self: Run) -> None:
        self._stop.signal = signal.SIGTERM
        save(self)

    monkeypatch.setattr(Run, "save_if_due", stopped)
    assert main([str(file)]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.endswith("stopped and saved; to resume, run it again\n")


def test_a_line_that_has_changed_is_not_reported_as_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "queue.txt"
    file.write_text("digits --epochs 1 --out same\n")
    assert main([str(file)]) == 0
    file.write_text("digits --epochs 1 --seed 1 --out same\n")
    result = (tmp_path / "queue" / "same" / RESULT).read_text()
    capsys.readouterr()
    assert main([str(file)]) == 1
    captured = capsys.readouterr()
    assert "seed is 0 there and 1 here" in captured.err
    assert "0 of 1 runs are finished" in captured.out
    assert (tmp_path / "queue" / "same" / RESULT).read_text() == result


@pytest.mark.parametrize("name", ["same/", "./same"])
def test_one_folder_is_one_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "queue.txt").write_text(f"digits --out same\ndigits --seed 1 --out {name}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*: the run 'same' appears twice"):
        read_queue(tmp_path / "queue.txt")


def test_a_file_without_suffix_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "queue"
    file.write_text("digits --epochs 1\n")
    assert main([str(file)]) == 2
    assert f"out is None, but must be given, since {file} has no suffix." in capsys.readouterr().err
