"""Attention of split sequences: every way is exact, sends what it says, and has few scores.

Tests `tensor/blockwise_attention.py`, `tensor/block_sum.py`, `tensor/rules/attention.py`,
`tensor/rules/attention_plan.py`, `tensor/explanation.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import odd_memory
import tessel
from covering import repeats
from parity import values
from tessel import Layout, Partition
from tessel.core.layout import Cut
from tessel.tensor.counter_random import uniform_in
from tessel.tensor.rules import attention, attention_plan
from tessel.testing import count_memory, count_traffic

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
WAYS = ("heads", "queries", "gather", "ring")
TOLERANCE = 1e-11  # of float64, in sums of a few hundred terms in another order


@contextmanager
def only(way: str) -> Iterator[list[str]]:
    """Where there is a choice, this way is chosen; the list has what was chosen."""
    chosen: list[str] = []
    before, before_most = attention.ways_of, attention_plan.GATHERED

    def ways_of(*args: Any, **settings: Any) -> Any:
        found = before(*args, **settings)
        found = tuple(sorted(found, key=lambda each: each.way != way))
        chosen.append(found[0].way)
        return found

    attention.ways_of, attention_plan.GATHERED = ways_of, 1 << 30
    try:
        yield chosen
    finally:
        attention.ways_of, attention_plan.GATHERED = before, before_most


@dataclass(frozen=True)
class Case:
    """A call, and how its operands lie."""

    shapes: tuple[Shape, ...]  # of q, k, v, and of a mask if there is one
    layouts: tuple[Layout | None, ...]
    is_causal: bool = False
    is_bool: bool = False
    scale: float | None = None
    groups: int = 1
    p: float = 0.0

    def operands(self) -> list[Tensor]:
        found = [values(shape, 3 + k) for k, shape in enumerate(self.shapes)]
        if self.is_bool:
            found[3] = found[3] > -0.3
        elif len(found) > 3:  # some are hidden
            found[3] = found[3].masked_fill(found[3] < -0.9, -math.inf)
        return found

    def does(self, *operands: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            *operands,
            dropout_p=self.p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.groups > 1,
        )


def written_out(case: Case, seed: int, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    """What torch documents that the function does."""
    k, v = (x.repeat_interleave(case.groups, -3) if case.groups > 1 else x for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale
    scores = q @ k.mT * scale
    if case.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    for mask in rest:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    if case.p:
        batch = torch.broadcast_shapes(weights.shape[:-2], v.shape[:-2])
        weights = weights.expand(*batch, *weights.shape[-2:])
        box = tuple((0, n) for n in weights.shape)
        weights = weights * (uniform_in(seed, tuple(weights.shape), box) >= case.p) / (1 - case.p)
    return weights @ v


def derived(y: Any, leaves: Sequence[Tensor], order: int) -> list[Tensor]:
    """Gradients of a weighted sum, without and with a graph of their own, and of their squares."""
    total = (y * values(tuple(y.shape), 50)).sum()
    found = [*torch.autograd.grad(total, leaves, retain_graph=True)]
    if order == 1:
        return found
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    squares: Any = sum(each.square().sum() for each in grads)
    return [*found, *grads, *torch.autograd.grad(squares, leaves)]


def check(case: Case, order: int = 2) -> str:
    """What is wrong with a case, or nothing."""
    plain = case.operands()
    ours = [each.clone().requires_grad_(each.is_floating_point()) for each in plain]
    theirs = [each.clone().requires_grad_(each.is_floating_point()) for each in plain]
    spread = [
        each if layout is None else tessel.spread(each, layout)
        for each, layout in zip(ours, case.layouts, strict=True)
    ]
    torch.manual_seed(5)
    got = case.does(*spread)
    torch.manual_seed(5)
    seed = int(torch.randint(2**62, ()))  # what the first worker draws
    expected = written_out(case, seed, *theirs)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.shape} {got.dtype} is not {expected.shape} {expected.dtype}"
    pairs = [(got.full(), expected)]
    needs = [each.is_floating_point() for each in plain]
    mine = derived(got, [x for x, need in zip(ours, needs, strict=True) if need], order)
    other = derived(expected, [x for x, need in zip(theirs, needs, strict=True) if need], order)
    pairs += zip(mine, other, strict=True)
    for number, (a, b) in enumerate(pairs):
        if not torch.allclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True):
            return f"value {number} is off by {(a - b).abs().max()}"
    return ""


def cuts_of(draw: random.Random, partition: Partition, shape: Shape) -> Layout | None:
    """Any layout: each axis splits a dimension, in any parts, or none; or a plain tensor."""
    if draw.random() < 0.15:
        return None
    dims = [draw.choice([*range(len(shape)), len(shape) - 2, None]) for _ in partition.shape]
    cuts = []
    for dim, length in enumerate(shape):
        axes = tuple(axis for axis, d in enumerate(dims) if d == dim)
        places = math.prod(partition.shape[axis] for axis in axes)
        ends = sorted(draw.randint(0, length) for _ in range(places - 1))
        cuts.append(Cut(axes, tuple(zip([0, *ends], [*ends, length], strict=True))))
    shared = tuple(axis for axis, dim in enumerate(dims) if dim is None)
    return Layout(partition, shape, tuple(cuts), shared)


def drawn(seed: int) -> Case:
    """Any call, with operands that lie in any way on the workers there are."""
    draw = random.Random(seed)
    workers = tessel.world().size
    grid = draw.choice([(workers,), (2, 2)]) if workers == 4 else (workers,)
    partition = Partition(tuple(range(workers)), grid)
    batch, heads, features = draw.choice([1, 2]), draw.choice([1, 2, 4]), draw.choice([3, 4])
    rows, columns = draw.choice([1, 2, *range(3, 10)]), draw.randint(1, 9)
    if draw.random() < 0.2:  # few queries
        rows, columns = draw.randint(1, 3), draw.randint(9, 12)
    groups = draw.choice([1, 1, 2]) if heads > 1 else 1
    shapes: list[Shape] = [
        (batch, heads, rows, 4),
        (batch, heads // groups, columns, 4),
        (batch, heads // groups, columns, features),
    ]
    kind = draw.choice(["none", "causal", "causal", "bool", "real"])
    if kind in ("bool", "real"):
        whole = (batch, heads, rows, columns)
        shape = tuple(n if draw.random() < 0.7 else 1 for n in whole)
        shapes.append(shape[draw.choice([0, 0, 1, 2]) :])
    layouts = [cuts_of(draw, partition, shape) for shape in shapes]
    if not any(each is not None for each in layouts[:3]):
        layouts[0] = Layout.whole(partition, shapes[0], shared=True)
    return Case(
        tuple(shapes),
        tuple(layouts),
        is_causal=kind == "causal",
        is_bool=kind == "bool",
        scale=draw.choice([None, 0.3]),
        groups=groups,
        p=draw.choice([0.0, 0.0, 0.4]),
    )


def check_drawn(way: str, first: int, count: int) -> int:
    """How many cases went this way."""
    wrong, went = [], 0
    with only(way) as chosen:
        for seed in range(first, first + count):
            case = drawn(seed)
            found = check(case)
            went += chosen[-1] == way
            if found:
                wrong.append(f"case {seed} by {chosen[-1]}: {found}, {case}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:5])
    return went


@pytest.mark.parametrize("nprocs", [1, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_drawn_calls(run: Run, nprocs: int, way: str) -> None:
    went = run(check_drawn, way, 1000 * nprocs, repeats(48), nprocs=nprocs, timeout=100)[0]
    assert nprocs == 1 or went > 1


# the way, the shapes of q, k and v, the number of the operand that is split, its parts, and p
BATCHES: dict[str, tuple[str, tuple[Shape, ...], int, list[list[int]], float]] = {
    **{
        f"a batch of values alone, dropout {p}": (
            *("queries", ((1, 2, 2, 4), (1, 2, 8, 4), (2, 2, 8, 4))),
            *(2, [[2], [2], [3, 0, 5], [4]], p),
        )
        for p in (0.0, 0.4)
    },
    "as many heads and keys as batches and heads": (
        *("gather", ((1, 1, 6, 2), (1, 1, 2), (1, 1, 1, 2))),
        *(0, [[1], [1], [3, 1, 2], [2]], 0.0),
    ),
    "no keys": (
        *("local", ((3, 1, 5, 2), (1, 1, 1, 0, 2), (1, 1, 0, 2))),
        *(0, [[1, 0, 2], [1], [5], [2]], 0.0),
    ),
    "dropout without queries": (
        *("queries", ((3, 1, 0, 4), (3, 1, 1, 8, 4), (3, 3, 1, 8, 2))),
        *(2, [[3], [3], [1], [1, 5, 2], [2]], 0.4),
    ),
}


def check_batches(name: str) -> None:
    way, shapes, number, lengths, p = BATCHES[name]
    partition = Partition((0, 1, 2), tuple(map(len, lengths)))
    layout = Layout.from_lengths(partition, lengths)
    layouts = tuple(layout if k == number else None for k in range(3))
    with only(way) as chosen:
        found = check(Case(shapes, layouts, p=p))
    assert chosen == [way] and not found, f"{chosen}: {found}"


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_some_operands_have(run: Run, name: str) -> None:
    run(check_batches, name, nprocs=3)


def check_scale(way: str, scale: float) -> None:
    shape = (1, 2, 9, 4)
    layouts = (Layout.split(tessel.world(), shape, [None, None, 0, None]),) * 3
    with only(way) as chosen:
        found = check(Case((shape,) * 3, layouts, is_causal=True, scale=scale))
    assert chosen == [way] and not found, found


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_a_scale_that_is_not_positive(run: Run, way: str, scale: float) -> None:
    run(check_scale, way, scale, nprocs=3)  # one process has NaN, by torch's kernel for CPUs


def check_padding(way: str, value: float) -> None:
    """Queries for which a mask has a large number at all keys, as of padding, see all alike."""
    shape, mask = (1, 2, 9, 4), torch.zeros(9, 9)
    mask[2:5] = value
    layout = Layout.split(tessel.world(), shape, [None, None, 0, None])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        plain = [values(shape, k).to(dtype) for k in range(3)]
        ours, theirs = ([x.clone().requires_grad_() for x in plain] for _ in range(2))
        with only(way):
            y: Any = F.scaled_dot_product_attention(*(tessel.spread(x, layout) for x in ours), mask)
        z = F.scaled_dot_product_attention(*theirs, mask)
        weights = values(shape, 9).to(dtype)
        found = torch.autograd.grad((y * weights).sum(), ours)
        expected = torch.autograd.grad((z * weights).sum(), theirs)
        for a, b in zip((y.full(), *found), (z, *expected), strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max(), (dtype, a - b)


@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("way", ["gather", "ring", "heads"])
def test_masks_of_large_numbers(run: Run, way: str, value: float) -> None:
    run(check_padding, way, value, nprocs=3)


def check_shared_heads(heads: int, groups: int, is_causal: bool) -> None:
    partition = Partition((0, 1, 2, 3), (2, 2))
    shapes = [(1, heads, 9, 4), *[(1, heads // groups, 9, 4)] * 2]
    layouts = [Layout.split(partition, shape, [None, 1, 0, None]) for shape in shapes]
    with only("ring") as chosen:
        found = check(Case(tuple(shapes), tuple(layouts), is_causal=is_causal, groups=groups))
    assert chosen == ["ring"] and not found, found


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2)])
def test_workers_with_heads_of_one_group_each_have_its_keys(
    run: Run, heads: int, groups: int, is_causal: bool
) -> None:
    run(check_shared_heads, heads, groups, is_causal, nprocs=4)


# -- memory and messages --------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """How many values the largest tensor has that torch makes, and that is no view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {self._place(each) for each in tree_flatten((args, kwargs))[0]} - {None}
        for each in tree_flatten(result)[0]:
            if (place := self._place(each)) is not None and place not in given:
                self.numel = max(self.numel, each.numel())
        return result

    def _place(self, x: Any) -> int | None:
        """Where a part has its values; None for what is none, or has none."""
        is_part = isinstance(x, Tensor) and not isinstance(x, tessel.Tensor) and not x.is_meta
        return x.untyped_storage().data_ptr() if is_part else None


