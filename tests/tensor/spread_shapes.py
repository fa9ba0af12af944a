"""Functions for `test_spread.py` that move elements: shapes, indices, joints, borders.

Tests `tensor/rules/shapes.py`, `tensor/rules/joins.py`, `tensor/rules/indexing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parity import values
from spread_cases import Case, Shape


def factorizations(length: int, most: int) -> Iterator[Shape]:
    """All shapes of so many elements with at most so many dimensions, some of length one."""
    if most == 1:
        yield (length,)
        return
    yield (length,)
    for first in range(1, length + 1):
        if length % first == 0:
            yield from ((first, *rest) for rest in factorizations(length // first, most - 1))


def all_reshapes(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.reshape(shape) for shape in dict.fromkeys(factorizations(x.numel(), 3)))


def places(shape: Shape, number: int) -> Tensor:
    """The tensor first, then indices up to its shortest dimension, negative ones not."""
    if not number:
        return values(shape, 3)
    return (values(shape, 3 + number) * 100).long().abs() % 3


def written(does: Any) -> Any:
    """What a function that changes a tensor made of it."""

    def change(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 2
        does(y, *others)
        return y

    return change


def assigned(key: Any, value: Any = None) -> Any:
    def assign(y: Tensor, *others: Tensor) -> None:
        y[key] = others[0] if others else value

    return written(assign)


def reshaped_in_place(x: Tensor) -> tuple[Tensor, ...]:
    """Tensors that get other shapes, beside what torch has as views of them."""
    first, second, third, fourth = (x * k for k in (1, 2, 3, 4))
    view = first[:]
    first.unsqueeze_(1).transpose_(0, 2).mul_(x[0, 0, 0] + 2)
    second.unsqueeze_(-1).unsqueeze_(0).squeeze_(-1).squeeze_().swapaxes_(0, 1)
    row = third[..., 0]
    row.t_()
    fourth.swapdims_(-1, -2)
    fourth *= 2
    return first, view, second, third, row, fourth


RESHAPES = {
    "shapes in place": Case(reshaped_in_place),
    "shapes of length one in place": Case(
        lambda x: ((x * 2).squeeze_(0), (x * 3).squeeze_(), (x * 2).transpose_(0, 1)), ((1, 4, 1),)
    ),
    **{
        f"all reshapes of {shape}": Case(all_reshapes, (shape,))
        for shape in (
            (12,),
            (4, 3),
            (3, 4),
            (2, 6),
            (1, 8),
            (8, 1),
            (2, 1, 6),
            (3, 2, 2),
            (2, 2, 3),
        )
    },
    **{
        f"reshapes of nothing in {shape}": Case(
            lambda x: (
                x.reshape(0),
                x.reshape(0, 4),
                x.reshape(2, 0, 3),
                x.flatten(),
                x.unsqueeze(1),
            ),
            (shape,),
        )
        for shape in ((0,), (0, 3), (3, 0), (2, 0, 3))
    },
    "flatten": Case(lambda x: (x.flatten(), x.flatten(1), x.flatten(0, 1), torch.ravel(x))),
    "heads": Case(lambda x: x.reshape(2, 3, 2, 4).transpose(1, 2), ((2, 3, 8),)),
    "heads and back": Case(
        lambda x: (x.unflatten(-1, (4, 2)).transpose(1, 2).flatten(2) * 2), ((2, 3, 8),)
    ),
    "squeeze": Case(lambda x: (x.squeeze(), x.squeeze(1), x.squeeze((0, 1))), ((4, 1, 5),)),
    "squeeze of ones": Case(lambda x: (x.squeeze(), x.squeeze(0) * 2), ((1, 1),)),
    "unsqueeze": Case(lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x[:, None, :, None])),
    "movedim": Case(lambda x: (x.movedim(0, -1), x.swapaxes(0, 2), x.permute(2, 0, 1), x[0].T)),
    "moveaxis": Case(lambda x: (x.moveaxis(0, 1), x.swapdims(0, 2), x.transpose(1, 2))),
    "transposed": Case(lambda x: (x.t(), x.T, x.mT, x.H, x.mH, x.adjoint()), ((4, 5),)),
    "adjoint of complex matrices": Case(
        lambda x: (torch.complex(x, 2 * x).adjoint(), torch.complex(x, x).mH)
    ),
    "view": Case(
        lambda x, y: (x.view(20, 6), x.view(-1), x.view_as(y), x.reshape_as(y), x.ravel()),
        ((4, 5, 6), (5, 4, 6)),
    ),
    "view as another type": Case(
        lambda x: (x.detach().view(torch.int64), x.detach().view(torch.int32)), derives=False
    ),
    "unflatten": Case(lambda x: (x.unflatten(0, (2, 2)), x.unflatten(-1, (2, -1)))),
    "expand": Case(lambda x: (x.expand(3, 4, 5), x.expand(2, 3, -1, 5)), ((1, 4, 1),)),
    "expand to another": Case(lambda x, y: x.expand_as(y) * y, ((1, 4, 1), (3, 4, 5))),
    "broadcast_tensors": Case(lambda x, y: torch.broadcast_tensors(x, y), ((1, 4, 1), (5, 1, 6))),
    "broadcast_to": Case(lambda x: torch.broadcast_to(x, (3, 4, 6)), ((4, 1),)),
    "meshgrid": Case(
        lambda x, y: (
            *torch.meshgrid(x, y, indexing="ij"),
            *torch.meshgrid([y, x], indexing="xy"),
        ),
        ((5,), (4,)),
    ),
    "atleast": Case(
        lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), *torch.atleast_3d(x, x)), ((5,),)
    ),
    "repeat": Case(
        lambda x: (x.repeat(1, 2, 1), x.repeat(2, 3, 1, 2), x.tile(2), x.tile((2, 1, 3)))
    ),
    "repeat of a row": Case(lambda x: (x.repeat(3), x.repeat(2, 2), torch.tile(x, (3,))), ((5,),)),
    "repeat nothing": Case(lambda x: (x.repeat(0, 1), x.repeat(1, 1)), ((4, 5),)),
    "repeat_interleave": Case(
        lambda x: (
            x.repeat_interleave(3, 1),
            torch.repeat_interleave(x, 2),
            x.repeat_interleave(0, 2),
        )
    ),
    "repeat_interleave by numbers": Case(
        lambda x: (
            x.repeat_interleave(torch.tensor([1, 0, 2, 3]), 0),
            x[0, 0].repeat_interleave(torch.tensor([1, 0, 2, 3, 0, 1])),
            x.repeat_interleave(torch.tensor(2), 1),
        )
    ),
    "rot90": Case(lambda x: tuple(torch.rot90(x, k, (0, 2)) for k in range(-1, 4))),
    "native_channel_shuffle": Case(
        lambda x: torch.native_channel_shuffle(x.detach(), 2), ((2, 6, 3, 4),), derives=False
    ),
    "pixel_shuffle": Case(lambda x: F.pixel_shuffle(x, 2), ((2, 8, 3, 5),)),
    "pixel_shuffle without batch": Case(lambda x: F.pixel_shuffle(x, 2), ((4, 3, 5),)),
    "pixel_unshuffle": Case(lambda x: F.pixel_unshuffle(x, 2), ((2, 3, 6, 10),)),
    "channel_shuffle": Case(lambda x: F.channel_shuffle(x, 2), ((2, 6, 3, 4),)),
    "view_as_real": Case(lambda x: torch.view_as_real(torch.complex(x, 2 * x))),
    "view_as_complex": Case(lambda x: torch.view_as_complex(x).abs(), ((4, 5, 2),)),
    # a part without values, or of length one, is contiguous with any strides
    "view_as_complex of moved dimensions": Case(
        lambda x: torch.view_as_complex(x.movedim(1, -1).contiguous()).abs(), ((2, 2, 3),)
    ),
    "view_as_complex of one column": Case(
        lambda x: torch.view_as_complex(x.movedim(1, -1).contiguous()).abs(), ((2, 2, 4, 1),)
    ),
    "view as another dtype of moved dimensions": Case(
        lambda x: x.movedim(1, -1).contiguous().view(torch.complex128).abs(), ((2, 2, 3),)
    ),
    "Tensor.unfold": Case(lambda x: (x.unfold(1, 3, 1), x.unfold(-1, 2, 3), x.unfold(0, 4, 2))),
    "Tensor.unfold of many": Case(lambda x: x.unfold(0, 2, 2).unfold(1, 3, 1), ((7, 6),)),
    "F.unfold": Case(lambda x: (F.unfold(x, 2), F.unfold(x, (3, 2), 1, 1, 2)), ((2, 3, 6, 7),)),
    "F.unfold without batch": Case(lambda x: F.unfold(x, 2), ((3, 6, 7),)),
    "F.fold": Case(lambda x: F.fold(x, (4, 5), 2), ((2, 12, 12),)),
    "F.fold without batch": Case(lambda x: F.fold(x, (4, 5), 2, padding=1), ((8, 30),)),
}

JOINTS = {
    **{
        f"cat along {dim}": Case(lambda x, y, dim=dim: torch.cat([x, y, x], dim), ((4, 5), (4, 5)))
        for dim in (0, 1)
    },
    "cat of lengths": Case(lambda x, y: torch.cat([x, y, 2 * x], -1), ((4, 5), (4, 2))),
    "cat of rows": Case(lambda x, y: torch.cat((y, x)), ((4, 5), (7, 5))),
    "cat with a plain one": Case(
        lambda x, y: torch.cat([y, x], 1), ((4, 5, 2), (4, 3, 2)), plain_others=True
    ),
    "cat of types": Case(
        lambda x, y: (torch.cat([x.float(), y], 0), torch.cat([(x > 0), y], 1)), ((4, 5), (4, 5))
    ),
    "cat of whole numbers": Case(
        lambda x: (torch.cat([x > 0, x < 0], 1), torch.cat([x.long(), (x * 9).int()])), ((4, 5),)
    ),
    "cat with nothing": Case(
        lambda x: (torch.cat([torch.zeros(0, dtype=x.dtype), x], 1), torch.cat([x[:, :0], x], 1)),
        ((4, 5),),
    ),
    "cat of negative zeros": Case(
        lambda x: torch.cat([torch.copysign(x * 0, torch.tensor(-1.0)), x], 1).reciprocal(),
        ((4, 5),),
        derives=False,
    ),
    "stack": Case(lambda x, y: (torch.stack([x, y]), torch.stack((y, x), -1)), ((4, 5), (4, 5))),
    "concat": Case(
        lambda x, y: (
            torch.concat([x, y], 1),
            torch.concatenate([x, y]),
            torch.row_stack([x, y]),
        ),
        ((4, 5), (4, 5)),
    ),
    "stack within": Case(lambda x, y: torch.stack([x, y], 1), ((4, 5), (4, 5)), plain_others=True),
    "hstack and others": Case(
        lambda x, y: (
            torch.hstack([x, y]),
            torch.vstack([x, y]),
            torch.dstack([x, y]),
            torch.column_stack([x, y]),
        ),
        ((4, 5), (4, 5)),
    ),
    "hstack of rows": Case(
        lambda x, y: (
            torch.hstack([x, y]),
            torch.vstack([x, y]),
            torch.dstack([x, y]),
            torch.column_stack([x, y]),
        ),
        ((5,), (5,)),
    ),
    "block_diag": Case(lambda x, y: torch.block_diag(x, y, x), ((4, 5), (2, 3))),
    **{
        f"pieces along {dim}": Case(
            lambda x, dim=dim: (
                *x.chunk(3, dim),
                *torch.split(x, 2, dim),
                *x.split([1, 2, x.shape[dim] - 3], dim),
                *x.tensor_split(3, dim),
                *torch.tensor_split(x, (3, 1, -1), dim),
                *x.unbind(dim),
            ),
        )
        for dim in (0, 1, -1)
    },
    "hsplit and others": Case(
        lambda x: (*x.hsplit(2), *x.vsplit([1, 3]), *torch.dsplit(x, 3)), ((4, 6, 6),)
    ),
    "split_with_sizes": Case(
        lambda x: (
            *x.split_with_sizes([1, 3], 0),
            *torch.unsafe_split(x, 2, 1),
            *torch.unsafe_chunk(x, 2, 2),
            *torch.unsafe_split_with_sizes(x, [2, 3], 1),
        ),
    ),
    "tensor_split by a tensor": Case(lambda x: torch.tensor_split(x, torch.tensor([1, 3]), 1)),
    "hsplit of a row": Case(lambda x: x.hsplit([2, 9]), ((6,),)),
    "iteration": Case(lambda x: tuple(x), ((4, 5),)),
    # of which the last worker has no windows: what it has in their place are truths, too
    "windows of truths": Case(lambda x: ((x > 0).unfold(0, 3, 1), (x > 0).unfold(2, 5, 1))),
    # the second derivative: of an empty row torch.cat has none
    "roll of a row": Case(lambda x: (x.roll(1).square(), x.roll(-2, 0) * x), ((5,),)),
    "roll": Case(
        lambda x: (
            x.roll(2, 0),
            x.roll(-1, 1),
            torch.roll(x, (1, -7), (1, 2)),
            x.roll(3),
            x.roll(0, 1),
        )
    ),
    "flip": Case(
        lambda x: (x.flip(0), x.flip((0, 2)), torch.flip(x, (-1,)), x.flip(1, 2), x.fliplr())
    ),
    "flipud": Case(lambda x: (x.flipud(), torch.fliplr(x)), ((4, 5),)),
    **{
        f"pad {mode}": Case(lambda x, mode=mode: F.pad(x, (2, 1, 3, 1), mode), ((2, 3, 5, 4),))
        for mode in ("reflect", "replicate", "circular", "constant")
    },
    **{
        f"pad {mode} of a row": Case(lambda x, mode=mode: F.pad(x, (4, 3), mode), ((2, 5),))
        for mode in ("reflect", "replicate", "circular", "constant")
    },
    "pad with a value": Case(
        lambda x: (
            F.pad(x, (1, 2, 0, 3), value=2.5),
            F.pad(x, (0, 0, 4, 4, 1, 0), value=float("inf")),
        )
    ),
    "pad with negative widths": Case(
        lambda x: (
            F.pad(x, (-1, 2, -2, -1)),
            F.pad(x, (1, -1), value=3.0),
            F.pad(x, (-1, 1), "replicate"),
            F.pad(x, (2, -1), "reflect"),
            F.pad(x[None], (-1, 1, 1, -1), "circular"),
        )
    ),
}

TRIANGLES = {
    **{
        f"triangles {k}": Case(lambda x, k=k: (x.tril(k), torch.triu(x, diagonal=k)), ((2, 5, 6),))
        for k in (-2, 0, 1)
    },
    "fill_diagonal_": Case(written(lambda y: y.fill_diagonal_(7.0)), ((5, 6),)),
    "fill_diagonal_ of a tall matrix": Case(
        written(lambda y: y.fill_diagonal_(7.0, wrap=True)), ((7, 2),)
    ),
    "fill_diagonal_ of a cube": Case(written(lambda y: y.fill_diagonal_(7.0)), ((4, 4, 4),)),
    "triangles in place": Case(written(lambda y: y.tril_(1).triu_(-1)), ((5, 6),)),
    **{
        f"diagonal {k} of {shape}": Case(lambda x, k=k: (x.diagonal(k), torch.diag(x, k)), (shape,))
        for k in (-3, -1, 0, 2)
        for shape in ((5, 6), (7, 3))
    },
    "diagonal of many": Case(lambda x: (x.diagonal(1, 0, 2), x.diagonal(-1, -1, 1), x.diagonal())),
    "diagonal outside": Case(lambda x: x.diagonal(6), ((5, 6),)),
    "diag of a row": Case(lambda x: (x.diag(), torch.diag(x, -2)), ((5,),)),
    "diag_embed": Case(lambda x: (x.diag_embed(), torch.diag_embed(x, 1, 0, 2)), ((4, 5),)),
    "trace": Case(lambda x: torch.trace(x) + x.trace(), ((5, 6),)),
}

INDEX = torch.tensor([3, 0, 0, -1])

INDEXING = {
    "numbers": Case(lambda x: (x[1], x[:, -1], x[..., 2], x[0, 1, 2], x[-1, ..., 0], x[2, :, 3])),
    "slices": Case(lambda x: (x[1:], x[:, 1:-1], x[..., -3:], x[:2, 3:, 1:4], x[9:], x[:, 3:1])),
    "steps": Case(lambda x: (x[::2], x[:, 1::3], x[..., 4::5], x[1::2, ::2, ::3], x[::9])),
    "new dimensions": Case(
        lambda x: (x[None], x[:, None, 1:], x[..., None], x[1, None, ::2, None])
    ),
    "numpy numbers": Case(lambda x: x[torch.arange(3).numpy()[1]]),
    "arrays of indices": Case(
        lambda x: (
            *(x[INDEX.numpy()], x[:, INDEX.short().numpy()], x[..., INDEX.int().numpy()]),
            *(x[INDEX.numpy(), :, INDEX.numpy()], x[(INDEX > 0).numpy()], x[:0][INDEX.numpy()[:0]]),
        ),
    ),
    "arrays of places that are written to": Case(
        written(
            lambda y: (y.__setitem__(INDEX.numpy(), 7.0), y.__setitem__((INDEX > 0).numpy(), 1.0))
        )
    ),
    "truth values that are written to": Case(
        written(lambda y: (y.__setitem__(True, y[1] * 2), y.__setitem__(y.sum() > 1e9, 7.0)))
    ),
    "a number that is written to where it is large": Case(
        lambda x: assigned(x.sum() < 1e9, x.max() * 2)(x.mean())
    ),
    "truth values": Case(lambda x: (x[True], x[None, False]), may_gather=True),
    "lists": Case(lambda x: (x[[0, 2, 2]], x[:, [4, -1, 0]], x[..., [1]], x[:, (0, 1)])),
    "tensors of indices": Case(lambda x: (x[INDEX], x[:, INDEX], x[..., INDEX], x[1, :, INDEX])),
    "tensors of indices of two dims": Case(
        lambda x: (x[INDEX[None]], x[:, INDEX.view(2, 2)], x[..., INDEX[:, None]])
    ),
    "index without dimensions": Case(lambda x: (x[INDEX[0]], x[:, INDEX[3]])),
    "several tensors of indices": Case(
        lambda x: (
            x[INDEX, INDEX],
            x[INDEX, :, INDEX],
            x[:, INDEX, INDEX[:, None]],
            x[INDEX, 1, INDEX],
            x[INDEX, None, INDEX],
            x[INDEX, 1:3, 0],
        ),
    ),
    "spread index": Case(
        lambda x, i: (x[i], x[:, i], x.index_select(1, i)),
        ((4, 5), (6,)),
        make=places,
        may_gather=True,
    ),
    "spread index of two dims": Case(
        lambda x, i: (x[i], x[:, i]), ((4, 5), (6, 2)), make=places, may_gather=True
    ),
    "spread index of a plain table": Case(
        lambda i: values((4, 3), 1)[i.long().abs() % 4], ((7, 2),)
    ),
    "narrow and select": Case(
        lambda x: (x.narrow(1, 1, 3), x.narrow(-1, -4, 2), x.select(0, -1), torch.select(x, 2, 3))
    ),
    "narrow from a tensor": Case(lambda x: x.narrow(0, torch.tensor(1), 2)),
    "index_select": Case(
        lambda x: (
            x.index_select(0, INDEX % 4),
            torch.index_select(x, -1, INDEX % 4),
            x.take(INDEX),
        )
    ),
    **{
        f"gather along {dim}": Case(
            lambda x, i, dim=dim: (x.gather(dim, i), torch.gather(x, dim, i[:2, :1, 1:])),
            ((3, 4, 5), (3, 4, 5)),
            make=places,
        )
        for dim in (0, 1, -1)
    },
    "take_along_dim": Case(
        lambda x, i: (torch.take_along_dim(x, i, 1), x.take_along_dim(i)),
        ((4, 5), (4, 3)),
        make=places,
    ),
    "take_along_dim with broadcasting": Case(
        lambda x, i: torch.take_along_dim(x, i, 1), ((4, 5), (1, 3)), make=places
    ),
    "argsort and gather": Case(lambda x: x.gather(1, x.argsort(1))),
    **{
        f"scatter along {dim}": Case(
            lambda x, y, dim=dim: (
                x.scatter(dim, y.argsort(dim), y),
                x.scatter_add(dim, (y > 0).long(), y),
                x.scatter(dim, (y[:2, :3] > 0).long(), 2.5),
                torch.scatter_add(x, dim, (y[:2, :3] > 0).long(), y.detach()),
            ),
            ((4, 5), (4, 5)),
        )
        for dim in (0, 1)
    },
    "scatter_reduce": Case(
        lambda x, y: x.scatter_reduce(1, (y > 0).long(), y, "amax"), ((4, 5), (4, 5))
    ),
    "scatter_reduce in place": Case(
        written(
            lambda y, z: y.scatter_(1, z.argsort(1), z).scatter_reduce_(
                0, (z > 0).long(), z, "amax"
            )
        ),
        ((4, 5), (4, 5)),
    ),
    "scatter in place": Case(
        written(lambda y, z: y.scatter_add_(1, (z > 0).long(), z)), ((4, 5), (4, 5))
    ),
    **{
        f"index functions along {dim}": Case(
            lambda x, y, dim=dim: (
                x.index_add(dim, INDEX % 4, y if dim else y.T, alpha=2),
                x.index_copy(dim, INDEX[2:] % 4, y[:, 2:] if dim else y.T[2:]),
                x.index_fill(dim, INDEX, 7.5),
            ),
            ((4, 5), (4, 4)) if dim else ((5, 4), (4, 4)),
        )
        for dim in (0, 1)
    },
    "index_add in place": Case(
        written(lambda y, z: y.index_add_(0, INDEX % 4, z)), ((5, 4), (4, 4))
    ),
    "index_copy in place": Case(
        written(lambda y, z: y.index_copy_(0, torch.tensor([3, 0]), z)), ((5, 4), (2, 4))
    ),
    "index_reduce": Case(
        lambda x, y: x.detach().index_reduce(1, INDEX % 4, y.detach(), "amax"),
        ((4, 5), (4, 4)),
        derives=False,
    ),
    "index_reduce in place": Case(
        written(lambda y, z: y.detach().index_reduce_(0, INDEX % 4, z.detach(), "mean")),
        ((5, 4), (4, 4)),
        derives=False,
    ),
    "index_put": Case(
        lambda x, y: (
            x.index_put((INDEX,), y),
            x.index_put((INDEX % 4, INDEX), y[0], accumulate=True),
        ),
        ((5, 4), (4, 4)),
    ),
    "index_put in place": Case(
        written(lambda y, z: y.index_put_((INDEX % 4, INDEX), z, accumulate=True)),
        ((5, 4), (4,)),
    ),
    "select_scatter": Case(
        lambda x, y: (
            x.select_scatter(y[0], 0, 1),
            x.slice_scatter(y[:2], 0, 1, 3),
        ),
        ((5, 4), (5, 4)),
    ),
    "masked_scatter": Case(
        lambda x, y: x.masked_scatter(x > 0, y), ((5, 4), (5, 4)), may_gather=True
    ),
    "put": Case(
        lambda x, y: x.put(torch.tensor([3, 7]), y[0, :2]),
        ((5, 4), (5, 4)),
        may_gather=True,
    ),
    "index_fill in place": Case(written(lambda y: y.index_fill_(1, INDEX, 3.0)), ((5, 4),)),
    "where": Case(lambda x, y: torch.where(x > 0, x, y), ((4, 5), (5,))),
}

WRITING = {
    **{
        f"number at {key}": Case(assigned(key, 2.5))
        for key in (0, (slice(None), -1), (..., 3), slice(1, 3), (..., slice(1, None, 2)), ...)
    },
    "number at slices": Case(assigned((slice(1, 3), slice(0, 5, 2), 4), -1.0)),
    "number at nothing": Case(assigned((slice(3, 1)), -1.0)),
    "number at a list": Case(assigned(([0, 1],), 1.5)),
    "number at indices": Case(assigned((slice(None), INDEX), 1.5)),
    "number at indices and slices": Case(assigned((INDEX, slice(1, 4), 2), 1.5)),
    "tensor at indices": Case(assigned((slice(None), torch.tensor([3, 0]))), ((4, 5), (4, 2))),
    "tensor at indices of two dims": Case(
        assigned((torch.tensor([3, 0, 1]), torch.tensor([1, 2, -1]))),
        ((4, 5), (3,)),
        may_raise=True,
    ),
    "tensor at indices and slices": Case(
        assigned((torch.tensor([3, 0]), slice(1, 4))), ((4, 5, 6), (2, 3, 6))
    ),
    "tensor at indices that are no neighbours": Case(
        assigned((torch.tensor([3, 0]), slice(None), torch.tensor([1, 5]))), ((4, 5, 6), (2, 5))
    ),
    "row at indices": Case(assigned(([3, 0],)), ((4, 5), (5,))),
    "tensor at a slice": Case(assigned((slice(None), slice(1, 4))), ((4, 5), (4, 3))),
    "tensor at a step": Case(assigned((slice(None), slice(0, 5, 2))), ((4, 5), (4, 3))),
    "tensor at a number": Case(assigned((slice(None), 2)), ((4, 5, 6), (4, 6))),
    "tensor at the first": Case(assigned(-1), ((4, 5, 6), (5, 6))),
    "row to all": Case(assigned((..., slice(1, 4))), ((4, 5), (3,))),
    "tensor with ones": Case(assigned(slice(1, 3)), ((4, 5), (1, 1, 1, 5))),
    "tensor with new dimensions": Case(assigned((slice(1, 3), None)), ((4, 5), (2, 1, 5))),
    "tensor without dimensions": Case(assigned((slice(1, 3), 2)), ((4, 5), ())),
    "plain tensor at a slice": Case(
        assigned((slice(1, 3), slice(2, None))), ((4, 5), (2, 3)), plain_others=True
    ),
    "where a mask says": Case(written(lambda y: y.__setitem__(y > 0, 1.5))),
    "where a mask of rows says": Case(
        written(lambda y: y.__setitem__(y.detach()[:, 0, 0] > 0, 1.5))
    ),
    "augmented": Case(written(lambda y: y.__setitem__(slice(1, 3), y[1:3] * 3)), ((4, 5),)),
    "copy_": Case(written(lambda y, z: y.copy_(z)), ((4, 5), (4, 5))),
    "copy_ of a row": Case(written(lambda y, z: y.copy_(z)), ((4, 5), (5,))),
    "clone": Case(lambda x: (x.clone(), torch.clone(x) * 2)),
    "new": Case(lambda x: (x.new_zeros(3) + x[0, 0, 0], x.new_full((2,), 5.0) * x[0, 0, 0])),
}


FAMILIES: dict[str, dict[str, Case]] = {
    "reshapes": RESHAPES,
    "joints": JOINTS,
    "triangles": TRIANGLES,
    "indexing": INDEXING,
    "writing": WRITING,
}
assert all(prod(case.shapes[0]) < 1000 for family in FAMILIES.values() for case in family.values())
