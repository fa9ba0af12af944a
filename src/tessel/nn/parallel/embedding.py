"""Embeddings whose table is split over workers, by its rows or by its columns."""

from __future__ import annotations

from dataclasses import astuple
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.agreement import agree, as_agreed
from tessel.core.graph import eagerly
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.core.shared import equalize, keep_part
from tessel.distributed.group import row_of
from tessel.distributed.movements import gathering
from tessel.distributed.shard_layouts import shard_layout
from tessel.distributed.shards import (
    Sharding,
    as_plain,
    describe,
    state_of,
    traced_state,
)
from tessel.nn.parallel.agreed import agree_on_spread
from tessel.nn.parallel.convert import Conversion, convert
from tessel.nn.parallel.drawing import draw_
from tessel.nn.parallel.embedding_agreement import Lookup, agreed_table
from tessel.nn.parallel.sharded import ShardedLayer
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.split_tables import EmbeddingOptions, look_up

DIMS = (None, 0, 1, -1)


class ParallelEmbedding(ShardedLayer, torch.nn.Embedding):
    """A table of rows that is split over workers: `torch.nn.Embedding`.

    Forward:  y[i] = w[id_i], whole and the same on every worker.

    Every worker is given the same ids. With `dim=0` a worker stores some rows of the table and
    adds those that it has; with `dim=1` or `-1` it stores some columns of all rows, and columns are
    gathered. Neither moves anything in the backward pass: the gradient of a shard is the shard of
    the gradient, also a sparse one. With `dim=None` this is torch's layer, with the same values on
    all workers.

    The shards are balanced parts. Their values are those that torch's layer draws with the seed
    of the first worker of the group, for every `dim` and any number of workers.

    Args:
        num_embeddings: the number of rows of the whole table.
        embedding_dim: the number of its columns.
        padding_idx: a row that gets no gradient, counted in the whole table.
        max_norm: rows whose norm is greater are scaled down to it, in place, when they are used.
        norm_type: p of that norm, which is one of all columns.
        scale_grad_by_freq: whether gradients are divided by how often an id is in the batch.
        sparse: whether the gradient of the shard is a sparse tensor.
        _weight: the whole table; that of the first worker is taken.
        dim: which dimension of the table is split; None for none.
        _freeze: whether the table gets no gradient.
        device: of the shard.
        dtype: of the shard.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> layer = tessel.nn.ParallelEmbedding(10, 3, dim=0)
    >>> layer(torch.tensor([[1, 2], [4, 9]])).shape
    torch.Size([2, 2, 3])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        dim: int | None = None,
        *,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        partition: Partition | None = None,
    ) -> None:
        row = row_of(partition)
        # Workers say what they pass before anything is checked: so all of them raise, or none.
        given = ""
        if _weight is not None:
            kind = f"{_weight.dtype} on {_weight.device.type}"
            given = f", of a table of shape {tuple(_weight.shape)} and {kind}"
        agree(
            row,
            f"ParallelEmbedding({num_embeddings}, {embedding_dim}, padding_idx={padding_idx}, "
            f"dim={dim!r}) over {row}{given}",
        )
        check_dim(dim, "ParallelEmbedding")
        # torch's layer gets a table without memory: it draws none, and nobody needs the whole one
        outline = torch.empty(num_embeddings, embedding_dim, device="meta", dtype=dtype)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            outline if _weight is None else _weight,
            _freeze,
        )
        self.dim, self.partition = dim, row
        if _weight is None:
            shape = outline.shape if self._layout is None else self._layout.local_shape
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.weight = torch.nn.Parameter(empty, requires_grad=not _freeze)
            self.reset_parameters()
            self._equalize_own_values(ParallelEmbedding)
        elif dim is not None or row.size > 1:
            whole, layout = _weight.detach(), self._layout  # the part has memory of its own
            if layout is None:
                part = whole.clone()
                equalize([part], row)
            else:
                part = whole.new_empty(layout.local_shape)
                keep_part(part, layout, whole)
            self.weight = torch.nn.Parameter(part, requires_grad=not _freeze)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        dim: int | None = None,
        partition: Partition | None = None,
    ) -> Self:
        """The layer with the values of a whole table; those of the first worker are taken.

        >>> import tessel, torch
        >>> tessel.nn.ParallelEmbedding.from_pretrained(torch.eye(3), dim=0)(torch.tensor(1))
        tensor([0., 1., 0.])
        """
        if embeddings.dim() != 2:
            raise ValueError(
                f"a table of two dimensions is needed, got shape {tuple(embeddings.shape)}"
            )
        rows, columns = embeddings.shape
        return cls(
            num_embeddings=rows,
            embedding_dim=columns,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=embeddings,
            _freeze=freeze,
            dim=dim,
            partition=partition,
        )

    @classmethod
    def convert_parallel_embedding(
        cls, module: torch.nn.Module, dim: int | None = None, partition: Partition | None = None
    ) -> torch.nn.Module:
        """Let all of torch's embeddings in a module be split, with the values they have.

        A module that is an embedding itself stays as it is, and a new one is returned; another one
        is changed in place. Values, settings, `requires_grad`, dtype, device, mode and hooks are
        kept. NotImplementedError for subclasses of `torch.nn.Embedding`, which may compute
        something else, and for a table that another layer uses, too: tie the shards afterwards.

        Args:
            module: contains one or more `torch.nn.Embedding`.
            dim: which dimension of the tables is split; None for none.
            partition: the workers; None for the default group.

        >>> import tessel, torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 3))
        >>> tessel.nn.ParallelEmbedding.convert_parallel_embedding(model, dim=-1)
        Sequential(
          (0): ParallelEmbedding(10, 3, dim=-1)
        )
        """
        row = row_of(partition)
        name = f"convert_parallel_embedding(module, dim={dim!r}) over {row}"
        agree(row, name)
        check_dim(dim, name)

        def done(layer: torch.nn.Module) -> bool:
            if not isinstance(layer, cls) or layer.dim is None or dim is None:
                return isinstance(layer, cls) and layer.dim is dim
            return abs(layer.dim) == abs(dim) and layer.partition == row  # 1 and -1 are the same

        conversion = Conversion(
            name=name,
            dim=dim,
            partition=row,
            wanted=torch.nn.Embedding,
            becomes=cls,
            done=done,
            also=ParallelEmbedding,
        )
        return convert(module, conversion)

    @eagerly
    def forward(self, input: Tensor) -> Tensor:
        if self.dim is None or isinstance(input, SpreadTensor):  # F.embedding has a rule for it
            return super().forward(input)
        label = f"{type(self).__name__}({self.extra_repr()}) over {self.partition}"
        lookup = Lookup(
            self.partition,
            label,
            self.dim,
            self.num_embeddings,
            EmbeddingOptions(
                *(self.padding_idx, self.max_norm, self.norm_type),
                *(self.scale_grad_by_freq, self.sparse),
            ),
            state_of(self.weight),
            state_of(input),
            self.embedding_dim,
        )
        return _looked_up(lookup, input, self.weight)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Where the weight lies, by its name; nothing if it is not split."""
        if self.dim is None:
            return {}
        shape = self.num_embeddings, self.embedding_dim
        return {"weight": shard_layout(self.partition, shape, abs(self.dim))}

    @property
    def _layout(self) -> Layout | None:
        return self.layouts.get("weight")

    def reset_parameters(self) -> None:
        """Draw all values anew, as `torch.nn.Embedding` does; those of the padding are zero.

        A call of all workers of the group.
        """
        if self._layout is None:
            super().reset_parameters()
            equalize([self.weight], self.partition)  # seeds may differ between workers
            return
        draw_(self.weight, self._layout, torch.nn.init.normal_)
        self._fill_padding_idx_with_zero()

    def _fill_padding_idx_with_zero(self) -> None:
        if self.padding_idx is None:
            return
        if self._layout is None:
            super()._fill_padding_idx_with_zero()
        # torch's layer would index its rows by a number that is counted in the whole table
        elif (box := self._layout.box()) is not None:
            start, stop = box[0]
            if start <= self.padding_idx < stop:
                with torch.no_grad():
                    self.weight[self.padding_idx - start].fill_(0)


