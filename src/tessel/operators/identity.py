"""The identity, which costs nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessel.operators.leaf import Leaf
from tessel.operators.space import TensorSpace, checked_dtype, checked_length


class ParIdentity(Leaf):
    """The identity on tensors of length `n`.

    Args:
        T: a dtype of torch, as float32.
        n: the length.

    >>> import tessel, torch
    >>> tessel.ParIdentity(torch.float32, 2) * torch.ones(2)
    tensor([1., 1.])
    """

    def __init__(self, T: Any, n: int) -> None:
        length = checked_length("ParIdentity", "n", n)
        self.source = self.target = TensorSpace((length,), checked_dtype("ParIdentity", T))

    is_invertible = True
    is_nothing = True
    mixes = (False,)

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        return x
