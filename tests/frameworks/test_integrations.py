"""The callbacks log the optimizer's own numbers at the steps that were asked for; timm knows our names."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import avagrad
from avagrad.integrations.metrics import metrics_of

NAMES = {"gamma", "step_rms", "step_rms_predicted", "inactive_share", "clipped_share"}
# What the frameworks themselves warn of on a small machine without a GPU.
THEIRS = (
    "'pin_memory' argument is set as true",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The '.*dataloader' does not have many workers",
)


def library(name: str) -> Any:
    """Import a library, or skip; what it warns of while it is imported is its own business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"needs {name.partition('.')[0]}", exc_type=ImportError)


@pytest.fixture(autouse=True)
def _theirs() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in THEIRS:
            warnings.filterwarnings("ignore", message)
        yield


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    script = (
        "import sys, avagrad.integrations as here\n"
        "assert set(here.__all__) == {'HuggingFaceCallback', 'LightningCallback', 'register_with_timm'}\n"
        "from avagrad.integrations import register_with_timm\n"
        "print({'transformers', 'lightning', 'pytorch_lightning', 'timm', 'accelerate', 'peft'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    module = importlib.import_module("avagrad.integrations")
    with pytest.raises(AttributeError, match=r"'avagrad.integrations' has no attribute 'TimmCallback'"):
        _ = module.TimmCallback


# --- what is logged ---


def test_the_numbers_are_those_of_diagnostics_however_the_optimizer_is_wrapped() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = small_model()
    optimizer = avagrad.AvaStep(model.parameters(), lr=0.02)
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    expected = {f"x/{name}": optimizer.diagnostics()[name] for name in NAMES}
    assert expected["x/step_rms_predicted"] == pytest.approx(0.02)
    assert 0 < expected["x/step_rms"] < 0.021
    assert metrics_of(optimizer, prefix="x/") == metrics_of(Wrapper(Wrapper(optimizer)), prefix="x/") == expected
    assert metrics_of(Wrapper(torch.optim.AdamW(model.parameters()))) == metrics_of(None) == {}


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10", None])
@pytest.mark.parametrize("name", ["hugging_face", "lightning"])
def test_a_bad_number_of_steps_is_rejected(name: str, every: Any) -> None:
    library({"hugging_face": "transformers", "lightning": "lightning"}[name])
    from avagrad import integrations

    make = integrations.LightningCallback if name == "lightning" else integrations.HuggingFaceCallback
    arguments = () if name == "lightning" else (None,)
    with pytest.raises(ValueError, match=r"every is .*, but must be a whole number of steps of at least 1\."):
        make(*arguments, every=every)


# --- Hugging Face ---


@pytest.fixture
def make_trainer(tmp_path: Path) -> Any:
    """Return a function that makes a Trainer of ten steps, with a callback, and one that notes what it should log."""
    library("transformers")
    state = library("accelerate.state")
    import transformers

    from avagrad.integrations import HuggingFaceCallback

    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self, found: dict[int, Any]) -> None:
            self.found = found

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.found[state.global_step] = metrics_of(kwargs["optimizer"])

    def make(optimizer: Any, every: int, **options: Any) -> Any:
        settings = {"max_steps": 10, "per_device_train_batch_size": 2, "logging_steps": 5, "save_steps": 5, **options}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to="none", disable_tqdm=True, **settings
        )
        model = Model()
        data = [{"x": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(torch.randn(40, 8))]
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer(model.parameters(), lr=1e-2), None)
        )
        expected: dict[int, Any] = {}
        trainer.add_callback(Note(expected))
        trainer.add_callback(HuggingFaceCallback(trainer, every=every))
        return trainer, expected

    return make


def logged(trainer: Any, name: str) -> dict[int, Any]:
    """Return what the Trainer has logged together with a number, by its step; no step may have it twice."""
    entries = [entry for entry in trainer.state.log_history if name in entry]
    found = {entry["step"]: {key: x for key, x in entry.items() if key.startswith("optimizer/")} for entry in entries}
    assert len(found) == len(entries)
    return found


