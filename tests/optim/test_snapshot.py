"""What may happen between two steps: questions change nothing, and what is moved, replaced or edited is seen."""

import copy
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
def test_a_state_that_is_moved_away_and_back_goes_on_to_the_bit(name: str, path: str, how: Any) -> None:
    ends = []
    for between in (lambda opt, t: None, how):
        params = parameters()
        opt = optimizer_class(name)(params, weight_decay=0.1, eps=0.01, **EVERY_PATH[path])
        train(opt, params, between)
        ends.append([*params, *(x for state in opt.state.values() for x in state.values())])
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", DELAYED)
def test_a_state_that_is_moved_to_the_cpu_and_back_goes_on_to_the_bit(name: str) -> None:
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
