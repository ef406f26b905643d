"""Worker pools: this process, with points one by one or all at once; processes on this machine; a Ray cluster.

Workers take points from the study themselves, so any number of machines can join. A pool supervises its workers: it
replaces those that die and kills those that take too long for a point. They end when the process of the pool does.
"""

from avagrad.tune.workers.base import Job, WorkerError, WorkerPool, work_on_one
from avagrad.tune.workers.batched import Batched, RunTogether
from avagrad.tune.workers.local import InProcess, LocalProcesses, device_slots
from avagrad.tune.workers.ray import RayTasks

__all__ = [
    "Batched",
    "InProcess",
    "Job",
    "LocalProcesses",
    "RayTasks",
    "RunTogether",
    "WorkerError",
    "WorkerPool",
    "device_slots",
    "work_on_one",
]
