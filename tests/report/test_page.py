"""The page: whatever a folder holds, it is one file that shows it."""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import avagrad.report.page as page_module
from avagrad.cli import app
from avagrad.report.drawing import new_figure
from avagrad.report.figures import FIGURES
from avagrad.report.page import Report, write_report
from avagrad.report.reading import Collection, collect
from avagrad.tune.records import Record, write_records

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'"& $\\frac{ \x00 \ud800 {{x}} @TITLE@'


class Read(HTMLParser):
    """The tags, the texts and the links of a page, as a browser would find them."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def run_folder(place: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """Write the folder of a run that is finished."""
    place.mkdir(parents=True)
    config = {"task": "digits", "optimizer": "adam", "lr": 0.1, "eps": 1e-8, "seed": 0, "epochs": len(rows)} | config
    about = {"versions": {"torch": "2.13.0"}, "commit": "abc"}
    (place / "config.json").write_text(json.dumps({"config": config, "about": about}))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = {"validation": {"error": 3.0}, "test": {"error": 4.0}}
    (place / "result.json").write_text(json.dumps({"status": "finished", **ends}))
    return place


def row(epoch: int, **values: Any) -> dict[str, Any]:
    return {"step": epoch, "epoch": epoch, "loss": 1 / epoch, "error": 10 / epoch, "lr": 0.1, "gamma": 1.0} | values


def made(folder: Path) -> tuple[Report, Read]:
    report = write_report(folder)
    return report, Read(report.page)


def test_an_empty_folder_has_a_page_that_says_so(tmp_path: Path) -> None:
    report, page = made(tmp_path)
    assert "nothing to show" in page.text
    assert report.files == ()
    assert "figure" not in page.tags


def test_one_run_is_shown_with_its_settings_versions_and_commit(tmp_path: Path) -> None:
    run_folder(tmp_path / "only one", [row(1)])
    report, page = made(tmp_path)
    for text in ("only one", "Adam", "finished", '"torch": "2.13.0"', '"commit": "abc"', '"lr": 0.1'):
        assert text in page.text, text
    cells = ["digits", "Adam", "0.1", "1e-08", "0", "finished", "3.00", "4.00"]
    assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}<td><a " in report.page.read_text()
    assert "only%20one" in page.links
    assert {path.name for path in report.files} == {
        "table-1.md", "table-1.csv", "learning-curves-1.png", "learning-curves-1.svg",
    }  # fmt: skip
    assert (report.figures / "learning-curves-1.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("records", "note"),
    [
        ([Record(0.1, 1e-8, value=3.25)], "1 of 1 cells was run. The best is lr 0.1, eps 1e-08: 3.25"),
        ([Record(0.1, 1e-8, value=math.inf, diverged_at=3)], "All of them diverged"),
        (
            [Record(lr, eps, value=math.inf) for lr in (0.1, 1.0) for eps in (0.1, 1.0)],
            "All 4 cells of the grid diverged or failed",
        ),
        ([Record(lr, None, value=lr) for lr in (0.1, 1.0)], "mine.jsonl"),
    ],
)
def test_few_cells_and_cells_that_all_diverged(tmp_path: Path, records: list[Record], note: str) -> None:
    write_records(tmp_path / "mine.jsonl", records)
    _, page = made(tmp_path)
    assert note in page.text


def test_what_cannot_be_read_is_listed_and_does_not_stop_the_page(tmp_path: Path) -> None:
    run_folder(tmp_path / "good", [row(1), row(2)])
    run_folder(tmp_path / "torn", [row(1)]).joinpath("config.json").write_text('{"config": {')
    (tmp_path / "bad.jsonl").write_text('{"lr": 1, "value": 2}\nnot a record\n')
    _, page = made(tmp_path)
    after = page.text.partition("What could not be read or drawn")[2]
    assert "torn/config.json" in after
    assert "bad.jsonl: line 2" in after
    assert "good" in page.text


def test_text_from_records_is_shown_and_never_run(tmp_path: Path) -> None:
    name = "<b>&'x'$"
    run_folder(tmp_path / name, [row(1)], optimizer=HOSTILE, task=HOSTILE, task_options={"model": HOSTILE})
    config = {"task": HOSTILE, "optimizer": HOSTILE, "optimizer_options": {HOSTILE: HOSTILE}}
    (tmp_path / "map").mkdir()
    (tmp_path / "map" / "config.json").write_text(json.dumps({"config": config, "about": {HOSTILE: HOSTILE}}))
    grid = [Record(lr, eps, value=lr + eps, facts={HOSTILE: HOSTILE}) for lr in (0.1, 1.0) for eps in (0.1, 1.0)]
    write_records(tmp_path / "map" / "records.jsonl", grid)
    steps = {"parameters": HOSTILE, "optimizer": HOSTILE, "milliseconds": 1}
    (tmp_path / "steps.json").write_text(json.dumps({"about": {HOSTILE: HOSTILE}, "rows": [steps]}))
    _, page = made(tmp_path)
    assert page.tags.count("script") == 1, "its own"
    assert "img" not in page.tags
    assert page.handlers == []
    assert "<script>alert(1)</script>" in page.text, "shown as text"
    assert name in page.text
    inside = [link for link in page.links if not link.startswith(("#", "data:image/png;base64,"))]
    assert all(re.fullmatch(r"[A-Za-z0-9_./%~-]+", link) for link in inside), inside


def test_a_drawing_on_the_page_says_what_its_file_says(tmp_path: Path) -> None:
    """Every text of it, to the last digit: labels of axes, values of cells, the slope."""
    lrs, epses = (0.001, 0.012345, 0.5, 2.0), (1e-8, 0.00321, 0.15, 1.25)
    write_records(tmp_path / "mine.jsonl", [Record(lr, eps, value=lr + 1.2345 * eps) for lr in lrs for eps in epses])
    report = write_report(tmp_path)
    tag = re.compile(r"<text[^>]*>([^<]*)</text>")
    texts = tag.findall((report.figures / "heat-maps-1.svg").read_text())
    assert {"0.0123", "0.00321", "1.25", "value; colours by value"} <= set(texts)
    assert tag.findall(report.page.read_text())[: len(texts)] == texts


def test_the_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    run_folder(tmp_path / "one", [row(1), row(2)])
    _, page = made(tmp_path)
    assert not [link for link in page.links if "//" in link]
    assert "default-src 'none'" in (tmp_path / "report.html").read_text()


def test_what_has_no_room_as_a_drawing_is_a_picture_and_then_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less than a fiftieth of the real limits, and maps that are a fiftieth of the paper's."""
    for name, limit in (("_DRAWINGS", 40_000), ("_PICTURES", 100_000), ("_SETTINGS", 10_000)):
        monkeypatch.setattr(page_module, name, limit)
    for i in range(8):
        records = [Record(lr, eps, value=lr / eps + i) for lr in (1.0, 2.0, 3.0) for eps in (1.0, 2.0, 3.0)]
        write_records(tmp_path / f"map{i}.jsonl", records)
    for i in range(20):
        run_folder(tmp_path / f"run{i}", [], seed=i, remark="x" * 2000)
    report, page = made(tmp_path)
    assert report.page.stat().st_size < 5_000_000 / 50 + 40_000, "what the page itself takes is not scaled"
    assert "svg" in page.tags
    assert "img" in page.tags
    assert "The page is large already" in page.text
    assert all(f"map{i}" in page.text for i in range(8))
    assert all(f"run{i}" in page.text for i in range(20))