@pytest.mark.parametrize("accumulated", [1, 3])
def test_hugging_face_logs_at_its_steps(make_trainer: Any, accumulated: int) -> None:
    """The Trainer's own numbers are still logged, also at step 5 and 10, where both are due."""
    trainer, expected = make_trainer(avagrad.AvaStep, every=2, gradient_accumulation_steps=accumulated)
    trainer.train()
    found = logged(trainer, "optimizer/gamma")
    assert sorted(found) == [2, 4, 6, 8, 10]
    assert found == {step: expected[step] for step in found}
    assert {name.removeprefix("optimizer/") for name in found[2]} == NAMES
    assert found[2]["optimizer/step_rms_predicted"] == pytest.approx(8e-3, rel=1e-5)  # linear: 0.8 of lr is next
    assert sorted(logged(trainer, "loss")) == [5, 10]


def test_hugging_face_logs_at_its_steps_after_a_resume(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(avagrad.AvaStep, every=3)[0].train()
    trainer, _ = make_trainer(avagrad.AvaStep, every=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert sorted(logged(trainer, "optimizer/gamma")) == [3, 6, 9]  # the first is the checkpoint's


def test_hugging_face_logs_nothing_of_other_optimizers(make_trainer: Any) -> None:
    trainer, _ = make_trainer(torch.optim.AdamW, every=1)
    trainer.train()
    assert logged(trainer, "optimizer/gamma") == {}
    assert sorted(logged(trainer, "loss")) == [5, 10]


# --- Lightning ---


class Run:
    """A training by Lightning of 12 batches, what was logged, and what the optimizers said after each batch."""

    def __init__(self, makes: list[Any], every: Any, *, resume: Path | None = None, **options: Any) -> None:
        library("lightning")
        import lightning
        from lightning.pytorch.loggers.logger import Logger

        from avagrad.integrations import LightningCallback

        class Memory(Logger):  # type: ignore[misc]
            name, version = "memory", 0
            rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

            def log_metrics(self, metrics: Any, step: int | None = None) -> None:
                self.rows.append((-1 if step is None else step, dict(metrics)))

            def log_hyperparams(self, *arguments: Any, **kwargs: Any) -> None:
                pass

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList(small_model() for _ in makes)
                self.automatic_optimization = len(makes) == 1

            def training_step(self, batch: Any, index: int) -> Any:
                losses = [nn.functional.cross_entropy(part(batch[0]), batch[1]) for part in self.parts]
                if self.automatic_optimization:
                    return losses[0]
                for optimizer, loss in zip(self.optimizers(), losses, strict=True):
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
                return None

            def configure_optimizers(self) -> Any:
                return [make(part.parameters()) for make, part in zip(makes, self.parts, strict=True)]

        class Note(lightning.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
                notes[trainer.global_step] = [metrics_of(optimizer, prefix="") for optimizer in trainer.optimizers]

        notes: dict[int, list[dict[str, float]]] = {}
        random = torch.Generator().manual_seed(1)
        rows = TensorDataset(torch.randn(24, 8, generator=random), torch.arange(24) % 3)
        memory = Memory()
        memory.rows = []
        self.trainer = lightning.Trainer(
            **{"max_epochs": 1, **options},
            accelerator="cpu",
            devices=1,
            logger=memory,
            callbacks=[Note(), LightningCallback(every=every) if isinstance(every, int) else every],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=1,
        )
        self.trainer.fit(Module(), DataLoader(rows, batch_size=2), ckpt_path=resume)
        self.notes, self.rows = notes, [row for row in memory.rows if any(key != "epoch" for key in row[1])]


def avastep(params: Any) -> torch.optim.Optimizer:
    return avagrad.AvaStep(params, lr=1e-2)


@pytest.mark.parametrize(
    ("accumulated", "every", "steps"), [(1, 5, [5, 10]), (3, 2, [2, 4]), (3, 1, [1, 2, 3, 4]), (1, 13, [])]
)
def test_lightning_logs_at_its_steps(accumulated: int, every: int, steps: list[int]) -> None:
    """Once for each step, however many batches are in it."""
    run = Run([avastep], every, accumulate_grad_batches=accumulated)
    assert [step for step, _ in run.rows] == steps
    for step, found in run.rows:
        assert found == {f"optimizer/{name}": x for name, x in run.notes[step][0].items()}
        assert found["optimizer/step_rms_predicted"] == pytest.approx(1e-2)
    assert len({found["optimizer/step_rms"] for _, found in run.rows}) == len(steps)  # they change


def test_lightning_tells_several_optimizers_apart() -> None:
    """Each batch is a step of all three, so that global_step grows by three; AdamW has no numbers."""
    run = Run([avastep, torch.optim.AdamW, avastep], every=5)
    assert run.trainer.global_step == 36
    assert [step for step, _ in run.rows] == [6, 6, 12, 12, 15, 15, 21, 21, 27, 27, 30, 30, 36, 36]
    for (step, first), (_, third) in zip(run.rows[::2], run.rows[1::2], strict=True):
        assert first == {f"optimizer_0/{name}": x for name, x in run.notes[step][0].items()}
        assert third == {f"optimizer_2/{name}": x for name, x in run.notes[step][2].items()}


@pytest.mark.parametrize(("every", "steps"), [(4, [8]), (5, [5]), (3, [6])])
def test_lightning_logs_at_its_steps_after_a_resume(tmp_path: Path, every: int, steps: list[int]) -> None:
    """A run that starts at step 4 logs 4 no more, and nothing in the middle of accumulated batches."""
    first = Run([avastep], every, accumulate_grad_batches=3)
    assert first.trainer.global_step == 4
    first.trainer.save_checkpoint(tmp_path / "first.ckpt")
    second = Run([avastep], every, accumulate_grad_batches=3, max_epochs=2, resume=tmp_path / "first.ckpt")
    assert [step for step, _ in second.rows] == steps
    assert all(found["optimizer/step_rms"] == second.notes[step][0]["step_rms"] for step, found in second.rows)


def test_lightning_the_same_callback_serves_two_runs() -> None:
    library("lightning")
    from avagrad.integrations import LightningCallback

    callback = LightningCallback(every=12)
    for _ in range(2):
        assert [step for step, _ in Run([avastep], callback).rows] == [12]


def test_lightning_writes_to_a_file(tmp_path: Path) -> None:
    """Its own logger takes the numbers."""
    import csv

    library("lightning")
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from avagrad.integrations import LightningCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return avastep(self.parameters())

    rows = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=2)
    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=CSVLogger(tmp_path, name=None, version="run"),
        callbacks=[LightningCallback(every=3)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    ).fit(Module(), rows)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table if row["optimizer/gamma"]] == ["3", "6"]
    assert len([row for row in table if row["loss"]]) == 6


# --- timm ---


@pytest.fixture
def timm_optim() -> Any:
    return library("timm.optim")


def test_timm_knows_our_names(timm_optim: Any) -> None:
    from avagrad.integrations import register_with_timm

    names = register_with_timm()
    assert names == ["adabound", "adashift", "avagrad", "avagradw", "avastep", "delayedadam"]
    assert register_with_timm() == names
    assert set(names) <= set(timm_optim.list_optimizers())
    assert all(timm_optim.get_optimizer_info(name).description for name in names)
    model = small_model()
    optimizer = timm_optim.create_optimizer_v2(model, opt="avastep", lr=2e-3, weight_decay=0.1, betas=(0.8, 0.9))
    assert type(optimizer) is avagrad.AvaStep
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (2e-3, (0.8, 0.9), 1e-8)
    }
    decays = {group["weight_decay"]: sorted(p.dim() for p in group["params"]) for group in optimizer.param_groups}
    assert decays == {0.1: [2, 2], 0.0: [1, 1]}
    for name in names:
        assert type(timm_optim.create_optimizer_v2(model, opt=name, lr=1e-3)).__module__.startswith("avagrad.")
    assert not timm_optim.get_optimizer_class("adopt", bind_defaults=False).__module__.startswith("avagrad.")
    ahead = timm_optim.create_optimizer_v2(model, opt="lookahead_avastep", lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        ahead.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_without_timm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from avagrad.integrations import register_with_timm

    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ImportError, match=r"register_with_timm needs timm, .*: pip install timm\."):
        register_with_timm()
