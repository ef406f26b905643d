"""Resuming a run from its folder."""

from pathlib import Path
from typing import Any

from avagrad.lab.config import Config
from avagrad.lab.ensemble import train_ensemble
from avagrad.lab.folder import CONFIG, RunFolder
from avagrad.lab.run import Callback
from avagrad.lab.train import train
from avagrad.tune.space import Point


def resume_run(folder: str | Path, callback: Callback | None = None) -> dict[str, Any]:
    """Resume the training or the ensemble in a folder, and return the content of its ``result.json``."""
    place = RunFolder(Path(folder))
    written = place.read_json(CONFIG).get("config")
    if not isinstance(written, dict) or "optimizer" not in written:
        raise ValueError(f"{place.path / CONFIG} is not from a training or an ensemble, and cannot be resumed.")
    if "points" not in written:
        return train(Config.from_json(written), place.path, resume=True, callback=callback)
    points = [Point.from_key(key) for key in written["points"]]
    own = {name: value for name, value in points[0]._asdict().items() if value is not None}
    config = Config.from_json({**written, **own, "compile": False})
    train_ensemble(config, points, place.path, resume=True, callback=callback, compile=written["compile"])
    return place.read_result() or {}
