"""The four movements of tensor parallelism, and the group of workers that they run in.

Tests `distributed/movements.py`, `distributed/group.py`, `distributed/slices.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
import tessel.distributed as parallel
from parity import close, values
from scripts import python
from tessel import Partition
from tessel.distributed.movements import copying, reducing, scattering
from tessel.distributed.shards import Sharding, as_plain, as_shard, sharding_of
from tessel.testing import check_adjoint, check_gradient, count_traffic
from windowed_cases import raised

Run = Callable[..., list[Any]]
WIDTH = 8  # bytes of a float64


def group_of_two() -> Partition:
    """This worker's pair among all workers, whose pairs all of them make."""
    pairs = [Partition((k, k + 1), (2,)) for k in range(0, tessel.world().size, 2)]
    return next(pair for pair in pairs if pair.active)


def laws() -> None:
    P = tessel.world()
    for shape in ((5,), (3, 2), (2, 7, 1), (0, 3), (4, 0)):
        operators = [copying(P, shape), reducing(P, shape)]
        operators += [scattering(P, shape, dim) for dim in range(len(shape))]
        operators += [each.H for each in operators]
        for operator in operators:
            for dtype in (torch.float64, torch.complex128, torch.float32):
                check_adjoint(operator, dtype)
            check_gradient(operator)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_each_is_an_operator_with_its_exact_adjoint(run: Run, nprocs: int) -> None:
    run(laws, nprocs=nprocs)


def one_loss(pairs: bool) -> None:
    """f(x) = Σ_k g_k(copy(x)), by reduce; x also comes from shards, and goes to shards."""
    P = group_of_two() if pairs else tessel.world()
    place = P.rank
    assert place is not None
    for size in (1, 6, 7):
        whole = values((3, size), 1 + P.ranks[0]).requires_grad_()
        x = whole.detach().clone().requires_grad_()
        weights = [values((3, size), 10 + k) for k in range(P.size)]
        expected = sum((w * whole.sin()).tanh() for w in weights).square().sum()
        shard = parallel.scatter(x, 1, P)
        assert sharding_of(shard) == Sharding(1, P, size)
        y = parallel.copy(parallel.gather(shard.sin()), P)
        got = parallel.reduce((weights[place] * y).tanh(), P).square().sum()
        expected_first = torch.autograd.grad(expected, whole, create_graph=True)[0]
        first = torch.autograd.grad(got, x, create_graph=True)[0]
        close("value", got, expected)
        close("gradient", first, expected_first)
        second = torch.autograd.grad(first.square().sum(), x)[0]
        expected_second = torch.autograd.grad(expected_first.square().sum(), whole)[0]
        close("second gradient", second, expected_second)


@pytest.mark.parametrize(("nprocs", "pairs"), [(1, False), (2, False), (3, False), (4, True)])
def test_gradients_are_those_of_one_process(run: Run, nprocs: int, pairs: bool) -> None:
    run(one_loss, pairs, nprocs=nprocs)


def traffic() -> dict[str, Any]:
    P = tessel.world()
    x = values((4, 8), 0).requires_grad_()
    own = (values((4, 8), P.rank or 0) * 1).requires_grad_()
    shard = parallel.scatter(x.detach(), 1).requires_grad_()
    counts: dict[str, Any] = {}
    for name, move, argument in (
        ("copy", parallel.copy, x),
        ("reduce", parallel.reduce, own),
        ("scatter", lambda each: parallel.scatter(each, 1), x),
        ("gather", parallel.gather, shard),
    ):
        with count_traffic() as there:
            y = move(argument)
        with count_traffic() as back:
            as_plain(y).sum().backward()
        counts[name] = (there.bytes_sent, back.bytes_sent), (there.agreements, back.agreements)
    return counts


