"""The fused backend: the whole step in one pass over memory, by Triton on CUDA and by native code on a CPU.

Kernels read tables of pointers. The tables belong to one snapshot of the parameters. What changes from step to step
(the gradients' addresses, the groups' numbers) is sent again only if it differs from what was sent last.
"""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from avagrad.optim.backends import native
from avagrad.optim.backends.loop import Backend, layouts
from avagrad.optim.rounding import moment_dtype
from avagrad.optim.rules import Delayed, Flags, Rule
from avagrad.optim.sharding import PLAIN

if TYPE_CHECKING:
    from avagrad.optim.params import ParamView
    from avagrad.optim.step import Step

__all__ = ["Fused"]

_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {"cuda": _ON_GPU, "cpu": (*_ON_GPU, torch.float64)}
# Coordinates and warps per Triton program: shorter blocks are faster, but have larger tables.
BLOCK, WARPS = 1024, 4
CPU_BLOCK = 16384
INTERPRET = False  # run Triton's kernels on CPU tensors, in its interpreter: to test them without a GPU
# The columns of Launch.tensors (int64): addresses, the size, the group, the param_id, the
# first block and the seed of rounding. native.c and triton.py have the columns in the same order.
COLUMNS = ("w", "m", "v", "step", "numel", "group", "param_id", "compensation", "first_block", "seed")
SHARED = 19  # numbers that the coordinates of a tensor share in a step, computed by a kernel


# --- what is supported -----------------------------------------------------------------------------------------------


def unsupported_reason(params: Sequence[Tensor]) -> str | None:
    """Return why the fused backend cannot move these tensors; None if it can."""
    for p in params:
        if is_lazy(p) or not p.is_floating_point():  # not yet there, or a frozen weight of a quantised model
            continue
        if p.device.type not in _DTYPES:
            return f"a parameter is on {p.device}; it must be on a CUDA device or on the CPU"
        dtypes = _DTYPES["cuda" if _on_triton(p.device) else "cpu"]
        if p.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            return f"a parameter is {p.dtype}; on {p.device.type} it must be one of {names}"
        if p.is_inference():
            return "a parameter is an inference tensor, which autograd does not allow to be written to"
        if type(p) not in PLAIN:
            return f"a parameter is a {type(p).__name__}; it must be a plain tensor"
        if not _is_dense(p):
            return f"a parameter of shape {tuple(p.shape)} has gaps or overlaps in memory (strides {p.stride()})"
    if any(_on_triton(p.device) for p in params) and importlib.util.find_spec("triton") is None:
        return "Triton cannot be imported"
    return native.load()[1] if any(not _on_triton(p.device) for p in params) else None


def fit(views: Sequence["ParamView"]) -> bool:
    """Return whether the states of these parameters have the layout that the kernels read."""
    for view in views:
        wide, compensation = moment_dtype(view.w.dtype), view.compensation
        expected = [(x, wide) for x in view.state] + ([] if compensation is None else [(compensation, view.w.dtype)])
        fits = all(same_layout(x, view.w) and x.dtype == dtype for x, dtype in expected)
        is_here = all(type(x) in PLAIN and x.device == view.w.device for x, _ in [*expected, (view.step, 0)])
        if not (fits and is_here and view.step.dtype == torch.float32 and view.step.dim() == 0):
            return False
    return True


def sharing_memory(views: Sequence["ParamView"]) -> set[int]:
    """Return the groups with parameters that share memory: kernels would write to it from several threads at a time."""
    places = [(view.w.data_ptr(), view.w.numel() * view.w.element_size(), view.group) for view in views]
    found: set[int] = set()
    furthest = (0, -1)  # the end of what came so far, and its group
    for start, size, group in sorted(place for place in places if place[1]):
        if start < furthest[0]:
            found |= {group, furthest[1]}
        furthest = max(furthest, (start + size, group))
    return found


