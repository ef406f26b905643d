"""What the ranks do in tests of what is rare, and must not go wrong in silence."""

import contextlib
import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from training import PATHS, mesh
from wrapping import message_of

import avagrad
from avagrad import AvaGrad

SHAPES = ((5, 3), (4,))
Found = tuple[list[Tensor], list[float]]  # parameters, and the gamma after each step


def values(seed: int) -> list[Tensor]:
    """Return the same numbers on every rank."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]


def trained(opt: AvaGrad, params: list[Any], steps: int = 8) -> Found:
    gammas = []
    for t in range(steps):
        for p, g in zip(params, values(100 + t), strict=True):
            spread = hasattr(p, "placements")
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if spread else g.clone()
        opt.step()
        gammas.append(opt.gamma())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return [p.detach() for p in whole], gammas


def trained_after_a_swap(path: str, spread: bool) -> Found:
    """Make the optimizer first, as some trainers do, and put other parameters into its groups afterwards."""
    plain = [nn.Parameter(x) for x in values(0)]
    opt = AvaGrad(plain, lr=0.3, eps=1e-3, **PATHS[path])
    params: list[Any] = plain
    if spread:
        here = mesh(dist.get_world_size())
        placements = (Shard(0), Replicate())
        params = [
            nn.Parameter(distribute_tensor(p.detach(), here, [placement]))
            for p, placement in zip(plain, placements, strict=True)
        ]
        opt.param_groups[0]["params"] = params
    return trained(opt, params)


def diagnosed(name: str, spread: bool) -> dict[str, float]:
    """Return the diagnostics of a sharded and a replicated parameter, in two groups, after some steps."""
    params: list[Any] = [nn.Parameter(x) for x in values(0)]
    if spread:
        here = mesh(dist.get_world_size())
        placements = (Shard(0), Replicate())
        params = [
            nn.Parameter(distribute_tensor(p.detach(), here, [placement]))
            for p, placement in zip(params, placements, strict=True)
        ]
    opt = getattr(avagrad, name)([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}], lr=0.3, eps=1e-3)
    trained(opt, params)
    return opt.diagnostics()  # type: ignore[no-any-return]


def gammas_where_one_rank_is_asked(asks: bool) -> list[float]:
    """Let torch ask for the state when one rank has none yet: it asks there alone."""
    rank = dist.get_rank()
    p = nn.Parameter(torch.full((3,), 1.0 + rank, dtype=torch.float64))
    opt = AvaGrad([p], lr=0.1, eps=1e-2, process_group=dist.group.WORLD)
    gammas = []
    for t in range(8):
        p.grad = None if rank == 1 and t < 4 else torch.full((3,), 1.0 + t, dtype=torch.float64)
        opt.step()
        opt.zero_grad()
        if asks and t == 2:
            _init_optim_state(opt)
        gammas.append(opt.gamma())
    return gammas


def warm_up_from_zero(path: str, spread: bool) -> Found:
    """Train with an lr that a schedule starts at 0."""
    plain = [nn.Parameter(x) for x in values(0)]
    params: list[Any] = plain
    if spread:
        here = mesh(dist.get_world_size())
        params = [nn.Parameter(distribute_tensor(p.detach(), here, [Shard(0)])) for p in plain]
    opt = AvaGrad(params, lr=0.3, eps=1e-3, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1.0, t / 3))
    opt.register_step_post_hook(lambda *_: scheduler.step())
    return trained(opt, params)


def gammas_with_a_late_group(in_backward: bool) -> list[float]:
    """Add a group between backward and step, where ranks step together."""
    first, late = (nn.Parameter(torch.full((n,), 1.0 + dist.get_rank(), dtype=torch.float64)) for n in (4, 3))
    opt = AvaGrad([first], lr=0.1, eps=1e-2, process_group=dist.group.WORLD)
    gammas = []
    with opt.step_in_backward() if in_backward else contextlib.nullcontext():
        for t in range(6):
            opt.zero_grad()
            (first.square().sum() + (late.square().sum() if t >= 2 else 0.0)).backward()  # type: ignore[no-untyped-call]
            if t == 2:
                opt.add_param_group({"params": [late]})
            opt.step()
            gammas.append(opt.gamma())
    return gammas


def first_steps_with_lr_zero() -> tuple[Tensor, list[float]]:
    """Warm up from an lr of 0, where one rank has its first gradient later than the other."""
    rank = dist.get_rank()
    p = nn.Parameter(torch.full((3,), 1.0 + rank, dtype=torch.float64))
    opt = AvaGrad([p], lr=0.0, eps=1e-2, process_group=dist.group.WORLD)
    gammas = []
    for t in range(6):
        opt.param_groups[0]["lr"] = 0.0 if t < 3 else 0.3
        p.grad = None if rank == 1 and t == 0 else torch.full((3,), 1.0 + t, dtype=torch.float64)
        opt.step()
        gammas.append(opt.gamma())
    return opt.state[p]["step"], gammas


def refusals() -> dict[str, str]:
    """Return what is said to groups and parameters that cannot be."""
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sharded = FullyShardedDataParallel(
        two, use_orig_params=True, ignored_modules=[two[1]], device_id=torch.device("cpu")
    )
    elsewhere = dist.new_group([0])  # of which rank 1 is no member
    plain = [nn.Parameter(torch.ones(2))]
    return {
        "ignored": message_of(lambda: AvaGrad(sharded.parameters(), process_group=dist.group.WORLD)),
        "not a member": message_of(lambda: AvaGrad(plain, process_group=elsewhere)),
        "not a group": message_of(lambda: AvaGrad(plain, process_group="world")),
    }


def autograd_notices(path: str) -> str:
    """Return what a second backward says after a step has written to a DTensor that it needs."""
    p = nn.Parameter(distribute_tensor(torch.ones(4, dtype=torch.float64), mesh(dist.get_world_size()), [Shard(0)]))
    opt = AvaGrad([p], lr=0.1, **PATHS[path])
    for _ in range(2):
        loss = (p * p * p).sum()
        opt.zero_grad()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        opt.step()
    return message_of(loss.backward)


def copies_go_on_when_they_have_their_group() -> list[bool]:
    """Copy an optimizer of FSDP1's parameters, give the copies their group, and step."""
    net = FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=True, device_id=torch.device("cpu"))
    opt = AvaGrad(net.parameters(), process_group=dist.group.WORLD)
    net(torch.ones(2, 3)).sum().backward()
    found = []
    makers: list[Any] = [copy.copy, lambda each: pickle.loads(pickle.dumps(each))]
    for make in makers:
        other = make(opt)
        assert other.process_group is None
        other.process_group = dist.group.WORLD
        other.step()
        found.append(other.gamma() > 0)
    return found


