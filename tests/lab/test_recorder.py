"""Steps that are recorded as a CUDA graph, on a CPU: a recording of operations stands in for the graph.

As for a graph, recording changes nothing, and a replay runs the same operations on the same memory, without Python.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from short_runs import SMALL_CHARS, text
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avagrad.lab.config import configure
from avagrad.lab.ensemble.stack import Stack
from avagrad.lab.environment import seeded
from avagrad.lab.stepping import GraphStep, Losses, Step
from avagrad.lab.tasks.base import Batch, Carry, Task
from avagrad.lab.tasks.chars import Chars

__all__ = ["text"]  # a fixture

EPOCHS = 3
OPTIONS: dict[str, Any] = dict(SMALL_CHARS)


class Graph:
    """The operations of a recording."""

    def __init__(self) -> None:
        self.operations: list[Any] = []
        self.replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generator = generator

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, arguments, options, results in self.operations:
            for old, new in zip(tree_leaves(results), tree_leaves(function(*arguments, **options)), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations within a context, and undoes what they have written."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.random = graph, graph.generator.get_state()
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads from the device"
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                self.written += [(x, x.clone()) for x in tree_leaves(given) if isinstance(x, Tensor)]
        results = func(*args, **(kwargs or {}))
        self.graph.operations.append((func, args, kwargs or {}, results))
        return results

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for x, before in reversed(self.written):
                x.copy_(before)
        self.graph.generator.set_state(self.random)


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    made: list[Graph] = []

    def new() -> Graph:
        made.append(Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return made


def test_replayed_steps_are_the_eager_ones(text: str, recordings: list[Graph]) -> None:
    """With masks, clipping and a carried state; the last piece of the text is shorter."""
    ends = []
    for kind in (Step, GraphStep):
        task = Chars(data=text, dtype=torch.float64, **OPTIONS)
        model, losses, noise = task.new_model(), Losses("cpu"), seeded(0, "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
        step = kind(task, model, optimizer, noise, losses, clip=0.25, precision="float32")
        means = []
        for _ in range(EPOCHS):
            step.start(task.start(model))
            for index in range(task.steps_per_epoch):
                step(task.batch(None, index))
            assert int(losses.count) == task.steps_per_epoch
            means.append(losses.means())
        ends.append([*means, *step.carry, *model.parameters()])
    (graph,) = recordings
    assert graph.replays == EPOCHS * (task.steps_per_epoch - 1) - 3
    for eager, replayed in zip(*ends, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-12, atol=1e-14)


@dataclass(kw_only=True)
class Sums(Task):
    """The carry is the sum of the batches so far; it starts as one tensor, the same in every epoch.

    With ``kept`` a step returns another tensor of the task's own, which must not change.
    """

    kept: bool = False

    steps_per_epoch: int = 3  # as many as are taken before the recording

    def __post_init__(self) -> None:
        self.zero, self.one = torch.zeros(1), torch.ones(1)

    def fingerprint(self) -> str:
        return ""

    def build(self) -> nn.Module:
        return nn.Linear(1, 1)

    def start(self, model: nn.Module) -> Carry:
        return (self.zero,)

    def batch(self, order: Any, index: int) -> Batch:
        return (torch.tensor([1.0 + index]),)

    def loss(self, model: nn.Module, batch: Batch, carry: Carry, noise: torch.Generator) -> tuple[Tensor, Carry]:
        total = batch[0] + carry[0]
        return model(total).square().mean(), (self.one if self.kept else total,)


@pytest.mark.parametrize(("kept", "steps"), [(False, 3), (True, 4)])
def test_a_carry_of_the_task_is_not_written_to(kept: bool, steps: int) -> None:
    ends = []
    for kind in (Step, GraphStep):
        task = Sums(kept=kept, steps_per_epoch=steps)
        model = task.new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        step = kind(task, model, optimizer, seeded(0, "cpu"), Losses("cpu"), clip=None, precision="float32")
        for _ in range(EPOCHS):
            step.start(task.start(model))
            for index in range(task.steps_per_epoch):
                step(task.batch(None, index))
        assert [task.zero.item(), task.one.item()] == [0, 1]
        ends.append([*step.carry, *model.parameters()])
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("optimizer", ["avastep", "sgd"])
def test_replayed_steps_of_a_stack_are_the_eager_ones(text: str, recordings: list[Graph], optimizer: str) -> None:
    """The last member diverges."""
    eps = None if optimizer == "sgd" else 0.1
    configs = [configure("chars", optimizer, data=text, lr=lr, eps=eps, clip=1e3) for lr in (1e-3, 1e-2, 1e20)]
    ends = []
    for graph in (False, True):
        task = Chars(data=text, dtype=torch.float64, **OPTIONS)
        members = Stack(task, configs, seeded(0, "cpu"), graph=graph)
        means = []
        for epoch in range(EPOCHS):
            members.begin(epoch)
            for index in range(task.steps_per_epoch):
                members.step(task.batch(None, index))
            means.append(members.losses.means())
        ends.append([*means, members.first_bad, *members.carry, *members.w.values()])
    assert recordings[0].replays == EPOCHS * (task.steps_per_epoch - 1) - 3
    assert members.first_bad[2] > 0
    for eager, replayed in zip(*ends, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-9, atol=1e-12, equal_nan=True)