def laid_out_as(p: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the layout that the kernels read, that of the parameter."""
    return x if same_layout(x, p) else torch.empty_like(p, dtype=x.dtype, memory_format=torch.preserve_format).copy_(x)


def same_layout(x: Tensor, p: Tensor) -> bool:
    """Return whether two tensors have the same layout in memory; strides that no element is reached by are ignored."""
    if x.shape != p.shape:
        return False
    return (
        not p.numel()
        or x.stride() == p.stride()
        or all(a == b or n <= 1 for a, b, n in zip(x.stride(), p.stride(), p.shape, strict=True))
    )


def _on_triton(device: torch.device) -> bool:
    return device.type != "cpu" or INTERPRET


def _is_dense(p: Tensor) -> bool:
    if not p.numel():  # as an empty shard: the ranks must choose the same backend
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


# --- the tables ------------------------------------------------------------------------------------------------------


_Kind: TypeAlias = tuple[torch.device, torch.dtype, Flags, str]  # device, dtype, flags and rounding


class Launch:
    """The tables of the tensors of one kind, which one launch moves."""

    def __init__(self, kind: _Kind, views: Sequence["ParamView"]) -> None:
        device, self.dtype, self.flags, self.rounding = kind
        self.device = device
        if _on_triton(device):
            from avagrad.optim.backends import triton  # imports Triton, so only in the first fused step

            self.kernels: Any = triton
            self.block, self.warps = BLOCK, WARPS
        else:
            self.kernels, self.block, self.warps = native, CPU_BLOCK, 0
        rows: list[tuple[int, ...]] = []
        blocks: list[int] = []
        self.first_blocks = [0]
        for i, view in enumerate(views):
            m, v = view.state
            compensation = 0 if view.compensation is None else view.compensation.data_ptr()
            addresses = view.w.data_ptr(), m.data_ptr(), v.data_ptr(), view.step.data_ptr()
            rows.append((*addresses, view.w.numel(), view.group, view.param_id, compensation, len(blocks), view.seed))
            blocks += [i] * -(-view.w.numel() // self.block)
            self.first_blocks.append(len(blocks))
        self.tensors = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device="cpu").to(device)
        self.grads = torch.zeros(len(rows), dtype=torch.int64, device=device)
        shared = torch.float32 if _on_triton(device) else torch.float64
        self.shared = torch.zeros(len(rows), SHARED, dtype=shared, device=device)
        self.sums = torch.empty(0)  # of each block: a slice of the backend's
        self.sent: list[int] = []  # the addresses of gradients that were sent last
        self.compiled: dict[Any, Any] = {}  # Triton kernels, by their constants


class Fused(Backend):
    """The fused backend for some parameters."""

    is_kernel = True

    def __init__(self, views: Sequence["ParamView"], rules: Sequence[Rule] = ()) -> None:
        super().__init__(views)
        kinds: dict[_Kind, list[int]] = {}
        for i, view in enumerate(views):
            kinds.setdefault((view.w.device, view.w.dtype, rules[view.group].flags, view.rounding), []).append(i)
        # Launches, each with the indices of its views.
        self._launches = [(Launch(kind, [views[i] for i in indices]), indices) for kind, indices in kinds.items()]
        self._rows = {i: (launch, row) for launch, indices in self._launches for row, i in enumerate(indices)}
        self._sums: dict[torch.device, Tensor] = {}
        self._numbers: dict[torch.device, Tensor] = {}
        self._sent: list[list[float]] = []
        self._kept: list[Tensor] = []  # a CUDA graph reads these again at each replay
        for device in dict.fromkeys(launch.device for launch, _ in self._launches):
            on_device = [launch for launch, _ in self._launches if launch.device == device]
            sizes = [len(launch.blocks) for launch in on_device]
            self._sums[device] = torch.zeros(sum(sizes), 2, dtype=torch.float64, device=device)
            for launch, part in zip(on_device, torch.split(self._sums[device], sizes), strict=True):
                launch.sums = part
            self._numbers[device] = torch.zeros(len(rules), native.NUMBERS, dtype=torch.float64, device=device)
        self._addresses = [w.data_ptr() for w in self._tensors]

    # --- a step ---

    def prepare(self, grads: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]] | None:
        """Return the addresses of the gradients, 0 for none, and the tensors at these addresses.

        The step keeps these tensors until it has read them: a copy with another layout, or a gradient that was
        redistributed over ranks, has no other owner.
        """
        if type(torch.empty(0, device="cpu")) is not Tensor:
            return None  # a fake mode: tables sent now would have no memory
        present, ws, known = [g for g in grads if g is not None], self._tensors, self._layouts
        if len(present) != len(grads):
            ws = [w for w, g in zip(ws, grads, strict=True) if g is not None]
            known = layouts(ws)
        is_plain = set(map(type, present)) <= {*PLAIN} and not any(map(Tensor.is_neg, present))
        addresses = list(map(Tensor.data_ptr, present)) if is_plain and layouts(present) == known else [0]
        if not all(addresses):
            laid_out = [x for g, w in zip(present, ws, strict=True) if (x := _laid_out(g, w)) is not None]
            if len(laid_out) != len(present):
                return None
            present, addresses = laid_out, list(map(_address, laid_out))
        found = iter(addresses)
        return (addresses if ws is self._tensors else [0 if g is None else next(found) for g in grads]), present

    def move(self, grads: tuple[list[int], list[Tensor]], step: "Step") -> list[Tensor]:
        """Move every parameter that has a gradient; autograd does not see the writes."""
        self._send_numbers(step.rules)
        every, _ = grads
        for launch, indices in self._launches:
            addresses = every if len(indices) == len(every) else [every[i] for i in indices]
            if addresses != launch.sent:
                self._send(launch.grads, torch.tensor(addresses, dtype=torch.int64, device="cpu"))
                launch.sent = addresses
            self._prepare(launch, step, counts=True)
            launch.kernels.go_over(launch, 0, len(launch.blocks))
        return self.params if all(every) else [p for p, address in zip(self.params, every, strict=True) if address]

    def begin_backward(self, step: "Step") -> None:
        """Begin a step that moves parameters one by one: its numbers and gamma are fixed from here on."""
        self._send_numbers(step.rules)
        for launch, _ in self._launches:
            launch.sent = []
            launch.grads.fill_(1)  # all may move
            self._prepare(launch, step, counts=False)

    def move_one(self, i: int, g: Tensor, step: "Step") -> bool:
        """Move one parameter, in a step that has begun; return False if its gradient cannot be read."""
        w = self.views[i].w
        laid = _laid_out(g, w)
        if laid is None or w.data_ptr() != self._addresses[i]:  # a hook may have moved it to other memory
            return False
        launch, row = self._rows[i]
        launch.kernels.go_over(launch, *launch.first_blocks[row : row + 2], gradient=_address(laid))
        self.views[i].step.add_(1)
        return True

    def _prepare(self, launch: Launch, step: "Step", *, counts: bool) -> None:
        found = step.grad_scale, step.found_inf
        scaler = (None if x is None else x.to(launch.device, torch.float32) for x in found)
        given = self._numbers[launch.device], step.totals.get(launch.device), *scaler
        launch.kernels.prepare(launch, *given, rebuild=False, counts=counts)

    # --- the sums for the next norm ---

    def sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return the sums of all blocks, computed from the current state."""
        self._send_numbers(rules)
        for launch, _ in self._launches:
            launch.kernels.prepare(launch, self._numbers[launch.device], *[None] * 3, rebuild=True, counts=False)
            launch.kernels.go_over(launch, 0, len(launch.blocks), rebuild=True)
        return self._sums

    def next_sums(self, rules: Sequence[Rule]) -> dict[torch.device, Tensor]:
        """Return the sums of all blocks that the step has computed: blocks that did not move keep theirs."""
        return self._sums

    def views_of_rows(self) -> dict[torch.device, list[int]]:
        """Return for each device and block the index of its view."""
        rows: dict[torch.device, list[int]] = {device: [] for device in self._sums}
        for launch, indices in self._launches:
            rows[launch.device] += [indices[row] for row in launch.blocks.tolist()]
        return rows

    # --- copies to the device ---

    def _send_numbers(self, rules: Sequence[Rule]) -> None:
        numbers = [rule.numbers for rule in rules if isinstance(rule, Delayed)]
        rows = [[-1.0 if _is_elsewhere(x) else float(x) for x in row] for row in numbers]  # -1: a placeholder
        for device, table in self._numbers.items():
            if rows != self._sent:
                self._send(table, torch.tensor(rows, dtype=torch.float64, device="cpu"))
            for index, row in enumerate(numbers):
                for column, x in enumerate(row):
                    if isinstance(x, Tensor) and _is_elsewhere(x):
                        table[index, column].copy_(x.detach().reshape(()), non_blocking=device.type != "cpu")
        self._sent = rows

    def _send(self, table: Tensor, values: Tensor) -> None:
        """Copy to the device without waiting, from memory that stays alive while a CUDA graph may read it."""
        if table.device.type == "cuda":
            values = values.pin_memory()
            if torch.cuda.is_current_stream_capturing():
                self._kept.append(values)
        table.copy_(values, non_blocking=True)


def _laid_out(g: Tensor, w: Tensor) -> Tensor | None:
    """Return a gradient in the layout and dtype of its parameter, copied if necessary; None if digits would be lost."""
    is_exact = torch.promote_types(g.dtype, w.dtype) == w.dtype
    if g.layout != torch.strided or not is_exact or g.device != w.device:
        return None
    is_plain = type(g) in PLAIN and not g.is_neg() and (g.data_ptr() or not g.numel())
    if is_plain and g.dtype == w.dtype and same_layout(g, w):
        return g
    return torch.empty_like(w, memory_format=torch.preserve_format).copy_(g)


def _is_elsewhere(x: float | Tensor) -> bool:
    """Return whether a number is on a device, and must not be read by the host."""
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _address(x: Tensor) -> int:
    """Return the address of a tensor; for an empty one, which has none, a number that is not 0."""
    return x.data_ptr() if x.numel() else 1
