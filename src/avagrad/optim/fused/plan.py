"""What a fused step needs between steps: tables of pointers on the device, and the sums for the next norm.

Everything here can be made again from the optimizer's state and groups at any time, and is whenever they
have changed other than by a fused step. Nothing of it is saved.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from avagrad.optim.entries import Group, as_real, moment_dtype
from avagrad.optim.foreach import count_gradients
from avagrad.optim.fused import native
from avagrad.optim.fused.looks import DictLook, ListLook, address, lies_as, looks_at, same_layout
from avagrad.optim.fused.tables import NUMBERS, SHARED
from avagrad.optim.norm import key_of_sums, start_sums
from avagrad.optim.rules import scale
from avagrad.optim.sharding import OWNERS, Sharding

__all__ = ["FusedPlan", "fits_its_parameter", "reason_against"]

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = {"cuda": (torch.float32, *_HALF), "cpu": (torch.float32, torch.float64, *_HALF)}
_STATE = ("exp_avg_sq", "exp_avg", "step", "compensation")
# Coordinates and warps for each program of Triton's. The shorter blocks are faster, but their tables would be more than
# a thousandth of what a step of a large model works on.
BLOCK, WARPS = 1024, 4
LARGE, LARGE_BLOCK, LARGE_WARPS = 2**28, 2048, 8
CPU_BLOCK = 16384
INTERPRET = False  # run Triton's kernels on CPU tensors, in its interpreter: to test them without a GPU


def triton_kernels() -> Any:
    """Return the module of kernels; importing Triton is left to the first fused step."""
    from avagrad.optim.fused import kernels

    return kernels


def reason_against(groups: Sequence[Group]) -> str | None:
    """Say why these groups cannot be stepped by fused code; None if they can."""
    for group in groups:
        # Such a parameter counts in the norm from its first gradient on, and only the device may know of one.
        if not group["bias_correction"] and any(not p.requires_grad for p in _owners(group)):
            return "a parameter is frozen in a group without bias correction"
    for p in (p for group in groups for p in group["params"]):
        if p.device.type not in _DTYPES:
            return f"a parameter is on {p.device}; it must be on a CUDA device or on the CPU"
        dtypes = _DTYPES["cuda" if _takes_triton(p.device) else "cpu"]
        if as_real(p.detach()).dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"a parameter is {p.dtype}; on {p.device.type} it must be one of {names}, or of such pairs (complex)"
        if p.is_inference():
            return "a parameter is an inference tensor, which autograd does not allow to be written to"
        if type(p) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(p).__name__}; it must be a plain tensor"
        if not _is_dense(p):
            return f"a parameter of shape {tuple(p.shape)} has gaps or overlaps in memory (strides {p.stride()})"
    if any(group["differentiable"] for group in groups):
        return "differentiable is True, and autograd cannot follow a kernel"
    devices = {p.device for group in groups for p in group["params"]}
    if any(map(_takes_triton, devices)) and not _has_triton():
        return "Triton cannot be imported"
    return None if all(map(_takes_triton, devices)) else native.reason_against_native()


def _owners(group: Group) -> list[Tensor]:
    """Return the parameters of a group, also where its tensors are this rank's parts of them."""
    owners: list[Tensor] = group[OWNERS if OWNERS in group else "params"]
    return owners


