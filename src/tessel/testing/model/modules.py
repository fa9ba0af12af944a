"""Module by module: what each gives in one process, and what it does in the converted model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tessel import transport
from tessel.nn.region import HaloRegion
from tessel.tensor.table import in_backward
from tessel.testing.drawing import plain
from tessel.testing.memory import Memory
from tessel.testing.model.difference import Difference, difference, worst

# The outputs of each module in one process, call by call; modules in the order in which they end.
Trace = dict[str, list[list[Any]]]


@contextmanager
def recorded(model: nn.Module) -> Iterator[Trace]:
    """What the modules of a model give in one process, inside of the `with` block."""
    trace: Trace = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():  # where a checkpoint computes again
            # Copies, since a later module may change what an earlier one gave.
            copies = [
                plain(value).detach().clone() if isinstance(value, Tensor) else value
                for value in tree_leaves(opened(output))
            ]
            trace.setdefault(name, []).append(copies)

    with _hooked(model, after=note):
        yield trace


@contextmanager
def compared_with(trace: Trace, model: nn.Module) -> Iterator[dict[str, list[Difference]]]:
    """The differences of what the modules of a converted model give, call by call."""
    found: dict[str, list[Difference]] = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        # At once, since a later module may change what this one gave.
        calls = found.setdefault(name, [])
        expected = trace.get(name, [])[len(calls) : len(calls) + 1]
        values = tree_leaves(opened(output))
        if not expected:
            calls.append(Difference(name, math.nan))  # torch has taken a short cut in one process
        elif len(expected[0]) != len(values):
            remark = f"{len(values)} outputs are not {len(expected[0])}"
            calls.append(Difference(name, math.inf, note=remark))
        else:
            pairs = zip(values, expected[0], strict=True)
            calls.append(worst(name, [difference(name, got, exp) for got, exp in pairs]))

    with _hooked(model, after=note):
        yield found


@contextmanager
def measured(model: nn.Module, memory: Memory) -> Iterator[dict[str, tuple[int, int]]]:
    """The bytes that each module sends, and that it adds to the memory in use."""
    found: dict[str, tuple[int, int]] = {}
    running: list[tuple[int, int]] = []  # modules call modules: what there was when each began

    def begin(name: str, module: nn.Module, args: Any) -> None:
        running.append((transport.total_traffic().bytes_sent, memory.current))

    def end(name: str, module: nn.Module, args: Any, output: Any) -> None:
        sent, kept = running.pop()
        if not in_backward():
            before = found.get(name, (0, 0))
            sent = transport.total_traffic().bytes_sent - sent
            found[name] = before[0] + sent, before[1] + max(0, memory.current - kept)

    with _hooked(model, after=end, before=begin):
        yield found


def opened(value: Any) -> Any:
    """Outputs with what is in objects whose parts torch does not know: those of data classes."""
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping):
        return {name: opened(getattr(value, name)) for name in value.__dataclass_fields__}
    if type(value) in (list, tuple):
        return type(value)([opened(each) for each in value])
    if type(value) is dict:
        return {key: opened(each) for key, each in value.items()}
    return value


@contextmanager
def _hooked(model: nn.Module, after: Any, before: Any = None) -> Iterator[None]:
    """Hooks at all modules, but for those in a region, which see more than their part."""
    handles = []
    regions = [name for name, each in model.named_modules() if isinstance(each, HaloRegion)]
    for name, module in model.named_modules():
        if not any(
            name != each and f".{name}".startswith(f".{each}".rstrip(".")) for each in regions
        ):
            if before is not None:
                handles.append(module.register_forward_pre_hook(partial(before, name)))
            handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
