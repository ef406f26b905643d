"""What may happen between two steps: questions change nothing, and what is moved, replaced or edited is seen."""

import contextlib
import copy
import weakref
from typing import Any

import pytest
import torch
from problems import DELAYED, EVERY_PATH, gradients, laid_out_as, optimizer_class, parameters

from avagrad import AvaGrad

STEPS = 12


def train(opt: Any, params: list[torch.nn.Parameter], between: Any = lambda opt, t: None) -> None:
    for t, grads in enumerate(gradients([torch.nn.Parameter(p.detach().cpu()) for p in params], STEPS)):
        for p, g in zip(params, grads, strict=True):
            p.grad = laid_out_as(p, g)
        opt.step()
        between(opt, t)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("path", EVERY_PATH)
def test_questions_between_forward_and_backward_change_nothing(name: str, path: str) -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    opt = optimizer_class(name)([w], **EVERY_PATH[path])
    for t in range(4):
        loss = (w * w * w).sum()
        before = copy.deepcopy(opt.state_dict())
        version = w._version
        opt.gamma()
        opt.diagnostics()
        opt.state_dict()
        assert w._version == version
        assert str(opt.state_dict()) == str(before)
        opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
        assert opt.state[w]["step"] == t + 1


def replaced(opt: Any, t: int) -> None:
    """Move the state away and back, as frameworks do that keep it on the CPU while a model is evaluated."""
    if t % 3 == 1:
        for state in opt.state.values():
            for key, value in state.items():
                state[key] = value.to("cpu", copy=True)
        for p, state in opt.state.items():
            for key, value in state.items():
                state[key] = value.to(p.device, copy=True)


def moved_in_place(opt: Any, t: int) -> None:
    """Give the tensors of the state other memory, as share_memory_() and set_() do."""
    if t % 3 == 1:
        for state in opt.state.values():
            for value in state.values():
                value.data = value.data.clone()


@pytest.mark.parametrize("how", [replaced, moved_in_place])
@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_state_that_is_moved_away_and_back_continues_to_the_bit(name: str, path: str, how: Any) -> None:
    ends = []
    for between in (lambda opt, t: None, how):
        params = parameters()
        opt = optimizer_class(name)(params, weight_decay=0.1, eps=0.01, **EVERY_PATH[path])
        train(opt, params, between)
        ends.append([*params, *(x for state in opt.state.values() for x in state.values())])
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DELAYED)
def test_a_state_that_is_moved_to_the_cpu_and_back_continues_to_the_bit(name: str) -> None:
    ends = []
    for between in (lambda opt, t: None, replaced):
        params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
        opt = optimizer_class(name)(params, weight_decay=0.1, eps=0.01)
        train(opt, params, between)
        ends.append(params)
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("key", ["exp_avg_sq", "step"])
def test_a_state_that_is_edited_in_place_is_taken_as_it_is_after_refresh(path: str, key: str) -> None:
    """The same as a new tensor in its place, which is seen by itself."""

    def in_place(opt: Any, t: int) -> None:
        if t == 5:
            for state in opt.state.values():
                state[key].add_(1.0)
            opt.refresh()

    def by_a_new_tensor(opt: Any, t: int) -> None:
        if t == 5:
            for state in opt.state.values():
                state[key] = state[key] + 1.0

    ends = []
    for between in (in_place, by_a_new_tensor):
        params = parameters()
        opt = AvaGrad(params, eps=0.01, **EVERY_PATH[path])
        train(opt, params, between)
        ends.append(params)
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))
    untouched = parameters()
    train(AvaGrad(untouched, eps=0.01, **EVERY_PATH[path]), untouched)
    assert not torch.equal(untouched[0], ends[0][0])  # or the edit says nothing


def test_groups_may_take_different_paths() -> None:
    """Each by its own backend, with one gamma."""
    ends = []
    for paths in ([{"fused": True}, {"foreach": True}, {"foreach": False}], [{"foreach": False}] * 3):
        params = parameters(torch.float64)
        groups = [{"params": params[i::3], **paths[i]} for i in range(3)]
        opt = AvaGrad(groups, eps=0.01, weight_decay=0.1)
        train(opt, params)
        ends.append(params)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-13)


# --- found by attacking --------------------------------------------------------------------------


