"""Ways of attention: where queries, keys and values meet, chosen by the amount of data sent.

Batch and heads are independent, so they stay split. If the sequence is split as well, each query
must meet all keys:

- `heads`: the axes of the grid that split the sequence split heads and batch for a while;
- `queries`: keys and values stay, all queries, which are few, go to them, and results are merged;
- `gather`: all workers get all keys and values, if they are few;
- `ring`: queries stay, and keys and values arrive block by block.

A causal ring redistributes queries, an early chunk and a late one to each worker, so that all of
them see about the same number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from string import ascii_lowercase

from tessel.core import boxes
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.tensor.block_sum import ROWS, BlockSchedule, Operand
from tessel.tensor.rules.products import planned
from tessel.transport import kept_in_job

GATHERED = 1 << 16  # so many values of keys and values go to all workers: one message is faster


@dataclass(frozen=True)
class AttentionPlan:
    """The computation of attention for tensors in given layouts.

    Attributes:
        way: its name.
        inputs: the layouts of q, k, v and the mask; several layouts for chunks of rows, in order.
        results: the layouts of the results of these chunks.
        final: the layout of the result.
        schedule: the queries and keys that each worker multiplies.
        operands: the layouts of q, k, v and the mask in its steps.
        num_values: the largest number of values that a worker receives, forward and backward.
    """

    way: str
    inputs: tuple[tuple[Layout, ...], ...]
    results: tuple[Layout, ...]
    final: Layout
    schedule: BlockSchedule
    operands: tuple[Operand, ...]
    num_values: int


@kept_in_job
def plans(
    partition: Partition,
    shapes: tuple[Shape, ...],
    layouts: tuple[Layout | None, ...],
    is_causal: bool,
    groups: int,
    most: float,
) -> tuple[AttentionPlan, ...]:
    """All ways, best first: by the number of values that are sent, forward and backward."""
    given = AttentionPlanner(partition, shapes, layouts, is_causal, groups)
    if not given.axes:
        return (given.as_they_lie("local", given.inner),)
    found = [given.gather()]
    if given.split_keys is not None:
        everywhere = max(
            sum(prod(found[0].inputs[n][0].shape_on(w)) for n in (1, 2)) for w in partition.ranks
        )
        if everywhere > most:
            found = []
        # so that a worker has no more scores than those of a block of queries and a block of keys
        if given.are_few:
            found.insert(0, given.queries())
        found.append(given.ring())
    by_heads = given.as_they_lie("heads", given.hosted(given.inner, 2))
    if not {*given.axes} & {*by_heads.results[0].shared}:
        found.insert(0, by_heads)
    return tuple(sorted(found, key=lambda plan: plan.num_values))


@dataclass(frozen=True)
class AttentionPlanner:
    """The operands for which plans of attention are made, and what the plans have in common.

    Attributes:
        partition: the workers.
        shapes: the shapes of q, k, v and the mask, if there is one.
        layouts: their layouts, None for plain tensors.
        is_causal: whether queries see only keys up to their own indices.
        groups: the number of heads of queries that share a head of keys.
    """

    partition: Partition
    shapes: tuple[Shape, ...]
    layouts: tuple[Layout | None, ...]
    is_causal: bool
    groups: int

    def hosted(self, layouts: tuple[Layout | None, ...], count: int) -> tuple[Layout | None, ...]:
        """The layouts with the last dimensions of q, k and v whole: others host their axes."""
        return tuple(
            each
            if each is None or number == 3
            else each.hosted(tuple(len(each.shape) - n for n in range(count, 0, -1)))
            for number, each in enumerate(layouts)
        )

    @cached_property
    def inner(self) -> tuple[Layout | None, ...]:
        """The layouts of operands when scores are computed: with whole features."""
        return self.hosted(self.layouts, 1)

    def of_batch(self, layouts: tuple[Layout | None, ...]) -> tuple[list[Layout], Layout]:
        """The layouts of operands and result with whole sequences: split along batch and heads."""
        batch = ascii_lowercase[: max(map(len, self.shapes)) - 2]
        indices = [
            batch[len(batch) - len(shape) + 2 :] + end
            for shape, end in zip(self.shapes, ("XE", "YE", "YV", "XY"), strict=False)
        ]
        wholes: list[Layout | None] = [None] * len(layouts)
        for number, each in enumerate(layouts[:3]):
            # sequence and features; for grouped keys, whose heads differ from those of queries,
            # also the heads
            count = 3 if self.groups > 1 and number > 0 else 2
            if each is not None:
                ndim = len(each.shape)
                wholes[number] = each.gathered(range(ndim - count, ndim))
        if self.groups > 1:
            for number in (1, 2):
                indices[number] = indices[number][:-3] + "K" + indices[number][-2:]
        plan = planned(self.partition, tuple(indices), batch + "XV", self.shapes, tuple(wholes))
        inputs = list(plan.inputs)
        if self.groups > 1:
            heads = plan.result.cuts[-3]
            intervals = tuple((a // self.groups, -(-b // self.groups)) for a, b in heads.intervals)
            for number in (1, 2):
                inputs[number] = _cut(inputs[number], -3, Cut(heads.axes, intervals))
        return inputs, plan.result

    @cached_property
    def wholes(self) -> tuple[list[Layout], Layout]:
        """The layouts of operands and result with whole sequences."""
        return self.of_batch(self.inner)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes that split a sequence, but neither batch nor heads."""
        free = {*self.wholes[1].shared}
        found: list[int] = []
        for layout in self.inner[:3]:
            for axis in () if layout is None else layout.cuts[-2].axes:
                if axis in free and axis not in found and self.partition.shape[axis] > 1:
                    found.append(axis)
        return tuple(found)

    @cached_property
    def places(self) -> int:
        return prod(self.partition.shape[axis] for axis in self.axes)

    @cached_property
    def split_keys(self) -> Layout | None:
        """The layout of keys, or of values, if their sequence is split."""
        for layout in self.inner[1:3]:
            if layout is not None and layout.is_split(len(layout.shape) - 2):
                return layout
        return None

    @cached_property
    def rows(self) -> Cut:
        """The queries of each place: as they are split, if along these axes."""
        return self._sequence(self.inner[0], self.shapes[0][-2])

    @cached_property
    def columns(self) -> Cut:
        """The keys of each place."""
        return self._sequence(self.split_keys, self.shapes[1][-2])

    def _sequence(self, layout: Layout | None, length: int) -> Cut:
        if layout is not None and layout.cuts[-2].axes == self.axes:
            return layout.cuts[-2]
        return Cut(self.axes, boxes.balanced(length, self.places))

    @cached_property
    def are_few(self) -> bool:
        """Whether there are no more queries than keys in a block."""
        longest = max(stop - start for start, stop in self.columns.intervals)
        return self.shapes[0][-2] <= longest

    @cached_property
    def mask_has_rows(self) -> bool:
        """Whether there is a mask with a row for each query."""
        return len(self.shapes) > 3 and len(self.shapes[3]) > 1 and self.shapes[3][-2] > 1

    @cached_property
    def final(self) -> Layout:
        """The layout of the result: that of the queries; for plain ones, whole if they are few."""
        queries, result = self.layouts[0], self.wholes[1]
        if queries is not None and len(queries.shape) == len(result.shape):
            return queries.split_like(result.shape)
        if not self.axes or (queries is None and self.are_few):
            return result
        return _cut(result, -2, self.rows)

    def as_they_lie(self, way: str, there: tuple[Layout | None, ...]) -> AttentionPlan:
        """The way with all dimensions whole except batch and heads."""
        inputs, result = self.of_batch(there)
        rows = Cut.whole(self.shapes[0][-2])
        return self._held(way, tuple((each,) for each in inputs), result, rows)

    def gather(self) -> AttentionPlan:
        """The way with split queries, and whole keys and values."""
        inputs, result = self.wholes
        lie = tuple(
            # split if it has a row for each query, else used separately along the axes
            (_cut(each, -2, self.rows) if self._has_rows(number) else _apart(each, self.axes),)
            for number, each in enumerate(inputs)
        )
        return self._held("gather", lie, _cut(result, -2, self.rows), self.rows)

    def queries(self) -> AttentionPlan:
        """The way with split keys and values, each part met by all queries; results are summed."""
        inputs, target = self.wholes
        lie = [_apart(inputs[0], self.axes)]
        for number, each in enumerate(inputs[1:], 1):
            has_columns = number < 3 or self.shapes[3][-1] > 1
            dim = -1 if number == 3 else -2
            lie.append(_cut(each, dim, self.columns) if has_columns else _apart(each, self.axes))
        queries, places = self.inner[0], self.places
        stays = queries is not None and queries.cuts[-2].axes == self.axes
        if stays:  # each worker sums the results of its own queries
            target = _cut(target, -2, self.rows)
        # a result is sent with the sum of its weights, and before it, all largest scores
        terms = max(
            prod((*target.shape_on(w)[:-1], target.shape[-1] + 1)) for w in target.partition.ranks
        )
        merged = terms * (places - 1) if stays else 2 * terms * (places - 1) // places
        rows = (((0, self.shapes[0][-2]),),) * places
        columns = tuple(self.columns.intervals)
        schedule = BlockSchedule(self.partition, self.axes, rows, columns, self.is_causal)
        whole = tuple((each,) for each in lie)
        return self._plan("queries", whole, (target,), schedule, self._operands, 2 * merged)

    def ring(self) -> AttentionPlan:
        """The way with queries that stay, or are redistributed, and keys in travelling blocks."""
        inputs, result = self.wholes
        places, length = self.places, self.shapes[0][-2]
        dealt = [self.rows]
        if self.is_causal and length >= 2 * places:
            # An early chunk and a late one: each place sees about the same number of keys.
            chunks = boxes.balanced(length, 2 * places)
            both = tuple(chunks[:places]), tuple(chunks[: places - 1 : -1])
            dealt = [Cut(self.axes, each) for each in both]
        lie: list[tuple[Layout, ...]] = []
        operands = []
        for number, each in enumerate(inputs):
            dim = -1 if number == 3 else -2
            if self._has_rows(number):
                lie.append(tuple(_cut(each, -2, rows) for rows in dealt))
                is_mask = number == 3 and self.shapes[3][-1] > 1
                operands.append(Operand(rows=True, columns=-1) if is_mask else ROWS)
            elif each.shape[dim] == 1 and number == 3:
                lie.append((_apart(each, self.axes),))
                operands.append(Operand())
            else:
                there = _cut(each, dim, self.columns)
                lie.append((there,))
                if self.groups > 1 and number < 3:
                    # workers whose queries share a head of keys all have it, and get each block of
                    # it from the next place: to be sent, these count as separate heads
                    heads = there.cuts[-3]
                    own = boxes.consecutive(stop - start for start, stop in heads.intervals)
                    there = there.recut(len(there.shape) - 3, Cut(heads.axes, own), own[-1][1])
                taken = {axis for cut in there.cuts for axis in cut.axes}
                shared = tuple(axis for axis in range(self.partition.dim) if axis not in taken)
                operands.append(Operand(columns=dim, layout=replace(there, shared=shared)))
        rows = tuple(zip(*(each.intervals for each in dealt), strict=True))
        columns = tuple(self.columns.intervals)
        schedule = BlockSchedule(self.partition, self.axes, rows, columns, self.is_causal)
        results = tuple(_cut(result, -2, each) for each in dealt)
        blocks = _travelling(schedule, operands)
        return self._plan("ring", tuple(lie), results, schedule, tuple(operands), 3 * blocks)

    def _has_rows(self, number: int) -> bool:
        """Whether an operand has a row for each query."""
        return number == 0 or (number == 3 and self.mask_has_rows)

    @cached_property
    def _operands(self) -> tuple[Operand, ...]:
        """The operands of steps in which all columns are present."""
        found = [ROWS, Operand(columns=-2), Operand(columns=-2)]
        if len(self.shapes) > 3:
            columns = -1 if self.shapes[3][-1] > 1 else None
            found.append(Operand(rows=self.mask_has_rows, columns=columns))
        return tuple(found)

    def _held(
        self, way: str, inputs: tuple[tuple[Layout, ...], ...], result: Layout, rows: Cut
    ) -> AttentionPlan:
        """A way in which workers have all keys of their queries, in one block for each worker."""
        columns = boxes.balanced(self.shapes[1][-2], self.partition.size)
        own = tuple((each,) for each in rows.intervals)
        schedule = BlockSchedule(self.partition, rows.axes, own, columns, self.is_causal)
        return self._plan(way, inputs, (result,), schedule, self._operands)

    def _plan(
        self,
        way: str,
        inputs: tuple[tuple[Layout, ...], ...],
        results: tuple[Layout, ...],
        schedule: BlockSchedule,
        operands: tuple[Operand, ...],
        more: int = 0,
    ) -> AttentionPlan:
        """A plan with the largest number of received values: operands, results, and `more`."""
        found = 0
        for worker in self.partition.ranks:
            count = missing(results, (self.final,), worker)
            for layout, there in zip(self.layouts, inputs, strict=True):
                count += 0 if layout is None else missing((layout,), there, worker)
            found = max(found, count)
        return AttentionPlan(way, inputs, results, self.final, schedule, operands, 2 * found + more)


