"""Stepping inside backward: the ordinary step's bits, and no gradients left."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import ALL, DELAYED, FUSED_PATHS, is_fused, optimizer_class, own_options, take_fused_path
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

from avagrad import AvaGrad

PATHS = ("loop", "foreach", *FUSED_PATHS)


class Model(torch.nn.Module):
    """Shared weights, a frozen one, one that is used in some steps alone, one that never is, channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.shared = torch.nn.Linear(36, 36)
        self.sometimes = torch.nn.Parameter(torch.randn(36))
        self.never = torch.nn.Parameter(torch.ones(7))
        self.frozen = torch.nn.Parameter(torch.ones(36), requires_grad=False)
        self.head = torch.nn.Linear(36, 3)

    def forward(self, x: Tensor, t: int) -> Tensor:
        x = self.conv(x).mean(1).flatten(1) * 2
        x = torch.nn.functional.pad(x, (0, 36 - x.shape[1]))
        for _ in range(2):
            x = torch.tanh(self.shared(x)) * self.frozen
        if t % 3 == 1:
            x = x * self.sometimes
        return torch.as_tensor(self.head(x))


def batches(n: int, device: str) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(4, 2, 5, 5, generator=rng).to(device) for _ in range(n)]


def options_of(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    if path in FUSED_PATHS:
        return take_fused_path(path, monkeypatch), {"fused": True}
    if name == "AdaShift":
        return "cpu", {}
    return "cpu", {"foreach": path == "foreach"}


def train(
    make: Callable[[list[Any]], Any],
    in_backward: bool,
    with_frozen: bool,
    steps: int = 7,
    device: str = "cpu",
) -> tuple[Model, Any]:
    model = Model().to(device)
    opt = make([p for p in model.parameters() if p.requires_grad or with_frozen])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for t, x in enumerate(batches(steps, device)):
        loss = model(x, t).square().mean()
        before = copy.deepcopy(model.state_dict())
        if in_backward:
            with opt.step_in_backward():
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
            moved = {key for key, w in model.state_dict().items() if not torch.equal(w, before[key])}
            assert bool(moved) == (t > first_move(opt))
        else:
            opt.zero_grad()
            loss.backward()
        opt.step()
        scheduler.step()
    return model, opt


def first_move(opt: Any) -> int:
    """Return the last step of the beginning, in which nothing moves."""
    group = opt.param_groups[0]
    if "keep" in group:
        return int(group["keep"]) - 1
    moves_at_once = type(opt).__name__ == "AdaBound" or not group.get("bias_correction", True)
    return -1 if moves_at_once else 0


def assert_same(one: tuple[Model, Any], two: tuple[Model, Any]) -> None:
    for p, q in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(p, q)
        mine, theirs = one[1].state.get(p, {}), two[1].state.get(q, {})
        if theirs and not mine:  # made before it was known that there would be no gradient
            assert theirs["step"] == 0
            continue
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key].cpu(), theirs[key].cpu()) for key in mine)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=pytest.mark.slow if path == "triton" else ())
        for name in ALL
        for path in PATHS
        if name in DELAYED or path not in FUSED_PATHS
    ],
)
def test_the_same_bits_as_the_ordinary_step(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = options_of(path, name, monkeypatch)
    if name == "AdaShift":
        options["keep"] = 2
    choices: list[dict[str, Any]] = [{}]
    if name in DELAYED:
        choices += [{"bias_correction": False, "eps": 0.01}, {"active_only": True, "maximize": True}]
        choices += [{"clip_update": 0.5, "eps": 1e-4}]
        choices = [own_options(name, **choice) for choice in choices]
    for choice in choices:
        make = lambda params: optimizer_class(name)(params, lr=0.05, weight_decay=0.1, **choice, **options)  # noqa: B023, E731
        ends = [
            train(make, in_backward, choice.get("bias_correction", True), device=device)
            for in_backward in (False, True)
        ]
        assert_same(*ends)
        if path in FUSED_PATHS:
            assert is_fused(ends[1][1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_half_precision(path: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = options_of(path, "AvaGrad", monkeypatch)
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, device=device).to(torch.bfloat16)) for n in (300, 7, 1)]
        opt = AvaGrad(params, lr=0.5, rounding=rounding, **options)
        for t in range(6):
            loss = sum((p.float() * (t - 2)).square().sum() for p in params)
            assert isinstance(loss, Tensor)
            if in_backward:
                with opt.step_in_backward():
                    loss.backward()  # type: ignore[no-untyped-call]
            else:
                opt.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
        ends.append([*params, *(opt.state[p].get("compensation", p) for p in params)])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_ordinary_steps_and_these_may_be_mixed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = options_of(path, "AvaGrad", monkeypatch)
    ends = []
    for kinds in ([False] * 8, [False, True, True, False, True, False, False, True]):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(20, device=device))
        late = torch.nn.Parameter(torch.ones(3, device=device))
        opt = AvaGrad([w], eps=0.01, **options)
        for t, in_backward in enumerate(kinds):
            if t == 4:
                opt.add_param_group({"params": [late], "eps": 0.3})
            opt.zero_grad()
            loss = (w.square() * torch.arange(20, device=device)).sum() + (late * t).sum()
            if in_backward:
                with opt.step_in_backward():
                    loss.backward()  # type: ignore[no-untyped-call]
                    opt.step()
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                opt.step()
            late.grad = late.grad if t >= 4 else None
        ends.append((w, late))
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_each_gradient_is_freed_before_the_next_one_is_complete() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    opt = AvaGrad(layers.parameters())
    alive: list[int] = []
    with opt.step_in_backward():
        for p in layers.parameters():  # after ours
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: alive.append(sum(q.grad is not None for q in layers.parameters()))
            )
        for _ in range(3):
            layers(torch.ones(2, 8)).sum().backward()
            opt.step()
    assert alive == [0] * 36


