"""Encoders of torch that leave out padding, in converted models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessel
from parity import values

Run = Callable[..., list[Any]]
SHAPE = (3, 7, 8)  # samples, tokens, features
LENGTHS = (4, 7, 2)  # of the samples: what is behind is padding


class Mean(nn.Module):
    """The mean over all tokens of an encoder, padding included."""

    def __init__(self, has_norm: bool, **settings: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        norm = nn.LayerNorm(8) if has_norm else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, **settings)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding).mean(1)


def padding_of(kind: str) -> Tensor:
    """Which tokens are padding."""
    hidden = torch.arange(SHAPE[1]) >= torch.tensor(LENGTHS)[:, None]
    if kind == "in front":
        hidden = hidden.flip(1)
    if kind == "split":  # as the tokens are
        grid = tessel.world().create_cartesian_topology_partition([1, tessel.world().size])
        return tessel.spread(hidden, grid)
    if kind == "numbers":
        return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    return hidden


def errors(axis: int, kind: str, has_norm: bool, settings: dict[str, bool]) -> list[float]:
    """Against one process: without gradients, with them, and in training."""
    torch.manual_seed(0)
    one = Mean(has_norm, **settings).double()
    for parameter in one.parameters():
        nn.init.normal_(parameter)  # with biases: the norm of zeros is not zero
    shape = [1, 1, 1]
    shape[axis] = tessel.world().size
    grid = tessel.world().create_cartesian_topology_partition(shape)
    model = tessel.nn.distribute_module(copy.deepcopy(one), grid)
    x, padding = values(SHAPE, 1), padding_of(kind)
    whole = padding.full() if isinstance(padding, tessel.Tensor) else padding
    found = []
    for training, gradients in ((False, False), (False, True), (True, True)):
        one.train(training), model.train(training)
        with torch.set_grad_enabled(gradients):
            difference = model(tessel.spread(x, grid), padding).full() - one(x, whole)
        found.append(float(difference.detach().abs().max()))
    return found


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("kind", ["behind", "in front", "numbers", "split"])
def test_padding_is_what_it_is_in_one_process(
    run: Run, kind: str, has_norm: bool, axis: int
) -> None:
    for found in run(errors, axis, kind, has_norm, {}, nprocs=3, timeout=60):
        assert max(found) < 1e-12


def test_padding_of_encoders_that_do_not_leave_it_out(run: Run) -> None:
    settings = {"enable_nested_tensor": False}
    for found in run(errors, 1, "behind", True, settings, nprocs=2, timeout=60):
        assert max(found) < 1e-12
