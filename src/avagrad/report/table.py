"""A table, whatever is in it: as Markdown and CSV."""

import csv
import io
import re
from dataclasses import dataclass

__all__ = ["Table", "TableCell"]

_IN_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")


@dataclass(frozen=True)
class TableCell:
    """A text, and whether it is bold.

    >>> TableCell("3.64 (0.06)", bold=True).text
    '3.64 (0.06)'
    """

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Table:
    r"""Columns with their headings, rows of cells, and a caption. The first columns, ``left`` of them, are words.

    >>> table = Table(("method", "error, %"), ((TableCell("A_1"), TableCell("3.5", bold=True)),), "A|B")
    >>> print(table.markdown())
    A\|B
    <BLANKLINE>
    | method | error, % |
    | :--- | ---: |
    | A\_1 | **3.5** |
    >>> print(table.csv(), end="")
    method,"error, %"
    A_1,3.5
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    caption: str = ""
    left: int = 1

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"rows must have {len(self.columns)} cells each, as many as there are columns.")

    def markdown(self) -> str:
        r"""Return the table in Markdown, below its caption.

        >>> Table(("a\nb",), ()).markdown()
        '| a b |\n| :--- |'
        """
        lines = [
            [_markdown(name) for name in self.columns],
            [":---" if i < self.left else "---:" for i in range(len(self.columns))],
            *([_markdown(cell.text, "**" if cell.bold and cell.text else "") for cell in row] for row in self.rows),
        ]
        caption = [_markdown(self.caption), ""] if self.caption else []
        return "\n".join([*caption, *(f"| {' | '.join(line)} |" for line in lines)])

    def csv(self) -> str:
        r"""Return the table as CSV, without the caption. What a spreadsheet would take for a formula becomes a text.

        >>> Table(("a", "b"), ((TableCell("=1+1"), TableCell("-1.5")),)).csv()
        "a,b\r\n'=1+1,-1.5\r\n"
        """
        file = io.StringIO()
        lines = [self.columns, *([cell.text for cell in row] for row in self.rows)]
        csv.writer(file).writerows([_no_formula(text) for text in line] for line in lines)
        return file.getvalue()


def _markdown(text: str, around: str = "") -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    safe = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return around + _IN_MARKDOWN.sub(r"\\\1", safe) + around


def _no_formula(text: str) -> str:
    is_number = re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) and not is_number else text
