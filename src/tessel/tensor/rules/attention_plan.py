"""Ways of attention: where queries, keys and values meet, chosen by how much travels.

Batch and heads are treated one by one, so they stay split. If the sequence is split as well, each
query has to meet all keys:

- `heads`: the axes of the grid that split the sequence go over to heads and batch for a while;
- `queries`: keys and values stay, all queries, which are few, go to them, and results are merged;
- `gather`: everybody gets all keys and values, if they are few;
- `ring`: queries stay, and keys and values come block by block.

A causal ring deals queries out anew, an early chunk and a late one to each worker, so that all of
them see about as many keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from string import ascii_lowercase

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.tensor.block_sum import ROWS, BlockSchedule, Operand
from tessel.tensor.rules.hosting import hosted, split_like
from tessel.tensor.rules.products import planned
from tessel.transport import kept_in_job

GATHERED = 1 << 16  # values of keys and values that go to all workers: one message is quicker


@dataclass(frozen=True)
class AttentionPlan:
    """How attention is computed for tensors that lie in given ways.

    Attributes:
        way: its name.
        inputs: how q, k, v and the mask lie; several layouts for chunks of rows, in their order.
        results: how the results of these chunks lie.
        final: how the result shall lie.
        schedule: which queries and keys each worker multiplies.
        operands: how q, k, v and the mask lie in its steps.
        num_values: how many a worker receives, the one that receives most, forward and backward.
    """

    way: str
    inputs: tuple[tuple[Layout, ...], ...]
    results: tuple[Layout, ...]
    final: Layout
    schedule: BlockSchedule
    operands: tuple[Operand, ...]
    num_values: int


@dataclass(frozen=True)
class _Shapes:
    """What plans are made for.

    Attributes:
        partition: the workers.
        shapes: of q, k, v and the mask, if there is one.
        layouts: theirs, None for plain ones.
        is_causal: whether queries see only keys that are not behind them.
        groups: how many heads of queries share one of keys.
    """

    partition: Partition
    shapes: tuple[Shape, ...]
    layouts: tuple[Layout | None, ...]
    is_causal: bool
    groups: int


@kept_in_job
def plans(
    partition: Partition,
    shapes: tuple[Shape, ...],
    layouts: tuple[Layout | None, ...],
    is_causal: bool,
    groups: int,
    most: int,
) -> tuple[AttentionPlan, ...]:
    """All ways, the best first: that for which the fewest values travel, forward and backward."""
    # features are whole where scores are computed: their axes go to other dimensions
    inner = tuple(
        each if each is None or number == 3 else hosted(each, (len(each.shape) - 1,))
        for number, each in enumerate(layouts)
    )
    given = _Shapes(partition, shapes, inner, is_causal, groups)
    axes = _sequence_axes(given)
    final = _final(given, layouts[0], axes)
    if not axes:
        return (_as_they_lie(given, inner, final, layouts),)
    found = [_gather(given, axes, final, layouts)]
    if _split_keys(given) is not None:
        everywhere = max(
            sum(prod(found[0].inputs[n][0].shape_on(w)) for n in (1, 2)) for w in partition.ranks
        )
        if everywhere > most:
            found = []
        # so that a worker has no more scores than a block of queries with a block of keys has
        if _are_few(given, axes):
            found.insert(0, _queries(given, axes, final, layouts))
        found.append(_ring(given, axes, final, layouts))
    hosts = tuple(
        each
        if each is None or number == 3
        else hosted(each, tuple(len(each.shape) - n for n in (2, 1)))
        for number, each in enumerate(inner)
    )
    by_heads = _as_they_lie(given, hosts, final, layouts)
    if not {*axes} & {*by_heads.results[0].shared}:
        found.insert(0, replace(by_heads, way="heads"))
    return tuple(sorted(found, key=lambda plan: plan.num_values))


# -- dimensions before the last two ---------------------------------------------------------------


def _of_batch(given: _Shapes, layouts: tuple[Layout | None, ...]) -> tuple[list[Layout], Layout]:
    """How operands and result lie if sequences and features are whole: split by batch and heads."""
    shapes = given.shapes
    ndim = max(map(len, shapes))
    batch = ascii_lowercase[: ndim - 2]
    indices = [
        batch[len(batch) - len(shape) + 2 :] + end
        for shape, end in zip(shapes, ("XE", "YE", "YV", "XY"), strict=False)
    ]
    wholes = [
        None
        if each is None or number == 3
        else each.gathered(_last_two(each, given.groups, number))
        for number, each in enumerate(layouts)
    ]
    if given.groups > 1:  # heads of keys are others than those of queries
        for number in (1, 2):
            indices[number] = indices[number][:-3] + "K" + indices[number][-2:]
    plan = planned(given.partition, tuple(indices), batch + "XV", shapes, tuple(wholes))
    inputs = list(plan.inputs)
    if given.groups > 1:
        heads = plan.result.cuts[-3]
        intervals = tuple((a // given.groups, -(-b // given.groups)) for a, b in heads.intervals)
        for number in (1, 2):
            dim = len(shapes[number]) - 3
            inputs[number] = _cut(inputs[number], dim, Cut(heads.axes, intervals))
    return inputs, plan.result


def _last_two(layout: Layout, groups: int, number: int) -> tuple[int, ...]:
    """The dimensions of sequence and features; of grouped keys, their heads as well."""
    first = 3 if groups > 1 and number in (1, 2) else 2
    return tuple(len(layout.shape) - n for n in range(first, 0, -1))


def _cut(layout: Layout, dim: int, cut: Cut) -> Layout:
    """The same with a dimension split along axes that were shared."""
    cuts = list(layout.cuts)
    cuts[dim] = cut
    shared = tuple(axis for axis in layout.shared if axis not in cut.axes)
    return replace(layout, cuts=tuple(cuts), shared=shared)


def _apart(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The same with copies along some axes that are used one by one."""
    return replace(layout, shared=tuple(axis for axis in layout.shared if axis not in axes))


