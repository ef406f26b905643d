"""Every way to shard against the same training in one process: parameters, gamma, and what is sent between ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import NORMALISED, TOLERANCES, Pools, all_reduces, assert_same
from problems import DELAYED
from training import (
    LEFT_OUT,
    PATHS,
    STEPS,
    Job,
    Outcome,
    job,
    train_alone,
    train_apart,
    train_fsdp2,
    train_fsdp2_and_tensor_parallel,
    train_hsdp,
    train_placed,
    train_tensor_parallel,
)

# How, over how many ranks, and over how many meshes the parameters are spread.
LAYOUTS = [
    (train_fsdp2, 2, 1),
    (train_fsdp2, 4, 1),
    (train_hsdp, 4, 1),
    (train_tensor_parallel, 2, 1),
    (train_fsdp2_and_tensor_parallel, 4, 2),
]
LAYOUT_IDS = ["fsdp2", "fsdp2-4", "hsdp", "tp", "fsdp2-tp"]


def check(ranks: Pools, n: int, layout: Callable[[Job], Outcome], what: Job) -> None:
    outcomes = ranks(n).run(layout, what)
    assert all(outcome.params.keys() == train_alone(what).params.keys() for outcome in outcomes)
    assert_same(outcomes, train_alone(what), what.dtype)


@pytest.mark.parametrize(("layout", "n", "meshes"), LAYOUTS, ids=LAYOUT_IDS)
def test_layouts_are_the_same_training(ranks: Pools, layout: Any, n: int, meshes: int) -> None:
    """Say that the comparison itself is right: SGD is element-wise, so torch's own sharding is all that it needs."""
    check(ranks, n, layout, job("SGD"))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", DELAYED)
def test_fully_shard(ranks: Pools, name: str, path: str, dtype: torch.dtype) -> None:
    check(ranks, 2, train_fsdp2, job(name, dtype, path))


@pytest.mark.parametrize(("name", "path"), [("AvaGrad", "loop"), ("AvaGradW", "foreach")])
@pytest.mark.parametrize(("layout", "n", "meshes"), LAYOUTS[1:], ids=LAYOUT_IDS[1:])
def test_layouts(ranks: Pools, layout: Any, n: int, meshes: int, name: str, path: str) -> None:
    """By the paths that are not the default, which is taken when gamma is looked at."""
    check(ranks, n, layout, job(name, path=path))


@pytest.mark.parametrize(("layout", "n", "meshes"), LAYOUTS, ids=LAYOUT_IDS)
def test_gamma_is_one_number(ranks: Pools, layout: Any, n: int, meshes: int) -> None:
    what = job(watches="gamma")
    gammas = train_alone(what).gammas
    assert gammas[0] == 1  # there are no rates yet
    assert all(gamma < 0.5 for gamma in gammas[1:])  # or a wrong one would hardly be seen
    check(ranks, n, layout, what)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{"bias_correction": False}, {"norm": 1, "maximize": True}], ids=str)
def test_options(ranks: Pools, path: str, options: dict[str, Any]) -> None:
    check(ranks, 2, train_fsdp2, job(path=path, **options))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias_correction", [True, False])
def test_groups_may_be_edited_and_added(ranks: Pools, path: str, bias_correction: bool) -> None:
    """What changes after a step has ended, when its sum is on its way, counts in the next one."""
    check(ranks, 2, train_fsdp2, job(path=path, edits=True, bias_correction=bias_correction))


@pytest.mark.parametrize(("layout", "n", "meshes"), LAYOUTS[1:], ids=LAYOUT_IDS[1:])
@pytest.mark.parametrize(
    ("name", "options"),
    [("DelayedAdam", {}), ("AdaBound", {"final_lr": 0.01, "gamma": 0.1}), ("AdaShift", {"keep": 3})],
)
def test_rules_without_a_norm(
    ranks: Pools, layout: Any, n: int, meshes: int, name: str, options: dict[str, Any]
) -> None:
    check(ranks, n, layout, job(name, **options))


# One word for each of problems.parameters(): of shape (4, 3), (), (0, 2), (5, 2), (7,), (1, 1).
PLACED: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
    ((2,), ("s0", "r", "s0", "s1", "s0", "s0")),
    ((2,), ("s1", "-", "r", "s0", "-", "r")),
    ((4,), ("s1", "r", "-", "s0", "s0", "s1")),
    ((4,), ("s1", LEFT_OUT, "s0", "s1", LEFT_OUT, "s0")),  # the last rank holds nothing
    ((2, 2), ("s0s1", "rr", "s0r", "rs0", "s0s0", "-")),
    ((2, 2), ("rr", "-", "rr", "s1s0", "rs0", "rs0")),
]


def placed_id(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value[0], int) else " ".join(value)


@pytest.mark.parametrize(
    "options",
    [
        {"path": "loop"},
        {"path": "foreach", "active_only": True, "eps": 1e-6},
        {"path": "fused"},
        {"path": "fused", "active_only": True, "norm": 1, "eps": 1e-6, "dtype": torch.float32},
        {"path": "foreach", "bias_correction": False, "norm": 1},
        {"path": "default", "name": "AvaGradW", "bias_correction": False, "dtype": torch.float32},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize(("shape", "words"), PLACED, ids=placed_id)
def test_any_placement(ranks: Pools, shape: tuple[int, ...], words: tuple[str, ...], options: dict[str, Any]) -> None:
    what = job(watches="gamma", **options)
    n = torch.Size(shape).numel()
    outcomes = ranks(n).run(train_placed, what, words, shape)
    alone = train_placed(what, words)
    assert all(outcome.params.keys() == alone.params.keys() for outcome in outcomes)
    assert_same(outcomes, alone, what.dtype)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMALISED)
def test_process_group_sums_over_what_each_rank_holds(ranks: Pools, name: str, path: str, n: int) -> None:
    """Without placements; one rank has no gradients for some steps, and takes part all the same."""
    for watches in ("gamma", ""):
        what = job(name, path=path, watches=watches)
        outcomes = ranks(n).run(train_apart, what, n)
        alone = train_apart(what, n, True)
        assert sorted(key for outcome in outcomes for key in outcome.params) == sorted(alone.params)
        assert_same(outcomes, alone, what.dtype)


# --- what is sent ---


@pytest.mark.parametrize("path", PATHS)
def test_one_all_reduce_by_each_path(ranks: Pools, path: str) -> None:
    for outcome in ranks(2).run(train_fsdp2, job(path=path, watches="collectives")):
        assert all_reduces(outcome) == [2] + [1] * (STEPS - 1)


@pytest.mark.parametrize(("layout", "n", "meshes"), LAYOUTS[1:], ids=LAYOUT_IDS[1:])
def test_one_all_reduce_for_each_mesh(ranks: Pools, layout: Any, n: int, meshes: int) -> None:
    for outcome in ranks(n).run(layout, job(watches="collectives")):
        assert all_reduces(outcome) == [2 * meshes] + [meshes] * (STEPS - 1)


@pytest.mark.parametrize("path", PATHS)
def test_one_all_reduce_for_a_process_group(ranks: Pools, path: str) -> None:
    for outcome in ranks(4).run(train_apart, job(path=path, watches="collectives"), 4):
        assert all_reduces(outcome) == [2] + [1] * (STEPS - 1)


def test_element_wise_rules_send_nothing(ranks: Pools) -> None:
    for name in ("DelayedAdam", "AdaBound"):
        for outcome in ranks(2).run(train_fsdp2, job(name, watches="collectives")):
            assert all_reduces(outcome) == [0] * STEPS
