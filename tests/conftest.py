"""What every test starts from: one thread, and `gpu` tests only where there is a GPU."""

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ranks import Ranks

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the same kernels, run by Triton's interpreter on CPU tensors

from hypothesis import settings

# A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
settings.register_profile("avagrad", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("avagrad")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


FRAMEWORKS = ("transformers", "accelerate", "lightning", "peft", "timm", "jax", "optax")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if missing := [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]:
        terminalreporter.write_line(f"not installed, so not tested with: {', '.join(missing)}")


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Callable[[int], Ranks]]":
    """Give the pool of so many processes, started when it is first asked for."""
    from ranks import open_pools

    with open_pools() as pool:
        yield pool
