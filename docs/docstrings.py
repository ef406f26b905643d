"""Docstrings for the site: what Markdown reads otherwise is rewritten, and a missing one fails the build."""

import logging
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(?:~[\w.]*\.)?([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)
OTHERS_DOCSTRING = re.compile(r"overload$|override$|\.setter$")  # of decorators
LOG = logging.getLogger("mkdocs.docstrings")  # a strict build fails if it warns


def as_markdown(docstring: str) -> str:
    r"""Return a docstring with Sphinx's roles as code, and examples in fences.

    >>> as_markdown("See :class:`~avagrad.AvaStep`.\n\n>>> 1 + 1\n2\n")
    'See `AvaStep`.\n\n```pycon\n>>> 1 + 1\n2\n```\n'
    """
    return EXAMPLE.sub(r"```pycon\n\g<0>\n```", ROLE.sub(r"`\1`", docstring))


class Docstrings(griffe.Extension):
    """Goes over all classes, functions and modules of the package."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring, or say that there is none."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        elif isinstance(obj, griffe.Class | griffe.Function) and not re.search(r"\._", obj.path):
            if not any(OTHERS_DOCSTRING.search(str(each.value)) for each in obj.decorators):
                LOG.warning("%s has no docstring", obj.path)
