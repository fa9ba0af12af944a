"""Adoption: a plain tensor that a model made becomes spread when parts are written into it.

Models write `y = torch.zeros(shape); y[...] = f(x)`. All workers have the zeros alike, so each can
keep its part of them, and nothing travels. The Python object stays the same one, so that all who
hold it have the spread tensor from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from tessel.core.agreement import agree
from tessel.core.layout import Layout
from tessel.tensor.table import in_backward, in_checkpoint, is_whole, outlining, running
from tessel.tensor.tensor import Tensor
from tessel.tensor.unfinished import Zeros, left_unfinished, may_wait

# whether a tensor is not the running model's alone, but an argument of its call or kept in it
belongs_elsewhere: ContextVar[Callable[[torch.Tensor], bool] | None] = ContextVar(
    "belongs_elsewhere", default=None
)


def adopted(x: torch.Tensor, target: Layout | None) -> bool:
    """Whether a plain tensor is a spread one now, in the layout `target`, with the same values.

    It stays plain outside of models, where its user may need it as it is, and if anything but
    Python's names refers to it: a view, a graph of autograd, an array of numpy. These would keep
    the values of before. Garbage that is not collected yet may be among them on some workers, so
    all agree.
    """
    if target is None or is_whole(target) or tuple(x.shape) != target.shape or outlining.get():
        return False
    # What a checkpoint computes again, perhaps outside of the model, must be what it computed.
    model = running.get()
    if model is None and not (in_checkpoint() or in_backward()):
        return False
    if target.is_outside or (model is not None and {*target.partition.ranks} != {*model.ranks}):
        return False
    if type(x) is not torch.Tensor or x.layout != torch.strided or x.requires_grad or x._is_view():
        return False
    is_held = belongs_elsewhere.get()
    if is_held is not None and is_held(x):
        return False
    call = f"a write of parts into a plain tensor of shape {target.shape}"
    storage = x.untyped_storage()  # one reference of its own
    is_alone = (
        not weakref.getweakrefs(x)  # as converted models have to their parameters and buffers
        and x._use_count() == 1  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(storage._cdata) == 2
    )
    # Spectra begin as zeros, which need not be computed with.
    is_zero = x.is_complex() and may_wait() and not torch.count_nonzero(x)
    heard = agree(target.partition, call, numbers=[int(is_alone), int(is_zero)])
    if not all(alone for alone, _ in heard.numbers.values()):
        return False
    new: Any
    if all(zero for _, zero in heard.numbers.values()):
        like = x.new_empty(())
        new = left_unfinished(like, target, Zeros((0,) * x.dim(), like, target))
    else:
        with torch.no_grad():
            new = Tensor(target.local_part(x).clone(), target)
    torch.utils.swap_tensors(x, new)
    return True
