"""Attention, tables and grids for `test_spread.py`.

Tests `tensor/rules/attention.py`, `tensor/rules/embedding.py`, `tensor/rules/batched.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parity import values
from spread_cases import Case

Shape = tuple[int, ...]
ROWS = 7


def indices(shape: Shape, number: int) -> Tensor:
    """Whole numbers first, real ones behind."""
    found = values(shape, 3 + number)
    return found if number else (found * 100).long() % ROWS


def points(shape: Shape, number: int) -> Tensor:
    """Images first, points from -1 to 1 behind."""
    found = values(shape, 3 + number)
    return found.tanh() * 1.2 if number else found


def far_points(shape: Shape, number: int) -> Tensor:
    return points(shape, 1 - number)


def sorted_rows(shape: Shape, number: int) -> Tensor:
    found = values(shape, 3 + number)
    return found if number else found.sort(-1).values


def hidden(length: int, width: int) -> Tensor:
    """Which keys a query sees: all of them for the first, fewer for others."""
    return (values((length, width), 90) > -0.5) | (torch.arange(width) == 0)


Q, K = (2, 4, 5, 6), (2, 4, 7, 6)

ATTENTION = {
    "attention": Case(F.scaled_dot_product_attention, (Q, K, K), order=1),
    "attention by names": Case(
        lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v), (Q, K, K), order=1
    ),
    "attention of other values": Case(F.scaled_dot_product_attention, (Q, K, (2, 4, 7, 3))),
    "attention causal": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (Q, Q, Q), order=1
    ),
    "attention causal and longer": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (Q, K, K),
        order=1,
    ),
    "attention of one head, causal": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((1, 1, 9, 4), (1, 1, 9, 4), (1, 1, 9, 4)),
        order=1,
    ),
    "attention of three dimensions": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((3, 5, 4), (3, 5, 4), (3, 5, 2)),
    ),
    "attention of two dimensions": Case(F.scaled_dot_product_attention, ((5, 4), (6, 4), (6, 4))),
    "attention with a mask": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, hidden(5, 7)), (Q, K, K), order=1
    ),
    "attention with a bias": Case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (Q, K, K, (2, 1, 5, 7)),
    ),
    "attention of grouped queries": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (Q, (2, 2, 7, 6), (2, 2, 7, 6)),
        order=1,
    ),
    "attention of itself": Case(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (Q,), order=1
    ),
}

SAMPLES = 2 if torch.__version__ >= (2, 13) else 1  # before, torch derived samples of grids once

TABLES = {
    "embedding": Case(lambda i, w: F.embedding(i, w), ((4, 5), (ROWS, 3)), indices),
    "embedding with padding": Case(
        lambda i, w: (F.embedding(i, w, 2), F.embedding(i, w, padding_idx=-1)),
        ((4, 5), (ROWS, 3)),
        indices,
        plain_others=True,
    ),
    "embedding of a row": Case(
        lambda i, w: F.embedding(i, w).square(), ((6,), (ROWS, 3)), indices, plain_others=True
    ),
    "one_hot": Case(
        lambda i: (F.one_hot(i, ROWS), F.one_hot(i), F.one_hot(i.long(), num_classes=9)),
        ((4, 5),),
        indices,
    ),
    "bucketize": Case(
        lambda x: (
            torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5], dtype=x.dtype)),
            torch.bucketize(x, torch.tensor([-1.0, 1.0], dtype=x.dtype), right=True),
        )
    ),
    "searchsorted of one row": Case(
        lambda x: (
            torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), x),
            torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), input=x, side="right"),
        )
    ),
    "searchsorted of rows that a sorter sorts": Case(
        lambda s, x: (
            torch.searchsorted(s, x, sorter=s.argsort()),
            torch.searchsorted(s.detach().flip(1), x, sorter=s.flip(1).argsort(), right=True),
        ),
        ((4, 5), (4, 3)),
        derives=False,
    ),
    "searchsorted of rows": Case(
        lambda s, x: torch.searchsorted(s, x), ((4, 5), (4, 3)), sorted_rows, derives=False
    ),
    **{
        f"grid_sample {mode} {padding}": Case(
            lambda x, g, mode=mode, padding=padding: F.grid_sample(
                x, g, mode, padding, align_corners=False
            ),
            ((2, 3, 5, 6), (2, 4, 3, 2)),
            points,
            order=SAMPLES,
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border")
    },
    "grid_sample of volumes": Case(
        lambda x, g: F.grid_sample(x, g, align_corners=True),
        ((2, 2, 3, 4, 3), (2, 3, 2, 4, 3)),
        points,
        order=SAMPLES,
    ),
    "grid_sample of points": Case(
        lambda g, x: F.grid_sample(x, g, align_corners=False),
        ((2, 4, 3, 2), (2, 3, 5, 6)),
        far_points,
        order=SAMPLES,
    ),
    "affine_grid": Case(
        lambda t: (
            F.affine_grid(t, [4, 3, 5, 2], align_corners=False),
            F.affine_grid(t, [4, 3, 5, 2], align_corners=True),
        ),
        ((4, 2, 3),),
    ),
    "affine_grid of volumes": Case(
        lambda t: F.affine_grid(t, [4, 3, 2, 5, 2], align_corners=False), ((4, 3, 4),)
    ),
    **{
        f"embedding_bag {mode}": Case(
            lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode, padding_idx=2),
            ((4, 5), (ROWS, 3)),
            indices,
            order=1,
        )
        for mode in ("sum", "mean", "max")
    },
    "embedding_bag with factors": Case(
        lambda i, w, f: F.embedding_bag(i, w, mode="sum", per_sample_weights=f),
        ((4, 5), (ROWS, 3), (4, 5)),
        indices,
        order=1,
    ),
}


@lru_cache
def layer(kind: Callable[..., nn.Module], *args: Any, **settings: Any) -> nn.Module:
    torch.default_generator.manual_seed(1)
    return kind(*args, **settings).double()


def heads(**settings: Any) -> nn.Module:
    return layer(nn.MultiheadAttention, 6, 2, **settings)


def encoder(**settings: Any) -> nn.Module:
    return layer(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, **settings)


X = (4, 5, 6)  # batch, sequence, features
PADDING = torch.arange(5) > torch.tensor([[4], [2], [3], [4]])
CAUSAL = torch.ones(5, 5).triu(1).bool()

LAYERS = {
    "attention of heads": Case(lambda x: heads(batch_first=True)(x, x, x), (X,)),
    "heads without weights": Case(
        lambda x: heads(batch_first=True)(x, x, x, need_weights=False)[0], (X,), order=1
    ),
    "heads, sequence first": Case(lambda x: heads()(x, x, x), (X,)),
    "heads with all weights": Case(
        lambda x: heads(batch_first=True)(x, x, x, average_attn_weights=False), (X,)
    ),
    "heads across": Case(lambda q, k: heads(batch_first=True)(q, k, k), (X, (4, 7, 6))),
    "heads of other widths": Case(
        lambda q, k, v: heads(batch_first=True, kdim=3, vdim=5)(q, k, v),
        (X, (4, 7, 3), (4, 7, 5)),
    ),
    "heads with added keys": Case(
        lambda x: heads(batch_first=True, add_bias_kv=True, add_zero_attn=True)(
            x, x, x, attn_mask=CAUSAL, key_padding_mask=PADDING
        ),
        (X,),
    ),
    "heads without bias": Case(lambda x: heads(bias=False)(x, x, x)[0], (X,)),
    "heads of one sample": Case(lambda x: heads()(x, x, x), ((5, 6),)),
    "heads with padding": Case(
        lambda x: heads(batch_first=True)(x, x, x, key_padding_mask=PADDING, need_weights=False)[0],
        (X,),
        order=1,
    ),
    "heads with a mask for each head": Case(
        lambda x: heads(batch_first=True)(
            x, x, x, attn_mask=values((8, 5, 5), 77), need_weights=False
        )[0],
        (X,),
        order=1,
    ),
    "heads, causal": Case(
        lambda x: heads(batch_first=True)(
            x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False
        )[0],
        (X,),
        order=1,
    ),
    "heads, causal by the hint alone": Case(  # torch does not look at the mask then
        lambda x, m: heads(batch_first=True, add_bias_kv=True)(
            x, x, x, attn_mask=m, is_causal=True, need_weights=False
        )[0],
        (X, (5, 5)),
        order=1,
    ),
    "encoder in training": Case(lambda x: encoder(batch_first=True).train()(x), (X,), order=1),
    "encoder in evaluation": Case(lambda x: encoder(batch_first=True).eval()(x), (X,), order=1),
    "encoder without gradients": Case(
        lambda x: torch.no_grad()(encoder(batch_first=True, norm_first=True).eval())(x), (X,)
    ),
    "encoder of frozen tensors": Case(
        lambda x: torch.inference_mode(False)(encoder(batch_first=True).eval())(x.detach()), (X,)
    ),
    "encoder with masks": Case(
        lambda x: encoder(batch_first=True, activation="gelu").train()(
            x, src_mask=CAUSAL, src_key_padding_mask=PADDING
        ),
        (X,),
        order=1,
    ),
    "encoder, sequence first": Case(
        lambda x: encoder()(x, CAUSAL, is_causal=True), ((5, 4, 6),), order=1
    ),
    "stack of encoders": Case(
        lambda x: layer(
            nn.TransformerEncoder, encoder(batch_first=True), 2, enable_nested_tensor=False
        ).train()(x),
        (X,),
        order=1,
    ),
    "stack of encoders, with padding": Case(
        lambda x: layer(nn.TransformerEncoder, encoder(batch_first=True), 2).eval()(
            x.detach(), src_key_padding_mask=PADDING
        )[:, :3],
        (X,),
        derives=False,
    ),
    "decoder": Case(
        lambda x, m: layer(
            nn.TransformerDecoderLayer, 6, 2, 8, dropout=0.0, batch_first=True
        ).train()(x, m, CAUSAL, tgt_is_causal=True),
        (X, (4, 7, 6)),
        order=1,
    ),
}

FAMILIES: dict[str, dict[str, Case]] = {
    "attention": ATTENTION,
    "tables": TABLES,
    "layers of attention": LAYERS,
}
