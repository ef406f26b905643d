"""Whatever is killed, whenever: every point is finished once, and none is missing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from objectives import bowl
from optuna.trial import TrialState
from servers import postgres
from waiting import are_dead, until

from avagrad.tune import tune
from avagrad.tune.storage import StorageError
from avagrad.tune.study import Study

SCRIPT = Path(__file__).with_name("killed.py")


@pytest.fixture(params=["journal", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "journal":
        yield str(tmp_path / "killed.journal")
    else:
        with postgres(tmp_path) as url:
            yield url


def children(pid: int) -> list[int]:
    """Return the workers of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def finished(storage: str) -> list[str]:
    study = Study(storage, "killed", create=False)
    try:
        return [trial.user_attrs["key"] for trial in study.trials() if trial.state == TrialState.COMPLETE]
    finally:
        study.close()


@pytest.mark.slow
def test_twenty_kills(storage: str, tmp_path: Path) -> None:
    """A worker or all of it, at random moments; the same command ends with the 60 points, each finished once."""
    dice = random.Random(0)
    all_killed = tmp_path / "all killed"
    command = [sys.executable, str(SCRIPT), storage, str(all_killed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    kills, workers, mains = 0, 0, 0
    try:
        while kills < 20:
            time.sleep(dice.uniform(0.2, 1.2))
            assert run.poll() is None
            victims = children(run.pid)
            if mains < 6 and (dice.random() < 0.3 or not victims):
                run.kill()
                run.wait()
                mains += 1
                until(partial(are_dead, victims))  # none outlives the one who has started it
                run = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            elif victims:
                try:
                    os.kill(dice.choice(victims), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                workers += 1
            else:
                continue
            kills += 1
        all_killed.touch()
        assert run.wait() == 0
    finally:
        run.kill()
        run.wait()
    done = finished(storage)
    assert len(done) == len(set(done)) == 60
    print(f"{workers} workers and {mains} times all of it were killed")
    assert kills == 20


LINES = """
import sys, time
from avagrad.tune import tune
from objectives import bowl

def objective(trial):
    time.sleep(0.1)
    return bowl(trial)

tune(objective, optimizer="avastep", storage=sys.argv[1], name="killed", about={}, workers=2)
"""


@pytest.mark.slow
def test_a_search_by_lines_ends_as_if_nothing_had_been_killed(storage: str, tmp_path: Path) -> None:
    whole = tune(bowl, optimizer="avastep", storage=tmp_path / "whole.journal")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    for enough in (3, 7, 11, None):
        process = subprocess.Popen([sys.executable, "-c", LINES, storage], env=environment, start_new_session=True)
        if enough is None:
            assert process.wait() == 0
        else:
            until(lambda enough=enough: has_finished(storage, enough))  # type: ignore[misc]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    keys = finished(storage)
    assert sorted(keys) == sorted(record.point.key for record in whole.trials)
    with pytest.warns(UserWarning, match="are of earlier code of killed"):
        again = tune(bowl, optimizer="avastep", storage=storage, name="killed", about={})
    assert (again.best, again.path, again.extended, again.new) == (whole.best, whole.path, whole.extended, 0)


def has_finished(storage: str, count: int) -> bool:
    try:
        return len(finished(storage)) >= count
    except (StorageError, ValueError):  # it has not been made yet
        return False