def simple() -> tuple[torch.nn.Parameter, AvaGrad]:
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = AvaGrad([w], lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        w.square().sum().backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.zero_grad()
    return w, opt


def test_a_second_backward_before_the_step_is_rejected() -> None:
    w, opt = simple()
    with opt.step_in_backward():
        w.square().sum().backward()  # type: ignore[no-untyped-call]
        moved = w.detach().clone()
        with pytest.raises(RuntimeError, match=r"AvaGrad: a second backward\(\) before step\(\).*add up the losses"):
            w.square().sum().backward()  # type: ignore[no-untyped-call]
        assert torch.equal(w, moved)
        opt.step()
        w.square().sum().backward()  # type: ignore[no-untyped-call]
        opt.step()


def test_a_closure_is_rejected() -> None:
    w, opt = simple()
    before = w.detach().clone()
    with opt.step_in_backward(), pytest.raises(RuntimeError, match=r"AvaGrad: step\(\) has a closure"):
        opt.step(lambda: 0.0)
    assert torch.equal(w, before)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_rejected(options: dict[str, Any], unscale: bool) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = AvaGrad([w], **options)
    scaler = torch.amp.GradScaler("cpu")
    with opt.step_in_backward():
        scaler.scale(w.sum()).backward()  # type: ignore[no-untyped-call]
        if unscale:
            scaler.unscale_(opt)
        with pytest.raises(RuntimeError, match=r"AvaGrad: step\(\) is called by a GradScaler.*bfloat16"):
            scaler.step(opt)


def test_two_contexts_at_once_are_rejected() -> None:
    w, opt = simple()
    with opt.step_in_backward():
        with pytest.raises(RuntimeError, match="entered while another one"), opt.step_in_backward():
            pass
        w.square().sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="waits for its step"), opt.step_in_backward():
        pass
    opt.step()
    with opt.step_in_backward():
        pass


def test_a_gradient_that_is_set_in_between_is_rejected_for_a_moved_parameter_and_taken_for_others() -> None:
    w, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    plain, plain_other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt, ordinary = AvaGrad([w, other], lr=0.1), AvaGrad([plain, plain_other], lr=0.1)
    for _ in range(3):
        with opt.step_in_backward():
            w.square().sum().backward()  # type: ignore[no-untyped-call]
        w.grad = torch.ones(2)
        with pytest.raises(RuntimeError, match="already moved has a gradient again"):
            opt.step()
        w.grad = None
        other.grad = torch.ones(2)
        opt.step()
        plain.grad, plain_other.grad = None, torch.ones(2)
        plain.square().sum().backward()  # type: ignore[no-untyped-call]
        ordinary.step()
    assert torch.equal(w, plain)
    assert torch.equal(other, plain_other)


def test_a_context_that_is_not_entered_is_said_at_the_first_step() -> None:
    w, opt = simple()
    opt.step_in_backward()
    w.square().sum().backward()  # type: ignore[no-untyped-call]
    before = w.detach().clone()
    with pytest.raises(RuntimeError, match=r"step_in_backward\(\) was called but not entered"):
        opt.step()
    assert torch.equal(w, before)
    opt.step()  # the gradient is still there
    assert not torch.equal(w, before)


