"""How docstrings become pages: their equations and examples are shown as they stand."""

import inspect
import re
from typing import Any

import griffe

import tessel

EXAMPLE = re.compile(r">>> ")
EQUATION = re.compile(r"(Forward|Adjoint): ")


class Verbatim(griffe.Extension):
    """Puts paragraphs that are equations or examples into code blocks."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(_fenced, obj.docstring.value.split("\n\n")))


class Signatures(griffe.Extension):
    """Shows all arguments of layers, those of torch too, which only the classes themselves know."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        layer = getattr(tessel.nn, cls.name, None)
        if hasattr(layer, "__signature__"):
            parameters = inspect.signature(layer).parameters.values()
            shown = griffe.Parameters(*map(_parameter, parameters))
            cls.set_member("__init__", griffe.Function("__init__", parameters=shown))


def _parameter(each: inspect.Parameter) -> griffe.Parameter:
    default = None if each.default is each.empty else repr(each.default)
    kind = getattr(griffe.ParameterKind, each.kind.name.lower())
    return griffe.Parameter(each.name, kind=kind, default=default)


def _fenced(paragraph: str) -> str:
    if EXAMPLE.match(paragraph):
        return f"```pycon\n{paragraph}\n```"
    return f"```text\n{paragraph}\n```" if EQUATION.match(paragraph) else paragraph
