"""The examples run on the real libraries, go on from a checkpoint to the bit, and the blocks of docs/frameworks.md run.

All models are tiny, all data are made here, and nothing is downloaded. What a framework itself warns of is silenced
where it is met; what we warn of is not.
"""

import functools
import importlib.util
import itertools
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import avagrad

ROOT = Path(__file__).parents[2]

# Of transformers and Accelerate on a machine without a GPU; of Lightning with this version of torch, and on few cores.
HUGGING_FACE_WARNS = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
LIGHTNING_WARNS = (
    "(?s).*`tensorboardX` has been removed",  # its default logger then writes CSV
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The '.*dataloader' does not have many workers",
    "Checkpoint directory .* exists and is not empty",
    "Precision .*-mixed is not supported by the model summary",
    "The number of training batches .* is smaller than the logging interval",
)


def example(name: str) -> Any:
    """Import examples/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(name: str) -> Any:
    """Import a library, or skip; what it warns of while it is imported is its own business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"needs {name.partition('.')[0]}", exc_type=ImportError)


@pytest.fixture
def _accelerate_starts_anew() -> Iterator[None]:
    """Have Accelerate forget the settings of the last Accelerator, which all of a process share."""
    state = library("accelerate.state")

    def forget() -> None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    forget()
    yield
    forget()


@pytest.fixture
def _lightning_warns() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in LIGHTNING_WARNS:
            warnings.filterwarnings("ignore", message)
        yield


