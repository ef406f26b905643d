"""Process-wide settings of a run, and facts about its environment."""

import contextlib
import os
import platform
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

import avagrad
from avagrad.lab.tasks.base import stream


@contextlib.contextmanager
def computing_with(threads: int, *, precision: str = "float32", deterministic: bool = False) -> Iterator[None]:
    """Set threads, precision and determinism within a context, and restore them afterwards.

    With one thread, subnormal numbers are flushed to zero. A model that is dying (an LSTM at too high a learning rate)
    computes mostly with them, ten times slower. torch sets this for the current thread only; with several threads, the
    results would depend on when the others were started.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), _flushes_denormals()
    flags = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(threads == 1)
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's libraries start
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_flush_denormal(before[1])
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = flags
        torch.use_deterministic_algorithms(was_deterministic)


def _flushes_denormals() -> bool:
    return (torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 0


def seeded(seed: int, device: str) -> torch.Generator:
    """Seed all global generators for a run, and return the generator of the randomness inside its steps."""
    global_seed = stream(seed, "global")
    torch.manual_seed(global_seed)
    random.seed(global_seed)
    numpy.random.seed(global_seed % 2**32)
    return torch.Generator(device).manual_seed(stream(seed, "noise", 0))  # the 0 keeps the numbers of earlier versions


def generator_states(device: str) -> dict[str, Any]:
    """Return the states of all global generators, for a checkpoint."""
    legacy: Any = numpy.random.get_state()
    name, keys, position, has_gauss, gauss = legacy
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, gauss),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if torch.device(device).type == "cuda" else {})


def set_generator_states(device: str, states: dict[str, Any]) -> None:
    """Set all global generators to the states from :func:`generator_states`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def about() -> dict[str, Any]:
    """Return the facts that a result can be traced by: versions, commit, machine."""
    versions = {"avagrad": avagrad.__version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
    versions["python"] = platform.python_version()
    machine: dict[str, Any] = {"processor": platform.machine(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "commit": _commit(), "machine": machine}


def _commit() -> str | None:
    """Return the commit of this code if it runs from a checkout, with a plus if it has uncommitted changes.

    The environment variable AVAGRAD_COMMIT overrides it, for a copy of a checkout.
    """
    if named := os.environ.get("AVAGRAD_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel"), "src", "avagrad", "lab", "environment.py") != Path(__file__):
            return None  # installed inside another project's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ":/src") else "")
    except (OSError, subprocess.SubprocessError):
        return None
