"""torch's wrappers, checkpoints and failures, each against the same training in one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import NORMALISED, Pools, all_reduces, assert_same
from odd_cases import (
    autograd_notices,
    copies_go_on_when_they_have_their_group,
    diagnosed,
    first_steps_with_lr_zero,
    gammas_where_one_rank_is_asked,
    gammas_with_a_late_group,
    moments_that_are_swapped,
    refusals,
    replicas_beside_an_empty_shard,
    trained_after_a_swap,
    trained_by_gradients_elsewhere,
    warm_up_from_zero,
)
from problems import DELAYED
from ranks import Ranks, RanksFailedError
from training import COPIES, PATHS, STEPS, job, train_alone, train_apart
from wrapping import (
    clip,
    load_and_train,
    refused,
    refused_in_backward,
    saved_state_names_no_group,
    step_until_a_rank_fails,
    train_and_ask,
    train_and_save,
    train_ddp,
    train_fsdp1,
    train_fsdp2_beside,
    train_zero,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"

# --- wrappers ---


@pytest.mark.parametrize(
    ("name", "path"), [*(("AvaGrad", path) for path in PATHS), ("AvaGradW", "default"), ("DelayedAdam", "default")]
)
def test_ddp_needs_nothing(ranks: Pools, name: str, path: str) -> None:
    what = job(name, path=path, freezes=False)  # DDP wants a gradient for each parameter
    first, second = ranks(2).run(train_ddp, what)
    assert all(torch.equal(p, second.params[key]) for key, p in first.params.items())
    assert_same([first], train_alone(what), what.dtype)


@pytest.mark.parametrize("beside", ["accumulation", "clipping", "checkpointing", "compile"])
@pytest.mark.parametrize("wrapper", [train_ddp, train_fsdp2_beside])
def test_with_what_users_have_beside_it(ranks: Pools, wrapper: Any, beside: str) -> None:
    what = job(freezes=False)
    alone = train_alone(what, mend_gradients=clip) if beside == "clipping" else train_alone(what)
    assert_same(ranks(2).run(wrapper, what, beside), alone, what.dtype)


@pytest.mark.parametrize(
    ("name", "path", "n"),
    [
        ("AvaGrad", "loop", 2),
        ("AvaGradW", "foreach", 2),
        ("AvaGrad", "fused", 2),
        ("DelayedAdam", "default", 2),
        ("AvaGrad", "default", 4),
    ],
)
@pytest.mark.parametrize("wrapper", [train_fsdp1, train_zero])
def test_shards_without_placements(ranks: Pools, wrapper: Any, name: str, path: str, n: int) -> None:
    what = job(name, path=path, freezes=False)
    assert_same(ranks(n).run(wrapper, what), train_alone(what), what.dtype)


# --- refusals, and what a copy has ---


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("views", "process_group"),
        ("flat parameter", "use_orig_params"),
        ("flat parameter with a group", "use_orig_params"),
    ],
)
def test_hidden_shards_are_rejected(ranks: Pools, name: str, case: str, says: str) -> None:
    for message in ranks(2).run(refused, name, case):
        assert message.startswith(f"ValueError: {name}: ")
        assert says in message


def test_a_maximum_over_hidden_shards_is_rejected(ranks: Pools) -> None:
    for message in ranks(2).run(refused, "AdaShift", "views"):
        assert message.startswith("ValueError: AdaShift: ")
        assert "fully_shard" in message


@pytest.mark.parametrize("name", DELAYED)
def test_step_in_backward_is_rejected(ranks: Pools, name: str) -> None:
    for message in ranks(2).run(refused_in_backward, name):
        assert message.startswith(("RuntimeError", "ValueError"))
        assert "DTensor" in message


@pytest.mark.parametrize("name", ["AdaBound", "AdaShift"])
def test_comparison_optimizers_know_no_group(name: str) -> None:
    import avagrad

    with pytest.raises(TypeError, match="process_group"):
        getattr(avagrad, name)([torch.nn.Parameter(torch.ones(2))], process_group=None)


@pytest.mark.parametrize("name", DELAYED)
def test_a_saved_state_names_no_group(ranks: Pools, name: str) -> None:
    assert all(ranks(2).run(saved_state_names_no_group, name))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("path", ["loop", "fused"])
def test_a_copy_has_no_group_until_it_is_given_one(ranks: Pools, how: str, path: str) -> None:
    what = job(path=path)
    assert_same(ranks(2).run(train_apart, what, 2, False, how), train_apart(what, 2, True), what.dtype)


# --- checkpoints ---


@pytest.mark.parametrize(("path", "stop"), [("loop", 5), ("fused", 5), ("foreach", 10), ("fused", 16)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_a_checkpoint_continues_elsewhere(ranks: Pools, tmp_path: Path, path: str, stop: int) -> None:
    """Saved by two ranks before a parameter is thawed, while all train, after one is frozen; loaded by 4, 2 and 1."""
    what = job(path=path)
    ranks(2).run(train_and_save, what, tmp_path, stop)
    for n in (4, 2):
        assert_same(ranks(n).run(load_and_train, what, tmp_path, stop), train_alone(what), what.dtype)
    assert_same([load_and_train(what, tmp_path, stop)], train_alone(what), what.dtype)


@pytest.mark.parametrize(("path", "full"), [*((path, False) for path in PATHS), ("default", True)])
def test_asking_for_the_state_changes_nothing(ranks: Pools, path: str, full: bool) -> None:
    what = job(path=path)
    assert_same(ranks(2).run(train_and_ask, what, (5, 10), full), train_alone(what), what.dtype)


def test_a_loaded_state_is_summed_again(ranks: Pools) -> None:
    for outcome in ranks(2).run(train_and_ask, job(watches="collectives"), (5, 10), False):
        assert all_reduces(outcome) == [2 if t in (0, 5, 10) else 1 for t in range(STEPS)]


# --- what is rare ---


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_are_put_into_the_groups_later_are_seen(ranks: Pools, path: str) -> None:
    want, gammas = trained_after_a_swap(path, False)
    for got, found in ranks(2).run(trained_after_a_swap, path, True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        assert found == pytest.approx(gammas, rel=1e-10)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize(("of_param", "of_grad"), [("r", "sum"), ("s0", "sum"), ("s0", "r"), ("s0", "s1"), ("r", "s0")])
def test_gradients_with_another_placement(ranks: Pools, name: str, path: str, of_param: str, of_grad: str) -> None:
    """What they are redistributed to lives until the step has read it."""
    want = trained_by_gradients_elsewhere(name, path, of_param, of_grad, False)
    for got in ranks(2).run(trained_by_gradients_elsewhere, name, path, of_param, of_grad, True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replicas_are_the_same_where_a_rank_has_an_empty_shard(ranks: Pools, path: str, dtype: torch.dtype) -> None:
    """Of 4 columns the last of 3 ranks has none. It takes the same backend, and the same order of collectives."""
    first, *others = ranks(3).run(replicas_beside_an_empty_shard, path, dtype)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_a_moment_whose_memory_is_replaced(ranks: Pools) -> None:
    want = moments_that_are_swapped(False)
    for got in ranks(2).run(moments_that_are_swapped, True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", DELAYED)
def test_diagnostics_are_of_the_whole_model(ranks: Pools, name: str, n: int) -> None:
    want = diagnosed(name, False)
    for found in ranks(n).run(diagnosed, name, True):
        assert found == pytest.approx(want, rel=1e-6)


def test_a_rank_that_is_asked_for_its_state_alone_does_not_step_alone(ranks: Pools) -> None:
    (never, _), (asked, other) = (ranks(2).run(gammas_where_one_rank_is_asked, asks) for asks in (False, True))
    assert asked == other == never


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_warm_up_from_zero_is_the_same_training_however_it_is_sharded(ranks: Pools, path: str) -> None:
    want, gammas = warm_up_from_zero(path, False)
    for got, found in ranks(2).run(warm_up_from_zero, path, True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        assert found == pytest.approx(gammas, rel=1e-10)


def test_a_group_that_joins_a_step_in_backward_counts_on_all_ranks(ranks: Pools) -> None:
    ordinary, inside = (ranks(2).run(gammas_with_a_late_group, in_backward) for in_backward in (False, True))
    assert inside == ordinary
    assert inside[0] == inside[1]


def test_steps_with_lr_zero_count_on_all_ranks_alike(ranks: Pools) -> None:
    (first, gammas), (second, others) = ranks(2).run(first_steps_with_lr_zero)
    assert (first.item(), second.item()) == (6, 5)  # each gradient that there was
    assert gammas == others


def test_groups_and_parameters_that_cannot_be_are_rejected(ranks: Pools) -> None:
    first, second = ranks(2).run(refusals)
    for found in (first, second):
        assert "ignored_modules" in found["ignored"]
        assert "process_group is 'world', but must be a torch.distributed.ProcessGroup" in found["not a group"]
    assert "this rank is a member of" in second["not a member"]
    assert first["not a member"] == ""


@pytest.mark.parametrize("path", PATHS)
def test_autograd_notices_that_a_dtensor_has_moved(ranks: Pools, path: str) -> None:
    for message in ranks(2).run(autograd_notices, path):
        assert "modified by an inplace operation" in message


def test_copies_continue_when_they_have_their_group(ranks: Pools) -> None:
    assert ranks(2).run(copies_go_on_when_they_have_their_group) == [[True, True]] * 2


# --- failures ---


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_lost_rank_is_an_error_and_no_hang(how: str) -> None:
    pool = Ranks(2, group_timeout_s=3)
    try:
        with pytest.raises(RanksFailedError) as failed:
            pool.run(step_until_a_rank_fails, how, timeout_s=12)
    finally:
        pool.close()
    assert "in step" in failed.value.reasons[0]  # the traceback of an error, and not "no answer in time"
    assert "RuntimeError" in failed.value.reasons[0]


# --- the example ---


@pytest.mark.slow
def test_the_example_trains_saves_and_continues(tmp_path: Path) -> None:
    def losses(steps: int) -> dict[int, float]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command = [*launch, str(EXAMPLE), "--steps", str(steps), "--checkpoint", str(tmp_path / "checkpoint")]
        done = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
        return {int(step.rstrip(":")): float(loss) for _, step, _, loss in lines}

    first, then = losses(21), losses(41)
    assert list(first) == [0, 20]
    assert list(then) == [40]
    assert then[40] < first[20] < first[0]
