"""The project as a whole: the wheel, what importing costs, and what the documents say."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

import avagrad

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "results" / "README.md"])


def run(*command: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_alone_in_a_fresh_environment(tmp_path: Path) -> None:
    """Built from a copy of the sources, installed without its dependencies; torch is this environment's.

    There is no compiler, and nothing is written to a home folder.
    """
    source = tmp_path / "source"
    source.mkdir()
    tracked = run("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in tracked:
        if name.startswith("src/") or name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("avagrad-*.whl")
    run(sys.executable, str(ROOT / ".ci" / "check_wheel.py"), str(wheel))
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", str(fresh))
    python = str(fresh / "bin" / "python")
    run(*pip, "--python", python, "install", "--no-deps", str(wheel))
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "torch-from-elsewhere.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = (
        "import torch, avagrad\n"
        "w = torch.nn.Parameter(torch.ones(3))\n"
        "opt = avagrad.AvaGrad([w], lr=0.5, fused=True)\n"
        "for _ in range(2):\n"
        "    w.grad = torch.ones(3)\n"
        "    opt.step()\n"
        "print(avagrad.__file__, avagrad.__version__, *w.tolist())\n"
    )
    file, version, *values = run(python, "-c", script, PATH="", HOME=str(tmp_path / "home")).split()
    assert Path(file).is_relative_to(fresh)
    assert version == avagrad.__version__
    assert [float(x) for x in values] == pytest.approx([0.5] * 3)
    assert not (tmp_path / "home").exists()
    for name in ("py.typed", "optim/backends/native.c", "report/page.html", "report/page.js"):
        assert (site / "avagrad" / name).exists(), name


def test_importing_is_light() -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import avagrad\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
    )
    modules = run(sys.executable, "-c", script).split()
    heavy = {"optuna", "ray", "matplotlib", "sklearn", "typer", "rich", "triton", "numpy", "hypothesis", "sympy"}
    assert "avagrad" in modules
    assert not heavy & set(modules)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module or "")
    return found


def test_the_optimizers_import_torch_and_themselves_alone() -> None:
    for path in (ROOT / "src" / "avagrad" / "optim").rglob("*.py"):
        for name in imports_of(path):
            top = name.partition(".")[0]
            allowed = {"torch", "triton"} if path.parent.name == "backends" else {"torch"}
            assert top in sys.stdlib_module_names | allowed or name.startswith("avagrad.optim"), (path, name)


# Packages from top to bottom: each may import what its line names, itself, and nothing of ours besides.
BELOW = {
    "integrations": {"create", "optim"},
    "optax": {"optim"},
    "cli": {"progress", "report", "lab", "tune", "checks", "stopping", "names"},
    "progress": set(),
    "report": {"lab", "tune", "theory", "files"},
    "lab": {"checks", "create", "theory", "tune", "optim", "files", "stopping", "worker_process", "names"},
    "tune": {"checks", "files", "stopping", "worker_process", "names"},
    "create": {"optim", "names"},
    "checks": set(),
    "files": set(),
    "names": set(),
    "stopping": set(),
    "worker_process": set(),
    "theory": set(),
    "bench": set(),
    "optim": set(),
}
# The only files that may import what is heavy or optional; all else runs with torch and numpy.
ALLOWED = {
    "sklearn": {"lab/tasks/digits.py"},
    "typer": {f"cli/{name}.py" for name in ("__init__", "lab", "options", "report", "tuning")},
    "rich": {"cli/lab.py", "progress.py"},
    "optuna": {f"tune/{name}.py" for name in ("held", "optuna_trials", "storage", "study", "trial")},
    "ray": {"tune/workers/ray.py"},
    "matplotlib": {"report/drawing.py", "report/figures/heat_maps.py"},
    "transformers": {"integrations/hugging_face.py"},
    "lightning": {"integrations/lightning.py"},
    "timm": {"integrations/timm.py"},
    "jax": {"optax.py"},
    "optax": {"optax.py"},
}


def test_packages_import_downwards_and_heavy_libraries_stay_where_they_belong() -> None:
    source = ROOT / "src" / "avagrad"
    for path in source.rglob("*.py"):
        inside = path.relative_to(source)
        package = inside.parts[0].removesuffix(".py")
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            if top in ALLOWED:
                assert str(inside) in ALLOWED[top], (inside, name)
            if top == "avagrad" and rest and package in BELOW:
                below = rest.partition(".")[0]
                assert below == package or below in BELOW[package], (inside, name)


def modules_with_public_names() -> list[str]:
    source = ROOT / "src"
    paths = [path for path in source.rglob("*.py") if "__all__" in path.read_text()]
    return [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in paths]


PUBLIC = ["avagrad", "avagrad.optim", "avagrad.optim.rules", "avagrad.bench"]
PUBLIC += [name for name in modules_with_public_names() if not name.startswith("avagrad.optim")]


NEEDS = {
    "avagrad.integrations": ("lightning", "transformers"),
    "avagrad.integrations.hugging_face": ("transformers",),
    "avagrad.integrations.lightning": ("lightning",),
    "avagrad.optax": ("optax",),
}


@pytest.mark.parametrize("name", sorted(set(PUBLIC)))
def test_every_public_name_is_documented(name: str) -> None:
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert ">>>" in (value.__doc__ or ""), f"{name}.{public} has no example"


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}-{i}", code)
        for path in DOCUMENTS
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S))
    ]


@pytest.mark.parametrize(("name", "code"), python_blocks(), ids=[name for name, _ in python_blocks()])
def test_python_in_the_documents_runs(name: str, code: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AvaGrad: the loaded state is from another optimizer")
        exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_links_in_the_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert link.startswith("https://") or (path.parent / link).exists(), (path, link)


def test_commands_in_the_documents_exist() -> None:
    for target in re.findall(r"`make ([a-z]+)", "".join(path.read_text() for path in DOCUMENTS)):
        run("make", "-n", "-C", str(ROOT), target)
    for script in re.findall(r"`python (benchmarks/\w+\.py)`", "".join(path.read_text() for path in DOCUMENTS)):
        ast.parse((ROOT / script).read_text())


def test_the_project_speaks_of_itself_alone() -> None:
    """No paths of a machine, and a constraints file that pins everything exactly."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^=]+", line) for line in pins)
    assert "torch==2.13.0" in pins
