"""The page in a real browser: no errors, values under the pointer, at the widths of a desk and of a phone."""

import json
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
    times = [{"parameters": name, "optimizer": "AvaGrad", "milliseconds": 1.0} for name in ("resnet50", "gpt2")]
    (folder / "steps.json").write_text(json.dumps({"about": {}, "rows": times}))
    (folder / "torn.jsonl").write_text('{"lr": 1, "va')
    return write_report(folder).page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def middle_of(browser: Browser, text: str) -> tuple[float, float]:
    """Bring the cell that says so into view; return where it is."""
    found = f"[...document.querySelectorAll('.cell')].find(c => c.dataset.text.includes({text!r}))"
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
    assert browser.value("document.getElementById('hover').hidden")
    for text, shown in (
        ("Adam\\nlr 0.1, eps 0.0001", "Adam\nlr 0.1, eps 0.0001\nvalue: 1.0001"),
        ("AvaGrad\\nlr 10, eps 10", "AvaGrad\nlr 10, eps 10\ndiverged"),
    ):
        x, y = middle_of(browser, text.replace("\\n", "\n"))
        (browser.touch if width < 600 else browser.point_at)(x, y)
        assert not browser.value("document.getElementById('hover').hidden")
        assert browser.value("document.getElementById('hover').textContent") == shown
        where = "document.getElementById('hover').getBoundingClientRect()"
        left, right = browser.value(f"[{where}.left, {where}.right]")
        assert left >= 0
        assert right <= width
    browser.point_at(2, 2)
    assert browser.value("document.getElementById('hover').hidden")
    assert browser.errors == []


def rows_of(browser: Browser, column: int) -> list[str]:
    """Return a column of the table of runs, without the rows that are hidden."""
    rows = "[...document.querySelectorAll('.rows:has(input)')][0].querySelectorAll('tbody tr')"
    found = browser.value(f"[...{rows}].filter(r => !r.hidden).map(r => r.cells[{column}].textContent)")
    assert isinstance(found, list)
    return found


def test_runs_can_be_sorted_and_filtered(browser: Browser, tmp_path: Path) -> None:
    for lr, optimizer in ((10.0, "adam"), (0.5, "sgd"), (2.0, "adam"), (1e-3, "avagrad")):
        run_folder(tmp_path / f"{optimizer}-{lr}", [row(1)], lr=lr, optimizer=optimizer)
    browser.errors.clear()
    browser.open(write_report(tmp_path).page, width=1400, height=900)
    heads = "[...document.querySelectorAll('.rows:has(input)')][0].querySelectorAll('th')"
    assert browser.value(f"[...{heads}].map(h => h.textContent)")[:4] == ["task", "method", "lr", "eps"]
    browser.value(f"{heads}[2].click()")
    assert rows_of(browser, 2) == ["0.001", "0.5", "2.0", "10.0"]
    browser.value(f"{heads}[2].click()")
    assert rows_of(browser, 2) == ["10.0", "2.0", "0.5", "0.001"]
    browser.value(f"{heads}[1].click()")
    assert rows_of(browser, 1) == ["Adam", "Adam", "AvaGrad", "SGD"]
    field = "document.querySelector('.rows input')"
    browser.value(f"{field}.value = 'adam 10'; {field}.dispatchEvent(new Event('input'))")
    assert rows_of(browser, 2) == ["10.0"]
    browser.value(f"{field}.value = ''; {field}.dispatchEvent(new Event('input'))")
    assert len(rows_of(browser, 2)) == 4
    assert browser.errors == []


@pytest.mark.parametrize("width", [1400, 375])
def test_text_on_the_page_is_at_least_8_pixels_high(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width, height=900)
    scale = "Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b)"
    size = f"{scale} * parseFloat(getComputedStyle(t).fontSize)"
    sizes = browser.value(f"[...document.querySelectorAll('svg text')].filter(t => t.textContent).map(t => {size})")
    assert min(sizes) >= 8
