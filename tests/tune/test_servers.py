from pathlib import Path

import optuna
import pytest
import ray
from optuna.trial import TrialState, create_trial
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from servers import postgres, two_ray_nodes

pytestmark = pytest.mark.slow


def test_a_study_on_postgresql_is_read_back(tmp_path: Path) -> None:
    with postgres(tmp_path) as url:
        written, read = optuna.storages.RDBStorage(url), optuna.storages.RDBStorage(url)
        optuna.create_study(storage=written, study_name="study").add_trial(create_trial(value=3.5))
        (trial,) = optuna.load_study(storage=read, study_name="study").trials
        assert (trial.number, trial.state, trial.value) == (0, TrialState.COMPLETE, 3.5)
        written.engine.dispose()
        read.engine.dispose()


def test_two_postgresql_servers_know_nothing_of_each_other(tmp_path: Path) -> None:
    with postgres(tmp_path) as one, postgres(tmp_path) as other:
        storages = [optuna.storages.RDBStorage(url) for url in (one, other)]
        optuna.create_study(storage=storages[0], study_name="study")
        assert [len(storage.get_all_studies()) for storage in storages] == [1, 0]
        for storage in storages:
            storage.engine.dispose()


def test_ray_works_on_both_nodes_and_on_one_when_the_other_is_gone() -> None:
    def node() -> str:
        return str(ray.get_runtime_context().get_node_id())

    with two_ray_nodes() as (cluster, address):
        ray.init(address=address)
        nodes = [known["NodeID"] for known in ray.nodes()]
        task = ray.remote(node)
        placed = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)) for n in nodes]
        assert len(set(nodes)) == 2
        assert ray.get([each.remote() for each in placed]) == nodes
        (second,) = cluster.worker_nodes
        cluster.remove_node(second)
        assert ray.get(task.remote()) == cluster.head_node.node_id
