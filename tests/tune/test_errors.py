"""What goes wrong while tuning: each has its sentence, and nothing that is finished is lost."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import optuna
import pytest
import torch
from objectives import Bad, Gated, bowl, lr_only, raises
from optuna.storages.journal import _file as journals
from servers import postgres
from waiting import Clock, StoppedClock, is_alive, until

from avagrad import worker_process
from avagrad.stopping import Stopped
from avagrad.tune import Diverged, Trial, tune
from avagrad.tune import storage as storages
from avagrad.tune.leases import LEASE, renew_after
from avagrad.tune.loop import TuningError
from avagrad.tune.records import Record, read_records
from avagrad.tune.result import Progress
from avagrad.tune.space import Point
from avagrad.tune.storage import StorageError, described, open_storage
from avagrad.tune.study import Study
from avagrad.tune.trial import evaluate
from avagrad.tune.workers import base
from avagrad.tune.workers.base import WorkerError

# --- what is asked for ---


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"lr": []}, "lr is [], but must have at least one value."),
        ({"lr": None}, "lr and eps are not given, but at least one of them must be an axis, or optimizer a name."),
        ({"lr": [-1, 2]}, "lr has the value -1.0, but a value must be finite and above 0."),
        ({"lr": None, "optimizer": int}, "optimizer is <class 'int'>, but must be a name, such as 'avastep'."),
        ({"eps": [1, 2], "optimizer": 3}, "optimizer is 3, but must be a name, such as 'avastep'."),
        ({"lr": [2, 1]}, "lr has 1 after 2, but its values must ascend."),
        ({"lr": "1e3:1e-3:7"}, "lr is '1e3:1e-3:7', but must have its low end, 1000, below its high end."),
        ({"start_eps": 0.1}, "start_eps is 0.1, but must be None without an eps axis."),
        ({"method": "bayes"}, "method is 'bayes', but must be one of lines, separable, grid."),
        ({"method": ["lines"]}, "method is ['lines'], but must be one of lines, separable, grid."),
        ({"direction": "up"}, "direction is 'up', but must be one of minimize, maximize."),
        ({"pruner": "meidan"}, "pruner is 'meidan', but must be one of median, halving, or None."),
        ({"workers": -1}, "workers is -1, but must be a whole number of at least 0."),
        ({"workers": 1.5}, "workers is 1.5, but must be a whole number of at least 0."),
        ({"retries": None}, "retries is None, but must be a whole number of at least 0."),
        ({"slots_per_gpu": 0}, "slots_per_gpu is 0, but must be a whole number of at least 1."),
        ({"slots_per_gpu": "2"}, "slots_per_gpu is '2', but must be a whole number of at least 1."),
        ({"timeout": 0, "workers": 1}, "timeout is 0, but must be a number of seconds above 0."),
        ({"timeout": "1h", "workers": 1}, "timeout is '1h', but must be a number of seconds above 0."),
        ({"timeout": 5}, "timeout is 5, but a process cannot kill itself: it needs at least one worker."),
        ({"lease": None}, "lease is None, but must be a number of seconds above 0."),
        ({"margin": float("nan")}, "margin is nan, but must be a finite number of at least 0."),
        ({"margin": "0"}, "margin is '0', but must be a finite number of at least 0."),
        ({"seeds": 0}, "seeds is 0, but must be a whole number of at least 1, or a list of seeds."),
        ({"seeds": [1, 1]}, "seeds is [1, 1], but must be different whole numbers."),
        ({"seeds": [True]}, "seeds is [True], but must be different whole numbers."),
        ({"seeds": [[1]]}, "seeds is [[1]], but must be different whole numbers."),
        ({"seeds": [0, 1.5]}, "seeds is [0, 1.5], but must be different whole numbers."),
        ({"seeds": numpy.array([1, 1])}, "seeds is array([1, 1]), but must be different whole numbers."),
        ({"seeds": numpy.float64(2)}, "but must be a whole number of at least 1, or a list of seeds."),
        ({"seeds": True}, "seeds is True, but must be a whole number of at least 1, or a list of seeds."),
        ({"seeds": "12"}, "seeds is '12', but must be a whole number of at least 1, or a list of seeds."),
        ({"extend": "no"}, "extend is 'no', but must be True or False."),
        ({"extend": numpy.bool_(False)}, "extend is np.False_, but must be True or False."),
        ({"name": ""}, "name is '', but must be a text that is not empty."),
        ({"name": 3}, "name is 3, but must be a text that is not empty."),
        ({"ray": 3}, "ray is 3, but must be the address of a cluster, such as 'auto'."),
        ({"together": 3}, "together is 3, but must be a function of a list of points."),
        ({"watcher": 3}, "watcher is 3, but must be a function of the progress."),
        ({"lr": [1e-320, 1]}, "lr has the value 1e-320, but a value must be from 1e-300 to 1e+300."),
        ({"lr": "1,1e305"}, "lr has the value 1e+305, but a value must be from 1e-300 to 1e+300."),
        ({"about": [1]}, "about is [1], but must be a dict of settings."),
        ({"about": "x"}, "about is 'x', but must be a dict of settings."),
        ({"about": {"a": math.nan}}, "about is {'a': nan}, but must be without NaN, which is not equal to itself."),
        ({"about": {"a": {1, 2}}}, "about is {'a': {1, 2}}, which is not JSON serializable"),
        ({"storage": 5}, "storage is 5, but must be a file, or a database URL."),
        ({"storage": "sqlite:///a.db", "workers": 2}, "but SQLite lets two workers take the same point"),
    ],
)
def test_arguments(wrong: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError)) as error:
        tune(lr_only, **{"lr": [1, 2], "storage": "a.journal", **wrong})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())  # nothing was made


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    number, storage = numpy.float32(30), tmp_path / "a.journal"
    result = tune(lr_only, lr=[1, 2, 3], storage=storage, lease=number, margin=numpy.float32(0.5))  # type: ignore[arg-type]
    assert result.best is not None
    several = (2, numpy.int64(2), numpy.arange(2), [numpy.int32(0), 1], torch.arange(2))
    found = [tune(lr_only, lr=[1, 2], method="grid", storage=storage, seeds=seeds) for seeds in several]  # type: ignore[arg-type]
    assert [len(result.trials) for result in found] == [4] * 5


def test_settings_may_be_infinite(tmp_path: Path) -> None:
    about = {"clip": math.inf, "note": "NaN"}
    for _ in range(2):
        assert tune(lr_only, lr=[1, 2], storage=tmp_path / "a.journal", about=about).best is not None


def test_an_objective_that_is_none_or_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="objective is 3, but must be a function of a trial"):
        tune(3, method="separable", lr=[1], storage=tmp_path / "a.journal")  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"which cannot be sent to a worker process .*TypeError: cannot pickle"):
        tune(lambda trial: 1.0 if lock else 0.0, method="separable", lr=[1], storage=tmp_path / "a.journal", workers=1)
    assert not list(tmp_path.iterdir())
    result = tune(
        lambda trial: 1.0 if lock else 0.0, method="separable", lr=[1], storage=tmp_path / "a.journal"
    )  # here it can be used
    assert result.best is not None


# --- what an objective does ---


@pytest.mark.slow
def test_everything_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, and an objective that raises, returns nonsense, dies, hangs, ends its process: one for each lr."""
    clock, hangs = StoppedClock(), False
    monkeypatch.setattr(base, "time", clock)

    def pass_the_time(progress: Progress) -> None:
        """Let the timeout pass once the point that hangs, which was so before this was seen, is alone under way."""
        nonlocal hangs
        if hangs and progress.running == 1:
            clock.now = 1007.0
        hangs = len(list(tmp_path.glob("*.pid"))) == 2

    result = tune(
        Bad(tmp_path), lr=range(1, 12), storage=tmp_path / "a.journal", workers=2, retries=0, timeout=6, method="grid",
        watcher=pass_the_time,
    )  # fmt: skip
    printed = capfd.readouterr()
    assert printed.out.count("much") >= 100_000
    assert {record.lr: record.value for record in result.trials} == {1: 1.0, 2: 2.0, 6: float("inf"), 7: float("inf")}
    assert {record.lr: record.diverged_at for record in result.trials if record.diverged} == {6: None, 7: 12}
    why = {Point.from_key(key).lr: reason for key, reason in result.failed.items()}
    assert set(why) == {3, 4, 5, 8, 9, 10, 11}
    assert why[3].startswith("objective raised ValueError: no good at 3.0 (")
    assert "objectives.py:" in why[3]
    assert why[4] == "objective returned None, but must be a number"
    assert why[5] == "objective returned [1.0, 2.0], but must be a number"
    # The latter if another look at it came first.
    assert why[8] in ("its worker died (killed by SIGSEGV)", "its worker showed no sign of life")
    assert why[9] == "objective took longer than the timeout of 6 s, and was killed"
    assert "step is 1.5, but must be a whole number from 0 to 2147483647." in why[10]
    assert "which is not JSON serializable" in why[11]
    assert "ValueError: no good" in printed.err
    deaths = Study(tmp_path / "a.journal", "objectives:Bad", create=False).snapshot().failures["lr=8 seed=0"]
    assert deaths[0] in ("its worker died (exit code 3)", "its worker showed no sign of life")
    assert deaths[1].startswith("its worker died: objective raised KeyboardInterrupt (")
    assert len(deaths) == 4  # and no further one
    left = [int(mark.stem) for mark in tmp_path.glob("*.pid")]
    assert len(left) == 2
    assert not any(map(is_alive, left))  # the one that was killed for its time, and its child