def trained_by_gradients_elsewhere(name: str, path: str, of_param: str, of_grad: str, spread: bool) -> list[Tensor]:
    """Train with gradients whose placement is not their parameter's: they are redistributed before they are read."""
    placed: dict[str, Placement] = {"r": Replicate(), "s0": Shard(0), "s1": Shard(1), "sum": Partial()}
    params: list[Any] = [nn.Parameter(torch.ones(64, 4, dtype=torch.float64)) for _ in range(3)]
    if spread:
        here, n = mesh(dist.get_world_size()), dist.get_world_size()
        params = [nn.Parameter(distribute_tensor(p.detach(), here, [placed[of_param]])) for p in params]
    opt = getattr(avagrad, name)(params, lr=0.1, **PATHS[path])
    for t in range(4):
        g = torch.randn(64, 4, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        for p in params:
            if not spread:
                p.grad = g.clone()
            elif of_grad == "sum":
                p.grad = DTensor.from_local(g / n, here, [Partial()])
            else:
                p.grad = distribute_tensor(g, here, [placed[of_grad]])
        opt.step()
    return [p.detach().full_tensor() if spread else p.detach() for p in params]


def replicas_beside_an_empty_shard(path: str, dtype: torch.dtype) -> list[Tensor]:
    """Train replicated parameters beside one of which this rank may hold nothing; return the replicas."""
    here, rank = mesh(dist.get_world_size()), dist.get_rank()
    places: list[tuple[tuple[int, ...], Placement]] = [((5,), Replicate()), ((10, 4), Shard(1)), ((7,), Replicate())]
    params: list[Any] = [
        nn.Parameter(distribute_tensor(torch.ones(shape, dtype=dtype), here, [how])) for shape, how in places
    ]
    opt = AvaGrad([{"params": [params[0]]}, {"params": params[1:]}], lr=0.1, weight_decay=0.3, **PATHS[path])
    random = torch.Generator().manual_seed(rank)
    for _ in range(20):
        for p in params:
            g = torch.randn(p.shape, generator=random, dtype=dtype)
            p.grad = DTensor.from_local(g, here, [Partial()])
        opt.step()
    return [params[0].to_local().detach(), params[2].to_local().detach()]


def moments_that_are_swapped(spread: bool) -> list[Tensor]:
    """Reset a moment by torch.utils.swap_tensors, which leaves the object and replaces its memory."""
    p: Any = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    if spread:
        p = nn.Parameter(distribute_tensor(p.detach(), mesh(dist.get_world_size()), [Shard(0)]))
    opt = AvaGrad([p], lr=0.1)
    for t in range(6):
        if t == 3:
            torch.utils.swap_tensors(opt.state[p]["exp_avg"], torch.zeros_like(p.detach()))  # type: ignore[no-untyped-call]
        p.grad = torch.ones_like(p)
        opt.step()
    found = [p.detach(), opt.state[p]["exp_avg"]]
    return [x.full_tensor() for x in found] if spread else found
