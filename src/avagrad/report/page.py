"""One page about a folder: a single HTML file that needs no network.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as place:
...     _ = Path(place, "mine.jsonl").write_text('{"lr": 0.1, "eps": 1, "value": 3}' + chr(10))
...     report = write_report(place)
...     report.page.name, "mine" in report.page.read_text()
('report.html', True)

All text from records is escaped, and the page runs no script but its own.
"""

import base64
import hashlib
import html
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from avagrad import __version__
from avagrad.files import write_atomic
from avagrad.report.comparable import task_name, unit_of
from avagrad.report.drawing import FAINT, INK, PAPER, rendered
from avagrad.report.figures import FIGURES, FigureModule
from avagrad.report.findings import findings
from avagrad.report.reading import OUTPUT, Collection, Problem, Run, Sweep, collect
from avagrad.report.table import Table
from avagrad.report.values import rounded
from avagrad.tune.separability import counted

__all__ = ["Report", "inline_svg", "write_report"]

T = TypeVar("T")

PAGE = "report.html"
# The page is to be less than 5 MB: so many bytes of drawings, then of pictures, then links; and so many of settings.
_DRAWINGS, _PICTURES, _SETTINGS = 3_700_000, 4_000_000, 500_000
_LISTED = 2000  # runs, sweeps and problems
_FINDINGS = 6  # that are shown before the others are folded away
_COLOURS = {PAPER: "none", INK: "var(--ink)", FAINT: "var(--faint)"}


@dataclass(frozen=True)
class Report:
    """What was written, and what it says.

    >>> Report(Path("report.html"), ("Adam's best lr moves.",), Path("report-files"), ()).findings
    ("Adam's best lr moves.",)
    """

    page: Path
    findings: tuple[str, ...]
    figures: Path  # the folder of the figures and tables, next to the page
    files: tuple[Path, ...]
    problems: tuple[Problem, ...] = ()  # what could not be read or drawn


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Report:
    """Write the page of a folder, and its figures and tables into a folder next to it.

    ``out`` is the page's file, by default ``report.html`` in the folder; for a study or a file of records alone, a file
    of its name next to it. What cannot be read or drawn is listed at the end of the page.

    >>> write_report("nowhere")
    Traceback (most recent call last):
    ...
    ValueError: folder is 'nowhere', which does not exist, but must be a folder or a .journal or .jsonl file.
    """
    collection = collect(folder)
    is_file = Path(folder).is_file()
    usual = Path(folder).with_suffix(".html") if is_file else Path(folder, PAGE)
    page = usual if out is None else Path(out)
    if page.suffix.lower() not in (".html", ".htm") or (page.exists() and (page.is_symlink() or not page.is_file())):
        raise ValueError(f"out is {str(page)!r}, but must be a file to write the page to, such as report.html.")
    figures = page.with_name(OUTPUT if page.name == PAGE else f"{page.stem}-files")
    try:
        figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"nothing can be written to {str(page.parent)!r} ({error}): name another place by out."
        raise OSError(why) from error
    problems: list[Problem] = []
    parts = list(_parts(collection, problems))
    made = {name: content for part in parts for name, content in part.files.items()}
    ours = re.compile(rf"({'|'.join(figure.NAME for figure in FIGURES)})(-[a-z0-9-]+)?\.(png|svg|md|csv)")
    for name in os.listdir(figures):  # of an earlier page
        if name not in made and ours.fullmatch(name):
            (figures / name).unlink()
    for name, held in made.items():
        write_atomic(figures / name, lambda file, held=held: file.write(held))  # type: ignore[misc]
    lines = tuple(_try("findings", problems, partial(findings, collection)) or ())
    collection = replace(collection, problems=(*collection.problems, *problems))
    read = Path(folder).parent if is_file else Path(folder)
    to_files = Path(os.path.relpath(read.resolve(), page.resolve().parent))
    text = _Page(collection, parts, lines, to_files, Path(figures.name)).text()
    write_atomic(page, lambda file: file.write(text.encode()))
    return Report(page, lines, figures, tuple(figures / name for name in made), collection.problems)


@dataclass(frozen=True)
class _Part:
    """A figure or a table, drawn."""

    figure: FigureModule
    title: str
    caption: str
    name: str
    table: Table | None
    files: Mapping[str, bytes]
    hover: Mapping[str, Sequence[str]] = field(default_factory=dict)
    origins: Sequence[Run | Sweep] = ()


def _parts(collection: Collection, problems: list[Problem]) -> Iterator[_Part]:
    """Draw all figures. One that cannot be drawn becomes a problem, so that the others are on the page."""
    for figure in FIGURES:
        found = _try(figure.NAME, problems, partial(figure.numbers, collection)) or ()
        for place, numbers in enumerate(found, 1):
            part = _try(f"{figure.NAME}, {numbers.title}", problems, partial(_part, figure, numbers, place))
            if part is not None:
                yield part


