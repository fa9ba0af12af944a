"""The layouts of the values of a model's state, by name, and the agreement of workers on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from tessel.core.agreement import agree, tell
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.shards import Sharding, shared_by, state_of
from tessel.nn.parallel.drawing import layout_of
from tessel.nn.parallel.sharded import ShardedLayer
from tessel.transport import code_of


@dataclass(frozen=True)
class Places:
    """The layouts of the parameters and buffers of a model.

    Args:
        row: the workers that together hold one copy of the model.
        layouts: the layouts of all values that are shards, or that some workers share, by name.
        of_value: the same, by the identity of the value.
        names: the names of all parameters, by identity.
    """

    row: Partition
    layouts: dict[str, Layout]
    of_value: dict[int, Layout]
    names: dict[int, str]

    @classmethod
    def of(cls, module: Module, partition: Partition | None, call: str) -> Places:
        """The places of the values of a module; ValueError if `partition` does not hold them."""
        # all parameters and buffers by their names in the state, and where their layers put them
        values: list[tuple[str, Tensor, Layout | None]] = []
        # a layer that stands in several places has several names in the state
        for prefix, layer in module.named_modules(remove_duplicate=False):
            own = layer.layouts if isinstance(layer, ShardedLayer) else {}
            for name in [each for each in own if each not in layer._parameters]:
                raise NotImplementedError(
                    f"the {name} of {prefix or 'the module'} ({type(layer).__name__}) is computed "
                    "from other values, whose sharding is unknown; remove its parametrization "
                    "first"
                )
            for name, value in chain(layer._parameters.items(), layer._buffers.items()):
                if value is not None:
                    values.append((f"{prefix}.{name}" if prefix else name, value, own.get(name)))
        held: dict[str, Partition | None] = {}
        for name, value, known in values:
            state = state_of(value)
            shards = state.partition if isinstance(state, Sharding) else shared_by(value)
            held[name] = shards if known is None else known.partition
        row = row_of_model((each for each in held.values() if each is not None), partition)
        # Before workers agree on shards of any lengths, where those outside would be missing.
        for name, each in held.items():
            check_inside(call, row, f"value {name}", () if each is None else each.ranks)
        layouts, of_value = {}, {}
        for name, value, known in values:
            # shards of any lengths agree on them here: workers outside are none of these
            layout = known or (layout_of(value) if row.active else None)
            if layout is not None:
                layouts[name] = of_value[id(value)] = layout
        return cls(row, layouts, of_value, {id(value): name for name, value, _ in values})

    @property
    def first(self) -> Partition:
        """A partition of the first worker alone."""
        return Partition(self.row.ranks[:1], (1,))

    def is_apart(self, layout: Layout | None) -> bool:
        """Whether some worker of the row does not have the whole value."""
        # a value without a layout is taken for one that all have
        if layout is None:
            return False
        outside = {*self.row.ranks} - {*layout.partition.ranks}
        return bool(outside) or any(map(layout.is_split, range(len(layout.shape))))

    @cached_property
    def some_apart(self) -> bool:
        """Whether no worker has the whole model."""
        return any(map(self.is_apart, self.layouts.values()))

    def problems(
        self, state: Mapping[str, Any], check: Callable[[str, Any, Layout], str]
    ) -> list[str]:
        """The problems that a check of values by their layouts finds in a state."""
        known = self.layouts.items()
        found = (check(name, state[name], layout) for name, layout in known if name in state)
        return [text for text in found if text]

    def agree(
        self,
        call: str,
        listing: Iterable[str],
        problems: list[str],
        error: type[Exception] = ValueError,
    ) -> None:
        """Raise on all workers if one has a problem, or if their items differ."""
        problem = "; ".join(problems[:3]) + (" …" if len(problems) > 3 else "")
        what = f"{call} over {self.row}{': ' if problem else ''}{problem}"
        # The text of a worker with a problem differs from the others': all raise, and quote it.
        agree(self.row, what)
        if problem:
            raise error(what)
        items = list(listing)
        _, sums = agree(self.row, what, numbers=[code_of("\n".join(items))])
        if len({*sums.values()}) > 1:  # the items themselves are sent only then
            (first, expected), *others = tell(self.row, items).items()
            worker, got = next((worker, each) for worker, each in others if each != expected)
            missing = [(first, item, worker) for item in expected if item not in got]
            missing += [(worker, item, first) for item in got if item not in expected]
            difference = f"workers {first} and {worker} have the same values in another order"
            if missing:
                difference = "worker {} has {}, and worker {} does not".format(*missing[0])
            raise ValueError(f"{what}: {difference}; pass the same on all workers")


def without_wrapper(module: Module) -> Module:
    """The model without `DistributedDataParallel`, which would be part of all names."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def check_inside(call: str, row: Partition, what: str, workers: Iterable[int]) -> None:
    """Raise ValueError if something has parts on workers that are not of a row."""
    outside = [worker for worker in workers if row.place(worker) is None]
    if outside:
        raise ValueError(
            f"{call} over {row}: the {what} has parts on workers {outside}, which are not among "
            f"these; pass `partition`, with all workers that hold the model"
        )


def row_of_model(held: Iterable[Partition], partition: Partition | None) -> Partition:
    """The workers that together hold a model, in a row: `partition`, or those of all its parts."""
    groups = {tuple(sorted(each.ranks)) for each in held}
    if partition is not None or len(groups) != 1:
        return row_of(partition)
    ranks = groups.pop()
    return Partition(ranks, (len(ranks),))