def test_of_a_million_rows_some_thousand_are_drawn(tmp_path: Path) -> None:
    place = run_folder(tmp_path / "long", [])
    line = '{"step": %d, "epoch": %d, "loss": 0.5, "error": 3.25, "lr": 0.1, "gamma": 1.5, "seconds": 12.5}\n'
    (place / "metrics.jsonl").write_text("".join(line % (i, i) for i in range(1, 1_000_001)))
    report, _ = made(tmp_path)
    assert 1000 <= len(collect(tmp_path).runs[0].rows) <= 2002
    assert report.page.stat().st_size < 500_000


def test_a_second_page_replaces_the_first_and_is_the_same(tmp_path: Path) -> None:
    run_folder(tmp_path / "one", [row(1), row(2)])
    first = write_report(tmp_path)
    before = {path: path.read_bytes() for path in (first.page, *first.files)}
    stale, others = first.figures / "heat-maps-7.png", first.figures / "mine.txt"
    stale.write_text("of an earlier page")
    others.write_text("somebody else's")
    second = write_report(tmp_path)
    assert {path: path.read_bytes() for path in (second.page, *second.files)} == before
    assert not stale.exists()
    assert others.exists()


def test_the_page_can_be_elsewhere_and_its_links_lead_back(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "one", [row(1)])
    report = write_report(tmp_path / "runs", tmp_path / "pages" / "mine.html")
    assert report.figures == tmp_path / "pages" / "mine-files"
    for link in Read(report.page).links:
        assert link.startswith(("#", "data:image/png")) or (report.page.parent / link).exists(), link
    (tmp_path / "link.html").symlink_to(report.page)
    for place in ("", "page.pdf", "link.html"):
        with pytest.raises(ValueError, match="must be a file to write the page to"):
            write_report(tmp_path / "runs", tmp_path / place)


def test_the_command_says_what_it_found_and_what_it_could_not_read(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        '{"lr": 0.1, "eps": 1, "value": 3}\n{"lr": 1, "eps": 2, "value": 4}\n'
        '{"learning_rate": 1, "eps": 1, "value": 0}\nnonsense\n'
    )
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "problem: mine.jsonl: line 4" in done.stderr
    assert "1 of 3 records have no lr, and are left out" in done.stderr
    assert "lr 0.1, eps 1: 3" in done.stdout
    assert f"the page is {tmp_path / 'report.html'}" in done.stdout
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "empty")])
    assert (done.exit_code, "nothing to show was found" in done.stderr) == (1, True)


