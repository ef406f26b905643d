"""One page that holds all that a folder has to show: a single HTML file that needs no network.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as place:
...     _ = Path(place, "mine.jsonl").write_text('{"lr": 0.1, "eps": 1, "value": 3}' + chr(10))
...     report = write_report(place)
...     report.page.name, "mine.jsonl" in report.page.read_text()
('report.html', True)

What a record holds is text, whoever wrote it: it is escaped, and the page runs no script but its own.
"""

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from avagrad import __version__
from avagrad.files import write_atomic
from avagrad.report.contents import Contents, Panel, Picture, contents
from avagrad.report.figures import LOOKS, rendered
from avagrad.report.reading import OUTPUT, Collection, Problem, Run, Sweep, collect
from avagrad.report.tables import Table

__all__ = ["Report", "inline_svg", "write_report"]

PAGE = "report.html"
# The page is to be less than 5 MB: drawings up to this many bytes stand in it, then pictures, then links; settings up
# to so many more.
_DRAWINGS, _PICTURES, _SETTINGS = 3_000_000, 4_000_000, 600_000
_LISTED = 500  # runs, and problems
_OURS = re.compile(r"(heat-maps|budgets|learning-curves|figure-1|step-times)-[a-z0-9-]+\.(png|svg)")
_COLOURS = {
    LOOKS["light"]["paper"]: "none",
    **{LOOKS["light"][name]: f"var(--{name})" for name in ("ink", "faint")},
}


@dataclass(frozen=True)
class Report:
    """What was written, and what it says.

    >>> Report(Path("report.html"), ("Adam's best lr moves.",), Path("report-files"), ()).findings
    ("Adam's best lr moves.",)
    """

    page: Path
    findings: tuple[str, ...]
    beside: Path  # the folder of
    files: tuple[Path, ...]
    problems: tuple[Problem, ...] = ()  # what could not be read


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Report:
    """Write the page of a folder, and its figures and tables into a folder beside it.

    ``out`` is the page's file, ``report.html`` in the folder by default. Whatever the folder holds that cannot be read
    is named at the end of the page.

    >>> write_report("nowhere")
    Traceback (most recent call last):
    ...
    ValueError: folder is 'nowhere', which does not exist, but must be a folder.
    """
    collection = collect(folder)
    page = Path(folder, PAGE) if out is None else Path(out)
    if page.suffix.lower() not in (".html", ".htm") or (page.exists() and (page.is_symlink() or not page.is_file())):
        raise ValueError(f"out is {str(page)!r}, but must be a file to write the page to, such as report.html.")
    beside = page.with_name(OUTPUT if page.name == PAGE else f"{page.stem}-files")
    try:
        beside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"nothing can be written to {str(page.parent)!r} ({error}): name another place by out."
        ) from error
    content = contents(collection)
    made = dict(_files(content))
    for name in os.listdir(beside):  # of an earlier page
        if name not in made and _OURS.fullmatch(name):
            (beside / name).unlink()
    for name, held in made.items():
        write_atomic(beside / name, lambda file, held=held: file.write(held))  # type: ignore[misc]
    to_files = Path(os.path.relpath(Path(folder).resolve(), page.resolve().parent))
    text = _Page(collection, content, made, to_files, Path(beside.name)).text()
    write_atomic(page, lambda file: file.write(text.encode()))
    files_made = tuple(beside / name for name in made)
    return Report(page, content.findings, beside, files_made, collection.problems)


def _files(content: Contents) -> Iterator[tuple[str, bytes]]:
    """Make the files beside the page, by their names."""
    for picture in content.pictures:
        figure = picture.draw()
        for kind in ("png", "svg"):
            yield f"{picture.name}.{kind}", rendered(figure, kind)
    for name, table in content.tables:
        for kind, text in (("md", table.markdown()), ("tex", table.latex()), ("csv", table.csv())):
            yield f"{name}.{kind}", text.encode("utf-8", "replace")


