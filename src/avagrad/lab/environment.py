"""What a run sets for the whole process while it goes on, and what it notes about where it runs."""

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

__all__ = ["about", "computing_with", "generator_states", "seeded", "set_generator_states"]


@contextlib.contextmanager
def computing_with(threads: int, *, precision: str = "float32", deterministic: bool = False) -> Iterator[None]:
    """Compute with so many threads, in this precision, deterministically or not; afterwards all is as before.

    With one thread, numbers too small to be normal are taken for zero. A model that is dying (an LSTM at too high a
    learning rate) computes with little else, ten times more slowly. torch sets this for one thread alone; with several,
    the numbers would depend on when the others were made.

    >>> with computing_with(1):
    ...     torch.get_num_threads()
    1
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


def seeded(seed: int, device: str, rank: int = 0) -> torch.Generator:
    """Seed all global generators for a run, and return the one that the randomness inside of its steps comes from.

    >>> torch.equal(torch.rand(2, generator=seeded(1, "cpu")), torch.rand(2, generator=seeded(1, "cpu")))
    True
    """
    everywhere = stream(seed, "global")
    torch.manual_seed(everywhere)
    random.seed(everywhere)
    numpy.random.seed(everywhere % 2**32)
    return torch.Generator(device).manual_seed(stream(seed, "noise", rank))


def generator_states(device: str) -> dict[str, Any]:
    """Return the states of all global generators, as a checkpoint can hold them.

    >>> sorted(generator_states("cpu"))
    ['numpy', 'python', 'torch']
    """
    legacy: Any = numpy.random.get_state()
    name, keys, position, has_gauss, gauss = legacy
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), position, has_gauss, gauss),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if torch.device(device).type == "cuda" else {})


def set_generator_states(device: str, states: dict[str, Any]) -> None:
    """Set all global generators to states that were returned by :func:`generator_states`.

    >>> states = generator_states("cpu")
    >>> drawn = torch.rand(1), random.random()
    >>> set_generator_states("cpu", states)
    >>> drawn == (torch.rand(1), random.random())
    True
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def about() -> dict[str, Any]:
    """Return what a result has to be traced back to: versions, commit, processor.

    >>> sorted(about())
    ['commit', 'machine', 'versions']
    """
    versions = {"avagrad": avagrad.__version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
    versions["python"] = platform.python_version()
    machine: dict[str, Any] = {"processor": platform.machine(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "commit": _commit(), "machine": machine}


def _commit() -> str | None:
    """Return the commit that this code is at, where it runs from a checkout; with a plus if it has been changed.

    AVAGRAD_COMMIT says it where the code is a copy of a checkout.
    """
    if named := os.environ.get("AVAGRAD_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel"), "src", "avagrad", "lab", "environment.py") != Path(__file__):
            return None  # installed somewhere inside of another project's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ":/src") else "")
    except (OSError, subprocess.SubprocessError):
        return None
