"""Optimizers by name."""

from typing import Any

import pytest
import torch
from torch import nn

import avagrad
from avagrad.lab.methods import METHODS


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))


@pytest.mark.parametrize("name", avagrad.optimizers())
def test_every_name_makes_an_optimizer_that_steps(name: str) -> None:
    torch.manual_seed(0)
    net = model()
    optimizer = avagrad.create_optimizer(net, name, lr=1e-3, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert all(group["lr"] == 1e-3 for group in optimizer.param_groups)
    before = net(torch.ones(4, 2)).square().mean()
    for _ in range(20):
        optimizer.zero_grad()
        net(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
    assert net(torch.ones(4, 2)).square().mean() < before


def test_names_are_the_labs() -> None:
    assert set(avagrad.optimizers()) == METHODS.keys()
    for name in avagrad.optimizers():
        optimizer = avagrad.create_optimizer(model(), name, lr=0.1)
        assert type(optimizer) is METHODS[name].make
        assert all(optimizer.defaults[key] == value for key, value in METHODS[name].fixed.items())


@pytest.mark.parametrize("name", ["AvaStep", "AVASTEP", "ava-step", "ava_step"])
def test_case_and_hyphens_do_not_matter(name: str) -> None:
    assert type(avagrad.create_optimizer(model(), name)) is avagrad.AvaStep
    assert type(avagrad.create_optimizer(model(), "DelayedAdam")) is avagrad.DelayedAdam


def test_what_is_not_given_is_the_classs_default() -> None:
    optimizer = avagrad.create_optimizer(model(), "adamw")
    assert optimizer.defaults == torch.optim.AdamW(model().parameters()).defaults
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]  # no decay of biases and norms
    assert len(avagrad.create_optimizer(model(), "avastep").param_groups) == 1


def test_parameters_and_groups_are_taken_as_they_are() -> None:
    params = list(model().parameters())
    groups: list[dict[str, Any]] = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.3}]
    optimizer = avagrad.create_optimizer(groups, "avastep", lr=0.1, weight_decay=0.2, eps=1e-4)
    assert [(group["lr"], group["weight_decay"], group["eps"]) for group in optimizer.param_groups] == [
        (0.5, 0.2, 1e-4),
        (0.1, 0.3, 1e-4),
    ]


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("adamm", {}, ValueError, "name is 'adamm', which is not known; did you mean 'adam'"),
        (None, {}, ValueError, "name is None, which is not known"),
        ("amsgrad", {"amsgrad": False}, ValueError, "amsgrad is False, but is fixed at True for amsgrad"),
        ("avastep", {"lr": -1.0}, ValueError, "lr"),
        ("avastep", {"epsilon": 1.0}, TypeError, "epsilon"),
    ],
)
def test_what_is_wrong_is_rejected(name: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        avagrad.create_optimizer(model(), name, **options)