def _try(what: str, problems: list[Problem], work: Callable[[], T]) -> T | None:
    try:
        return work()
    except Exception as error:
        problems.append(Problem(what, f"it cannot be drawn ({type(error).__name__}: {error})."))
        return None


def _part(figure: FigureModule, numbers: Any, place: int) -> _Part:
    drawn, caption = figure.draw(numbers), figure.caption(numbers)
    if isinstance(drawn, Table):
        texts = {"md": drawn.markdown(), "csv": drawn.csv()}
        made = {f"{figure.NAME}.{kind}": text.encode("utf-8", "replace") for kind, text in texts.items()}
        return _Part(figure, numbers.title, caption, figure.NAME, drawn, made, origins=getattr(numbers, "origins", ()))
    name = f"{figure.NAME}-{place}"
    made = {f"{name}.{kind}": rendered(drawn, kind) for kind in ("png", "svg")}
    return _Part(figure, numbers.title, caption, name, None, made, getattr(numbers, "hover", {}))


class _Page:
    """Puts the page together."""

    def __init__(
        self, collection: Collection, parts: Sequence[_Part], lines: Sequence[str], to_files: Path, figures: Path
    ) -> None:
        self.collection, self.parts, self.lines = collection, parts, lines
        self.to_files, self.figures = to_files, figures
        self.size = 0  # of the drawings so far
        self.drawings = 0
        self.settings = 0  # their size

    def text(self) -> str:
        source = files("avagrad.report")
        script = (source / "page.js").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        parts = {
            "TITLE": _text(f"{self.collection.folder}: AvaGrad report"),
            "SCRIPT_HASH": digest,
            "SCRIPT": script,
            "BODY": "\n".join(self.sections()),
        }
        template = (source / "page.html").read_text(encoding="utf-8")
        return re.sub("@([A-Z_]+)@", lambda found: parts[found[1]], template)

    def sections(self) -> Iterator[str]:
        held = self.collection
        yield f"<h1>{_text(held.folder)}</h1>"
        yield f'<p class="quiet">{_text(held.summary())}. avagrad {_text(__version__)}.</p>'
        if not (held.runs or held.sweeps or held.synthetics or held.step_times):
            yield "<p>There is nothing to show here yet: no runs, no records of lr and eps, no measurements.</p>"
        yield from self.findings()
        for chapter, parts in itertools.groupby(self.parts, lambda part: part.figure.CHAPTER):
            yield f"<h2>{_text(chapter)}</h2>"
            for figure, same in itertools.groupby(parts, lambda part: part.figure):
                if figure.NOTE:
                    yield f"<p>{_text(figure.NOTE)}</p>"
                for title, group in itertools.groupby(same, lambda part: part.title):
                    yield self.group(title, list(group))
        yield from self.runs()
        if held.problems:
            yield "<h2>What could not be read or drawn, and points that have failed</h2>"
            yield f"<ul>{''.join(f'<li>{_text(problem)}</li>' for problem in held.problems[:_LISTED])}</ul>"
            yield _more(held.problems)

    def findings(self) -> Iterator[str]:
        items = [f"<li>{_text(line)}</li>" for line in self.lines]
        first, rest = (f'<ul class="findings">{"".join(part)}</ul>' for part in (items[:_FINDINGS], items[_FINDINGS:]))
        more = len(items) - _FINDINGS
        yield first if items else ""
        yield f"<details><summary>{counted(more, 'more finding')}</summary>{rest}</details>" if more > 0 else ""

    def group(self, title: str, parts: Sequence[_Part]) -> str:
        """Return the figures of one title side by side, or a table."""
        heading = f"<h3>{_text(title)}</h3>" if title else ""
        tables = [self.table(part, part.table) for part in parts if part.table is not None]
        panels = [self.panel(part) for part in parts if part.table is None]
        kind = "panels maps" if any(part.hover for part in parts) else "panels"
        return heading + "".join(tables) + (f'<div class="{kind}">{"".join(panels)}</div>' if panels else "")

    def panel(self, part: _Part) -> str:
        kind = "map" if part.hover else "wide"
        return (
            f'<figure><div class="{kind}">{self.drawing(part)}</div>'
            f"<figcaption>{_text(part.caption)} {self.links(part)}</figcaption></figure>"
        )

    def links(self, part: _Part) -> str:
        links = (self.link(self.figures / name, name.rpartition(".")[2].upper()) for name in part.files)
        return f'<span class="quiet">{", ".join(links)}</span>'

    def drawing(self, part: _Part) -> str:
        """Return a drawing, or a picture without hover values once the page is large, or a link."""
        self.drawings += 1
        drawn = inline_svg(part.files[f"{part.name}.svg"].decode(), f"d{self.drawings}", part.hover)
        if self.size + len(drawn) > _DRAWINGS:
            picture = base64.b64encode(part.files[f"{part.name}.png"]).decode()
            drawn = f'<img alt="" src="data:image/png;base64,{picture}">'
        if self.size + len(drawn) > _PICTURES:
            return f"<p>The page is large already: see {self.link(self.figures / f'{part.name}.png', 'the file')}.</p>"
        self.size += len(drawn)
        return drawn

    def table(self, part: _Part, table: Table) -> str:
        rows = [[f"<b>{_text(cell.text)}</b>" if cell.bold else _text(cell.text) for cell in row] for row in table.rows]
        columns = (*table.columns, *(("files", "settings") if part.origins else ()))
        for row, thing in zip(rows, part.origins, strict=False):
            row += self.origin(thing)
        shown = _table(columns, rows[:_LISTED], filters=bool(part.origins))
        return f"{shown}{_more(rows)}<p>{_text(part.caption)} {self.links(part)}</p>"

    def runs(self) -> Iterator[str]:
        columns = ("task", "method", "lr", "eps", "seed", "status", "validation", "test", "files", "settings")
        rows = []
        for run in self.collection.runs[:_LISTED]:
            tuned = ["" if run.config.get(name) is None else run.config[name] for name in ("lr", "eps", "seed")]
            errors = [rounded(error, unit_of(run.task)) for error in (run.validation, run.test)]
            cells = [task_name(run.config), run.title, *tuned, run.status, *errors]
            rows.append([*map(_text, cells), *self.origin(run)])
        if rows:
            yield f"<h2>Runs ({len(self.collection.runs)})</h2>{_table(columns, rows, filters=True)}"
            yield _more(self.collection.runs)

    def origin(self, thing: Run | Sweep) -> tuple[str, str]:
        """Return a link to the files, and the settings, folded; once there are many settings, the link alone."""
        parts = {name: getattr(thing, name, None) for name in ("config", "search", "result", "about")}
        held: dict[str, Any] = {name: part for name, part in parts.items() if part}
        if "points" in held.get("config", {}):
            held["config"] = {key: value for key, value in held["config"].items() if key != "points"}
        shown = _text(json.dumps(held, indent=1, default=str)[:20_000])
        self.settings += len(shown)
        settings = f"<details><summary>show</summary><pre>{shown}</pre></details>" if self.settings < _SETTINGS else ""
        return self.link(self.to_files / thing.place, thing.place), settings

    def link(self, to: Path, text: str) -> str:
        return f'<a href="{html.escape(quote(to.as_posix().encode("utf-8", "surrogateescape")))}">{_text(text)}</a>'


