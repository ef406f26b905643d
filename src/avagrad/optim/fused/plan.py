"""What a fused step needs between steps: tables of pointers on the device, and the sums for the next norm.

Everything here can be made again from the optimizer's state and groups at any time, and is whenever they
have changed other than by a fused step. Nothing of it is saved.
"""

import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from avagrad.optim.entries import Group, as_real, moment_dtype

__all__ = ["FusedPlan", "fits_its_parameter", "reason_against"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATE = ("exp_avg_sq", "exp_avg", "step")
BLOCK, WARPS = 2048, 8  # coordinates and warps for each program


def triton_kernels() -> Any:
    """Return the module of kernels; importing Triton is left to the first fused step."""
    from avagrad.optim.fused import kernels

    return kernels


def reason_against(groups: Sequence[Group]) -> str | None:
    """Say why these groups cannot be stepped by the fused kernel; None if they can."""
    try:
        import triton
    except ImportError:
        return "Triton cannot be imported"
    for group in groups:
        # Such a parameter counts in the norm from its first gradient on, and only the device may know of one.
        if not group["bias_correction"] and any(not p.requires_grad for p in group["params"]):
            return "a parameter is frozen in a group without bias correction"
    devices = ("cuda", "cpu") if triton.knobs.runtime.interpret else ("cuda",)
    for p in (p for group in groups for p in group["params"]):
        if p.device.type not in devices:
            return f"a parameter is on {p.device}; it must be on a CUDA device"
        if as_real(p.detach()).dtype not in _DTYPES:
            return f"a parameter is {p.dtype}; it must be float32, bfloat16, float16 or complex64"
        if type(p) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(p).__name__}; it must be a plain tensor"
        if not _is_dense(p):
            return f"a parameter of shape {tuple(p.shape)} has gaps or overlaps in memory (strides {p.stride()})"
    if any(group["differentiable"] for group in groups):
        return "differentiable is True, and autograd cannot follow a kernel"
    return None


def fits_its_parameter(p: Tensor, state: dict[str, Tensor]) -> bool:
    """Tell whether the moments have the shape of their parameter, and are where it is."""
    moments = state["exp_avg"], state["exp_avg_sq"]
    return all(x.shape == p.shape and x.device == p.device for x in moments) and state["step"].dim() == 0


def _on(device: torch.device) -> AbstractContextManager[Any]:
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(device)


