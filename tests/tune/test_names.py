"""Where an error was raised, and what is said of a module that cannot be imported."""

import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from avagrad.names import imported, place_of

PACKAGES = {
    "this environment": sysconfig.get_path("purelib"),
    "another one": "/somewhere/venv/lib/python3.9/site-packages",
    "the system": "/usr/lib/python3/dist-packages",
    "Python": sysconfig.get_path("stdlib"),
    "avagrad": str(Path(imported("module", "module", "avagrad:__file__")).parent),
}
PROJECTS = {
    "beside an environment": f"{sys.prefix}-project",
    "below Python": f"{sys.base_prefix}/src/app",
    "in an environment": f"{sys.prefix}/work",
    "beside avagrad": PACKAGES["avagrad"] + "_mine",
}


def error_of(folder: str, package: str) -> BaseException:
    """Return an error that is raised in a package, which a project in a folder has called."""
    names: dict[str, Any] = {}
    exec(compile("def fail():\n    raise ValueError", f"{package}/fails.py", "exec"), names)
    exec(compile("\n\ndef call():\n    fail()", f"{folder}/train.py", "exec"), names)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        names["call"]()
    error.value.__traceback__ = error.tb.tb_next  # without this test
    return error.value


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("project", PROJECTS)
def test_the_place_of_an_error_is_in_the_project(project: str, package: str) -> None:
    error = error_of(PROJECTS[project], PACKAGES[package])
    assert place_of(error) == f"{PROJECTS[project]}/train.py:4"


def test_an_error_of_a_package_alone_has_its_place() -> None:
    folder = PACKAGES["this environment"]
    assert place_of(error_of(folder, folder)) == f"{folder}/fails.py:2"


def test_text_that_is_not_python_has_the_place_of_its_reader() -> None:
    with pytest.raises(SyntaxError) as error:
        eval("1 +")
    assert place_of(error.value) == f"{__file__}:{error.traceback[0].lineno + 1}"


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("import sys\nsys.exit(0)\n", "it ends the process (SystemExit: 0)", 2),
        ("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n", "it ends the process (SystemExit: 2)", 2),
        ("\nimport nowhere\n", "ModuleNotFoundError: No module named 'nowhere'", 2),
        ("from math import root\n", "ImportError: cannot import name 'root' from 'math' (", 1),
        ("1 / 0\n", "ZeroDivisionError: division by zero", 1),
    ],
)
def test_a_module_that_cannot_be_imported(
    text: str, reason: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unusable.py").write_text(text)
    with pytest.raises(
        ValueError, match=r"^objective is 'unusable:train', but 'unusable' cannot be imported: "
    ) as error:
        imported("objective", "function", "unusable:train")
    assert f"imported: {reason}" in str(error.value)
    assert str(error.value).endswith(f" ({tmp_path / 'unusable.py'}:{line}).")


@pytest.mark.parametrize("name", ["nowhere", "nowhere.at", "avagrad.nowhere", "avagrad.nowhere.at"])
def test_a_module_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=rf"but there is no module '{name}' here or on the path\.$"):
        imported("objective", "function", f"{name}:train")
