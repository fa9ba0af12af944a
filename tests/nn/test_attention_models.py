"""Converted models with attention, sequences split: what they give in one process.

The models are those of torch, and the two that most others are made like: a picture in patches with
a class token, and a language model with rotary positions and groups of heads.

Tests `tensor/rules/attention.py`, `tensor/rules/attention_plan.py`.
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


class Windows(nn.Module):
    """A block as Swin has it: attention inside of windows that are shifted, of a padded picture.

    Windows lie across parts, and their size divides neither the picture nor the parts.
    """

    def __init__(self, size: int = 3, shift: int = 1, dims: int = 2) -> None:
        super().__init__()
        self.size, self.shift, self.dims = size, shift, dims
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        places = torch.cartesian_prod(*[torch.arange(size)] * dims)
        offsets = places[:, None] - places[None] + size - 1  # of each pair, in each dimension
        index = torch.zeros(len(places), len(places), dtype=torch.long)
        for each in offsets.unbind(-1):
            index = index * (2 * size - 1) + each
        self.register_buffer("index", index)
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** dims, HEADS))

    def forward(self, x: Tensor) -> Tensor:  # channels first, as pictures come
        n, d = self.size, self.dims
        y = self.norm(x.movedim(1, -1))
        lengths = y.shape[1:-1]
        padding = [side for length in reversed(lengths) for side in (0, -length % n)]
        y = F.pad(y, [0, 0, *padding])
        dims = tuple(range(1, d + 1))
        y = y.roll([-self.shift] * d, dims)
        whole, counts = y.shape, [length // n for length in y.shape[1:-1]]
        split = [part for count in counts for part in (count, n)]
        order = [0, *range(1, 2 * d, 2), *range(2, 2 * d + 1, 2), 2 * d + 1]
        windows = y.reshape(len(y), *split, WIDTH).permute(order)
        bias = self.table[self.index].permute(2, 0, 1)
        y = self._attended(windows.reshape(-1, n**d, WIDTH), bias)
        back = [0] * len(order)
        for place, dim in enumerate(order):
            back[dim] = place
        y = y.reshape(len(x), *counts, *[n] * d, WIDTH).permute(back).reshape(whole)
        y = y.roll([self.shift] * d, dims)
        for dim, length in zip(dims, lengths, strict=True):
            y = y.narrow(dim, 0, length)
        return x + y.movedim(-1, 1)

    def _attended(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Shuffled(nn.Module):
    """Pixels to channels and back, and patches by unfold and fold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1)
        self.mix = nn.Linear(9 * WIDTH, 9 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pixel_shuffle(self.inner(F.pixel_unshuffle(x, 2)).relu(), 2)
        patches = F.unfold(y, 3, padding=1)
        patches = self.mix(patches.transpose(1, 2)).transpose(1, 2)
        return F.fold(patches, tuple(y.shape[2:]), 3, padding=1)


class Interpolated(nn.Module):
    """Positions that were learned for another size, and a token for the whole picture."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, WIDTH, 4, 4))
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        size = tuple(x.shape[2:])
        x = x + F.interpolate(self.positions, size, mode="bicubic", align_corners=False)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
        tokens = tokens + self.inner(tokens, tokens, tokens, need_weights=False)[0]
        return tokens[:, 1:].transpose(1, 2).unflatten(2, size) * tokens[:, :1, :, None].mean(
            2, True
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pictures": Pictures,
    "language": Language,
    "language with dropout": lambda: Language(0.3),
    "transformer": Both,
    "heads": Heads,
    "heads with weights": lambda: Heads(need_weights=True),
    "heads with added keys": lambda: Heads(add_bias_kv=True, add_zero_attn=True),
    "windows": Windows,
    "windows that divide": lambda: Windows(4, 2),
    "windows of volumes": lambda: Windows(2, 1, 3),
    "shuffled": Shuffled,
    "interpolated": Interpolated,
}
SHAPES = {"pictures": (2, 3, 16, 16), "windows of volumes": (1, WIDTH, 3, 5, 4)}
SHAPES |= dict.fromkeys(("windows", "windows that divide", "interpolated"), (2, WIDTH, 8, 8))
SHAPES["shuffled"] = (1, WIDTH, 8, 6)


def checked(name: str, training: bool, most: int) -> list[str]:
    """What differs from one process, and what is gathered."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train(training)
    shape = SHAPES.get(name, (2, LENGTH, WIDTH))
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


# In training or not; keys that travel, on three workers, whose parts are uneven and come from both
# sides, or that are gathered since there are few.
TRAVEL, GATHER = 0, 1 << 16
CALLS = {
    1: [(True, TRAVEL)],
    2: [(False, GATHER), (True, GATHER)],
    3: [(False, TRAVEL), (True, TRAVEL)],
}


@pytest.mark.parametrize("nprocs", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_models(run: Run, name: str, nprocs: int) -> None:
    for training, most in CALLS[nprocs]:
        assert run(checked, name, training, most, nprocs=nprocs, timeout=100)[0] == []


def generated(shape: list[int]) -> float:
    """The error of tokens that come one by one, while keys and values are kept in parts."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    P = tessel.world().create_cartesian_topology_partition(shape)
    first = LENGTH // 2
    asked, *kept = (tessel.spread(each[:, :, :first], P) for each in (q, k, v))
    found = [F.scaled_dot_product_attention(asked, *kept, is_causal=True).full()]
    for place in range(first, LENGTH):
        new = slice(place, place + 1)
        for number, each in enumerate((k, v)):
            kept[number] = torch.cat([kept[number], each[:, :, new]], 2)
        found.append(F.scaled_dot_product_attention(q[:, :, new], *kept).full())
    return float((torch.cat(found, 2) - expected).abs().max())


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_generation_with_a_split_cache(run: Run, nprocs: int) -> None:
    found = run(generated, [1, 1, nprocs, 1], nprocs=nprocs, timeout=60)
    assert max(found) < 1e-12
