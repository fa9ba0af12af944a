"""DTensors and spread tensors: the same values and gradients, in the same memory.

Tests `interop/dtensors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import tessel
from tessel import Layout, Partition
from tessel.interop import layout_of
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
GRIDS = {1: [(1,), (1, 1)], 2: [(1, 2)], 3: [(3,)], 4: [(4,), (2, 2)]}
SHAPES = [(8, 4), (7, 5), (3, 2), (1, 3), (10, 4), (0, 4)]  # even, uneven, with empty parts


def data(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def mesh_of(grid: Sequence[int]) -> DeviceMesh:
    tessel.world()
    return init_device_mesh("cpu", tuple(grid))


def made(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of these values: along a partial axis each worker has another summand."""
    layout = layout_of(mesh, placements, whole.shape)
    index = layout.partition.index
    assert index is not None
    part = layout.local_part(whole).clone()
    for axis, placement in enumerate(placements):
        if placement.is_partial():  # shares that differ, and whose sum is the whole
            size = mesh.shape[axis]
            part = part * (2.0 * (index[axis] + 1) / (size * (size + 1)))
    stride = whole.stride()
    part.requires_grad_()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=stride
    )


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def with_group(grid: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The same for one worker, to whom torch gives a mesh only in a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return from_torch(grid, shape)
    finally:
        dist.destroy_process_group()


def from_torch(grid: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """All placements of a tensor: values, memory, messages, gradients; and back again."""
    mesh, whole, weight, count = mesh_of(grid), data(shape), data(shape, 1), 0
    for placements in product((Shard(0), Shard(1), Replicate(), Partial()), repeat=len(grid)):
        d = made(whole, mesh, placements)
        close(d.full_tensor().detach(), whole)
        with count_traffic() as traffic:
            x = tessel.from_dtensor(d)
        assert traffic.messages == 0
        assert x.shape == d.shape and x.layout.partition == Partition.from_mesh(mesh)
        assert x.local.data_ptr() == d.to_local().data_ptr()
        close(x.full().detach(), whole)

        leaf = d.detach().requires_grad_()  # gradients come to a DTensor
        (tessel.from_dtensor(leaf).square() * weight).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        close(leaf.grad.full_tensor(), 2 * whole * weight)

        back = x.to_dtensor(mesh)
        assert back.placements == d.placements and back.shape == d.shape
        assert back.to_local().data_ptr() == d.to_local().data_ptr()
        close(back.full_tensor().detach(), whole)

        part = d.to_local().detach().clone().requires_grad_()  # and from a DTensor
        back = tessel.from_local(part, x.layout).to_dtensor(mesh)
        (back.full_tensor().square() * weight).sum().backward()
        assert part.grad is not None
        close(part.grad, x.layout.local_part(2 * whole * weight))
        count += 1
    return count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("nprocs", "grid"), [(n, grid) for n, grids in GRIDS.items() for grid in grids]
)
def test_dtensors_become_spread_tensors(
    run: Run, nprocs: int, grid: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    check = with_group if nprocs == 1 else from_torch
    assert run(check, grid, shape, nprocs=nprocs) == [4 ** len(grid)] * nprocs


def own_meshes() -> None:
    world = tessel.world()
    grid = world.create_cartesian_topology_partition([2, 2])
    mesh = grid.to_mesh(names=("data", "space"))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.mesh_dim_names == ("data", "space")
    assert mesh.device_type == "cpu" and grid.to_mesh(names=["data", "space"]) is mesh
    assert Partition.from_mesh(mesh) == grid
    turned = Partition((0, 2, 1, 3), (2, 2))
    assert Partition.from_mesh(turned.to_mesh()) == turned
    whole = data((7, 6))
    x = tessel.spread(whole, turned)
    close(x.to_dtensor().full_tensor(), whole)
    # torch sorts the workers of a group: DTensor would give other numbers
    backwards = Partition((3, 1, 2, 0), (2, 2))
    with pytest.raises(
        ValueError, match=r"workers \(3, 2\) along axis 0 .* not in ascending order"
    ):
        tessel.spread(whole, backwards).to_dtensor()
    with pytest.raises(ValueError, match="not in ascending order"):
        layout_of(DeviceMesh("cpu", [[3, 1], [2, 0]]), [Shard(0), Shard(1)], (4, 4))
    for wrong in (mesh, grid):
        with pytest.raises(ValueError, match="a DeviceMesh of Partition"):
            x.to_dtensor(wrong)
    with pytest.raises(ValueError, match="expected 2 names"):
        grid.to_mesh(names=["one"])
    with pytest.raises(TypeError, match=r"expected a torch\.distributed\.DeviceMesh, got 3"):
        Partition.from_mesh(3)


def test_partitions_and_meshes(run: Run) -> None:
    run(own_meshes, nprocs=4)


def rows_of_a_mesh() -> None:
    """Each worker gets the partition of its own row, and layers compute there."""
    world = tessel.world()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "space"))
    for name, rows in (("space", [(0, 1), (2, 3)]), ("data", [(0, 2), (1, 3)])):
        mine = next(row for row in rows if world.rank in row)
        for _ in range(2):
            P = Partition.from_mesh(mesh[name])
            assert P.ranks == mine and P.shape == (2,)
        # as `tessel.nn` computes there: other values in each row
        own = data((3,), seed=world.rank)
        total = tessel.nn.AllSumReduce(P, [0])(own)
        close(total, data((3,), seed=mine[0]) + data((3,), seed=mine[1]))
        grid = P.create_cartesian_topology_partition([1, 1, 2])
        layer, whole = torch.nn.Conv1d(1, 1, 3, padding=1).double(), data((1, 1, 5), seed=mine[0])
        torch.nn.init.constant_(layer.weight, 0.5)
        torch.nn.init.constant_(layer.bias, 0.1)
        model = tessel.nn.distribute_module(layer, grid)
        layout = Layout.balanced(grid, whole.shape)
        expected = torch.nn.functional.conv1d(whole, layer.weight, layer.bias, padding=1)
        close(model(layout.local_part(whole)), layout.local_part(expected))
    wrong = SimpleNamespace(mesh=torch.tensor([0, 1] if world.rank < 3 else [1, 3]))
    with pytest.raises(ValueError, match=r"do not overlap, got rows of workers \(0, 1\), \(1, 3\)"):
        Partition.from_mesh(wrong)