Embedding = ParallelEmbedding  # torchshard has both names


@eagerly
def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: int | None = None,
    partition: Partition | None = None,
) -> Tensor:
    """Look up ids in a table of which each worker has a shard: `torch.nn.functional.embedding`.

    Forward:  y[i] = w[id_i], whole and the same on every worker.

    Args:
        input: ids, the same on all workers.
        weight: this worker's shard of the table, a balanced part of it.
        padding_idx: a row that gets no gradient, counted in the whole table.
        max_norm: rows whose norm is greater are scaled down to it, in place.
        norm_type: p of that norm.
        scale_grad_by_freq: whether gradients are divided by how often an id is in `input`.
        sparse: whether the gradient of the shard is a sparse tensor.
        num_embeddings: the number of rows of the whole table; None for that of all shards.
        dim: which dimension of the table is split, 0, 1 or -1; None for that of the sharding of
            `weight`, and without a sharding for none.
        partition: the workers; None for those of the sharding, or the default group.

    >>> import tessel, torch
    >>> ids = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]])
    >>> tessel.nn.functional.parallel_embedding(ids, torch.rand(10, 3), dim=0).shape
    torch.Size([2, 4, 3])
    """
    check_dim(dim, "parallel_embedding")
    settings = EmbeddingOptions(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    # A plain weight may be computed from a shard. Where the caller says how it is split, that does
    # not matter; else it would be taken for the whole table.
    state = traced_state(weight) if dim is None else state_of(weight)
    if isinstance(state, Sharding):
        partition = partition or state.partition
        dim = state.dim if dim is None else dim
    if isinstance(input, SpreadTensor):  # F.embedding has a rule for it
        if dim is not None:
            agree_on_spread(row_of(partition), f"parallel_embedding(dim={dim})")
        return F.embedding(input, weight, *astuple(settings))
    if dim is None and state is None:
        if num_embeddings not in (None, weight.shape[0]):
            raise ValueError(
                f"parallel_embedding: with dim=None the weight is the whole table, of "
                f"{num_embeddings} rows, got {weight.shape[0]}"
            )
        return F.embedding(input, weight, *astuple(settings))
    row = row_of(partition)
    label = f"parallel_embedding(dim={dim}) over {row}, where weight is {describe(state)}"
    lookup = Lookup(row, label, dim, num_embeddings, settings, state, state_of(input))
    return _looked_up(lookup, input, weight)


def _looked_up(lookup: Lookup, ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of the ids, after all workers agreed that they look up the same."""
    if not lookup.partition.active:
        return weight.new_empty(0)
    ids = as_plain(ids)
    with torch._C.DisableTorchFunctionSubclass():  # the weight itself, of which rows may be scaled
        layout, meta = agreed_table(lookup, ids, weight)
        settings = lookup.settings.counted_from_front(layout.shape[0])
        if lookup.partition.size == 1:
            return F.embedding(ids, weight, *astuple(settings))
        y, there = look_up(ids, as_agreed(weight, meta, True), layout, settings, meta)
        # rows of the table were added by the lookup; columns still have to come together
        return gathering(there).apply(y, meta) if lookup.place else y


def check_dim(dim: int | None, label: str) -> None:
    """Raise ValueError unless `dim` is None, 0, 1 or -1."""
    if dim not in DIMS or isinstance(dim, bool | float):
        raise ValueError(f"{label}: dim must be None, 0, 1 or -1, got {dim!r}")
