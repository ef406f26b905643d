"""States that are saved and loaded: to the bit, nothing shared, from Adam too, and by torch.distributed.checkpoint."""

import contextlib
import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from problems import ALL, DELAYED, EVERY_PATH, NAMES_AND_PATHS, gradients, optimizer_class, own_options, parameters
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from avagrad import AvaGrad, AvaStep
from avagrad.optim.backends import fused

STEPS, BREAK_AT = 20, 12
NAN = float("nan")


def train(opt: Any, params: list[torch.nn.Parameter], grads: list[list[Tensor | None]]) -> None:
    for now in grads:
        for p, g in zip(params, now, strict=True):
            p.grad = None if g is None else g.clone()
        opt.step()


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["state_dict", "file", "pickle", "deepcopy"])
def test_resume_is_exact_to_the_bit(name: str, path: str, dtype: torch.dtype, way: str) -> None:
    options: dict[str, Any] = {"weight_decay": 0.1, **EVERY_PATH[path]}
    params = parameters(dtype)
    grads = list(gradients(params, STEPS))
    undisturbed = optimizer_class(name)(params, **options)
    train(undisturbed, params, grads[:BREAK_AT])

    if way in ("pickle", "deepcopy"):
        # As one object, so that the optimizer goes on with the copies of the parameters.
        both = {"params": params, "opt": undisturbed}
        copied = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
        others, resumed = copied["params"], copied["opt"]
    else:
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = optimizer_class(name)(others, **options)
        state = undisturbed.state_dict()
        resumed.load_state_dict(through_file(state) if way == "file" else state)

    train(undisturbed, params, grads[BREAK_AT:])
    train(resumed, others, grads[BREAK_AT:])
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        for key, value in undisturbed.state[p].items():
            assert torch.equal(value, resumed.state[q][key])
            assert value.dtype == resumed.state[q][key].dtype
            assert value.data_ptr() != resumed.state[q][key].data_ptr() or value.numel() == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_half_precision_parameters_stay_float32(name: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    opt = optimizer_class(name)(params, weight_decay=0.1)
    train(opt, params, list(gradients(params, 3)))
    saved = opt.state_dict()
    fresh = optimizer_class(name)(params)
    fresh.load_state_dict(saved)
    lossy = 0
    for i, p in enumerate(params):
        for key, value in saved["state"].get(i, {}).items():
            assert value.dtype == torch.float32
            assert fresh.state[p][key].dtype == torch.float32
            assert torch.equal(value.view(torch.int32), fresh.state[p][key].view(torch.int32))
            lossy += int((value != value.to(dtype).float()).sum())
    assert lossy  # or casting to half and back would have passed as well


def test_hooks_of_the_user_see_and_change_what_is_loaded() -> None:
    params = parameters(torch.bfloat16)
    opt = AvaGrad(params)
    train(opt, params, list(gradients(params, 3)))
    fresh = AvaGrad(params)

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {i: {k: x * 2 if k == "exp_avg" else x for k, x in s.items()} for i, s in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def forget(opt: Any) -> None:
        assert opt.state[params[0]]["exp_avg"].dtype == torch.float32
        opt.state[params[1]]["exp_avg"].zero_()

    fresh.register_load_state_dict_pre_hook(double)
    fresh.register_load_state_dict_post_hook(forget)
    fresh.load_state_dict(opt.state_dict())
    assert torch.equal(fresh.state[params[0]]["exp_avg"], 2 * opt.state[params[0]]["exp_avg"])
    assert fresh.state[params[1]]["exp_avg"] == 0
    assert opt.state[params[1]]["exp_avg"] != 0  # nothing is shared
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == len(fresh._optimizer_load_state_dict_post_hooks) == 1


@pytest.mark.parametrize("foreign", [False, True])
def test_entries_of_a_state_that_belong_to_no_parameter(foreign: bool) -> None:
    """torch allows them, and copies them along."""
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    saver: Any = torch.optim.Adam([w]) if foreign else AvaStep([w])
    saver.step()
    saved = saver.state_dict()
    saved["state"]["calls"] = 5
    opt = AvaStep([w], lr=0.5)
    with pytest.warns(UserWarning, match="another optimizer") if foreign else contextlib.nullcontext():
        opt.load_state_dict(saved)
    before = w.detach().clone()
    opt.step()
    assert not torch.equal(before, w)
    assert opt.state_dict()["state"]["calls"] == 5


def _init_optim_state(opt: Any) -> None:
    opt.step()


def test_only_torch_asks_for_a_state() -> None:
    """A function of yours may have the name of torch's: its first step in a warm-up from 0 is a step."""
    w = torch.nn.Parameter(torch.ones(2))
    opt = AvaStep([w], lr=0.0)
    w.grad = torch.ones(2)
    _init_optim_state(opt)
    assert opt.state[w]["step"] == 1


@pytest.mark.parametrize("name", [*DELAYED, "AdaBound"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adam_state_can_be_loaded(name: str, amsgrad: bool, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    grads = list(gradients(params, STEPS))
    adam = torch.optim.Adam(params, lr=0.003, amsgrad=amsgrad)
    train(adam, params, grads[:5])
    opt = optimizer_class(name)(params, lr=0.7, eps=0.01, weight_decay=0.02)
    with pytest.warns(UserWarning, match="from another optimizer") as warned:
        opt.load_state_dict(through_file(adam.state_dict()))
    group = opt.param_groups[0]
    adopted = (0.003, 0.01, 0.0) if name == "AvaStep" else (0.7, 0.01, 0.02)  # what Adam's mean is what AvaStep's mean
    assert (group["lr"], group["eps"], group["weight_decay"]) == adopted
    assert ("Not used: max_exp_avg_sq." in str(warned[0].message)) == amsgrad
    assert "amsgrad" not in group
    for p in params:
        assert set(opt.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(opt.state[p]["step"], adam.state[p]["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][key], adam.state[p][key].to(opt.state[p][key].dtype))
    before = [p.detach().clone() for p in params]
    train(opt, params, grads[5:6])
    assert not torch.equal(params[0], before[0])  # the first step is not dead: there are moments already


@pytest.mark.parametrize("saved", DELAYED)
@pytest.mark.parametrize("loading", DELAYED)
def test_a_state_of_a_sibling_brings_its_moments_alone(saved: str, loading: str) -> None:
    """lr, eps and weight_decay mean other things there."""
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    before = optimizer_class(saved)([w], lr=0.5, eps=10.0)
    before.step()
    opt = optimizer_class(loading)([w], lr=0.25, eps=0.01)
    if saved == loading:
        opt.load_state_dict(before.state_dict())
    else:
        with pytest.warns(UserWarning, match="from another optimizer"):
            opt.load_state_dict(before.state_dict())
    assert opt.param_groups[0]["lr"] == (0.5 if saved == loading else 0.25)
    assert ("norm" in opt.param_groups[0]) == (loading != "DelayedAdam")
    assert torch.equal(opt.state[w]["exp_avg"], before.state[w]["exp_avg"])


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
def test_a_model_that_becomes_float64_in_mid_run(name: str, path: str) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = optimizer_class(name)([w], lr=0.1, **EVERY_PATH[path])
    w.grad = torch.ones(3)
    opt.step()
    w.data = torch.full((3,), 1 / 3, dtype=torch.float64)
    w.grad = torch.ones(3, dtype=torch.float64)
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    assert (w == 1 / 3).all()
    assert all(x.dtype == torch.float64 for key, x in opt.state[w].items() if key != "step" and x.dim())


def test_an_old_adam_state_counts_in_python_numbers() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([w])
    w.grad = torch.ones(2)
    adam.step()
    state = adam.state_dict()
    state["state"][0]["step"] = 1
    opt = AvaGrad([w])
    with pytest.warns(UserWarning, match="from another optimizer"):
        opt.load_state_dict(state)
    assert opt.state[w]["step"].item() == 1


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda s: s["state"][0].pop("exp_avg_sq"), r"has no exp_avg_sq, but must have step, exp_avg, exp_avg_sq"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(5)), r"exp_avg has the shape \(5,\), but must have \(2,\)"),
        (lambda s: s["state"][0].update(exp_avg=None), r"has no exp_avg, but must have step, exp_avg, exp_avg_sq"),
        (lambda s: s["state"][0].update(step=None), r"has no step, but must have step, exp_avg, exp_avg_sq"),
        (
            lambda s: s["state"].update({0: None}),
            r"the loaded state of a parameter of shape \(2,\) is None, but must be",
        ),
        (
            lambda s: s["state"][0].update(exp_avg=torch.zeros(2).to_sparse()),
            r"(?s)the loaded exp_avg .*layout=torch.sparse_coo.* but must be a tensor, real and dense",
        ),
        (
            lambda s: s["state"][0].update(exp_avg=torch.zeros(2, dtype=torch.complex64)),
            r"the loaded exp_avg .*0.\+0.j.* but must be a tensor, real and dense",
        ),
        (lambda s: s["state"][0].update(exp_avg=0.5), r"the loaded exp_avg .*\(2,\) is 0.5, but must be a tensor"),
        (lambda s: s["state"][0].update(step="3"), r"the loaded step .* is '3', but must be a tensor"),
        (lambda s: s["state"][0].update(step=torch.tensor(NAN)), r"the loaded step .* holds a NaN"),
        (lambda s: s["state"][0].update(step=-2), r"the loaded step .* holds -2, but must hold numbers of at least 0"),
        (lambda s: s["state"][0].update(exp_avg=torch.tensor([NAN, 1.0])), r"the loaded exp_avg .* holds a NaN"),
        (lambda s: s["state"][0].update(exp_avg_sq=torch.tensor([1.0, -1.0])), r"the loaded exp_avg_sq .* holds -1"),
        (lambda s: s["param_groups"][0]["params"].pop(), r"has \[\d\] parameters in its groups, but must have \[\d\]"),
        (
            lambda s: s["param_groups"].append(s["param_groups"][0]),
            r"parameters in its groups, but must have .* make the optimizer with the same",
        ),
        (lambda s: s["param_groups"][0].update(eps=0.0), "eps is 0.0, but must be a number from 1e-15 to 1e"),
        (lambda s: s.pop("state"), r"state_dict is a dict that begins with the keys \['param_groups'\], but must be"),
        (lambda s: s.clear(), r"state_dict is a dict that begins with the keys \[\], but must be that of an optimizer"),
    ],
)
def test_a_state_that_does_not_fit_is_rejected_and_nothing_is_lost(break_it: Any, sentence: str) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    opt = AvaGrad([w])
    w.grad = torch.ones(2)
    opt.step()
    kept, bad = copy.deepcopy(opt.state_dict()), copy.deepcopy(opt.state_dict())
    break_it(bad)
    with pytest.raises(ValueError, match=sentence):
        opt.load_state_dict(bad)
    assert str(opt.state_dict()) == str(kept)
    opt.step()


@pytest.mark.parametrize("given", [None, "model.pt", 3])
def test_a_state_must_be_a_dict(given: Any) -> None:
    opt = AvaGrad([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=f"state_dict is {given!r}, but must be that of an optimizer"):
        opt.load_state_dict(given)


@pytest.mark.parametrize("name", ["AdaShift", "AvaGrad"])
@pytest.mark.parametrize("path", ["loop", "default"])
def test_the_whole_state_follows_a_parameter_to_another_dtype(name: str, path: str) -> None:
    """Scalars of the state, and the rounding error so far, too."""
    more: dict[str, Any] = {"foreach": False} if path == "loop" and name == "AvaGrad" else {}
    options = more | ({"keep": 1} if name == "AdaShift" else {"rounding": "kahan"})
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = optimizer_class(name)([w], **options)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        w.data = w.data.to(dtype)
        for _ in range(3):
            w.grad = torch.ones_like(w)
            opt.step()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found = {key: x.dtype for key, x in opt.state[w].items() if key != "step"}
        assert found.pop("compensation", dtype) == dtype
        assert set(found.values()) == {wide}


def test_the_warning_about_another_optimizers_state_has_the_values_of_all_groups() -> None:
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    adamw = torch.optim.AdamW([{"params": [a], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.0, "lr": 1e-4}])
    a.grad = b.grad = torch.ones(2)
    adamw.step()
    opt = AvaStep([{"params": [a]}, {"params": [b]}])
    values = r"counts, lr=0\.001 and 0\.0001, betas=\(0\.9, 0\.999\), weight_decay=0\.1 and 0\.0, decoupled"
    with pytest.warns(UserWarning, match=values):
        opt.load_state_dict(adamw.state_dict())
    assert [(group["lr"], group["weight_decay"]) for group in opt.param_groups] == [(1e-3, 0.1), (1e-4, 0.0)]


def _loaded(opt: Any, **more: Any) -> Any:
    state = opt.state_dict()
    state["param_groups"][0].update(more)
    opt.load_state_dict(state)
    return opt


AGAIN: dict[str, Any] = {
    "loaded": _loaded,
    "loaded from another version": lambda opt: _loaded(opt, differentiable=False),
    "copied": copy.deepcopy,
    "pickled": lambda opt: pickle.loads(pickle.dumps(opt)),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("again", AGAIN)
def test_groups_keep_their_keys(name: str, again: str) -> None:
    """torch's __setstate__ adds one of its own."""
    opt = optimizer_class(name)([torch.nn.Parameter(torch.ones(2))])
    keys, defaults = set(opt.param_groups[0]), set(opt.defaults)
    opt = AGAIN[again](opt)
    assert (set(opt.param_groups[0]), set(opt.defaults)) == (keys, defaults)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("how", [{"full_state_dict": True}, {"flatten_optimizer_state_dict": True}, {}], ids=str)
@pytest.mark.parametrize("resumed", ["saved", "loading"])
def test_a_training_that_was_resumed_is_saved_and_loaded_again(name: str, how: dict[str, Any], resumed: str) -> None:
    trainings = []
    for which in ("saved", "loading"):
        model, batches = model_and_batches()
        opt = optimizer_class(name)(model.parameters())
        fit(model, opt, batches[:BREAK_AT])
        trainings.append((model, _loaded(opt) if which == resumed else opt))
    (model, opt), (other, loading) = trainings
    options = StateDictOptions(**how)
    set_optimizer_state_dict(other, loading, get_optimizer_state_dict(model, opt, options=options), options=options)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(opt.state[p][key], loading.state[q][key]) for key in opt.state[p])


def test_a_state_is_converted_in_the_same_order_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of DTensors may be collective; the order of a set of strings differs between processes."""
    w, converted = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), []
    opt = AvaGrad([w], rounding="kahan")
    w.grad = torch.ones_like(w)
    opt.step()
    opt.refresh()
    laid_out_as = fused.laid_out_as

    def recorded(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        converted.append(next(key for key, value in opt.state[p].items() if value is x))
        return laid_out_as(p, x)

    monkeypatch.setattr(fused, "laid_out_as", recorded)
    opt.step()
    assert converted == ["exp_avg", "exp_avg_sq", "compensation"]


def test_adashift_rejects_a_state_without_its_gradients() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([w])
    w.grad = torch.ones(2)
    adam.step()
    opt = optimizer_class("AdaShift")([w])
    with pytest.raises(ValueError, match="has no grad_0"):
        opt.load_state_dict(adam.state_dict())


def test_numpy_numbers_do_not_reach_a_checkpoint() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    opt = AvaGrad([{"params": [w], "lr": np.float64(0.5)}], eps=np.float32(0.25), betas=(np.float64(0.5), 0.75))  # type: ignore[arg-type]
    assert through_file(opt.state_dict())["param_groups"][0]["betas"] == (0.5, 0.75)
    assert type(opt.param_groups[0]["lr"]) is float


# --- torch.distributed.checkpoint ----------------------------------------------------------------


def model_and_batches(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(dtype)
    return model, [torch.randn(16, 4, dtype=dtype) for _ in range(STEPS)]


def fit(model: torch.nn.Module, opt: Any, batches: list[Tensor]) -> None:
    for x in batches:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.1)}, {"capturable": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("bias_correction", [True, False])
def test_asking_a_fresh_optimizer_for_its_state_changes_nothing(
    name: str, options: dict[str, Any], bias_correction: bool
) -> None:
    more = own_options(name, bias_correction=bias_correction, eps=0.1) if name in DELAYED else {}
    ends = []
    for ask in (False, True):
        model, batches = model_and_batches()
        never_used = torch.nn.Parameter(torch.ones(1000, 7))  # whose first rates are 1 / eps, asked or not
        model.register_parameter("never_used", never_used)
        opt = optimizer_class(name)(model.parameters(), weight_decay=0.1, **options, **more)
        if ask:
            state: Any = get_optimizer_state_dict(model, opt)
            assert state["state"]["0.weight"]["step"] == 0
        fit(model, opt, batches)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_step_with_lr_0_is_a_step_like_any_other(name: str, path: str, tensor_lr: bool) -> None:
    """Also the first one, in a warm-up that starts at 0: the moments and counts are those of a tiny lr."""
    ends = []
    for first in (0.0, 1e-30):
        w = torch.nn.Parameter(torch.ones(2))
        group: dict[str, Any] = {"params": [w]} | ({"base_lr": 0.1} if name == "AdaBound" else {})
        opt = optimizer_class(name)([group], lr=torch.tensor(first) if tensor_lr else first, **EVERY_PATH[path])
        for t in range(4):
            opt.param_groups[0]["lr"] = (first, 0.0, 0.1, 0.0)[t]
            w.grad = torch.tensor([3.0, 1.0 + t])
            opt.step()
            assert opt.state[w]["step"] == t + 1
        ends.append([w.detach(), *(x.cpu() for x in opt.state[w].values())])
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flatten", [False, True])
def test_a_state_goes_through_set_optimizer_state_dict_to_the_bit(name: str, dtype: torch.dtype, flatten: bool) -> None:
    model, batches = model_and_batches(dtype)
    opt = optimizer_class(name)(model.parameters())
    fit(model, opt, batches[:BREAK_AT])
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=how))
    other, _ = model_and_batches(dtype)
    other.load_state_dict(model.state_dict())
    resumed = optimizer_class(name)(other.parameters())
    set_optimizer_state_dict(other, resumed, saved, options=how)
    fit(model, opt, batches[BREAK_AT:])
    fit(other, resumed, batches[BREAK_AT:])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in opt.state[p].items():
            assert torch.equal(value, resumed.state[q][key])
            assert value.dtype == resumed.state[q][key].dtype


def test_a_scheduler_that_is_restored_brings_adamws_lr_back_and_the_warning_says_so() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    adamw = torch.optim.AdamW([w], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda t: 1.0)
    adamw.step()
    scheduler.step()
    for name, lr in (("AvaGradW", 0.5), ("AvaStep", 1e-3)):
        opt = optimizer_class(name)([w], lr=0.5)
        restored = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1.0)
        with pytest.warns(UserWarning, match="from another optimizer") as warned:
            opt.load_state_dict(adamw.state_dict())
        assert opt.param_groups[0]["lr"] == lr
        assert ("restores that optimizer's lr: make a new scheduler" in str(warned[0].message)) == (name == "AvaGradW")
        restored.load_state_dict(scheduler.state_dict())
        opt.step()
        restored.step()
        assert opt.param_groups[0]["lr"] == 1e-3  # for AvaStep that is right
        restored.base_lrs = [0.5]
        restored.step()
        assert opt.param_groups[0]["lr"] == 0.5
