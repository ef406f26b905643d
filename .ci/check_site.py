"""The site holds together: nothing is fetched from another server, and all that it refers to is there.

python .ci/check_site.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's name and what it refers to."""
        held = dict(attrs)
        self.anchors |= {held.get("id") or "", held.get("name") or ""}
        if tag == "a" and held.get("href"):
            self.links.append(str(held["href"]))
        elif held.get(FETCHED.get(tag, "")):
            self.fetched.append(str(held[FETCHED[tag]]))


def problems(site: Path) -> list[str]:
    """Return what is wrong, a line for each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        found += [f"{here} fetches {link}" for link in page.fetched if urlsplit(link).netloc]
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{here} refers to {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{here} refers to {link}, which has no such anchor")
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wrong = problems(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{folder}: {len(files)} files, {size:.1f} MB")
    sys.exit("\n".join(wrong) or None)
