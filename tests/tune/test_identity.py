"""What an objective is called, whether results of another one may be taken for its own, and changes of its code."""

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from objectives import lr_only

from avagrad.cli import main
from avagrad.tune import Trial, tune
from avagrad.tune.identity import digest_of, is_found_by_name, with_code
from avagrad.tune.study import Study


class Scaled:
    """Instances of it have one name."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, trial: Trial) -> float:
        return self.scale * lr_only(trial)

    def method(self, trial: Trial) -> float:
        return self(trial)


def scaled(scale: float) -> Callable[[Trial], float]:
    def objective(trial: Trial) -> float:
        return scale * lr_only(trial)

    return objective


def logged(function: Callable[[Trial], float]) -> Callable[[Trial], float]:
    @functools.wraps(function)
    def wrapper(trial: Trial) -> float:
        return function(trial)

    return wrapper


@logged
def decorated(trial: Trial) -> float:
    return lr_only(trial)


NAMELESS: dict[str, Any] = {
    "instance": Scaled(2),
    "method": Scaled(2).method,
    "inner": scaled(2),
    "wrapper": logged(lr_only),
    "lambda": lambda trial: 1.0,
    "partial": functools.partial(pow, 2),
}


@pytest.mark.parametrize("kind", NAMELESS)
def test_an_objective_that_is_not_found_by_its_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of another one would be taken for its own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^objective is .*, but must be a function that its module has under its name"
    ):
        tune(NAMELESS[kind], lr=[1, 2])
    assert not list(tmp_path.iterdir())


def test_an_objective_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_found_by_name(decorated)
    assert len(tune(decorated, method="grid", lr=[1, 2]).trials) == 2
    assert len(tune(Scaled(2), method="grid", lr=[1, 2], name="doubled").trials) == 2
    found = {path.name for path in (tmp_path / "runs").glob("*.journal")}
    assert found == {"test_identity-decorated.journal", "doubled.journal"}


OBJECTIVES = """
class Scaled:
    def __init__(self, scale):
        self.scale = scale
    def __call__(self, trial):
        return self.scale * trial.lr
    def method(self, trial):
        return self.scale * trial.lr

