"""Attention: queries in parts of batch, heads and sequence, each with all keys of its own.

Batch and heads may be split as they are. A split sequence goes to heads and batch if they are long
enough; else queries stay split, and keys and values are whole along the sequence.
"""

from __future__ import annotations

import math
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core.layout import Layout
from tessel.tensor.rules.batched import applied, check_partition
from tessel.tensor.rules.hosting import hosted, split_like
from tessel.tensor.rules.products import planned
from tessel.tensor.table import Arguments, Settings, arguments_of, gathered, made, outlines, rule
from tessel.tensor.tensor import Tensor

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule("scaled_dot_product_attention", plain=True)
def attention(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """softmax(Q Kᵀ / √E + mask) V; with dropout, from the functions that it is made of."""
    given: Settings = dict(zip(_ATTENTION, args, strict=False)) | kwargs
    q, k, v = (given.pop(key) for key in ("query", "key", "value"))
    mask = given.pop("attn_mask", None)
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    causal = bool(given.get("is_causal", False))
    if given.get("enable_gqa", False) and q.shape[-3] != k.shape[-3]:
        # query heads in groups: heads of keys are repeated, whole on every worker
        outlines(partial(_attended, func, given, causal), operands, {})  # torch's own error
        times, repeated = q.shape[-3] // k.shape[-3], []
        for each in (k, v):
            heads = each.dim() - 3
            if isinstance(each, Tensor) and each._layout.is_split(heads):
                each = each.move_to(gathered(each._layout, (heads,)))
            repeated.append(each.repeat_interleave(times, -3))
        return func(q, *repeated, mask, **{**given, "enable_gqa": False})
    found = outlines(partial(_attended, func, given, causal), operands, {})
    if given.get("dropout_p", 0.0) > 0:  # torch's dropout of the weights, which all draw alike
        scale = given.get("scale")
        weights = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
        mask = causal_mask((0, q.shape[-2]), k.shape[-2], q.device) if causal else mask
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            weights = weights.masked_fill(~mask, -math.inf) if is_bool else weights + mask
        return F.dropout(weights.softmax(-1), given["dropout_p"]) @ v
    plan = _planned(name, operands)
    box = plan.inputs[0].box()
    assert box is not None
    rows = box[-2] if plan.inputs[0].is_split(q.dim() - 2) else None
    part = applied(partial(_attended, func, given, causal, rows=rows), operands, plan, found.dtype)
    result = made(part, plan.result)
    if isinstance(q, Tensor):  # results lie as the queries did
        result = result.move_to(split_like(q._layout, tuple(found.shape)))
    return result


def _attended(
    func: Any,
    given: Settings,
    causal: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Torch's attention of parts; of queries in the rows that are given, a causal mask knows it."""
    if causal and rows is not None:
        mask, causal = causal_mask(rows, k.shape[-2], q.device), False
    found: torch.Tensor = func(q, k, v, mask, **{**given, "is_causal": causal})
    return found


def causal_mask(rows: tuple[int, int], num_keys: int, device: Any) -> torch.Tensor:
    """Which keys the queries in these rows of the whole see: those that are not behind them."""
    queries = torch.arange(*rows, device=device).unsqueeze(-1)
    return queries >= torch.arange(num_keys, device=device)


def _planned(name: str, operands: tuple[torch.Tensor, ...]) -> Any:
    """Batch and heads as they lie; rows of queries only where nothing can host them."""
    ndim = max(each.dim() for each in operands)
    batch = ascii_lowercase[: ndim - 2]
    ends = ("XE", "YE", "YV", "XY")
    indices = tuple(
        batch[len(batch) - each.dim() + 2 :] + end
        for each, end in zip(operands, ends, strict=False)
    )
    layouts: list[Layout | None] = [None] * len(operands)  # a mask lies as the others want it
    for number, each in enumerate(operands[:3]):
        if isinstance(each, Tensor):
            layout, sequence, features = each._layout, each.dim() - 2, each.dim() - 1
            there = hosted(layout, (sequence, features))
            # Queries that nothing can host stay where they are: each is on its own. Keys and
            # values cannot, since every query reads all of them.
            is_hosted = number or len(there.shared) == len(layout.shared)
            layouts[number] = there if is_hosted else hosted(layout, (features,))
    shapes = tuple(tuple(each.shape) for each in operands)
    partition = check_partition(name, operands)
    return planned(partition, indices, batch + "XV", shapes, tuple(layouts))


@rule("_nested_tensor_from_mask_left_aligned")
def is_left_aligned(name: str, func: Any, args: Arguments, kwargs: Settings) -> bool:
    """Whether padding may be left out, as `torch.nn.TransformerEncoder` asks: spread, it stays."""
    return False


# -- layers of attention --------------------------------------------------------------------------


@rule("multi_head_attention_forward", plain=True)
def multi_head_attention(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """What `torch.nn.MultiheadAttention` calls, with batch and heads as dimensions of their own.

    Torch merges them into one, which would make a split batch whole.
    """
    given = arguments_of(name, func, args, kwargs)
    q, k, v = given["query"], given["key"], given["value"]
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    check: Any = F._mha_shape_check  # type: ignore[attr-defined]
    is_batched = check(q, k, v, padding, mask, given["num_heads"])
    if not is_batched:
        q, k, v = (each.unsqueeze(1) for each in (q, k, v))
        padding = None if padding is None else padding.unsqueeze(0)
    # torch's conditions on the shapes
    width, heads = q.shape[-1], given["num_heads"]
    if width != given["embed_dim_to_check"]:
        expected = given["embed_dim_to_check"]
        raise AssertionError(f"was expecting embedding dimension of {expected}, but got {width}")
    if width % heads:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {heads}")
    same = slice(2) if given["use_separate_proj_weight"] else slice(3)
    if k.shape[same] != v.shape[same]:
        raise AssertionError(f"key shape {k.shape} does not match value shape {v.shape}")
    if given["is_causal"] and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    rows = (q.shape[0], k.shape[0])
    expected = rows if mask is None or mask.dim() == 2 else (q.shape[1] * heads, *rows)
    if mask is not None and tuple(mask.shape) != expected:
        raise RuntimeError(
            f"The shape of the attn_mask is {tuple(mask.shape)}, but should be {expected}."
        )
    found, weights = _heads_attended(q, k, v, padding, mask, given)
    if is_batched:
        return found, weights
    return found.squeeze(1), None if weights is None else weights.squeeze(0)


def _heads_attended(q: Any, k: Any, v: Any, padding: Any, mask: Any, given: Settings) -> Any:
    """Attention of all heads, and the weights if they are asked for."""
    heads, (length, batch, width) = given["num_heads"], q.shape
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    if given["use_separate_proj_weight"]:
        matrices = [given[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        matrices = given["in_proj_weight"].chunk(3)
    # (sequence, batch, features of all heads)
    q, k, v = (F.linear(*each) for each in zip((q, k, v), matrices, biases, strict=True))
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].expand(1, batch, -1)])
        v = torch.cat([v, given["bias_v"].expand(1, batch, -1)])
    # (batch, heads, sequence, features of a head)
    q, k, v = (
        x.reshape(*x.shape[:2], heads, x.shape[2] // heads).permute(1, 2, 0, 3) for x in (q, k, v)
    )
    k = _statics(k, given["static_k"], heads)
    v = _statics(v, given["static_v"], heads)
    if given["add_zero_attn"]:
        zeros = torch.zeros(batch, heads, 1, width // heads, dtype=q.dtype, device=q.device)
        k, v = torch.cat([k, zeros], 2), torch.cat([v, zeros], 2)
    bias = _bias(padding, mask, q, k.shape[2])
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        scores = (q * math.sqrt(1.0 / (width // heads))) @ k.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout > 0 else weights
        found = weights @ v
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        found = F.scaled_dot_product_attention(q, k, v, bias, dropout)
    found = found.permute(2, 0, 1, 3).reshape(length, batch, width)
    return F.linear(found, given["out_proj_weight"], given["out_proj_bias"]), weights


def _statics(x: Any, static: Any, heads: int) -> Any:
    """Keys or values that the caller gives in the place of projected ones."""
    return x if static is None else static.reshape(-1, heads, *static.shape[1:])


def _bias(padding: Any, mask: Any, q: Any, num_keys: int) -> Any:
    """What is added to the scores, of both masks; keys that were added behind are seen by all."""
    found = None
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask.reshape(q.shape[0], -1, *mask.shape[1:])
        found = _additive(mask, q.dtype)
    if padding is not None:
        hidden = _additive(padding, q.dtype)[:, None, None, :]
        found = hidden if found is None else found + hidden
    if found is None or found.shape[-1] == num_keys:
        return found
    return F.pad(found, (0, num_keys - found.shape[-1]))


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    """A mask of truth values, which says what is hidden, as a term of the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise AssertionError("only bool and floating types of masks are supported")
    return mask
