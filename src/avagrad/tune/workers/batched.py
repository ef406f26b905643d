"""All points at once: this process passes them to a function that runs them together."""

import threading
import time
from collections.abc import Callable, Sequence

from avagrad.checks import require_json
from avagrad.tune.held import Held, keep_all
from avagrad.tune.optuna_trials import GIVEN_BACK
from avagrad.tune.records import Record
from avagrad.tune.space import Point
from avagrad.tune.storage import patiently
from avagrad.tune.study import Study
from avagrad.tune.workers.base import WorkerPool, new_name

RunTogether = Callable[[list[Point]], list[Record]]


class Batched(WorkerPool):
    """Runs all points at once in this process, by a function that takes a list of them."""

    def __init__(self, run: RunTogether, study: Study, *, lease: float) -> None:
        super().__init__(study)
        self.run, self.lease, self.worker = run, lease, new_name()

    def wait(self, seconds: float) -> None:
        """Evaluate all waiting points."""
        held: list[Held] = []
        while (one := patiently(lambda: self.study.take(self.worker))) is not None:
            held.append(one)
        if not held:
            time.sleep(seconds)
            return
        ended = threading.Event()
        keep_all(held, self.lease, ended)
        try:
            found = self._records([one.point for one in held])
        except BaseException:
            ended.set()
            for one in held:
                one.fail(f"{GIVEN_BACK}: stopped")
            raise
        ended.set()
        for one in held:
            record = found[one.point.key]
            worst, facts = self.study.worst, record.facts
            value = worst if record.diverged else record.value
            one.finish(value, diverged_at=record.diverged_at, facts=facts, seconds=record.seconds)

    def _records(self, points: list[Point]) -> dict[str, Record]:
        """Run the points, and return a record for each."""
        made = self.run(points)
        if not isinstance(made, Sequence) or not all(isinstance(record, Record) for record in made):
            raise TypeError(f"together returned {made!r}, but must return a list of records.")
        found = {record.point.key: record for record in made}
        if lacking := [point.key for point in points if point.key not in found]:
            has = f"has {len(made)} records for {len(points)} points"
            raise ValueError(
                f"together returned a list that {has}, but must have one for each: {lacking[0]} is missing."
            )
        for key, record in found.items():
            require_json(f"facts of {key}", dict(record.facts))
        return found
