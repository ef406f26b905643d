"""The delayed rule of :mod:`avagrad.optim.rules` as Triton kernels over tables of pointers.

:func:`shared_numbers` computes, once for each tensor and in float64, the few numbers that its coordinates share, and
updates the step count. :func:`delayed_pass` then goes over memory once: one program moves one block of one tensor.
Blocks that are full and aligned are read without a mask, 16 bytes at a time; a tensor's tail and misaligned
tensors use the masked branch.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from avagrad.optim.backends.fused import COLUMNS, SHARED, Launch
from avagrad.optim.backends.native import NUMBERS
from avagrad.optim.rules import LARGEST

__all__ = ["go_over", "prepare"]

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LARGEST = tl.constexpr(LARGEST)
# The columns of the tables: of tensors, of groups, and of the numbers that the coordinates of a tensor share.
(
    T_W, T_M, T_V, T_STEP, T_NUMEL, T_GROUP, T_PARAM_ID, T_COMPENSATION, T_FIRST_BLOCK, T_SEED, T_COLUMNS,
) = map(tl.constexpr, range(len(COLUMNS) + 1))  # fmt: skip
G_LR, G_BETA1, G_BETA2, G_EPS, G_DECAY, G_CLIP_UPDATE, G_CLIP_MOMENT, G_COLUMNS = map(tl.constexpr, range(NUMBERS + 1))
(
    S_MOVES, S_STARTED, S_SIZE, S_SHRINK, S_BETA1, S_BETA1_REST, S_BETA2, S_BETA2_REST, S_EPS, S_DECAY,
    S_INVERSE_BEFORE, S_INVERSE_NEXT, S_UNSCALE, S_COUNTS, S_KEY, S_CLIP_UPDATE, S_CLIP_MOMENT, S_UNIT, S_INVERSE_UNIT,
    S_COLUMNS,
) = map(tl.constexpr, range(SHARED + 1))  # fmt: skip


# --- launching -------------------------------------------------------------------------------------------------------


def prepare(
    launch: Launch, numbers: Tensor, totals: Any, scale: Any, found_inf: Any, *, rebuild: bool, counts: bool
) -> None:
    """Compute what the coordinates of each tensor share in a step; with ``counts`` update the step counts."""
    norm = 0 if totals is None else launch.flags.norm
    flags = launch.flags
    given = found_inf is not None, scale is not None, rebuild, counts
    constants = norm, *given, flags.bias_correction, flags.norm_of_step, 64
    unread = launch.shared  # a placeholder for arguments that are not read
    optional = [unread if x is None else x for x in (totals, scale, found_inf)]
    n = len(launch.grads)
    arguments = launch.tensors, launch.grads, numbers, launch.shared, *optional, n
    _start(launch, shared_numbers, -(-n // 64), arguments, constants, warps=2, keep=scale is None and found_inf is None)


def go_over(launch: Launch, first: int, last: int, *, rebuild: bool = False, gradient: int = 0) -> None:
    """Move some blocks, all by the gradient at an address if there is one; or only sum their rates."""
    if first == last:
        return
    flags = launch.flags
    forms = flags.decoupled, flags.decays, flags.active_only, flags.maximize
    rule = *forms, flags.norm_of_step, flags.clips_update, flags.clips_moment, flags.norm
    constants = gradient != 0, launch.rounding, _DTYPES[launch.dtype], rebuild, *rule, launch.block
    arguments = launch.tensors, launch.grads, launch.blocks, launch.shared, launch.sums, first, gradient
    _start(launch, delayed_pass, last - first, arguments, constants, warps=launch.warps)


def _start(
    launch: Launch, kernel: Any, programs: int, arguments: Any, constants: Any, *, warps: int, keep: bool = True
) -> None:
    """Launch a kernel with its arguments and then its constants, in its own order.

    Half the cost of a launch is finding the code for the arguments. They are the same tables at each step, except for
    a GradScaler's tensors, so the code is cached.
    """
    grid, key = (programs, 1, 1), (kernel, constants)
    elsewhere = launch.device.type == "cuda" and launch.device.index != torch.cuda.current_device()
    with torch.cuda.device(launch.device) if elsewhere else nullcontext():
        if keep and (code := launch.compiled.get(key)) is not None:
            code[grid](*arguments, *constants)
            return
        code = kernel[grid](*arguments, *constants, num_warps=warps)
    if keep and code is not None:  # the interpreter returns None
        launch.compiled[key] = code


# --- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _mix(h):
    """As rounding._mix, of unsigned 32-bit numbers."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _correction(beta, t):
    """As rules.bias_correction_of, in float64; 1 - beta before the first gradient, where it is not used."""
    return 1 - tl.exp(tl.maximum(t, 1.0) * tl.log(tl.maximum(beta, 1e-300)))


