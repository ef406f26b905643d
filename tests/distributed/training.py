"""The same training in one process and, sharded in every way that torch has, in many.

In one process it is done with plain tensors on the whole batch; a rank sees its rows of the batch, and the average of
the ranks' gradients is the gradient of the whole. What is returned is whole again, so that the two can be compared.
"""

import contextlib
import copy
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from problems import gradients, laid_out_as, optimizer_class, parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

STEPS, THAWED_AT, FROZEN_AT = 20, 7, 13
BATCH, FEATURES, HIDDEN, NARROW, OUTPUTS = 8, 4, 6, 5, 3
PATHS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
}


@dataclass(frozen=True)
class Job:
    """Which optimizer trains, and how."""

    name: str = "AvaGrad"
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float64
    freezes: bool = True  # some parameters for some time; not all wrappers allow it
    edits: bool = False  # groups are changed and added while it trains
    watches: str = ""  # "gamma" or "collectives": not always, since watching might hide what it looks for


def job(name: str = "AvaGrad", dtype: torch.dtype = torch.float64, path: str = "default", **rest: Any) -> Job:
    """Return a job; what is no field of it is an option of the optimizer."""
    own = {key: rest.pop(key) for key in ("freezes", "edits", "watches") if key in rest}
    paths = {} if hasattr(torch.optim, name) else PATHS[path]
    return Job(name, tuple((paths | rest).items()), dtype, **own)


@dataclass
class Outcome:
    """What a training came to."""

    params: dict[str, Tensor]
    gammas: list[float] = field(default_factory=list)  # before each step
    collectives: list[dict[str, int]] = field(default_factory=list)  # in each step, by name


class Net(nn.Module):
    """Few parameters of awkward sizes: rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, HIDDEN)
        self.middle = nn.Linear(HIDDEN, NARROW)
        self.late = nn.Linear(NARROW, NARROW)  # frozen at first
        self.early = nn.LayerNorm(NARROW)  # frozen in the end
        self.outer = nn.Linear(NARROW, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, OUTPUTS))
        self.recomputes = False  # some activations, in backward

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.middle(torch.tanh(self.inner(x)))
        late = checkpoint(self.later, narrow, use_reentrant=False) if self.recomputes else self.later(narrow)
        result: Tensor = self.outer(self.early(narrow + late)) * self.scale
        return result

    def later(self, narrow: Tensor) -> Tensor:
        return torch.tanh(self.late(narrow))


def new_net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(t: int, dtype: torch.dtype, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, or the rows of them that a rank sees."""
    rng = torch.Generator().manual_seed(100 + t)
    x, y = (torch.randn(BATCH, n, generator=rng, dtype=torch.float64).to(dtype) for n in (FEATURES, OUTPUTS))
    return x[rows], y[rows]


def rows_of(rank: int, n: int) -> slice:
    return slice(rank, None, n)


def new_optimizer(net: nn.Module, job: Job, make: Callable[..., Any] | None = None) -> Any:
    """Return an optimizer with two groups that differ in lr and weight decay."""
    lr = 0.03 if job.name in ("AvaGrad", "AvaGradW") else 0.003
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": [], "lr": 2 * lr}]
    for name, p in net.named_parameters():
        if not (job.edits and "outer" in name):
            groups[not name.endswith("weight")]["params"].append(p)
    options: dict[str, Any] = {"lr": lr}
    if job.name != "SGD":
        options |= {"eps": 1e-6, "betas": (0.9, 0.99)}
    return (make or class_of(job.name))(groups, **options | dict(job.options))


def class_of(name: str) -> Callable[..., Any]:
    return getattr(torch.optim, name) if hasattr(torch.optim, name) else optimizer_class(name)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (net(x) - y).square().mean()
    return loss


def freeze(net: Any, t: int) -> None:
    """Freeze and thaw, as is done before step ``t``."""
    net.late.requires_grad_(t >= THAWED_AT)
    net.early.requires_grad_(t < FROZEN_AT)


