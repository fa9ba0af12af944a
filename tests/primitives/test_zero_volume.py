"""What a worker without a part passes: an empty tensor, with a batch size or without.

Tests `core/layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from tessel import Layout, Move, Partition, nn

Run = Callable[..., list[Any]]
Case = Callable[[Partition], tuple[Any, Partition, tuple[int, ...]]]

DOUBLE = torch.float64


def test_batch_sizes() -> None:
    assert tessel.zero_volume_tensor().shape == (0,)
    assert tessel.zero_volume_tensor(16).shape == tessel.zero_volume_tensor(b=16).shape == (16, 0)
    assert tessel.zero_volume_tensor(0).shape == (0, 0)
    assert tessel.zero_volume_tensor(torch.ones(3, 2).shape[0]).shape == (3, 0)
    assert tessel.zero_volume_tensor().dtype is torch.get_default_dtype()


def test_all_arguments_in_order() -> None:
    for x in (
        tessel.zero_volume_tensor(2, torch.float16, True, "cpu"),
        tessel.zero_volume_tensor(2, dtype=torch.float16, requires_grad=True, device="cpu"),
    ):
        assert (x.shape, x.dtype, x.device.type) == ((2, 0), torch.float16, "cpu")
        assert x.requires_grad and x.is_leaf


@pytest.mark.parametrize("b", [-1, 2.0, "cpu", torch.device("cpu"), torch.float64])
def test_what_is_no_batch_size_raises(b: Any) -> None:
    with pytest.raises(ValueError, match=r"takes the batch size b first.*got ") as raised:
        tessel.zero_volume_tensor(b)
    hint = "write zero_volume_tensor(dtype=torch.float64)"
    assert (hint in str(raised.value)) == (b is torch.float64)


# --- wherever one shape is taken, so is the other: each case gives what is called, the partition
# of its input and the shape of the whole


def pair(world: Partition) -> Partition:
    """The second and the third worker; the others have no part."""
    return world.create_partition_inclusive([1, 2])


def rows(world: Partition) -> Partition:
    return pair(world).create_cartesian_topology_partition([1, 1, 2, 1])


def features(world: Partition, ranks: list[int]) -> Partition:
    first = world.create_partition_inclusive(ranks)
    return first.create_cartesian_topology_partition([1, len(ranks)])


def image_case(make: Callable[[Partition], Any]) -> Case:
    return lambda world: (make(rows(world)), rows(world), (2, 2, 6, 5))


def linear(world: Partition) -> Any:
    P_x, P_w = features(world, [1, 2]), world.create_cartesian_topology_partition([2, 2])
    layer = nn.DistributedLinear(P_x, features(world, [0, 3]), P_w, 6, 4, dtype=DOUBLE)
    return layer, P_x, (3, 6)


def converted(world: Partition) -> Any:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Flatten(), torch.nn.LazyLinear(2)
    ).double()
    model(torch.zeros(2, 2, 6, 5, dtype=DOUBLE))
    return nn.distribute_module(model, rows(world)), rows(world), (2, 2, 6, 5)


def region(P: Partition) -> Any:
    return nn.HaloRegion(
        nn.DistributedConv2d(P, 2, 2, 3, padding=1, dtype=DOUBLE), nn.DistributedAvgPool2d(P, 2)
    )


CASES: dict[str, Case] = {
    "Broadcast": lambda w: (
        nn.Broadcast(w.create_partition_inclusive([1]), w),
        w.create_partition_inclusive([1]),
        (4,),
    ),
    "SumReduce": lambda w: (
        nn.SumReduce(pair(w), w.create_partition_inclusive([0])),
        pair(w),
        (4,),
    ),
    "AllSumReduce": lambda w: (nn.AllSumReduce(pair(w), [0]), pair(w), (4,)),
    "AllGather": lambda w: (nn.AllGather(pair(w), 0, 0), pair(w), (4,)),
    "ReduceScatter": lambda w: (nn.ReduceScatter(pair(w), 0, 0), pair(w), (4,)),
    "Repartition": lambda w: (nn.Repartition(pair(w), w), pair(w), (5,)),
    "HaloExchange": lambda w: (nn.HaloExchange(pair(w), [(1, 1)]), pair(w), (5,)),
    "scatter": lambda w: (
        lambda x: tessel.scatter(x, w),
        w.create_partition_inclusive([0]),
        (5,),
    ),
    "gather": lambda w: (lambda x: tessel.gather(x, pair(w)), pair(w), (5,)),
    "all_gather": lambda w: (lambda x: tessel.all_gather(x, pair(w)), pair(w), (5,)),
    "Move": lambda w: (
        Move(Layout.balanced(pair(w), (5,)), Layout.whole(w, (5,))),
        pair(w),
        (5,),
    ),
    "convolution": image_case(lambda P: nn.DistributedConv2d(P, 2, 3, 3, padding=1, dtype=DOUBLE)),
    "transposed convolution": image_case(
        lambda P: nn.DistributedConvTranspose2d(P, 2, 3, 3, stride=2, dtype=DOUBLE)
    ),
    "pool": image_case(lambda P: nn.DistributedMaxPool2d(P, 2)),
    "pool with indices": image_case(lambda P: nn.DistributedMaxPool2d(P, 2, return_indices=True)),
    "adaptive pool": image_case(lambda P: nn.DistributedAdaptiveAvgPool2d(P, 2)),
    "interpolation": image_case(lambda P: nn.DistributedUpsample(P, scale_factor=2)),
    "norm": image_case(lambda P: nn.DistributedBatchNorm(P, 2, dtype=DOUBLE)),
    "region": image_case(region),
    "weight in blocks": linear,
    "converted model": converted,
}


def call(name: str, b: int | None) -> tuple[list[Tensor], Tensor, bool]:
    """Output and gradient of a case, and whether this worker had a part."""
    torch.manual_seed(0)
    module, P_x, shape = CASES[name](tessel.world())
    if P_x.active:
        generator = torch.Generator().manual_seed(7)
        whole = torch.randn(shape, dtype=DOUBLE, generator=generator)
        x = Layout.balanced(P_x, shape).local_part(whole) if P_x.dim == len(shape) else whole
        x = x.clone().requires_grad_()
    else:
        x = tessel.zero_volume_tensor(b, dtype=DOUBLE, requires_grad=True)
    found = module(x)
    outputs = list(found) if isinstance(found, tuple) else [found]
    (outputs[0].square().sum() + 0 * x.sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    with torch.no_grad():
        again = module(x)
    assert torch.equal(again[0] if isinstance(again, tuple) else again, outputs[0].detach())
    return [each.detach() for each in outputs], x.grad, P_x.active


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("nprocs", [4])
def test_a_batch_size_changes_nothing(run: Run, name: str, nprocs: int) -> None:
    plain, batched = run(call, name, None, nprocs=nprocs), run(call, name, 3, nprocs=nprocs)
    for (ys, grad, has_part), (others, other_grad, _) in zip(plain, batched, strict=True):
        assert len(ys) == len(others)
        for y, other in zip(ys, others, strict=True):
            assert torch.equal(y, other) if y.numel() else not other.numel()
        if has_part:
            assert grad.numel() and torch.equal(grad, other_grad)
        else:
            assert (grad.shape, other_grad.shape) == ((0,), (3, 0))


def loss_of(b: int | None) -> tuple[float, Tensor]:
    P = pair(tessel.world()).create_cartesian_topology_partition([1, 2])
    layer = nn.DistributedMSELoss(P)
    shape = (3, 4)
    whole = torch.arange(12, dtype=DOUBLE).reshape(shape)
    if P.active:
        x = Layout.balanced(P, shape).local_part(whole).clone().requires_grad_()
        t = torch.zeros_like(x)
    else:
        x, t = (tessel.zero_volume_tensor(b, dtype=DOUBLE, requires_grad=r) for r in (True, False))
    value = layer(x, t)
    value.sum().backward()
    return value.sum().item(), x.grad


def test_losses_take_either(run: Run) -> None:
    expected = torch.arange(12, dtype=DOUBLE).square().mean().item()
    for b in (None, 3):
        results = run(loss_of, b, nprocs=4)
        assert [value for value, _ in results] == pytest.approx([0, expected, expected, 0])
        got = torch.cat([results[1][1], results[2][1]], 1)
        assert torch.allclose(got, torch.arange(12, dtype=DOUBLE).reshape(3, 4) / 6)


def flattened() -> tuple[int, ...]:
    """Code of a user that asks for the batch size goes on where there is no part."""
    P = tessel.world().create_partition_inclusive([0])
    x = torch.ones(3, 2, 2) if P.active else tessel.zero_volume_tensor(3)
    y = nn.Broadcast(P, P)(x)
    return tuple(y.flatten(1).shape)


def test_a_batch_size_lets_local_code_go_on(run: Run) -> None:
    assert run(flattened, nprocs=2) == [(3, 4), (3, 0)]