def one(n: int = 4, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(n, dtype=dtype))


def steps(opt: Any, *params: torch.nn.Parameter, n: int = 2) -> None:
    for _ in range(n):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("what", ["gamma", "step"])
def test_inference_mode_leaves_nothing_behind(path: str, what: str) -> None:
    opt = AvaGrad([p := one()], **EVERY_PATH[path])
    p.grad = torch.ones(4)
    with torch.inference_mode():
        getattr(opt, what)()
    steps(opt, p)
    assert opt.gamma() > 0


def test_a_step_count_of_another_dtype_is_not_written_to_as_float32() -> None:
    a, gaps = one(), torch.nn.Parameter(torch.ones(3, 4)[:, :2])
    opt = AvaGrad([a, gaps])
    steps(opt, a)
    counts = torch.tensor([2.0, 0, 0, 0], dtype=torch.float16)
    opt.state[a]["step"] = counts[0]
    steps(opt, a, n=1)
    assert counts[1:].tolist() == [0, 0, 0]
    assert opt.state[a]["step"] == 3


@pytest.mark.parametrize("path", EVERY_PATH)
def test_exchanged_states_are_seen(path: str) -> None:
    a, b, opt = *(pair := [one(), one(9)]), AvaGrad(pair, **EVERY_PATH[path])
    steps(opt, a, b)
    of_a, of_b = opt.state.pop(a), opt.state.pop(b)
    opt.state[b], opt.state[a] = of_a, of_b
    with pytest.raises(RuntimeError, match="of a parameter of size"):
        steps(opt, a, b, n=1)
    assert opt.state[a]["step"] == 2
    opt = AvaGrad([a], **EVERY_PATH[path])
    steps(opt, a)
    state = opt.state[a]
    swapped = {"step": state["step"], "exp_avg_sq": state.pop("exp_avg"), "exp_avg": state.pop("exp_avg_sq")}
    state.clear()
    state.update(swapped)
    kept = [x.clone() for x in swapped.values()]
    twin = AvaGrad([w := one()], **EVERY_PATH[path])
    with torch.no_grad():
        w.copy_(a)
    twin.state[w] = dict(zip(swapped, kept, strict=True))
    for opt_, p in ((opt, a), (twin, w)):
        steps(opt_, p, n=1)
    assert torch.equal(a, w)


def test_gamma_is_that_of_the_device_where_the_parameters_are() -> None:
    p = torch.nn.Parameter(torch.ones(4, device="meta"))
    opt = AvaGrad([p])
    assert opt.gamma() == 1.0
    steps(opt, p)
    with pytest.raises(RuntimeError, match="meta"):  # it has no number, and no other one is taken for it
        opt.gamma()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_questions_before_kahans_summation_has_begun(path: str) -> None:
    opt = AvaGrad([p := one(dtype=torch.bfloat16)], rounding="kahan", bias_correction=False, **EVERY_PATH[path])
    assert opt.gamma() == pytest.approx(0.1)
    opt = AvaGrad([p], **EVERY_PATH[path])
    steps(opt, p, n=1)
    opt.param_groups[0]["rounding"] = "kahan"
    assert opt.gamma() == pytest.approx(opt.diagnostics()["gamma"])


@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_backward_that_reaches_only_unfrozen_parameters(path: str) -> None:
    ends = []
    for inside in (False, True):
        a, b = one(), one()
        opt = AvaGrad([a, b], **EVERY_PATH[path])
        b.requires_grad_(False)
        with opt.step_in_backward() if inside else contextlib.nullcontext():
            for t in range(6):
                a.requires_grad_(t < 2)
                b.requires_grad_(t >= 2)
                if not inside:
                    opt.zero_grad()
                (a.square() + b.square()).sum().backward()  # type: ignore[no-untyped-call]
                opt.step()
        assert not inside or b.grad is None
        ends.append([a.detach(), b.detach()])
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


def test_memory_that_a_hook_replaces_inside_of_backward_is_written_to() -> None:
    a, b, opt = *(pair := [one(), one()]), AvaGrad(pair, fused=True)
    steps(opt, a, b)
    opt.zero_grad()
    old, before = a.data, a.tolist()

    def swap(_: torch.Tensor) -> None:
        a.data = a.data.clone()

    a.register_hook(swap)  # type: ignore[no-untyped-call]
    with opt.step_in_backward():
        (a.sum() + b.exp().sum()).backward()  # type: ignore[no-untyped-call]
        opt.step()
    assert a.tolist() != before
    assert old.tolist() == before


