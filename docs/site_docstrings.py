"""Docstrings for the site: what Markdown reads otherwise is rewritten, and a missing one fails the build."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(?:~[\w.]*\.)?([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)
LOG = logging.getLogger("mkdocs.docstrings")  # a strict build fails if it warns


def as_markdown(docstring: str) -> str:
    r"""Return a docstring with Sphinx's roles as code, without its double colons, and with examples in fences.

    >>> as_markdown("See :class:`~avagrad.AvaStep`.\n\n>>> 1 + 1\n2\n")
    'See `AvaStep`.\n\n```pycon\n>>> 1 + 1\n2\n```\n'
    """
    text = re.sub(r"::$", ":", ROLE.sub(r"`\1`", docstring), flags=re.M)
    return EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)


def undocumented(package: griffe.Object) -> Iterator[str]:
    """Name the public classes, functions and methods of a package that have no docstring."""
    for member in package.members.values():
        if isinstance(member, griffe.Alias) or member.is_special or not (member.is_module or member.is_public):
            continue
        if isinstance(member, griffe.Class | griffe.Function) and member.docstring is None:
            yield member.path
        if not member.is_function:
            yield from undocumented(member)


class Docstrings(griffe.Extension):  # type: ignore[misc]
    """Goes over the package before the site is made."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Say what has no docstring."""
        for path in undocumented(pkg):
            LOG.warning("%s has no docstring", path)