def other_calls() -> None:
    """What is wrong on one worker raises on all, before anything of another call is read."""
    world = tessel.world()
    mesh = init_device_mesh("cpu", (world.size,))
    with pytest.raises(
        TypeError, match=r"expected a torch\.distributed\.DeviceMesh, got 3 on worker 1"
    ):
        Partition.from_mesh(3 if world.rank == 1 else mesh)
    with pytest.raises(
        ValueError, match=r"worker 0 calls Partition\.from_mesh, worker 1 calls tessel"
    ):
        if world.rank == 1:
            tessel.spread(torch.ones(2), world)
        else:
            Partition.from_mesh(mesh)
    assert Partition.from_mesh(mesh) == world


def test_one_worker_passes_no_mesh(run: Run) -> None:
    run(other_calls, nprocs=2)


def test_rows_of_a_mesh(run: Run) -> None:
    run(rows_of_a_mesh, nprocs=4)


def round_trips() -> None:
    """What comes back lies on the mesh that it came from, and torch takes both together."""
    tessel.world()
    whole = data((6, 4))
    for names in (("space",), None, ("other",)):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        d = made(whole, mesh, [Shard(0)])
        for back in (
            tessel.from_dtensor(d).to_dtensor(),
            (tessel.from_dtensor(d) * 1).to_dtensor(),
        ):
            assert back.device_mesh == mesh
            close((back + d).full_tensor().detach(), 2 * whole)


def test_round_trips_keep_the_mesh(run: Run) -> None:
    run(round_trips, nprocs=2)


def on_some_workers() -> None:
    """A mesh of two of three workers: the third has tensors without values."""
    world = tessel.world()
    pair = Partition((0, 2), (2,))
    mesh, whole = pair.to_mesh(), data((5, 3))
    nothing = torch.empty(0, dtype=torch.float64)
    x = tessel.spread(whole if pair.active else nothing, Layout.split(pair, (5, 3), (0, None)))
    d = x.move_to(layout_of(mesh, [Shard(1)], (5, 3))).to_dtensor(mesh)
    back = tessel.from_dtensor(d)
    assert back.layout.partition == pair and tuple(back.shape) == (5, 3)
    if pair.active:
        close(d.full_tensor(), whole)
        close(back.full(), whole)
    everywhere = back.move_to(Layout.whole(world, (5, 3), shared=True))
    close(everywhere.local, whole)


