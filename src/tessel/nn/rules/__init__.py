"""What torch functions do with tensors of known layout, inside of a converted model."""

from __future__ import annotations

from typing import Any

from tessel.layout import Layout
from tessel.nn.ledger import Ledger, note, tensors
from tessel.nn.rules import chance, layers, reductions, shapes  # noqa: F401  (they enter rules)
from tessel.nn.rules.book import RULES, Arguments, Settings, held_layouts, is_whole, unsupported
from tessel.nn.rules.pointwise import is_pointwise, pointwise


def follow(ledger: Ledger, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a torch function on parts of tensors by its rule; raise if it has none.

    On tensors that every worker has whole there is nothing to know: torch does it.
    """
    name = _name(func)
    if kwargs.get("out") is not None:
        raise unsupported(name, "it cannot write to `out`", *held_layouts(args, kwargs))
    if name in RULES:
        args, kwargs = _in_order(args, kwargs)
        if not args:
            raise unsupported(name, "the tensor must be its first argument", *held_layouts(kwargs))
        return RULES[name](name, func, args, kwargs)
    if is_pointwise(name):
        return pointwise(name, func, args, kwargs)
    layouts = held_layouts(args, kwargs)
    if not all(map(is_whole, layouts)):
        raise unsupported(name, "it has no rule for tensors that are split", *layouts)
    result = func(*args, **kwargs)
    for each in tensors(result):
        note(each, Layout.whole(ledger.partition, each.shape, shared=True))
    return result


_TORCHS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "tensors": "input"}


def _in_order(args: Arguments, kwargs: Settings) -> tuple[Arguments, Settings]:
    """The same arguments with torch's first names, the input by its position."""
    kwargs = {_TORCHS.get(key, key): value for key, value in kwargs.items()}
    return ((kwargs.pop("input"), *args) if "input" in kwargs else args), kwargs


def _name(func: Any) -> str:
    """The name of a torch function; of a property, with `get` before it."""
    if func.__name__ in ("__get__", "__set__"):
        return f"{func.__name__.strip('_')} {func.__self__.__name__}"
    return str(func.__name__)
