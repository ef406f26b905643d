"""The native code of ``native.c``: built when first used, kept in the user's cache, called through ctypes.

It is plain C: built in about a second by any C compiler with OpenMP, where a file that includes torch's C++ headers
takes twenty and a C++ compiler. Its threads are torch's: it is linked to the OpenMP library that torch has loaded.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avagrad.optim.fused.tables import NUMBERS, TENSORS

__all__ = ["Flags", "add_up", "flags_of", "library", "reason_against_native", "step"]

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "kahan": 2}


class Flags(ctypes.Structure):
    """As ``Flags`` in native.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "dtype", "block", "rounding", "norm",
            "normalised", "decoupled", "decays", "bias_correction", "active_only", "maximize", "rebuild",
        )
    ]  # fmt: skip


def flags_of(dtype: torch.dtype, block: int, flags: dict[str, Any], *, normalised: bool, rebuild: bool) -> Flags:
    """Return the flags of a launch as native.c reads them."""
    return Flags(
        dtype=_DTYPES[dtype],
        block=block,
        rounding=_ROUNDINGS[flags["ROUNDING"]],
        norm=flags["NORM"],
        normalised=normalised,
        decoupled=flags["DECOUPLED"],
        decays=flags["DECAYS"],
        bias_correction=flags["BIAS_CORRECTION"],
        active_only=flags["ACTIVE_ONLY"],
        maximize=flags["MAXIMIZE"],
        rebuild=rebuild,
    )


def reason_against_native() -> str | None:
    """Say why there is no native code; None if there is.

    >>> reason_against_native() is None or isinstance(reason_against_native(), str)
    True
    """
    found = library()
    return found if isinstance(found, str) else None


@functools.cache
def library() -> Any:
    """Return the library, built if need be; or, as a string, the reason why there is none."""
    command = os.environ.get("CC", "").split() or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        return "no C compiler has been found, which builds the native code (looked for CC, cc, gcc and clang)"
    # "native" code is for this processor; a home directory may be shared by several.
    about = f"{command} {_FLAGS} {platform.machine()} {_processor()} {sysconfig.get_platform()}".encode()
    name = f"native-{hashlib.sha256(_SOURCE.read_bytes() + about).hexdigest()[:20]}.so"
    try:
        folder = _cache()
        path = folder / name
        if not path.exists():
            _build(command, path)
        made = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            said = error.stderr.strip() or f"it ended with the status {error.returncode} and said nothing"
        return f"the C compiler {command[0]} could not build the native code ({said.splitlines()[-1][:200]})"
    made.avagrad_columns.restype = ctypes.c_char_p
    assert made.avagrad_columns().decode() == f"{' '.join(TENSORS)} / {' '.join(NUMBERS)}"
    return made


def _build(command: list[str], path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        made = Path(file.name)
    try:
        for native in (["-march=native"], []):  # a compiler may not know its own processor
            arguments = [*command, *_FLAGS, *native, "-o", str(made), str(_SOURCE), "-lm"]
            done = subprocess.run(arguments, capture_output=True, text=True, check=not native)
            if done.returncode == 0:
                break
        made.replace(path)  # at once: other processes may be building the same
    finally:
        made.unlink(missing_ok=True)


def _cache() -> Path:
    home = os.environ.get("AVAGRAD_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "avagrad"
    folder = Path(home).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # not ours to write to: build for this process alone
        return Path(tempfile.mkdtemp(prefix="avagrad-"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def add_up(sums: Tensor, totals: Tensor) -> None:
    """Leave the sums of the two columns of ``sums`` in ``totals``."""
    n = ctypes.c_int64(len(sums))
    library().avagrad_add_up(ctypes.c_void_p(sums.data_ptr()), n, ctypes.c_void_p(totals.data_ptr()))


def step(
    flags: Flags,
    tables: tuple[Tensor, ...],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    tensors: tuple[int, int],
    blocks: tuple[int, int],
) -> None:
    """Take a step for a range of tensors, whose blocks are a range of blocks."""
    found = library()
    pointers = [ctypes.c_void_p(table.data_ptr()) for table in tables]
    scaler = [None if x is None else ctypes.c_void_p(x.data_ptr()) for x in (grad_scale, found_inf)]
    ranges = [ctypes.c_int64(x) for x in (*tensors, *blocks)]
    found.avagrad_step(*pointers, *scaler, ctypes.byref(flags), *ranges, ctypes.c_int(torch.get_num_threads()))
