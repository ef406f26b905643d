"""Rounding of float32 values to half-precision parameters: once, in one of three ways.

Rounding to nearest loses every update that is smaller than half a unit in the last place of the parameter: in
bfloat16, with its 8 digits, training stalls when updates fall below 1/512 of the weights. Stochastic rounding goes
up or down at random so that the mean is right; Kahan summation keeps the rounding error and adds it next time.

The random bits are a hash of (seed, step, index of the parameter, position of the element): the same on every
replica, after a resume, and whether or not the step is taken inside backward.
"""

import torch
from torch import Tensor

from avagrad.optim.rules import Scalar

__all__ = ["ROUNDINGS", "is_half", "moment_dtype", "random_bits", "rounded_at_random", "store"]

ROUNDINGS = ("nearest", "stochastic", "kahan")
_LOW = 0xFFFFFFFF


def is_half(dtype: torch.dtype) -> bool:
    """Return whether parameters of this dtype are rounded."""
    return dtype in (torch.bfloat16, torch.float16)


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments of a parameter."""
    return torch.float32 if is_half(dtype) else dtype


def store(
    w: Tensor,
    wide: Tensor,
    *,
    rounding: str = "nearest",
    compensation: Tensor | None = None,
    seed: int = 0,
    t: Scalar = 0,
    param_id: int = 0,
    origin: int = 0,
) -> None:
    """Write a value to a parameter, and the rounding error to its compensation, if it has one.

    ``t`` counts the parameter's gradients, ``param_id`` is its index among all parameters, ``origin`` is the storage
    offset at which the whole parameter begins (``w`` may be a part of it).

    >>> w, rest = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    >>> store(w, torch.tensor([1.001]), rounding="kahan", compensation=rest)
    >>> w.float() + rest.float()
    tensor([1.0010])
    """
    if rounding == "nearest" or not is_half(w.dtype):
        w.copy_(wide)
    elif rounding == "stochastic":
        w.copy_(rounded_at_random(wide.float(), w.dtype, random_bits(seed, t, param_id, _positions(w, origin))))
    else:
        assert compensation is not None
        w.copy_(wide)
        cut_off = wide - w
        compensation.copy_(torch.where(cut_off.isfinite(), cut_off, 0.0))  # w may have overflowed


def random_bits(seed: int, t: Scalar, param_id: int, element: Tensor) -> Tensor:
    """Return 32 random bits for each element: a hash, so there is no generator state."""
    t = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
    key = _mix((_mix((_mix(seed) + t) & _LOW) + param_id) & _LOW)
    return _mix((key + (element & _LOW) * 0x9E3779B9) & _LOW)  # type: ignore[return-value]


def rounded_at_random(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round float32 up or down, with probabilities such that the mean is right.

    Random digits are added to the digits that are dropped. Subnormal float16 numbers have the spacing of the
    smallest normal ones, so they are shifted there first.
    """
    assert x.dtype == torch.float32
    digits = 16 if dtype == torch.bfloat16 else 13
    least = 0.0 if dtype == torch.bfloat16 else 2.0**-14
    size = x.abs()
    shift = torch.where(size < least, least, 0.0)
    integers = (size + shift).view(torch.int32)
    integers = (integers + (bits >> (32 - digits)).to(torch.int32)) & -(1 << digits)
    rounded = torch.copysign(integers.view(torch.float32) - shift, x)
    return torch.where(x == x, rounded, x).to(dtype)


def _mix(h: Tensor | int) -> Tensor | int:
    """Mix the bits of a 32-bit number (the finalizer of MurmurHash3)."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _LOW
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _LOW
    return h ^ (h >> 16)


def _positions(w: Tensor, origin: int) -> Tensor:
    """Return the position of each element in memory, counted from the start of the whole parameter."""
    positions = torch.zeros((), dtype=torch.int64, device=w.device)
    for dim, (size, stride) in enumerate(zip(w.shape, w.stride(), strict=True)):
        along = torch.arange(size, dtype=torch.int64, device=w.device) * stride
        positions = positions + along.reshape([-1 if d == dim else 1 for d in range(w.dim())])
    positions = torch.add(positions, int(w.storage_offset()) - origin)
    return positions.expand(w.shape)
