"""The tuner as people use it: here and with worker processes, stopped and gone on with, alone and with others."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest
import torch
from objectives import Counted, Noted, bowl, lr_only
from optuna.trial import TrialState
from servers import postgres
from waiting import Clock, are_dead, process_state, until

from avagrad.tune import Diverged, Trial, leases, tune
from avagrad.tune.leases import Watch, holder
from avagrad.tune.records import Record
from avagrad.tune.result import Best, Progress, Result, Verdict
from avagrad.tune.separability import Separability
from avagrad.tune.space import Cell, Point
from avagrad.tune.study import Study
from avagrad.tune.workers.local import device_slots

LR, EPS = "1e-3:1e3:7", "1e-4:1:5"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
# Children of the test's own process: they need no time to start.
fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def states(storage: str | Path, name: str) -> Counter[tuple[str, str]]:
    study = Study(storage, name, create=False)
    try:
        return Counter((trial.user_attrs["key"], trial.state.name) for trial in study.trials())
    finally:
        study.close()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["journal", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a.journal") if request.param == "journal" else str(request.getfixturevalue("database"))


# --- what comes out ---


@pytest.mark.slow
def test_here_and_in_processes_it_is_the_same(tmp_path: Path) -> None:
    here = tune(bowl, method="separable", lr=LR, eps=EPS, storage=tmp_path / "here.journal")
    assert here.best is not None
    assert (here.best.lr, here.best.eps, here.best.value) == (1, 0.01, 0)
    assert isinstance(here.separability, Verdict)
    assert here.separability.confirmed
    assert not here.failed
    seen: list[Progress] = []
    there = tune(
        bowl, method="separable", lr=LR, eps=EPS, storage=tmp_path / "there.journal", workers=2, watcher=seen.append
    )
    assert {record.point: record.value for record in there.trials} == {
        record.point: record.value for record in here.trials
    }
    assert (there.best, there.path, there.separability) == (here.best, here.path, here.separability)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert (seen[-1].done, seen[-1].best, seen[-1].at) == (len(there.trials), 0, Cell(1.0, 0.01))
    diverged = [record for record in there.trials if record.diverged]
    assert diverged
    assert all(record.value == math.inf and record.diverged_at == 7 for record in diverged)


def test_a_finished_search_reports_all_of_its_trials(tmp_path: Path) -> None:
    seen: list[Progress] = []
    options: dict[str, Any] = {"lr": LR, "eps": EPS, "seeds": 3, "workers": None, "watcher": seen.append}
    result = tune(bowl, storage=tmp_path / "a.journal", **options)
    assert seen[-1].done == seen[-1].total == len(result.trials)


def test_a_finished_point_is_never_run_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def objective(trial: Trial) -> float:
        calls.append(trial.key)
        return bowl(trial)

    first = tune(objective, lr=LR, eps=EPS, storage=tmp_path / "a.journal")
    assert len(calls) == len(set(calls)) == len(first.trials)
    again = tune(objective, lr=LR, eps=EPS, storage=tmp_path / "a.journal", workers=None)  # nothing to start them for
    assert again == first
    assert len(calls) == len(first.trials)
    grid = tune(objective, lr=LR, eps=EPS, method="grid", storage=tmp_path / "a.journal")
    assert len(calls) == len(set(calls)) == len(grid.trials) == 35
    assert isinstance(grid.separability, Separability)
    whole = tune(objective, lr=LR, eps=EPS, method="separable", storage=tmp_path / "a.journal")
    assert len(calls) == 35
    assert len(first.trials) < len(whole.trials) < 35
    assert whole.best == grid.best == first.best


def test_progress_counts_the_points_of_the_search(tmp_path: Path) -> None:
    """Not those of an earlier grid, which it may never ask for."""

    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        return abs(math.log10(trial.lr)) + abs(math.log10(trial.eps) + 2) + trial.seed / 10

    shown: list[Progress] = []
    options: dict[str, Any] = {"lr": "1e-3:1e3:7", "eps": "1e-4:1:5", "storage": tmp_path / "a.journal"}
    tune(objective, method="grid", **options)
    result = tune(objective, method="separable", seeds=2, watcher=shown.append, **options)
    assert shown[0].done <= 7
    assert all(one.done <= one.total for one in shown)
    assert shown[-1].done == shown[-1].total == len(result.trials)


def test_the_values_of_the_best_are_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        return 10.0 * trial.seed

    for seeds in ([0, 1], [1, 0]):
        for storage in ("both.journal", f"{seeds[0]}.journal"):
            result = tune(objective, lr=0.1, seeds=seeds, name="mine", storage=tmp_path / storage)
            assert result.best is not None
            assert result.best.values == tuple(10.0 * seed for seed in seeds)


def test_an_axis_is_extended_and_said_to_be(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        return abs(math.log10(trial.lr) - 3)

    found = tune(objective, lr="0.01:10:4", storage=tmp_path / "a.journal")
    assert found.best is not None
    assert (found.best.lr, found.extended, found.at_ends) == (1000, ("lr to 100000",), ())
    assert "so the search was extended: lr to 100000." in found.summary()
    again = tune(objective, lr="0.01:10:4", storage=tmp_path / "a.journal")
    assert again == found
    assert again.new == 0
    kept = tune(objective, lr="0.01:10:4", extend=False, storage=tmp_path / "b.journal")
    assert kept.best is not None
    assert (kept.best.lr, kept.extended, kept.at_ends) == (10, (), ("lr",))


@pytest.mark.parametrize(
    ("margin", "slope", "seeds", "extended"),
    [(0, 0.0, 1, False), (0.01, 1e-6, 1, False), (0.01, 0.02, 1, True), (0, 1e-6, 1, True), (0, 1e-6, 2, False)],
)
def test_an_axis_is_extended_if_its_end_is_better(
    margin: float, slope: float, seeds: int, extended: bool, tmp_path: Path
) -> None:
    """By more than the margin, and than the noise of several seeds; else the end is not said to be one, either."""

    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        return 1 + abs(math.log10(trial.lr)) + slope * math.log10(trial.eps) + trial.seed

    options: dict[str, Any] = {
        "lr": "0.01:100:5",
        "eps": "1e-4:1e4:9",
        "margin": margin,
        "seeds": seeds,
        "start_eps": 1e-4,
    }
    found = tune(objective, storage=tmp_path / "a.journal", **options)
    assert bool(found.extended) == extended
    for method in ("lines", "grid"):
        found = tune(objective, storage=tmp_path / method, extend=False, **options | {"method": method})
        assert found.best is not None
        assert found.at_ends == (("eps",) if extended else ())
        assert found.best.eps == 1e-4 or not extended
        assert ("It is at an end of the eps axis" in found.summary()) == extended


@pytest.mark.parametrize("lowest", ["1e-8", "1e-10", "1e-7", "1e-6"])
def test_eps_is_not_searched_below_1e_8(lowest: str, tmp_path: Path) -> None:
    """There every method is level, and what one seed finds is rounding noise."""

    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        return 1 + abs(math.log10(trial.lr)) + 1e-9 * math.log10(trial.eps)

    found = tune(objective, lr="0.01:100:5", eps=f"{lowest}:1:6", storage=tmp_path / "a.journal", start_eps=1)
    assert found.at_ends == ()
    assert min(record.eps for record in found.trials if record.eps is not None) == min(float(lowest), 1e-8)


@pytest.mark.parametrize("ignored", ["lr", "eps"])
@pytest.mark.parametrize("method", ["lines", "grid"])
def test_an_objective_that_ignores_one_of_both_is_noticed(
    ignored: str, method: Literal["lines", "grid"], tmp_path: Path
) -> None:
    used = "eps" if ignored == "lr" else "lr"
    options: dict[str, Any] = {"lr": "1e-3:1:4", "eps": "1e-4:1:5", "method": method, "seeds": 2, "extend": False}
    result = tune(
        lambda trial: abs(math.log10(getattr(trial, used)) + 1.5) + trial.seed, storage=tmp_path / "a", **options
    )
    assert f"No value of {ignored} made a difference: does the objective use trial.{ignored}?" in result.summary()
    assert f"trial.{used}?" not in result.summary()


@pytest.mark.parametrize("lines", [{1: (0, 1, 2), 10: (5, 5, 5)}, {1: (0, 1), 10: (5, 5, 5)}, {1: (0, 0), 10: (5, 5)}])
def test_an_axis_that_makes_little_difference_is_not_called_unused(lines: dict[float, tuple[float, ...]]) -> None:
    """After a move only some values next to the best are known; single ones may be level, or too few."""
    records = [Record(lr, 10.0**-k, value=10 - v) for lr, values in lines.items() for k, v in enumerate(values)]
    best = Best(10.0, 1.0, 5.0, (5.0,))
    assert "does the objective use" not in Result(best, tuple(records), Verdict(True, 2, "Yes."), {}, ()).summary()


def test_an_objective_that_ignores_its_trial_is_noticed(tmp_path: Path) -> None:
    result = tune(lambda trial: 0.5, lr="1e-3:1:4", eps="1e-4:1:5", storage=tmp_path / "a.journal")
    assert "All trials have the same value: does the objective use the lr and eps of the trial?" in result.summary()
    assert "were enough" not in result.summary()
    other = tune(lambda trial: trial.lr, lr="1e-3:1:4", extend=False, storage=tmp_path / "b.journal")
    assert "the same value" not in other.summary()


@pytest.mark.parametrize("values", [[1e-3, 3e-3, 1e-2], [1, 3], [1, 10, 30]])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_short_axis_is_extended_at_either_end(values: list[float], sign: int, tmp_path: Path) -> None:
    """A search whose own points it does not know would wait forever."""
    calls = itertools.count()

    def watcher(progress: Progress) -> None:
        assert next(calls) < 100

    result = tune(lambda trial: (trial.lr or 0) ** sign, lr=values, storage=tmp_path / "a.journal", watcher=watcher)
    assert result.best is not None
    assert result.best.lr == (min if sign > 0 else max)(record.lr or 0 for record in result.trials)
    assert len(result.extended) == 1


def test_coarse_values_are_run_with_one_seed(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        return (math.log10(trial.lr) - 1) ** 2 + trial.seed / 10

    found = tune(objective, lr="1e-3:1e3:7", seeds=[4, 5], storage=tmp_path / "a.journal")
    assert found.best is not None
    assert (found.best.lr, found.best.values) == (10, (0.4, 0.5))
    runs = sorted((record.lr, record.seed) for record in found.trials)
    assert runs == [(0.01, 4), *((lr, seed) for lr in (0.1, 1, 10, 100) for seed in (4, 5))]


def test_the_usual_axes_of_an_optimizer(tmp_path: Path) -> None:
    found = tune(bowl, optimizer="avastep", storage=tmp_path / "a.journal")
    assert found.best is not None
    assert len(found.trials) <= 16 + 2 * bool(found.extended)
    with_lr = tune(bowl, lr=[0.1, 1], optimizer="avastep", storage=tmp_path / "lr.journal", extend=False)
    assert {record.lr for record in with_lr.trials} == {0.1, 1}
    assert len({record.eps for record in with_lr.trials}) > 3
    with pytest.raises(ValueError, match="optimizer is 'lion', but must be one of avastep,"):
        tune(bowl, optimizer="lion", storage=tmp_path / "b.journal")
    with pytest.raises(ValueError, match="optimizer is 'avastp', but must be one of avastep,"):  # it has a start, too
        tune(bowl, lr=[0.1, 1], eps=[0.1, 1], optimizer="avastp", storage=tmp_path / "b.journal")


def test_maximize_and_many_seeds(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        if trial.lr == 4:
            return -math.inf if trial.seed == 9 else 99.0
        return trial.lr + trial.seed

    result = tune(
        objective,
        method="separable",
        lr=[1, 2, 3, 4],
        seeds=[5, 9, -3],
        direction="maximize",
        storage=tmp_path / "a.journal",
    )
    assert result.best is not None
    assert result.best.lr == 3
    assert sorted(result.best.values) == [0, 8, 12]
    assert result.best.value == pytest.approx(20 / 3)
    assert len(result.trials) == 12
    assert [record.value for record in result.trials if record.diverged] == [-math.inf]
    more = tune(
        objective, method="separable", lr=[1, 2], seeds=30, direction="maximize", storage=tmp_path / "a.journal"
    )
    assert len(more.trials) == 60


def test_means_of_large_numbers(tmp_path: Path) -> None:
    result = tune(lambda trial: 1.7e308, lr=[1, 2], seeds=2, storage=tmp_path / "a.journal")
    assert result.best is not None
    assert result.best.value == 1.7e308


def test_a_wider_axis_keeps_what_is_known(tmp_path: Path) -> None:
    calls: list[float | None] = []

    def objective(trial: Trial) -> float:
        calls.append(trial.lr)
        return lr_only(trial)

    narrow = tune(objective, method="separable", lr=[2, 3], storage=tmp_path / "a.journal")
    assert narrow.at_ends == ()
    wide = tune(objective, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal")
    assert calls == [2, 3, 1]
    assert wide.best is not None
    assert wide.best.lr == 1
    assert wide.at_ends == ("lr",)
    assert len(tune(objective, method="separable", lr=[2, 3], storage=tmp_path / "a.journal").trials) == 2


# --- what an objective may do ---


def test_reports_and_notes(tmp_path: Path) -> None:
    def objective(trial: Trial) -> Any:
        assert trial.lr is not None
        for step in range(5):
            trial.report(torch.tensor(step), torch.tensor(trial.lr + step))  # type: ignore[arg-type]
        trial.note(test=0.5)
        trial.note(shape=(1, 2), nothing=math.nan)
        if trial.lr == 2:
            trial.report(6, math.inf)
        return torch.tensor([trial.lr]) if trial.lr < 3 else torch.tensor(math.nan)

    result = tune(objective, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal")
    one, two, three = sorted(result.trials, key=lambda record: record.lr or 0)
    assert (one.value, one.facts["test"], one.facts["shape"], one.diverged_at) == (1.0, 0.5, [1, 2], None)
    assert math.isnan(one.facts["nothing"])
    assert (two.value, two.diverged_at, two.facts["test"]) == (math.inf, 6, 0.5)
    assert (three.value, three.diverged_at) == (math.inf, 4)  # NaN is the worst there is, and no gap
    trials = Study(tmp_path / "a.journal", result_name(objective), create=False).trials()
    assert trials[0].intermediate_values[4] == 5
    assert all(trial.state == TrialState.COMPLETE for trial in trials)


def result_name(objective: Any) -> str:
    return f"{objective.__module__}:{objective.__qualname__}"


def test_optunas_own_trial(storage: str) -> None:
    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        width = trial.optuna.suggest_int("width", 1, 8)
        depth = trial.optuna.suggest_categorical("depth", ["few", "many"])
        trial.optuna.set_user_attr("mine", width)
        trial.note(width=width, depth=depth)
        return trial.lr * float(width)

    result = tune(objective, method="separable", lr=[1, 2, 3], storage=storage, name="suggestions")
    assert all(record.value == record.lr * record.facts["width"] for record in result.trials if record.lr)
    study = Study(storage, "suggestions", create=False)
    assert all(trial.params["width"] == trial.user_attrs["mine"] for trial in study.trials())
    study.close()


@pytest.mark.parametrize("pruner", ["median", "halving"])
def test_pruning(pruner: Any, storage: str) -> None:
    steps: Counter[float | None] = Counter()

    def objective(trial: Trial) -> float:
        assert trial.lr is not None
        steps[trial.lr] = 0
        for step in range(1, 9):
            steps[trial.lr] += 1
            # Points above lr 6 are bad while they last, and would seem the best of all at their end.
            trial.report(step, trial.lr if trial.lr <= 6 else 100 + trial.lr)
        return trial.lr if trial.lr <= 6 else -1.0

    result = tune(objective, method="separable", lr=range(1, 21), storage=storage, name=pruner, pruner=pruner)
    pruned = [record for record in result.trials if record.pruned]
    assert len(pruned) >= 5
    assert all(steps[record.lr] < 8 for record in pruned)
    assert all(record.value == 100 + (record.lr or 0) for record in pruned if (record.lr or 0) > 6)
    assert sum(steps.values()) < 20 * 8
    whole = [record for record in result.trials if not record.pruned]
    assert result.best is not None
    assert result.best.value == min(record.value for record in whole)


def test_a_pruned_point_is_never_picked_over_a_complete_one(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        trial.report(1, 5.0 if trial.lr == 1 else 0.0)
        if trial.lr != 1:
            raise optuna.TrialPruned
        return 5.0

    result = tune(objective, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal")
    assert result.best is not None
    assert (result.best.lr, result.best.value) == (1, 5)
    assert [record.pruned for record in sorted(result.trials, key=lambda record: record.lr or 0)] == [False, True, True]


def test_a_point_that_fails_now_and_then_is_tried_again(tmp_path: Path) -> None:
    calls: Counter[float | None] = Counter()

    def objective(trial: Trial) -> float:
        calls[trial.lr] += 1
        if trial.lr == 2 or (trial.lr == 3 and calls[trial.lr] <= 2):
            raise RuntimeError("not now")
        return lr_only(trial)

    result = tune(objective, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal", retries=2)
    assert calls == {1: 1, 2: 3, 3: 3}
    assert list(result.failed) == ["lr=2 seed=0"]
    assert "objective raised RuntimeError: not now (" in result.failed["lr=2 seed=0"]
    assert result.best is not None
    assert result.best.lr == 1
    assert "Without a result: lr=2 seed=0 (objective raised RuntimeError" in result.summary()
    # A new call forgives, and asks again.
    tune(objective, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal", retries=0)
    assert calls == {1: 1, 2: 4, 3: 3}


def test_diverged_survives_being_sent() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(Diverged(3))).step == 3
    assert pickle.loads(pickle.dumps(Diverged())).step is None


# --- who works ---


@pytest.mark.slow
def test_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_slots(None) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in device_slots(None, 2)] == ["0", "0", "1", "1"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in device_slots(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in device_slots(None)] == ["3", "GPU-abc"]
    here = os.getcwd()
    seen: list[Progress] = []
    objective = Noted(tmp_path, last=30)

    def watcher(progress: Progress) -> None:
        seen.append(progress)
        if (progress.done, progress.running) == (29, 1):  # the last one waits for that
            objective.gate.touch()

    result = tune(
        objective, method="separable", lr=range(1, 31), storage=tmp_path / "a.journal", workers=None, watcher=watcher
    )
    assert any(progress.running and progress.seconds_left is not None for progress in seen)
    assert {record.facts["cuda"] for record in result.trials} == {"3", "GPU-abc"}
    assert {record.facts["folder"] for record in result.trials} == {here}
    assert len({record.facts["process"] for record in result.trials} - {os.getpid()}) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert device_slots(None) == [{"OMP_NUM_THREADS": str(os.cpu_count())}]
    assert len(device_slots(3)) == 3


@pytest.mark.slow
def test_a_script_without_a_main_guard_in_another_thread_and_folder(tmp_path: Path) -> None:
    """As in a notebook: the objective is in no file, it uses what is around it, and the folder may change."""
    script = """
        import os, threading
        from avagrad.tune import tune
        scale = 3.0
        class Thing:
            def value(self, lr):
                return lr * scale
        def objective(trial):
            print("running", os.path.basename(os.getcwd()), __name__)
            return Thing().value(trial.lr)
        def search():
            results.append(tune(objective, lr=[1, 2, 3, 4], workers=2, watcher=elsewhere))
        def elsewhere(progress):
            os.chdir("/")
        results = []
        thread = threading.Thread(target=search)
        thread.start()
        thread.join()
        print(results[0].best)
    """
    done = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(script), capture_output=True, text=True, cwd=tmp_path,
        env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Best(lr=1.0, eps=None, value=3.0, values=(3.0,))" in done.stdout
    assert done.stdout.count(f"running {tmp_path.name} __main__") == 4
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["main-objective.journal"]


def test_where_there_is_no_linux(tmp_path: Path) -> None:
    """What other systems lack is missed by no import, nor by a search in this process."""
    script = """
        import os, signal, sys
        import torch, optuna, sqlalchemy, cloudpickle
        from pathlib import Path
        for module, names in ((os, "fork killpg pread getpgrp setsid register_at_fork"), (signal, "SIGKILL SIGALRM")):
            for name in names.split():
                delattr(module, name)
        read = Path.read_text
        def no_proc(path, *args, **kwargs):
            if path.parts[1:2] == ("proc",):
                raise FileNotFoundError(str(path))
            return read(path, *args, **kwargs)
        Path.read_text = no_proc
        from avagrad.tune import tune
        from avagrad.tune.workers.base import WorkerError
        objective = lambda trial: trial.lr
        print(tune(objective, lr=[1, 2], extend=False, storage=sys.argv[1]).best)
        try:
            tune(objective, lr=[1, 2, 3], method="grid", storage=sys.argv[1], workers=1)
        except WorkerError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "a.journal"], capture_output=True, text=True,
        env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == (
        "Best(lr=1.0, eps=None, value=1.0, values=(1.0,))\n"
        "workers is 1, but worker processes need Linux or macOS: pass workers=0, or ray.\n"
    )