def _takes_triton(device: torch.device) -> bool:
    return device.type != "cpu" or INTERPRET


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


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

    def __init__(self, device: torch.device, dtype: torch.dtype, flags: dict[str, Any], size: int = 0) -> None:
        self.device, self.dtype, self.flags = device, dtype, flags
        self.on_triton = _takes_triton(device)
        self.block, self.warps = (BLOCK, WARPS) if size < LARGE else (LARGE_BLOCK, LARGE_WARPS)
        if not self.on_triton:
            self.block = CPU_BLOCK
        self.params: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []
        self.groups: list[int] = []
        self.places: list[int] = []  # among all parameters of the optimizer
        self.sums = torch.empty(0)  # given by the plan
        self.compiled: dict[Any, Any] = {}

    def make_tables(self) -> None:
        rows: list[tuple[int, ...]] = []
        blocks: list[int] = []
        self.first_blocks = [0]
        for i, (p, state) in enumerate(zip(self.params, self.states, strict=True)):
            n = p.numel() * (2 if p.is_complex() else 1)
            moments = [state[key].data_ptr() for key in ("exp_avg", "exp_avg_sq", "step")]
            rest = state["compensation"].data_ptr() if self.flags["ROUNDING"] == "kahan" else 0
            rows.append((p.data_ptr(), *moments, n, self.groups[i], self.places[i], rest, len(blocks)))
            blocks += [i] * -(-n // self.block)
            self.first_blocks.append(len(blocks))
        self.tensors = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device="cpu").to(self.device)
        self.grads = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        shared = torch.float32 if self.on_triton else torch.float64
        self.shared = torch.zeros(len(rows), len(SHARED), dtype=shared, device=self.device)
        self.looks = looks_at(self.params, self.states, _STATE)
        self.none = torch.zeros(len(rows), dtype=torch.int64, device="cpu")  # the addresses when there are no gradients
        self.sent: Tensor | None = None  # those that the device has

    def start(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int
    ) -> None:
        """Start a kernel of Triton's. ``constants`` come in the kernel's order.

        Half of what a launch costs is finding the code for the arguments. They are the same tables at each step, but
        for a GradScaler's tensors, so what was found is kept.
        """
        grid = (programs, 1, 1)
        changes = constants.get("SKIPS") or constants.get("SCALED")
        key = (kernel, *constants.values())
        with _on(self.device):
            if (code := self.compiled.get(key)) is not None:
                code[grid](*arguments, *constants.values())
                return
            code = kernel[grid](*arguments, **constants, num_warps=warps)
        if code is not None and not changes:  # the interpreter gives none
            self.compiled[key] = code

    def gradients(self, copies: list[Tensor]) -> Tensor | None:
        """Return the address of each gradient, 0 for none; None if one is sparse, or of another dtype.

        One that is laid out otherwise than its parameter is copied first.
        """
        found = self.looks.gradients()
        if found is not None:
            return found
        if any(p.grad is not None and not _is_readable(p.grad, p) for p in self.params):
            return None
        grads = [None if p.grad is None else _laid_out(p) for p in self.params]
        copies += [g for g in grads if g is not None]
        return torch.tensor([0 if g is None else address(g) for g in grads], dtype=torch.int64, device="cpu")


def _is_readable(g: Tensor, p: Tensor) -> bool:
    """Tell whether a gradient can be read by a kernel, maybe after it has been copied."""
    return g.layout == torch.strided and g.dtype == p.dtype


def _laid_out(p: Tensor) -> Tensor:
    """Return the gradient of a parameter as one that lies in memory as the parameter does."""
    g = p.grad
    assert g is not None
    return g if lies_as(g, p) else torch.empty_like(p, memory_format=torch.preserve_format).copy_(g)


