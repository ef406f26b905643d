"""What is found in a folder, and that nothing in it can stop the reading."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from avagrad.files import thinned_lines
from avagrad.lab.config import configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.sweep import sweep
from avagrad.lab.train import train
from avagrad.report.comparable import comparable_sweeps
from avagrad.report.reading import Run, collect, method_title
from avagrad.tune import tune
from avagrad.tune.space import axis


def test_a_run_an_ensemble_and_a_sweep_are_found_once_each(tmp_path: Path) -> None:
    train(configure("digits", "sgd", epochs=1, seed=3), tmp_path / "one")
    options = {"active_only": True, "norm": 1}
    config = configure("digits", "avagrad", epochs=1, optimizer_options=options)
    train_ensemble(config, [(0.1, 0.1, 0), (1.0, 0.1, 0)], tmp_path / "map")
    adam = configure("digits", "adam", epochs=1)
    sweep(adam, lr=axis("0.1,1", "lr"), eps=axis("0.1", "eps"), folder=tmp_path / "search", extend=False)
    before = (tmp_path / "search" / "study.journal").read_bytes()
    found = collect(tmp_path)
    assert found.problems == ()
    assert [(run.place, run.title, run.seed, run.status) for run in found.runs] == [("one", "SGD", 3, "finished")]
    assert found.runs[0].test is not None
    assert len(found.runs[0].rows) == 1
    assert [(each.place, each.title, len(each.records)) for each in found.sweeps] == [
        ("map", "AvaGrad, active_only, norm=1", 2),
        ("search/study.journal", "Adam", 2),
    ]
    assert {each.measure for each in found.sweeps} == {"validation error, %"}
    (_, group), *others = comparable_sweeps(found.sweeps)
    assert (len(group), others) == (2, []), "an ensemble and a study of the same task can be compared"
    assert (tmp_path / "search" / "study.journal").read_bytes() == before, "reading writes nothing"


def test_a_file_that_cannot_be_read_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "x.journal").write_text('{"no": "journal"}\n')
    (problem,) = collect(tmp_path).problems
    assert str(problem).startswith("x.journal: it cannot be read (storage is 'x.journal', which is not")


def test_a_study_hides_no_runs_of_others(tmp_path: Path) -> None:
    """`avagrad train` writes to ``runs``, too."""
    train(configure("digits", "sgd", epochs=1), tmp_path / "runs" / "x")
    tune(lambda trial: trial.lr or 0.0, lr=[1, 2], name="mine", storage=tmp_path / "mine.journal", extend=False)
    found = collect(tmp_path)
    assert ([run.place for run in found.runs], len(found.sweeps)) == (["runs/x"], 1)


def test_what_cannot_be_read_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    good = {"config": {"task": "digits", "optimizer": "sgd", "lr": 0.1}, "about": {}}
    files = {
        "good/config.json": json.dumps(good),
        "good/metrics.jsonl": '{"step": 1, "loss": 2}\nnonsense\n[1]\n{"step": 2, "lo',
        "good/result.json": '{"status": "fini',
        "torn/config.json": '{"config": {"task"',
        "list/config.json": "[1, 2]",
        "other/config.json": '{"name": "somebody else\'s"}',
        "ensemble/config.json": json.dumps({"config": {"task": "digits", "points": []}, "about": {}}),
        "toy/config.json": json.dumps({"config": {"task": "synthetic"}, "about": {}}),
        "records.jsonl": '{"lr": 1, "eps": 1, "value": 3}\n{"lr": 1, "eps": 1, "value": 4}\n{"lr": -1, "value": 3}\n',
        "broken.journal": "this is no journal\n",
        "empty.journal": "",
        "torn.json": "{",
        "unrelated.json": "[]",
        "report-files/x.jsonl": "never read",
        ".hidden/x.jsonl": "never read",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\x00\xfe\n")
    found = collect(tmp_path)
    assert [(run.place, run.status, len(run.rows)) for run in found.runs] == [("good", "unfinished", 1)]
    assert [(each.place, len(each.records)) for each in found.sweeps] == [("records.jsonl", 1)]
    places = [problem.place for problem in found.problems]
    assert sorted(set(places)) == sorted([
        "good/metrics.jsonl", "good/result.json", "torn/config.json", "list/config.json", "other/config.json",
        "ensemble", "toy", "records.jsonl", "broken.journal", "empty.journal", "torn.json", "binary.jsonl",
    ])  # fmt: skip
    why = {problem.place: problem.why for problem in found.problems}
    assert (
        why["good/metrics.jsonl"] == "line 2; line 3; line 4, the last, which is half-written: not an object in JSON."
    )
    assert places.count("records.jsonl") == 2


def test_a_million_lines_are_thinned(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"task": "digits"}, "about": {}}))
    row = '{"step": %d, "epoch": %d, "loss": 0.5, "error": 3.25, "lr": 0.1, "gamma": 1.5, "seconds": 12.5}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(row % (i, i) for i in range(1, 1_000_001)))
    run = collect(tmp_path).runs[0]
    assert 1000 <= len(run.rows) <= 2002
    steps = [each["step"] for each in run.rows]
    assert steps[0] == 1
    assert steps[-1] == 1_000_000
    assert {b - a for a, b in itertools.pairwise(steps[:-1])} == {run.every}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 11, 100])
def test_thinning_keeps_the_first_and_the_last(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a"
    path.write_text("".join(f"{i}\n" for i in range(count)))
    lines, every = thinned_lines(path, most=10)
    numbers = [number for number, _ in lines]
    assert numbers == sorted({*range(1, count + 1, every), count} - {0})
    assert len(lines) <= 12
    assert every == 1 or count > 10


def test_an_odd_config_still_has_a_title() -> None:
    assert method_title({"optimizer": None}) == ""
    assert method_title({"optimizer": ["x"], "optimizer_options": 3}) == "['x']"
    with pytest.raises(ValueError, match=r"does not exist, but must be a folder or a \.journal or \.jsonl file"):
        collect("/nowhere/at/all")


def test_one_bad_file_never_takes_the_page_away(tmp_path: Path) -> None:
    good = {"config": {"task": "digits", "optimizer": "sgd", "lr": 0.1}, "about": {}}
    for name in ("good", "huge", "deep", "dangling", "zero", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(good))
    (tmp_path / "huge" / "result.json").write_text('{"status": "finished", "test": {"error": 1' + 400 * "0" + "}}")
    (tmp_path / "deep" / "metrics.jsonl").write_text(5000 * "[" + 5000 * "]" + '\n{"epoch": 1, "loss": 2}\n')
    (tmp_path / "dangling" / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "zero" / "result.json").symlink_to("/dev/zero")
    (tmp_path / "folder" / "metrics.jsonl").mkdir()
    for name in ("pipe.jsonl", "pipe.json", "pipe.journal"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "numbers.json").write_text('{"rows": [{"parameters": 1' + 5000 * "0" + "}]}")
    (tmp_path / "mine.jsonl").write_text('{"lr": 0.1, "eps": 1, "value": 3}\n')
    # In a process of its own: where a pipe or /dev/zero is read, it never ends.
    script = (
        f"from avagrad.report.page import write_report; print(*write_report({str(tmp_path)!r}).problems, sep='\\n')"
    )
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); {script}"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    named = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert named == {
        "deep/metrics.jsonl", "dangling/metrics.jsonl", "zero/result.json", "numbers.json",
        "pipe.jsonl", "pipe.json", "pipe.journal", "zero.json",
    }  # fmt: skip
    page = (tmp_path / "report.html").read_text()
    assert "mine" in page
    assert "SGD" in page


def test_an_error_that_is_no_float_is_none() -> None:
    result = {"status": "finished", "test": {"error": 10**400}, "validation": {"error": 2}}
    run = Run("a", {}, {}, (), 1, result)
    assert (run.test, run.validation) == (None, 2.0)