# -- sequences ------------------------------------------------------------------------------------


def _sequence_axes(given: _Shapes) -> tuple[int, ...]:
    """The axes that split a sequence and are not needed for batch or heads."""
    free = {*_of_batch(given, given.layouts)[1].shared}
    found: list[int] = []
    for layout in given.layouts[:3]:
        for axis in () if layout is None else layout.cuts[-2].axes:
            if axis in free and axis not in found and given.partition.shape[axis] > 1:
                found.append(axis)
    return tuple(found)


def _places(given: _Shapes, axes: tuple[int, ...]) -> int:
    return prod(given.partition.shape[axis] for axis in axes)


def _split_keys(given: _Shapes) -> Layout | None:
    """The layout of keys, or of values, if their sequence is split."""
    for layout in given.layouts[1:3]:
        if layout is not None and layout.is_split(len(layout.shape) - 2):
            return layout
    return None


def _rows(given: _Shapes, axes: tuple[int, ...]) -> tuple[Interval, ...]:
    """The queries of each place: as they lie, if they lie so."""
    layout = given.layouts[0]
    if layout is not None and layout.cuts[-2].axes == axes:
        return tuple(layout.cuts[-2].intervals)
    return tuple(boxes.balanced(given.shapes[0][-2], _places(given, axes)))


def _columns(given: _Shapes, axes: tuple[int, ...]) -> tuple[Interval, ...]:
    """The keys of each place."""
    layout = _split_keys(given)
    if layout is not None and layout.cuts[-2].axes == axes:
        return tuple(layout.cuts[-2].intervals)
    return tuple(boxes.balanced(given.shapes[1][-2], _places(given, axes)))


def _are_few(given: _Shapes, axes: tuple[int, ...]) -> bool:
    """Whether there are no more queries than keys in a block."""
    longest = max(stop - start for start, stop in _columns(given, axes))
    return given.shapes[0][-2] <= longest


