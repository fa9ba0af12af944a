"""Attention of spread tensors, and the layers built on it.

`attention_plan` determines where queries, keys and values meet, and `blockwise_attention` computes,
also if keys arrive block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessel.core.context import in_forward_mode, in_transform, is_compiling, setting
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.linop import record_map
from tessel.core.shared import anchored_zeros
from tessel.tensor.block_sum import Operand, Tile
from tessel.tensor.blockwise_attention import BlockwiseAttention, Dropout, FlashKernel, Scores
from tessel.tensor.rules import attention_plan
from tessel.tensor.rules.attention_plan import AttentionPlan, plans
from tessel.tensor.rules.batched import check_partition, part_of
from tessel.tensor.shared_random import common_number
from tessel.tensor.table import (
    Arguments,
    Settings,
    arguments_of,
    as_autocast,
    made,
    open_part,
    outlines,
    outlining,
    rule,
    widened,
)
from tessel.tensor.tensor import Tensor, move

# the ways of attention, while they are recorded
_notes: ContextVar[list[str] | None] = ContextVar("noted ways of attention", default=None)

_MATH = SDPBackend.MATH.value
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule("scaled_dot_product_attention", plain=True)
def attention(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """softmax(Q Kᵀ / √E + mask) V."""
    given: Settings = dict(zip(_ATTENTION, args, strict=False)) | kwargs
    operands = tuple(given.pop(key, None) for key in _ATTENTION[:4])
    # Before torch checks them: it accepts operands of several dtypes if it casts them itself, but
    # it does not cast the meta tensors by which it checks here.
    operands = tuple(as_autocast(x) if isinstance(x, torch.Tensor) else x for x in operands)
    found = outlines(func, operands, given)  # torch's own errors
    call = _AttentionCall(name, func, operands, given, tuple(found.shape))
    return call.result()


def named_operands(args: Arguments, kwargs: Settings) -> tuple[tuple[torch.Tensor, ...], bool, int]:
    """q, k, v and a mask; whether attention is causal; how many heads of queries share keys."""
    given: Settings = dict(zip(_ATTENTION, args, strict=False)) | kwargs
    operands = tuple(given[key] for key in _ATTENTION[:4] if given.get(key) is not None)
    if len(operands) > 3 and operands[3].dim() < 2:
        operands = (*operands[:3], operands[3].reshape(1, -1))
    q, k = operands[:2]
    groups = q.shape[-3] // k.shape[-3] if given.get("enable_gqa", False) else 1
    return operands, bool(given.get("is_causal", False)), groups


class _AttentionCall:
    """One call of the function.

    Args:
        name, func: the function.
        operands: q, k, v, and the mask or None.
        given: the other arguments.
        shape: the shape of the result.
    """

    def __init__(
        self, name: str, func: Any, operands: Arguments, given: Settings, shape: Shape
    ) -> None:
        self.func, self.shape = func, shape
        found, self.is_causal, self.groups = named_operands(operands, given)
        self.operands = found
        q, scale = self.operands[0], given.get("scale")
        self.scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else float(scale)
        self.p = float(given.get("dropout_p", 0.0))
        self.partition = check_partition(name, self.operands)
        self.seed = common_number(self.partition) if self.p > 0 else 0
        # Transforms, forward mode and compilers need torch's functions, of all keys, which are
        # gathered whatever their number.
        self.is_plain = in_transform() or is_compiling()
        most = math.inf if self.is_plain else attention_plan.GATHERED
        ways = ways_of(self.operands, self.is_causal, self.groups, most)
        self.plan = ways[0]
        if self.is_plain:
            self.plan = next((each for each in ways if each.way == "gather"), ways[0])

    def result(self) -> Tensor:
        """The result of the function, in the layout of the queries."""
        plan = self.plan
        if (notes := _notes.get()) is not None:
            notes.append(plan.way)
        if outlining.get() and not self.partition.is_supposed:
            # this worker has no values, but knows the layout of the result
            real = [open_part(x) if isinstance(x, Tensor) else x for x in self.operands]
            real = [each for each in real if each.is_floating_point()]
            return made(anchored_zeros(plan.final.local_shape, *real), plan.final)
        parts = []
        for each, layouts in zip(self.operands, plan.inputs, strict=True):
            chunks = [part_of(each, layout) for layout in layouts]
            parts.append(chunks[0] if len(chunks) == 1 else torch.cat(chunks, -2))
        q = parts[0]
        with torch.autocast(q.device.type, enabled=False):  # operands are cast already
            if plan.way == "queries":
                part = self._merged(parts)
            elif plan.way == "ring":
                part = self._blockwise(parts)
            else:
                part = self._held(parts)
        if len(plan.results) == 1:
            return made(part, plan.results[0]).move_to(plan.final)
        # chunks of queries return to their former workers, each index once
        chunks = part.split([each.local_shape[-2] for each in plan.results], -2)
        first, second = (
            move(layout, plan.final).apply(chunk)
            for chunk, layout in zip(chunks, plan.results, strict=True)
        )
        return made(first + second, plan.final)

    def _scores(self) -> Scores:
        """The function that computes this worker's scores."""
        layout = self.plan.results[0]
        box = layout.box()
        assert box is not None
        heads, dropout = None, None
        if self.groups > 1:
            first = box[-3][0] // self.groups
            heads = tuple(head // self.groups - first for head in range(*box[-3]))
        if self.p > 0:
            lengths = (self.operands[0].shape[-2], self.operands[1].shape[-2])
            dropout = Dropout(self.p, self.seed, (*layout.shape[:-2], *lengths), box[:-2])
        return Scores(self.scale, self.is_causal, heads, dropout)

    def _blockwise(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Attention block by block, with the scores of one block at a time."""
        plan = self.plan
        batch = plan.results[0].local_shape[:-2]
        operands = (*plan.operands, Operand())[:4]  # the last one for a missing mask
        function = BlockwiseAttention(plan.schedule, self._scores(), operands, batch)
        return record_map(function, *(*parts, None)[:4])[0]

    def _held(self, parts: list[torch.Tensor]) -> Any:
        """Attention to all keys that queries see, by torch's own function."""
        plan = self.plan
        shape = plan.results[0].local_shape
        if 0 in shape or not self.operands[1].shape[-2]:
            # Torch rejects some empty tensors, treats others as constants in derivatives, and
            # returns zeros without dimensions that only keys or values have.
            real = [each for each in parts if each.is_floating_point()]
            return anchored_zeros(shape, *real).to(parts[0].dtype)
        q, k, v, *rest = parts
        if not self.is_plain and (self.p > 0 or FlashKernel.takes(q, v)):
            return self._blockwise(parts)
        (rows,) = plan.schedule.rows[plan.schedule.place]
        scores, mask = self._scores(), rest[0] if rest else None
        if self.p > 0:  # all scores at once, in functions that torch differentiates in every mode
            tile = Tile(0, rows, 0, (0, k.shape[-2]))
            found = scores(tile, q, k, mask)
            nothing = (found == -math.inf).all(-1, keepdim=True)
            weights = found.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
            return (scores.dropped(tile, weights) @ widened(scores.of_heads(v))).to(q.dtype)
        is_causal = self.is_causal
        if is_causal and rows[0] > 0:
            mask, is_causal = causal_mask(rows, k.shape[-2], q.device), False
        k, v = scores.of_heads(k), scores.of_heads(v)
        if not self.is_plain and plan.way != "local":
            choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=self.scale)
            if choice == _MATH:  # torch would compute all scores at once
                return self._blockwise(parts)
        # the only kernel that torch can derive in forward mode
        with sdpa_kernel(SDPBackend.MATH) if in_forward_mode() else nullcontext():
            return self.func(q, k, v, mask, is_causal=is_causal, scale=self.scale)

    def _merged(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """All queries with this worker's keys; weights and results are summed over workers."""
        plan, schedule = self.plan, self.plan.schedule
        q, k, v, *rest = parts
        scores, columns = self._scores(), schedule.block(schedule.place, 0)
        tile = Tile(0, (0, q.shape[-2]), 0, columns)
        found = scores(tile, q, k, rest[0] if rest else None)
        # values may have batch dimensions that neither queries nor keys have
        found = found.expand(*plan.results[0].local_shape[:-2], *found.shape[-2:])
        batch = plan.results[0].shape[:-2]
        cuts = plan.results[0].cuts[:-2]
        with torch.no_grad():  # the result does not depend on the base of the exponents
            own = found.new_full((*found.shape[:-1], 1), -math.inf)
            own = found.amax(-1, keepdim=True) if found.numel() else own
            base = self._largest(own)
            base = base.masked_fill(base == -math.inf, 0)
        weights = (found - base).exp()
        total = weights.sum(-1, keepdim=True)
        terms = torch.cat([scores.dropped(tile, weights) @ widened(scores.of_heads(v)), total], -1)
        if not found.numel():
            terms = terms + anchored_zeros(
                tuple(terms.shape), *(each for each in parts if each.is_floating_point())
            ).to(terms.dtype)
        length, features = q.shape[-2], terms.shape[-1]
        shape = (*batch, length, features)
        wholes = (Cut.whole(length), Cut.whole(features))
        source = Layout.of_cuts(self.partition, shape, (*cuts, *wholes))
        source = replace(
            source, shared=tuple(axis for axis in source.shared if axis not in schedule.axes)
        )
        there = plan.results[0]
        target = replace(there, shape=shape, cuts=(*there.cuts[:-1], Cut.whole(features)))
        summed = move(source, target).apply(terms)
        found, total = summed[..., :-1], summed[..., -1:]
        return (found / total.masked_fill(total == 0, 1)).to(q.dtype)

    def _largest(self, own: torch.Tensor) -> torch.Tensor:
        """The largest scores on all workers with keys of the same queries."""
        there, axes = self.plan.results[0], self.plan.schedule.axes
        places = len(self.plan.schedule.rows)
        lengths = (own.shape[-2], 1)
        shape = (places, *there.shape[:-2], *lengths)
        cuts = (*there.cuts[:-2], *map(Cut.whole, lengths))
        row = Cut(axes, tuple((place, place + 1) for place in range(places)))
        source = Layout.of_cuts(self.partition, shape, (row, *cuts))
        target = Layout.of_cuts(self.partition, shape, (Cut.whole(places), *cuts))
        return move(source, target).apply(own.unsqueeze(0)).amax(0)


@contextmanager
def noted_ways() -> Iterator[list[str]]:
    """Record the ways of attention in the `with` block, call by call."""
    notes: list[str] = []
    with setting(_notes, notes):
        yield notes


def ways_of(
    operands: Sequence[torch.Tensor],
    is_causal: bool = False,
    groups: int = 1,
    most: float | None = None,
) -> tuple[AttentionPlan, ...]:
    """All ways for these operands, best first; they gather at most `most` keys and values."""
    layouts = [each._layout if isinstance(each, Tensor) else None for each in operands]
    shapes = [tuple(each.shape) for each in operands]
    return ways_between(shapes, layouts, is_causal, groups, most)


def ways_between(
    shapes: Sequence[Shape],
    layouts: Sequence[Layout | None],
    is_causal: bool,
    groups: int,
    most: float | None = None,
) -> tuple[AttentionPlan, ...]:
    """The same for operands of these shapes and layouts, on one grid; None for plain ones."""
    partition = next(each for each in layouts if each is not None).partition
    most = attention_plan.GATHERED if most is None else most
    return plans(partition, tuple(shapes), tuple(layouts), is_causal, groups, most)


def causal_mask(rows: tuple[int, int], num_keys: int, device: Any) -> torch.Tensor:
    """The keys that queries in these rows of the whole see: those up to their own indices."""
    queries = torch.arange(*rows, device=device).unsqueeze(-1)
    return queries >= torch.arange(num_keys, device=device)


@rule("_nested_tensor_from_mask_left_aligned")
def is_left_aligned(name: str, func: Any, args: Arguments, kwargs: Settings) -> bool:
    """False, the answer to `torch.nn.TransformerEncoder`: padding of spread tensors is not skipped.

    Encoders in converted models have zeros there where torch would (`nn/encoders.py`).
    """
    return False


@rule("multi_head_attention_forward", plain=True)
def multi_head_attention(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The function of `torch.nn.MultiheadAttention`, with batch and heads as separate dimensions.

    Torch merges them into one, which would gather a split batch.
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
    """Attention of all heads, and the weights if they are needed."""
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
    # With the hint alone torch ignores the mask, which must be a causal one.
    is_causal = given["is_causal"] and padding is None and not given["need_weights"]
    bias = None if is_causal else _bias(padding, mask, q, k.shape[2])
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if given["need_weights"]:
        scores = (q * math.sqrt(1.0 / (width // heads))) @ k.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout > 0 else weights
        found = weights @ v
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        found = F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal)
    found = found.permute(2, 0, 1, 3).reshape(length, batch, width)
    return F.linear(found, given["out_proj_weight"], given["out_proj_bias"]), weights


def _statics(x: Any, static: Any, heads: int) -> Any:
    """Keys or values that the caller passed instead of projected ones."""
    return x if static is None else static.reshape(-1, heads, *static.shape[1:])


def _bias(padding: Any, mask: Any, q: Any, num_keys: int) -> Any:
    """The term of the scores for both masks; keys that were appended are visible to all."""
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
    """A mask as a term of the scores; a boolean mask marks hidden keys."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise AssertionError("only bool and floating types of masks are supported")
    return mask
