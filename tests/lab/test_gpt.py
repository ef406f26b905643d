"""The transformer: it computes what it should, its batches are a function of seed and step, bad data are refused."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from short_runs import StopAt, assert_same, text
from torch import Tensor
from torch.nn import functional

from avagrad.lab.config import configure
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.folder import read_metrics
from avagrad.lab.models.gpt import GPT
from avagrad.lab.presets import PRESETS
from avagrad.lab.tasks.gpt import Gpt
from avagrad.lab.train import Stopped, train

__all__ = ["text"]  # a fixture

TINY: dict[str, Any] = {
    "batch_size": 4,
    "context": 8,
    "layers": 1,
    "heads": 2,
    "width": 8,
    "steps": 5,
    "eval_tokens": 256,
}


# --- the model ---


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * weight


def reference(model: Any, tokens: list[int]) -> Tensor:
    """The model, written out for one sequence: one token, one head, one earlier token at a time."""
    xs = [model.tokens.weight[token] + model.positions.weight[i] for i, token in enumerate(tokens)]
    for block in model.blocks:
        inputs = [normalised(x, block.norm_1.weight) for x in xs]
        q, k, v = ([weight @ x for x in inputs] for weight in block.qkv.weight.chunk(3))
        size = len(q[0]) // model.heads
        for i in range(len(xs)):
            heads = []
            for part in (slice(head * size, (head + 1) * size) for head in range(model.heads)):
                scores = torch.stack([q[i][part] @ k[j][part] / math.sqrt(size) for j in range(i + 1)])
                shares = scores.exp() / scores.exp().sum()
                heads.append(sum(share * v[j][part] for j, share in enumerate(shares)))
            xs[i] = xs[i] + block.attend.weight @ torch.cat(heads)
        for i, x in enumerate(xs):
            hidden = block.expand.weight @ normalised(x, block.norm_2.weight)
            xs[i] = x + block.shrink.weight @ (hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)
    return torch.stack([model.output.weight @ normalised(x, model.norm.weight) for x in xs])


def made(*, tied: bool = True, in_products: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(vocabulary=7, context=6, layers=2, heads=2, width=4, tied=tied).double()
    model.in_products = in_products
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("in_products", [True, False])
def test_the_model_is_its_equations(tied: bool, in_products: bool) -> None:
    model = made(tied=tied, in_products=in_products)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 2], [0, 6, 6, 0, 2, 5]])
    logits = model(tokens)
    expected = torch.stack([reference(model, row) for row in tokens.tolist()])
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    theirs = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert (model.output.weight is model.tokens.weight) == tied


@pytest.mark.parametrize("in_products", [True, False])
def test_a_later_token_never_changes_an_earlier_logit(in_products: bool) -> None:
    model = made(in_products=in_products)
    tokens = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(1))
    before = model(tokens)
    for i in range(6):
        other = tokens.clone()
        other[:, i] = (other[:, i] + 1) % 7
        changed = (model(other) != before).any(-1).any(0)
        assert changed.tolist() == [False] * i + [True] * (6 - i)


def test_the_loss_of_a_case_worked_out_by_hand() -> None:
    """Blocks that add nothing: tokens (1, 0) and (0, 1) at positions (2, 1) and (1, 2) are (3, 1) and (1, 3).

    Normalised these are (1, -1) and (-1, 1), up to the 1e-5 in the square root; the scores are the same again.
    """
    task = Gpt(**TINY | {"width": 2, "heads": 1})
    model = GPT(vocabulary=2, context=2, layers=1, heads=1, width=2).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.zero_()
        model.tokens.weight.copy_(torch.eye(2))
        model.positions.weight.copy_(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    x = 1 / math.sqrt(1 + 1e-5)
    right, wrong = (math.log(1 + math.exp(sign * 2 * x)) for sign in (-1, 1))
    inputs, targets = torch.tensor([[0, 1]]), torch.tensor([[0, 0]])
    loss, _ = task.loss(model, (inputs, targets), (), torch.Generator())
    assert loss.item() == pytest.approx((right + wrong) / 2, rel=1e-12)


def test_a_model_that_knows_nothing() -> None:
    task = Gpt(**TINY)
    model = task.new_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        score = task.evaluate(model.eval(), "test")
        bits = task.details(model)["bits_by_frequency"]
    assert score.error == pytest.approx(math.log2(task.size))
    assert score.loss == pytest.approx(math.log(task.size))
    assert [x for x in bits if x is not None] == pytest.approx(
        [math.log2(task.size)] * sum(x is not None for x in bits)
    )


def test_the_sizes_of_the_presets() -> None:
    for preset, million in (("quick", 0.4), ("small", 10.7), ("base", 85.4)):
        values = {name: value.value for name, value in PRESETS["gpt"][preset].items()}
        sizes = {name: values.get(name, Gpt.options()[name]) for name in ("context", "layers", "heads", "width")}
        with torch.device("meta"):
            model = GPT(vocabulary=96, **sizes)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(million, abs=0.06)


# --- batches ---


def starts(task: Gpt, epochs: int) -> Tensor:
    return torch.cat([task.order(epoch) for epoch in range(epochs)]).flatten()


def test_a_pass_reads_every_window_once() -> None:
    task = Gpt(**TINY | {"steps": 0})
    first = task.order(0).flatten()
    assert len(first) == task.windows - task.windows % 4
    assert len(set(first.tolist())) == len(first)
    assert len(set((first % 8).tolist())) == 1  # they do not overlap
    assert int(first.max()) + task.context < len(task.parts["train"])
    both = torch.split(starts(task, 3)[: 2 * task.windows], task.windows)
    assert sorted((both[0] // 8).tolist()) == list(range(task.windows))
    assert sorted((both[1] // 8).tolist()) == list(range(task.windows))
    assert not torch.equal(both[0], both[1])


def test_batches_are_a_function_of_seed_and_step() -> None:
    short, long = Gpt(**TINY | {"steps": 3}), Gpt(**TINY | {"steps": 7})
    assert torch.equal(starts(short, 7), starts(long, 3))
    assert not torch.equal(starts(short, 1), starts(Gpt(**TINY | {"steps": 3, "seed": 1}), 1))
    inputs, targets = short.batch(short.order(2), 1)
    begin = int(short.order(2)[1, 2])
    assert torch.equal(inputs[2], short.parts["train"][begin : begin + 8].long())
    assert torch.equal(targets[2], short.parts["train"][begin + 1 : begin + 9].long())


def test_what_is_measured_is_spread_over_the_part() -> None:
    task = Gpt(**TINY | {"eval_tokens": 80})
    chosen = task._eval_starts("validation")
    last = len(task.parts["validation"]) - 9
    assert len(chosen) == 8  # ten windows would be more than two batches of 4
    assert (chosen % 8 == 0).all()
    assert int(chosen[0]) == 0
    assert last * 0.8 < int(chosen[-1]) <= last
    model = task.new_model().double().eval()
    inputs, targets = task._windows("validation", chosen)
    with torch.no_grad():
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        assert task.evaluate(model, "validation").loss == pytest.approx(loss.item(), rel=1e-12)


# --- files of tokens ---


def written(folder: Path, train_part: Any, held_out: Any, dtype: Any = numpy.uint16) -> str:
    folder.mkdir(exist_ok=True)
    for name, tokens in (("train.bin", train_part), ("val.bin", held_out)):
        numpy.asarray(tokens).astype(dtype).tofile(folder / name)
    return str(folder)


def test_tokens_of_all_sixteen_bits_are_read(tmp_path: Path) -> None:
    rng = numpy.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 400)
    tokens[7] = 65_535
    task = Gpt(**TINY, data=written(tmp_path / "data", tokens, tokens[:100]))
    assert task.size == 65_536
    inputs, _ = task._windows("train", torch.tensor([0, 100]))
    assert inputs.tolist() == [tokens[:8].tolist(), tokens[100:108].tolist()]
    assert [len(task.parts[part]) for part in ("train", "validation", "test")] == [400, 50, 50]
    assert "the second half of val.bin is the test part." in task.remarks
    assert Gpt(**TINY, data=str(tmp_path / "data"), full=True).parts["train"].shape == (450,)
    before = (tmp_path / "data" / "train.bin").read_bytes()
    task.parts["train"][0] = 1  # in memory alone
    assert (tmp_path / "data" / "train.bin").read_bytes() == before


def test_tokens_that_are_read_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "data", numpy.arange(400) % 37, numpy.arange(100) % 37)
    here = Gpt(**TINY, data=folder)
    monkeypatch.setattr("avagrad.lab.tasks.gpt._ON_DEVICE", 0)
    there = Gpt(**TINY, data=folder)
    for a, b in zip(here.batch(here.order(0), 1), there.batch(there.order(0), 1), strict=True):
        assert torch.equal(a, b)
    before = here.fingerprint()
    assert before == there.fingerprint()
    numpy.full(400, 3, dtype=numpy.uint16).tofile(tmp_path / "data" / "train.bin")
    assert Gpt(**TINY, data=folder).fingerprint() != before


def test_a_vocabulary_may_be_larger_than_what_is_there(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", numpy.arange(400) % 37, numpy.arange(100) % 37)
    assert Gpt(**TINY, data=folder, vocabulary=64).new_model().tokens.weight.shape == (64, 8)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"vocabulary is 36, but must be at least 37, or 0: there is the token 36"):
        Gpt(**TINY, data=folder, vocabulary=36)


def test_bits_by_frequency_are_those_of_the_groups(tmp_path: Path) -> None:
    """Token 0 makes up half of the text, 3 a quarter, 1 and 2 an eighth each."""
    tokens = numpy.array([0, 1, 0, 2, 0, 3, 0, 3] * 100)
    task = Gpt(**TINY, data=written(tmp_path / "data", tokens, tokens))
    model = task.new_model().double().eval()
    with torch.no_grad():
        bits = task.details(model)["bits_by_frequency"]
        inputs, targets = task._windows("test", task._eval_starts("test"))
        losses = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    # Half of the text comes before 3, three quarters before 1, seven eighths before 2.
    for group, token in ((0, 0), (5, 3), (7, 1), (8, 2)):
        mean = losses[targets.flatten() == token].mean().item() / math.log(2)
        assert bits[group] == pytest.approx(mean, rel=1e-12)
    assert [i for i, x in enumerate(bits) if x is None] == [1, 2, 3, 4, 6, 9]


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ({"train.bin": b"\0" * 900}, "val.bin' does not exist, but train.bin and val.bin must both exist"),
        ({"val.bin": b"\0" * 900}, "train.bin' does not exist"),
        ({"train.bin": b"", "val.bin": b"\0" * 900}, "train.bin' has 0 bytes, but must have two for each token"),
        (
            {"train.bin": b"\0" * 901, "val.bin": b"\0" * 900},
            "has 901 bytes, .* truncated, or of another type than uint16",
        ),
        ({"train.bin": b"\0" * 32, "val.bin": b"\0" * 900}, "the train part has 16 tokens, but needs at least 17"),
        ({"train.bin": b"\0" * 900, "val.bin": b"\0" * 32}, "the validation part has 8 tokens, but needs at least 9"),
        ({"train.bin": b"\0" * 72, "val.bin": b"\0" * 900}, "batch_size is 4, but there are only 3 windows of 8"),
    ],
)
def test_bad_files_are_rejected(tmp_path: Path, contents: dict[str, bytes], says: str) -> None:
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        Gpt(**TINY, data=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 0}, "layers is 0, but must be at least 1"),
        ({"steps": -1}, "steps is -1, but must be at least 0"),
        ({"heads": 3}, "width is 8, but must be a multiple of heads, which is 3"),
        ({"vocabulary": 9}, "vocabulary is 9, but must be 0 for a text"),
        ({"download": True}, "download is True, but must be False"),
        ({"data": "/nowhere"}, "gpt: data is '/nowhere', which does not exist, but must be a text file"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        Gpt(**TINY | options)


# --- runs ---


@dataclass(kw_only=True)
class Gpt64(Gpt):
    """In double precision: what differs in the last digits does not grow to something that is seen."""

    dtype: torch.dtype = torch.float64


def tiny(optimizer: str, data: str, task: str = "gpt", **given: Any) -> Any:
    common: dict[str, Any] = {"schedule": "cosine", "warmup": 4, "end_factor": 0.1, "epochs": 3, "threads": 1}
    return configure(task, optimizer, data=data, task_options=TINY, **common | given)


def test_the_recipe() -> None:
    config = configure("gpt", "adamw", preset="small")
    assert (config.weight_decay, config.clip, config.optimizer_options["betas"]) == (0.1, 1.0, (0.9, 0.95))
    total = config.epochs * 100
    assert config.lr_at(0, 0, 100) == pytest.approx(config.lr / 100)
    assert config.lr_at(0, 99, 100) == config.lr
    last = config.lr_at(config.epochs - 1, 99, 100)
    assert last == pytest.approx(config.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * (total - 101) / (total - 100))) / 2))
    assert last < 0.1001 * config.lr
    with pytest.raises(ValueError, match=r"end_factor is 2.0, but must be a number from 0 to 1"):
        configure("gpt", "adamw", end_factor=2.0)


def test_normalisation_does_not_decay(tmp_path: Path, text: str) -> None:
    for part in ("a", "b"):
        config = tiny("sgd", text, lr=1e-3, weight_decay=0.0 if part == "a" else 0.1)
        train(config, tmp_path / part)
    one, other = (torch.load(tmp_path / part / "checkpoint.pt", weights_only=True) for part in "ab")
    groups = other["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert len(groups[1]["params"]) == 3  # two normalisations in the block, one after it
    assert not torch.equal(one["model"]["tokens.weight"], other["model"]["tokens.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "avastep"])
def test_a_run_that_is_stopped_continues_to_the_same_bits(tmp_path: Path, text: str, optimizer: str) -> None:
    config = tiny(optimizer, text)
    train(config, tmp_path / "whole")
    callback = StopAt(3, 5, 13)
    for _ in range(3):
        with pytest.raises(Stopped):
            train(config, tmp_path / "parts", resume=True, callback=callback)
    train(config, tmp_path / "parts", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("optimizer", "lr", "eps"),
    [
        ("adamw", 0.01, 1e-8),
        ("avastep", 0.01, 1e-3),
        ("adopt", 0.01, 1e-6),
        ("avagrad", 1.0, 1e-3),
        ("sgd", 0.1, None),
        ("adashift", 0.01, 0.01),
    ],
)
def test_the_ensemble_is_the_runs(tmp_path: Path, text: str, optimizer: str, lr: float, eps: float | None) -> None:
    common: dict[str, Any] = {"task": f"{__name__}:Gpt64", "eps": eps, "weight_decay": 0.5, "clip": 0.5}
    points = [(lr, eps, 0), (lr / 2, eps, 0)]
    records = train_ensemble(tiny(optimizer, text, lr=lr, **common), points, tmp_path / "all")
    for i, (point, record) in enumerate(zip(points, records, strict=True)):
        result = train(tiny(optimizer, text, lr=point[0], **common), tmp_path / str(i))
        assert record.value == pytest.approx(result["validation"]["error"], rel=1e-9)
        assert record.facts["test"] == pytest.approx(result["test"]["error"], rel=1e-9)


@pytest.mark.slow
def test_a_text_is_learnt(tmp_path: Path) -> None:
    result = train(configure("gpt", "avastep", epochs=2), tmp_path / "run")
    assert result["test"]["error"] < 2.8  # 6.7 bits at the start, 4.7 if only the characters' frequencies are known
    lines = list(read_metrics(tmp_path / "run"))
    assert [line["step"] for line in lines] == [100, 200]
    assert lines[0]["lr"] > lines[-1]["lr"] > 0


def test_tokens_that_training_never_saw_are_among_the_rarest(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", numpy.arange(400) % 10, numpy.full(100, 20))
    task = Gpt(**TINY, data=folder)
    with torch.no_grad():
        bits = task.details(task.new_model().eval())["bits_by_frequency"]
    assert bits[:-1] == [None] * 9
    assert bits[-1] > 0
