"""A study on a Ray cluster that loses a node."""

import threading
import time
from pathlib import Path

from servers import two_ray_nodes

from avagrad.tune import Trial, tune


def objective(trial: Trial) -> float:
    time.sleep(0.3)
    assert trial.lr is not None
    return trial.lr


def test_a_study_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    with two_ray_nodes() as (cluster, address):
        done: list[int] = []
        removed = threading.Event()

        def remove_a_node_in_the_middle(progress: object) -> None:
            done.append(progress.done)  # type: ignore[attr-defined]
            if progress.done >= 8 and not removed.is_set():  # type: ignore[attr-defined]
                removed.set()
                cluster.remove_node(*cluster.worker_nodes)

        result = tune(
            objective, lr="1:30:30", method="grid", storage=tmp_path / "ray.journal", workers=4, ray=address,
            watcher=remove_a_node_in_the_middle,
        )  # fmt: skip
    assert removed.is_set()
    assert len(result.trials) == 30
    assert result.best is not None
    assert result.best.lr == 1
    assert not result.failed
