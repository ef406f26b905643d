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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from avagrad.optim.backends.fused import Launch

__all__ = ["NUMBERS", "begin_backward", "library", "move_one", "run", "unsupported_reason"]

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "kahan": 2}
NUMBERS = 5  # columns in a row of a group: lr, beta1, beta2, eps, weight_decay


def unsupported_reason() -> str | None:
    """Say why there is no native code; None if there is."""
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


def run(
    launch: "Launch",
    numbers: Tensor,
    totals: Any,
    scale: Any = None,
    found_inf: Any = None,
    *,
    rebuild: bool = False,
    rows: tuple[int, int] | None = None,
) -> None:
    """Move the tensors that have a gradient; with ``rebuild`` only sum up the rates of all, from the state as it is.

    ``rows`` names some of the tensors. The arguments of the call are those of avagrad_step in native.c.
    """
    chosen = _DTYPES[launch.dtype], launch.block, _ROUNDINGS[launch.rounding], rebuild, *launch.flags
    flags = (ctypes.c_int64 * len(chosen))(*chosen)
    tables = launch.tensors, launch.grads, numbers, totals, launch.shared, launch.blocks, launch.sums, scale, found_inf
    pointers = [None if x is None else ctypes.c_void_p(x.data_ptr()) for x in tables]
    first, last = rows or (0, len(launch.grads))
    ranges = [ctypes.c_int64(x) for x in (first, last, launch.first_blocks[first], launch.first_blocks[last])]
    library().avagrad_step(*pointers, flags, *ranges, ctypes.c_int(torch.get_num_threads()))


def begin_backward(launch: "Launch", numbers: Tensor, totals: Any) -> None:
    """Do nothing: each tensor is moved on its own."""


def move_one(launch: "Launch", row: int, gradient: int, numbers: Tensor, totals: Any) -> bool:
    """Move one tensor by the gradient at an address; False: it has been counted."""
    launch.grads[row] = gradient
    run(launch, numbers, totals, rows=(row, row + 1))
    return False