def edit(net: Any, opt: Any, t: int) -> None:
    """Change what a user may change between two steps."""
    for group in opt.param_groups:
        if t % 4 == 3:
            group["lr"] *= 0.7
        if t in (9, 15):  # the rates are others, hence gamma, after the last step has ended
            group["eps"] *= 30
        if t == 11:
            group["betas"] = (0.8, 0.9)
    if t == 5:
        opt.add_param_group({"params": list(net.outer.parameters()), "eps": 1e-3})


def backward_of_whole_batch(net: nn.Module, x: Tensor, y: Tensor) -> None:
    loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]


def train(
    net: Any,
    opt: Any,
    job: Job,
    rows: slice = slice(None),
    *,
    backward: Callable[[Any, Tensor, Tensor], None] = backward_of_whole_batch,
    mend_gradients: Callable[[Any], None] = lambda net: None,
    steps: Iterable[int] = range(STEPS),
) -> Outcome:
    """Take the steps, and return the parameters as whole tensors."""
    outcome = Outcome({})
    for t in steps:
        if job.freezes:
            freeze(net, t)
        if job.edits:
            edit(net, opt, t)
        opt.zero_grad()
        backward(net, *batch(t, job.dtype, rows))
        mend_gradients(net)
        step(opt, job, outcome)
    outcome.params = whole_parameters(net)
    return outcome


def step(opt: Any, job: Job, outcome: Outcome) -> None:
    if job.watches == "collectives":
        with CountsCollectives() as counted:
            opt.step()
        outcome.collectives.append(dict(counted.calls))
        return
    if job.watches == "gamma":
        outcome.gammas.append(opt.gamma())
    opt.step()


def whole_parameters(net: nn.Module) -> dict[str, Tensor]:
    summoned = (
        FullyShardedDataParallel.summon_full_params(net)
        if isinstance(net, FullyShardedDataParallel)
        else contextlib.nullcontext()
    )
    with summoned:
        return {name.removeprefix("module."): whole(p) for name, p in net.named_parameters()}


