"""The benchmark measures what it says; small enough for every run of the suite."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from avagrad import bench


def test_the_sets_are_the_models() -> None:
    sizes = {name: sum(torch.Size(shape).numel() for shape in shapes) for name, (shapes, _, _) in bench.SETS.items()}
    assert sizes["resnet50"] == 25_557_032  # torchvision's resnet50
    assert len(bench.SETS["resnet50"][0]) == 161
    assert sizes["gpt2-124M"] == 124_439_808  # GPT-2 small
    assert len(bench.SETS["gpt-1.5B"][0]) == 580


def test_a_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SETS, "tiny", ([(10,), (3, 4)], torch.float32, True))
    device = torch.device("cpu")
    rows = bench.run(device, ["tiny"])
    labels = [row.optimizer for row in rows]
    assert {"torch AdamW fused", "AvaGrad fused", "AvaGrad foreach", "AvaGrad loop"} <= set(labels)
    assert rows[0].of_fused_adamw == 1
    assert all(row.milliseconds > 0 for row in rows)
    bench.save(rows, device, tmp_path / "out" / "step.json")
    saved = json.loads((tmp_path / "out" / "step.json").read_text())
    assert [row["optimizer"] for row in saved["rows"]] == labels
    assert saved["about"]["torch"] == torch.__version__
    assert len(bench.table(rows).splitlines()) == len(rows) + 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(bench.SETS, "tiny", ([(10,), (3, 4)], torch.float32, True))
    assert bench.main(["--device", "cpu", "--sets", "tiny", "--json", str(tmp_path / "step.json")]) == 0
    assert "| tiny | AvaGrad fused |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "step.json").read_text())["rows"]) > 5
    with pytest.raises(SystemExit):
        bench.main(["--sets", "resnet"])
    assert "invalid choice: 'resnet'" in capsys.readouterr().err


def test_the_benchmark_of_backward_runs(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "backward.py"
    sizes = [
        "--layers",
        "1",
        "--width",
        "64",
        "--vocabulary",
        "100",
        "--length",
        "16",
        "--batches",
        "1",
        "--device",
        "cpu",
    ]
    command = [sys.executable, str(script), *sizes, "--json", str(tmp_path / "backward.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "| 1 x 16 | AvaGrad in backward |" in done.stdout
    rows = json.loads((tmp_path / "backward.json").read_text())["rows"]
    losses = {row["variant"]: row["loss"] for row in rows}
    assert losses["AvaGrad in backward"] == losses["AvaGrad"]
