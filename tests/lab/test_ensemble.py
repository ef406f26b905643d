"""The ensemble: every member is the trainer's run with its settings and seed, whatever the others do."""

import dataclasses
import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import SMALL_CHARS, StopAt, text, timeless
from torch import Tensor, nn
from waiting import until

from avagrad.lab.command import resume_run
from avagrad.lab.config import Config, configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.ensemble.__main__ import main
from avagrad.lab.ensemble.stack import Stack
from avagrad.lab.environment import seeded
from avagrad.lab.folder import read_metrics
from avagrad.lab.methods import METHODS
from avagrad.lab.models.small import SmallConv
from avagrad.lab.run import Callback
from avagrad.lab.tasks import task_class
from avagrad.lab.tasks.chars import Chars
from avagrad.lab.tasks.cifar import Cifar
from avagrad.lab.tasks.digits import Digits
from avagrad.lab.train import Stopped, train
from avagrad.tune.records import Record, read_records
from avagrad.tune.space import Point

__all__ = ["text"]  # a fixture

Points = Sequence[tuple[float, float | None]]
GRID: Points = ((0.01, 0.01), (0.3, 0.1), (0.001, 1e-6), (1e300, 1e-3))


@dataclass(kw_only=True)
class Digits64(Digits):
    """The digits, in double precision: what differs in the last digits does not grow to something that is seen."""

    dtype: torch.dtype = torch.float64


@dataclass(kw_only=True)
class Chars64(Chars):
    dtype: torch.dtype = torch.float64


@dataclass(kw_only=True)
class Cifar64(Cifar):
    dtype: torch.dtype = torch.float64


@pytest.fixture
def images(tmp_path: Path) -> str:
    """A few images that can be told apart, as CIFAR's binary files."""
    generator = torch.Generator().manual_seed(0)
    for name, count in (*((f"data_batch_{i}", 12) for i in range(1, 6)), ("test_batch", 20)):
        labels = torch.randint(10, (count, 1), generator=generator)
        pixels = torch.randint(100, (count, 3072), generator=generator) + 15 * labels
        (tmp_path / f"{name}.bin").write_bytes(torch.cat([labels, pixels], 1).to(torch.uint8).numpy().tobytes())
    return str(tmp_path)


def configs(task: str, optimizer: str, points: Points, **settings: Any) -> list[Config]:
    defaults: dict[str, Any] = {"epochs": 4, "milestones": (2,), "factor": 0.3, "weight_decay": 1e-3, "threads": 1}
    has_eps = METHODS[optimizer].has_eps
    return [
        configure(f"test_ensemble:{task}", optimizer, lr=lr, eps=eps if has_eps else None, **defaults | settings)
        for lr, eps in points
    ]


def trained(members: list[Config], **options: Any) -> tuple[Stack, Tensor]:
    """Train as the ensemble does, without a folder; return the losses of the last epoch, too."""
    one = members[0]
    task = task_class(one.task)(**one.task_options, data=one.data, seed=one.seed)
    stack = Stack(task, members, seeded(one.seed, "cpu"), **options)
    for epoch in range(one.epochs):
        stack.begin(epoch)
        order = task.order(epoch)
        for i in range(task.steps_per_epoch):
            stack.set_lr(epoch, i)
            stack.step(task.batch(order, i))
        losses = stack.losses.means()
    return stack, losses


def assert_is_the_trainers(stack: Stack, losses: Tensor, members: list[Config], folder: Path) -> None:
    weights = stack.w | stack.buffers
    validation, errors = stack.scores("validation")
    tests = stack.scores("test")[1]
    for i, config in enumerate(members):
        result = train(config, folder / f"{config.optimizer}-{i}")
        assert int(stack.first_bad[i]) == (result["diverged_at"] or 0), config
        if result["status"] == "diverged":
            continue
        state = torch.load(folder / f"{config.optimizer}-{i}" / "checkpoint.pt", weights_only=True)["model"]
        assert {f"model.{name}" for name in state} == weights.keys()
        for name, there in state.items():
            here = weights[f"model.{name}"][i]
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9 * float(there.abs().max()), msg=name)
        assert float(losses[i]) == pytest.approx(result["loss"], rel=1e-6)  # which the trainer rounds to 32 bits
        assert float(validation[i]) == pytest.approx(result["validation"]["loss"], rel=1e-9)
        assert float(errors[i]) == pytest.approx(result["validation"]["error"], rel=1e-9)
        assert float(tests[i]) == pytest.approx(result["test"]["error"], rel=1e-9)


