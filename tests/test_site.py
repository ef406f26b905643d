"""The site: links that leave docs/, docstrings, what the API's pages have, and the whole of it in a real browser."""

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser

ROOT = Path(__file__).parent.parent
API = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))


def module(path: str, needs: str) -> Any:
    """Import a file that only the site uses; skip where the extra ``docs`` is not installed."""
    pytest.importorskip(needs, reason=f"needs {needs}: make docs installs it")
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("source", "text", "without", "with_address"),
    [
        ("docs/a.md", "[b](b.md#c)", "[b](b.md#c)", "[b](b.md#c)"),
        ("docs/api/a.md", "[b](../b.md)", "[b](../b.md)", "[b](../b.md)"),
        ("docs/a.md", "[b](https://b.org)", "[b](https://b.org)", "[b](https://b.org)"),
        ("docs/a.md", "![b](figures/b.png)", "![b](figures/b.png)", "![b](figures/b.png)"),
        ("docs/a.md", "[rules.py](../src/rules.py)", "`src/rules.py`", "[rules.py](R/src/rules.py)"),
        ("docs/a.md", "[`src/b`](../src/b)", "`src/b`", "[`src/b`](R/src/b)"),
        ("docs/a.md", "[records](../results/x)", "records (`results/x`)", "[records](R/results/x)"),
        ("docs/a.md", "([records](../results/x))", "(records: `results/x`)", "([records](R/results/x))"),
        ("docs/a.md", "[us](../CONTRIBUTING.md#x)", "[us](contributing.md#x)", "[us](contributing.md#x)"),
        ("docs/api/a.md", "[us](../../CONTRIBUTING.md)", "[us](../contributing.md)", "[us](../contributing.md)"),
        ("docs/a.md", "[try](../examples/notebook.py)", "[try](notebook.md)", "[try](notebook.md)"),
        ("CONTRIBUTING.md", "[a](docs/a.md#b)", "[a](a.md#b)", "[a](a.md#b)"),
        ("CONTRIBUTING.md", "[oracle](tests/r.py)", "oracle (`tests/r.py`)", "[oracle](R/tests/r.py)"),
        ("docs/a.md", "```text\n[a](../b)\n```", "```text\n[a](../b)\n```", "```text\n[a](../b)\n```"),
    ],
)
def test_links_that_leave_the_documents(source: str, text: str, without: str, with_address: str) -> None:
    site = module("docs/site_pages.py", "jupytext")
    assert site.with_links(text, source, None) == without
    address = "https://example.org/us"
    assert site.with_links(text, source, address).replace(f"{address}/blob/main", "R") == with_address


@pytest.mark.parametrize(("path", "needs"), [("docs/site_pages.py", "jupytext"), ("docs/site_docstrings.py", "griffe")])
def test_examples_of_the_hooks(path: str, needs: str) -> None:
    failed, tried = doctest.testmod(module(path, needs))
    assert tried
    assert not failed


def test_docstrings_become_markdown() -> None:
    docstrings = module("docs/site_docstrings.py", "griffe")
    assert docstrings.as_markdown("As :func:`a.b` and :class:`~a.b.C`::\n") == "As `a.b` and `C`:\n"
    text = "Before.\n\n>>> f(1)\n[1]\n\nAfter.\n\n>>> g()"
    assert docstrings.as_markdown(text) == (
        "Before.\n\n```pycon\n>>> f(1)\n[1]\n```\n\nAfter.\n\n```pycon\n>>> g()\n```"
    )


def test_a_missing_docstring_is_found(tmp_path: Path) -> None:
    docstrings = module("docs/site_docstrings.py", "griffe")
    import griffe

    (tmp_path / "example.py").write_text(
        '__all__ = ["A", "f"]\n\n\n'
        'class A:\n    """Yes."""\n'
        "    def __len__(self): ...\n    def bare(self): ...\n    def _own(self): ...\n\n\n"
        "def f(): ...\n\n\ndef not_exported(): ...\n"
    )
    loaded = griffe.load("example", search_paths=[tmp_path])
    assert list(docstrings.undocumented(loaded)) == ["example.A.bare", "example.f"]
    ours = griffe.load("avagrad", search_paths=[ROOT / "src"])
    assert list(docstrings.undocumented(ours)) == []


@pytest.mark.parametrize("name", ["avagrad", "avagrad.optim", "avagrad.tune"])
def test_every_public_name_has_its_place_in_the_api(name: str) -> None:
    for public in importlib.import_module(name).__all__:
        assert public == "__version__" or re.search(rf"^::: avagrad\.(\w+\.)*{public}$", API, re.M), (name, public)


def test_every_page_of_the_api_names_what_exists() -> None:
    for name in re.findall(r"^::: (\S+)$", API, re.M):
        parent, _, last = name.rpartition(".")
        if importlib.util.find_spec(parent) is None or not hasattr(importlib.import_module(parent), last):
            assert importlib.util.find_spec(name) is not None, name


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("check_site", ROOT / ".ci" / "check_site.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    (tmp_path / "a.html").write_text('<h2 id="here">A</h2><a href="#here"></a><a href="b.html"></a>')
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><a href="https://elsewhere.org"></a>')
    assert check.problems(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<a href="a.html#there"></a><img src="c.png"><script src="https://elsewhere.org/x.js"></script>'
    )
    assert check.problems(tmp_path) == [
        "b.html fetches https://elsewhere.org/x.js",
        "b.html refers to a.html#there, which has no such anchor",
        "b.html refers to c.png, which is not there",
    ]


# --- built, and read from a disk ---


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs mkdocs: make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with Browser() as opened:
        yield opened


SEARCH = """new Promise(resolve => {
    const field = document.querySelector("input.md-search__input")
    field.focus()
    field.value = "bfloat16"
    field.dispatchEvent(new Event("keyup"))
    const look = () => {
        const found = document.querySelectorAll(".md-search-result__item a")
        found.length ? resolve([...found].map(link => link.href).join(" ")) : setTimeout(look, 50)
    }
    look()
})"""


@pytest.mark.slow
def test_pages_fit_ask_no_network_for_anything_and_can_be_searched(built: Path, browser: Browser) -> None:
    for width in (1400, 375):
        for name in ("index", "optimizers", "tuning", "benchmarks", "frameworks", "notebook", "api/optimizers"):
            browser.open(built / f"{name}.html", width=width, height=900)
            assert browser.value("document.documentElement.scrollWidth") <= width, name
            assert browser.value("[...document.images].every(image => image.naturalWidth > 0)"), name
    assert "less-memory.html" in browser.value(SEARCH)
    assert browser.errors == []