class _Page:
    """Puts the page together."""

    def __init__(
        self, collection: Collection, content: Contents, made: Mapping[str, bytes], to_files: Path, beside: Path
    ) -> None:
        self.collection, self.content, self.made = collection, content, made
        self.to_files, self.beside = to_files, beside
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

    def sections(self) -> Iterable[str]:
        held, content = self.collection, self.content
        yield f"<h1>{_text(held.folder)}</h1>"
        yield f'<p class="quiet">{_text(held.summary())}. avagrad {_text(__version__)}.</p>'
        if held.is_empty:
            yield "<p>There is nothing to show here yet: no runs, no records of lr and eps, no measurements.</p>"
        if content.findings:
            yield f'<ul class="findings">{"".join(f"<li>{_text(line)}</li>" for line in content.findings)}</ul>'
        for chapter in content.chapters:
            yield f"<h2>{_text(chapter.title)}</h2>"
            if chapter.note:
                yield f"<p>{_text(chapter.note)}</p>"
            for part in chapter.parts:
                yield self.picture(part) if isinstance(part, Picture) else self.table(*part)
        if held.runs:
            yield from self.runs(held.runs)
        if held.sweeps:
            yield from self.sweeps(held.sweeps)
        if held.problems:
            yield "<h2>What could not be read</h2>"
            yield f"<ul>{''.join(f'<li>{_text(problem)}</li>' for problem in held.problems[:_LISTED])}</ul>"
            yield self.more(held.problems)

    # --- figures ---

    def picture(self, picture: Picture) -> str:
        # A chart by itself may be wider than a phone, and is moved with a finger; a map is to be seen as a whole.
        kind = "wide" if len(picture.panels) == 1 and not picture.panels[0].hover else "map"
        panels = "".join(
            f'<figure><div class="{kind}">{self.drawing(picture, panel)}</div>'
            f"<figcaption>{_text(panel.caption)}</figcaption></figure>"
            for panel in picture.panels
        )
        links = ", ".join(self.link(self.beside / f"{picture.name}.{kind}", kind.upper()) for kind in ("png", "svg"))
        one = " one" if len(picture.panels) == 1 else ""
        return f'<h3>{_text(picture.title)}</h3><div class="panels{one}">{panels}</div><p class="quiet">{links}</p>'

    def drawing(self, picture: Picture, panel: Panel) -> str:
        """Return a panel as a drawing, or as a picture without hover values where the page becomes too large."""

        def file(kind: str) -> bytes:
            return self.made[f"{picture.name}.{kind}"] if panel.draw is None else rendered(panel.draw(), kind)

        if self.size < _DRAWINGS:
            self.drawings += 1
            drawn = inline_svg(file("svg").decode(), f"d{self.drawings}", panel.hover)
        elif self.size < _PICTURES:
            drawn = f'<img alt="" src="data:image/png;base64,{base64.b64encode(file("png")).decode()}">'
        else:
            return (
                f"<p>The page is large already: see {self.link(self.beside / f'{picture.name}.png', 'the file')}.</p>"
            )
        self.size += len(drawn)
        return drawn

    # --- tables ---

    def table(self, name: str, table: Table) -> str:
        links = ", ".join(self.link(self.beside / f"{name}.{kind}", kind) for kind in ("md", "tex", "csv"))
        return f"{_table(table)}<p>{_text(table.caption)}</p><p class='quiet'>{links}</p>"

    def runs(self, runs: Sequence[Run]) -> Iterable[str]:
        yield f"<h2>Runs ({len(runs)})</h2>"
        for run in runs[:_LISTED]:
            errors = [f"{name} {value:.4g}" for name, value in (("validation", run.validation), ("test", run.test))
                      if value is not None]  # fmt: skip
            where = [f"{name} {run.config[name]}" for name in ("lr", "eps") if run.config.get(name) is not None]
            line = ", ".join([f"{run.task}, {run.title}", *where, f"seed {run.seed}", run.status, *errors])
            yield self.details(run.place, line, {"config": run.config, "about": run.about, "result": run.result})
        yield self.more(runs)

    def sweeps(self, sweeps: Sequence[Sweep]) -> Iterable[str]:
        yield f"<h2>Records over lr and eps ({len(sweeps)})</h2>"
        for sweep in sweeps[:_LISTED]:
            config = {key: value for key, value in sweep.config.items() if key != "points"}
            line = f"{sweep.title}: {len(sweep.records)} records"
            yield self.details(sweep.place, line, {"config": config, "about": sweep.about})
        yield self.more(sweeps)

    def more(self, things: Sequence[object]) -> str:
        return f"<p>And {len(things) - _LISTED} more.</p>" if len(things) > _LISTED else ""

    def details(self, place: str, line: str, content: Mapping[str, Any]) -> str:
        """Return a line that opens to show settings; where there have been many of those, it leads to the files."""
        held = {key: value for key, value in content.items() if value}
        shown = _text(json.dumps(held, indent=1, default=str)[:20_000])
        self.settings += len(shown)
        settings = f"<pre>{shown}</pre>" if self.settings < _SETTINGS else ""
        link = self.link(self.to_files / place, "raw data")
        return f"<details><summary>{_text(place)}: {_text(line)}</summary>{link}{settings}</details>"

    def link(self, to: Path, text: str) -> str:
        return f'<a href="{html.escape(quote(to.as_posix().encode("utf-8", "surrogateescape")))}">{_text(text)}</a>'


def inline_svg(svg: str, prefix: str, hover: Mapping[str, str]) -> str:
    r"""Return an SVG as a part of a page: in the page's colours, small, its ids its own, its cells with what they hold.

    >>> svg = '<?xml?><svg width="9pt"><g id="a"><path d="M 1.23 2" style="fill: #1a1a1a"/></g><text>1.23</text></svg>'
    >>> print(inline_svg(svg, "p", {"a": "<1>"}).replace("><", ">\n<"))
    <svg role="img">
    <g class="cell" data-told="&lt;1&gt;">
    <path d="M 1.2 2" style="fill: var(--ink)"/>
    </g>
    <text>1.23</text>
    </svg>
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"( height="[^"]*")?', r'\1 role="img"', svg, count=1)
    # In tags alone: a text may hold a number, too.
    svg = re.sub("<[^>]*>", lambda tag: re.sub(r"font-family: [^;\"]*;? ?|(?<=\d\.\d)\d+", "", tag[0]), svg)
    svg = re.sub(r"\s+", " ", svg).replace("> <", "><").replace(' "', '"')
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{prefix}-", svg)

    def named(found: re.Match[str]) -> str:
        told = hover.get(found[1])
        return f'id="{prefix}-{found[1]}"' if told is None else f'class="cell" data-told="{_text(told)}"'

    svg = re.sub(r'\bid="([^"]*)"', named, svg)
    return re.sub("|".join(_COLOURS), lambda found: _COLOURS[found[0]], svg)


def _table(table: Table) -> str:
    def cell(content: Any) -> str:
        return f"<td>{f'<b>{_text(content.text)}</b>' if content.bold else _text(content.text)}</td>"

    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _text(value: object) -> str:
    """Return a text as HTML can hold it, whatever is in it."""
    plain = str(value).encode("utf-8", "replace").decode()
    return html.escape(
        "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in plain)
    )