@pytest.mark.parametrize("url", ["postgresql://me:secret@host/db", "sqlite:///my.db"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_database_is_exported_first_and_its_password_stays_hidden(url: str, more: list[str]) -> None:
    result = CliRunner().invoke(app, ["report", url, *more])
    assert isinstance(result.exception, ValueError)
    assert f"folder is {url.replace('secret', '***')!r}, a database: " in str(result.exception)
    assert "run `avagrad study export` first" in str(result.exception)
    assert "secret" not in str(result.exception)


def test_ties_are_counted(tmp_path: Path) -> None:
    write_records(tmp_path / "mine.jsonl", [Record(lr, eps, value=1.0) for lr in (0.1, 1.0) for eps in (0.1, 1.0)])
    assert "4 cells share the best value" in made(tmp_path)[1].text


def test_ten_thousand_points_off_a_grid_take_little_memory(tmp_path: Path) -> None:
    """A random search: no lr and no eps is there twice, and a map of them all would have 100 million cells."""
    draw = random.Random(0)
    points = [(10 ** draw.uniform(-4, 0), 10 ** draw.uniform(-8, 0)) for _ in range(10_000)]
    write_records(tmp_path / "random.jsonl", [Record(lr, eps, value=abs(math.log10(lr) + 2)) for lr, eps in points])
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from avagrad.report.page import write_report\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_report(sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 200 * 1024, "kilobytes"
    page = (tmp_path / "report.html").read_text()
    assert 100 < page.count('class="cell"') <= 24 * 24
    assert len(page) < 500_000


class Fake:
    """A figure that somebody adds: a name, three functions, and its place in the list."""

    NAME, CHAPTER, NOTE = "fake", "A chapter of its own", "How to read it."

    @dataclass
    class Numbers:
        title: str

    def numbers(self, collection: Collection) -> list[Numbers]:
        return [self.Numbers(f"a drawing of {len(collection.runs)} runs")]

    def caption(self, drawn: Numbers) -> str:
        return "It shows nothing."

    def draw(self, drawn: Numbers) -> Figure:
        return new_figure(4, 3, drawn.title)


def test_a_figure_that_is_added_to_the_list_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "FIGURES", [*FIGURES, Fake()])
    run_folder(tmp_path / "run", [row(1)])
    report, page = made(tmp_path)
    for text in ("A chapter of its own", "How to read it.", "a drawing of 1 runs", "It shows nothing."):
        assert text in page.text, text
    assert {"fake-1.png", "fake-1.svg"} <= {path.name for path in report.files}


def test_a_figure_that_cannot_be_drawn_is_a_problem_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Fake):
        def draw(self, drawn: Fake.Numbers) -> Figure:
            raise ZeroDivisionError("of all things")

    monkeypatch.setattr(page_module, "FIGURES", [Broken(), *FIGURES])
    run_folder(tmp_path / "run", [row(1)])
    report, page = made(tmp_path)
    assert [str(each) for each in report.problems] == [
        "fake, a drawing of 1 runs: it cannot be drawn (ZeroDivisionError: of all things)."
    ]
    assert "of all things" in page.text
    assert "learning-curves-1.png" in {path.name for path in report.files}


def test_names_say_what_differs_and_never_a_folder(tmp_path: Path) -> None:
    config = {"task": "digits", "optimizer": "avastep", "optimizer_options": {"decoupled_weight_decay": False}}
    for folder, options, seeds in (("one", {}, 1), ("two", {"norm": 1}, 1), ("three", {}, 2), ("four", {}, 2)):
        given = config | {"optimizer_options": {**config["optimizer_options"], **options}}  # type: ignore[dict-item]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"config": given, "about": {}}))
        points = [(lr, eps, seed) for lr in (0.1, 1.0) for eps in (0.1, 1.0) for seed in range(seeds)]
        records = [Record(lr, eps, seed, value=lr + eps) for lr, eps, seed in points]
        write_records(tmp_path / folder / "records.jsonl", records)
    report, page = made(tmp_path)
    before = page.text.partition("lr x epstrials")[0]
    for name in ("AvaStep, 1 seed", "AvaStep, norm=1", "AvaStep, 2 seeds (1)", "AvaStep, 2 seeds (2)"):
        assert f"{name}: " in before, name
    assert "<h2>lr and eps</h2>" in report.page.read_text()
    figures = before.partition("A cell is a training")[2]
    assert not re.search("one/|two|three|four|decoupled", figures.replace("two lines", "").replace("Two lines", ""))


def test_the_document_shows_what_its_example_prints() -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    example, printed = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == printed.split(), done.stderr[-2000:]


def test_one_study_has_a_page_of_its_own(tmp_path: Path) -> None:
    for name in ("mine", "unrelated"):
        write_records(tmp_path / f"{name}.jsonl", [Record(lr, 0.1, 0, value=lr) for lr in (0.1, 1.0)])
    report = write_report(tmp_path / "mine.jsonl")
    assert (report.page, report.figures) == (tmp_path / "mine.html", tmp_path / "mine-files")
    text = report.page.read_text()
    assert "mine" in text
    assert "unrelated" not in text
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ValueError, match=r"text.txt', which is a file, but must be a folder or a \.journal or \.jsonl"):
        write_report(tmp_path / "text.txt")
