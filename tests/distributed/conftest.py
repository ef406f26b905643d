"""Pools of ranks that all tests of this folder share."""

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks, open_pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Give the pool of so many ranks, started when it is first asked for."""
    with open_pools() as pool:
        yield pool
