"""Embeddings whose table is split over workers, by rows or by columns."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.agreement import TensorMeta, agree, as_agreed, same
from tessel.core.checksum import NO_VALUES, range_of
from tessel.core.graph import eagerly, in_graphs
from tessel.core.layout import Layout, Shape
from tessel.core.linop import enter_by_values
from tessel.core.partition import Partition
from tessel.core.shared import equalize, keep_part, shared_whole
from tessel.distributed.group import row_of
from tessel.distributed.movements import gathering
from tessel.distributed.shards import (
    Sharding,
    State,
    as_plain,
    check_known,
    describe,
    state_of,
    traced_state,
)
from tessel.nn.layer import fix_shapes, is_in_model, refuse_wrapped
from tessel.nn.parallel.agreed import (
    Frozen,
    agree_on_spread,
    check_copies,
    check_parts,
    check_sharding,
    frozen,
)
from tessel.nn.parallel.convert import Conversion, convert
from tessel.nn.parallel.drawing import draw_
from tessel.nn.parallel.sharded import ShardedLayer, refused
from tessel.primitives.shard_layouts import shard_layout
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.split_tables import EmbeddingOptions, look_up
from tessel.transport import kept_in_job

INDICES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Lookup:
    """A lookup of ids: everything that must be equal on its workers.

    Attributes:
        partition: the workers, in a row.
        label: the call in the words of its user.
        dim: the dimension of the table that is split, 0, 1 or -1; None if it was not passed.
        num_embeddings: the rows of the whole table; None for the total of the shards.
        settings: the other arguments of torch's function.
        weight: the sharding of the weight.
        ids: the sharding of the ids.
        embedding_dim: the columns of the whole table; None for the total of the shards.
    """

    partition: Partition
    label: str
    dim: int | None
    num_embeddings: int | None
    settings: EmbeddingOptions
    weight: State = None
    ids: State = None
    embedding_dim: int | None = None

    @property
    def place(self) -> int:
        """The dimension of the table that is split, counted from the front."""
        assert self.dim is not None
        return abs(self.dim)

    @kept_in_job  # once for the same shapes, which are those of each training step
    def conclude(self, label: str, of_ids: Frozen, of_weight: Frozen) -> Layout:
        """The layout of the table, from the shapes of all workers; raises if they do not fit."""
        check_known(self.weight, label)  # its sharding defines along which dimension it is split
        expected = Sharding(self.place, self.partition)
        check_sharding(self.weight, expected, "the weight", self.label)
        check_sharding(self.ids, None, "the ids", self.label)
        (shapes, meta), (shards, kind) = of_ids, of_weight
        if meta.dtype not in INDICES:
            raise ValueError(f"{label}: ids must be of dtype int64 or int32, got {meta.dtype}")
        same(dict(shapes), "shape of the ids", label)
        if not (kind.dtype.is_floating_point or kind.dtype.is_complex):
            raise ValueError(f"{label}: the weight must be of a float dtype, got {kind.dtype}")
        layout = self.table(dict(shards))
        # Torch checks settings when it looks up an id. A worker may have no row of these ids, and
        # would continue where others raise: so all workers check here.
        for value in (self.settings.max_norm, self.settings.norm_type):
            float(0 if value is None else value)
        rows, padding = layout.shape[0], self.settings.padding_idx
        if padding is not None and not -rows <= padding < rows:
            raise ValueError(
                f"{self.label}: padding_idx must be a row of the table, {-rows} to {rows - 1}, "
                f"got {padding}"
            )
        if meta.device != kind.device:
            raise ValueError(
                f"{self.label}: ids and weight must be on one device, got {meta.device} and "
                f"{kind.device}"
            )
        return layout

    def table(self, shapes: dict[int, Shape]) -> Layout:
        """The whole table from the shapes of its shards, which must be balanced parts of it."""
        dim, label = self.place, self.label
        if any(len(shape) != 2 for shape in shapes.values()):
            found = ", ".join(f"{shape} on worker {worker}" for worker, shape in shapes.items())
            raise ValueError(f"{label}: a weight must have two dimensions, got {found}")
        other = ("columns", "rows")[dim]
        same({w: shape[1 - dim] for w, shape in shapes.items()}, f"number of {other}", label)
        whole = [shapes[self.partition.ranks[0]][k] for k in (0, 1)]
        whole[dim] = sum(shape[dim] for shape in shapes.values())
        wanted = self.num_embeddings, self.embedding_dim
        rows, columns = (
            n if given is None else given for n, given in zip(whole, wanted, strict=True)
        )
        layout = shard_layout(self.partition, (rows, columns), dim)
        check_parts(shapes, layout, "a table", label, "; shards are balanced parts of it")
        return layout


def agreed_table(
    lookup: Lookup, ids: Tensor, weight: Tensor, module: torch.nn.Module | None
) -> tuple[Layout, TensorMeta, Tensor]:
    """The layout of the whole table, after all workers agreed that they look up the same in it.

    One small exchange. All workers raise, or none: ValueError for shards that do not fit together
    and for ids that differ, IndexError for ids that are no rows of the table. With the ids, on
    which compiled code agrees in each run.
    """
    needs_grad = getattr(weight, "requires_grad", False) and torch.is_grad_enabled()
    label = f"{lookup.label}{'' if needs_grad else ', without a gradient of the weight'}"

    def told(ids: Any, weight: Any, numbers: Any = NO_VALUES) -> tuple[Layout, TensorMeta]:
        (of_ids, of_weight), values = agree(
            lookup.partition,
            label,
            *(ids, weight),
            names=("the ids", "the weight"),
            numbers=numbers,
            identity=f"{label} {lookup}",
        )
        layout = lookup.conclude(label, frozen(of_ids), frozen(of_weight))
        check_copies(values, ("ids",), layout.shape[0], ("id", "rows of the table"), lookup.label)
        return layout, of_weight[1]

    agreed, ids = enter_by_values(
        told,
        (ids, weight),
        lambda ids: range_of(ids, INDICES),
        lambda _: shared_whole(lookup.partition, ids.shape),
        lookup.label,
        lookup.partition.prepare(),
        module,
    )
    return *agreed, ids


DIMS = (None, 0, 1, -1)


class ParallelEmbedding(ShardedLayer, torch.nn.Embedding):
    """A table of rows that is split over workers: `torch.nn.Embedding`.

    Forward:  y[i] = w[id_i], whole and the same on every worker.

    Every worker passes the same ids. With `dim=0` a worker stores some rows of the table, and the
    rows of all workers are added; with `dim=1` or `-1` it stores some columns of all rows, and
    columns are gathered. Neither communicates in the backward pass: the gradient of a shard is the
    shard of the gradient, also if it is sparse. With `dim=None` this is torch's layer, with the
    same values on all workers.

    The shards are balanced parts. Their values are those of torch's layer with the seed of the
    first worker of the group, for every `dim` and any number of workers.

    Args:
        num_embeddings: the number of rows of the whole table.
        embedding_dim: the number of columns of the whole table.
        padding_idx: a row of the whole table that gets no gradient.
        max_norm: rows with a larger norm are scaled down to it in place when they are used.
        norm_type: p of that norm, which is over all columns.
        scale_grad_by_freq: whether gradients are divided by the frequency of an id in the batch.
        sparse: whether the gradient of the shard is a sparse tensor.
        _weight: the whole table; that of the first worker is used.
        dim: the dimension of the table that is split, if any.
        _freeze: whether the table needs no gradient.
        device: the device of the shard.
        dtype: the dtype of the shard.
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
        # Workers compare their arguments before anything is checked: so all of them raise, or none.
        call = f"({num_embeddings}, {embedding_dim}, padding_idx={padding_idx}, dim={dim!r})"
        call = f"ParallelEmbedding{call} over {row}"
        if _weight is not None:
            kind = f"shape {tuple(_weight.shape)} and {_weight.dtype} on {_weight.device.type}"
            call = f"{call}, of a table of {kind}"
        agree(row, f"{call}{refused(device, dtype)}")
        check_dim(dim, "ParallelEmbedding")
        # torch's layer gets a table without memory: it draws nothing, and the whole one is not
        # needed
        outline = torch.empty(num_embeddings, embedding_dim, device="meta", dtype=dtype)
        table = outline if _weight is None else _weight
        settings = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        super().__init__(num_embeddings, embedding_dim, *settings, table, _freeze)
        self.dim, self.partition = dim, row
        if _weight is None:
            shape = outline.shape if self._layout is None else self._layout.local_shape
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.weight = torch.nn.Parameter(empty, requires_grad=not _freeze)
            self.reset_parameters()
            self._equalize_own_values(ParallelEmbedding)
        elif dim is not None or row.size > 1:
            whole, layout = _weight.detach(), self._layout  # the part has its own memory
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
        """Create the layer with the values of a whole table, that of the first worker.

        >>> import tessel, torch
        >>> tessel.nn.ParallelEmbedding.from_pretrained(torch.eye(3), dim=0)(torch.tensor(1))
        tensor([0., 1., 0.])
        """
        if embeddings.dim() != 2:
            raise ValueError(
                f"expected a table of two dimensions, got shape {tuple(embeddings.shape)}"
            )
        rows, columns = embeddings.shape
        settings = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        return cls(rows, columns, *settings, embeddings, dim, _freeze=freeze, partition=partition)

    @classmethod
    def convert_parallel_embedding(
        cls, module: torch.nn.Module, dim: int | None = None, partition: Partition | None = None
    ) -> torch.nn.Module:
        """Convert all of torch's embeddings in a module to split ones with the same values.

        A module that is an embedding itself is not changed, and a new one is returned; any other is
        changed in place. Values, settings, `requires_grad`, dtype, device, mode and hooks are kept.
        Subclasses of `torch.nn.Embedding`, which may compute something else, raise
        NotImplementedError, and so does a table that another layer also uses: tie the shards
        afterwards.

        Args:
            module: contains one or more `torch.nn.Embedding`.
            dim: the dimension of the tables that is split, if any.
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

    def can_be_traced(self, input: Tensor) -> bool:
        """Whether a compiler may include this call in its graph: not if it depends on the ids."""
        reads = self.max_norm is not None or self.sparse or self.scale_grad_by_freq
        return not reads and fix_shapes(input) and not is_in_model()

    @in_graphs()
    def forward(self, input: Tensor) -> Tensor:
        refuse_wrapped(input, "ParallelEmbedding")
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
        return _looked_up(lookup, input, self.weight, self)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of the weight, by its name; empty if it is not split."""
        if self.dim is None:
            return {}
        shape = self.num_embeddings, self.embedding_dim
        return {"weight": shard_layout(self.partition, shape, abs(self.dim))}

    @property
    def _layout(self) -> Layout | None:
        return self.layouts.get("weight")

    def reset_parameters(self) -> None:
        """Draw new values, as `torch.nn.Embedding` does; those of the padding are zero.

        All workers of the group must call this.
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
    """Look up ids in a sharded table: `torch.nn.functional.embedding`.

    Forward:  y[i] = w[id_i], whole and the same on every worker.

    Args:
        input: ids, the same on all workers.
        weight: this worker's shard of the table, a balanced part.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: see `ParallelEmbedding`.
        num_embeddings: the number of rows of the whole table; None for the total of the shards.
        dim: the dimension of the table that is split; None for that of the sharding of `weight`.
        partition: the workers; None for those of the sharding, or the default group.

    >>> import tessel, torch
    >>> ids = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]])
    >>> tessel.nn.functional.parallel_embedding(ids, torch.rand(10, 3), dim=0).shape
    torch.Size([2, 4, 3])
    """
    settings = EmbeddingOptions(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    # A plain weight may be computed from a shard. With `dim` that does not matter; otherwise it
    # would be mistaken for the whole table.
    state = traced_state(weight) if dim is None else state_of(weight)
    if isinstance(state, Sharding):
        partition = partition or state.partition
        dim = state.dim if dim is None else dim
    row, is_whole = row_of(partition), dim is None and state is None
    if not _is_dim(dim):
        agree(row, f"parallel_embedding(dim={dim!r}) over {row}")  # on which others differ
        check_dim(dim, "parallel_embedding")
    if is_whole and num_embeddings not in (None, weight.shape[0]):
        raise ValueError(
            f"parallel_embedding: with dim=None the weight is the whole table, of "
            f"{num_embeddings} rows, got {weight.shape[0]}"
        )
    refuse_wrapped(input, "parallel_embedding")
    if isinstance(input, SpreadTensor) and dim is not None:
        agree_on_spread(row, f"parallel_embedding(dim={dim})")
    if isinstance(input, SpreadTensor) or is_whole:  # F.embedding has a rule for spread tensors
        return F.embedding(input, weight, *astuple(settings))
    label = f"parallel_embedding(dim={dim}) over {row}, where weight is {describe(state)}"
    shardings = state, state_of(input)
    return _looked_up(Lookup(row, label, dim, num_embeddings, settings, *shardings), input, weight)


def _looked_up(
    lookup: Lookup, ids: Tensor, weight: Tensor, module: torch.nn.Module | None = None
) -> Tensor:
    """The rows of the ids, after all workers agreed that they look up the same."""
    if not lookup.partition.active:
        return weight.new_empty(0)
    ids = as_plain(ids)
    with torch._C.DisableTorchFunctionSubclass():  # the weight itself, of which rows may be scaled
        layout, meta, ids = agreed_table(lookup, ids, weight, module)
        settings = lookup.settings.counted_from_front(layout.shape[0])
        if lookup.partition.size == 1:
            return F.embedding(ids, weight, *astuple(settings))
        y, there = look_up(ids, as_agreed(weight, meta, True), layout, settings, meta)
        # rows of the table were added by the lookup; columns still have to be gathered
        return gathering(there).apply(y, meta) if lookup.place else y


def check_dim(dim: int | None, label: str) -> None:
    """Raise ValueError unless `dim` is None, 0, 1 or -1."""
    if not _is_dim(dim):
        raise ValueError(f"{label}: dim must be None, 0, 1 or -1, got {dim!r}")


def _is_dim(dim: Any) -> bool:
    return not isinstance(dim, bool | float | Tensor) and dim in DIMS
