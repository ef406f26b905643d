"""A table, whatever is in it: as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "TableCell"]

_IN_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_IN_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after a line's end it would begin an argument
    **{letter: f"\\{letter}" for letter in "&%_#${}"},
}


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
            *([_bold(_markdown(cell.text), cell, "**", "**") for cell in row] for row in self.rows),
        ]
        caption = [_markdown(self.caption), ""] if self.caption else []
        return "\n".join([*caption, *(f"| {' | '.join(line)} |" for line in lines)])

    def latex(self) -> str:
        r"""Return the table in LaTeX, for the package booktabs.

        >>> print(Table(("a",), ((TableCell("50 %"),),), "b").latex())
        \begin{table}
        \centering
        \caption{b}
        \begin{tabular}{l}
        \toprule
        a \\
        \midrule
        50 \% \\
        \bottomrule
        \end{tabular}
        \end{table}
        """
        kinds = "".join("l" if i < self.left else "r" for i in range(len(self.columns)))
        heading = _line_of_latex([_latex(name) for name in self.columns])
        rows = [_line_of_latex([_bold(_latex(cell.text), cell, r"\textbf{", "}") for cell in row]) for row in self.rows]
        return "\n".join(
            [
                *(r"\begin{table}", r"\centering"),
                *([f"\\caption{{{_latex(self.caption)}}}"] if self.caption else []),
                *(f"\\begin{{tabular}}{{{kinds}}}", r"\toprule", heading, r"\midrule"),
                *rows,
                *(r"\bottomrule", r"\end{tabular}", r"\end{table}"),
            ]
        )

    def csv(self) -> str:
        r"""Return the table as CSV, without the caption. What a spreadsheet would take for a formula becomes a text.

        >>> Table(("a", "b"), ((TableCell("=1+1"), TableCell("-1.5")),)).csv()
        "a,b\r\n'=1+1,-1.5\r\n"
        """
        file = io.StringIO()
        lines = [self.columns, *([cell.text for cell in row] for row in self.rows)]
        csv.writer(file).writerows([_no_formula(text) for text in line] for line in lines)
        return file.getvalue()


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _markdown(text: str) -> str:
    safe = _one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _IN_MARKDOWN.sub(r"\\\1", safe)


def _latex(text: str) -> str:
    return "".join(_IN_LATEX.get(letter, letter) for letter in _one_line(text))


def _line_of_latex(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _bold(text: str, cell: TableCell, before: str, after: str) -> str:
    return f"{before}{text}{after}" if cell.bold and text else text


def _no_formula(text: str) -> str:
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