# --- every member is the trainer's run ---


@pytest.mark.filterwarnings("ignore:.* lr \\* weight_decay is 1e")  # of the one that diverges
@pytest.mark.parametrize("optimizer", METHODS)
def test_every_method_is_the_trainers_over_sixty_steps(tmp_path: Path, optimizer: str) -> None:
    """Four points at once, one of which diverges; lr drops on the way."""
    members = configs("Digits64", optimizer, GRID)
    stack, losses = trained(members)
    assert_is_the_trainers(stack, losses, members, tmp_path)
    assert optimizer == "adabound" or stack.first_bad[3] > 0  # whose bounds hold even that


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("avagrad", {"norm": 1}),
        ("avagrad", {"active_only": True}),
        ("avagradw", {"active_only": True, "norm": 1}),
        ("avagrad", {"bias_correction": False, "betas": (0.8, 0.99)}),
        ("delayed-adam", {"active_only": True, "bias_correction": False}),
        ("delayed-adam", {"clip_update": 0.5}),
        ("avastep", {"norm": 1, "clip_update": None}),
        ("avastep", {"clip_moment": 4.0, "decoupled_weight_decay": False}),
        ("adopt", {"decoupled_weight_decay": True}),
        ("sgd", {"nesterov": True, "momentum": 0.5}),
        ("sgd", {"momentum": 0.0}),
        ("adamw", {"amsgrad": True}),
        ("adabound", {"amsbound": True, "gamma": 0.1}),
        ("adashift", {"keep": 3}),
    ],
)
def test_every_form_is_the_trainers(tmp_path: Path, optimizer: str, options: dict[str, Any]) -> None:
    members = configs("Digits64", optimizer, GRID[:3], optimizer_options=options, epochs=2, milestones=(1,))
    assert_is_the_trainers(*trained(members), members, tmp_path)


def test_a_cosine_with_a_warm_up_is_the_trainers(tmp_path: Path) -> None:
    members = configs("Digits64", "avastep", GRID[:3], schedule="cosine", warmup=20, epochs=3)
    assert_is_the_trainers(*trained(members), members, tmp_path)
    lines = list(read_metrics(tmp_path / "avastep-0"))
    per_epoch = lines[0]["step"]
    assert per_epoch < 20 < lines[1]["step"]
    assert lines[0]["lr"] == pytest.approx(0.01 * per_epoch / 20)
    share = (lines[1]["step"] - 1 - 20) / (3 * per_epoch - 20)
    assert lines[1]["lr"] == pytest.approx(0.01 * (1 + math.cos(math.pi * share)) / 2)


@pytest.mark.parametrize("optimizer", ["avagrad", "adam"])
def test_gradients_are_clipped_by_each_members_own_norm(tmp_path: Path, optimizer: str) -> None:
    members = configs("Digits64", optimizer, GRID[:3], clip=0.1, weight_decay=0.0, epochs=2, milestones=(1,))
    assert_is_the_trainers(*trained(members), members, tmp_path)


@pytest.mark.parametrize("optimizer", ["avagradw", "adashift"])
def test_weight_decay_may_differ_from_member_to_member(tmp_path: Path, optimizer: str) -> None:
    members = configs("Digits64", optimizer, GRID[:3], epochs=2, milestones=(1,))
    members = [dataclasses.replace(one, weight_decay=x) for one, x in zip(members, (0.0, 0.01, 0.1), strict=True)]
    assert_is_the_trainers(*trained(members), members, tmp_path)


@pytest.mark.parametrize("in_products", [False, True])
def test_convolutions_are_the_trainers(tmp_path: Path, in_products: bool) -> None:
    options: dict[str, Any] = {"model": "conv", "batch_size": 100}
    members = configs("Digits64", "avagrad", GRID[:2], task_options=options, epochs=1, milestones=())
    assert_is_the_trainers(*trained(members, in_products=in_products), members, tmp_path)


