"""Nesting: tensors inside the arguments and results of a model, in any container.

Besides lists, tuples, dictionaries and containers that are registered with torch's `pytree`, these
are dataclasses, subclasses of lists, tuples and dictionaries, and `collections.UserDict`, which
tokenizers return. A `PackedSequence` is a named tuple of tensors, of which none is in the order of
the samples.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES, tree_map

from tessel.tensor.table import with_members


def nested(
    change: Callable[[Any], Any],
    value: Any,
    repack: Callable[[PackedSequence], PackedSequence] | None = None,
) -> Any:
    """The same nesting with other members; dataclasses are copied, not constructed again.

    Args:
        change: the function of a member that returns the new one.
        value: the nesting.
        repack: the function of a packed sequence, by default that of its members.

    >>> nested(lambda x: x + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    # what most models pass: torch's walk takes longer than a layer
    kind = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if kind is list or kind is tuple:
        return kind([nested(change, each, repack) for each in value])
    if kind is dict:
        return {name: nested(change, each, repack) for name, each in value.items()}

    def inside(value: Any) -> Any:
        return nested(change, value, repack)

    def changed(leaf: Any) -> Any:
        if not _is_ours(leaf):
            return change(leaf)
        if isinstance(leaf, PackedSequence):
            return repack(leaf) if repack else type(leaf)(*[inside(each) for each in leaf])
        if isinstance(leaf, tuple):
            found = [inside(member) for member in leaf]
            same = all(a is b for a, b in zip(found, leaf, strict=True))
            return leaf if same else with_members(leaf, found)
        try:
            new = copy(leaf)
        except TypeError:  # a dictionary that cannot be made without arguments
            kind: Any = type(leaf)
            new = kind.__new__(kind)
            new.__dict__.update(leaf.__dict__)
        base = next((each for each in _DICTIONARIES if isinstance(leaf, each)), None)
        if base is not None:
            for key, member in leaf.items():  # bypassing the assignment of its class
                base.__setitem__(new, key, inside(member))
        if isinstance(leaf, list):
            new[:] = [inside(member) for member in leaf]
        for field in fields(leaf) if is_dataclass(leaf) else ():
            if isinstance(leaf, dict) and field.name in leaf:  # as outputs of diffusers have both
                member = new[field.name]
            elif hasattr(leaf, field.name):
                member = inside(getattr(leaf, field.name))
            else:
                continue
            object.__setattr__(new, field.name, member)  # also in a frozen one, as it is a copy
        return new

    return tree_map(changed, value, is_leaf=_is_ours)


def members_of(*values: Any) -> list[Any]:
    """All members, in the order in which `nested` visits them."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value  # unchanged: some containers cannot hold anything else

    nested(note, values)
    return found


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors, in the order in which `nested` visits them."""
    return [each for each in members_of(*values) if isinstance(each, Tensor)]


def packed_in(*values: Any) -> list[PackedSequence]:
    """All packed sequences, in the order in which `nested` visits them."""
    found: list[PackedSequence] = []

    def note(packed: PackedSequence) -> PackedSequence:
        found.append(packed)
        return packed

    nested(lambda member: member, values, note)
    return found


_DICTIONARIES: tuple[Any, ...] = (OrderedDict, dict, UserDict)


def _is_ours(value: Any) -> bool:
    if type(value) in SUPPORTED_NODES and not isinstance(value, torch.Size):
        return False
    if is_dataclass(value):
        return not isinstance(value, type)
    return isinstance(value, (*_DICTIONARIES, list)) or (
        isinstance(value, tuple) and type(value) is not tuple
    )
