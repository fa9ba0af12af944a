"""Converted models with attention, sequences split: what they give in one process.

The models are those of torch, and the two that most others are made like: a picture in patches with
a class token, and a language model with rotary positions and groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from parity import values
from tessel.tensor.rules import attention_plan
from tessel.testing import check_model

Run = Callable[..., list[Any]]
WIDTH, HEADS, LENGTH = 8, 2, 12


class Pictures(nn.Module):
    """A vision transformer: patches, a class token, learned positions, an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, "gelu", 1e-6, True, True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.encoder(tokens)[:, 0])


class Language(nn.Module):
    """A causal block as Llama has it: rotary positions, two heads of queries for one of keys."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p
        self.norm = nn.RMSNorm(WIDTH)
        self.queries = nn.Linear(WIDTH, 4 * 4, bias=False)
        self.keys, self.values = (nn.Linear(WIDTH, 2 * 4, bias=False) for _ in range(2))
        self.out = nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.tensor([1.0, 9.0] * 2)
        q, k = (self._turned(each, angles) for each in (q, k))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))

    @staticmethod
    def _turned(x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Both(nn.Module):
    """A transformer from a sequence to itself, each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, HEADS, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x.dtype)
        return self.inner(x, x.flip(2), tgt_mask=mask, tgt_is_causal=True)


class Heads(nn.Module):
    """Attention of heads with padding, and its weights."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.need_weights = settings.pop("need_weights", False)
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Any:
        padding = (torch.arange(x.shape[1]) >= 10).expand(len(x), -1)
        found = self.inner(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)
        return found if self.need_weights else found[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pictures": Pictures,
    "language": Language,
    "language with dropout": lambda: Language(0.3),
    "transformer": Both,
    "heads": Heads,
    "heads with weights": lambda: Heads(need_weights=True),
    "heads with added keys": lambda: Heads(add_bias_kv=True, add_zero_attn=True),
}


def checked(name: str, training: bool, most: int) -> list[str]:
    """What differs from one process, and what is gathered."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train(training)
    shape = (2, 3, 16, 16) if name == "pictures" else (2, LENGTH, WIDTH)
    grid = [1] * len(shape)
    grid[-2] = tessel.world().size
    before, attention_plan.GATHERED = attention_plan.GATHERED, most
    try:
        P = tessel.world().create_cartesian_topology_partition(grid)
        report = check_model(model, values(shape, 1), where=P)
    finally:
        attention_plan.GATHERED = before
    wrong = [] if report.passed else [str(report)]
    return wrong + [f"gathered: {each}" for each in report.gathers]


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models(run: Run, name: str, nprocs: int) -> None:
    for training in (False, True):
        # keys that travel, and keys that are gathered since there are few
        for most in (0, 1 << 16):
            assert run(checked, name, training, most, nprocs=nprocs, timeout=100)[0] == []
