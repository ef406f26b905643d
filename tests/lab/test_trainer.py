"""The training run: the same numbers however often it is killed, and a folder that is never overwritten."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import SMALL_CHARS, StopAt, assert_same, text, timeless

import avagrad
from avagrad.files import write_atomic
from avagrad.lab.command import resume_run
from avagrad.lab.config import Config, configure
from avagrad.lab.folder import RunFolder, read_metrics
from avagrad.lab.methods import METHODS
from avagrad.lab.run import Callback
from avagrad.lab.tasks import task_class
from avagrad.lab.train import Stopped, train

__all__ = ["text"]  # a fixture


def small(task: str, optimizer: str = "avagrad", text: str | None = None, **settings: Any) -> Config:
    settings = {"epochs": 2, "threads": 1} | settings
    if task == "chars":
        return configure(task, optimizer, data=text, task_options=SMALL_CHARS, **settings)
    return configure(task, optimizer, **settings)


# --- going on to the same numbers ---


@pytest.mark.parametrize("optimizer", METHODS)
def test_a_run_that_is_stopped_continues_to_the_same_numbers(tmp_path: Path, optimizer: str) -> None:
    """Stopped inside an epoch and at its end; for every method."""
    config = small("digits", optimizer)
    train(config, tmp_path / "whole")
    callback = StopAt(4, 15, 22)
    for _ in range(3):
        with pytest.raises(Stopped) as stopped:
            train(config, tmp_path / "parts", resume=True, callback=callback)
        assert stopped.value.exit_code == 128 + signal.SIGTERM
    train(config, tmp_path / "parts", resume=True, callback=callback)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_carried_state_and_the_masks_continue(tmp_path: Path, text: str) -> None:
    config = small("chars", "adam", text)
    train(config, tmp_path / "whole")
    callback = StopAt(1, 7, 30)
    for _ in range(3):
        with pytest.raises(Stopped):
            train(config, tmp_path / "parts", resume=True, callback=callback)
    train(config, tmp_path / "parts", resume=True, callback=callback)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "avagrad.lab.train", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_killed_ten_times_it_ends_with_the_same_result(tmp_path: Path, text: str) -> None:
    """SIGKILL, at random moments: while it imports, trains, evaluates, writes."""
    seed = os.getpid()
    print(f"seed {seed}")  # shown if it fails
    options = [f"--option={name}={value}" for name, value in SMALL_CHARS.items()]
    run = ("chars", "--data", text, "--epochs", "60", "--threads", "1", "--save-every", "0.01", *options)
    subprocess.run(command(*run, "--out", str(tmp_path / "whole")), env=environment(), check=True, capture_output=True)
    parts, rng = tmp_path / "parts", random.Random(seed)
    positions = []
    for i in range(10):
        with subprocess.Popen(
            command(*run, "--out", str(parts), "--resume"),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            if i not in (0, 5):  # these two are killed while they start
                next(line for line in process.stderr if line.startswith(b"epoch"))
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
        if (parts / "checkpoint.pt").exists():
            positions.append(torch.load(parts / "checkpoint.pt", weights_only=True)["step"])
    assert positions == sorted(positions)
    assert len(set(positions)) > 2, f"{positions}: hardly any kill hit the training"
    subprocess.run(command(*run, "--out", str(parts), "--resume"), env=environment(), check=True, capture_output=True)
    assert_same(tmp_path / "whole", parts)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_the_process(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "run"
    run = command("digits", "--epochs", "100000", "--out", str(out), "--save-every", "1e9")
    process = subprocess.Popen(run, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:  # the third epoch has ended: it trains
        if line.startswith("epoch 3 "):
            break
    assert not (out / "checkpoint.pt").exists()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"--out {out} --resume" in error
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] > 0
    assert not (out / "result.json").exists()


def test_a_run_in_another_thread_hears_no_signals(tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(train(small("digits"), tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0]["status"] == "finished"


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_set_for_a_run_is_as_before_after_it(tmp_path: Path, threads: int) -> None:
    def now() -> tuple[Any, ...]:
        tiny = torch.tensor([1e-310], dtype=torch.float64) * 1
        return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), torch.get_num_threads(), tiny.item()

    inside: list[tuple[Any, ...]] = []

    class Look(Callback):
        def on_step(self, done: int) -> None:
            inside.append(now())

    before = now()
    train(small("digits", epochs=1, threads=threads), tmp_path / "run", callback=Look())
    assert now() == before
    assert inside[0][0] != before[0]
    assert inside[0][2] == threads
    assert (inside[0][3] == 0) == (threads == 1)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    class Nobody(Callback):
        def on_start(self, config: Config, done: int, total: int) -> None:
            raise AssertionError("it was run again")

    first = train(small("digits"), tmp_path / "run")
    assert train(small("digits"), tmp_path / "run", resume=True, callback=Nobody()) == first


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    config = small("digits", epochs=4)
    train(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(config, tmp_path / "parts", callback=StopAt(40))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 45, "from": "the future"}\n{"st')
    train(config, tmp_path / "parts", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_number_of_threads_is_the_first_ones(tmp_path: Path) -> None:
    seen: list[int] = []

    class Count(StopAt):
        def on_step(self, done: int) -> None:
            seen.append(torch.get_num_threads())
            super().on_step(done)

    with pytest.raises(Stopped):
        train(small("digits", threads=2), tmp_path / "run", callback=Count(1))
    with pytest.raises(ValueError, match="threads is 2 there and 1 here"):
        train(small("digits", threads=1), tmp_path / "run", resume=True)
    train(configure("digits", epochs=2), tmp_path / "run", resume=True, callback=Count())
    assert set(seen) == {2}


def test_another_seed_gives_other_numbers_and_the_same_one_the_same(tmp_path: Path, text: str) -> None:
    for task in ("digits", "chars"):
        results = [
            timeless(train(small(task, "adam", text, seed=seed), tmp_path / f"{task}{i}"))
            for i, seed in enumerate((0, 0, 1))
        ]
        assert results[0] == results[1] != results[2]


# --- the loop does what it says ---


def test_it_is_the_plain_loop(tmp_path: Path) -> None:
    """The same weights as a loop that is written out here: schedule, clipping, decay, batches."""
    config = small("digits", "avagrad", epochs=3, milestones=(1, 2), factor=0.5, clip=0.5, lr=0.7, weight_decay=1e-3)
    train(config, tmp_path / "run")
    task = task_class("digits")(**config.task_options)
    model = task.new_model()
    assert config.eps is not None
    optimizer = avagrad.AvaGrad(model.parameters(), lr=0.7, eps=config.eps, betas=(0.9, 0.999), weight_decay=1e-3)
    for epoch, lr in enumerate((0.7, 0.35, 0.175)):
        optimizer.param_groups[0]["lr"] = lr
        order = task.order(epoch)
        for index in range(task.steps_per_epoch):
            images, labels = task.batch(order, index)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state["model"][name]), name
    model.eval()
    with torch.no_grad():
        score = task.evaluate(model, "test")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"] == score._asdict()
    assert [row["lr"] for row in read_metrics(tmp_path / "run")] == [0.7, 0.35, 0.175]


@pytest.mark.parametrize("optimizer", ["avagrad", "avastep"])
def test_what_a_run_leaves_behind(tmp_path: Path, optimizer: str) -> None:
    result = train(small("digits", optimizer, epochs=3), tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint.pt", "config.json", "metrics.jsonl", "result.json"]
    rows = read_metrics(tmp_path / "run")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(row.keys() >= {"step", "epoch", "loss", "error", "lr", "gamma", "seconds"} for row in rows)
    assert all(row["gamma"] > 0 for row in rows)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert Config.from_json(written["config"]) == small("digits", optimizer, epochs=3)
    assert written["about"]["versions"]["torch"] == torch.__version__
    assert written["config"]["sources"]["epochs"] == "given"
    assert written["config"]["sources"]["lr"] == "ours"
    assert result["best"]["error"] == min(row["error"] for row in rows)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["about"]["commit"] == written["about"]["commit"]
    assert Config.from_json(state["config"]) == Config.from_json(written["config"])


def test_gamma_is_empty_where_there_is_none(tmp_path: Path) -> None:
    train(small("digits", "adam", epochs=1), tmp_path / "run")
    assert read_metrics(tmp_path / "run")[0]["gamma"] is None


# --- divergence is a result ---


def test_a_run_that_diverges_says_when(tmp_path: Path) -> None:
    result = train(small("digits", "sgd", lr=1e30), tmp_path / "run")
    assert (result["status"], result["test"], result["validation"]) == ("diverged", None, None)
    assert result["diverged_at"] == result["steps"] == 2
    last = read_metrics(tmp_path / "run")[-1]
    assert (last["diverged"], last["step"], last["loss"]) == (True, 2, None)
    assert train(small("digits", "sgd", lr=1e30), tmp_path / "run", resume=True) == result


def test_a_model_that_only_evaluates_to_nan_has_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = task_class("digits")
    evaluate = cls.evaluate
    monkeypatch.setattr(cls, "evaluate", lambda *args: evaluate(*args)._replace(loss=math.nan))
    result = train(small("digits"), tmp_path / "run")
    assert (result["status"], result["diverged_at"]) == ("diverged", 15)


def test_a_test_loss_that_is_not_finite_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = task_class("digits")
    evaluate = cls.evaluate

    def bad_test(task: Any, model: Any, part: str) -> Any:
        score = evaluate(task, model, part)
        return score._replace(loss=math.inf) if part == "test" else score

    monkeypatch.setattr(cls, "evaluate", bad_test)
    assert train(small("digits"), tmp_path / "run")["status"] == "diverged"


# --- signals that come twice, or late ---


def test_a_second_signal_does_not_end_the_process_while_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunFolder.save

    def slow(folder: RunFolder, state: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        save(folder, state)

    monkeypatch.setattr(RunFolder, "save", slow)
    with pytest.raises(Stopped):
        train(small("digits"), tmp_path / "run", callback=StopAt(3))
    assert (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_signal_that_comes_too_late_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        assert train(small("digits", epochs=1), tmp_path / "run", callback=StopAt(16))["status"] == "finished"
        assert heard == []
        write = RunFolder.write_result

        def signalled(folder: RunFolder, result: dict[str, Any]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            write(folder, result)

        monkeypatch.setattr(RunFolder, "write_result", signalled)
        assert train(small("digits", epochs=1), tmp_path / "late")["status"] == "finished"
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = small("digits", epochs=1)
        assert train(config, tmp_path / "run", callback=StopAt(3, number=signal.SIGINT))["status"] == "finished"
    finally:
        signal.signal(signal.SIGINT, before)


# --- the folder is never overwritten ---


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, config: Config, error: type[Exception], *says: str, resume: bool = False) -> None:
    before = contents(folder)
    with pytest.raises(error) as caught:
        train(config, folder, resume=resume)
    assert contents(folder) == before
    for words in says:
        assert words in str(caught.value)


def test_another_run_is_never_overwritten(tmp_path: Path) -> None:
    train(small("digits", seed=1), tmp_path / "run")
    refused(tmp_path / "run", small("digits", seed=1), FileExistsError, "already contains", "resume")
    refused(
        tmp_path / "run",
        small("digits", "adam", seed=2),
        ValueError,
        "contains another run",
        "seed is 1 there and 2 here",
        "optimizer is 'avagrad' there and 'adam' here",
        resume=True,
    )


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused(tmp_path, small("digits"), FileExistsError, "thesis.tex")
    refused(tmp_path, small("digits"), FileExistsError, "thesis.tex", "not a run's folder", resume=True)
    file = tmp_path / "thesis.tex"
    with pytest.raises(FileExistsError, match="cannot be created"):
        train(small("digits"), file)
    assert file.read_text() == "years of work"


def test_other_data_are_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(Stopped):
        train(small("chars", "adam", text), tmp_path / "run", callback=StopAt(3))
    moved = tmp_path / "moved.txt"
    moved.write_bytes(Path(text).read_bytes())
    with pytest.raises(Stopped):  # moved data are the same data
        train(small("chars", "adam", str(moved)), tmp_path / "run", resume=True, callback=StopAt(6))
    moved.write_text(moved.read_text().replace("cat", "cow"))
    refused(tmp_path / "run", small("chars", "adam", str(moved)), ValueError, "other data", resume=True)
    train(small("chars", "adam", text), tmp_path / "run", resume=True)  # a finished run, too, is one on its own data
    refused(tmp_path / "run", small("chars", "adam", str(moved)), ValueError, "other data", resume=True)
    moved.write_text(Path(text).read_text().translate(str.maketrans("abcdefghijklmno", "ABCDEFGHIJKLMNO")))
    refused(tmp_path / "run", small("chars", "adam", str(moved)), ValueError, "other data", resume=True)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with RunFolder.claim(tmp_path / "run", {}, {}), pytest.raises(BlockingIOError, match="another process"):
        train(small("digits"), tmp_path / "run", resume=True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"config": 3}', b"\xff"])
def test_a_broken_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, small("digits"), ValueError, "config.json", resume=True)


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(small("digits"), tmp_path / "run", callback=StopAt(3))
    path = tmp_path / "run" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    refused(tmp_path / "run", small("digits"), ValueError, "checkpoint.pt", "cannot be read", resume=True)


def test_metrics_that_were_cut_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(small("digits"), tmp_path / "run", callback=StopAt(20))
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    refused(tmp_path / "run", small("digits"), ValueError, "metrics.jsonl", "shorter", resume=True)


@pytest.mark.parametrize(
    ("name", "content"), [("result.json", "{}"), ("config.json", '{"config": {}}'), ("checkpoint.pt", None)]
)
def test_a_folder_that_was_tampered_with_is_rejected(tmp_path: Path, name: str, content: str | None) -> None:
    with pytest.raises(Stopped):
        train(small("digits"), tmp_path / "run", callback=StopAt(3))
    if content is None:
        torch.save({"metrics_bytes": 0, "about": {}}, tmp_path / "run" / name)
    else:
        (tmp_path / "run" / name).write_text(content)
    refused(tmp_path / "run", small("digits"), ValueError, str(tmp_path / "run"), resume=True)


def test_a_checkpoint_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(small("digits"), tmp_path / "run", callback=StopAt(3))
    torch.save({"metrics_bytes": 0, "about": {}}, tmp_path / "run" / "checkpoint.pt")
    says = ("is of another run or of another version", "to start the run again from its beginning, remove it")
    refused(tmp_path / "run", small("digits"), ValueError, *says, resume=True)
    (tmp_path / "run" / "checkpoint.pt").unlink()
    assert train(small("digits"), tmp_path / "run", resume=True)["status"] == "finished"


def test_an_option_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(small("digits"), tmp_path / "run", callback=StopAt(3))
    config = tmp_path / "run" / "config.json"
    written = json.loads(config.read_text())
    written["config"]["task_options"]["hidden"] = 7
    config.write_text(json.dumps(written))
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match="digits: an option is 'hidden', which is not known"):
        resume_run(tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_a_start_that_fails_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_class("digits"), "build", lambda task: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(small("digits"), tmp_path / "run")
    assert contents(tmp_path / "run") == {}
    monkeypatch.undo()
    assert train(small("digits"), tmp_path / "run")["status"] == "finished"


def test_a_change_of_versions_is_remarked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no checkpoint yet."""
    config = small("digits", epochs=1)
    with pytest.raises(Stopped):
        train(config, tmp_path / "run", callback=StopAt(3))
    (tmp_path / "run" / "checkpoint.pt").unlink()
    monkeypatch.setattr(avagrad, "__version__", "9.9")
    remarks = train(config, tmp_path / "run", resume=True)["remarks"]
    assert len(remarks) == 1
    assert "from step 0 on it ran with" in remarks[0]
    assert "9.9" in remarks[0]


