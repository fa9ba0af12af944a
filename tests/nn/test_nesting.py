"""Packed sequences as inputs and results of converted models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

import tessel
from parity import values
from tessel.nn.nesting import members_of, nested, packed_in

Run = Callable[..., list[Any]]

LENGTHS = torch.tensor([3, 4, 6, 1])
SHAPE = (4, 6, 3)  # (samples, time, features)


class Recurrent(nn.Module):
    """Takes packed sequences, or packs padded ones, and gives what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.GRU(3, 2, batch_first=True).double()

    def forward(self, x: Any, lengths: Tensor | None = None) -> Any:
        return self.layer(x if lengths is None else packed(x, lengths))[0]


def packed(x: Tensor, lengths: Tensor = LENGTHS) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def grid(*shape: int) -> tessel.Partition:
    workers = tessel.world().size
    return tessel.world().create_cartesian_topology_partition([workers, *shape])


def gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
    """Of a sum with weights, by all parameters."""
    loss = (y * values(tuple(y.shape), 9)).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def whole(y: Tensor) -> Tensor:
    return y.full() if isinstance(y, tessel.Tensor) else y


def check_packed_inputs() -> None:
    """Packed before the model or inside of it, on grids with as many axes as some of its tensors.

    The grid of one axis has as many as the lengths of batches, that of two as the packed rows.
    """
    one = Recurrent()
    expected = one(packed(values(SHAPE, 3)))
    of_one = gradients(one, pad_packed_sequence(expected)[0])
    for axes in ((), (1,), (1, 1)):
        model = tessel.nn.distribute_module(Recurrent(), grid(*axes))
        x = tessel.spread(values(SHAPE, 3), grid(1, 1))
        results = [model(packed(x))]
        if axes:  # a grid of one axis would take plain lengths for parts
            results.append(model(x, LENGTHS))
        for y in results:
            assert isinstance(y, PackedSequence)
            torch.testing.assert_close(whole(y.data), expected.data)
            assert torch.equal(whole(y.batch_sizes), expected.batch_sizes)
            padded, lengths = pad_packed_sequence(y)
            assert torch.equal(whole(lengths), LENGTHS)
            for a, b in zip(gradients(model, padded), of_one, strict=True):
                torch.testing.assert_close(a, b)


def check_packed_results() -> None:
    """Of parts that a model packs, the caller gets the whole: rows are those of all samples."""

    class Embedded(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3).double()

        def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Any:
            return {"y": super().forward(self.table(ids), lengths)}

    one, ids = Embedded(), torch.arange(24).reshape(4, 6) % 9
    expected = one(ids, LENGTHS)["y"]
    of_one = gradients(one, pad_packed_sequence(expected)[0])
    P_x = grid(1)  # with as many axes as the packed rows have dimensions
    model = tessel.nn.distribute_module(Embedded(), P_x)
    model.load_state_dict(one.state_dict())
    y = model(tessel.Layout.balanced(P_x, ids.shape).local_part(ids), LENGTHS)["y"]
    torch.testing.assert_close(y.data, expected.data)
    assert torch.equal(y.batch_sizes, expected.batch_sizes)
    for a, b in zip(gradients(model, pad_packed_sequence(y)[0]), of_one, strict=True):
        torch.testing.assert_close(a, b)


def check_unclear_packed_inputs() -> None:
    """Of a plain packed input nobody knows whose samples it has: all workers raise alike."""
    for axes in ((1,), (1, 1)):
        model = tessel.nn.distribute_module(Recurrent(), grid(*axes))
        given = packed(values(SHAPE, 3))
        with pytest.raises(ValueError, match="PackedSequence of plain tensors"):
            model(given)
        if tessel.world().rank == 0:  # one alone, which gives others something else
            given = given.data
        with pytest.raises(ValueError, match="worker 0"):
            model(given)
        assert float(tessel.ones(9, where=tessel.world()).sum()) == 9  # all go on


class Captions(nn.Module):
    """Rows of a packed text, and the mean of an image."""

    def forward(self, image: Tensor, text: PackedSequence) -> Tensor:
        return text.data.sum() * image.mean()


def check_packed_beside_parts() -> None:
    """Whole, as all that has other dimensions than parts."""
    image, text = values((2, 3, 4, 4), 1), packed(values(SHAPE, 3))
    P_x = grid(1, 1, 1)
    model = tessel.nn.distribute_module(Captions(), P_x)
    part = tessel.Layout.balanced(P_x, image.shape).local_part(image)
    torch.testing.assert_close(model(part, text), Captions()(image, text))


@pytest.mark.parametrize(
    "check",
    [
        check_packed_inputs,
        check_packed_results,
        check_unclear_packed_inputs,
        check_packed_beside_parts,
    ],
)
@pytest.mark.parametrize("nprocs", [2, 3])
def test_packed_sequences(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs, timeout=60)


def test_members_of_packed_sequences() -> None:
    """In their order, and changed into others."""
    given = packed(values(SHAPE, 3))
    assert [each is not None for each in members_of({"x": [given]})] == [True] * 4
    (found,) = packed_in(3, {"x": [given]})
    assert found is given
    moved = nested(lambda x: x.clone(), (given,))[0]
    assert isinstance(moved, PackedSequence) and moved.data is not given.data
    assert all(torch.equal(a, b) for a, b in zip(moved, given, strict=True))