def inline_svg(svg: str, prefix: str, hover: Mapping[str, Sequence[str]]) -> str:
    r"""Return an SVG as a part of a page: in the page's colours, small, its ids its own.

    ``hover`` has texts for the shapes of a group, by its id, in their order.

    >>> svg = '<?xml?><svg width="9pt"><g id="a"><path d="M 1.23 2" style="fill: #1a1a1a"/></g><text>1.23</text></svg>'
    >>> print(inline_svg(svg, "p", {"a": ["<1>"]}).replace("><", ">\n<"))
    <svg role="img" style="--width: 9px">
    <g id="p-a">
    <path class="cell" data-text="&lt;1&gt;" d="M 1.2 2" style="fill: var(--ink)"/>
    </g>
    <text>1.23</text>
    </svg>
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    # Where a page is narrow, a drawing with small text is as wide as it was drawn, and is moved with a finger.
    size = r'(<svg[^>]*?) width="([\d.]*)pt"( height="[^"]*")?'
    svg = re.sub(size, r'\1 role="img" style="--width: \2px"', svg, count=1)
    # In tags alone: a text may hold a number, too.
    svg = re.sub("<[^>]*>", lambda tag: re.sub(r"font-family: [^;\"]*;? ?|(?<=\d\.\d)\d+", "", tag[0]), svg)
    svg = re.sub(r"\s+", " ", svg).replace("> <", "><").replace(' "', '"')
    corners = r'"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z"'  # of a rectangle
    svg = re.sub(corners, r'"M\1 \2H\3V\4H\1z"', svg)
    for group, texts in hover.items():
        before, start, rest = svg.partition(f'<g id="{group}">')
        shapes, end, after = rest.partition("</g>")
        marks = iter([f'<path class="cell" data-text="{_text(text)}" ' for text in texts])
        svg = before + start + re.sub("<path ", lambda _, marks=marks: next(marks), shapes) + end + after  # type: ignore[misc]
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\1{prefix}-", svg)
    return re.sub("|".join(_COLOURS), lambda found: _COLOURS[found[0]], svg)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], filters: bool = False) -> str:
    """Return a table whose columns can be sorted, from cells that are HTML already; ``filters`` adds a field."""
    box = '<input type="search" placeholder="filter by words" aria-label="filter the rows">' if filters else ""
    head = "".join(f'<th tabindex="0">{_text(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="rows">{box}<div class="wide">{table}</div></div>'


def _more(things: Sequence[object]) -> str:
    return f"<p>And {len(things) - _LISTED} more.</p>" if len(things) > _LISTED else ""


def _text(value: object) -> str:
    """Return a text as HTML can hold it."""
    plain = str(value).encode("utf-8", "replace").decode()
    shown = (char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in plain)
    return html.escape("".join(shown))