def test_a_checkpoint_of_several_processes_continues_in_one(tmp_path: Path) -> None:
    """Earlier versions wrote such checkpoints: loss_sums has a sum for each process."""
    config = small("digits", epochs=2)
    whole = train(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(config, tmp_path / "run", callback=StopAt(20))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    (own,) = state["loss_sums"]
    torch.save(state | {"loss_sums": [own - 1, own + 1]}, tmp_path / "run" / "checkpoint.pt")
    result = train(config, tmp_path / "run", resume=True)
    assert result["remarks"] == ["from step 20 on it ran in one process instead of 2."]
    assert result["loss"] == pytest.approx(whole["loss"])
    assert result["test"] == whole["test"]


def test_lines_that_nobody_reads_do_not_stop_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command("digits", "--epochs", "3", "--out", str(out)), env=environment(), stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert (out / "result.json").exists()


def test_what_a_kill_leaves_at_the_very_start_is_no_run(tmp_path: Path) -> None:
    (tmp_path / ".config.json.new").write_text("{")
    assert train(small("digits", epochs=1), tmp_path)["status"] == "finished"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, lambda file: file.write(b"old"))

    def fail(file: Any) -> None:
        file.write(b"new")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_atomic(path, fail)
    assert contents(tmp_path) == {"file": b"old"}


