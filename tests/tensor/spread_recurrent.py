"""Recurrent layers and cells, for `test_spread.py`.

Tests `tensor/rules/recurrent.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from spread_cases import Case


def layer(kind: str, *args: Any, **settings: Any) -> nn.Module:
    torch.default_generator.manual_seed(0)
    made: nn.Module = getattr(nn, kind)(*args, **settings).double()
    return made


def flat(result: Any) -> tuple[Any, ...]:
    y, last = result
    return (y, *last) if isinstance(last, tuple) else (y, last)


def sequence(kind: str, **settings: Any) -> Any:
    def does(x: Tensor) -> Any:
        return flat(layer(kind, 6, 4, **settings)(x))

    return does


def with_weights(kind: str, **settings: Any) -> Any:
    """Gradients of the weights, too: two of them are operands."""

    def does(x: Tensor, w: Tensor, v: Tensor) -> Any:
        module = layer(kind, 6, 4, **settings)
        weights = {"weight_ih_l0": w, "weight_hh_l0": v}
        return flat(torch.func.functional_call(module, weights, (x,)))

    return does


def gates(kind: str) -> int:
    return {"LSTM": 4, "GRU": 3}.get(kind, 1)


def with_states(x: Tensor, h: Tensor, c: Tensor) -> Any:
    return flat(layer("LSTM", 6, 4, num_layers=2)(x, (h, c)))


def packed(x: Tensor) -> Any:
    """Sequences of different length, of which each ends where it ends."""
    lengths = torch.tensor([5, 2, 4, 3])
    found = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, last = layer("GRU", 6, 4, batch_first=True)(found)
    return (pad_packed_sequence(y, batch_first=True)[0], last)


def loop(x: Tensor) -> Any:
    """What a cell gives is its next state."""
    cell, state = layer("LSTMCell", 6, 3), None
    for moment in x:
        state = cell(moment, state)
    return state


SHAPE = (5, 4, 6)  # time, batch, features
RECURRENT = {
    **{
        f"{kind} {name}": Case(sequence(kind, **settings), (SHAPE,))
        for kind in ("RNN", "LSTM", "GRU")
        for name, settings in {
            "of one layer": {},
            "of two layers, batch first": {"num_layers": 2, "batch_first": True},
            "in both directions": {"bidirectional": True, "num_layers": 2},
            "without biases": {"bias": False},
        }.items()
    },
    "RNN of relu": Case(sequence("RNN", nonlinearity="relu"), (SHAPE,)),
    "LSTM with a projection": Case(sequence("LSTM", proj_size=3), (SHAPE,)),
    **{
        f"{kind} and its weights": Case(
            with_weights(kind),
            (SHAPE, (4 * gates(kind), 6), (4 * gates(kind), 4)),
            plain_others=True,
        )
        for kind in ("RNN", "LSTM", "GRU")
    },
    "LSTM with states": Case(with_states, (SHAPE, (2, 4, 4), (2, 4, 4))),
    "GRU of one sample": Case(sequence("GRU"), ((5, 6),)),
    "GRU of few samples": Case(sequence("GRU"), ((5, 1, 6),)),
    "GRU of packed sequences": Case(packed, ((4, 5, 6),), may_gather=True),
    "RNNCell": Case(lambda x, h: layer("RNNCell", 6, 3)(x, h), ((4, 6), (4, 3))),
    "RNNCell of relu": Case(
        lambda x, h: layer("RNNCell", 6, 3, nonlinearity="relu")(x, h), ((4, 6), (4, 3))
    ),
    "GRUCell": Case(lambda x, h: layer("GRUCell", 6, 3)(x, h), ((4, 6), (4, 3))),
    "GRUCell from zero": Case(lambda x: layer("GRUCell", 6, 3)(x), ((4, 6),)),
    "GRUCell of one sample": Case(lambda x: layer("GRUCell", 6, 3)(x), ((6,),)),
    "LSTMCell": Case(lambda x, h, c: layer("LSTMCell", 6, 3)(x, (h, c)), ((4, 6), (4, 3), (4, 3))),
    "LSTMCell without biases": Case(lambda x: layer("LSTMCell", 6, 3, bias=False)(x), ((4, 6),)),
    "cells in a loop": Case(loop, (SHAPE,)),
}

FAMILIES = {"recurrent": RECURRENT}