def whole(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


class CountsCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of all collectives, by whatever way they are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first makes of it what it is made of
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.calls[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def with_group(job: Job) -> Job:
    """Return the same job for parameters that do not say over which ranks they are spread."""
    return replace(job, options=(*job.options, ("process_group", dist.group.WORLD)))


def alone(job: Job) -> Job:
    """Return the same job for one process: by the simplest path, and with no group."""
    if hasattr(torch.optim, job.name):
        return job
    return replace(job, options=tuple((dict(job.options) | PATHS["loop"]).items()))


@cache
def train_alone(job: Job, **how: Any) -> Outcome:
    """Train in this process."""
    net = new_net(job.dtype)
    return train(net, new_optimizer(net, alone(job)), job, **how)


# --- ways to shard the model ---


@cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("one", "two")[: len(shape)])


def my_rows() -> slice:
    return rows_of(dist.get_rank(), dist.get_world_size())


def average_scale(net: Any) -> None:
    """Average the gradient of the parameter that FSDP2 ignores."""
    dist.all_reduce(net.scale.grad)
    net.scale.grad /= dist.get_world_size()


def shard_fully(net: Net, over: DeviceMesh, *, ignore_scale: bool = True) -> Net:
    """Shard as FSDP2 does, in parts, with one parameter that stays a plain tensor."""
    for part in (net.inner, net.middle):
        fully_shard(part, mesh=over)
    fully_shard(net, mesh=over, ignored_params={net.scale} if ignore_scale else None)
    return net


def split_columns_and_rows(net: Net, over: DeviceMesh) -> Net:
    parallelize_module(net, over, {"inner": ColwiseParallel(), "middle": RowwiseParallel()})
    return net


def fsdp2_net(dtype: torch.dtype) -> Net:
    return shard_fully(new_net(dtype), mesh(dist.get_world_size()))


def train_fsdp2(job: Job) -> Outcome:
    net = fsdp2_net(job.dtype)
    return train(net, new_optimizer(net, job), job, my_rows(), mend_gradients=average_scale)


def train_hsdp(job: Job) -> Outcome:
    """Replicate over one dimension of the mesh, shard over the other."""
    net = shard_fully(new_net(job.dtype), mesh(2, 2))
    return train(net, new_optimizer(net, job), job, my_rows(), mend_gradients=average_scale)


def train_tensor_parallel(job: Job) -> Outcome:
    """Split two of the layers, and leave all else as plain tensors."""
    net = split_columns_and_rows(new_net(job.dtype), mesh(dist.get_world_size()))
    return train(net, new_optimizer(net, job), job)


def train_fsdp2_and_tensor_parallel(job: Job) -> Outcome:
    """Shard two layers over a mesh of two dimensions, the others over one of them, and leave one tensor plain."""
    both = mesh(2, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # not written to here
        net = shard_fully(split_columns_and_rows(new_net(job.dtype), both["two"]), both["one"])
        rows = rows_of(both["one"].get_local_rank(), 2)
        return train(net, new_optimizer(net, job), job, rows, mend_gradients=average_scale)


# --- parameters without a model: any placement, and any gradient ---

Placements = tuple[Placement, ...] | None  # None: a plain tensor
LEFT_OUT = "."


def placements(word: str) -> Placements:
    """Read a word: ``s0r`` is sharded over a mesh's first dimension, replicated over its second; ``-`` is plain."""
    known = {"s0": Shard(0), "s1": Shard(1), "r": Replicate()}
    marks = word.replace("s", " s").replace("r", " r").split()
    return None if word == "-" else tuple(known[mark] for mark in marks)


def spread(x: Tensor, over: DeviceMesh | None, how: Placements) -> Tensor:
    return x if over is None or how is None else distribute_tensor(x, over, how)


def optimizer_of(params: dict[int, nn.Parameter], job: Job) -> Any:
    """Return an optimizer with a group for each parameter; which one does not depend on who holds it."""
    groups = [{"params": [p], "lr": 0.02 + 0.01 * (i % 2), "weight_decay": 0.1 * (i % 3)} for i, p in params.items()]
    return optimizer_class(job.name)(groups, **dict(job.options))


def train_placed(job: Job, words: tuple[str, ...], shape: tuple[int, ...] = ()) -> Outcome:
    """Train parameters of awkward kinds by given gradients, each placed as its word says; plain without a shape."""
    over = mesh(*shape) if shape else None
    plain = parameters(job.dtype)
    kept = [i for i, word in enumerate(words) if word != LEFT_OUT]
    hows = {i: placements(words[i]) for i in kept}
    params = {i: nn.Parameter(spread(plain[i].detach(), over, hows[i])) for i in kept}
    opt = optimizer_of(params, job if shape else alone(job))
    outcome = Outcome({})
    for grads in gradients(plain, STEPS):
        for i, p in params.items():
            g = laid_out_as(plain[i], grads[i])
            p.grad = None if g is None else spread(g, over, hows[i])
        step(opt, job, outcome)
    outcome.params = {str(i): whole(p) for i, p in params.items()}
    return outcome


IDLE_RANK, IDLE_STEPS = 1, range(4, 9)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda opt: pickle.loads(pickle.dumps(opt)),
}


def train_apart(job: Job, n: int, in_one_process: bool = False, copied_by: str = "") -> Outcome:
    """Train parameters that are dealt out to the ranks, one of which is late and has no gradients for some time.

    In the middle the optimizer may be replaced by a copy, which has to be given the group again.
    """
    params = parameters(job.dtype)
    owners = [i % n for i in range(len(params))]
    mine = [i for i, owner in enumerate(owners) if in_one_process or owner == dist.get_rank()]
    opt = optimizer_of({i: params[i] for i in mine}, alone(job) if in_one_process else with_group(job))
    outcome = Outcome({})
    for t, grads in enumerate(gradients(parameters(job.dtype), STEPS)):
        if copied_by and t == STEPS // 2:
            opt = COPIES[copied_by](opt)
            assert opt.process_group is None
            opt.process_group = dist.group.WORLD
            for i, group in zip(mine, opt.param_groups, strict=True):
                (params[i],) = group["params"]
        if t in IDLE_STEPS and not in_one_process and dist.get_rank() == IDLE_RANK:
            time.sleep(0.02)  # so that others come to their next step before the sum for it is there
        for i in mine:
            idle = owners[i] == IDLE_RANK and t in IDLE_STEPS
            params[i].grad = None if idle else laid_out_as(params[i], grads[i])
        step(opt, job, outcome)
    outcome.params = {str(i): whole(params[i]) for i in mine}
    return outcome