# --- stopped, killed ---


def start(folder: Path, storage: Path) -> "subprocess.Popen[str]":
    """Start a search whose worker hangs, has a child, and hears no SIGTERM."""
    folder.mkdir()
    code = (
        "import sys; from objectives import Waits; from avagrad.tune import tune\n"
        "tune(Waits(sys.argv[1]), lr=[1, 2, 3, 4], method='grid', storage=sys.argv[2], name='waits', workers=1)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, folder, storage], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def hangs(run: "subprocess.Popen[str]", folder: Path) -> bool:
    return len(list(folder.glob("*.pid"))) == 2 or run.poll() is not None


@pytest.mark.slow
def test_told_to_stop_or_killed_it_leaves_nobody_behind(tmp_path: Path) -> None:
    signals = {signal.SIGINT: 1, signal.SIGTERM: 1, signal.SIGKILL: -9}
    runs = {number: start(tmp_path / number.name, tmp_path / f"{number.name}.journal") for number in signals}
    try:
        for number, run in runs.items():
            until(partial(hangs, run, tmp_path / number.name))
            run.send_signal(number)
        for number, run in runs.items():
            _, output = run.communicate()
            assert run.returncode in (signals[number], -signal.SIGINT), output
            journal = tmp_path / f"{number.name}.journal"
            if number != signal.SIGKILL:
                assert f"Stopped: stopped: 2 finished points are kept in {journal}; run it again to resume." in output
            pids = [int(mark.stem) for mark in (tmp_path / number.name).glob("*.pid")]
            assert len(pids) == 2
            until(partial(are_dead, pids))
    finally:
        for run in runs.values():
            with run:
                run.kill()
    for number in signals:
        journal = tmp_path / f"{number.name}.journal"
        before = states(journal, "waits")
        assert sum(count for (_, state), count in before.items() if state == "COMPLETE") == 2
        study = Study(journal, "waits", create=False)
        running = study.snapshot().running.items()
        assert all(Watch().has_expired(trial, lease) for trial, (_, lease) in running)  # at once
        with pytest.warns(UserWarning, match="2 of 2 results in .* are of earlier code of waits"):
            result = tune(lr_only, method="separable", lr=[1, 2, 3, 4], storage=journal, name="waits", about={})
        assert len(result.trials) == 4


def test_stopped_in_this_process(tmp_path: Path) -> None:
    """Ctrl-C in a notebook: the process lives on, and the same call goes on."""
    before = signal.getsignal(signal.SIGTERM)
    calls: list[float | None] = []

    def objective(trial: Trial) -> float:
        calls.append(trial.lr)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM if trial.seed else signal.SIGINT)
        return lr_only(trial)

    for seed in (0, 1):
        calls.clear()
        with pytest.raises(KeyboardInterrupt, match=r"stopped: 1 finished point is kept in .*; run it again to resume"):
            tune(objective, method="separable", lr=[1, 2, 3], seeds=[seed], storage=tmp_path / f"{seed}.journal")
        result = tune(objective, method="separable", lr=[1, 2, 3], seeds=[seed], storage=tmp_path / f"{seed}.journal")
        assert sorted(calls, key=str) == [1, 2, 2, 3]
        assert len(result.trials) == 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_stopped_while_a_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one moment at which a point can be left held by a process that lives on: its lease is not renewed."""
    study = Study(tmp_path / "a.journal", "a", direction="minimize")
    study.queue([Point(1.0, None, 0)])
    from avagrad.tune.workers import base

    def interrupted(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(base, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            base.work_on_one(study, lr_only, "me", lease=0.2)
    until(lambda: threading.active_count() == threads)
    result = tune(lr_only, method="separable", lr=[1], storage=tmp_path / "a.journal", name="a", about={}, lease=0.2)
    assert len(result.trials) == 1


# --- with others ---


def drive(storage: str, folder: Path, name: str, at: Any) -> None:
    at.wait()
    result = tune(Counted(folder, 0.02), method="separable", lr=range(1, 17), storage=storage, name=name)
    assert len(result.trials) == 16
    Path(folder, f"done {os.getpid()}").touch()


@pytest.mark.parametrize("fresh", ["journal", "postgresql"])
def test_drivers_at_once_share_the_work(fresh: str, tmp_path: Path) -> None:
    """From the first moment on: the file, the tables and the study are made by all of them at once."""
    marks = tmp_path / "marks"
    marks.mkdir()
    with contextlib.ExitStack() as stack:
        storage = str(tmp_path / "a.journal") if fresh == "journal" else stack.enter_context(postgres(tmp_path))
        barrier = fork.Barrier(4)
        drivers = [fork.Process(target=drive, args=(storage, marks, "shared", barrier)) for _ in range(4)]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()
        assert [driver.exitcode for driver in drivers] == [0] * 4
        found = states(storage, "shared")
    assert len(list(marks.glob("done *"))) == 4
    assert sorted(path.stat().st_size for path in marks.glob("lr=*")) == [1] * 16  # each was run once
    assert sum(count for (_, state), count in found.items() if state == "COMPLETE") == 16
    assert not [key for key, state in found if state in ("WAITING", "RUNNING")]


def hold(storage: str, machine: str, into: Any) -> None:
    """Take a point as if on another machine, stop while its lease is kept, and finish it when that is over."""
    study = Study(storage, "held", create=False)
    held = study.take("stopped")
    assert held is not None
    held.signature["machine"] = machine
    held.renew()
    writes, renew = threading.Lock(), held.renew

    def renew_alone(every: float = 0.0) -> bool:
        with writes:
            return renew(every)

    held.renew = renew_alone  # type: ignore[method-assign]
    held.keep(1.0)
    until(lambda: held.beats > 3)
    with writes:  # stopped in the middle of a write, it would keep the database's lock
        os.kill(os.getpid(), signal.SIGSTOP)
    into.put(held.finish(99.0))


@pytest.mark.parametrize(
    ("storage", "machine"),
    [("journal", "this"), ("journal", "another"), ("postgresql", "another")],
    indirect=["storage"],
)
def test_the_point_of_a_stopped_worker_is_taken_back_and_its_late_result_dropped(machine: str, storage: str) -> None:
    study = Study(storage, "held", direction="minimize")
    study.queue([Point(1.0, None, 0)])
    study.close()
    into = fork.Queue()
    there = "another" if machine == "another" else holder("")["machine"]
    worker = fork.Process(target=hold, args=(storage, there, into))
    worker.start()
    pid = worker.pid
    assert pid is not None
    assert until(lambda: process_state(pid) if process_state(pid) in "TZX" else None) == "T"
    try:
        result = tune(lr_only, method="separable", lr=[1, 2], storage=storage, name="held", about={}, lease=1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert into.get() is False
    worker.join()
    assert result.best is not None
    assert result.best.value == 1.0
    assert states(storage, "held")["lr=1 seed=0", "COMPLETE"] == 1
    study = Study(storage, "held", create=False)
    assert {record.value for record in study.snapshot().records} == {1.0, 2.0}
    study.close()


def test_a_lease_lasts_longer_where_its_holder_is_seen_to_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that lets no thread run keeps a worker from renewing, but it works."""
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    other = subprocess.Popen(["sleep", "infinity"])
    try:
        born = until(lambda: Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19])
        lease = {**holder("other"), "pid": other.pid, "born": born, "beat": 1}
        elsewhere = {**lease, "machine": "another"}
        watch = Watch(lease=0.3)
        assert not watch.has_expired("a", lease)
        clock.now += 0.29
        assert not watch.has_expired("a", elsewhere)
        clock.now += 0.02
        assert watch.has_expired("a", elsewhere)
        assert not watch.has_expired("a", lease)
        other.send_signal(signal.SIGSTOP)
        until(lambda: process_state(other.pid) == "T")
        assert watch.has_expired("a", lease)
        other.send_signal(signal.SIGCONT)
        until(lambda: process_state(other.pid) != "T")
        for _ in range(3):
            assert not watch.has_expired("a", lease)
            clock.now += 0.9
        assert watch.has_expired("a", lease)
        other.kill()
        other.wait()
        assert Watch(lease=100).has_expired("a", lease)
    finally:
        other.kill()
        other.wait()