def test_after_a_context_that_could_not_be_entered_an_ordinary_step_works(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = AvaGrad([w])
    monkeypatch.setattr("avagrad.optim.in_backward.is_dtensor", lambda p: True)
    with pytest.raises(ValueError, match="is a DTensor"), opt.step_in_backward():
        pass
    w.grad = torch.ones(3)
    opt.step()
    assert opt.state[w]["step"] == 1


def test_a_context_may_be_made_first_and_entered_later() -> None:
    w, opt = simple()
    opt.step_in_backward()
    context = opt.step_in_backward()
    for _ in range(2):
        with context:
            w.square().sum().backward()  # type: ignore[no-untyped-call]
            opt.step()
    assert w.grad is None
    assert opt.state[w]["step"] == 4
    w.square().sum().backward()  # type: ignore[no-untyped-call]
    opt.step()
    assert opt.state[w]["step"] == 5


def test_a_sparse_gradient_is_rejected() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    opt = AvaGrad(embedding.parameters())
    with opt.step_in_backward(), pytest.raises(RuntimeError, match="must be dense"):
        embedding(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    opt = AvaGrad(layers.parameters())

    def loss() -> Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x.sum()

    with opt.step_in_backward():
        if use_reentrant:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                loss().backward()  # type: ignore[no-untyped-call]
        else:
            for _ in range(2):
                loss().backward()  # type: ignore[no-untyped-call]
                opt.step()
            assert all(p.grad is None for p in layers.parameters())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}, {"foreach": True}], ids=str)
