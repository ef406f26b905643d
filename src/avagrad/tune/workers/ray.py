"""Workers on a Ray cluster."""

import contextlib
import os
from typing import Any

from avagrad.tune.optuna_trials import DIED, Snapshot
from avagrad.tune.study import Study
from avagrad.tune.workers.base import Job, WorkerError, WorkerPool, new_name, work


class RayTasks(WorkerPool):
    """Tasks on a Ray cluster, each of which works until it is cancelled. Every node must reach the storage."""

    def __init__(
        self,
        job: Job,
        study: Study,
        address: str,
        count: int | None,
        *,
        slots_per_gpu: int = 1,
        timeout: float | None = None,
    ) -> None:
        super().__init__(study, timeout=timeout)
        self.job = job
        self.address, self.count, self.slots_per_gpu = address, count, slots_per_gpu
        self.tasks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Join the cluster and place the tasks; those without free resources wait for them."""
        try:
            import ray
        except ImportError as error:
            raise WorkerError(
                f"ray is {self.address!r}, but Ray is not installed: pip install '.[cluster]' in avagrad's folder."
            ) from error
        self.ray, self.joined = ray, not ray.is_initialized()
        if self.joined:
            try:
                ray.init(address=self.address, log_to_driver=True, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise WorkerError(f"ray is {self.address!r}, where no cluster responds: {error}.") from error
        resources = ray.cluster_resources()
        gpus = resources.get("GPU", 0)
        count = self.count or int(gpus * self.slots_per_gpu or resources.get("CPU", 1))
        share = {"num_gpus": 1 / self.slots_per_gpu} if gpus else {}
        # We replace a task that dies ourselves, after its point has been released.
        self.task = ray.remote(_work_on_ray).options(num_cpus=1, max_retries=0, **share)
        self.tasks = [self._place() for _ in range(count)]

    def _place(self) -> tuple[str, Any]:
        name = new_name()
        return name, self.task.remote(self.job, name)

    def check(self, snapshot: Snapshot) -> None:
        """Replace workers that have died, alone or with their node, and cancel those that take too long for a point."""
        ray = self.ray
        for i, (name, task) in enumerate(self.tasks):
            if late := self._too_long(name, snapshot):
                ray.cancel(task, force=True)
                self._fail_late(late)
                self.tasks[i] = self._place()
                continue
            ready, _ = ray.wait([task], timeout=0)
            if not ready:
                continue
            try:
                ray.get(task)
            except ray.exceptions.RayTaskError as error:  # raised by our own code: no worker can work
                raise WorkerError(str(error.cause or error)) from error
            except ray.exceptions.RayError as error:
                self._release([name], f"{DIED} ({type(error).__name__})")
            self.tasks[i] = self._place()

    def stop(self) -> None:
        """Cancel all tasks, release their points, and leave the cluster."""
        if not hasattr(self, "ray"):
            return
        for _, task in self.tasks:
            with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.cancel(task, force=True)
        self._release_all([name for name, _ in self.tasks])
        self.tasks = []
        if self.joined:
            self.ray.shutdown()


def _work_on_ray(job: Job, worker: str) -> None:
    if os.path.isdir(job.folder):  # relative paths are relative to where the study was started
        os.chdir(job.folder)
    work(job, worker)