@pytest.mark.parametrize("in_products", [False, True])
def test_the_small_network_for_cifar_is_the_trainers(tmp_path: Path, images: str, in_products: bool) -> None:
    options = {"model": "small", "batch_size": 18}
    members = configs("Cifar64", "adam", GRID[:3], task_options=options, data=images, epochs=3)
    assert_is_the_trainers(*trained(members, in_products=in_products), members, tmp_path)


def test_the_lstm_with_its_masks_and_its_carried_state_is_the_trainers(tmp_path: Path, text: str) -> None:
    """Two layers, every kind of dropout, clipping; the last piece of the text is shorter."""
    settings: dict[str, Any] = {
        "task_options": SMALL_CHARS,
        "data": text,
        "clip": 0.25,
        "epochs": 2,
        "milestones": (1,),
    }
    members = configs("Chars64", "avagrad", ((1.0, 1e-3), (50.0, 0.1)), **settings)
    assert_is_the_trainers(*trained(members), members, tmp_path)


def test_the_small_network_has_the_layers_of_its_definition() -> None:
    convolutions = [layer for layer in SmallConv().modules() if isinstance(layer, torch.nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.stride[0]) for c in convolutions] == [
        (3, 16, 1),
        (16, 32, 2),
        (32, 64, 2),
    ]
    assert all(c.kernel_size == (3, 3) and c.bias is None for c in convolutions)


# --- divergence ---


def test_a_member_that_diverges_does_not_touch_the_others() -> None:
    """To the bit; and it stays as it was."""
    points: Points = ((0.01, 0.01), (0.3, 0.1))
    good, bad = (0.02, 0.01), (1e300, 1e-3)
    calm, _ = trained(configs("Digits64", "adam", (*points, good)))
    wild, _ = trained(configs("Digits64", "adam", (*points, bad)))
    assert wild.first_bad.tolist()[:2] == [0, 0]
    assert wild.first_bad[2] > 0
    for name, x in calm.w.items():
        assert torch.equal(x[:2], wild.w[name][:2])
    before = {name: x[2].clone() for name, x in wild.w.items()}
    wild.step(wild.task.batch(wild.task.order(0), 0))
    for name, x in before.items():
        torch.testing.assert_close(x, wild.w[name][2], rtol=0, atol=0, equal_nan=True)


def test_validation_and_test_losses_that_are_not_finite_are_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = Stack.scores

    def bad(self: Stack, part: str, at_once: int | None = None) -> tuple[Tensor, Tensor]:
        losses, errors = scores(self, part, at_once)
        losses[0 if part == "validation" else 1] = math.inf
        return losses, errors

    monkeypatch.setattr(Stack, "scores", bad)
    config = configure("digits", "sgd", epochs=2)
    records = train_ensemble(config, [(lr, None, 0) for lr in (0.01, 0.1, 0.2)], tmp_path / "x")
    assert [record.diverged_at for record in records] == [15, 30, None]


@pytest.mark.parametrize(("task", "calls"), [("digits", 5), ("chars", 1)])
def test_members_are_evaluated_together_where_that_needs_no_more_memory_than_a_step(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, task: str, calls: int
) -> None:
    measure, sizes = Stack._measure, []

    def counting(self: Stack, weights: dict[str, Tensor], buffers: dict[str, Tensor], part: str) -> Any:
        sizes.append(len(next(iter(weights.values()))))
        return measure(self, weights, buffers, part)

    monkeypatch.setattr(Stack, "_measure", counting)
    options: dict[str, Any] = {"task_options": SMALL_CHARS, "data": text} if task == "chars" else {}
    config = configure(task, "sgd", epochs=1, milestones=(), **options)
    train_ensemble(config, [(0.01 * k, None, 0) for k in range(1, 11)], tmp_path / "x", members_at_once=10)
    assert len(sizes) == 2 * calls  # the validation part after the epoch, the test part at the end
    assert sum(sizes) == 20


