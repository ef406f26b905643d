"""What is added to mkdocs: pages from files outside docs/, and links to such files.

Documents are read on GitHub, too, so their links are those of the repository. A link that leaves docs/ leads to a page
if the file is one, else to the repository's address (``extra.repository`` in mkdocs.yml); where none is set, the path
is shown instead.
"""

import posixpath
import re
from pathlib import Path

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Files outside docs/ that have a page, and the page.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "examples/notebook.py": "notebook.md"}
LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages whose text is elsewhere."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = re.sub(r"  # (noqa|type: ignore)\b.*", "", text)  # for tools, not for readers
            text = jupytext.writes(jupytext.reads(text, fmt="py:percent"), fmt="md").partition("---\n\n")[2]
        files.append(File.generated(config, page, content=with_links(text, source, config.extra.get("repository"))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page that leave docs/."""
    if page.file.generated_by is not None:
        return markdown
    return with_links(markdown, f"docs/{page.file.src_uri}", config.extra.get("repository"))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make each figure a link to itself, so that it can be seen in full on a phone."""
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)


def with_links(text: str, source: str, repository: str | None) -> str:
    """Return a document with links that hold in the site; ``source`` is its path in the repository.

    >>> with_links("See [the rule](../src/a.py) and [how](../CONTRIBUTING.md#tests).", "docs/b.md", None)
    'See the rule (`src/a.py`) and [how](contributing.md#tests).'
    >>> with_links("See [the rule](../src/a.py).", "docs/b.md", "https://here.org/us")
    'See [the rule](https://here.org/us/blob/main/src/a.py).'
    """
    folder = posixpath.dirname(PAGES.get(source) or source.removeprefix("docs/"))

    def mended(link: re.Match[str]) -> str:
        words, target, anchor = link["words"], link["target"], link["anchor"] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
        if page is not None:
            return f"[{words}]({posixpath.relpath(page, folder or '.')}{anchor})"
        if repository:
            return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
        if path.endswith(words.strip("`")):
            return f"`{path}`"
        return f"{words}: `{path}`" if link.string[link.end() :].startswith(")") else f"{words} (`{path}`)"

    kept = FENCE.findall(text)
    parts = FENCE.split(text)
    changed = [LINK.sub(mended, part) for part in parts]
    return "".join(part + fence for part, fence in zip(changed, [*kept, ""], strict=True))