@pytest.mark.parametrize(("name", "key", "value"), [("AdaBound", "amsbound", True), ("AdaShift", "keep", 12)])
def test_a_group_that_asks_for_another_state_is_rejected(name: str, key: str, value: Any) -> None:
    opt = optimizer_class(name)([p := one()])
    steps(opt, p)
    before = p.detach().clone()
    opt.param_groups[0][key] = value
    with pytest.raises(RuntimeError, match="is missing"):
        steps(opt, p, n=1)
    assert torch.equal(p, before)


def test_an_error_in_the_context_is_the_one_that_is_seen() -> None:
    opt = AvaGrad([a := one()])

    def fail() -> None:
        with opt.step_in_backward():
            a.sum().backward()  # type: ignore[no-untyped-call]
            opt.param_groups[0]["params"].append(a)
            raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        fail()
    opt.param_groups[0]["params"].pop()
    with opt.step_in_backward():
        pass


def test_a_found_inf_that_was_left_behind_does_not_reach_backward() -> None:
    opt = AvaGrad([p := one()])
    steps(opt, p, n=1)
    opt.zero_grad()
    opt.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    with opt.step_in_backward():
        p.sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="called by a GradScaler"):
            opt.step()


@pytest.mark.parametrize("path", EVERY_PATH)
def test_a_parameter_that_grows_at_the_same_address_is_rejected(path: str) -> None:
    buffer = torch.ones(6)
    opt = AvaGrad([p := torch.nn.Parameter(buffer[:1])], **EVERY_PATH[path])
    steps(opt, p)
    p.grad = None
    p.data, before = buffer, buffer.clone()
    with pytest.raises(RuntimeError, match="of a parameter of size"):
        steps(opt, p, n=1)
    assert torch.equal(buffer, before)


def test_refresh_lets_go_of_tensors_that_are_no_longer_in_the_state() -> None:
    opt = AvaGrad([p := one()])
    steps(opt, p)
    old = weakref.ref(opt.state[p]["exp_avg_sq"])
    for key, value in opt.state[p].items():
        opt.state[p][key] = value.clone()
    del value
    opt.refresh()
    assert old() is None


class OnDevice(torch.Tensor):
    """A number on the CPU that says it is on a device, where the host does not read it."""

    device = property(lambda self: torch.device("cuda"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_an_lr_on_the_device_that_is_replaced_by_zero_is_gone() -> None:
    opt = AvaGrad([p := one()], fused=True)
    steps(opt, p)
    for lr, moves in ((torch.tensor(0.1).as_subclass(OnDevice), True), (0.0, False)):
        opt.param_groups[0]["lr"] = lr
        before = p.detach().clone()
        steps(opt, p, n=1)
        assert torch.equal(p, before) != moves


def test_a_rejected_group_leaves_no_hooks_inside_the_context() -> None:
    opt = optimizer_class("AdaShift")([a := one()])
    part = one()
    part._fsdp_flattened = True  # type: ignore[attr-defined]
    with opt.step_in_backward():
        with pytest.raises(ValueError, match="is a part of a FlatParameter"):
            opt.add_param_group({"params": [part]})
        (a.sum() + part.sum()).backward()  # type: ignore[no-untyped-call]
        opt.step()
    assert part.grad is not None


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("eps", [0.0, 1e-20, float("nan")])
def test_an_eps_that_a_group_may_not_have_is_rejected_at_the_next_step(name: str, path: str, eps: float) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = optimizer_class(name)([w], lr=0.1, eps=0.1, **EVERY_PATH[path])
    w.grad = torch.tensor([1.0, 0.0, 2.0])
    for _ in range(2):
        opt.step()
    before, opt.param_groups[0]["eps"] = w.detach().clone(), eps
    with pytest.raises(ValueError, match=rf"{name}: eps is {eps}, but must be"):
        opt.step()
    assert torch.equal(w, before)
    opt.param_groups[0]["eps"] = 0.1
    opt.step()
    assert w.isfinite().all()
    assert not torch.equal(w, before)