def _cut(layout: Layout, dim: int, cut: Cut) -> Layout:
    """The layout with a dimension, counted from the end, split along axes that were shared."""
    cuts = list(layout.cuts)
    cuts[dim] = cut
    shared = tuple(axis for axis in layout.shared if axis not in cut.axes)
    return replace(layout, cuts=tuple(cuts), shared=shared)


def _apart(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout with separate copies along some axes."""
    return replace(layout, shared=tuple(axis for axis in layout.shared if axis not in axes))


def missing(before: tuple[Layout, ...], after: tuple[Layout, ...], worker: int) -> int:
    """The number of values of a worker in the layouts `after` that it did not have `before`."""
    found = 0
    for layout in after:
        box = layout.box(worker)
        assert box is not None
        found += boxes.volume(box)
        for old in before:
            held = old.box(worker)
            assert held is not None
            found -= boxes.common_volume(box, held)
    return found


def _travelling(schedule: BlockSchedule, operands: list[Operand]) -> int:
    """The number of values that arrive in a ring at the worker that receives most."""
    found = 0
    for worker in schedule.partition.ranks:
        place, count = schedule.place_of(worker), 0
        for step in range(1, len(schedule.columns)):
            start, stop = schedule.block(place, step)
            if not schedule.tiles(place, step):
                continue
            for each in operands:
                if each.layout is not None and each.columns is not None:
                    shape = list(each.layout.shape_on(worker))
                    shape[each.columns] = stop - start
                    count += prod(shape)
        found = max(found, count)
    return found
