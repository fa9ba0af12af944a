"""A training step with NCCL inside, captured in a CUDA graph and replayed.

Tests `nn/convert.py`, `transport/group.py`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import models
import tessel
from test_nccl_ranks import SECONDS, over_nccl

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(SECONDS + 20.0),
]


CASES = [("ResNet18", (8, 10), (2, 3, 64, 64)), ("UNet", (3, 4), (1, 1, 16, 16, 16))]


def converted(kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """A model on all workers, and this worker's parts of some inputs."""
    torch.manual_seed(0)
    workers = tessel.world().size
    P = tessel.world().create_cartesian_topology_partition([1, 1, workers, *[1] * (len(shape) - 3)])
    model = tessel.nn.distribute_module(getattr(models, kind)(*arguments), P).double().cuda()
    given = torch.Generator().manual_seed(1)
    whole = [torch.randn(shape, generator=given).double() for _ in range(4)]
    parts = [tessel.Layout.balanced(P, shape).local_part(x).cuda() for x in whole]
    return model, parts


def graphed(ways: str, kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Parameters after some steps of a model whose passes torch captured, or not."""
    model, parts = converted(kind, arguments, shape)
    kept = {name: value.clone() for name, value in model.named_buffers()}
    if ways == "graphed":
        model = torch.cuda.make_graphed_callables(model, (parts[0].clone(),))
        with torch.no_grad():  # which runs the model some times
            for name, value in model.named_buffers():
                value.copy_(kept[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for part in parts:
        optimizer.zero_grad(set_to_none=True)
        model(part).square().mean().backward()
        optimizer.step()
    model.eval()  # which was not captured
    with torch.no_grad():
        y = model(parts[0]).cpu()
    return {key: value.cpu() for key, value in model.state_dict().items()}, y


@pytest.mark.parametrize(("kind", "arguments", "shape"), CASES)
def test_graphed_callables(kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> None:
    eager = over_nccl(graphed, 2, "eager", kind, arguments, shape)
    replayed = over_nccl(graphed, 2, "graphed", kind, arguments, shape)
    for (one, y), (other, z) in zip(eager, replayed, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(z, y, rtol=1e-9, atol=1e-9)


def trained(captured: bool, kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The parameters and buffers after some steps, and the seconds that the host took for one."""
    model, parts = converted(kind, arguments, shape)
    x = parts[0].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # as torch asks for it: steps before the capture, beside it
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            step()
    seconds = []
    for part in parts:
        x.copy_(part)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay() if captured else step()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    with torch.no_grad():  # and eagerly again
        y = model(x).cpu()
    return {key: value.cpu() for key, value in model.state_dict().items()}, y, min(seconds)


@pytest.mark.parametrize(
    ("nprocs", "kind", "arguments", "shape"),
    [(2, *CASES[0]), (2, *CASES[1]), (4, *CASES[1])],
)
def test_a_captured_step_is_the_step(
    nprocs: int, kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    eager = over_nccl(trained, nprocs, False, kind, arguments, shape)
    replayed = over_nccl(trained, nprocs, True, kind, arguments, shape)
    for (one, y, slow), (other, z, fast) in zip(eager, replayed, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(z, y, rtol=1e-9, atol=1e-9)
        assert fast < slow, (fast, slow)  # the host starts one graph
