"""Digits and characters: the data are what they are said to be, the models compute what they should, and they learn."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from avagrad.lab.config import configure
from avagrad.lab.methods import METHODS, Method
from avagrad.lab.models.char_lstm import CharLSTM, Dropouts
from avagrad.lab.models.small import DigitsConv, DigitsMLP
from avagrad.lab.presets import PRESETS
from avagrad.lab.tasks.chars import Chars
from avagrad.lab.tasks.digits import Digits
from avagrad.lab.train import train

# --- the LSTM ---


def reference(model: Any, tokens: torch.Tensor, state: Any, masks: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The model, written out gate by gate, one character at a time."""
    one = torch.ones(())
    embedding = model.embedding * (one if masks is None else masks.embedding)
    outputs, state = [], list(state)
    for row in tokens:
        x = embedding[row] * (one if masks is None else masks.activations[0])
        for i, layer in enumerate(model.layers):
            h, c = state[2 * i : 2 * i + 2]
            w_hh = layer.weight_hh_l0 * (one if masks is None else masks.weights[i])
            gates = x @ layer.weight_ih_l0.t() + layer.bias_ih_l0 + h @ w_hh.t() + layer.bias_hh_l0
            i_, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i_) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            state[2 * i : 2 * i + 2] = h, c
            x = h * (one if masks is None else masks.activations[i + 1])
        outputs.append(x @ model.embedding.t() + model.output_bias)
    return torch.stack(outputs), state


@pytest.mark.parametrize("with_masks", [False, True])
def test_the_lstm_is_its_equations(with_masks: bool) -> None:
    torch.manual_seed(0)
    model = CharLSTM(7, embedding=4, hidden=6, dropouts=Dropouts(0.5, 0.3, 0.4, 0.3)).double()
    tokens = torch.randint(7, (9, 3))
    state = tuple(torch.randn_like(part) for part in model.zero_state(3))
    masks = model.draw_masks(3, torch.Generator().manual_seed(1)) if with_masks else None
    logits, after = model(tokens, state, masks)
    expected, expected_after = reference(model, tokens, state, masks)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for part, other in zip(after, expected_after, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    theirs = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_masks_keep_the_right_share_and_the_mean() -> None:
    model = CharLSTM(2000, embedding=40, hidden=50, dropouts=Dropouts(0.5, 0.1, 0.25, 0.2))
    masks = model.draw_masks(100, torch.Generator().manual_seed(0))
    shares = [(masks.embedding, 0.2)]
    shares += list(zip(masks.activations, (0.1, 0.25, 0.25, 0.1), strict=True))
    shares += [(mask, 0.5) for mask in masks.weights]
    for mask, p in shares:
        assert sorted(torch.unique(mask).tolist()) == [0.0, pytest.approx(1 / (1 - p))]
        assert (mask == 0).double().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / mask.numel()))


def test_the_papers_sizes() -> None:
    for preset, hidden, million in (("paper", 1000, 13.8), ("paper-search", 300, 1.74)):
        settings = {name: value.value for name, value in PRESETS["chars"][preset].items()}
        model = CharLSTM(50, settings["embedding"], settings["hidden"], settings["layers"])
        assert settings["hidden"] == hidden
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(million, abs=0.02)
    drops = {name: value.value for name, value in PRESETS["chars"]["paper"].items() if "drop" in name}
    assert Dropouts(*drops.values()) == Dropouts()  # the paper's are the model's defaults


# --- characters ---


def test_rows_are_read_through_with_their_state_carried() -> None:
    task = Chars(batch_size=16, bptt=37)
    pieces = [task.batch(None, i) for i in range(task.steps_per_epoch)]
    rows = torch.cat([inputs for inputs, _ in pieces] + [pieces[-1][1][-1:]])
    assert torch.equal(rows, task.rows["train"].long())
    model = task.new_model().eval()
    assert isinstance(model, CharLSTM)
    with torch.no_grad():
        state, losses = task.start(model), []
        for piece in pieces[:5]:
            logits, state = model(piece[0], state)
            losses.append(logits)
        whole, _ = model(torch.cat([inputs for inputs, _ in pieces[:5]]), task.start(model))
    torch.testing.assert_close(torch.cat(losses), whole)