def test_a_mesh_of_some_workers(run: Run) -> None:
    run(on_some_workers, nprocs=3)


def orders_in_memory() -> None:
    """Parts that lie in another order in memory: strides are those of torch."""
    mesh, whole = mesh_of((2,)), data((2, 6, 3)).permute(2, 0, 1)
    parts = tessel.spread(whole, Layout.split(tessel.world(), whole.shape, (None, None, 0)))
    for x in (parts, tessel.from_local(parts.local.contiguous(), parts.layout)):
        d = x.to_dtensor(mesh)
        close(d.full_tensor(), whole)
        assert d.to_local().stride() == x.local.stride()
        torch_made = DTensor.from_local(x.local, mesh, [Shard(2)], run_check=False)
        assert d.shape == torch_made.shape
        close((d + torch_made).full_tensor(), 2 * whole)


def test_strides(run: Run) -> None:
    run(orders_in_memory, nprocs=2)


def trained_together() -> None:
    """A weight that torch has sharded, a product by Tessel, a loss by torch: steps of SGD."""
    mesh, generator = mesh_of((2,)), torch.Generator().manual_seed(3)
    weight = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    sharded = torch.nn.Parameter(
        DTensor.from_local(
            weight.chunk(2)[tessel.world().index[0]].clone(), mesh, [Shard(0)], run_check=False
        )
    )
    single = torch.nn.Parameter(weight.clone())
    ours, torchs = torch.optim.Adam([sharded], 0.1), torch.optim.Adam([single], 0.1)
    for _ in range(3):
        y = torch.nn.functional.linear(
            tessel.spread(x, Layout.whole(tessel.world(), x.shape, shared=True)),
            tessel.from_dtensor(sharded),
        )
        loss = y.tanh().to_dtensor(mesh).full_tensor().square().sum()
        expected = torch.nn.functional.linear(x, single).tanh().square().sum()
        close(loss, expected)
        for each, optimizer in ((loss, ours), (expected, torchs)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
    close(sharded.full_tensor(), single)


def test_a_training_with_both(run: Run) -> None:
    run(trained_together, nprocs=2)


def unsayable() -> None:
    world, mesh = tessel.world(), mesh_of((4,))
    balanced = tessel.spread(data((10, 3)), world.create_cartesian_topology_partition([4, 1]))
    with pytest.raises(ValueError, match=r"DTensor cannot represent .* torch.chunk .*move_to"):
        balanced.to_dtensor()
    chunked = balanced.move_to(layout_of(mesh, [Shard(0)], (10, 3)))
    assert [*chunked.to_dtensor(mesh).to_local().shape] == [[3, 3], [3, 3], [3, 3], [1, 3]][
        world.rank or 0
    ]
    halo = tessel.spread(data((8,)), Layout.balanced(world, (8,)).grow([(1, 0)]))
    with pytest.raises(ValueError, match="DTensor cannot represent"):
        halo.to_dtensor()
    grid = world.create_cartesian_topology_partition([2, 2])
    turned = Layout(
        grid,
        (8,),
        (tessel.core.layout.Cut((1, 0), Layout.balanced(world, (8,)).cuts[0].intervals),),
    )
    with pytest.raises(ValueError, match="DTensor cannot represent"):
        tessel.spread(data((8,)), turned).to_dtensor()
    for op in ("avg", "max"):
        d = DTensor.from_local(data((3,)), mesh, [Partial(op)], run_check=False)
        with pytest.raises(NotImplementedError, match=r"Partial\('sum'\); call x.redistribute"):
            tessel.from_dtensor(d)
    with pytest.raises(TypeError, match="expected a DTensor, got Tensor"):
        tessel.from_dtensor(data((3,)))
    with pytest.raises(ValueError, match="one placement for each of the 1 dimensions"):
        layout_of(mesh, [Shard(0), Shard(1)], (4, 4))
    # parts that are not those that the shape asks for: all workers raise the same
    wrong = DTensor.from_local(
        data((2 + (world.rank == 3), 3)),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((9, 3)),
        stride=(3, 1),
    )
    with pytest.raises(ValueError, match="worker 0 expected a part of shape"):
        tessel.from_dtensor(wrong)


def test_what_cannot_be_said(run: Run) -> None:
    run(unsayable, nprocs=4)


def test_a_world_of_one_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="a DeviceMesh needs a process group"):
        tessel.world().to_mesh()