def learns(losses: list[float]) -> bool:
    """Tell whether the last losses are well below the first."""
    few = max(2, len(losses) // 10)
    return sum(losses[-few:]) < 0.7 * sum(losses[:few])


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a nest of dictionaries and lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return list(itertools.chain.from_iterable(map(tensors, inner)))


def same(first: Any, second: Any) -> bool:
    """Tell whether two nests hold the same tensors, to the bit."""
    one, other = tensors(first), tensors(second)
    assert one
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- plain PyTorch ---


def test_plain_pytorch_learns_and_continues_to_the_bit(tmp_path: Path) -> None:
    train = example("plain_pytorch").main
    straight = train(tmp_path / "straight.pt")
    first = train(tmp_path / "resumed.pt", steps=45)
    half = torch.load(tmp_path / "resumed.pt")
    assert first + train(tmp_path / "resumed.pt") == straight
    assert learns(straight)
    saved = torch.load(tmp_path / "straight.pt")
    assert same(saved, torch.load(tmp_path / "resumed.pt"))
    assert not same(saved, half)


# --- Hugging Face ---


@pytest.fixture
def hugging_face(_accelerate_starts_anew: None) -> Any:
    library("transformers")
    return example("hugging_face")


def checkpoint(folder: Path) -> list[Any]:
    """Return the weights, the optimizer's state and the schedule's of a Trainer's checkpoint."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    return [weights, torch.load(folder / "optimizer.pt"), torch.load(folder / "scheduler.pt")]


@HUGGING_FACE_WARNS
def test_hugging_face_learns_and_continues_to_the_bit(hugging_face: Any, tmp_path: Path) -> None:
    straight = hugging_face.main(tmp_path / "straight")
    assert len(straight) == 40
    assert learns(straight)
    resumed = hugging_face.main(tmp_path / "resumed", resume=tmp_path / "straight" / "checkpoint-20")
    assert resumed == straight
    expected, half = (checkpoint(tmp_path / "straight" / f"checkpoint-{step}") for step in (40, 20))
    assert same(checkpoint(tmp_path / "resumed" / "checkpoint-40"), expected)
    assert not same(half, expected)
    state = expected[1]["state"].values()
    assert {values["step"].item() for values in state} == {40.0}  # the first step, with lr 0, counts


@HUGGING_FACE_WARNS
def test_hugging_face_six_steps_are_three_and_three(hugging_face: Any, tmp_path: Path) -> None:
    """The second run is stopped in the middle of the warm-up, as if it had been killed."""
    import transformers

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    hugging_face.make_trainer(tmp_path / "straight", steps=6).train()
    stopped = hugging_face.make_trainer(tmp_path / "stopped", steps=6)
    stopped.add_callback(Stop())
    stopped.train()
    assert stopped.state.global_step == 3
    assert not (tmp_path / "stopped" / "checkpoint-6").exists()
    hugging_face.make_trainer(tmp_path / "stopped", steps=6).train(resume_from_checkpoint=True)
    straight, resumed = (checkpoint(tmp_path / name / "checkpoint-6") for name in ("straight", "stopped"))
    assert same(resumed, straight)
    assert resumed[2] == straight[2]


@HUGGING_FACE_WARNS
def test_hugging_face_takes_the_lr_of_one_place_and_the_decay_of_the_other(hugging_face: Any, tmp_path: Path) -> None:
    import transformers

    trainer = hugging_face.make_trainer(tmp_path, steps=6)
    trainer.args.learning_rate, trainer.args.weight_decay = 5.0, 0.2
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    trainer.train()
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [3e-3, 3e-3]

    arguments: dict[str, Any] = {"model": trainer.model, "args": trainer.args, "train_dataset": hugging_face.data()}
    kind = (avagrad.AvaStep, {"lr": 2e-3, "weight_decay": 0.3})
    other = transformers.Trainer(**arguments, optimizer_cls_and_kwargs=kind)
    other.train()
    assert isinstance(other.optimizer.optimizer, avagrad.AvaStep)
    assert [group["initial_lr"] for group in other.optimizer.param_groups] == [2e-3, 2e-3]
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.2, 0.0]

    with pytest.raises(ValueError, match="avastep"):
        transformers.TrainingArguments(output_dir=str(tmp_path), optim="avastep")


class AdamWRun:
    """Six steps of the Trainer with its own AdamW, and runs of our classes that go on from the third."""

    def __init__(self, hugging_face: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import transformers

        self._module, self._folder, self._patch = hugging_face, folder, monkeypatch
        trainer = hugging_face.make_trainer(folder / "adamw", steps=6)
        trainer.args.learning_rate, trainer.args.weight_decay = 1e-3, 0.01
        stock = transformers.Trainer(model=trainer.model, args=trainer.args, train_dataset=hugging_face.data())
        assert isinstance(stock.create_optimizer(), torch.optim.AdamW)
        self.expected = self._rates(stock)

    def _rates(self, trainer: Any, resume: str | None = None) -> list[float]:
        """Train, and return the lr that the optimizer has when it takes each step."""
        seen: list[float] = []
        trainer.optimizer.register_step_pre_hook(lambda opt, *_: seen.append(opt.param_groups[0]["lr"]))
        trainer.train(resume_from_checkpoint=resume)
        return seen

    def go_on(self, make: Callable[[Any], torch.optim.Optimizer], base_lr: float | None = None) -> list[float]:
        """Return the lr of the steps after the third; ``base_lr`` is given to the scheduler when they begin."""
        import transformers

        class SetRates(transformers.TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *arguments: Any, **kwargs: Any) -> None:
                if base_lr is not None:
                    trainer.lr_scheduler.base_lrs = [base_lr, base_lr]

        def create(model: nn.Module, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
            return make(avagrad.optim.no_decay_groups(model, weight_decay=0.01))

        self._patch.setattr(self._module, "create_optimizer", create)
        trainer = self._module.make_trainer(self._folder / "resumed", steps=6)
        trainer.add_callback(SetRates())
        return self._rates(trainer, str(self._folder / "adamw" / "checkpoint-3"))


@pytest.fixture
def adamw_run(hugging_face: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdamWRun:
    return AdamWRun(hugging_face, tmp_path, monkeypatch)


@HUGGING_FACE_WARNS
def test_hugging_face_avastep_continues_with_the_lr_of_adamw(adamw_run: AdamWRun) -> None:
    assert adamw_run.expected == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 5e-4])
    with pytest.warns(UserWarning, match="AvaStep: .* from another optimizer .* lr=.*, initial_lr=0.001"):
        found = adamw_run.go_on(lambda groups: avagrad.AvaStep(groups, lr=0.2))
    assert found == adamw_run.expected[3:]


@HUGGING_FACE_WARNS
@pytest.mark.parametrize(("base_lr", "factor"), [(None, 1.0), (0.5, 500.0)])
def test_hugging_face_avagradw_says_what_to_do_about_the_lr_of_adamw(
    adamw_run: AdamWRun, base_lr: float | None, factor: float
) -> None:
    """The saved schedule brings AdamW's lr back. Its base_lrs, which the warning names, mend it."""
    says = "AvaGradW: .*Loading a scheduler's state as well restores that optimizer's lr: make a new scheduler, or set"
    with pytest.warns(UserWarning, match=says):
        found = adamw_run.go_on(lambda groups: avagrad.AvaGradW(groups, lr=0.5), base_lr)
    # The first of them still has the lr that the new schedule began with, which is that of a warm-up: 0.
    assert found == pytest.approx([0.0, *(factor * lr for lr in adamw_run.expected[4:])])


# --- Accelerate ---


@pytest.mark.usefixtures("_accelerate_starts_anew")
def test_accelerate_learns_and_continues_to_the_bit(tmp_path: Path) -> None:
    library("accelerate")
    from safetensors.torch import load_file

    train = example("accelerate_loop").main
    straight = train(tmp_path / "straight")
    resumed = train(tmp_path / "resumed", epochs=1)
    half = load_file(tmp_path / "resumed" / "model.safetensors")
    assert resumed + train(tmp_path / "resumed") == straight
    assert learns(straight)
    one, other = (
        [load_file(tmp_path / name / "model.safetensors"), torch.load(tmp_path / name / "optimizer.bin")]
        for name in ("straight", "resumed")
    )
    assert same(one, other)
    assert not same(one[0], half)
    assert {state["step"].item() for state in one[1]["state"].values()} == {32.0}  # 64 batches, accumulated by two


# --- Lightning ---


@pytest.fixture
def lightning_module() -> Any:
    library("lightning")
    return example("lightning_module")


def lightning_parts(path: Path) -> list[Any]:
    saved = torch.load(path, weights_only=False)
    return [saved["state_dict"], saved["optimizer_states"]]


@pytest.mark.usefixtures("_lightning_warns")
def test_lightning_learns_and_continues_to_the_bit(lightning_module: Any, tmp_path: Path) -> None:
    train, last = lightning_module.main, Path("checkpoints") / "last.ckpt"
    straight = train(tmp_path / "straight")
    first = train(tmp_path / "resumed", epochs=1)
    half = lightning_parts(tmp_path / "resumed" / last)
    rest = train(tmp_path / "resumed", resume=tmp_path / "resumed" / last)
    assert first + rest == straight
    assert learns(straight)
    expected = lightning_parts(tmp_path / "straight" / last)
    assert same(lightning_parts(tmp_path / "resumed" / last), expected)
    assert not same(half, expected)


class Clipped:
    """A training in float16 with a scaler and clipping, and the norm of the gradients that each step has seen."""

    def __init__(self, lightning_module: Any, make: Any) -> None:
        from lightning.pytorch.plugins import MixedPrecision

        class Module(lightning_module.Classifier):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                optimizer = make(self.parameters())
                optimizer.register_step_pre_hook(lambda *_: norms.append(norm(self.parameters())))
                return optimizer

        def norm(params: Any) -> float:
            return float(nn.utils.get_total_norm([p.grad for p in params]))

        norms: list[float] = []
        torch.manual_seed(0)
        self.module, self.norms = Module(), norms
        before = [p.detach().clone() for p in self.module.parameters()]
        # "16-mixed" by its plugin: on a CPU the Trainer itself takes "bf16-mixed" in its place, which has no scaler.
        self.precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
        trainer = lightning_module.lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            gradient_clip_val=0.25,
            plugins=[self.precision],
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(self.module, lightning_module.data())
        self.moved = not same(before, list(self.module.parameters()))


@pytest.mark.usefixtures("_lightning_warns")
@pytest.mark.parametrize("name", ["AvaGrad", "AvaGradW", "AvaStep", "DelayedAdam"])
def test_lightning_clips_in_16_mixed_by_default(lightning_module: Any, name: str) -> None:
    """A fused step that unscales gradients itself cannot have them clipped: Lightning refuses it, of AdamW as well."""
    make = getattr(avagrad, name)
    run = Clipped(lightning_module, make)
    assert run.precision.scaler.get_scale() == 8.0
    assert len(run.norms) == 16
    assert max(run.norms) == pytest.approx(0.25, rel=1e-3)  # unscaled, then clipped
    assert run.moved
    for other in (make, torch.optim.AdamW):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            Clipped(lightning_module, functools.partial(other, fused=True))


# --- peft ---


@pytest.mark.parametrize("lr", [1e-3, 3e-3, 1e-2])
def test_lora_is_moved_as_adamw_moves_it(lr: float) -> None:
    """At AdamW's own lr, AvaStep is below a tenth of the first loss as early, to 15 % of the steps and two more."""
    for name in ("transformers", "peft"):
        library(name)
    train = example("peft_lora").main
    adamw, avastep = (train(name, lr=lr, steps=100) for name in ("adamw", "avastep"))
    shown = (0, 1, 5, 10, 20, 40, 60, 80, 99)
    for name, losses in (("AdamW", adamw), ("AvaStep", avastep)):
        print(f"lr {lr:g}, {name}: ", *(f"{step}: {losses[step]:.4f}" for step in shown))
    assert adamw[0] == avastep[0]
    arrives = [next(i for i, loss in enumerate(losses) if loss < adamw[0] / 10) for losses in (adamw, avastep)]
    assert abs(arrives[1] - arrives[0]) <= 2 + 0.15 * arrives[0], arrives
    assert avastep[-1] < 1.5 * adamw[-1]


def test_lora_has_a_state_for_the_adapters_alone() -> None:
    for name in ("transformers", "peft"):
        library(name)
    import peft

    model = peft.get_peft_model(example("peft_lora").pretrained(), peft.LoraConfig(r=2, target_modules="all-linear"))
    optimizer = avagrad.AvaStep(model.parameters(), lr=1e-2)
    tokens = torch.arange(16)[None]
    for _ in range(4):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    moved = {name for name, p in model.named_parameters() if p in optimizer.state}
    assert moved == trained != set()
    assert all("lora_" in name for name in moved)
    biggest = max(p.abs().max().item() for name, p in model.named_parameters() if "lora_B" in name)
    assert 0 < biggest <= 0.04  # B starts at 0, and no coordinate moves by much more than lr


# --- FSDP2 ---


def test_fsdp2_offloading_changes_no_bit() -> None:
    script = str(ROOT / "examples" / "fsdp2_offload.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in done.stdout.splitlines() if line}
    assert len(lines["kept"]) == 20
    assert learns(lines["kept"])
    assert lines["offloaded"] == lines["kept"]


def test_offloading_lets_go_of_the_memory() -> None:
    """What the step before has left must not hold the moments that were moved away."""
    import weakref

    module = example("fsdp2_offload")
    model = nn.Linear(4, 4)
    optimizer = avagrad.AvaStep(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    moments = [weakref.ref(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(moment() is not None for moment in moments)
    module.move_state(optimizer, "cpu")
    assert all(moment() is None for moment in moments)


# --- docs/frameworks.md ---

PAGE = (ROOT / "docs" / "frameworks.md").read_text()


def blocks(heading: str) -> list[str]:
    """Return the blocks of code of a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```py\n(.*?)^```", section, re.M | re.S)


def classifier() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    rows = TensorDataset(torch.randn(8, 8), torch.arange(8) % 3)
    return {"model": model, "loader": DataLoader(rows, batch_size=4)}


def execute(code: str, **names: Any) -> dict[str, Any]:
    space = {"__name__": "__main__", **names}
    exec(compile(code, "docs/frameworks.md", "exec"), space)
    return space


def groups(optimizer: Any) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def test_every_block_of_the_page_is_run_here() -> None:
    tested = {"Plain PyTorch": 1, "Hugging Face Trainer": 2, "Accelerate": 1, "Lightning": 1, "timm": 1}
    tested |= {"peft, LoRA": 1, "FSDP2": 1, "Offloading": 1, "Numbers to log": 2, "JAX": 1}
    assert {heading: len(blocks(heading)) for heading in tested} == tested
    assert sum(tested.values()) == len(re.findall(r"^```py$", PAGE, re.M))


def test_the_page_plain_pytorch() -> None:
    space = execute(*blocks("Plain PyTorch"), **classifier())
    assert groups(space["optimizer"]) == [0.1, 0.0]
    assert {state["step"].item() for state in space["optimizer"].state.values()} == {2.0}


@HUGGING_FACE_WARNS
def test_the_page_hugging_face(hugging_face: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("Hugging Face Trainer"):
        model = hugging_face.make_trainer(tmp_path).model
        trainer = execute(code, model=model, dataset=hugging_face.data(8))["trainer"]
        assert isinstance(trainer.optimizer.optimizer, avagrad.AvaStep)
        assert groups(trainer.optimizer) == [0.1, 0.0]
        assert trainer.state.global_step == 3


@pytest.mark.usefixtures("_accelerate_starts_anew")
def test_the_page_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("accelerate")
    monkeypatch.chdir(tmp_path)
    space = execute(*blocks("Accelerate"), **classifier())
    assert {state["step"].item() for state in space["optimizer"].optimizer.state.values()} == {1.0}
    assert (tmp_path / "out" / "optimizer.bin").exists()


@pytest.mark.usefixtures("_lightning_warns")
def test_the_page_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("lightning")
    monkeypatch.chdir(tmp_path)
    trainer = execute(*blocks("Lightning"), **classifier())["trainer"]
    assert trainer.global_step == 2
    assert groups(trainer.optimizers[0]) == [0.1, 0.0]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-4 * 2 / 100)


def test_the_page_timm() -> None:
    library("timm")
    optimizer = execute(*blocks("timm"), **classifier())["optimizer"]
    assert isinstance(optimizer, avagrad.AvaStep)
    assert sorted(groups(optimizer)) == [0.0, 0.1]


def test_the_page_lora() -> None:
    for name in ("transformers", "peft"):
        library(name)
    optimizer = execute(*blocks("peft, LoRA"), model=example("peft_lora").pretrained())["optimizer"]
    assert all(p.requires_grad for p in optimizer.param_groups[0]["params"])


def test_the_page_fsdp2_and_offloading() -> None:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            space = execute(*blocks("FSDP2"), **classifier())
            model, optimizer = space["model"], space["optimizer"]
            assert groups(optimizer) == [0.1, 0.0]
            assert all(type(p).__name__ == "DTensor" for group in optimizer.param_groups for p in group["params"])
            (code,) = blocks("Offloading")
            for _ in range(3):
                model(torch.randn(2, 8)).sum().backward()
                execute(code.replace('"cuda"', '"cpu"'), optimizer=optimizer)
            assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
        finally:
            dist.destroy_process_group()


def test_the_page_jax() -> None:
    for name in ("jax", "optax"):
        library(name)
    import jax.numpy as jnp

    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    space: dict[str, Any] = {"params": params, "gradients": params}
    first = execute(*blocks("JAX"), **space)
    assert jnp.array_equal(first["params"]["w"], params["w"])  # a first gradient only fills the moments
    again = first["optimizer"].update(params, first["state"], params)[0]
    assert float(again["w"][0, 0]) == pytest.approx(-3e-4 * 1.1, rel=1e-4)  # the decay is the matrix's alone
    assert float(again["b"][0]) == pytest.approx(-3e-4, rel=1e-4)


def test_the_page_numbers_to_log_in_hugging_face(hugging_face: Any, tmp_path: Path) -> None:
    space = execute(blocks("Numbers to log")[0], trainer=hugging_face.make_trainer(tmp_path))
    assert type(space["trainer"].callback_handler.callbacks[-1]) is space["HuggingFaceCallback"]


@pytest.mark.usefixtures("_lightning_warns")
def test_the_page_numbers_to_log_in_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("lightning")
    monkeypatch.chdir(tmp_path)
    space = execute(blocks("Numbers to log")[1])
    assert any(type(callback) is space["LightningCallback"] for callback in space["trainer"].callbacks)