def test_time_in_which_nobody_looked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the database was away, or the one who looks was stopped: the others must have time to renew."""
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    watch = Watch(lease=20.0)
    lease = {"machine": "another", "worker": "w", "beat": 1}
    assert not watch.has_expired("a", lease)
    clock.now += 3600
    assert not watch.has_expired("a", lease)
    for _ in range(8):
        clock.now += 4
        assert watch.has_expired("a", lease) == (clock.now > 4600 + 15)


def test_other_results_put_in_meanwhile(tmp_path: Path) -> None:
    """An import while the point is under way makes a second finished trial: the first one counts."""
    study = Study(tmp_path / "a.journal", "a", direction="minimize")
    study.queue([Point(1.0, None, 0), Point(2.0, None, 0)])
    held = study.take("me")
    assert held is not None
    assert study.add([Record(1.0, None, value=7.0), Record(3.0, None, value=math.inf, diverged_at=2)]) == 2
    assert held.finish(5.0)
    assert study.add([Record(1.0, None, value=8.0)]) == 0
    result = tune(lr_only, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal", name="a", about={})
    assert {record.lr: record.value for record in result.trials} == {1.0: 5.0, 2.0: 2.0, 3.0: math.inf}


def test_another_search_on_the_same_study_does_not_stop_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path / "a.journal", "a", direction="minimize")
    study.queue([Point(1.0, None, 0), Point(2.0, None, 0)])
    trials = study.trials()
    held = study.take("me")
    assert held is not None
    with monkeypatch.context() as patch:
        patch.setattr(study, "trials", lambda: trials)  # it has looked before the point was taken
        study.withdraw(set())
    assert study.snapshot().waiting == ()
    assert held.finish(1.0)


def mess_about(storage: str, seed: int) -> None:
    """Queue, take, renew, finish, fail, take back and withdraw at random, until some point has been finished."""
    dice = random.Random(seed)
    study = Study(storage, "mess", create=False)
    points = [Point(float(lr), None, 0) for lr in range(1, 13)]
    held = []
    acts = 0
    while acts < 100 or not study.snapshot().records:
        acts += 1
        act = dice.choice(("queue", "queue", "take", "take", "finish", "fail", "take back", "withdraw", "renew"))
        if act == "queue":
            study.queue(dice.sample(points, 4))
        elif act == "take" and (taken := study.take(f"{seed}")):
            held.append(taken)
        elif act == "take back":
            seen = study.snapshot()
            for trial in dice.sample(sorted(seen.running), min(1, len(seen.running))):
                study.fail(trial, "its worker showed no sign of life")
        elif act == "withdraw":
            study.withdraw({point.key for point in dice.sample(points, 8)})
        elif held:
            one = held[0] if act == "renew" else held.pop(dice.randrange(len(held)))
            if act == "renew":
                one.renew()
            elif act == "fail" or dice.random() < 0.5:
                one.fail("failed")
            else:
                one.finish(float(seed), facts={"by": seed})
    study.close()


@pytest.mark.slow
def test_four_processes_at_random(storage: str) -> None:
    """Whatever they do: of a point at most one trial is finished, and it is never queued for work again."""
    Study(storage, "mess", direction="minimize").close()
    processes = [fork.Process(target=mess_about, args=(storage, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    finished = {key: count for (key, state), count in states(storage, "mess").items() if state == "COMPLETE"}
    assert set(finished.values()) == {1}
    result = tune(lr_only, method="separable", lr=range(1, 13), storage=storage, name="mess", about={}, lease=0.2)
    assert len(result.trials) == 12
    found = states(storage, "mess")
    assert {key: count for (key, state), count in found.items() if state == "COMPLETE"} == dict.fromkeys(
        (Point(float(lr), None, 0).key for lr in range(1, 13)), 1
    )


def test_optunas_dashboard_opens_it(tmp_path: Path) -> None:
    def objective(trial: Trial) -> float:
        trial.note(nothing=math.nan)
        trial.report(1, 1.0)
        return math.inf if trial.lr == 3 else lr_only(trial)

    tune(objective, method="separable", lr=[1, 2, 3], storage=tmp_path / "a.journal", name="shown")
    # A port that is free, and is told when it is open.
    code = (
        "import sys; from wsgiref.simple_server import make_server; from optuna_dashboard import wsgi\n"
        "server = make_server('127.0.0.1', 0, wsgi(sys.argv[1]))\n"
        "print(server.server_port, flush=True); server.serve_forever()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "a.journal"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT, text=True,
    )  # fmt: skip
    assert server.stdout is not None

    def asked(what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{what}") as answer:
            return json.loads(answer.read(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    try:
        port = int(server.stdout.readline())
        (study,) = asked("studies")["study_summaries"]
        assert study["study_name"] == "shown"
        trials = asked(f"studies/{study['study_id']}?after=0")["trials"]
    finally:
        server.terminate()
        server.communicate()
    assert [trial["state"] for trial in trials] == ["Complete"] * 3
    assert [trial["values"] for trial in trials] == [[1.0], [2.0], ["inf"]]


def test_no_result_is_a_result_too(tmp_path: Path) -> None:
    result = tune(lambda trial: math.nan, method="separable", lr=[1, 2], storage=tmp_path / "a.journal")
    assert isinstance(result, Result)
    assert result.best is None
    assert result.summary() == "No point has given a finite value: every point of the line over lr diverged or failed."
    assert [record.value for record in result.trials] == [math.inf] * 2
