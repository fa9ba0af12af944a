"""What workers agree on before they look up ids: their shards of the table, and equal ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessel.core.agreement import TensorMeta, agree, same
from tessel.core.checksum import range_of
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.distributed.shard_layouts import shard_layout
from tessel.distributed.shardings import Sharding, State, check_known
from tessel.nn.parallel.agreed import Frozen, check_copies, check_parts, check_sharding, frozen
from tessel.tensor.rules.split_tables import EmbeddingOptions
from tessel.transport import kept_in_job

INDICES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Lookup:
    """All that the workers must have in common when they look up ids.

    Attributes:
        partition: the workers, in a row.
        label: the call in the words of its user.
        dim: the dimension of the table that is split, 0, 1 or -1; None if that was not said.
        num_embeddings: the rows of the whole table; None for what the shards have together.
        settings: what else torch takes.
        weight: the sharding of the weight.
        ids: the sharding of the ids.
        embedding_dim: the columns of the whole table; None for what the shards have together.
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

    @kept_in_job  # once for the same shapes: a training step asks for the same each time
    def conclude(self, label: str, of_ids: Frozen, of_weight: Frozen) -> Layout:
        """The layout of the table, from the shapes of all workers; raises for what does not fit."""
        check_known(self.weight, label)  # along which dimension it is split its sharding says
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
        # Torch looks at settings when it looks up an id. A worker may have no row of these ids,
        # and would go on where others raise: so all workers look here.
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
            raise ValueError(f"{label}: a weight has two dimensions, got {found}")
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


def agreed_table(lookup: Lookup, ids: Tensor, weight: Tensor) -> tuple[Layout, TensorMeta]:
    """The layout of the whole table, after all workers agreed that they look up the same in it.

    One small exchange. All workers raise, or none: ValueError for shards that do not fit together
    and for ids that differ, IndexError for ids that are no rows of the table.
    """
    needs_grad = getattr(weight, "requires_grad", False) and torch.is_grad_enabled()
    label = f"{lookup.label}{'' if needs_grad else ', without a gradient of the weight'}"
    (of_ids, of_weight), values = agree(
        lookup.partition,
        label,
        *(ids, weight),
        names=("the ids", "the weight"),
        numbers=range_of(ids, INDICES),
        identity=f"{label} {lookup}",
    )
    layout = lookup.conclude(label, frozen(of_ids), frozen(of_weight))
    check_copies(values, ("ids",), layout.shape[0], ("id", "rows of the table"), lookup.label)
    return layout, of_weight[1]