def _is_dense(p: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _Launch:
    """The tensors of one device and dtype whose groups have the same flags: one launch."""

    def __init__(self, device: torch.device, dtype: torch.dtype, flags: dict[str, Any], block: int) -> None:
        self.device, self.dtype, self.flags, self.block = device, dtype, flags, block
        self.params: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []
        self.groups: list[int] = []
        self.sums = torch.empty(0)  # given by the plan

    def make_tables(self) -> None:
        rows, blocks = [], []
        for i, (p, state, group) in enumerate(zip(self.params, self.states, self.groups, strict=True)):
            n = p.numel() * (2 if p.is_complex() else 1)
            pointers = (
                p.data_ptr(),
                state["exp_avg"].data_ptr(),
                state["exp_avg_sq"].data_ptr(),
                state["step"].data_ptr(),
            )
            rows.append((*pointers, n, group))
            blocks += [(i, k) for k in range(-(-n // self.block))]
        self.tensors = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.blocks = torch.tensor(blocks, dtype=torch.int32).reshape(-1, 2).to(self.device)
        self.grads = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        self.shared = torch.zeros(len(rows), len(triton_kernels().SHARED), dtype=torch.float32, device=self.device)
        self.sent_pointers = [0] * len(rows)
        self.params_lie = _lie(self.params)
        self.has_complex = any(p.is_complex() for p in self.params)
        self.strides = list(map(Tensor.stride, self.params))
        self.all_contiguous = all(map(Tensor.is_contiguous, self.params))
        self.state_tensors = {key: [state[key] for state in self.states] for key in _STATE}
        self.second_moments_lie = list(map(Tensor.data_ptr, self.state_tensors["exp_avg_sq"]))
        # Whoever gives a state tensor other memory (t.data = ...) must not leave the tables with freed memory.
        self.held = [x.untyped_storage() for tensors in self.state_tensors.values() for x in tensors]

    def is_as_it_was(self) -> bool:
        """Tell whether parameters and state are where the tables say.

        This runs over all tensors at each step, so the loops are C's. What it cannot see is who writes to a
        tensor in place.
        """
        return (
            _lie(self.params) == self.params_lie
            and list(map(Tensor.data_ptr, self.state_tensors["exp_avg_sq"])) == self.second_moments_lie
            and all(
                all(map(is_, map(itemgetter(key), self.states), tensors)) for key, tensors in self.state_tensors.items()
            )
        )

    def gradient_pointers(self) -> list[int] | None:
        """Return where each gradient is, 0 for none; None if one of them is not laid out as its parameter."""
        grads = list(map(_grad, self.params))
        try:
            alike = self.all_contiguous and all(map(Tensor.is_contiguous, grads))
            alike = alike or list(map(Tensor.stride, grads)) == self.strides
            alike = alike and not any(map(Tensor.is_neg, grads))
            pointers = list(map(Tensor.data_ptr, grads))
        except (TypeError, RuntimeError):  # a parameter without a gradient, or with one that is not dense
            if any(g is not None and g.layout != torch.strided for g in grads):
                return None
            alike, pointers = False, [0 if g is None else g.data_ptr() for g in grads]
        if 0 in pointers:  # none, or empty: an empty gradient is at no address, and is counted all the same
            pointers = [1 if g is not None and at == 0 else at for g, at in zip(grads, pointers, strict=True)]
        if not alike or pointers != self.sent_pointers or self.has_complex:
            for p, g in zip(self.params, grads, strict=True):
                if g is not None and not (g.dtype == p.dtype and _same_layout(g, p) and not g.is_conj() | g.is_neg()):
                    return None
        return pointers


def _lie(tensors: list[Tensor]) -> list[Any]:
    """Return where tensors lie in memory, and how; contiguous ones need no look at their strides, which is quicker."""
    pointers, numels = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors))
    if all(map(Tensor.is_contiguous, tensors)):
        return [pointers, numels]
    return [pointers, numels, list(map(Tensor.size, tensors)), list(map(Tensor.stride, tensors))]


def _same_layout(g: Tensor, p: Tensor) -> bool:
    """Tell whether two tensors lie in memory alike; the stride of a single element means nothing."""
    if g.shape != p.shape:
        return False
    return g.stride() == p.stride() or all(
        a == b or n <= 1 for a, b, n in zip(g.stride(), p.stride(), p.shape, strict=True)
    )


_grad = attrgetter("grad")


class FusedPlan:
    """The tables of an optimizer's parameters, and the pass over them."""

    def __init__(self, opt: Any, *, normalised: bool, decoupled: bool) -> None:
        # Not to keep the optimizer alive: its state is most of the memory that there is.
        self.opt, self.normalised = weakref.proxy(opt), normalised
        self.params = [list(group["params"]) for group in opt.param_groups]
        self.states = len(opt.state)
        self.flags = [self._flags(group, decoupled) for group in opt.param_groups]
        self.decoupled = decoupled
        launches: dict[Any, _Launch] = {}
        self.others: list[Tensor] = []  # without a state, so far
        for index, (group, flags) in enumerate(zip(opt.param_groups, self.flags, strict=True)):
            for p in group["params"]:
                state = opt.state.get(p)
                if not state:
                    self.others.append(p)
                    continue
                self._lay_out(p, state)
                dtype = as_real(p.detach()).dtype
                key = (p.device, dtype, *flags.items())
                launch = launches.setdefault(key, _Launch(p.device, dtype, flags, BLOCK))
                launch.params.append(p)
                launch.states.append(state)
                launch.groups.append(index)
        self.launches = list(launches.values())
        self.devices = list(dict.fromkeys(launch.device for launch in self.launches))
        self.sums, self.totals, self.numbers = {}, {}, {}
        for device in self.devices:
            here = [launch for launch in self.launches if launch.device == device]
            for launch in here:
                launch.make_tables()
            sums = torch.zeros(sum(len(launch.blocks) for launch in here), 2, dtype=torch.float64, device=device)
            parts = torch.split(sums, [len(launch.blocks) for launch in here])
            for launch, part in zip(here, parts, strict=True):
                launch.sums = part
            self.sums[device] = sums
            self.totals[device] = torch.zeros(2, dtype=torch.float64, device=device)
            shape = (len(opt.param_groups), len(triton_kernels().NUMBERS))
            self.numbers[device] = torch.zeros(shape, dtype=torch.float64, device=device)
        self.sent: list[tuple[float, ...]] = []
        self.kept: list[Tensor] = []  # what a CUDA graph reads again at each replay
        self.summed_with: list[tuple[Any, ...]] | None = None  # the beta2 and eps that the sums were made with

    @staticmethod
    def _flags(group: Group, decoupled: bool) -> dict[str, Any]:
        return {
            "DECOUPLED": decoupled,
            "DECAYS": group["weight_decay"] != 0,
            "BIAS_CORRECTION": group["bias_correction"],
            "ACTIVE_ONLY": group["active_only"],
            "MAXIMIZE": group["maximize"],
            "NORM": group.get("norm", 2),
        }

    @staticmethod
    def _lay_out(p: Tensor, state: dict[str, Tensor]) -> None:
        """Bring a state into the layout that the kernel reads: as the parameter's, and ``step`` on its device."""
        state["step"] = state["step"].to(device=p.device, dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            if not _same_layout(state[name], p) or state[name].dtype != moment_dtype(p.dtype):
                laid = torch.empty_like(p, dtype=moment_dtype(p.dtype), memory_format=torch.preserve_format)
                state[name] = laid.copy_(state[name])

    def forget_sums(self) -> None:
        """Have the rates summed again: something else than a fused step has written to the moments."""
        self.summed_with = None

    def fits(self) -> bool:
        """Tell whether the optimizer is still the one that this plan was made for."""
        groups = self.opt.param_groups
        return (
            len(groups) == len(self.params)
            and self.states == len(self.opt.state)
            and all(all(map(is_, map(self.opt.state.get, x.params), x.states)) for x in self.launches)
            and all(group["bias_correction"] or all(p.requires_grad for p in group["params"]) for group in groups)
            and all(
                len(group["params"]) == len(params) and all(map(is_, group["params"], params))
                for group, params in zip(groups, self.params, strict=True)
            )
            and self.flags == [self._flags(group, self.decoupled) for group in groups]
            and all(p.grad is None for p in self.others)
            and all(launch.is_as_it_was() for launch in self.launches)
        )

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Take a step; False if a gradient does not allow it, and nothing has been done."""
        every = [launch.gradient_pointers() for launch in self.launches]
        if any(pointers is None for pointers in every):
            return False
        if not any(any(pointers) for pointers in every if pointers):
            return True
        self._send_numbers()
        if self.normalised:
            self._refresh_sums()
        for launch, pointers in zip(self.launches, every, strict=True):
            if pointers != launch.sent_pointers:
                self._send(launch.grads, torch.tensor(pointers, dtype=torch.int64))
                launch.sent_pointers = pointers or []
            self._run(launch, grad_scale, found_inf, rebuild=False)
            moved = launch.params if all(launch.sent_pointers) else [p for p in launch.params if p.grad is not None]
            torch.autograd.graph.increment_version(moved)  # autograd is to know that they have been written to
        if self.normalised:
            self._add_up()
        return True

    def _send_numbers(self) -> None:
        rows: list[tuple[float, ...]] = []
        tensors: list[tuple[int, Tensor]] = []
        for index, group in enumerate(self.opt.param_groups):
            lr, (beta1, beta2) = group["lr"], group["betas"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                tensors.append((index, lr))
                lr = 0.0
            logs = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
            rows.append((float(lr), beta1, beta2, group["eps"], group["weight_decay"], *logs))
        for device in self.devices:
            if rows != self.sent:
                self._send(self.numbers[device], torch.tensor(rows, dtype=torch.float64))
            for index, lr in tensors:
                self.numbers[device][index, 0].copy_(lr.detach().reshape(()), non_blocking=True)
        self.sent = rows

    def _send(self, table: Tensor, values: Tensor) -> None:
        """Copy to the device without waiting, from memory that stays where it is while a graph may read it."""
        if table.device.type == "cuda":
            values = values.pin_memory()
            if torch.cuda.is_current_stream_capturing():
                self.kept.append(values)
        table.copy_(values, non_blocking=True)

    def _refresh_sums(self) -> None:
        """Sum the rates again, if anything that they come from has changed other than by a fused step."""
        now = [(row[2], row[3]) for row in self.sent]
        if now == self.summed_with:
            if self.others:  # which may have been frozen or thawed
                self._add_up()
            return
        for launch in self.launches:
            self._run(launch, None, None, rebuild=True)
        self.summed_with = now
        self._add_up()

    def _add_up(self) -> None:
        for device in self.devices:
            torch.sum(self.sums[device], 0, out=self.totals[device])
        if len(self.devices) > 1:
            home = self.devices[0]
            total = sum((self.totals[device].to(home) for device in self.devices[1:]), self.totals[home].clone())
            for device in self.devices:
                self.totals[device].copy_(total)
        for share, n in self._unseen():
            for device in self.devices:
                self.totals[device][0] += share
                self.totals[device][1] += n

    def _unseen(self) -> list[tuple[float, int]]:
        """Return the shares of parameters that have no state yet, in groups without bias correction."""
        shares = []
        for group in self.opt.param_groups:
            if not group["bias_correction"] and not group["active_only"]:
                for p in group["params"]:
                    if p.requires_grad and not self.opt.state.get(p):
                        n = as_real(p.detach()).numel()
                        shares.append((n * group["eps"] ** -group["norm"], n))
        return shares

    def _run(self, launch: _Launch, grad_scale: Tensor | None, found_inf: Tensor | None, rebuild: bool) -> None:
        """Launch the two kernels. With ``rebuild`` nothing moves: the rates of all tensors are summed."""
        kernels, n = triton_kernels(), len(launch.params)
        common = {"NORMALISED": self.normalised, "REBUILD": rebuild, "NORM": launch.flags["NORM"]}
        nothing = launch.shared  # stands for an argument that is not read
        with _on(launch.device):
            kernels.prepare[(-(-n // 64),)](
                launch.tensors,
                launch.grads,
                self.numbers[launch.device],
                self.totals[launch.device],
                launch.shared,
                nothing if grad_scale is None else grad_scale.to(launch.device),
                nothing if found_inf is None else found_inf.to(launch.device),
                n,
                SKIPS=found_inf is not None,
                SCALED=grad_scale is not None,
                BIAS_CORRECTION=launch.flags["BIAS_CORRECTION"],
                BLOCK=64,
                num_warps=2,
                **common,
            )
            if len(launch.blocks):
                kernels.delayed_pass[(len(launch.blocks),)](
                    launch.tensors,
                    launch.grads,
                    launch.blocks,
                    launch.shared,
                    launch.sums,
                    DTYPE=kernels.DTYPES[launch.dtype],
                    DECOUPLED=launch.flags["DECOUPLED"],
                    DECAYS=launch.flags["DECAYS"],
                    ACTIVE_ONLY=launch.flags["ACTIVE_ONLY"],
                    MAXIMIZE=launch.flags["MAXIMIZE"],
                    BLOCK=launch.block,
                    num_warps=WARPS,
                    **common,
                )
