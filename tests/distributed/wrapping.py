"""What the ranks do in the tests of torch's wrappers, checkpoints and failures."""

import functools
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import (
    FROZEN_AT,
    STEPS,
    Job,
    Net,
    Outcome,
    average_scale,
    class_of,
    freeze,
    fsdp2_net,
    loss_of,
    mesh,
    my_rows,
    new_net,
    new_optimizer,
    shard_fully,
    train,
    whole_parameters,
    with_group,
)

MAX_NORM = 0.3  # of gradients that are clipped

# --- wrappers ---


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)


def backward_in_halves(net: Any, x: Tensor, y: Tensor) -> None:
    """Accumulate the gradient of two halves of the batch, and send it once."""
    half = len(x) // 2
    for is_last, rows in ((False, slice(half)), (True, slice(half, None))):
        is_ddp = isinstance(net, DistributedDataParallel)
        if not is_ddp:
            net.set_requires_gradient_sync(is_last)
        with net.no_sync() if is_ddp and not is_last else nullcontext():
            (loss_of(net, x[rows], y[rows]) / 2).backward()  # type: ignore[no-untyped-call]


def varied_net(job: Job, beside: str) -> tuple[Net, dict[str, Any]]:
    """Return a model and how it is trained, with something else that users have beside an optimizer."""
    net = new_net(job.dtype)
    net.recomputes = beside == "checkpointing"
    if beside == "compile":
        net.compile(backend="eager")
    how: dict[str, Any] = {}
    if beside == "accumulation":
        how["backward"] = backward_in_halves
    if beside == "clipping":
        how["mend_gradients"] = clip
    return net, how


def train_ddp(job: Job, beside: str = "") -> Outcome:
    net, how = varied_net(job, beside)
    wrapped = DistributedDataParallel(net)
    return train(wrapped, new_optimizer(wrapped, job), job, my_rows(), **how)


def train_fsdp2_beside(job: Job, beside: str) -> Outcome:
    net, how = varied_net(job, beside)
    # torch's clipping cannot mix plain tensors and DTensors, so that here all are of one kind.
    shard_fully(net, mesh(dist.get_world_size()), ignore_scale=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo's own, tracing
        return train(net, new_optimizer(net, job), job, my_rows(), **how)


def fsdp1_net(job: Job, *, use_orig_params: bool) -> FullyShardedDataParallel:
    """Shard as FSDP1 does, in two parts."""
    net = new_net(job.dtype)
    cpu = torch.device("cpu")
    net.inner = FullyShardedDataParallel(net.inner, device_id=cpu, use_orig_params=use_orig_params)  # type: ignore[assignment]
    return FullyShardedDataParallel(net, device_id=cpu, use_orig_params=use_orig_params)


def train_fsdp1(job: Job) -> Outcome:
    net = fsdp1_net(job, use_orig_params=True)
    return train(net, new_optimizer(net, with_group(job)), job, my_rows())


def train_zero(job: Job) -> Outcome:
    net = DistributedDataParallel(new_net(job.dtype))
    own: Any = functools.partial(class_of(job.name), process_group=dist.group.WORLD)
    opt = new_optimizer(net, job, functools.partial(ZeroRedundancyOptimizer, optimizer_class=own))
    return train(net, opt, job, my_rows())


# --- refusals, and what a copy has ---


def message_of(call: Callable[[], Any]) -> str:
    """Return the class of what a call raises and its sentence; empty if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(name: str, case: str) -> str:
    """Return what making an optimizer is refused with."""
    make: Any = class_of(name)
    net = fsdp1_net(Job(), use_orig_params=case == "views")
    group = {"process_group": dist.group.WORLD} if case == "flat parameter with a group" else {}
    return message_of(lambda: make(net.parameters(), **group))


def refused_in_backward(name: str) -> str:
    opt = class_of(name)(fsdp2_net(torch.float64).parameters())

    def enter() -> None:
        with opt.step_in_backward():
            pass

    return message_of(enter)


def saved_state_names_no_group(name: str) -> bool:
    opt = class_of(name)([nn.Parameter(torch.ones(2))], process_group=dist.group.WORLD)
    opt.param_groups[0]["params"][0].grad = torch.ones(2)
    opt.step()
    named = any("process_group" in group for group in (opt.defaults, *opt.state_dict()["param_groups"]))
    return opt.process_group is dist.group.WORLD and not named


# --- checkpoints ---


def new_training(job: Job) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its optimizer and how to train it: sharded where there are ranks."""
    if not dist.is_initialized():
        net = new_net(job.dtype)
        return net, new_optimizer(net, job), {}
    net = fsdp2_net(job.dtype)
    return net, new_optimizer(net, job), {"rows": my_rows(), "mend_gradients": average_scale}


def train_and_save(job: Job, folder: Path, stop: int) -> None:
    net, opt, how = new_training(job)
    train(net, opt, job, **how, steps=range(stop))
    state: dict[str, Any] = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, opt)}
    save(state, checkpoint_id=folder)


def load_and_train(job: Job, folder: Path, start: int) -> Outcome:
    net, opt, how = new_training(job)
    # torch loads state for what is not frozen, and AvaGrad's norm knows all that has had a gradient: first load, then
    # freeze. (What has had none yet has no state to be loaded.)
    freeze(net, min(start, FROZEN_AT) - 1)
    state: dict[str, Any] = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, opt)}
    load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, opt, state["optimizer"])
    return train(net, opt, job, **how, steps=range(start, STEPS))


def train_and_ask(job: Job, stops: tuple[int, ...], full: bool) -> Outcome:
    """Take the state out at some steps, and put it in again."""
    net, opt, how = new_training(job)
    options = StateDictOptions(full_state_dict=full)
    outcome = Outcome({})
    for start, stop in zip((0, *stops), (*stops, STEPS), strict=True):
        freeze(net, max(start - 1, 0))
        state = get_optimizer_state_dict(net, opt, options=options)
        if start:
            set_optimizer_state_dict(net, opt, state, options=options)
        outcome.collectives += train(net, opt, job, **how, steps=range(start, stop)).collectives
    outcome.params = whole_parameters(net)
    return outcome


# --- failures ---


def step_until_a_rank_fails(how: str) -> None:
    """Have one rank die, or fall asleep for longer than the group waits."""
    p = nn.Parameter(torch.ones(3))
    opt = class_of("AvaGrad")([p], process_group=dist.group.WORLD)
    for t in range(10):
        if t == 3 and dist.get_rank() == 1:
            if how == "dies":
                os._exit(1)
            time.sleep(60)
        p.grad = torch.ones(3)
        opt.step()