def test_a_first_step_with_lr_0_is_what_it_is_otherwise(options: dict[str, Any]) -> None:
    """As in a warm-up; torch.distributed.checkpoint asks for a state in the same way."""
    ends = []
    for in_backward in (False, True):
        w = torch.nn.Parameter(torch.ones(3))
        opt = AvaGrad([w], lr=0.1, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: t / 5)
        for _ in range(5):
            opt.zero_grad()
            if in_backward:
                with opt.step_in_backward():
                    w.square().sum().backward()  # type: ignore[no-untyped-call]
                    opt.step()
            else:
                w.square().sum().backward()  # type: ignore[no-untyped-call]
                opt.step()
            scheduler.step()
        ends.append((w, opt.state[w]["step"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_gradients_from_before_are_part_of_the_step() -> None:
    w, opt = simple()
    plain, ordinary = simple()
    for p in (w, plain):
        p.square().sum().backward()  # type: ignore[no-untyped-call]
    with opt.step_in_backward():
        w.square().sum().backward()  # type: ignore[no-untyped-call]
        opt.step()
    plain.square().sum().backward()  # type: ignore[no-untyped-call]
    ordinary.step()
    assert torch.equal(w, plain)


def test_hooks_are_gone_after_the_context_and_copies_have_none() -> None:
    w, opt = simple()
    with opt.step_in_backward():
        twin = copy.deepcopy(opt)
    with twin.step_in_backward():
        pass  # nothing is left that would refuse it
    w.square().sum().backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    with opt.step_in_backward():  # a step without a backward is an ordinary one
        before = w.detach().clone()
        opt.step()
        assert not torch.equal(w, before)


@pytest.mark.parametrize("path", PATHS)
def test_a_state_may_be_loaded_inside_the_context(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = options_of(path, "AvaGrad", monkeypatch)
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(10, device=device))
        opt = AvaGrad([w], eps=1e-3, **options)
        with opt.step_in_backward() if in_backward else contextlib.nullcontext():
            for t in range(6):
                opt.zero_grad()
                (w.square().sum() * (t + 1)).backward()  # type: ignore[no-untyped-call]
                opt.step()
                if t == 3:
                    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        for _ in range(2):
            opt.zero_grad()
            w.square().sum().backward()  # type: ignore[no-untyped-call]
            opt.step()
        ends.append(w)
    assert torch.equal(*ends)


@pytest.mark.parametrize("path", PATHS)
def test_a_checkpoint_between_backward_and_step(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = options_of(path, "AvaGrad", monkeypatch)
    w = torch.nn.Parameter(torch.linspace(1, 2, 10, device=device))
    opt = AvaGrad([w], eps=1e-3, **options)
    for t in range(6):
        with opt.step_in_backward():
            (w.square().sum() * (t + 1)).backward()  # type: ignore[no-untyped-call]
            assert opt.state[w]["step"] == t + 1
            if t == 2:
                saved, resumed = copy.deepcopy(opt.state_dict()), torch.nn.Parameter(w.detach().clone())
            opt.step()
    other = AvaGrad([resumed], eps=1e-3, **options)
    other.load_state_dict(saved)
    for t in range(3, 6):
        resumed.grad = 2 * resumed.detach() * (t + 1)
        other.step()
    assert torch.equal(w, resumed)


def test_asking_for_the_state_inside_the_context_changes_nothing() -> None:
    ends = []
    for ask in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        opt = AvaGrad(model.parameters(), lr=0.3)
        with opt.step_in_backward():
            if ask:
                get_optimizer_state_dict(model, opt)
            for _ in range(3):
                model(torch.ones(2)).square().sum().backward()
                opt.step()
        assert opt.param_groups[0]["lr"] == 0.3
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("path", PATHS)
def test_going_on_after_an_error_in_backward(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has moved has moved, and is counted; the next step is an ordinary one."""
    device, options = options_of(path, "AvaGrad", monkeypatch)
    first, last = (torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    opt = AvaGrad([first, last], **options)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise MemoryError("in the middle")

    for _ in range(2):
        opt.zero_grad()
        (first * last).sum().backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.zero_grad()
    for inside in (True, False):
        with contextlib.ExitStack() as caught:
            if not inside:
                caught.enter_context(pytest.raises(MemoryError))
            with opt.step_in_backward():
                loss = (Fails.apply(first * 2) * last).sum()  # type: ignore[no-untyped-call]
                with pytest.raises(MemoryError) if inside else contextlib.nullcontext():
                    loss.backward()
                opt.step()
        with opt.step_in_backward():
            pass  # nothing is left that would refuse it
    assert opt.state[first]["step"] == 2
    assert opt.state[last]["step"] == 4
    (first * last).sum().backward()  # type: ignore[no-untyped-call]
    opt.step()
    assert opt.state[first]["step"] == 3


def test_two_optimizers_cannot_take_the_same_gradient() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    one, two = AvaGrad([w]), AvaGrad([w])
    with one.step_in_backward(), two.step_in_backward(), pytest.raises(RuntimeError, match="was freed before this"):
        w.square().sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_that_is_unfrozen_inside_the_context(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, options = options_of(path, "AvaGrad", monkeypatch)
    ends = []
    for in_backward in (False, True):
        w, cold = (torch.nn.Parameter(torch.linspace(1, 2, 5, device=device)) for _ in range(2))
        cold.requires_grad_(False)
        opt = AvaGrad([w, cold], **options)
        with opt.step_in_backward() if in_backward else contextlib.nullcontext():
            for t in range(7):
                cold.requires_grad_(t >= 2)
                (w * cold).square().sum().backward()  # type: ignore[no-untyped-call]
                opt.step()
                if not in_backward:
                    opt.zero_grad()
        ends.append((w, cold))
        assert cold.grad is None
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_a_group_that_joins_between_backward_and_step() -> None:
    w, opt = simple()
    late = torch.nn.Parameter(torch.ones(3))
    with opt.step_in_backward():
        w.square().sum().backward()  # type: ignore[no-untyped-call]
        late.grad = torch.ones(3)
        opt.add_param_group({"params": [late]})
        opt.step()
        assert opt.state[late]["step"] == 1
        (w.square().sum() + late.square().sum()).backward()  # type: ignore[no-untyped-call]
        assert late.grad is None
        opt.step()
    assert opt.state[late]["step"] == 2


def test_after_a_rejected_scaler_the_optimizer_can_be_used() -> None:
    w, opt = simple()
    saved = copy.deepcopy((w.detach(), opt.state_dict()))
    scaler = torch.amp.GradScaler("cpu")
    with opt.step_in_backward():
        scaler.scale(w.sum()).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="called by a GradScaler"):
            scaler.step(opt)
    with torch.no_grad():
        w.copy_(saved[0])
    opt.load_state_dict(saved[1])
    w.square().sum().backward()  # type: ignore[no-untyped-call]
    opt.step()
    assert opt.state[w]["step"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("path", ["loop", "foreach", "native"])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_parameters_without_gradients_do_not_show(
    path: str, bias_correction: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some join late and one never does: the norm adds up to the same bits all the same."""
    _, options = options_of(path, "AvaGrad", monkeypatch)
    for seed in range(12):
        ends = []
        for in_backward in (False, True):
            rng = torch.Generator().manual_seed(seed)
            params = [
                torch.nn.Parameter(torch.randn(n, generator=rng, dtype=dtype)) for n in (300, 7, 1000, 13, 40_000)
            ]
            opt = AvaGrad(params, eps=0.3, bias_correction=bias_correction, **options)
            with opt.step_in_backward() if in_backward else contextlib.nullcontext():
                for t in range(5):
                    used = [p for i, p in enumerate(params) if i != 2 and (t + i + seed) % 3]
                    sum(p.square().sum() for p in used).backward()  # type: ignore[union-attr]
                    opt.step()
                    opt.zero_grad()
            ends.append(params)
        assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))
