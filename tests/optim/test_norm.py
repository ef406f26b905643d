"""Gamma is a function of the state and the groups' values, whatever happened on the way there."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import EVERY_PATH, as_float64, gradients, parameters

from avagrad import AvaGrad

EVENTS = ["step", "step without some", "eps", "beta2", "norm", "active_only", "bias_correction", "lr", "beta1"]
EVENTS += ["add group", "load", "edit state", "edit step", "freeze", "replace state", "edit behind torch's back"]


def by_hand(opt: AvaGrad) -> float:
    """Return gamma from the state, in float64 and a few lines."""
    etas, norm = [], opt.param_groups[0]["norm"]
    for group in opt.param_groups:
        for p in group["params"]:
            state = opt.state.get(p)
            t = int(state["step"].item()) if state else 0
            v = as_float64(state["exp_avg_sq"]).ravel() if state else np.zeros(p.numel())
            if group["bias_correction"]:
                v = v / (1 - group["betas"][1] ** t) if t else v[:0]
            elif t == 0 and not p.requires_grad:
                v = v[:0]
            v = v[v != 0] if group["active_only"] else v
            etas.append(1 / (np.sqrt(v) + group["eps"]))
    eta = np.concatenate(etas)
    return float((len(eta) / (eta**norm).sum()) ** (1 / norm)) if len(eta) else 1.0


@given(events=st.lists(st.sampled_from(EVENTS), max_size=14), use_foreach=st.booleans())
def test_gamma_is_a_function_of_state_and_groups(events: list[str], use_foreach: bool) -> None:
    params = parameters(torch.float64)
    opt = AvaGrad([{"params": params[:2]}, {"params": params[2:]}], foreach=use_foreach)
    grads = gradients(params, 100)
    for event in events:
        group = opt.param_groups[0]
        if event.startswith("step"):
            for i, (p, g) in enumerate(zip(params, next(grads), strict=False)):
                p.grad = None if event == "step without some" and i % 2 else g
            opt.step()
        elif event == "eps":
            group["eps"] *= 3
        elif event == "beta2":
            group["betas"] = (group["betas"][0], group["betas"][1] * 0.9)
        elif event == "beta1":
            group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])
        elif event == "norm":
            for every in opt.param_groups:
                every["norm"] = 3 - every["norm"]
        elif event in ("active_only", "bias_correction"):
            group[event] = not group[event]
        elif event == "lr":
            group["lr"] *= 2
        elif event == "add group":
            params.append(torch.nn.Parameter(torch.ones(2)))
            opt.add_param_group({"params": [params[-1]], "eps": 0.7, "norm": group["norm"]})
        elif event == "load":
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        elif event == "freeze":
            params[4].requires_grad_(not params[4].requires_grad)
            params[4].grad = None
        elif params[0] in opt.state:
            state = opt.state[params[0]]
            if event == "edit state":
                state["exp_avg_sq"].mul_(2)
            elif event == "edit behind torch's back":  # as a collective does: no version counter moves
                state["exp_avg_sq"].data.mul_(3)
            elif event == "edit step":
                state["step"].add_(5)
            elif event == "replace state":
                state["exp_avg_sq"] = torch.rand(4, 3).double()
        assert opt.diagnostics()["gamma"] == pytest.approx(by_hand(opt), rel=1e-11), event


@pytest.mark.parametrize("path", EVERY_PATH)
def test_the_same_run_twice_is_the_same_to_the_bit(path: str) -> None:
    ends = []
    for _ in range(2):
        params = parameters()
        opt = AvaGrad(params, **EVERY_PATH[path])
        for grads in gradients(params, 20):
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            opt.step()
        ends.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_a_nan_in_a_moment_is_seen_by_all() -> None:
    """The norm has it, so gamma has it: to go on with a gamma of 1 would hide it and move all others too far."""
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = AvaGrad([a, b])
    for bad in (1.0, float("nan"), 1.0):
        a.grad, b.grad = torch.ones(2), torch.tensor([bad, 1.0])
        opt.step()
    assert a.isnan().all()


def test_different_norms_in_groups_are_rejected() -> None:
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    opt = AvaGrad([a])
    with pytest.raises(ValueError, match="norm is 2 in one group and 1 in another"):
        opt.add_param_group({"params": [b], "norm": 1})
    assert len(opt.param_groups) == 1
    opt = AvaGrad([{"params": [a]}, {"params": [b]}])
    opt.param_groups[1]["norm"] = 1
    a.grad = torch.ones(3)
    with pytest.raises(ValueError, match="norm is 2 in one group and 1 in another"):
        opt.step()
    assert not opt.state
    assert torch.equal(a, torch.ones(3))