def _final(given: _Shapes, of_queries: Layout | None, axes: tuple[int, ...]) -> Layout:
    """How the result shall lie: as the queries do; of plain ones, whole if there are few."""
    _, result = _of_batch(given, given.layouts)
    if of_queries is not None and len(of_queries.shape) == len(result.shape):
        return split_like(of_queries, result.shape)
    if of_queries is None and axes and _are_few(given, axes):
        return result
    return _cut(result, len(result.shape) - 2, Cut(axes, _rows(given, axes))) if axes else result


# -- the ways -------------------------------------------------------------------------------------


def _as_they_lie(
    given: _Shapes,
    there: tuple[Layout | None, ...],
    final: Layout,
    layouts: tuple[Layout | None, ...],
) -> AttentionPlan:
    """Everything whole but batch and heads: each worker has some of these for itself."""
    inputs, result = _of_batch(given, there)
    schedule = _held_schedule(given, (), ((0, given.shapes[0][-2]),))
    lie = tuple((each,) for each in inputs)
    received = 2 * _received(layouts, lie, (result,), final)
    return AttentionPlan("local", lie, (result,), final, schedule, _held(given), received)


def _gather(
    given: _Shapes, axes: tuple[int, ...], final: Layout, layouts: tuple[Layout | None, ...]
) -> AttentionPlan:
    """Queries split, keys and values whole."""
    inputs, result = _of_batch(given, given.layouts)
    rows = _rows(given, axes)
    lie = tuple((_by_rows(each, number, given, axes, rows),) for number, each in enumerate(inputs))
    results = (_cut(result, len(result.shape) - 2, Cut(axes, rows)),)
    schedule = _held_schedule(given, axes, rows)
    received = 2 * _received(layouts, lie, results, final)
    return AttentionPlan("gather", lie, results, final, schedule, _held(given), received)


def _by_rows(
    layout: Layout, number: int, given: _Shapes, axes: tuple[int, ...], rows: tuple[Interval, ...]
) -> Layout:
    """An operand for rows of queries: split if it has them, else for use along the axes."""
    if number == 0 or (number == 3 and _has_rows(given)):
        return _cut(layout, len(layout.shape) - 2, Cut(axes, rows))
    return _apart(layout, axes)


def _queries(
    given: _Shapes, axes: tuple[int, ...], final: Layout, layouts: tuple[Layout | None, ...]
) -> AttentionPlan:
    """Keys and values split, all queries beside each of their parts; results are terms of sums."""
    inputs, result = _of_batch(given, given.layouts)
    columns = _columns(given, axes)
    lie = [_apart(inputs[0], axes)]
    for number, each in enumerate(inputs[1:], 1):
        dim = len(each.shape) - (1 if number == 3 else 2)
        has_columns = number < 3 or given.shapes[3][-1] > 1
        lie.append(_cut(each, dim, Cut(axes, columns)) if has_columns else _apart(each, axes))
    queries = given.layouts[0]
    stays = queries is not None and queries.cuts[-2].axes == axes
    target = result
    if stays:  # each worker sums up the results of its own queries
        target = _cut(result, len(result.shape) - 2, Cut(axes, _rows(given, axes)))
    places = _places(given, axes)
    # beside each result comes the sum of its weights, and before it, from all, the largest score
    terms = max(
        prod((*target.shape_on(w)[:-1], target.shape[-1] + 1)) for w in target.partition.ranks
    )
    merged = terms * (places - 1) if stays else 2 * terms * (places - 1) // places
    whole = tuple((each,) for each in lie)
    received = 2 * (merged + _received(layouts, whole, (target,), final))
    rows = ((0, given.shapes[0][-2]),)
    schedule = BlockSchedule(given.partition, axes, (rows,) * places, columns, given.is_causal)
    return AttentionPlan("queries", whole, (target,), final, schedule, _held(given), received)


