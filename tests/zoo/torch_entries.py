"""Entries of torch itself: transformers and recurrent layers, sequences or batches split."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from entries import TOKENS, ZooEntry, floats

BATCH, THIRDS = (2, 1, 1), (1, 3, 1)
WIDTH = 16


def encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, 4, 1, 1, 32, batch_first=True)


def two_sequences() -> dict[str, Any]:
    source, target = floats(2, 12, WIDTH)()[0], floats(2, 9, WIDTH, seed=2)()[0]
    return {"src": source, "tgt": target, "tgt_mask": causal(9), "tgt_is_causal": True}


def causal(length: int) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length).to(torch.float64)


def sequence_and_mask() -> dict[str, Any]:
    return {"src": floats(2, 12, WIDTH)()[0], "mask": causal(12), "is_causal": True}


entry = partial(ZooEntry, "torch", train=(TOKENS, THIRDS), eval=(TOKENS, BATCH))
sequences = floats(2, 12, WIDTH)

ENTRIES = [
    entry("TransformerEncoder", encoder, sequences),
    entry(
        "TransformerEncoder, norms first, causal",
        partial(encoder, norm_first=True),
        sequence_and_mask,
    ),
    entry("Transformer", transformer, two_sequences),
    entry(
        "LSTM",
        partial(nn.LSTM, WIDTH, 8, 2, batch_first=True, bidirectional=True, dropout=0.1),
        sequences,
    ),
    entry("LSTM, projected", partial(nn.LSTM, WIDTH, 8, proj_size=4, batch_first=True), sequences),
    entry("GRU", partial(nn.GRU, WIDTH, 8, 2, batch_first=True), sequences),
    entry("RNN", partial(nn.RNN, WIDTH, 8, batch_first=True), sequences),
]