@triton.jit
def _gamma(totals, NORM: tl.constexpr):
    """As rules.scale."""
    total = tl.load(totals)
    gamma = tl.load(totals + 1) / tl.where(total == 0, 1.0, total)
    if NORM == 2:
        gamma = tl.sqrt(gamma)
    return tl.where(total == 0, 1.0, gamma)


@triton.jit
def _key(row, t, mask):
    """As rounding.random_bits, up to the element."""
    param_id = tl.load(row + T_PARAM_ID, mask=mask, other=0).to(tl.uint32)
    seed = tl.load(row + T_SEED, mask=mask, other=0).to(tl.uint32)
    # Through int64, which every device casts in the same way.
    return _mix(_mix(_mix(seed) + t.to(tl.int64).to(tl.uint32)) + param_id)


@triton.jit
def _store_bounds(out, group, inverse_correction, eps, mask, NORM_OF_STEP: tl.constexpr):
    """Store the multiples of r that bound the uncorrected moment and the gradient, and the unit of the sums."""
    clip_update = tl.load(group + G_CLIP_UPDATE, mask=mask, other=0.0) / inverse_correction
    clip_moment = tl.load(group + G_CLIP_MOMENT, mask=mask, other=0.0)
    unit = tl.maximum(eps, 1.0) if NORM_OF_STEP else eps * 0 + 1
    tl.store(out + S_CLIP_UPDATE, clip_update.to(tl.float32), mask=mask)
    tl.store(out + S_CLIP_MOMENT, clip_moment.to(tl.float32), mask=mask)
    tl.store(out + S_UNIT, unit.to(tl.float32), mask=mask)
    tl.store(out + S_INVERSE_UNIT, (1 / unit).to(tl.float32), mask=mask)