def _ring(
    given: _Shapes, axes: tuple[int, ...], final: Layout, layouts: tuple[Layout | None, ...]
) -> AttentionPlan:
    """Queries stay, or are dealt out anew, and keys and values come block by block."""
    inputs, result = _of_batch(given, given.layouts)
    places, columns = _places(given, axes), _columns(given, axes)
    length = given.shapes[0][-2]
    if given.is_causal and length >= 2 * places:
        # An early chunk and a late one: together each place sees about as many keys.
        chunks = boxes.balanced(length, 2 * places)
        dealt = [tuple(chunks[:places]), tuple(chunks[: places - 1 : -1])]
    else:
        dealt = [_rows(given, axes)]
    last = len(result.shape) - 2
    results = tuple(_cut(result, last, Cut(axes, rows)) for rows in dealt)
    lie: list[tuple[Layout, ...]] = []
    operands = []
    for number, each in enumerate(inputs):
        if number == 0 or (number == 3 and _has_rows(given)):
            lie.append(tuple(_cut(each, len(each.shape) - 2, Cut(axes, rows)) for rows in dealt))
            is_mask = number == 3 and given.shapes[3][-1] > 1
            operands.append(Operand(rows=True, columns=-1) if is_mask else ROWS)
            continue
        dim = -1 if number == 3 else -2
        if each.shape[dim] == 1 and number == 3:
            lie.append((_apart(each, axes),))
            operands.append(Operand())
            continue
        there = _cut(each, len(each.shape) + dim, Cut(axes, columns))
        lie.append((there,))
        taken = {axis for cut in there.cuts for axis in cut.axes}
        shared = tuple(axis for axis in range(given.partition.dim) if axis not in taken)
        operands.append(Operand(columns=dim, layout=replace(there, shared=shared)))
    schedule = BlockSchedule(
        given.partition, axes, tuple(zip(*dealt, strict=True)), columns, given.is_causal
    )
    blocks = _travelling(schedule, operands)
    received = 2 * _received(layouts, tuple(lie), results, final) + 3 * blocks
    return AttentionPlan("ring", tuple(lie), results, final, schedule, tuple(operands), received)


def _has_rows(given: _Shapes) -> bool:
    """Whether there is a mask with a row for each query."""
    return len(given.shapes) > 3 and len(given.shapes[3]) > 1 and given.shapes[3][-2] > 1


def _held_schedule(
    given: _Shapes, axes: tuple[int, ...], rows: tuple[Interval, ...]
) -> BlockSchedule:
    """Keys that a worker has, all of them, in as many blocks as there are workers."""
    columns = tuple(boxes.balanced(given.shapes[1][-2], given.partition.size))
    return BlockSchedule(
        given.partition, axes, tuple((each,) for each in rows), columns, given.is_causal
    )


def _held(given: _Shapes) -> tuple[Operand, ...]:
    """Operands whose columns are all there."""
    found = [ROWS, Operand(columns=-2), Operand(columns=-2)]
    if len(given.shapes) > 3:
        columns = -1 if given.shapes[3][-1] > 1 else None
        found.append(Operand(rows=_has_rows(given), columns=columns))
    return tuple(found)


# -- what travels ---------------------------------------------------------------------------------


def _received(
    layouts: tuple[Layout | None, ...],
    inputs: tuple[tuple[Layout, ...], ...],
    results: tuple[Layout, ...],
    final: Layout,
) -> int:
    """How many values the worker receives that receives most, to compute and to bring results."""
    found = 0
    for worker in final.partition.ranks:
        count = _missing(results, (final,), worker)
        for layout, there in zip(layouts, inputs, strict=True):
            count += 0 if layout is None else _missing((layout,), there, worker)
        found = max(found, count)
    return found


def _missing(before: tuple[Layout, ...], after: tuple[Layout, ...], worker: int) -> int:
    """How many values a worker has afterwards that it did not have before."""
    found = 0
    for layout in after:
        box = layout.box(worker)
        assert box is not None
        found += boxes.volume(box)
        for old in before:
            held = old.box(worker)
            assert held is not None
            overlaps = [boxes.overlap(*both) for both in zip(box, held, strict=True)]
            found -= prod(0 if each is None else each[1] - each[0] for each in overlaps)
    return found


def _travelling(schedule: BlockSchedule, operands: list[Operand]) -> int:
    """How many values come round the ring to the worker that gets most."""
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
