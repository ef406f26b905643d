"""How trainings are compared."""

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from training import Outcome

Pools = Callable[[int], Ranks]

NORMALISED = ("AvaGrad", "AvaGradW")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}


def assert_same(outcomes: list[Outcome], alone: Outcome, dtype: torch.dtype) -> None:
    """Compare all that a rank holds with the training in one process, and the ranks among each other."""
    tolerance = TOLERANCES[dtype]
    for rank, outcome in enumerate(outcomes):
        for name, got in outcome.params.items():
            where = f"{name}, rank {rank}: "
            want = alone.params[name]
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=where.__add__)
        assert outcome.gammas == outcomes[0].gammas  # to the bit: ranks must not drift apart
        assert outcome.gammas == pytest.approx(alone.gammas, rel=tolerance)


def all_reduces(outcome: Outcome) -> list[int]:
    """Return how many all-reduces each step made, having seen that it made nothing else."""
    known = {"allreduce_", "all_reduce"}
    assert all(calls.keys() <= known for calls in outcome.collectives), outcome.collectives
    return [sum(calls.values()) for calls in outcome.collectives]