def test_options_that_do_nothing_are_remarked_on() -> None:
    assert Chars().remarks == ()
    assert "hidden and dropout_between had no effect" in Chars(hidden=9, dropout_between=0.1).remarks[0]
    assert Chars(hidden=9, dropout_between=0.1, layers=2).remarks == ()


def test_bits_of_a_model_that_knows_nothing() -> None:
    task = Chars()
    model = task.new_model()
    assert isinstance(model, CharLSTM)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        score = task.evaluate(model.eval(), "test")
    assert score.error == pytest.approx(math.log2(len(task.alphabet)))
    assert score.loss == pytest.approx(math.log(len(task.alphabet)))


def test_a_full_run_trains_on_the_validation_part_too() -> None:
    for cls in (Digits, Chars):
        assert cls(full=True).steps_per_epoch > cls().steps_per_epoch


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 0}, "layers is 0, but must be at least 1"),
        ({"weight_drop": 1.0}, "weight_drop is 1.0, but must be at least 0 and below 1"),
        ({"batch_size": 10**6}, "the train part has"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Chars(**options)


# --- digits ---


def test_the_parts_do_not_overlap_and_do_not_depend_on_the_seed() -> None:
    one, other = Digits(seed=1), Digits(seed=2)
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != Digits(full=True).fingerprint()
    images = torch.cat([images for images, _ in one.parts.values()]).flatten(1)
    assert len(images) == 1797
    assert len(torch.unique(images, dim=0)) == 1797  # no image of the set is there twice
    train_images, _ = one.parts["train"]
    assert train_images.mean().item() == pytest.approx(0, abs=1e-5)
    assert train_images.std().item() == pytest.approx(1, abs=1e-5)


def test_every_epoch_has_its_own_order() -> None:
    task = Digits()
    orders = [task.order(0), task.order(1), Digits(seed=1).order(0)]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0], Digits().order(0))


@pytest.mark.parametrize("model", [DigitsMLP(), DigitsConv()], ids=["mlp", "conv"])
def test_no_bias_stands_before_a_batch_norm(model: nn.Module) -> None:
    layers = [layer for layer in model.modules() if not list(layer.children())]
    for before, after in itertools.pairwise(layers):
        if isinstance(after, (nn.BatchNorm1d, nn.BatchNorm2d)):
            assert before.bias is None
    assert not any(isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d)) for layer in layers)


def test_the_mlp_is_64_32_32_10() -> None:
    assert [tuple(layer.weight.shape) for layer in DigitsMLP() if isinstance(layer, nn.Linear)] == [
        (32, 64),
        (32, 32),
        (10, 32),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "most"), [("mlp", 4.0), ("conv", 2.5)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "avagrad"])
def test_digits_are_learnt(tmp_path: Any, optimizer: str, model: str, most: float) -> None:
    errors = []
    for seed in range(3):
        config = configure("digits", optimizer, seed=seed, threads=1, task_options={"model": model})
        errors.append(train(config, tmp_path / str(seed))["test"]["error"])
    assert sum(errors) / 3 <= most, errors


@pytest.mark.parametrize("optimizer", METHODS)
def test_every_method_learns_the_digits(tmp_path: Any, optimizer: str) -> None:
    assert train(configure("digits", optimizer, threads=1), tmp_path / "run")["test"]["error"] <= 5


@pytest.mark.slow
def test_characters_are_learnt(tmp_path: Any) -> None:
    result = train(configure("chars"), tmp_path / "run")
    assert result["test"]["error"] < 2.6


def test_missing_scikit_learn_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        Digits()


# --- the records ---


@pytest.mark.parametrize("record", METHODS.values(), ids=METHODS)
def test_records_are_complete_and_sourced(record: Method) -> None:
    for settings in (record.defaults, *record.settings.values()):
        for name, value in settings.items():
            assert value.source in ("paper", "release", "ours"), name
    for task, preset in record.settings:
        if task in PRESETS:
            assert preset in PRESETS[task]
    assert record.build([nn.Parameter(torch.zeros(1))], {"lr": 0.1}).defaults["lr"] == 0.1


def test_protocols_are_complete() -> None:
    for protocols in PRESETS.values():
        for protocol in protocols.values():
            assert protocol.keys() >= {"epochs", "milestones", "factor", "weight_decay", "clip"}