@triton.jit
def shared_numbers(
    tensors, grads, numbers, shared, totals, grad_scale, found_inf, n,
    NORM: tl.constexpr, SKIPS: tl.constexpr, SCALED: tl.constexpr, REBUILD: tl.constexpr, COUNTS: tl.constexpr,
    BIAS_CORRECTION: tl.constexpr, NORM_OF_STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each tensor's shared numbers in its row of ``shared``; with ``COUNTS``, update the step counts."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    row = tensors + index * T_COLUMNS
    moves = tl.where(tl.load(grads + index, mask=mask, other=0) != 0, 1.0, 0.0).to(tl.float64)
    if SKIPS:
        moves = moves * tl.where(tl.load(found_inf) == 0, 1.0, 0.0)
    if REBUILD:
        moves = moves * 0
    step = tl.load(row + T_STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(step, mask=mask, other=1.0).to(tl.float64)
    group = numbers + tl.load(row + T_GROUP, mask=mask, other=0) * G_COLUMNS
    lr = tl.load(group + G_LR, mask=mask, other=0.0)
    beta1 = tl.load(group + G_BETA1, mask=mask, other=0.0)
    beta2 = tl.load(group + G_BETA2, mask=mask, other=0.0)
    eps = tl.load(group + G_EPS, mask=mask, other=1.0)
    weight_decay = tl.load(group + G_DECAY, mask=mask, other=0.0)

    t = steps + moves  # the number of gradients before the next step
    one = steps * 0 + 1
    inverse_before, inverse_next, size, started, counts, unscale = one, one, one, one, one, one
    if BIAS_CORRECTION:
        inverse_before = 1 / _correction(beta2, steps)
        inverse_next = 1 / _correction(beta2, t)
        size = 1 / _correction(beta1, t)
        started = tl.where(steps > 0, 1.0, 0.0).to(tl.float64)
        counts = tl.where(t > 0, 1.0, 0.0).to(tl.float64)
    out = shared + index * S_COLUMNS
    _store_bounds(out, group, size, eps, mask, NORM_OF_STEP)
    if NORM:
        size = size * _gamma(totals, NORM)
    if SCALED:
        unscale = one / tl.load(grad_scale).to(tl.float64)

    tl.store(out + S_MOVES, moves.to(tl.float32), mask=mask)
    tl.store(out + S_STARTED, started.to(tl.float32), mask=mask)
    tl.store(out + S_SIZE, (lr * size).to(tl.float32), mask=mask)
    tl.store(out + S_SHRINK, (1 - lr * weight_decay * started).to(tl.float32), mask=mask)
    tl.store(out + S_BETA1, beta1.to(tl.float32), mask=mask)
    tl.store(out + S_BETA1_REST, (1 - beta1).to(tl.float32), mask=mask)
    tl.store(out + S_BETA2, beta2.to(tl.float32), mask=mask)
    tl.store(out + S_BETA2_REST, (1 - beta2).to(tl.float32), mask=mask)
    tl.store(out + S_EPS, eps.to(tl.float32), mask=mask)
    tl.store(out + S_DECAY, weight_decay.to(tl.float32), mask=mask)
    tl.store(out + S_INVERSE_BEFORE, inverse_before.to(tl.float32), mask=mask)
    tl.store(out + S_INVERSE_NEXT, inverse_next.to(tl.float32), mask=mask)
    tl.store(out + S_UNSCALE, unscale.to(tl.float32), mask=mask)
    tl.store(out + S_COUNTS, counts.to(tl.float32), mask=mask)
    tl.store((out + S_KEY).to(tl.pointer_type(tl.uint32), bitcast=True), _key(row, t, mask), mask=mask)
    if COUNTS:
        tl.store(step, t.to(tl.float32), mask=mask & (moves != 0))


@triton.jit
def _rates(v, r, eps, ACTIVE_ONLY: tl.constexpr):
    """As rules.rates, line 6 of the paper's algorithm."""
    eta = 1 / (r + eps)
    return tl.where(v == 0, 0.0, eta) if ACTIVE_ONLY else eta


@triton.jit
def _clamped(x, at_most):
    """Clamp x to between two bounds; a NaN stays NaN."""
    x = tl.minimum(x, at_most, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -at_most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nearest(w, DTYPE: tl.constexpr):
    """Round to nearest, ties to even. Explicit for bfloat16: Triton's interpreter would truncate."""
    if tl.bfloat16 == DTYPE:
        bits = w.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        w = tl.where(w == w, (rounded & -0x10000).to(tl.float32, bitcast=True), w)
    return w.to(DTYPE)


@triton.jit
def _at_random(w, offsets, key, DTYPE: tl.constexpr):
    """As rounding.rounded_at_random, of the bits of rounding.random_bits."""
    bits = _mix(key + offsets.to(tl.uint32) * 0x9E3779B9)
    size = tl.abs(w)
    if tl.bfloat16 == DTYPE:
        integers = (size.to(tl.int32, bitcast=True) + (bits >> 16).to(tl.int32)) & -0x10000
        rounded = integers.to(tl.float32, bitcast=True)
    else:
        shift = tl.where(size < 0.00006103515625, 0.00006103515625, 0.0)  # 2^-14, the smallest normal number
        integers = ((size + shift).to(tl.int32, bitcast=True) + (bits >> 19).to(tl.int32)) & -0x2000
        rounded = integers.to(tl.float32, bitcast=True) - shift
    rounded = tl.where(w < 0, -rounded, rounded)
    return tl.where(w == w, rounded, w).to(DTYPE)


@triton.jit
def _store(w_at, comp_at, offsets, w, shared, mask, ROUNDING: tl.constexpr):
    """As rounding.store."""
    if ROUNDING == "stochastic":
        key = tl.load((shared + S_KEY).to(tl.pointer_type(tl.uint32), bitcast=True))
        tl.store(w_at + offsets, _at_random(w, offsets, key, w_at.dtype.element_ty), mask=mask)
    else:
        stored = _nearest(w, w_at.dtype.element_ty)
        tl.store(w_at + offsets, stored, mask=mask)
        if ROUNDING == "kahan":
            comp = w - stored.to(tl.float32)
            comp = tl.where(comp - comp == 0, comp, 0.0)  # w may have overflowed
            tl.store(comp_at + offsets, _nearest(comp, w_at.dtype.element_ty), mask=mask)


@triton.jit
def _block(
    w_at, g_at, m_at, v_at, comp_at, start, n, shared, sums,
    ROUNDING: tl.constexpr, MASKED: tl.constexpr,
    REBUILD: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, ACTIVE_ONLY: tl.constexpr,
    MAXIMIZE: tl.constexpr, NORM_OF_STEP: tl.constexpr, CLIPS_UPDATE: tl.constexpr, CLIPS_MOMENT: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one block (unless ``REBUILD``), and store the sum of the next step's eta^p."""
    eps = tl.load(shared + S_EPS)
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < n if MASKED else None
    other = 0.0 if MASKED else None
    v = tl.load(v_at + offsets, mask=mask, other=other)
    if not REBUILD:
        w = tl.load(w_at + offsets, mask=mask, other=other).to(tl.float32)
        g = tl.load(g_at + offsets, mask=mask, other=other).to(tl.float32) * tl.load(shared + S_UNSCALE)
        m = tl.load(m_at + offsets, mask=mask, other=other)
        if ROUNDING == "kahan":
            w += tl.load(comp_at + offsets, mask=mask, other=other).to(tl.float32)
        if MAXIMIZE:
            g = -g
        if DECAYS:
            if DECOUPLED:
                w = w * tl.load(shared + S_SHRINK)
            elif ACTIVE_ONLY:
                g = tl.where((v == 0) & (g == 0), g, g + tl.load(shared + S_DECAY) * w)
            else:
                g = g + tl.load(shared + S_DECAY) * w
        r = tl.sqrt(v * tl.load(shared + S_INVERSE_BEFORE))
        if NORM_OF_STEP:
            g = _clamped(g, _LARGEST)
        if CLIPS_MOMENT:
            g = _clamped(g, tl.where(r > 0, tl.load(shared + S_CLIP_MOMENT) * r, _LARGEST))
        m = tl.load(shared + S_BETA1) * m + tl.load(shared + S_BETA1_REST) * g
        kept = _clamped(m, tl.load(shared + S_CLIP_UPDATE) * r) if CLIPS_UPDATE else m  # 0 where v is 0
        eta = _rates(v, r, eps, ACTIVE_ONLY and not CLIPS_UPDATE)
        w = tl.where(tl.load(shared + S_STARTED) != 0, w - tl.load(shared + S_SIZE) * eta * kept, w)
        v = tl.load(shared + S_BETA2) * v + tl.load(shared + S_BETA2_REST) * g * g
        _store(w_at, comp_at, offsets, w, shared, mask, ROUNDING)
        tl.store(m_at + offsets, m, mask=mask)
        tl.store(v_at + offsets, v, mask=mask)
    if NORM:
        r = tl.sqrt(v * tl.load(shared + S_INVERSE_NEXT))
        # Scaled by a unit, so that the square of a step is not 0 in float32.
        x = r * tl.load(shared + S_UNIT) / (r + eps) if NORM_OF_STEP else _rates(v, r, eps, ACTIVE_ONLY)
        if MASKED:
            x = tl.where(mask, x, 0.0)
        counts = tl.load(shared + S_COUNTS)
        # In float64, so that the order of the additions within a block does not matter.
        power = (x * x if NORM == 2 else x).to(tl.float64)
        inverse = tl.load(shared + S_INVERSE_UNIT).to(tl.float64)
        tl.store(sums, tl.sum(power, 0) * counts * (inverse * inverse if NORM == 2 else inverse))
        if ACTIVE_ONLY:
            live = v != 0
            if MASKED:
                live = live & mask
            tl.store(sums + 1, tl.sum(live.to(tl.float32), 0) * counts)
        else:
            tl.store(sums + 1, tl.minimum(n - start, BLOCK).to(tl.float64) * counts)


@triton.jit(do_not_specialize=["first_block", "gradient"])
def delayed_pass(
    tensors, grads, blocks, shared, sums, first_block: "i32", gradient: "i64",  # noqa: F821
    ONE: tl.constexpr, ROUNDING: tl.constexpr, DTYPE: tl.constexpr,
    REBUILD: tl.constexpr, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, ACTIVE_ONLY: tl.constexpr,
    MAXIMIZE: tl.constexpr, NORM_OF_STEP: tl.constexpr, CLIPS_UPDATE: tl.constexpr, CLIPS_MOMENT: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the step for every tensor that moves, or (``REBUILD``) only sum the rates of all.

    With ``ONE`` all blocks belong to one tensor, which moves by the gradient at the address ``gradient``.
    """
    block = first_block + tl.program_id(0)
    index = tl.load(blocks + block).to(tl.int64)
    its_shared = shared + index * S_COLUMNS
    if REBUILD or tl.load(its_shared + S_MOVES) != 0:
        row = tensors + index * T_COLUMNS
        start = (block - tl.load(row + T_FIRST_BLOCK)) * BLOCK
        w_bits = tl.load(row + T_W)
        m_bits = tl.load(row + T_M)
        v_bits = tl.load(row + T_V)
        g_bits = gradient if ONE else tl.load(grads + index)
        comp_bits = tl.load(row + T_COMPENSATION)
        n = tl.load(row + T_NUMEL)
        w_at = w_bits.to(tl.pointer_type(DTYPE))
        g_at = g_bits.to(tl.pointer_type(DTYPE))
        comp_at = comp_bits.to(tl.pointer_type(DTYPE))
        m_at = m_bits.to(tl.pointer_type(tl.float32))
        v_at = v_bits.to(tl.pointer_type(tl.float32))
        at = sums + 2 * block
        if (start + BLOCK <= n) & (((w_bits | g_bits | m_bits | v_bits | comp_bits) & 15) == 0):
            _block(
                tl.multiple_of(w_at, 16), tl.multiple_of(g_at, 16), tl.multiple_of(m_at, 16), tl.multiple_of(v_at, 16),
                tl.multiple_of(comp_at, 16), start, n, its_shared, at, ROUNDING, False,
                REBUILD, DECOUPLED, DECAYS, ACTIVE_ONLY, MAXIMIZE, NORM_OF_STEP, CLIPS_UPDATE, CLIPS_MOMENT, NORM,
                BLOCK,
            )  # fmt: skip
        else:
            _block(
                w_at, g_at, m_at, v_at, comp_at, start, n, its_shared, at, ROUNDING, True,
                REBUILD, DECOUPLED, DECAYS, ACTIVE_ONLY, MAXIMIZE, NORM_OF_STEP, CLIPS_UPDATE, CLIPS_MOMENT, NORM,
                BLOCK,
            )  # fmt: skip
