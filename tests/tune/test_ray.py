"""A study on a Ray cluster that loses a node."""

from pathlib import Path

import pytest
from objectives import Gated
from servers import two_ray_nodes

from avagrad.tune import tune
from avagrad.tune.result import Progress

pytestmark = pytest.mark.slow


def test_a_study_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    """It is lost when all four tasks, two on each node, are at a point."""
    removed = tmp_path / "removed"
    with two_ray_nodes() as (cluster, address):

        def remove_a_node_in_the_middle(progress: Progress) -> None:
            if (progress.done, progress.running) == (8, 4) and not removed.exists():
                cluster.remove_node(*cluster.worker_nodes)
                removed.touch()

        result = tune(
            Gated(removed, free=8), lr=range(1, 31), method="grid", storage=tmp_path / "ray.journal", workers=4,
            ray=address, watcher=remove_a_node_in_the_middle,
        )  # fmt: skip
    assert removed.exists()
    runs = [(tmp_path / f"lr={lr} seed=0").stat().st_size for lr in range(1, 31)]
    assert sum(runs) == 32  # the two points on the node that was lost have been run again
    assert len(result.trials) == 30
    assert result.best is not None
    assert result.best.lr == 1
    assert not result.failed
