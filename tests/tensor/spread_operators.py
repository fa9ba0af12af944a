"""Operators of `aten` by their own names, as decomposed graphs call them, for `test_spread.py`.

Tests `tensor/aten.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity import values
from spread_cases import Case

aten: Any = torch.ops.aten
SHAPE = (2, 4, 6, 5)
WEIGHT, BIAS = values((4,), 5), values((4,), 6)
MEAN, VARIANCE = values((4,), 7), values((4,), 8).abs() + 0.5
ROWS = torch.tensor([1, 3])


def complex_of(x: Tensor) -> Tensor:
    return torch.complex(x, x.flip(0))


def batch_norm_of_averages(x: Tensor) -> Tensor:
    settings = (WEIGHT, BIAS, MEAN, VARIANCE, 0.1, 1e-5)
    y, *empty = aten._native_batch_norm_legit_no_training.default(x, *settings)
    assert [each.shape for each in empty] == [(0,), (0,)]
    return y


def batch_norm_in_training(x: Tensor) -> tuple[Tensor, ...]:
    settings = (WEIGHT, BIAS, MEAN, VARIANCE, True, 0.1, 1e-5)
    y, _, _, *averages = aten._native_batch_norm_legit_functional.default(x, *settings)
    return y, *(each.detach() for each in averages)


NORMS = {
    "operator: batch norm in evaluation": Case(batch_norm_of_averages, (SHAPE,)),
    "operator: batch norm in training": Case(batch_norm_in_training, (SHAPE,)),
    "operator: batch norm without averages": Case(
        lambda x: aten._native_batch_norm_legit.no_stats(x, WEIGHT, None, True, 0.1, 1e-5)[0],
        (SHAPE,),
    ),
    "operator: group norm": Case(
        lambda x: aten.native_group_norm.default(x, WEIGHT, BIAS, 2, 4, 30, 2, 1e-5)[0], (SHAPE,)
    ),
    "operator: statistics of norms": Case(
        lambda x: (
            *aten.native_group_norm.default(x.detach(), None, None, 2, 4, 30, 2, 1e-5)[1:],
            *aten._native_batch_norm_legit.no_stats(x.detach(), None, None, True, 0.1, 1e-5)[1:],
        ),
        (SHAPE,),
        derives=False,
    ),
}
OTHERS = {
    "operator: reflection": Case(
        lambda x: (
            aten.reflection_pad1d.default(x[0], [1, 2]),
            aten.reflection_pad2d.default(x, [1, 0, 2, 1]),
        ),
        (SHAPE,),
    ),
    "operator: replication": Case(
        lambda x: (
            aten.replication_pad1d.default(x[0], [1, 2]),
            aten.replication_pad2d.default(x, [1, 0, 2, 1]),
            aten.replication_pad3d.default(x, [1, 0, 0, 1, 0, 1]),
        ),
        (SHAPE,),
    ),
    "operator: copies": Case(
        lambda x: (
            aten.alias.default(x) * 2,
            aten._to_copy.default(x, dtype=torch.float32).double(),
            aten._to_copy.default(x),
            aten.copy.default(x.detach(), x.detach()[..., :1]),  # without a derivative
        ),
        (SHAPE,),
    ),
    "operator: index_put": Case(
        lambda x: aten.index_put.default(x, [None, None, ROWS], x[:, :, :2] * 2), (SHAPE,)
    ),
    "operator: distances": Case(
        lambda x: aten._cdist_forward.default(x.detach(), 2 * x.detach(), 2.0, None),
        (SHAPE,),
        derives=False,
    ),
    "operator: Fourier": Case(
        lambda x: tuple(
            each.real
            for norm in range(3)
            for each in (
                aten._fft_r2c.default(x, [2, 3], norm, True),
                aten._fft_r2c.default(x, [2], norm, False),
                aten._fft_c2c.default(complex_of(x), [2, 3], norm, True),
                aten._fft_c2c.default(complex_of(x), [3], norm, False),
                aten._fft_c2r.default(complex_of(x), [2, 3], norm, 9),
            )
        ),
        (SHAPE,),
    ),
    "operator: windows": Case(
        lambda x: aten.col2im.default(
            aten.im2col.default(x, [2, 2], [1, 1], [1, 0], [2, 1]), [6, 5], *_WINDOWS
        ),
        (SHAPE,),
    ),
    "operator: adaptive pool": Case(
        lambda x: aten._adaptive_avg_pool3d.default(x, [2, 3, 1]), (SHAPE,)
    ),
    "operator: grid_sampler": Case(
        lambda x: tuple(
            aten.grid_sampler_2d.default(x, x.detach()[..., :2].tanh(), mode, padding, corners)
            for mode, padding, corners in ((0, 0, False), (0, 1, True), (2, 2, False))
        ),
        (SHAPE,),
    ),
    "operator: upsampling to a size": Case(
        lambda x: (
            aten.upsample_nearest2d.default(x, [9, 10]),
            aten.upsample_bilinear2d.default(x, [9, 10], False),
            aten.upsample_bilinear2d.default(x, [9, 10], True),
        ),
        (SHAPE,),
    ),
}
_WINDOWS = ([2, 2], [1, 1], [1, 0], [2, 1])  # size, dilation, padding, stride

FAMILIES = {"operators: norms": NORMS, "operators: others": OTHERS}
