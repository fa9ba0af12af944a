"""Checksums: one number for the bits of a tensor, by which workers compare what they hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _DisableFuncTorch, _functorch

from tessel.core.context import in_forward_mode

_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
_STEP = 1 << 24
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def checksum(tensor: Any) -> int:
    """A number that depends on every bit of a tensor and on its position; 0 for other objects.

    Tensors that differ in order, in signs (also that of zero) or in NaNs have different numbers,
    except for one pair in four billion. A tensor on a GPU stays there: only the number is copied.

    >>> import torch
    >>> checksum(torch.tensor([0.0, 1.0])) == checksum(torch.tensor([1.0, 0.0]))
    False
    >>> checksum(torch.tensor([0.0])) == checksum(torch.tensor([-0.0]))
    False
    """
    if not is_dense(tensor):
        return 0
    with _DisableFuncTorch():  # which would wrap all new tensors again
        # The values alone, without derivatives and the wrappers of torch.func.
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if in_forward_mode():
            tensor = forward_ad.unpack_dual(tensor).primal
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.device.type == "cpu":
            return zlib.crc32(flat.view(torch.uint8).numpy())
        return mixed_sum(flat)


def checksum_of(tensors: Iterable[Tensor]) -> int:
    """One number for several tensors, in their order."""
    found = 0
    for each in tensors:
        found = zlib.crc32(checksum(each).to_bytes(8, "little"), found)
    return found


def mixed_sum(flat: Tensor) -> int:
    """The sum Σ_i w_i·m(v_i) over the words v_i of a flat tensor, modulo 2^64, folded to 32 bits.

    An odd weight w_i tells places apart. The mixing m brings the upper bits of a word down, of
    which a product keeps nothing but the parity: two signs that are flipped must not cancel out.

    >>> import torch
    >>> mixed_sum(torch.ones(4)) == mixed_sum(-torch.ones(4))
    False
    """
    # For GPUs, where crc32 cannot be used: a sum can be computed in any order, in parallel.
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    total, kind = 0, _INTEGERS[flat.element_size()]
    for start in range(0, flat.numel(), _STEP):  # the largest images leave little room
        words = flat[start : start + _STEP].view(kind).to(torch.int64)
        words = words ^ (words >> 29)
        places = torch.arange(start, start + words.numel(), device=words.device) * 2 + 1
        total += int(((places * _ODD) * (words * _ODD ^ (words >> 32))).sum())
    return (total ^ (total >> 32)) & 0xFFFFFFFF


NO_VALUES = (0, -1, 0)  # stands for integers that do not exist, or not yet


def range_of(
    values: Any, dtypes: Sequence[torch.dtype], ignored: int | None = None, is_copy: bool = True
) -> tuple[int, int, int]:
    """The smallest and the largest of some integers, and a checksum; (0, -1, …) if there are none.

    It compares copies that must be equal, and ids that must be in range.

    Args:
        values: a tensor of one of the dtypes; anything else counts as none.
        dtypes: the dtypes that are looked at.
        ignored: a value that counts in the checksum alone.
        is_copy: whether there is another copy to compare with; if not, the checksum is 0.
    """
    if not is_dense(values) or values.dtype not in dtypes:
        return NO_VALUES
    with _DisableFuncTorch():  # reading values is no part of a transform
        found = values.detach().to("cpu", torch.int64).contiguous().numpy()
    said = zlib.crc32(found.data) if found.size and is_copy else 0
    if ignored is not None and found.size and found.min() <= ignored <= found.max():
        found = found[found != ignored]
    return (int(found.min()), int(found.max()), said) if found.size else (0, -1, said)


def is_within(low: int, high: int, count: int) -> bool:
    """Whether all integers of such a range are at least 0 and less than `count`."""
    return low > high or 0 <= low <= high < count


def is_dense(value: Any) -> bool:
    """Whether the values can be read; the agreement reports anything else that is wrong."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
