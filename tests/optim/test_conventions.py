"""What users of torch.optim take for granted: groups, gradients that come and go, hooks, schedulers."""

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from problems import (
    ALL,
    DELAYED,
    EVERY_PATH,
    NAMES_AND_PATHS,
    as_float64,
    gradients,
    optimizer_class,
    parameters,
    step_with,
)
from torch import Tensor
from torch.optim import lr_scheduler

from avagrad import AvaGrad, AvaGradW, AvaStep


def twin(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


# --- groups and gradients that come and go -------------------------------------------------------


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("active_only", [True, False])
def test_frozen_unfrozen_late_and_absent_parameters(path: str, bias_correction: bool, active_only: bool) -> None:
    """A parameter that starts frozen, one that is frozen later, one in a group added later, one that never has a
    gradient: the norm is the reference's at every step."""
    made = [torch.randn(3, generator=torch.Generator().manual_seed(i)).double() for i in range(5)]
    frozen, leaves, late, never, plain = (torch.nn.Parameter(x) for x in made)
    frozen.requires_grad_(False)
    # Without bias correction and with a frozen parameter fused=True is refused; the default chooses another path.
    how = {} if path == "fused" and not bias_correction else EVERY_PATH[path]
    options: dict[str, Any] = {"lr": 0.1, "eps": 0.01, **how}
    options |= {"bias_correction": bias_correction, "active_only": active_only}
    groups: list[dict[str, Any]] = [{"params": [frozen, leaves]}, {"params": [never, plain], "eps": 0.3}]
    opt = AvaGrad(groups, **options)

    def known(p: Tensor, eps: float, requires_grad: bool = True) -> reference.Param:
        return reference.Param(as_float64(p), 0.1, 0.9, 0.999, eps, 0.0, requires_grad=requires_grad)

    oracle = reference.DelayedFamily(
        [known(frozen, 0.01, False), known(leaves, 0.01), known(never, 0.3), known(plain, 0.3)],
        normalised=True,
        bias_correction=bias_correction,
        active_only=active_only,
    )
    params = [frozen, leaves, never, plain]
    rng = torch.Generator().manual_seed(9)
    for t in range(12):
        if t == 4:
            frozen.requires_grad_(True)
            oracle.params[0].requires_grad = True
        if t == 6:
            leaves.requires_grad_(False)
            oracle.params[1].requires_grad = False
        if t == 8:
            opt.add_param_group({"params": [late], "eps": 1e-4, "lr": 0.02})
            params.append(late)
            oracle.params.append(known(late, 1e-4))
            oracle.params[-1].lr = 0.02
        grads: list[Tensor | None] = [
            torch.randn(3, generator=rng).double()
            if p.requires_grad and p is not never and (p is not late or t > 9)
            else None
            for p in params
        ]
        step_with(opt, params, grads)
        oracle.step([None if g is None else as_float64(g) for g in grads])
        for p, want in zip(params, oracle.params, strict=True):
            torch.testing.assert_close(p.detach(), torch.from_numpy(want.w), rtol=1e-12, atol=1e-13)
        assert opt.gamma() == opt.gamma() == pytest.approx(oracle.gamma(), rel=1e-12)
    assert opt.diagnostics()["gamma"] == pytest.approx(oracle.gamma(), rel=1e-12)


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
def test_no_gradients_at_all(name: str, path: str) -> None:
    params = parameters()
    before = twin(params)
    opt = optimizer_class(name)([{"params": params[:2]}, {"params": params[2:]}, {"params": []}], **EVERY_PATH[path])
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert not opt.state
    step_with(opt, params, [None, torch.ones(()), *[None] * 4])
    step_with(opt, params, [None] * 6)
    assert opt.state[params[1]]["step"] == 1


@pytest.mark.parametrize("path", EVERY_PATH)
def test_the_norm_does_not_depend_on_who_has_a_gradient(path: str) -> None:
    """Theorem 2 needs gamma to be independent of the sample: the same state gives the same gamma."""
    gammas = []
    for second in (torch.ones(3), None):
        a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
        opt = AvaGrad([a, b], betas=(0.0, 0.9), lr=1.0, **EVERY_PATH[path])
        step_with(opt, [a, b], [torch.ones(3), torch.full((3,), 100.0)])
        step_with(opt, [a, b], [torch.ones(3), second])
        gammas.append(a.detach().clone())
    assert torch.equal(*gammas)


def test_a_group_may_hold_anything_of_the_users_own() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    own = {"weights": torch.ones(3), "tags": ("a", torch.ones(2)), "initial_lr": 0.3}
    opt = AvaGrad([{"params": [w], **own}])
    w.grad = torch.ones(2)
    opt.step()
    assert all(opt.param_groups[0][key] is value for key, value in own.items())


def test_named_parameters_and_a_name_of_ones_own() -> None:
    model = torch.nn.Linear(2, 2)
    opt = AvaGrad(model.named_parameters())
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("name", ALL)
def test_splitting_off_a_no_decay_group_keeps_one_gamma(name: str) -> None:
    """Per-group norms would change the algorithm by factors of hundreds."""
    one, two = parameters(torch.float64), parameters(torch.float64)
    whole = optimizer_class(name)(one)
    split = optimizer_class(name)([{"params": two[:1]}, {"params": two[1:4]}, {"params": two[4:]}])
    for grads in gradients(one, 15):
        step_with(whole, one, grads)
        step_with(split, two, grads)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


# --- lr, schedulers, closures, hooks -------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), NAMES_AND_PATHS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_lr_as_a_tensor(name: str, path: str, shape: tuple[int, ...]) -> None:
    one, two = parameters(torch.float64), parameters(torch.float64)
    number = optimizer_class(name)(one, lr=0.03, weight_decay=0.1, **EVERY_PATH[path])
    lr = torch.full(shape, 0.03, dtype=torch.float64)
    tensor = optimizer_class(name)(two, lr=lr, weight_decay=0.1, **EVERY_PATH[path])
    for t, grads in enumerate(gradients(one, 15)):
        if t == 12:
            number.param_groups[0]["lr"] = 0.01
            lr.fill_(0.01)
        step_with(number, one, grads)
        step_with(tensor, two, grads)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda t: t / 5),  # starts at 0
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda t: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [3, 6]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 8),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.001, 0.1, step_size_up=3),  # cycles betas
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20),  # cycles betas
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [4]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 0.01, anneal_epochs=4),
}


