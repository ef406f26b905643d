"""Who evaluates points: this process, one after the other or all at once; processes on this machine; a Ray cluster.

Nobody hands points out, so any number of machines can join. Whoever started a worker looks after it: it is replaced
when it dies, killed when a point takes too long, and ends when the one who started it does.
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
