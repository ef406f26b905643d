"""The page in a real browser: no errors, values under the pointer, at the widths of a desk and of a phone."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from test_page import HOSTILE, row, run_folder

from avagrad.report.page import write_report
from avagrad.tune.records import Record, write_records

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

LR, EPS = (0.01, 0.1, 1.0, 10.0), (1e-8, 1e-4, 0.1, 1.0, 10.0)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("adam", "avagrad"):
        records = [
            Record(lr, eps, value=math.inf if lr > 1 and eps > 1 else 10 * lr + eps, diverged_at=None)
            for lr in LR
            for eps in EPS
        ]
        write_records(folder / f"{name}.jsonl", records)
    run_folder(folder / "run", [row(1), row(2)])
    run_folder(folder / "hostile", [row(1)], optimizer=HOSTILE, task=HOSTILE)
    (folder / "torn.jsonl").write_text('{"lr": 1, "va')
    return write_report(folder).page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def middle_of(browser: Browser, told: str) -> tuple[float, float]:
    """Bring the cell that says so into view; return where it is."""
    found = f"[...document.querySelectorAll('.cell')].find(c => c.dataset.told.includes({told!r}))"
    browser.value(f"{found}.scrollIntoView({{block: 'center'}})")
    browser.value("new Promise(done => setTimeout(done, 200))")  # until the page knows that it was scrolled
    x, y = browser.value(
        f"(() => {{ const r = {found}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
    )
    return x, y


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (375, 700)], ids=["desk", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_renders_without_errors_and_fits(browser: Browser, page: Path, width: int, height: int, dark: bool) -> None:
    browser.errors.clear()
    browser.open(page, width=width, height=height, dark=dark)
    assert browser.errors == []
    assert browser.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    assert browser.value("document.querySelectorAll('svg .cell').length") == 2 * len(LR) * len(EPS)
    assert browser.value("typeof window.alert === 'function' && document.scripts.length") == 1
    shown = browser.value("getComputedStyle(document.body).backgroundColor")
    assert shown == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
    widths = browser.value("[...document.querySelectorAll('.panels svg')].map(s => s.getBoundingClientRect().width)")
    assert min(widths) > 250


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (375, 700)], ids=["desk", "phone"])
def test_the_pointer_over_a_cell_shows_its_values(browser: Browser, page: Path, width: int, height: int) -> None:
    browser.open(page, width=width, height=height)
    assert browser.value("document.getElementById('told').hidden")
    for told, shown in (
        ("Adam\\nlr 0.1, eps 0.0001", "Adam\nlr 0.1, eps 0.0001\nvalue: 1.0001"),
        ("AvaGrad\\nlr 10, eps 10", "AvaGrad\nlr 10, eps 10\ndiverged"),
    ):
        x, y = middle_of(browser, told.replace("\\n", "\n"))
        (browser.touch if width < 600 else browser.point_at)(x, y)
        assert not browser.value("document.getElementById('told').hidden")
        assert browser.value("document.getElementById('told').textContent") == shown
        left, right = browser.value(
            "(() => { const r = document.getElementById('told').getBoundingClientRect(); return [r.left, r.right]; })()"
        )
        assert left >= 0
        assert right <= width
    browser.point_at(2, 2)
    assert browser.value("document.getElementById('told').hidden")
    assert browser.errors == []
