"""Random functions of plain tensors that draw the same numbers as for spread tensors.

A converted model does not draw the numbers of plain torch, but the same for every number of
workers. To compare it with one process, that process has to draw these numbers as well.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map

from tessel import transport
from tessel.core.partition import Partition
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.adoption import belongs_to_others, is_alone
from tessel.tensor.call import name_of
from tessel.tensor.rules import random, recurrent
from tessel.tensor.rules.pointwise import is_in_place
from tessel.tensor.rules.reductions import argument
from tessel.tensor.table import RULES, shared_whole
from tessel.tensor.tensor import open_part


class Drawing(torch.Tensor):
    """A plain tensor whose random functions draw by the rules of spread ones, for one worker.

    Results computed from it are also of this class, as results of spread tensors are spread: so
    plain tensors draw as usual on both sides.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _draws(func, args, kwargs or {}):
            return _drawn(func, args, kwargs or {})
        if func in _BACKWARD_PASSES:
            return _passed_back(func, args, kwargs or {})
        if is_in_place(name_of(func)) and type(args[0]) is torch.Tensor:
            # A plain tensor that the model made becomes spread when parts are written into it.
            with DisableTorchFunctionSubclass():
                if is_alone(args[0]) and not belongs_to_others(args[0]):
                    args[0].__class__ = Drawing
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__.startswith("new_") and result.shape != args[0].shape:
            return plain(result)  # plain, like that of a spread tensor
        return result


def plain(x: torch.Tensor) -> torch.Tensor:
    """The same tensor as a plain one."""
    with DisableTorchFunctionSubclass():  # otherwise the result would be a Drawing again
        return x.as_subclass(torch.Tensor) if isinstance(x, Drawing) else x


def drawing(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, as one that draws as spread tensors do."""
    with DisableTorchFunctionSubclass():
        return x.as_subclass(Drawing)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function draws random numbers."""
    name = name_of(func)
    rule = RULES.get(name)
    # Attention draws inside a function with another rule, and only with dropout; so do recurrent
    # layers.
    if func is F.multi_head_attention_forward:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        return given["dropout_p"] > 0 and bool(given.get("training", True))
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p", 0.0) > 0)
    if rule is recurrent.sequences:
        return recurrent.drops(args, kwargs)
    return rule is not None and rule.__module__ == random.__name__


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_BACKWARD_PASSES = {
    each: inspect.signature(each)
    for each in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


def _passed_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass, in which a checkpoint recomputes with such tensors.

    By default torch would disable their functions until the pass ends: dropout would drop other
    elements than before. So torch gets edges of the graph instead of tensors.
    """
    given = _BACKWARD_PASSES[func].bind(*args, **kwargs).arguments
    if func is torch.Tensor.backward:
        given["tensors"], given["grad_tensors"] = given.pop("self"), given.pop("gradient", None)
        func = torch.autograd.backward

    def enter(name: str, x: Any) -> Any:
        if not isinstance(x, Drawing):
            return x
        return plain(x) if name in ("grad_tensors", "grad_outputs") else get_gradient_edge(x)

    with DisableTorchFunctionSubclass():
        given = {name: tree_map(partial(enter, name), value) for name, value in given.items()}
    return tree_map(lambda x: drawing(x) if isinstance(x, torch.Tensor) else x, func(**given))


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function's rule on a partition of this worker alone."""
    alone = Partition((transport.this_worker(),), (1,))
    known: dict[int, Any] = {}  # the original tensors, by the identities of the converted ones

    def enter(value: Any) -> Any:
        if not isinstance(value, Drawing):
            return value
        inside = SpreadTensor(plain(value), shared_whole(alone, value.shape))
        known[id(inside)] = value, inside
        return inside

    def leave(value: Any) -> Any:
        if not isinstance(value, SpreadTensor):
            return value
        if id(value) in known:  # it was changed in place, or nothing was dropped
            return known[id(value)][0]
        return drawing(open_part(value))

    entered_args, entered_kwargs = tree_map(enter, (args, kwargs))
    return tree_map(leave, func(*entered_args, **entered_kwargs))