class FusedPlan:
    """The tables of an optimizer's parameters, and the pass over them."""

    def __init__(
        self,
        opt: Any,
        *,
        normalised: bool,
        decoupled: bool,
        sharding: Sharding | None = None,
        row_of: Callable[[Tensor], int | None] | None = None,
    ) -> None:
        # Not to keep the optimizer alive: its state is most of the memory that there is.
        self.opt, self.normalised = weakref.proxy(opt), normalised
        self.params = [ListLook(group["params"]) for group in opt.param_groups]
        self.flags = [self._flags(group, decoupled) for group in opt.param_groups]
        self.decoupled = decoupled
        launches: dict[Any, _Launch] = {}
        self.others: list[Tensor] = []  # without a state, so far: they do not count
        self.rows: dict[int, tuple[_Launch, int]] = {}
        place = -1
        size = sum(p.numel() for group in opt.param_groups for p in group["params"])
        for index, (group, flags) in enumerate(zip(opt.param_groups, self.flags, strict=True)):
            for p in group["params"]:
                place += 1
                state = opt.state.get(p)
                if not state:
                    self.others.append(p)
                    continue
                dtype = as_real(p.detach()).dtype
                its_flags = flags if dtype in _HALF else flags | {"ROUNDING": "nearest"}
                self._lay_out(p, state, its_flags["ROUNDING"] == "kahan")
                key = (p.device, dtype, *its_flags.items())
                launch = launches.setdefault(key, _Launch(p.device, dtype, its_flags, size))
                self.rows[id(p)] = launch, len(launch.params)
                launch.params.append(p)
                launch.states.append(state)
                launch.groups.append(index)
                launch.places.append(place)
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
            shape = (len(opt.param_groups), len(NUMBERS))
            self.numbers[device] = torch.zeros(shape, dtype=torch.float64, device=device)
        self.sharding = sharding
        if sharding is not None and row_of is not None:
            self.shares = {device: self._shares(device, 1 + len(sharding.groups), row_of) for device in self.devices}
        self.state_objects = DictLook(opt.state)
        self.sent: list[tuple[float, ...]] = []
        self.kept: list[Tensor] = []  # what a CUDA graph reads again at each replay
        self.summed_with: list[tuple[Any, ...]] | None = None  # the beta2 and eps that the sums were made with

    def _shares(self, device: torch.device, rows: int, row_of: Callable[[Tensor], int | None]) -> Tensor:
        """Return which blocks of a device this rank counts in which row of the table of sums: 1 or 0."""
        owners: list[int] = []
        for launch in self.launches:
            if launch.device == device:
                counted = [row_of(p) for p in launch.params]
                blocks = zip(launch.first_blocks, launch.first_blocks[1:], counted, strict=False)
                owners += [-1 if row is None else row for first, end, row in blocks for _ in range(first, end)]
        counts = torch.arange(rows, device="cpu")[:, None] == torch.tensor(owners, dtype=torch.int64, device="cpu")
        return counts.to(device=device, dtype=torch.float64)

    @staticmethod
    def _flags(group: Group, decoupled: bool) -> dict[str, Any]:
        return {
            "DECOUPLED": decoupled,
            "DECAYS": group["weight_decay"] != 0,
            "BIAS_CORRECTION": group["bias_correction"],
            "ACTIVE_ONLY": group["active_only"],
            "MAXIMIZE": group["maximize"],
            "NORM": group.get("norm", 2),
            "ROUNDING": group["rounding"],
        }

    @staticmethod
    def _lay_out(p: Tensor, state: dict[str, Tensor], compensated: bool) -> None:
        """Bring a state into the layout that the kernel reads: as the parameter's, and ``step`` on its device."""
        state["step"] = state["step"].to(device=p.device, dtype=torch.float32)
        if not compensated:
            state.pop("compensation", None)  # what was cut off then is not to be added one day
        elif "compensation" not in state:
            state["compensation"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        dtypes = {"exp_avg": moment_dtype(p.dtype), "exp_avg_sq": moment_dtype(p.dtype), "compensation": p.dtype}
        for name, dtype in dtypes.items():
            if name in state and (not same_layout(state[name], p) or state[name].dtype != dtype):
                laid = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
                state[name] = laid.copy_(state[name])

    def forget_sums(self) -> None:
        """Have the rates summed again: something else than a fused step has written to the moments."""
        self.summed_with = None

    def fits(self) -> bool:
        """Tell whether the optimizer is still the one that this plan was made for; if so, a step follows."""
        groups = self.opt.param_groups
        return (
            len(groups) == len(self.params)
            and self.state_objects.are_as_they_were(self.opt.state)
            and all(group["bias_correction"] or all(p.requires_grad for p in _owners(group)) for group in groups)
            and all(look.are_as_they_were(group["params"]) for look, group in zip(self.params, groups, strict=True))
            and self.flags == [self._flags(group, self.decoupled) for group in groups]
            and all(p.grad is None for p in self.others)
            and all(launch.looks.are_as_they_were() for launch in self.launches)
        )

    # --- a step ---

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Take a step; False if a gradient does not allow it, and nothing has been done."""
        copies: list[Tensor] = []
        every = [launch.gradients(copies) for launch in self.launches]
        if any(found is None for found in every):
            return False
        # A rank without gradients takes part all the same in what the ranks do together.
        if self.sharding is None and all(
            found is None or torch.equal(found, launch.none) for launch, found in zip(self.launches, every, strict=True)
        ):
            return True
        self._settle()
        for launch, found in zip(self.launches, every, strict=True):
            assert found is not None
            if launch.sent is None or not torch.equal(found, launch.sent):
                launch.sent = found.clone()  # the looks will write to theirs again
                self._send(launch.grads, launch.sent)
            self._run(launch, grad_scale, found_inf)
        if self.normalised:
            self._add_up()
        return True

    def begin(self) -> None:
        """Begin a step that moves one parameter after the other: from here on its numbers and gamma stand."""
        self._settle()
        self.moved: list[Tensor] = []
        for launch in self.launches:
            launch.sent = None
            launch.grads.fill_(1)  # all may move
            if launch.on_triton:
                self._prepare(launch, counts=False)

    def gammas(self) -> dict[torch.device, Tensor]:
        """Return gamma on each device, in a step that has begun."""
        if not self.normalised:
            return {}
        norm = self.launches[0].flags["NORM"]
        return {device: scale(total[0], total[1], norm=norm) for device, total in self.totals.items()}

    def next_gamma(self) -> Tensor:
        """Return the gamma that a step would take now."""
        self._settle()
        return next(iter(self.gammas().values()))

    def can_move(self, p: Tensor) -> bool:
        """Tell whether the plan knows this parameter and can read its gradient."""
        return id(p) in self.rows and p.grad is not None and _is_readable(p.grad, p)

    def move(self, p: Tensor) -> None:
        """Move one parameter by its gradient, in a step that has begun."""
        launch, i = self.rows[id(p)]
        g = _laid_out(p)
        blocks = launch.first_blocks[i], launch.first_blocks[i + 1]
        if launch.on_triton:
            self._pass(launch, blocks, gradient=address(g))
            self.moved.append(launch.states[i]["step"])
        else:
            launch.grads[i] = address(g)
            self._run_natively(launch, (i, i + 1), blocks)
        torch.autograd.graph.increment_version(p)

    def end(self) -> None:
        """End a step that has begun."""
        if self.moved:
            count_gradients(self.moved)
        if self.normalised:
            self._add_up()

    def _settle(self) -> None:
        """Have on the device the numbers of the groups and the sums of the rates, as they are now."""
        self._send_numbers()
        if self.normalised:
            self._refresh_sums()
            if self.sharding is not None:
                total = self.sharding.total(key_of_sums(self.opt.param_groups), self._table_of_sums)
                for device in self.devices:
                    self.totals[device].copy_(total, non_blocking=device.type != "cpu")

    def _send_numbers(self) -> None:
        rows: list[tuple[float, ...]] = []
        tensors: list[tuple[int, Tensor]] = []
        for index, group in enumerate(self.opt.param_groups):
            lr, (beta1, beta2) = group["lr"], group["betas"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                tensors.append((index, lr))
                lr = 0.0
            logs = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
            rows.append((float(lr), beta1, beta2, group["eps"], group["weight_decay"], *logs, group["rounding_seed"]))
        for device in self.devices:
            if rows != self.sent:
                self._send(self.numbers[device], torch.tensor(rows, dtype=torch.float64, device="cpu"))
            for index, lr in tensors:
                self.numbers[device][index, 0].copy_(lr.detach().reshape(()), non_blocking=device.type != "cpu")
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
            return
        for launch in self.launches:
            self._run(launch, rebuild=True)
        self.summed_with = now
        if self.sharding is None:
            self._add_up()

    def _table_of_sums(self) -> Tensor:
        """Return what this rank has counted, in a row for each set of ranks that add it up."""
        home = self.devices[0]
        return torch.stack([(self.shares[d] @ self.sums[d]).to(home) for d in self.devices]).sum(0)

    def _add_up(self) -> None:
        """Add up the sums of all blocks: for the next step."""
        if self.sharding is not None:
            self._refresh_sums()  # where another path has moved a parameter since they were made
            start_sums(self.sharding, self.opt.param_groups, self._table_of_sums)
            return
        for device in self.devices:
            if device.type == "cpu" and not INTERPRET:
                native.add_up(self.sums[device], self.totals[device])
            else:
                torch.sum(self.sums[device], 0, out=self.totals[device])
        if len(self.devices) > 1:
            home = self.devices[0]
            total = sum((self.totals[device].to(home) for device in self.devices[1:]), self.totals[home].clone())
            for device in self.devices:
                self.totals[device].copy_(total)

    def _run(
        self,
        launch: _Launch,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        rebuild: bool = False,
    ) -> None:
        """Move the tensors that have a gradient. With ``rebuild`` nothing moves: the rates of all are summed."""
        grad_scale, found_inf = (x if x is None else x.to(launch.device) for x in (grad_scale, found_inf))
        blocks = 0, len(launch.blocks)
        if launch.on_triton:
            self._prepare(launch, grad_scale, found_inf, rebuild=rebuild, counts=not rebuild)
            self._pass(launch, blocks, rebuild=rebuild)
        else:
            self._run_natively(launch, (0, len(launch.params)), blocks, grad_scale, found_inf, rebuild=rebuild)

    def _run_natively(
        self,
        launch: _Launch,
        rows: tuple[int, int],
        blocks: tuple[int, int],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        rebuild: bool = False,
    ) -> None:
        flags = native.flags_of(launch.dtype, launch.block, launch.flags, normalised=self.normalised, rebuild=rebuild)
        numbers, totals = self.numbers[launch.device], self.totals[launch.device]
        tables = launch.tensors, launch.grads, numbers, totals, launch.shared, launch.blocks, launch.sums
        native.step(flags, tables, grad_scale, found_inf, rows, blocks)

    def _prepare(
        self,
        launch: _Launch,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        rebuild: bool = False,
        counts: bool = True,
    ) -> None:
        nothing = launch.shared  # stands for an argument that is not read
        launch.start(
            triton_kernels().prepare,
            -(-len(launch.params) // 64),
            (
                launch.tensors,
                launch.grads,
                self.numbers[launch.device],
                self.totals[launch.device],
                launch.shared,
                nothing if grad_scale is None else grad_scale,
                nothing if found_inf is None else found_inf,
                len(launch.params),
            ),
            {
                "NORMALISED": self.normalised,
                "SKIPS": found_inf is not None,
                "SCALED": grad_scale is not None,
                "REBUILD": rebuild,
                "COUNTS": counts,
                "BIAS_CORRECTION": launch.flags["BIAS_CORRECTION"],
                "NORM": launch.flags["NORM"],
                "BLOCK": 64,
            },
            warps=2,
        )

    def _pass(
        self, launch: _Launch, blocks: tuple[int, int], *, rebuild: bool = False, gradient: int | None = None
    ) -> None:
        kernels = triton_kernels()
        if blocks[0] == blocks[1]:
            return
        launch.start(
            kernels.delayed_pass,
            blocks[1] - blocks[0],
            (launch.tensors, launch.grads, launch.blocks, launch.shared, launch.sums, blocks[0], gradient or 0),
            {
                "ONE": gradient is not None,
                "ROUNDING": launch.flags["ROUNDING"],
                "DTYPE": kernels.DTYPES[launch.dtype],
                "NORMALISED": self.normalised,
                "REBUILD": rebuild,
                "DECOUPLED": launch.flags["DECOUPLED"],
                "DECAYS": launch.flags["DECAYS"],
                "ACTIVE_ONLY": launch.flags["ACTIVE_ONLY"],
                "MAXIMIZE": launch.flags["MAXIMIZE"],
                "NORM": launch.flags["NORM"],
                "BLOCK": launch.block,
            },
            warps=launch.warps,
        )
