"""How docstrings become pages: their equations and examples are shown as they stand."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r">>> ")
EQUATION = re.compile(r"(Forward|Adjoint): ")


class Verbatim(griffe.Extension):
    """Puts paragraphs that are equations or examples into code blocks."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_fenced, obj.docstring.value.split("\n\n")))


def _fenced(paragraph: str) -> str:
    if EXAMPLE.match(paragraph):
        return f"```pycon\n{paragraph}\n```"
    return f"```text\n{paragraph}\n```" if EQUATION.match(paragraph) else paragraph