def test_each_sends_what_it_must(run: Run) -> None:
    """An all-reduce is a reduce-scatter and an all-gather, each of 3/4 of the tensor."""
    part = 3 * (4 * 8 // 4) * WIDTH
    for counts in run(traffic, nprocs=4):
        assert {name: count[0] for name, count in counts.items()} == {
            "copy": (0, 2 * part),
            "reduce": (2 * part, 0),
            "scatter": (0, part),
            "gather": (part, 0),
        }
        assert all(count[1] == (1, 0) for count in counts.values())


def stay() -> None:
    """Nothing changes its input, not even a strange one, and shares no memory with it."""
    base = values((6, 4), 0)
    for x in (base, base.T, base[::2], base[:1].expand(3, 4), torch.complex(base, base).conj()):
        before = x.clone()
        for move in (parallel.reduce, lambda each: parallel.scatter(each, 0), parallel.copy):
            y = move(x)
            assert torch.equal(x, before)
            if move is not parallel.copy:
                as_plain(y).zero_()
                assert torch.equal(x, before)
        whole = parallel.gather(parallel.scatter(x, -1))
        assert torch.equal(whole, before)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_inputs_stay_as_they_are(run: Run, nprocs: int) -> None:
    run(stay, nprocs=nprocs)


def only_one_needs_a_gradient() -> None:
    """Some worker's input is a constant, and all take part in the backward pass all the same."""
    P = tessel.world()
    needs = P.rank == 0
    x = values((2, 3), 0).requires_grad_(needs)
    parallel.copy(x).square().sum().backward()
    own = values((2, 3), P.rank or 0).requires_grad_(needs)
    parallel.reduce(own).sum().backward()
    shard = parallel.scatter(values((2, 5), 0).requires_grad_(needs), 1)
    parallel.gather(shard * 2).square().sum().backward()
    if needs:
        close("gradient", x.grad, 2 * P.size * x)


def test_a_worker_without_gradients_takes_part(run: Run) -> None:
    run(only_one_needs_a_gradient, nprocs=3)


def uneven() -> None:
    """Shards that the user made may have any lengths, also none."""
    P = tessel.world()
    lengths = [3, 0, 2]
    starts = [0, 3, 3, 5]
    whole = values((2, 5), 0)
    rank = P.rank or 0
    mine = whole[:, starts[rank] : starts[rank] + lengths[rank]].clone().requires_grad_()
    for x in (mine, parallel.register_parallel_dim(mine, 1)):
        y = parallel.gather(x, 1)
        assert torch.equal(y, whole)
        (grad,) = torch.autograd.grad(y.square().sum(), mine)
        close("gradient", grad, 2 * mine)


def test_shards_of_any_lengths_are_gathered(run: Run) -> None:
    run(uneven, nprocs=3)


def bad(kind: str) -> Any:
    P = tessel.world()
    last = P.rank == P.size - 1
    x = values((4, 6), 0)
    shard = parallel.scatter(x, 1)
    calls: dict[str, Callable[[], Any]] = {
        "shapes": lambda: parallel.copy(x[:3] if last else x),
        "dtypes": lambda: parallel.reduce(x.float() if last else x),
        "other calls": lambda: (parallel.copy if last else parallel.reduce)(x),
        "other dims": lambda: parallel.scatter(x, 0 if last else 1),
        "out of range": lambda: parallel.scatter(x, 2),
        "no dim": lambda: parallel.gather(x),
        "another dim": lambda: parallel.gather(shard, 0),
        "copy of a shard": lambda: parallel.copy(shard),
        "sum of shards": lambda: parallel.reduce(shard),
        "scatter of a shard": lambda: parallel.scatter(shard, 0),
        "one without a sharding": lambda: parallel.gather(as_plain(shard) if last else shard, 1),
        "another size": lambda: parallel.gather(as_shard(as_plain(shard), Sharding(1, P, 11))),
        "other rows": lambda: parallel.gather(shard[:3] if last else shard),
        "no number": lambda: parallel.scatter(x, "rows" if last else 1),  # type: ignore[arg-type]
        "no number to gather": lambda: parallel.gather(shard, [1] if last else 1),  # type: ignore[arg-type]
        "no tensor": lambda: parallel.copy("x" if last else x),  # type: ignore[arg-type]
    }
    return raised(calls[kind])


BAD = {
    "shapes": "shape",
    "dtypes": "dtype",
    "other calls": "same calls",
    "other dims": "same calls",
    "out of range": "dim 2 is out of range",
    "no dim": "gather(x, dim)",
    "another dim": "this contradicts the sharding",
    "copy of a shard": "gather(x)",
    "sum of shards": "gather(x)",
    "scatter of a shard": "gather(x)",
    "one without a sharding": "not registered as a shard",
    "another size": "11 in all",
    "other rows": "shape (but for dim 1)",
    "no number": "same calls",
    "no number to gather": "same calls",
    "no tensor": "no tensor",
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_raises_the_same_on_every_worker(run: Run, kind: str) -> None:
    first, *others = run(bad, kind, nprocs=3)
    assert all(other == first for other in others)
    assert first is not None and first[0] is ValueError and BAD[kind] in first[1], first


def groups(size: int | None) -> Any:
    P = tessel.world()
    assert not parallel.is_initialized()
    assert parallel.get_group() == P and parallel.get_group_size() == P.size
    parallel.init_process_group(size)
    found = parallel.get_group().ranks
    x = torch.full((2,), float(P.rank or 0))
    total = parallel.reduce(x)[0].item()
    again = raised(lambda: parallel.init_process_group(size))
    layer = parallel.register_parallel_dim(x, 0)
    state = sharding_of(layer).partition.ranks  # type: ignore[union-attr]
    numbers = parallel.get_rank(), parallel.get_world_size(), parallel.get_group_size()
    assert parallel.is_initialized()
    parallel.destroy_process_group()
    assert not parallel.is_initialized() and parallel.get_group() == P
    forgotten = raised(parallel.destroy_process_group)
    return found, total, again, state, numbers, forgotten


@pytest.mark.parametrize(
    ("nprocs", "size"), [(1, None), (3, None), (4, 2), (4, 1), (4, 4), (4, None)]
)
def test_groups_are_contiguous_workers(run: Run, nprocs: int, size: int | None) -> None:
    per = size or nprocs
    for rank, (found, total, again, state, numbers, forgotten) in enumerate(
        run(groups, size, nprocs=nprocs)
    ):
        first = rank - rank % per
        assert found == state == tuple(range(first, first + per))
        assert total == sum(found)
        assert numbers == (rank % per, nprocs, per)
        assert again[0] is RuntimeError and f"{per} of {nprocs} workers" in again[1]
        assert forgotten[0] is RuntimeError


def bad_groups(kind: str) -> Any:
    last = tessel.world().rank == 3
    size: Any = {"three": 3, "none": 0, "more": 8, "negative": -2, "one of them": 4 if last else 2}
    return raised(lambda: parallel.init_process_group(size[kind])), parallel.is_initialized()


@pytest.mark.parametrize("kind", ["three", "none", "more", "negative", "one of them"])
def test_a_group_size_that_does_not_divide_is_refused(run: Run, kind: str) -> None:
    first, *others = run(bad_groups, kind, nprocs=4)
    assert all(other == first for other in others)
    (error, text), initialized = first
    assert error is ValueError and not initialized
    assert ("for 4 workers" in text) or kind == "one of them"


def with_rows() -> None:
    """A grid of workers is taken as one row; a data-parallel sum keeps a sharding."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([2, 2])
    rows, columns = grid.slices([1]), grid.slices([0])
    row = next(each for each in rows if each.active)
    column = next(each for each in columns if each.active)
    x = values((4, 6), 0)
    assert torch.equal(parallel.gather(parallel.scatter(x, 1, grid)), x)
    shard = parallel.scatter(x, 1, row)
    total = parallel.reduce(shard, column)
    assert sharding_of(total) == Sharding(1, row, 6)
    close("sum over rows of workers", parallel.gather(total), 2 * x)
    assert raised(lambda: parallel.scatter(shard, 0, column))[0] is ValueError  # type: ignore[index]
    other = parallel.scatter(x, 1, row if row.ranks[0] == 0 else Partition(row.ranks[::-1], (2,)))
    error = raised(lambda: parallel.reduce(other, column))  # other parts of the whole
    assert error is not None and error[0] is ValueError and "part 1 of 2" in error[1]
    few = P.create_partition_inclusive([0, 1])
    y = parallel.reduce(torch.ones(2), few)
    assert y.tolist() == ([2.0, 2.0] if few.active else [1.0, 1.0])
    assert raised(lambda: parallel.copy(x, "all"))[0] is TypeError  # type: ignore[index, arg-type]


def test_partitions_may_be_grids_and_parts(run: Run) -> None:
    run(with_rows, nprocs=4)


SCRIPT = """
import torch, tessel
tessel.distributed.init_process_group(group_size=2)
rank = tessel.world().rank
x = tessel.distributed.reduce(torch.ones(1) * rank)
print("sum", rank, tessel.distributed.get_rank(), int(x), flush=True)
"""


@pytest.mark.slow
def test_it_joins_the_job_of_a_launcher(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tessel.distributed\n" + SCRIPT)
    done = python("-m", "tessel", "run", "-n", 4, script)
    assert done.returncode == 0, done.stderr
    for rank, total in enumerate((1, 1, 5, 5)):
        assert f"sum {rank} {rank % 2} {total}" in done.stdout, done.stdout


def test_one_process_is_a_group_of_one() -> None:
    x: Tensor = torch.ones(2, 3)
    assert torch.equal(parallel.gather(parallel.scatter(x, 0)), x)
    assert torch.equal(parallel.reduce(parallel.copy(x)), x)
