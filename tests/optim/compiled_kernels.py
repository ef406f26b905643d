"""Compiles the kernels for GPUs, of which none is needed: Triton brings its compiler. The interpreter allows more."""

import sys
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from avagrad.optim.backends.triton import delayed_pass, shared_numbers

TYPES = {
    "tensors": "*i64", "grads": "*i64", "blocks": "*i32", "numbers": "*fp64", "shared": "*fp32", "sums": "*fp64",
    "totals": "*fp64", "grad_scale": "*fp32", "found_inf": "*fp32", "n": "i32", "first_block": "i32", "gradient": "i64",
}  # fmt: skip
PREPARE = {"SKIPS": True, "SCALED": True, "REBUILD": False, "COUNTS": True, "BIAS_CORRECTION": True, "BLOCK": 64}
MOVE = {"ONE": False, "REBUILD": False, "DECOUPLED": True, "DECAYS": True, "MAXIMIZE": True, "BLOCK": 1024}
AVASTEP = {"NORM_OF_STEP": True, "CLIPS_UPDATE": True, "CLIPS_MOMENT": True, "ACTIVE_ONLY": True, "NORM": 2}
AVAGRAD = {"NORM_OF_STEP": False, "CLIPS_UPDATE": False, "CLIPS_MOMENT": False, "ACTIVE_ONLY": False, "NORM": 2}
FORMATS = (("nearest", tl.float32), ("stochastic", tl.bfloat16), ("kahan", tl.float16))


def code(kernel: Any, constants: dict[str, Any], capability: int) -> Any:
    """Return the machine code of a kernel."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    return compiled(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    for rule in (AVASTEP, AVAGRAD):
        of_norm = {name: rule[name] for name in ("NORM", "NORM_OF_STEP")}
        assert code(shared_numbers, PREPARE | of_norm, int(sys.argv[1]))
        for rounding, dtype in FORMATS:
            assert code(delayed_pass, MOVE | rule | {"ROUNDING": rounding, "DTYPE": dtype}, int(sys.argv[1]))
    print("compiled")
