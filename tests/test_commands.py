"""Commands in the documents: quick ones are run, in their order, the others at least understood (``--dry-run``)."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# What a block of a document may be: a shell's, which is tested here; Python, which another test runs; or not code.
LANGUAGES = {"sh", "bash", "python", "py", "text", "bibtex"}
OURS = ("avagrad ", "python ", "torchrun ", "make ")
# Run as they stand, each in well under 20 s; what they write is in a folder of the test's own.
QUICK = {
    "avagrad report runs/mine.journal",
    "avagrad list",
    "avagrad train digits --optimizer avagrad --lr 1 --eps 0.1 --out runs/x",
    "avagrad resume runs/x",
    "avagrad list chars",
    "avagrad report runs",
    "avagrad study export runs/mine.journal mine.jsonl",
    "avagrad study import mine.jsonl --storage other.journal --name mymodule:objective",
    "avagrad study show runs/mine.journal",
    "avagrad tune mymodule:objective --lr 1e-4:1e3:8 --eps 1e-8:100:11 --storage runs/mine.journal --workers 2",
}
# Spoken of without the arguments that they, or their last option, need.
MENTIONED = {
    "avagrad queue",
    "avagrad study import",
    "avagrad sweep",
    "avagrad synthetic --out",
    "avagrad train",
    "avagrad tune",
    "python -m avagrad.bench --json",
    "python -m avagrad.lab.ensemble",
    "python -m avagrad.lab.train",
}
OBJECTIVE = (
    "import math\n\n\ndef objective(trial):\n    return abs(math.log10(trial.lr)) + abs(math.log10(trial.eps))\n"
)


def shell_lines(text: str) -> list[str]:
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def own_task() -> str:
    """The example of docs/lab.md, which its commands import."""
    section = (ROOT / "docs" / "lab.md").read_text().split("## Your own task")[1]
    return section.split("```python\n")[1].split("```")[0]


def commands() -> list[str]:
    """All commands in the documents, without their remarks, each once."""
    found: dict[str, None] = {}
    for path in DOCUMENTS:
        text = path.read_text()
        lines = shell_lines(text)
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for line in [*lines, *(words for words in inline if " " in words)]:
            command = re.sub(r"\s+#.*", "", line).strip()
            if command.startswith(OURS):
                found[command] = None
    return list(found)


def test_every_block_of_code_is_tested() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        fences = re.findall(r"^```(.*)$", text, re.M)
        assert set(fences[::2]) <= LANGUAGES, path
        assert set(fences[1::2]) <= {""}, path
        assert "py" not in fences or path.name == "frameworks.md", path  # run by frameworks/test_recipes.py
        for line in shell_lines(text):
            assert line.startswith((*OURS, "pip install ")), (path, line)


def test_what_is_to_be_installed_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in DOCUMENTS:
        for what in re.findall(r"pip install ([^`\n]+)", path.read_text()):
            extras = re.fullmatch(r"'?(?:\.|avagrad)(?:\[([a-z,]+)\])?'?", what.partition("#")[0].strip())
            assert extras is not None, (path, what)
            assert set((extras[1] or "lab").split(",")) <= project["optional-dependencies"].keys(), (path, what)


def test_the_documents_have_the_quick_ones() -> None:
    assert set(commands()) >= QUICK, QUICK - set(commands())


def test_quick_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mymodule.py").write_text(OBJECTIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the workers of a search
    for command in sorted(
        QUICK, key=lambda each: ("resume" in each, "tune" not in each, "study" in each, "import" in each)
    ):
        assert _ends_with(shlex.split(command)) == 0, (command, capsys.readouterr())
        assert capsys.readouterr().out, command


class _ParsedError(Exception):
    """The arguments were understood."""


@pytest.mark.parametrize("command", [command for command in commands() if command not in QUICK])
def test_long_commands_are_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word.replace("cuda", "cpu") for word in shlex.split(command)]  # there may be no GPU here
    if words[0] == "make":
        done = subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    if words[0] == "torchrun":
        words = ["python", *words[next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")) :]]
    if words[0] == "python" and words[1] != "-m":  # a script: it is stopped as soon as it has its arguments
        _parse_script(ROOT / words[1], words[2:], monkeypatch)
        return
    if command in MENTIONED:
        words = [*(word for word in words if not word.startswith("--")), "--help"]
    else:
        words.append("--dry-run")
    (tmp_path / "my_module.py").write_text(own_task())
    (tmp_path / "mymodule.py").write_text(OBJECTIVE)
    (tmp_path / "benchmarks").mkdir()
    runs = (ROOT / "benchmarks" / "paper-runs.txt").read_text()
    (tmp_path / "benchmarks" / "paper-runs.txt").write_text(runs.replace("--device cuda", "--device cpu"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _ends_with(words) == 0


def _ends_with(words: list[str]) -> int:
    """Run a command of ours in this process, where torch is imported already; return its exit code."""
    from avagrad.bench import main as bench_main
    from avagrad.cli import main
    from avagrad.lab.command import main as train_main
    from avagrad.lab.ensemble.__main__ import main as ensemble_main
    from avagrad.lab.queue import main as queue_main

    mains = {"avagrad.bench": bench_main, "avagrad.lab.train": train_main}
    mains |= {"avagrad.lab.ensemble": ensemble_main, "avagrad.lab.queue": queue_main}
    try:
        if words[0] != "avagrad":
            return mains[words[2]](words[3:])
        main(words[1:])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _parse_script(path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "argparse" not in path.read_text():
        compile(path.read_text(), str(path), "exec")
        assert not arguments
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: object, **options: object) -> None:
        parse(self, arguments)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(_ParsedError):
        runpy.run_path(str(path), run_name="__main__")