o_small, o_big = Scaled(1), Scaled(1000)
method = o_big.method
inner = (lambda scale: lambda trial: scale * trial.lr)(10)
number = 3
"""


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a search of the command; its exit code, and the last line of what it says."""
    (tmp_path / "instances.py").write_text(OBJECTIVES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(["tune", words[0], "--lr", "1,2", "--method", "grid", *words[1:]])
        captured = capsys.readouterr()
        return int(end.value.code or 0), (captured.out or captured.err).splitlines()[-1]

    return run


def test_what_is_typed_is_the_name(typed: Callable[..., tuple[int, str]]) -> None:
    for name, best in {"o_small": 1, "o_big": 1000, "method": 1000, "inner": 10}.items():
        code, printed = typed(f"instances:{name}")
        assert code == 0
        assert f"with {best}, after 2 trials." in printed
        assert Path("runs", f"instances-{name}.journal").exists()
    assert "2 trials (2 from earlier runs)" in typed("instances:o_big")[1]
    assert typed("instances:number") == (
        2,
        "error: objective is 'instances:number', but must be a function of a trial, not 3.",
    )


def test_two_that_are_typed_do_not_share_a_study(typed: Callable[..., tuple[int, str]]) -> None:
    assert typed("instances:o_small", "--storage", "a.journal")[0] == 0
    code, printed = typed("instances:o_big", "--storage", "a.journal")
    assert code == 2
    assert "which has the study 'instances:o_small', and not 'instances:o_big'" in printed
    code, printed = typed("instances:o_big", "--storage", "a.journal", "--name", "instances:o_small")
    assert code == 2
    assert "was made with objective 'o_small', and now it is 'o_big'" in printed
    code, printed = typed("instances:o_big", "--name", "")
    assert (code, printed) == (2, "error: name is '', but must be a text that is not empty.")


# --- its code ---


def made(text: str) -> Any:
    """Return the objective of some source code."""
    found: dict[str, Any] = {"__name__": "made", "functools": functools}
    exec(text, found)
    return found["objective"]


FUNCTION = "def objective(trial):\n    if trial.lr in {'a', 'b', 'c'}:\n        return 1.0\n    return trial.lr\n"
SAME = {
    "comments": FUNCTION.replace("):\n", "):\n    # why\n\n", 1),
    "lines": FUNCTION.replace("return 1.0", "return (\n            1.0\n        )"),
    "names": FUNCTION.replace("trial", "point"),
    "place": "\n\nx = 1\n" + FUNCTION,
    "defaults that are objects": FUNCTION.replace("(trial)", "(trial, log=print)"),
}
WRAPPER = """
def log(function):
    @functools.wraps(function)
    def wrapper(trial):
        return function(trial) + 1
    return wrapper

@log
def objective(trial):
    return 2
"""
INSTANCE = """
class Some:
    def __call__(self, trial):
        return {}
    def value(self, trial):
        return {}
{}
"""
OTHER = [
    FUNCTION.replace("1.0", "2.0"),
    FUNCTION.replace("'c'", "'d'"),
    FUNCTION.replace("trial.lr\n", "trial.eps\n"),
    FUNCTION.replace("return 1.0", "return (lambda: 1.0)()"),
    FUNCTION.replace("return 1.0", "return (lambda: 2.0)()"),
    FUNCTION.replace("(trial)", "(trial, epochs=5)"),
    FUNCTION.replace("(trial)", "(trial, epochs=6)"),
    FUNCTION.replace("(trial)", "(trial, epochs=5, *, log=print, sizes=(5, 6))"),
    FUNCTION.replace("(trial)", "(trial, epochs=500, *, log=print, sizes=(5, 6))"),
    WRAPPER,
    WRAPPER.replace("+ 1", "+ 2"),
    WRAPPER.replace("return 2", "return 3"),
    *(
        INSTANCE.format(*given)
        for given in (
            (1, 2, "objective = Some()"),
            (3, 2, "objective = Some()"),
            (1, 4, "objective = Some().value"),
            (1, 5, "objective = functools.partial(Some().value)"),
        )
    ),
]


@pytest.mark.parametrize("change", SAME)
def test_code_that_does_the_same_has_the_same_digest(change: str) -> None:
    assert digest_of(made(SAME[change])) == digest_of(made(FUNCTION))


def test_code_that_does_something_else_has_another_digest() -> None:
    digests = [digest_of(made(text)) for text in [FUNCTION, *OTHER]]
    assert None not in digests
    assert len(set(digests)) == len(digests)
    assert digest_of(len) is None
    assert digest_of(SimpleNamespace) is None


def test_the_rest_of_a_line_does_not_count() -> None:
    one, other = "objective = lambda trial: 1.0", "some = 3; objective = lambda trial: 1.0; other = 4"
    assert digest_of(made(one)) == digest_of(made(other))


def test_a_digest_is_the_same_in_every_process() -> None:
    """Strings hash differently, so sets of them are in another order."""
    text = f"{FUNCTION}\nfrom avagrad.tune.identity import digest_of\nprint(digest_of(objective))"
    found = {
        subprocess.run(
            [sys.executable, "-c", text], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        ).stdout
        for seed in "123456"
    }
    assert found == {f"{digest_of(made(FUNCTION))}\n".encode()}


def test_code_without_results_is_forgotten() -> None:
    history, others = with_code([], "3.11:a", 0)
    assert (history, others) == ([("3.11:a", 0)], 0)
    history, others = with_code(history, "3.11:b", 0)  # the first one never gave a result
    assert (history, others) == ([("3.11:b", 0)], 0)
    history, others = with_code(history, "3.11:c", 4)
    assert (history, others) == ([("3.11:b", 0), ("3.11:c", 4)], 4)
    history, others = with_code(history, "3.11:b", 4)  # back again
    assert (history, others) == ([("3.11:b", 0)], 0)
    history, others = with_code(history, "3.12:b", 6)
    assert (history, others) == ([("3.11:b", 0), ("3.12:b", 6)], 0)
    history, others = with_code(history, "3.11:c", 7)
    assert (history[-1], others) == (("3.11:c", 7), 6)
    assert with_code([], "3.11:a", 12) == ([("3.11:a", 12)], 0)  # results from elsewhere


@pytest.mark.filterwarnings("default")
def test_a_changed_objective_is_reported_each_time(tmp_path: Path) -> None:
    storage = tmp_path / "a.journal"

    def search(value: float, lrs: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            text = f"def objective(trial):\n    return {value}  # {lrs}"
            tune(made(text), method="grid", lr=range(1, lrs + 1), storage=storage)
        return [str(warning.message).partition(". ")[0] for warning in caught]

    says = f" results in {storage} are of earlier code of made:objective"
    assert search(1, lrs=2) == search(1, lrs=3) == []
    assert search(2, lrs=3) == [f"3 of 3{says}"]  # it gives no result
    assert search(1, lrs=3) == []
    assert search(2, lrs=5) == [f"3 of 3{says}"]
    assert search(3, lrs=5) == [f"5 of 5{says}"]
    assert search(2, lrs=6) == [f"3 of 5{says}"]


def test_the_command_says_it_in_a_line(
    typed: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Warnings of others are shown as Python does."""
    (tmp_path / "edited.py").write_text("def objective(trial):\n    return trial.lr\n")
    assert typed("edited:objective")[0] == 0
    changed = "import warnings\ndef objective(trial):\n    warnings.warn('mine')\n    return 2 * trial.lr\n"
    (tmp_path / "edited.py").write_text(changed)
    words = ["tune", "edited:objective", "--lr", "1,2,3", "--method", "grid"]
    done = subprocess.run(
        [sys.executable, "-m", "avagrad", *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    journal = tmp_path / "runs" / "edited-objective.journal"
    lines = done.stderr.splitlines()
    assert lines[0] == (
        f"warning: 2 of 2 results in {journal} are of earlier code of edited:objective. They are kept and used: to "
        "start anew, name another storage, or in a database another name."
    )
    assert f"{tmp_path / 'edited.py'}:3: UserWarning: mine" in lines
    assert "tuning.py" not in done.stderr


def test_a_study_knows_its_code(tmp_path: Path) -> None:
    study = Study(tmp_path / "a.journal", "a", direction="minimize")
    assert study.note_code("3.11:a") == (0, 0)
    assert study.note_code("3.11:b") == (0, 0)