def test_when_all_have_diverged_it_ends(tmp_path: Path) -> None:
    config = configure("digits", "sgd", epochs=1000)
    records = train_ensemble(config, [(1e30, None, 0), (1e31, None, 0)], tmp_path / "x")
    assert [record.diverged_at for record in records] == [
        train(one, tmp_path / str(one.lr))["diverged_at"]
        for one in (dataclasses.replace(config, lr=1e30, epochs=1), dataclasses.replace(config, lr=1e31, epochs=1))
    ]


# --- the run and its folder ---

KEYS = [Point(lr, eps, seed) for seed in (0, 3) for lr in (0.01, 0.1, 1.0) for eps in (1e-8, 0.1)]


def without_seconds(records: list[Record]) -> list[Record]:
    return [dataclasses.replace(record, seconds=None) for record in records]


def test_records_are_those_of_separate_runs(tmp_path: Path) -> None:
    config = configure("digits", "avagrad", epochs=3, milestones=(2,))
    points = [*KEYS, Point(1e30, 1e-3, 0)]
    records = train_ensemble(config, points, tmp_path / "map")
    assert read_records(tmp_path / "map" / "records.jsonl") == records
    assert [record.point for record in records] == points
    for record in records[1::4]:
        single = dataclasses.replace(config, lr=record.lr or 0.0, eps=record.eps, seed=record.seed)
        result = train(single, tmp_path / record.point.key)
        assert record.value == pytest.approx(result["validation"]["error"], abs=0.7)  # two of 297 images
        assert record.facts["test"] == pytest.approx(result["test"]["error"], abs=0.7)
        assert record.facts["loss"] == pytest.approx(result["loss"], rel=1e-2)
        assert record.facts["epochs"] == 3
    assert all(record.seconds is not None and record.seconds > 0 for record in records)
    assert train_ensemble(config, points, tmp_path / "map", resume=True) == records  # nothing is run again
    rows = read_metrics(tmp_path / "map")
    assert [(row["seed"], row["epoch"]) for row in rows] == [(0, 1), (0, 2), (0, 3), (3, 1), (3, 2), (3, 3)]
    assert len(rows[0]["errors"]) == len(rows[0]["points"]) == 7


def test_a_point_without_an_lr_or_an_eps_has_the_configs(tmp_path: Path) -> None:
    config = configure("digits", "adam", lr=0.02, eps=1e-3, epochs=1)
    records = train_ensemble(config, [(None, 0.1, 0), (0.1, None, 1)], tmp_path / "x")
    assert [(record.lr, record.eps, record.seed) for record in records] == [(0.02, 0.1, 0), (0.1, 1e-3, 1)]
    with pytest.raises(Stopped):
        train_ensemble(config, [(None, 0.1, 0), (0.1, None, 1)], tmp_path / "y", callback=StopAt(10))
    resume_run(tmp_path / "y")
    assert without_seconds(read_records(tmp_path / "y" / "records.jsonl")) == without_seconds(records)


@pytest.mark.parametrize("members_at_once", [1, 4])
def test_it_does_not_matter_how_many_go_together(tmp_path: Path, members_at_once: int) -> None:
    members = configs("Digits64", "adam", [(0.01, 0.1)], epochs=2, milestones=(1,))
    together = train_ensemble(members[0], KEYS, tmp_path / "all")
    apart = train_ensemble(members[0], KEYS, tmp_path / "some", members_at_once=members_at_once)
    for one, other in zip(together, apart, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-9)
        assert one.facts == pytest.approx(other.facts, rel=1e-9)


