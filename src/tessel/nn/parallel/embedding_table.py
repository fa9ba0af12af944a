"""Looking up rows of a table whose rows or columns are split over workers."""

from __future__ import annotations

from dataclasses import astuple, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.linalg import vector_norm

from tessel.core.agreement import TensorMeta
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros
from tessel.distributed.movements import gathering, reducing, shard_layout
from tessel.nn.parallel.embedding_agreement import EmbeddingOptions

EPSILON = 1e-7  # what torch adds to a norm before it divides by it


def look_up_rows(
    ids: Tensor, weight: Tensor, layout: Layout, settings: EmbeddingOptions, meta: TensorMeta
) -> Tensor:
    """The rows of all ids, of a table whose rows are split: each worker adds those it has.

    Forward:  y[i] = Σ_k [id_i is a row of worker k] · w_k[id_i − start_k].
    """
    box = layout.box()
    assert box is not None
    start, stop = box[0]
    flat = ids.reshape(-1)
    mine = ((flat >= start) & (flat < stop)).nonzero().squeeze(1)
    padding = settings.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    own = replace(settings, padding_idx=padding)
    rows = _local_rows(flat[mine] - start, weight, own)
    share = rows.new_zeros((flat.numel(), layout.shape[1])).index_copy(0, mine, rows)
    y = reducing(layout.partition, tuple(share.shape)).apply(share, meta)
    return y.view(*ids.shape, layout.shape[1])


def look_up_columns(
    ids: Tensor, weight: Tensor, layout: Layout, settings: EmbeddingOptions, meta: TensorMeta
) -> Tensor:
    """The rows of all ids, of a table whose columns are split: the columns are gathered.

    Forward:  y[i, j] = w_k[id_i, j − start_k], where worker k has column j.
    """
    flat = ids.reshape(-1)
    if settings.max_norm is not None:
        renormalise(flat, weight, layout.partition, settings.max_norm, settings.norm_type)
    columns = _local_rows(flat, weight, replace(settings, max_norm=None))
    move = gathering(shard_layout(layout.partition, (flat.numel(), layout.shape[1]), 1))
    return move.apply(columns, meta).view(*ids.shape, layout.shape[1])


def _local_rows(ids: Tensor, weight: Tensor, settings: EmbeddingOptions) -> Tensor:
    """Torch's own embedding, which for no values at all has no second derivative."""
    shape = (len(ids), weight.shape[1])
    if 0 in shape and not settings.sparse:
        return anchored_zeros(shape, weight)
    return F.embedding(ids, weight, *astuple(settings))


def renormalise(
    flat: Tensor, weight: Tensor, partition: Partition, max_norm: float, norm_type: float
) -> None:
    """Let no row among these ids have a norm above `max_norm`, in place, as torch does it.

    The workers tell each other the norms of their columns of these rows.
    """
    with torch.no_grad():
        flat, table = flat.detach(), weight.detach()
        wide = torch.float32 if table.dtype in (torch.float16, torch.bfloat16) else table.dtype
        rows = table[flat].to(wide)
        gather = gathering(shard_layout(partition, (flat.numel(), partition.size), 1))
        if rows.shape[1]:
            mine = vector_norm(rows, norm_type, dim=1)
        else:  # of no columns, what does not change the norm of others
            mine = rows.new_full((len(rows),), 0.0 if norm_type >= 0 else float("inf"))
        parts = gather.apply(mine[:, None])
        # the norms of p = 0 are counts, which add
        norm = parts.sum(1) if norm_type == 0 else vector_norm(parts, norm_type, dim=1)
        norm = norm.to(table.dtype)
        scale = max_norm / (norm.double() + EPSILON)
        scaled = (rows * scale.to(wide)[:, None]).to(table.dtype)
        table[flat] = torch.where((norm.double() > max_norm)[:, None], scaled, table[flat])
