"""An extension for `make docs`: shows the doctests of docstrings as code.

Docstrings here may end with lines of `>>>` without a heading, or under "Example:". The parser of
the reference pages takes both for text, and Markdown for quotations.
"""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any

from griffe import Extension, Object


class DoctestsAsExamples(Extension):
    """Put the doctests of every docstring into a section "Examples"."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples_section(obj.docstring.value)


def with_examples_section(docstring: str) -> str:
    """Return the docstring with everything from its first doctest on as a section "Examples"."""
    found = re.search(r"(^Example:\n+)?^ *>>> ", docstring, re.MULTILINE)
    if found is None or "Examples:\n" in docstring:
        return docstring
    doctests = docstring[found.start() :].removeprefix("Example:").strip("\n")
    return f"{docstring[: found.start()]}Examples:\n{indent(dedent(doctests), '    ')}"