def test_an_objective_that_never_works_is_given_up_soon(tmp_path: Path) -> None:
    calls: list[str] = []

    def objective(trial: Trial) -> float:
        calls.append(trial.key)
        return raises(trial)

    with pytest.raises(TuningError) as error:
        tune(objective, method="separable", lr=range(1, 22), storage=tmp_path / "a.journal")
    assert str(error.value).startswith("objective raised ZeroDivisionError: of course (")
    assert "at lr=1 seed=0, 3 of 3 times, and no point has given a result yet; 0 finished points are kept" in str(
        error.value
    )
    assert calls == ["lr=1 seed=0"] * 3
    # It is mended, and goes on.
    assert len(
        tune(
            lr_only,
            method="separable",
            lr=range(1, 22),
            storage=tmp_path / "a.journal",
            name=name_in(tmp_path),
            about={},
        ).trials
    )


def name_in(folder: Path) -> str:
    (study,) = open_storage(folder / "a.journal").get_all_studies()
    return study.study_name


def test_one_bad_point_does_not_end_a_search_whose_others_are_under_way(tmp_path: Path) -> None:
    """It fails at once, again and again, before any other has had the time to give a result."""
    study = Study(tmp_path / "a.journal", "a", direction="minimize")
    study.queue([Point(1.0, None, 0)])
    other = study.take("another process")
    assert other is not None
    seen: list[Progress] = []

    def watcher(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 8:
            other.finish(1.0)

    def objective(trial: Trial) -> float:
        return raises(trial)

    # The other one's lease is not renewed here, and does not run out.
    result = tune(
        objective,
        method="separable",
        lr=[1, 2],
        storage=tmp_path / "a.journal",
        name="a",
        about={},
        watcher=watcher,
        lease=1e9,
    )
    assert result.best is not None
    assert list(result.failed) == ["lr=2 seed=0"]


@pytest.mark.parametrize("step", [-1, 1.5, "1", 2**31, None])
def test_steps(step: Any, tmp_path: Path) -> None:
    """A wrong one must not get into the study, where it would make every record unreadable."""
    study = Study(tmp_path / "a.journal", "a", direction="minimize")

    def reports(trial: Trial) -> float:
        trial.report(step, 1.0)
        return 1.0

    def diverges(trial: Trial) -> float:
        raise Diverged(step)

    for objective in (reports, diverges):
        study.queue([Point(1.0, None, 0)])
        held = study.take("me")
        assert held is not None
        assert evaluate(objective, held) == (step is None and objective is diverges)
    failures = study.snapshot().failures["lr=1 seed=0"]
    assert all(f"step is {step!r}, but must be a whole number from 0 to 2147483647." in reason for reason in failures)


class Broken:
    """As a tensor of a GPU on which something has failed before."""

    def __repr__(self) -> str:
        raise RuntimeError("illegal memory access")

    def __float__(self) -> float:
        raise RuntimeError("illegal\nmemory access")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "objective returned None, but must be a number"),
        ("1", "objective returned '1', but must be a number"),
        (1j, "objective returned 1j, but must be a number"),
        (10**400, "objective returned a int, but must be a number (OverflowError: int too large to convert to float)"),
        (10**5000, "objective returned a int, but must be a number (OverflowError: int too large to convert to float)"),
        (Broken(), "objective returned a Broken, but must be a number (RuntimeError: illegal memory access)"),
    ],
    ids=["none", "str", "complex", "large", "long", "broken"],
)
def test_what_is_not_a_number(value: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Returned, it has no line of its own; reported, it has the one that reports it."""

    def objective(trial: Trial) -> Any:
        if trial.lr == 2:
            trial.report(1, value)
        return value if trial.lr == 1 else 0.0

    result = tune(objective, lr=[0.5, 1, 2], method="grid", retries=0, storage=tmp_path / "a.journal")
    assert result.failed["lr=1 seed=0"] == sentence
    line = objective.__code__.co_firstlineno + 2
    reported = sentence.replace("objective returned", "objective raised TypeError: the value reported at step 1 is")
    assert result.failed["lr=2 seed=0"] == f"{reported}. ({__file__}:{line})"
    assert sentence in capsys.readouterr().err


def test_a_loss_with_its_graph_is_a_number(tmp_path: Path) -> None:
    """Without torch's warning, in each worker, about a tensor that requires a gradient."""

    def objective(trial: Trial) -> torch.Tensor:
        loss = torch.tensor([lr_only(trial)], requires_grad=True) * 2
        trial.report(1, loss)  # type: ignore[arg-type]
        return loss

    result = tune(objective, lr=[1, 2], method="grid", storage=tmp_path / "a.journal")
    assert [record.value for record in result.trials] == [2, 4]


def test_facts_from_elsewhere_that_are_not_json(tmp_path: Path) -> None:
    record = Record(1, None, 0, value=1.0, facts={"betas": {0.9}})
    says = r"facts of lr=1 seed=0 is {'betas': {0.9}}, which is not JSON serializable"
    with pytest.raises(TypeError, match=says):
        tune(lr_only, lr=[1], storage=tmp_path / "a.journal", together=lambda points: [record])
    with pytest.raises(TypeError, match=says):
        Study(tmp_path / "b.journal", "b", direction="minimize").add([record])


def test_without_a_best_point_the_failures_have_their_reasons(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        if trial.lr == 2:
            raise ValueError("no")
        return math.nan

    result = tune(objective, method="separable", lr=[1, 2], storage=tmp_path / "a.journal", retries=0)
    assert result.best is None
    assert re.search(r"Without a result: lr=2 seed=0 \(objective raised ValueError: no", result.summary())


def test_a_failure_has_the_line_of_the_objective(tmp_path: Path) -> None:
    """Also if the error is raised in a library, or by a method of the trial."""

    def objective(trial: Trial) -> float:
        if trial.lr == 1:
            json.loads("{")
        elif trial.lr == 2:
            trial.report(0.5, 3)  # type: ignore[arg-type]
        return 0.0

    result = tune(objective, method="grid", lr=[0.5, 1, 2], retries=0, storage=tmp_path / "a.journal")
    first = objective.__code__.co_firstlineno
    assert f"({__file__}:{first + 2})" in result.failed["lr=1 seed=0"]
    assert f"({__file__}:{first + 4})" in result.failed["lr=2 seed=0"]


@pytest.mark.parametrize("code", [0, 5, None, "why"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_objective_that_ends_its_process(code: Any, workers: int, tmp_path: Path) -> None:
    """It has failed as by any other error: a search that ends there would look like one that has ended well."""

    def objective(trial: Trial) -> float:
        if trial.lr == 2:
            sys.exit(code)
        return lr_only(trial)

    result = tune(objective, method="grid", lr=[1, 2], storage=tmp_path / "a.journal", retries=1, workers=workers)
    (reason,) = result.failed.values()
    line = objective.__code__.co_firstlineno + 2
    assert reason == f"objective raised SystemExit{'' if code is None else f': {code}'} ({__file__}:{line})"
    with closing(Study(tmp_path / "a.journal", None, create=False)) as study:
        assert study.snapshot().failures == {"lr=2 seed=0": (reason, reason)}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_that_catches_a_signal_ends_the_search_with_its_code(number: int, code: int, tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        raise Stopped("stopped and saved", number=number)

    with pytest.raises(Stopped) as caught:
        tune(objective, lr=[1, 2], name="mine", storage=tmp_path / "a.journal")
    assert caught.value.exit_code == code


def test_a_framework_that_makes_an_exit_of_ctrl_c(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    with pytest.raises(Stopped) as caught:
        tune(objective, lr=[1, 2], name="mine", storage=tmp_path / "a.journal")
    assert caught.value.exit_code == 130
    assert Study(tmp_path / "a.journal", "mine").snapshot().failures == {"lr=1 seed=0": ("given back: stopped",)}


@pytest.mark.parametrize("end", [SystemExit(130), SystemExit(143), Stopped("stopped"), KeyboardInterrupt()])
def test_an_objective_that_was_asked_to_stop(end: BaseException, tmp_path: Path) -> None:
    """A training that has saved, for example: the search ends, too, and the point is given back."""

    def objective(trial: Trial) -> float:
        if trial.lr == 2:
            raise end
        return lr_only(trial)

    with pytest.raises(SystemExit if isinstance(end, SystemExit) else Stopped) as error:
        tune(objective, method="separable", lr=[1, 2], storage=tmp_path / "a.journal", name="a")
    assert isinstance(end, KeyboardInterrupt) or error.value is end
    assert Study(tmp_path / "a.journal", "a").snapshot().failures == {"lr=2 seed=0": ("given back: stopped",)}


# --- workers that cannot work ---


def test_a_module_that_workers_cannot_import(tmp_path: Path) -> None:
    module = ModuleType("nowhere_to_be_found")
    exec("def objective(trial):\n    return trial.lr", vars(module))
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(WorkerError, match=r"objective could not be loaded in a worker .*nowhere_to_be_found"):
            tune(module.objective, method="separable", lr=[1, 2], storage=tmp_path / "a.journal", workers=1)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("code", "how", "times"),
    [
        ("import os; os._exit(4)", "exit code 4", 3),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL", 10),
    ],
)
def test_workers_that_end_at_once(
    code: str, how: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(lr_only, method="separable", lr=[1], storage=tmp_path / "a.journal")
    count = tmp_path / "count"
    monkeypatch.setattr(worker_process, "_BEGIN", f"open({str(count)!r}, 'a').write('x')\n{code}")
    with pytest.raises(WorkerError, match=f"workers exit as soon as they are started \\({how}\\); see their output"):
        tune(lr_only, method="separable", lr=[1, 2], storage=tmp_path / "a.journal", workers=1)
    assert count.stat().st_size == times
    assert len(Study(tmp_path / "a.journal", "objectives:lr_only").snapshot().records) == 1


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "together returned None, but must return a list of records."),
        ([1, 2], "together returned [1, 2], but must return a list of records."),
        (
            [Record(1, None, value=0.5)],
            "has 1 records for 2 points, but must have one for each: lr=3 seed=0 is missing.",
        ),
    ],
)
def test_points_that_are_run_together_and_do_not_come_back(returned: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        tune(lr_only, lr=[1, 2, 3], start_lr=1, storage=tmp_path / "a.journal", together=lambda points: returned)
    assert sentence in str(error.value)
    assert not Study(tmp_path / "a.journal", "objectives:lr_only").snapshot().running  # they were given back


def test_a_process_that_the_objective_forks_may_end_as_it_likes(tmp_path: Path) -> None:
    def forks(trial: Trial) -> float:
        if (child := os.fork()) == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        return lr_only(trial)

    result = tune(forks, lr=[1, 2], extend=False, storage=tmp_path / "a.journal", workers=1)
    assert result.failed == {}
    assert len(result.trials) == 2


def test_a_traceback_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(trial: Trial) -> float:
        raise RuntimeError("never")

    with pytest.raises(TuningError, match="3 of 3 times"):
        tune(fails, lr=[1, 2], storage=tmp_path / "a.journal")
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_journal_grows_slowly_while_a_point_is_held(tmp_path: Path) -> None:
    study = Study(tmp_path / "a.journal", "a", direction="minimize")
    study.queue([Point(0.1, 1e-8, 0)])
    held = study.take("0123456789ab")
    assert held is not None
    held.renew(80.0)
    before = (tmp_path / "a.journal").stat().st_size
    held.renew(80.0)
    size = (tmp_path / "a.journal").stat().st_size - before
    assert size > 100
    age, renewals = 0.0, 0
    while age < 24 * 3600:
        age += renew_after(LEASE, age)
        renewals += 1
    assert renewals * size < 300_000


# --- a storage that is not what it should be ---


def write_half_a_line(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"op_code":6,"worker_id":"killed in the midd')


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    tune(lr_only, lr=[1, 2], storage=path)
    lines = path.read_bytes().split(b"\n")
    for damage in (b"\0\0\0", b"[1]", b'{"op"'):
        path.write_bytes(b"\n".join([*lines[:3], damage, *lines[4:]]))
        with pytest.raises(StorageError, match=r"a\.journal', whose line 4 is damaged \(.*\): repair or delete it\."):
            tune(lr_only, lr=[1, 2], storage=path)


def test_a_half_written_line_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    tune(lr_only, method="separable", lr=[1, 2], storage=path)
    write_half_a_line(path)

    def objective(trial: Trial) -> float:
        write_half_a_line(path)  # as another process that is killed
        return lr_only(trial)

    with pytest.warns(UserWarning, match="results in .* are of earlier code of"):
        result = tune(objective, method="separable", lr=[1, 2, 3, 4], storage=path, name="objectives:lr_only", about={})
    assert [record.lr for record in result.trials] == [1, 2, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_lock_that_was_left_costs_only_its_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.journal"
    tune(lr_only, method="separable", lr=[1], storage=path)
    Path(f"{path}.lock").touch()
    clock = Clock()
    monkeypatch.setattr(journals, "time", clock)
    assert len(tune(lr_only, method="separable", lr=[1, 2], storage=path).trials) == 2
    assert storages.GRACE <= clock.now - 1000 < storages.GRACE + 2
    assert not Path(f"{path}.lock").exists()


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_is_removed_in_the_middle(count: int, tmp_path: Path) -> None:
    path, removed = tmp_path / "folder" / "a.journal", tmp_path / "removed"

    def remove(progress: Progress) -> None:
        if progress.done == 3 and count:
            path.unlink(missing_ok=True)
            removed.touch()

    def objective(trial: Trial) -> float:
        if trial.lr == 4:
            path.unlink()
        return lr_only(trial)

    with pytest.raises((StorageError, WorkerError)) as error:
        tune(
            Gated(removed, free=3) if count else objective,
            method="separable",
            lr=range(1, 40),
            storage=path,
            workers=count,
            watcher=remove,
        )
    rescued = Path(f"{path}.rescued.jsonl")
    assert f"storage is '{path}', which is missing" in str(error.value)
    assert f"known points are saved in {rescued}: `avagrad study import` makes a study of them." in str(error.value)
    assert not path.exists()  # nobody has begun it anew
    known = read_records(rescued)
    assert len(known) >= 3
    assert all(record.value == record.lr for record in known)
    if not count:
        assert "The result of lr=4 seed=0 could not be saved: 4." in str(error.value)


def test_a_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    study = Study(path, "a", direction="minimize")
    study.queue([Point(1.0, None, 0)])
    path.unlink()
    Study(path, "a", direction="minimize")
    with pytest.raises(StorageError, match="it has been replaced by another file"):
        study.snapshot()
    with pytest.raises(StorageError, match="it has been replaced by another file"):
        study.queue([Point(2.0, None, 0)])


@pytest.mark.parametrize(
    "content",
    [b"no journal\nat all\n", b'{"lr": 1, "value": 2}\n', b"[]\n", b"\xff\xfe\n", b'{"op_code": 99}\n', b"5\n"],
)
def test_a_file_that_is_no_journal(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="which is not an Optuna journal"):
        tune(lr_only, method="separable", lr=[1], storage=path)
    assert path.read_bytes() == content


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="it is a folder; choose a file"):
        tune(lr_only, method="separable", lr=[1], storage=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="which cannot be read or written"):
        tune(lr_only, method="separable", lr=[1], storage=tmp_path / "file" / "a.journal")
    with pytest.raises(StorageError, match="which is missing"):
        Study(tmp_path / "none.journal", "a", create=False)
    assert not (tmp_path / "none.journal").exists()


def test_another_study_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    tune(lr_only, method="separable", lr=[1], storage=path, about={"data": 1, "model": "m"})
    before = path.read_bytes()
    with pytest.raises(StorageError, match="which has the study 'objectives:lr_only', and not 'objectives:bowl'"):
        tune(bowl, method="separable", lr=[1], eps=[1], storage=path)
    with pytest.raises(StorageError, match="has the direction 'minimize', but direction is 'maximize'"):
        tune(lr_only, method="separable", lr=[1], storage=path, direction="maximize", about={"data": 1})
    with pytest.raises(StorageError, match=r"made with data 1, and now it is 2: its points would not be comparable"):
        tune(lr_only, method="separable", lr=[1], storage=path, about={"data": 2})
    assert path.read_bytes().startswith(before)
    assert len(tune(lr_only, method="separable", lr=[1], storage=path, about={"data": 1}).trials) == 1
    other = tmp_path / "other.journal"
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(other))), study_name="x"
    )
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(StorageError, match="whose study 'x' was not made by avagrad"):
        tune(lr_only, method="separable", lr=[1], storage=other, name="x")


@pytest.mark.parametrize(
    ("url", "shown", "why"),
    [
        ("postgresql://me:secret@localhost:1/db", "postgresql://me:***@localhost:1/db", "which does not respond"),
        ("postgresql://me:secret@localhost:port/db", "postgresql://***@localhost:port/db", "not a database URL"),
        ("postgresql://localhost:1/db?password=secret", "postgresql://localhost:1/db?password=***", "does not respond"),
        ("what://me:secret@localhost/db", "what://me:***@localhost/db", "not a database URL"),
        ("mysql://me:secret@localhost/db", "mysql://me:***@localhost/db", "whose driver is not installed"),
    ],
)
def test_databases_that_are_not_there(url: str, shown: str, why: str) -> None:
    assert described(url) == shown
    with pytest.raises(StorageError) as error:
        tune(lr_only, method="separable", lr=[1], storage=url)
    assert f"storage is '{shown}'" in str(error.value)
    assert why in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_sqlite_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert len(tune(lr_only, method="separable", lr=[1, 2], storage=url).trials) == 2
    assert len(tune(lr_only, method="separable", lr=[1, 2, 3], storage=url).trials) == 3


# --- a database that goes away ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator["Server"]:
    with postgres(tmp_path) as url:
        server = Server(url)
        try:
            yield server
        finally:
            server.stop()


class Server:
    """The database, which can be stopped and started again."""

    def __init__(self, url: str) -> None:
        self.url, self.home = url, Path(url.partition("host=")[2])
        self.state = self.home / "data" / "postmaster.pid"
        self.command = Path(f"/proc/{self.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        self.process: subprocess.Popen[bytes] | None = None
        self.starting: threading.Timer | None = None

    @property
    def pid(self) -> int:
        return int(self.state.read_text().split()[0])

    def stop(self) -> None:
        if self.starting is not None:
            self.starting.join()
        with contextlib.suppress(OSError):
            os.kill(self.pid, 2)
        if self.process is not None:
            self.process.wait()
        until(lambda: not self.state.exists())

    def start(self) -> None:
        owner = self.home.stat()
        who: dict[str, Any] = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        self.process = subprocess.Popen(
            self.command, cwd=self.home, stderr=subprocess.DEVNULL, **who if os.geteuid() == 0 else {}
        )
        until(lambda: self.state.exists() and self.state.read_text().rstrip().endswith("ready"))

    def start_in(self, seconds: float) -> None:
        self.starting = threading.Timer(seconds, self.start)
        self.starting.start()


@pytest.mark.slow
def test_a_database_that_is_started_again(server: Server, tmp_path: Path) -> None:
    """The search, its worker, its pruner and what they hold outlive that."""
    away = tmp_path / "marks" / "away"
    away.parent.mkdir()

    def restart(progress: Progress) -> None:
        if progress.done == 3 and not away.exists():
            server.stop()
            away.touch()
            server.start_in(1.0)

    objective = Gated(away, free=3)
    result = tune(
        objective, method="separable", lr=range(1, 13), storage=server.url, workers=1, watcher=restart, pruner="median"
    )
    assert away.exists()
    assert len(result.trials) == 12
    assert not result.failed
    assert [mark.stat().st_size for mark in away.parent.glob("lr=*")] == [1] * 12  # none was run twice


def test_a_database_that_stays_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(storages, "time", clock)
    done: list[int] = []

    def objective(trial: Trial) -> float:
        if trial.lr == 3:
            server.stop()
        return lr_only(trial)

    with pytest.raises(
        StorageError, match=r"which does not respond: .*The result of lr=3 seed=0 could not be saved: 3\."
    ):
        tune(
            objective, method="separable", lr=range(1, 9), storage=server.url, name="away",
            watcher=lambda now: done.append(now.done), lease=1e9,
        )  # fmt: skip
    assert storages.PATIENCE / 2 < clock.now - 1000 <= storages.PATIENCE
    assert done[-1] == 2
    server.start()
    with pytest.warns(UserWarning, match="results in .* are of earlier code of"):
        result = tune(lr_only, method="separable", lr=range(1, 9), storage=server.url, name="away", about={}, lease=0.5)
    assert len(result.trials) == 8


def test_optunas_own_trial_while_the_database_is_away(server: Server) -> None:
    """Its errors are not the objective's."""
    calls: list[float | None] = []

    def objective(trial: Trial) -> float:
        calls.append(trial.lr)
        if len(calls) == 2:
            server.stop()
            server.start_in(0.5)
        trial.optuna.suggest_float(f"x{len(calls)}", 0, 1)
        return lr_only(trial)

    result = tune(objective, method="separable", lr=[1, 2, 3], storage=server.url, name="away", retries=0)
    assert len(result.trials) == 3
    assert not result.failed
