"""The shape of the optimizers' code: small files, short functions, and one place for each thing."""

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import avagrad
from avagrad import AvaGrad

OPTIM = Path(avagrad.__file__).parent / "optim"
SOURCES = sorted([*OPTIM.rglob("*.py"), *OPTIM.rglob("*.c")])
# The rule, what restates its element-wise body, and the classes.
KNOW_THE_RULE = {"rules.py", "avagrad.py", "avastep.py", "foreach.py", "triton.py", "native.py", "native.c"}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_and_functions_are_short() -> None:
    assert {path.name: lines_of(path) for path in SOURCES if lines_of(path) > 400} == {}
    assert sum(map(lines_of, SOURCES)) <= 4620
    functions = {
        f"{path.name}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
    }
    assert {name: n for name, n in functions.items() if n > 60} == {}


@pytest.mark.parametrize("flag", ["active_only", "bias_correction", "maximize", "clip_moment", "clips"])
def test_a_flag_of_the_delayed_rule_is_known_in_few_files(flag: str) -> None:
    knowing = {path.name for path in SOURCES if re.search(rf"\b{flag}\b", path.read_text())}
    others = {"baselines.py", "adopt.py", "adabound.py", "adashift.py", "arguments.py"} if flag == "maximize" else {""}
    assert knowing - others <= KNOW_THE_RULE


def test_a_step_of_the_loop_goes_through_few_files() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = AvaGrad([w], foreach=False)
    for _ in range(2):
        w.grad = torch.ones(3)
        opt.step()
    files: set[str] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and str(OPTIM) in frame.f_code.co_filename:
            files.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(record)
    try:
        opt.step()
    finally:
        sys.setprofile(None)
    assert files == {"optimizer.py", "step.py", "params.py", "norm.py", "loop.py", "rules.py"}