def test_a_checkpoint_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    noted("fsync")
    noted("replace")
    RunFolder(tmp_path).save({"step": 1})
    assert calls == ["fsync", "replace", "fsync"]


# --- what is asked for ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "adamm"}, "optimizer is 'adamm', which is not known; did you mean 'adam'?"),
        ({"preset": "papper"}, "preset is 'papper', which is not known"),
        ({"epochs": 0}, "epochs is 0, but must be a whole number of at least 1"),
        ({"lr": -1.0}, "lr is -1.0, but must be"),
        ({"lr": math.nan}, "lr is nan, but must be"),
        ({"eps": 0.0}, "eps is 0.0, but must be"),
        ({"optimizer": "sgd", "eps": 0.1}, "eps is 0.1, but sgd has no eps"),
        ({"milestones": (3, 2)}, "milestones is (3, 2), but must be epochs in ascending order"),
        ({"factor": 0.0}, "factor is 0.0, but must be"),
        ({"clip": -1.0}, "clip is -1.0, but must be"),
        ({"seed": -1}, "seed is -1, but must be"),
        ({"threads": 0}, "threads is 0, but must be"),
        ({"device": "gpu"}, "device is 'gpu', which torch cannot use here"),
        ({"epoch": 3}, "a setting of a run is 'epoch', which is not known; did you mean 'epochs'?"),
        ({"task_options": {"modell": "conv"}}, "an option is 'modell', which is not known; did you mean 'model'?"),
        ({"task_options": {"batch_size": 1.5}}, "batch_size is 1.5, but must be a whole number"),
        ({"task_options": {"batch_size": 0}}, "batch_size is 0, but must be at least 1"),
        ({"task_options": {"full": 1}}, "full is 1, but must be true or false"),
        ({"optimizer_options": {"nrom": 1}}, "an optimizer option is 'nrom', which is not known; did you mean 'norm'?"),
        ({"optimizer": "amsgrad", "optimizer_options": {"amsgrad": False}}, "amsgrad is fixed at True"),
        ({"optimizer": "sgd", "optimizer_options": {"maximize": "no"}}, "maximize is 'no', but must be true or false"),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": math.inf}}, "momentum is inf, but must be a finite"),
        (
            {"optimizer": "adam", "optimizer_options": {"betas": (0.9,)}},
            "betas is (0.9,), but must be 2 finite",
        ),
        ({"optimizer_options": {"betas": 0.9}}, "betas is 0.9, but must be 2 finite numbers, as [0.9, 0.999]"),
        ({"optimizer_options": {"norm": 2.5}}, "norm is 2.5, but must be a whole number"),
        ({"optimizer_options": {"lr": 7}}, "lr is given as an option of the optimizer, but must be a separate setting"),
        ({"optimizer_options": {"capturable": True}}, "but is set by the trainer"),
        ({"optimizer": "adam", "eps": math.inf}, "eps is inf, but must be a finite number of at least 0"),
        ({"lr": 10**400}, "but must be a finite number of at least 0"),
        ({"milestones": 5}, "milestones is 5, but must be epochs in ascending order"),
        ({"threads": 10**9}, "but must be a whole number from 1 to 4096"),
        ({"device": "meta"}, "device is 'meta', which torch cannot use here"),
        ({"precision": "bf16"}, "precision is 'bf16', but must be float32 on a device other than CUDA"),
        ({"precision": "half"}, "precision is 'half', but must be one of float32, tf32, bf16"),
        ({"graph": True}, "graph is True, but must be False on a device other than CUDA"),
    ],
)
def test_bad_settings_are_answered_with_a_sentence(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (what it says is looked at below)
        configure("digits", **settings)
    assert says in str(caught.value)


def test_lists_are_as_good_as_tuples() -> None:
    config = configure("digits", "adam", milestones=[1, 2], optimizer_options={"betas": [0.8, 0.9]})
    assert Config.from_json(config.as_json()) == config


def test_a_task_has_the_name_of_its_class() -> None:
    class Mine(task_class("digits")):  # type: ignore[misc]
        pass

    assert (Mine.name, task_class("digits").name) == ("mine", "digits")


@pytest.mark.parametrize(("options", "says"), [({"data": "x"}, "data is 'x'"), ({"download": True}, "download")])
def test_digits_need_no_data(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"digits: {says}.* come with scikit-learn"):
        task_class("digits")(**options)


OWN_TASK = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from torch import nn
from avagrad.lab.tasks.base import Score, Task, digest, stream

@dataclass(kw_only=True)
class Line(Task):
    name: ClassVar[str] = "line"
    measure: ClassVar[str] = "mean squared error"
    unit: ClassVar[str] = ""
    slope: float = 2.0

    def __post_init__(self):
        self.x = torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    steps_per_epoch = property(lambda self: len(self.x) // self.batch_size)
    def fingerprint(self): return digest([self.x])
    def build(self): return nn.Linear(1, 1)
    def order(self, epoch):
        return torch.randperm(256, generator=torch.Generator().manual_seed(stream(self.seed, epoch)))
    def batch(self, order, i): return (self.x[order[i * self.batch_size : (i + 1) * self.batch_size]],)
    def loss(self, model, batch, carry, noise):
        x = batch[0] + 0.01 * torch.rand_like(batch[0]) + 0.01 * float(__import__("numpy").random.rand())
        return (model(x) - self.slope * x).square().mean(), carry
    def evaluate(self, model, part):
        loss = (model(self.x) - self.slope * self.x).square().mean().item()
        return Score(loss, loss)
"""


def test_a_task_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path. It may use the global generators of torch and numpy, and goes on to the same numbers even so."""
    (tmp_path / "own_tasks.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    config = configure("own_tasks:Line", "avagrad", lr=0.5, eps=0.1, epochs=20, task_options={"slope": -1.0})
    assert train(config, tmp_path / "whole")["test"]["error"] < 1e-3
    with pytest.raises(Stopped):
        train(config, tmp_path / "parts", callback=StopAt(30))
    train(config, tmp_path / "parts", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    for name, says in (
        ("own_tasks:Nothing", "'own_tasks' has no 'Nothing'"),
        ("no_such_module:Line", "there is no module 'no_such_module'"),
        ("own_tasks:Score", "not a subclass of"),
    ):
        with pytest.raises(ValueError, match=says):
            configure(name, lr=1.0, eps=1.0, epochs=1)
    with pytest.raises(ValueError, match="epochs is not given, but no source has one for avagrad on own_tasks:Line"):
        configure("own_tasks:Line", lr=1.0, eps=0.1)


def test_the_task_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (Path(__file__).parents[2] / "docs" / "lab.md").read_text().split("## Your own task")[1]
    (tmp_path / "documented_task.py").write_text(section.split("```python")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = configure("documented_task:Sine", "avagrad", lr=1.0, eps=0.1, epochs=10, task_options={"hidden": 64})
    result = train(config, tmp_path / "run")
    assert result["test"]["error"] < 0.1
    assert result["measure"] == "error"


def test_options_of_a_task_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = OWN_TASK.replace(
        "slope: float = 2.0", "slope: float = 2.0\n    sizes: tuple = (1, 2)\n    extra: object = None"
    )
    (tmp_path / "own_options.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    hyper: dict[str, Any] = {"lr": 0.5, "eps": 0.1, "epochs": 2}
    config = configure("own_options:Line", **hyper, task_options={"sizes": [3], "extra": [1, 2]})
    assert (config.task_options["sizes"], config.task_options["extra"]) == ((3,), (1, 2))
    assert Config.from_json(json.loads(json.dumps(config.as_json()))) == config
    with pytest.raises(ValueError, match=r"line: sizes is 3, but must be a list, as its default \(1, 2\) is"):
        configure("own_options:Line", **hyper, task_options={"sizes": 3})
    (tmp_path / "own_lists.py").write_text(
        code.replace("import dataclass", "import dataclass, field").replace(
            "object = None", "list = field(default_factory=list)"
        )
    )
    allowed = "but must be a finite number, a string, a tuple or None"
    with pytest.raises(ValueError, match=f"line: the default of extra is .*, {allowed}"):
        configure("own_lists:Line", **hyper)
    (tmp_path / "own_infinity.py").write_text(code.replace("object = None", "float = float('inf')"))
    with pytest.raises(ValueError, match=f"line: the default of extra is inf, {allowed}"):
        configure("own_infinity:Line", **hyper)


def test_what_no_source_gives_is_asked_for() -> None:
    for name, lacks in (("adabound", "eps"), ("adamw", "eps"), ("delayed-adam", "eps")):
        with pytest.raises(ValueError, match=rf"{lacks} is not given, but no source .* for {name} on chars .* pass it"):
            configure("chars", name, preset="paper")
    given = configure("chars", "adabound", preset="paper", lr=0.001, eps=1e-8, data="ptb")
    assert (given.sources["lr"], given.sources["hidden"], given.sources["final_lr"]) == ("given", "paper", "paper")


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("chars", r"data is not given, but the preset 'paper' .* ptb\.char\.train\.txt.*http.*--download"),
        ("cifar", r"cifar.*data.*https://www\.cs\.toronto\.edu/~kriz/cifar\.html"),
        ("imagenet", r"imagenet: data is not given.*train/CLASS.*https://image-net\.org"),
    ],
)
def test_the_papers_presets_ask_for_its_data(tmp_path: Path, task: str, says: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        train(configure(task, "adam", preset="paper"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_method_has_settings_for_the_quick_tasks() -> None:
    for name in METHODS:
        for task in ("digits", "chars"):
            assert configure(task, name).lr > 0


@pytest.mark.parametrize("arguments", [("digits", "--epochs", "1"), ("digits", "--optimizer", "nosuch"), ("digitz",)])
def test_the_plain_command_needs_neither_typer_nor_rich(tmp_path: Path, arguments: Sequence[str]) -> None:
    script = (
        "import sys\n"
        "for name in ('typer', 'rich', 'optuna', 'matplotlib', 'ray'):\n"
        "    sys.modules[name] = None\n"
        "from avagrad.lab.command import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if arguments[-1] == "1":
        assert done.returncode == 0, done.stderr
        assert "test error" in done.stdout
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "is not known" in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "result.json"])
def test_a_full_disk_names_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = RunFolder(tmp_path), Path.open

    def full(self: Path, *arguments: Any) -> Any:
        written = name if name == "metrics.jsonl" else f".{name}.new"
        return opened(Path("/dev/full"), "wb", 0) if self.name == written else opened(self, *arguments)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / name}'"):
        {
            "metrics.jsonl": lambda: folder.append({"step": 1}),
            "checkpoint.pt": lambda: folder.save({"step": 1}),
            "result.json": lambda: folder.write_result({"status": "finished"}),
        }[name]()
