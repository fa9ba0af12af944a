"""The backend of opt_einsum for spread tensors, which tensorly uses for contractions.

It looks up these names in the package of the tensors and, without them, treats tensors as numpy's.
Operands may be spread or plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """`torch.einsum`."""
    return torch.einsum(equation, *operands)


def tensordot(x: Tensor, y: Tensor, axes: Any = 2) -> Tensor:
    """`torch.tensordot`, with numpy's name for the dimensions.

    >>> tensordot(torch.ones(2, 3), torch.ones(3, 4), axes=1).shape
    torch.Size([2, 4])
    """
    return torch.tensordot(x, y, dims=axes)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute all dimensions, as `numpy.transpose` does.

    >>> transpose(torch.ones(2, 3, 4), (2, 0, 1)).shape
    torch.Size([4, 2, 3])
    """
    return x.permute(*axes)