@pytest.mark.parametrize("task", ["digits", "chars"])
def test_a_run_that_is_stopped_continues_to_the_same_numbers(tmp_path: Path, text: str, task: str) -> None:
    """Stopped inside of an epoch, at its end, and between two ensembles."""
    if task == "chars":
        config = configure(task, "avagrad", data=text, task_options=SMALL_CHARS, epochs=2, threads=1)
        points = [Point(lr, 1e-3, seed) for seed in (0, 1) for lr in (1.0, 50.0)]
    else:
        config = configure(task, "adashift", epochs=2)
        points = KEYS
    whole = train_ensemble(config, points, tmp_path / "whole", members_at_once=4)
    total = len(points) * 2 * task_class(task)(**config.task_options, data=config.data).steps_per_epoch

    class Stops(Callback):
        """Sends a signal when so many steps of all points have been taken."""

        def __init__(self) -> None:
            self.left = [8, total // 4, total // 2 + 7, 5 * total // 6]

        def on_step(self, done: int) -> None:
            if self.left and done >= self.left[0]:
                self.left.pop(0)
                os.kill(os.getpid(), signal.SIGTERM)

    callback, stops = Stops(), 0
    while True:
        try:
            parts = train_ensemble(
                config, points, tmp_path / "parts", resume=True, callback=callback, members_at_once=4
            )
            break
        except Stopped:
            stops += 1
    assert stops == 4
    assert without_seconds(parts) == without_seconds(whole)
    assert timeless(read_metrics(tmp_path / "parts")) == timeless(read_metrics(tmp_path / "whole"))


@dataclass(kw_only=True)
class DigitsWithDropout(Digits):
    """The digits, with a model that draws from the global generator."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10))


def test_dropout_continues(tmp_path: Path) -> None:
    config = configure(f"{__name__}:DigitsWithDropout", "adam", lr=0.01, eps=0.1, epochs=2, threads=1)
    whole = train_ensemble(config, KEYS[:2], tmp_path / "whole")
    with pytest.raises(Stopped):
        train_ensemble(config, KEYS[:2], tmp_path / "parts", callback=StopAt(30))
    torch.rand(7)  # another process has other generators
    parts = train_ensemble(config, KEYS[:2], tmp_path / "parts", resume=True)
    assert without_seconds(parts) == without_seconds(whole)
    assert timeless(read_metrics(tmp_path / "parts")) == timeless(read_metrics(tmp_path / "whole"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "avagrad.lab.ensemble", *arguments]


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_records(tmp_path: Path) -> None:
    """SIGKILL; and it has no need of what GPU machines often do not have."""
    run = ["digits", "--optimizer", "adam", "--lr", "0.01,0.1", "--eps", "1e-8,1e-3,0.1", "--epochs", "20"]
    run += ["--seeds", "2", "--save-every", "0.1", "--threads", "1"]
    without = "import sys; sys.modules.update(dict.fromkeys(('optuna', 'typer', 'rich', 'matplotlib', 'ray')))"
    code = f"{without}; from avagrad.lab.ensemble.__main__ import main; sys.exit(main())"
    whole = [sys.executable, "-c", code, *run, "--out", str(tmp_path / "whole")]
    done = subprocess.run(whole, check=True, capture_output=True, text=True)
    assert "best validation error" in done.stdout
    with subprocess.Popen(
        command(*run, "--out", str(tmp_path / "parts")), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it trains
        checkpoint = tmp_path / "parts" / "checkpoint.pt"
        until(lambda: checkpoint.exists() or process.poll() is not None)  # it removes it at its end
        process.kill()
    assert main([*run, "--out", str(tmp_path / "parts"), "--resume"]) == 0
    one, other = (read_records(tmp_path / name / "records.jsonl") for name in ("whole", "parts"))
    assert len(one) == 12
    assert without_seconds(one) == without_seconds(other)
    assert timeless(read_metrics(tmp_path / "parts")) == timeless(read_metrics(tmp_path / "whole"))


def test_bad_input_is_answered_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure("digits", "adam", epochs=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"points": []}, "points is empty, but must have at least one point."),
        ({"points": [(0.1, None, 0)] * 2}, "points has lr=0.1 seed=0 twice, but must have each point once."),
        ({"members_at_once": 0}, "members_at_once is 0, but must be a whole number of at least 1, or None."),
        ({"save_every": -1.0}, "save_every is -1.0, but must be a number of seconds of at least 0."),
        ({"points": [(-1.0, 0.1, 0)]}, "lr has the value -1.0, but a value must be finite and above 0."),
        ({"points": [(1.0, 0.1, -1)]}, "seed is -1, but must be a whole number of at least 0."),
    ]
    for wrong, message in cases:
        arguments: dict[str, Any] = {"points": [(0.1, 0.1, 0)], "out": tmp_path / "x"} | wrong
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            train_ensemble(config, **arguments)
    with pytest.raises(ValueError, match="task is 'imagenet', but must be one that implements scores"):
        train_ensemble(dataclasses.replace(config, task="imagenet"), [(0.1, 0.1, 0)], tmp_path / "x")
    dampened = configure("digits", "sgd", optimizer_options={"dampening": 0.5})
    with pytest.raises(ValueError, match=r"dampening is 0\.5, but must be 0 in an ensemble\."):
        train_ensemble(dampened, [(0.1, None, 0)], tmp_path / "x")
    train_ensemble(config, [(0.1, 0.1, 0)], tmp_path / "x")
    with pytest.raises(ValueError, match="which contains another run: points is"):
        train_ensemble(config, [(0.2, 0.1, 0)], tmp_path / "x", resume=True)
    assert main(["digits", "--lr", "x", "--out", str(tmp_path / "y")]) == 2
    assert "lr is 'x', but must be" in capsys.readouterr().err


# --- compiled, and on a GPU ---


@pytest.mark.slow
def test_a_compiler_can_follow_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a break, to the same numbers; the backend that emits no code is the quick one."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for optimizer, model, options in (("avagrad", "conv", {}), ("adashift", "mlp", {"keep": 2})):
        settings: dict[str, Any] = {"task_options": {"model": model}, "optimizer_options": options}
        members = configs("Digits64", optimizer, GRID, epochs=1, milestones=(), **settings)
        (one, _), (other, _) = (trained(members, in_products=True, compile=compiles) for compiles in (False, True))
        assert one.first_bad.tolist() == other.first_bad.tolist()
        for name, x in one.w.items():
            torch.testing.assert_close(x[:3], other.w[name][:3], rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch.compile's advice; full precision is wanted
@pytest.mark.parametrize(("graph", "compiles"), [(False, False), (True, False), (False, True), (True, True)])
def test_on_a_gpu_it_is_the_trainers(tmp_path: Path, images: str, graph: bool, compiles: bool) -> None:
    options: dict[str, Any] = {"data": images, "task_options": {"model": "small", "batch_size": 18}, "epochs": 4}
    options |= {"device": "cuda", "precision": "float32", "graph": graph}
    config = configure("cifar", "avagrad", milestones=(2,), **options)
    points = [(0.01, 0.1, 0), (0.1, 1e-3, 0), (1e30, 0.1, 0)]
    records = train_ensemble(config, points, tmp_path / "map", compile=compiles)
    for record in records:
        single = dataclasses.replace(config, lr=record.lr or 0.0, eps=record.eps)
        result = train(single, tmp_path / str(record.lr))
        assert record.diverged == (result["status"] == "diverged")
        if not record.diverged:
            assert record.facts["loss"] == pytest.approx(result["loss"], rel=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_the_lstm_is_the_trainers(tmp_path: Path, text: str) -> None:
    """With a graph, and the same masks; the last piece of the text is taken beside the graph."""
    config = configure(
        "chars", "adam", data=text, task_options=SMALL_CHARS, epochs=2, device="cuda", precision="float32"
    )
    records = train_ensemble(config, [(lr, 1e-3, 0) for lr in (1e-3, 1e-2)], tmp_path / "map")
    for record in records:
        result = train(dataclasses.replace(config, lr=record.lr or 0.0, eps=1e-3), tmp_path / str(record.lr))
        assert record.value == pytest.approx(result["validation"]["error"], rel=1e-3)
        assert record.facts["loss"] == pytest.approx(result["loss"], rel=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_a_run_that_is_stopped_continues(tmp_path: Path, images: str) -> None:
    options: dict[str, Any] = {"data": images, "task_options": {"model": "small", "batch_size": 18}, "device": "cuda"}
    config = configure("cifar", "adam", epochs=4, milestones=(2,), **options)
    points = [(0.01, 0.1, 0), (0.1, 1e-3, 0)]
    whole = train_ensemble(config, points, tmp_path / "whole", compile=False)
    with pytest.raises(Stopped):
        train_ensemble(config, points, tmp_path / "parts", compile=False, callback=StopAt(8))
    parts = train_ensemble(config, points, tmp_path / "parts", compile=False, resume=True)
    for one, other in zip(whole, parts, strict=True):
        assert one.facts["loss"] == pytest.approx(other.facts["loss"], rel=1e-2)
