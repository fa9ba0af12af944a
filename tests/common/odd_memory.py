"""Tensors as users have them in memory: permuted, with steps, repeated, with a lazy sign."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _permuted(*order: int) -> Callable[[Tensor], Tensor]:
    """With the memory order of other dimensions; negative ones count from behind."""

    def change(x: Tensor) -> Tensor:
        dims = [dim % x.dim() for dim in order]
        dims = [*(dim for dim in range(x.dim()) if dim not in dims), *dims]
        back = [dims.index(dim) for dim in range(x.dim())]
        return x.permute(dims).contiguous().permute(back)

    return change


def _stepped(dim: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        steps = [slice(None)] * x.dim()
        steps[dim] = slice(None, None, 2)
        return x.repeat_interleave(2, dim)[tuple(steps)]

    return change


def _repeated(*dims: int) -> Callable[[Tensor], Tensor]:
    """The first index of dimensions over and over, without memory for it."""

    def change(x: Tensor) -> Tensor:
        found = x
        for dim in dims:
            found = found.narrow(dim, 0, min(1, found.shape[dim]))
        return found.expand(x.shape)

    return change


def _shifted(x: Tensor) -> Tensor:
    """One number behind an address that is a multiple of many."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _with_lazy_sign(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


_MEMORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "permuted": _permuted(-1, -2),
    "reversed": lambda x: _permuted(*reversed(range(x.dim())))(x),
    "second last": _permuted(1),
    "stepped": _stepped(-1),
    "stepped rows": _stepped(-2),
    "repeated": _repeated(-1),
    "repeated rows": _repeated(-2),
    "repeated first": _repeated(0),
    "one number": lambda x: _repeated(*range(x.dim()))(x),
    "shifted": _shifted,
    "lazy sign": _with_lazy_sign,
}
NAMES = tuple(_MEMORIES)


def odd(name: str, x: Tensor) -> Tensor:
    """A tensor of the shape and, but for repeated ones, of the values of x, which has two dims."""
    return _MEMORIES[name](x)
