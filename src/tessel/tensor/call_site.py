"""Call sites: the line of the user's code, and the module of the model.

Nothing is recorded while a program runs. Frames are only inspected for a warning or an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

from torch import nn

from tessel.encoding import encodable


@encodable
@dataclass(frozen=True)
class CallSite:
    """A line of the user's code, and the module whose forward pass it is called in, if any.

    Attributes:
        file: the first file up the stack that is neither torch's nor ours.
        line: the line in it.
        module: the module, as in "`layer1.0.conv2` (Conv2d) of ResNet".
    """

    file: str
    line: int
    module: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f", in {self.module}" if self.module else "")


def current_place() -> CallSite:
    """The call site of the user's code that led to the current frame."""
    line = frame = sys._getframe(1)
    while line.f_back is not None and is_library(line):
        line = line.f_back
    modules: list[nn.Module] = []  # modules whose forward passes run, from the inside out
    each: FrameType | None = frame
    while each is not None:
        if each.f_code.co_name in ("_call_impl", "forward"):
            module = each.f_locals.get("self")
            modules += [module] if isinstance(module, nn.Module) else []
        each = each.f_back
    return CallSite(line.f_code.co_filename, line.f_lineno, described(modules[::-1]))


def is_library(frame: FrameType) -> bool:
    """Whether a frame belongs to torch or to Tessel."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "tessel")


def described(stack: list[nn.Module]) -> str:
    """The name, within the first module, of the last in a stack of modules that call each other."""
    if not stack:
        return ""
    root = at = stack[0]
    names: list[str] = []
    for module in stack[1:]:
        if module is at:
            continue
        # a module may have several names: the one within its caller is meant
        if (name := _name_within(at, module)) is not None:
            names.append(name)
        elif (name := _name_within(root, module)) is not None:
            names = [name]
        else:
            root, names = module, []  # it belongs to another model
        at = module
    model = type(root).__name__
    path = ".".join(filter(None, names))
    return f"`{path}` ({type(at).__name__}) of {model}" if path else model


def _name_within(outer: nn.Module, inner: nn.Module) -> str | None:
    return next((name for name, each in outer.named_modules() if each is inner), None)
