"""The folder of runs of the synthetic problem: ``config.json``, ``curves.jsonl`` and ``result.json``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from avagrad.files import write_atomic
from avagrad.lab.environment import about
from avagrad.lab.folder import RunFolder
from avagrad.lab.tasks.synthetic import Curve, Settings, run

__all__ = ["run_into"]

Run = Callable[[Settings, Sequence[str]], dict[str, Curve]]


def run_into(
    out: str | Path, runs: Sequence[Settings], methods: Sequence[str], *, resume: bool = False, run: Run = run
) -> dict[str, Any]:
    """Run the methods with each of the settings, write the folder, and return the content of its ``result.json``.

    With ``resume`` a finished folder is not run again, and an unfinished one is started again. ``run`` runs the
    methods with one of the settings; pass another function to show progress.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     result = run_into(place, [Settings(steps=2, replicas=2, compile=False)], ["sgd"])
    ...     sorted(path.name for path in Path(place).iterdir())
    ['config.json', 'curves.jsonl', 'result.json']
    >>> result["last"][0]["w1"], result["last"][0]["step"]
    (0.5, 2)
    """
    config = {"task": "synthetic", "methods": list(methods), "runs": [asdict(settings) for settings in runs]}
    with RunFolder.claim(out, config, about(), resume=resume) as folder:
        if (result := folder.read_result()) is not None:
            return result
        rows = [
            {"w1": settings.w1} | row
            for settings in runs
            for curve in run(settings, methods).values()
            for row in curve.rows(settings=settings)
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        write_atomic(folder.path / "curves.jsonl", lambda file: file.write(lines.encode()))
        last = {settings.w1: settings.steps for settings in runs}
        folder.write_result({"status": "finished", "last": [row for row in rows if row["step"] == last[row["w1"]]]})
        return folder.read_result() or {}
