"""Counter-based random numbers: each is a function of a seed and of its index in the whole tensor.

So a worker draws the numbers of its part only, and they do not depend on the layout. An index is
mixed with the seed by two rounds of the finaliser of splitmix64 (Steele, Lea, Flood 2014), in the
wrapping arithmetic of 64-bit integers that torch has on all devices.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tessel.core.boxes import Box
from tessel.core.layout import Layout, Shape

# numbers for which it is not worthwhile to compute fewer at a time; fewer kernels are launched if a
# GPU computes more, since each takes longer to launch than to run for so few
_AT_ONCE, _AT_ONCE_ON_GPUS = 2**16, 2**22
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def places(layout: Layout, device: Any = None) -> Tensor:
    """The flat index in the whole tensor of each value of this worker's part.

    >>> import tessel
    >>> places(tessel.Layout.balanced(tessel.world(), (3,)))
    tensor([0, 1, 2])
    """
    box = layout.box()
    if box is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    return places_in(layout.shape, box, device)


def places_in(shape: Shape, box: Box, device: Any = None) -> Tensor:
    """The same for a box of a tensor of this shape.

    >>> places_in((2, 3), ((1, 2), (0, 3)))
    tensor([[3, 4, 5]])
    """
    found = torch.zeros((), dtype=torch.int64, device=device)
    for length, (start, stop) in zip(shape, box, strict=True):
        found = found.unsqueeze(-1) * length + torch.arange(start, stop, device=device)
    return found


def bits(seed: int, counter: Tensor, stream: int) -> Tensor:
    """63 random bits for each index; other streams have other numbers for the same indices."""
    signed = (seed + 2**63) % 2**64 - 2**63
    z = (counter * 2).add_(stream + 1).mul_(_GOLDEN).add_(signed)
    for _ in range(2):
        z.bitwise_xor_(_shifted(z, 30)).mul_(_FIRST)
        z.bitwise_xor_(_shifted(z, 27)).mul_(_SECOND)
        z.bitwise_xor_(_shifted(z, 31))
    return _shifted(z, 1)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift right with zeros from the left; torch shifts signed integers with their sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _unit(seed: int, counter: Tensor, stream: int) -> Tensor:
    """Numbers uniformly distributed in [0, 1), in steps of 2⁻⁵³."""
    return (bits(seed, counter, stream) >> 10).double() * 2.0**-53


def uniform_in(seed: int, shape: Shape, box: Box, device: Any = None) -> Tensor:
    """Numbers uniformly distributed in [0, 1), in float64, for a box of a tensor."""
    return _unit(seed, places_in(shape, box, device), 0)


def is_at_least(
    p: float, seed: int, shape: Shape, box: Box, dtype: torch.dtype, device: Any = None
) -> Tensor:
    """Whether each number of `uniform_in` is at least `p`: ones and zeros of a dtype.

    Computed for a small part of the box at a time, since it takes three integers of 64 bits for
    each number.

    >>> bool(is_at_least(0.0, 1, (2, 3), ((0, 1), (0, 3)), torch.bool).all())
    True
    """
    if not shape:
        return is_at_least(p, seed, (1,), ((0, 1),), dtype, device)[0]
    rows = places_in(shape[:-1], box[:-1], device) * shape[-1]
    found = torch.empty((*rows.shape, box[-1][1] - box[-1][0]), dtype=dtype, device=device)
    rows, least = rows.reshape(-1, 1), math.ceil(p * 2**53)
    at_once = _AT_ONCE if found.is_cpu else _AT_ONCE_ON_GPUS
    width = max(at_once, found.shape[-1] // 32)
    count = max(at_once // max(1, min(width, found.shape[-1])), len(rows) // 32, 1)
    strips = found.view(len(rows), found.shape[-1]).split(width, 1)
    columns = torch.arange(*box[-1], device=device).split(width)
    for some, strip in zip(columns, strips, strict=True):
        for first, part in zip(rows.split(count), strip.split(count), strict=True):
            part.copy_((bits(seed, first + some, 0) >> 10) >= least)
    return found


def uniform(seed: int, layout: Layout, dtype: torch.dtype, device: Any = None) -> Tensor:
    """Numbers uniformly distributed in [0, 1), for this worker's part."""
    counter = places(layout, device)
    if dtype.is_complex:
        return torch.complex(_unit(seed, counter, 0), _unit(seed, counter, 1)).to(dtype)
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    # only as many bits as the dtype holds, so that nothing is rounded up to 1
    return ((bits(seed, counter, 0) >> (63 - digits)).double() * 2.0**-digits).to(dtype)


def normal(seed: int, layout: Layout, dtype: torch.dtype, device: Any = None) -> Tensor:
    """Normally distributed numbers for this worker's part, by the method of Box and Muller.

    Complex numbers have variance 1, as in torch: ½ for the real and for the imaginary part.
    """
    counter = places(layout, device)
    radius = (-2.0 * (1.0 - _unit(seed, counter, 0)).log()).sqrt()
    angle = 2.0 * math.pi * _unit(seed, counter, 1)
    if dtype.is_complex:
        return torch.polar(radius / math.sqrt(2.0), angle).to(dtype)
    return (radius * angle.cos()).to(dtype)


def whole_numbers(
    seed: int, layout: Layout, low: int, high: int, dtype: torch.dtype, device: Any = None
) -> Tensor:
    """Integers uniformly distributed in [low, high), for this worker's part."""
    found = bits(seed, places(layout, device), 0)
    if high - low > 2**63:
        raise ValueError(f"at most 2⁶³ different numbers can be drawn, got {low} to {high}")
    found = found if high - low == 2**63 else found % (high - low)
    return (low + found).to(dtype)