def test_the_list_of_schedulers_is_torchs() -> None:
    every = {name for name in lr_scheduler.__all__ if name != "LRScheduler"} | {"SWALR"}
    assert set(SCHEDULERS) == every


@pytest.mark.filterwarnings("ignore:Detected call of")  # reading the scheduler's warning is not our subject
@pytest.mark.parametrize("name", ["AvaGrad", "AvaGradW", "AdaBound"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_every_scheduler(name: str, scheduler: str, tensor_lr: bool) -> None:
    """Ours follows what the scheduler does to lr and betas: the same as setting both by hand."""
    one, two = parameters(torch.float64), parameters(torch.float64)
    opt = optimizer_class(name)(one, lr=torch.tensor(0.05, dtype=torch.float64) if tensor_lr else 0.05)
    by_hand = optimizer_class(name)(two, lr=0.05)
    follow = SCHEDULERS[scheduler](opt)
    for grads in gradients(one, 12):
        for key in ("lr", "betas"):
            value = opt.param_groups[0][key]
            by_hand.param_groups[0][key] = value.item() if isinstance(value, Tensor) else value
        step_with(opt, one, grads)
        step_with(by_hand, two, grads)
        follow.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
        assert p.isfinite().all()


def test_adabound_follows_a_schedule_from_its_base_lr() -> None:
    """base_lr is the group's first lr: it survives schedulers, checkpoints and late groups."""
    a, b = parameters()[0], parameters()[4]
    opt = optimizer_class("AdaBound")([a], lr=0.01)
    lr_scheduler.LambdaLR(opt, lambda t: 0.5)
    assert opt.param_groups[0]["lr"] == 0.005
    opt.add_param_group({"params": [b], "lr": torch.tensor(0.25)})
    assert [group["base_lr"] for group in opt.param_groups] == [0.01, 0.25]
    again = optimizer_class("AdaBound")([{"params": [a]}, {"params": [b]}], lr=1.0)
    again.load_state_dict(opt.state_dict())
    assert [group["base_lr"] for group in again.param_groups] == [0.01, 0.25]
    zero = optimizer_class("AdaBound")([a], lr=0.0)
    zero.param_groups[0]["lr"] = 0.01
    a.grad = torch.ones_like(a)
    zero.step()
    assert a.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_closure_hooks_and_zero_grad(name: str) -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    opt = optimizer_class(name)([w])
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = w.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        calls.append("closure")
        return loss

    with torch.no_grad():
        assert opt.step(closure) == 5
    assert calls == ["pre", "closure", "post"]
    opt.zero_grad(set_to_none=False)
    assert torch.equal(w.grad, torch.zeros(2))  # type: ignore[arg-type]
    opt.zero_grad()
    assert w.grad is None


@pytest.mark.parametrize("name", ALL)
def test_the_first_step_is_dead_only_with_bias_correction(name: str) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = optimizer_class(name)([w], weight_decay=0.1)
    w.grad = torch.ones(3)
    opt.step()
    moved = not torch.equal(w, torch.ones(3))
    assert moved == (name == "AdaBound")
    if name in DELAYED and name != "AvaStep":
        v = torch.nn.Parameter(torch.ones(3).double())
        opt = optimizer_class(name)([v], lr=0.5, eps=0.1, bias_correction=False)
        v.grad = torch.ones(3).double()
        opt.step()
        gamma_eta = 10.0 if name == "DelayedAdam" else 1.0
        torch.testing.assert_close(v.detach(), torch.full_like(v, 1 - 0.5 * gamma_eta * 0.1))


# --- weight decay that destroys the weights ---


def decayed(make: Any, lr: Any, decay: float) -> tuple[Any, torch.nn.Parameter]:
    w = torch.nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    return make([w], lr=lr, weight_decay=decay), w


@pytest.mark.parametrize(
    ("make", "says"), [(AvaGradW, "lr is on SGD's scale here"), (AvaStep, "lr is on Adam's scale here")]
)
def test_a_decay_of_more_than_five_percent_is_warned_of_once(make: Any, says: str) -> None:
    opt, _ = decayed(make, 0.0, 0.1)
    opt.step()  # a warm-up from 0
    opt.param_groups[0]["lr"] = 1.0
    with pytest.warns(
        UserWarning, match=f"lr \\* weight_decay is 0.1, so that each step shrinks every weight by 10 %. {says}"
    ) as all_:
        opt.step()
    assert all_[0].filename == __file__  # of the caller's line
    opt.step()  # and not again: warnings are errors here


def test_warnings_name_the_line_of_the_user() -> None:
    """Behind a scheduler, a scaler, or a closure, which wrap step()."""
    opt, w = decayed(AvaStep, 1.0, 0.1)
    lr_scheduler.LambdaLR(opt, lambda _: 1.0)
    with pytest.warns(UserWarning, match="each step shrinks every weight") as all_:
        opt.step(lambda: 0.0)
    assert all_[0].filename == __file__
    opt, w = decayed(AvaStep, 1.0, 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.sum())  # makes its scale
    with pytest.warns(UserWarning, match="each step shrinks every weight") as all_:
        scaler.step(opt)
    assert all_[0].filename == __file__
    adam = torch.optim.Adam([w])
    adam.step()
    with pytest.warns(UserWarning, match="from another optimizer") as all_:
        opt.load_state_dict(adam.state_dict())
    assert all_[0].filename == __file__


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_parameters_that_have_no_shape_yet(how: dict[str, Any]) -> None:
    lazy, plain = torch.nn.LazyLinear(4), torch.nn.Linear(3, 2)
    opt = AvaGrad([*lazy.parameters(), *plain.parameters()], **how)
    for _ in range(3):
        plain(torch.ones(2, 3)).sum().backward()
        opt.step()
    before = plain.weight.detach().clone()
    lazy(torch.ones(2, 3)).sum().backward()
    opt.step()
    lazy(torch.ones(2, 3)).sum().backward()
    weight = lazy.weight.detach().clone()
    opt.step()
    assert not torch.equal(weight, lazy.weight)
    assert not torch.equal(before, plain.weight)


@pytest.mark.parametrize(
    ("make", "lr", "decay"),
    [(AvaGradW, 0.5, 0.1), (AvaGrad, 1.0, 0.1), (AvaGradW, torch.tensor(1.0), 0.1), (AvaStep, 1e-3, 0.1)],
)
def test_other_decays_are_not_warned_of(make: Any, lr: Any, decay: float) -> None:
    opt, _ = decayed(make, lr, decay)
    opt.step()