def row(shape: Shape, dim: int) -> Layout:
    """A dimension split over all workers."""
    workers = tessel.world().size
    partition = Partition(tuple(range(workers)), (workers,))
    return Layout.split(partition, shape, [0 if d == dim else None for d in range(len(shape))])


def largest_of(length: int, kind: str, order: int) -> int:
    """The largest tensor in a ring of one head of keys, forward and backward."""
    heads = 2 if kind == "grouped" else 1
    layouts = [row((1, n, length, 2), 2) for n in (heads, 1, 1)]
    parts = [
        layout.local_part(values(layout.shape, k)).clone().requires_grad_()
        for k, layout in enumerate(layouts)
    ]
    settings: dict[str, Any] = {
        "causal": {"is_causal": True},
        "dropout": {"dropout_p": 0.3},
        "grouped": {"enable_gqa": True},
    }.get(kind, {})
    if kind in ("hidden", "bias"):  # rows of the mask lie with their queries, whole
        there = row((1, 1, length, length), 2)
        mask = there.local_part(values(there.shape, 7)).clone()
        settings["attn_mask"] = tessel.from_local(mask > -0.3 if kind == "hidden" else mask, there)
    with only("ring") as chosen, Largest() as found:
        operands = [tessel.from_local(x, there) for x, there in zip(parts, layouts, strict=True)]
        y = F.scaled_dot_product_attention(*operands, **settings)
        grads = torch.autograd.grad(y.local.square().sum(), parts, create_graph=order > 1)
        if order > 1:
            torch.autograd.grad(sum(each.square().sum() for each in grads), parts)
    assert chosen == ["ring"]
    return found.numel


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "causal", "dropout", "grouped", "hidden", "bias"])
def test_no_worker_has_more_scores_than_a_block(run: Run, kind: str, order: int) -> None:
    workers, length = 4, 96
    found = run(largest_of, length, kind, order, nprocs=workers)
    heads = 2 if kind == "grouped" else 1
    assert max(found) <= heads * (length // workers) ** 2  # its queries × one block of keys


def masked_by_positions(length: int) -> int:
    """A sliding window and padding, from positions that are spread; the largest tensor."""
    shape, window, padded = (1, 1, length, 2), 16, length - 20
    layout = row(shape, 2)

    def seen(rows: Tensor) -> Tensor:
        columns = torch.arange(length)
        rows = rows[:, None]
        return (columns <= rows) & (columns > rows - window) & (columns < padded)

    plain = [values(shape, k) for k in range(3)]
    spread = [tessel.spread(each, layout) for each in plain]
    with only("ring"), Largest() as found:
        mask = seen(tessel.arange(length, where=row((length,), 0)))
        y: Any = F.scaled_dot_product_attention(*spread, attn_mask=mask)
    torch.testing.assert_close(
        y.full(),
        F.scaled_dot_product_attention(*plain, attn_mask=seen(torch.arange(length))),
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
    return found.numel


def test_a_mask_of_spread_positions_is_in_parts(run: Run) -> None:
    workers, length = 4, 96
    assert max(run(masked_by_positions, length, nprocs=workers)) == length // workers * length


def peak_of(way: str, shape: Shape) -> float:
    """What a step has at once, in parts of an operand."""
    layout = row(shape, 2)
    parts = [layout.local_part(values(shape, k)).clone().requires_grad_() for k in range(3)]

    def step() -> None:
        y: Any = F.scaled_dot_product_attention(*(tessel.from_local(x, layout) for x in parts))
        torch.autograd.grad(y.local, parts, parts[0].detach())

    with only(way):
        step()  # what is kept between calls is there
        with count_memory() as memory:
            step()
    return memory.peak / parts[0].nbytes


def test_a_ring_needs_less_memory_than_gathered_keys(run: Run) -> None:
    shape = (1, 2, 2048, 64)
    ring, gathered = (max(run(peak_of, way, shape, nprocs=4)) for way in ("ring", "gather"))
    # the result, gradients 3, a block 2, the next one 2, terms 3, those on their way back 2
    assert ring < 14 < gathered


def scores_at_once(dtype: torch.dtype, **settings: Any) -> float:
    """What a step in a ring has at once, in blocks of scores."""
    shape, workers = (1, 2, 4096, 4), tessel.world().size
    layout = row(shape, 2)
    parts = [layout.local_part(values(shape, k)).to(dtype).requires_grad_() for k in range(3)]

    def step() -> None:
        operands = [tessel.from_local(x, layout) for x in parts]
        y: Any = F.scaled_dot_product_attention(*operands, **settings)
        torch.autograd.grad(y.local, parts, parts[0].detach())

    with only("ring"):
        step()  # what is kept between calls is there
        with count_memory() as memory:
            step()
    return memory.peak / (shape[1] * (shape[2] // workers) ** 2 * dtype.itemsize)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_needs_few_tensors_of_scores(run: Run, dtype: torch.dtype, is_causal: bool) -> None:
    found = run(partial(scores_at_once, dtype, dropout_p=0.3, is_causal=is_causal), nprocs=4)
    # weights, their gradients and the factors of dropout; and the parts of this worker
    assert max(found) < 3.7


def bytes_of(way: str, shape: Shape, is_causal: bool) -> tuple[int, int, int]:
    """What this worker receives, forward and backward, and what the plan says that one receives."""
    layout = row(shape, 2)
    parts = [layout.local_part(values(shape, k)).clone().requires_grad_() for k in range(3)]
    operands = [tessel.from_local(each, layout) for each in parts]
    with only(way) as chosen:
        plan = attention.ways_of(operands, is_causal)[0]
        with count_traffic() as forward:
            y = F.scaled_dot_product_attention(*operands, is_causal=is_causal)
        with count_traffic() as backward:
            y.local.backward(y.local.detach())
    assert chosen[-1] == plan.way == way
    return forward.bytes_received, backward.bytes_received, plan.num_values * 8


@pytest.mark.parametrize("way", ["heads", "gather", "ring"])
def test_what_travels(run: Run, way: str) -> None:
    workers, shape = 4, (1, 4, 32, 2)
    found = run(bytes_of, way, shape, False, nprocs=workers)
    numel, all_but_own = math.prod(shape) * 8, workers - 1
    if way == "heads":  # a part of each of q, k, v and the result stays
        least = 4 * numel * all_but_own // workers**2
        backward = least
    else:  # keys and values of all others; back come gradients, and in a ring, keys once more
        least = 2 * numel * all_but_own // workers
        backward = least if way == "gather" else 2 * least
    assert [each[:2] for each in found] == [(least, backward)] * workers
    assert {each[2] for each in found} == {least + backward}


def test_a_causal_ring_sends_what_is_seen(run: Run) -> None:
    found = run(bytes_of, "ring", (1, 1, 64, 2), True, nprocs=4)
    # Of 8 chunks worker p has 2p and 2p + 1, and gets p and 7 - p: six queries and results of
    # chunks change place. The later chunk sees blocks 0-3, 0-3, 0-2, 0-2, of which p is there.
    chunk, block = 8 * 2 * 8, 2 * 16 * 2 * 8
    assert sum(each[0] for each in found) == 2 * 6 * chunk + (3 + 3 + 2 + 3) * block
    assert max(sum(each[:2]) for each in found) == found[0][2]


def pairs_of(length: int, is_causal: bool) -> int:
    """How many scores this worker computes."""
    shape = (1, 1, length, 2)
    with only("ring"):
        operands = [tessel.spread(values(shape, k), row(shape, 2)) for k in range(3)]
        schedule = attention.ways_of(operands, is_causal)[0].schedule
    found = 0
    for step in range(len(schedule.columns)):
        for tile in schedule.tiles(schedule.place, step):
            for query in range(*tile.rows):
                found += len(range(tile.columns[0], min(tile.columns[1], query + 1)))
    return found


def test_causal_work_is_balanced(run: Run) -> None:
    found = run(pairs_of, 64, True, nprocs=4)
    assert found == [64 * 65 // 2 // 4] * 4  # an early chunk and a late one: exactly alike


# -- kinds ----------------------------------------------------------------------------------------


def kinds_of(dtype: torch.dtype, way: str) -> list[float]:
    """By how much results in shorter types differ from those of one process, and their kind."""
    shape = (1, 2, 33, 8)
    plain = [values(shape, k).to(dtype) for k in range(3)]
    ours, theirs = ([x.clone().requires_grad_() for x in plain] for _ in range(2))
    with only(way):
        y = F.scaled_dot_product_attention(*(tessel.spread(x, row(shape, 2)) for x in ours))
    z = F.scaled_dot_product_attention(*theirs)
    assert y.dtype == z.dtype
    weights = values(shape, 9).to(dtype)
    grads = torch.autograd.grad((y * weights).sum(), ours)
    others = torch.autograd.grad((z * weights).sum(), theirs)
    pairs = [(y.full(), z), *zip(grads, others, strict=True)]
    return [float((a.double() - b.double()).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("way", ["ring", "queries"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)]
)
def test_shorter_types(run: Run, dtype: torch.dtype, tolerance: float, way: str) -> None:
    # sums are in float32 for all of them; results are rounded once, gradients for each block
    assert max(run(kinds_of, dtype, way, nprocs=3)[0]) <= tolerance


def cast_by_autocast() -> float:
    shape = (1, 2, 33, 8)
    plain = [values(shape, k).float() for k in range(3)]
    plain[2] = plain[2].bfloat16()  # as that of a product before; rotary positions widen the others
    with only("ring"), torch.autocast("cpu", torch.bfloat16):
        y = F.scaled_dot_product_attention(*(tessel.spread(x, row(shape, 2)) for x in plain))
        z = F.scaled_dot_product_attention(*plain)
    assert y.dtype == z.dtype == torch.bfloat16
    return float((y.full() - z).abs().max())


def test_autocast(run: Run) -> None:
    assert run(cast_by_autocast, nprocs=3)[0] <= 1e-2  # an ulp of bfloat16 at 1


def derived_forward() -> float:
    """Forward mode, of a sequence that is split."""
    shape = (1, 1, 9, 2)
    plain = [values(shape, k) for k in range(3)]
    directions = [values(shape, 10 + k) for k in range(3)]
    with only("ring"), sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no forward mode
        found = [torch.func.jvp(F.scaled_dot_product_attention, tuple(plain), tuple(directions))]
        spread = [tessel.spread(x, row(shape, 2)) for x in plain]
        tangents = [tessel.spread(x, row(shape, 2)) for x in directions]
        found.append(torch.func.jvp(F.scaled_dot_product_attention, tuple(spread), tuple(tangents)))
    (y, t), (z, u) = found
    return float(max((z.full() - y).abs().max(), (u.full() - t).abs().max()))


def test_forward_mode(run: Run) -> None:
    assert run(derived_forward, nprocs=3)[0] < TOLERANCE


def recomputed() -> list[float]:
    """Inside of a checkpoint, with dropout: the same draws when it is computed again."""
    shape = (1, 1, 9, 2)
    found = []
    for checkpoints in (False, True):
        x = values(shape, 1).requires_grad_()
        y = tessel.spread(x, row(shape, 2))

        def block(y: Any) -> Any:
            return F.scaled_dot_product_attention(y, y, y, None, 0.3, True)

        torch.manual_seed(3)
        with only("ring"):
            if checkpoints:
                z = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
            else:
                z = block(y)
            z.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return [float((found[0] - found[1]).abs().max())]


def test_checkpoint(run: Run) -> None:
    assert run(recomputed, nprocs=3)[0] == [0.0]


def explained_on_grids(axes: tuple[int, ...], of_keys: tuple[int, ...]) -> tuple[str, int, int]:
    """The way, what a worker receives by the explanation, and what it did; values are compared."""
    shape = (2, 4, 12, 4)
    plain = [values(shape, k).requires_grad_() for k in range(3)]
    query, key = (
        tessel.world().create_cartesian_topology_partition(each) for each in (axes, of_keys)
    )
    spread = [
        tessel.spread(x.detach(), grid).requires_grad_()
        for x, grid in zip(plain, (query, key, key), strict=True)
    ]
    explained = tessel.explain(F.scaled_dot_product_attention, *spread)
    with attention.noted_ways() as ways, count_traffic() as forward:
        y: Any = F.scaled_dot_product_attention(*spread)
    weights = values(shape, 9)
    ours = tessel.spread(weights, query)
    with count_traffic() as backward:
        grads = torch.autograd.grad((y * ours).sum(), spread)
    z = F.scaled_dot_product_attention(*plain)
    others = torch.autograd.grad((z * weights).sum(), plain)
    for a, b in zip((y, *grads), (z, *others), strict=True):
        assert torch.allclose(a.full(), b, TOLERANCE, TOLERANCE)
    assert ways == [explained.way], f"{explained} of {ways}"
    assert ("to be on one grid" in str(explained)) == (explained.before > 0)
    told = explained.ways[0][1] + explained.before
    sent = tessel.nn.AllSumReduce(tessel.world(), [0])(
        torch.tensor([float(forward.bytes_sent + backward.bytes_sent)])
    )
    return explained.way, told, int(sent)


GRIDS_OF_FOUR = [
    ((1, 1, 4, 1), (1, 1, 2, 2)),
    ((1, 1, 4, 1), (1, 4, 1, 1)),
    ((2, 1, 2, 1), (1, 2, 2, 1)),
    ((1, 2, 2, 1), (1, 2, 2, 1)),
]


@pytest.mark.parametrize("grids", GRIDS_OF_FOUR)
def test_operands_on_several_grids_are_explained(run: Run, grids: Any) -> None:
    """Workers send no more, together, than each of them receives at most by the explanation."""
    found = run(explained_on_grids, *grids, nprocs=4, timeout=60)
    way, told, sent = found[0]
    assert found == [found[0]] * 4
    loss = 2 * 4 * 3 * 8  # the sum that is derived
    assert sent <= 4 * told + loss, f"{way}: {sent} bytes, {told} for a worker"


def explained_apart() -> None:
    """Of tensors on different workers there is no attention, and nothing to explain."""
    shape = (1, 2, 4, 4)
    here, there = (Partition((worker,), (1, 1, 1, 1)) for worker in range(2))
    q, k = tessel.spread(values(shape, 1), here), tessel.spread(values(shape, 2), there)
    with pytest.raises(ValueError, match="on different workers or grids"):
        tessel.explain(F.scaled_dot_product_attention, q, k, k)


def test_operands_on_different_workers_are_not_explained(run: Run) -> None:
    run(explained_apart, nprocs=2, timeout=60)


# -- memory ---------------------------------------------------------------------------------------


def differences_in_memory(way: str) -> list[str]:
    """What is wrong where parts lie in any memory order, forward and in all gradients."""
    workers = tessel.world().size
    partition = Partition(tuple(range(workers)), (workers,))
    shape, wrong = (2, 3, 7, 4), []
    names = odd_memory.NAMES
    cases = product(range(len(names)), ("none", "causal", "mask"), range(4))
    for number, kind, split in cases:
        memories = [names[number - 4 * k] for k in range(3)]
        layout = Layout.split(partition, shape, [0 if dim == split else None for dim in range(4)])
        spread = []
        for k, memory in enumerate(memories):
            part = odd_memory.odd(memory, layout.local_part(values(shape, k)))
            spread.append(tessel.from_local(part, layout).requires_grad_())
        plain = [x.detach().full().clone().requires_grad_() for x in spread]
        settings: dict[str, Any] = {"is_causal": kind == "causal"}
        if kind == "mask":
            settings["attn_mask"] = odd_memory.odd(memories[0], values((7, 7), 8))
        with only(way) as chosen:
            y: Any = F.scaled_dot_product_attention(*spread, **settings)
        z = F.scaled_dot_product_attention(*plain, **settings)
        # a sum, whose gradient is one number over and over
        grads = torch.autograd.grad(y.sum(), spread)
        others = torch.autograd.grad(z.sum(), plain)
        found = [y.full(), *(each.full() for each in grads)]
        pairs = zip(found, (z, *others), strict=True)
        if not all(torch.allclose(a, b, TOLERANCE, TOLERANCE) for a, b in pairs):
            wrong.append(f"{memories} {kind} split along {split}, by {chosen}")
    return wrong


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_any_memory_order(run: Run, way: str, nprocs: int) -> None:
    assert run(differences_in_memory, way, nprocs=nprocs, timeout=100) == [[]] * nprocs
