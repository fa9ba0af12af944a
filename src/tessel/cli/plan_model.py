"""The fastest grid for a model, by the work of its layers and the halos that they exchange.

The model runs once on tensors without values, which gives the shapes of each layer without
children: the work of a worker in it follows from the largest part, and the values that it receives
from the windows of convolutions and pools. A training step is a forward pass, twice its work
backward, and each halo once in each direction.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tessel.cli import wide_console
from tessel.operators.choose import factorings
from tessel.operators.rates import Machine, Rates
from tessel.operators.space import Shape
from tessel.operators.units import num_bytes, num_seconds, ranking

_BACKWARD = 2  # times the operations of a forward pass: gradients of inputs and of weights
_COPY = 2  # each value is read and written
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer, on the whole tensor.

    Attributes:
        name: the name of the layer.
        source, target: the shapes of the input and the output.
        flops: the operations of a forward pass.
        window, stride: along the spatial dimensions; empty for layers without a window.
        sums: whether it sums over the dimensions that are split.
        itemsize: the bytes of a number.
    """

    name: str
    source: Shape
    target: Shape
    flops: float
    window: Shape = ()
    stride: Shape = ()
    sums: bool = False
    itemsize: int = 4


@dataclass(frozen=True)
class ModelCandidate:
    """A grid, with the prediction for a training step of a worker on it.

    Attributes:
        partition: the number of workers along each dimension of the input.
        time: seconds; `computing`: those without exchanges.
        bytes: the bytes received in halos, in both directions.
        messages: the messages of halos and sums.
    """

    partition: Shape
    time: float
    computing: float
    bytes: int
    messages: int


def plan_model(args: argparse.Namespace, machine: Machine) -> int:
    """Compare grids for a model, by the arguments of `tessel plan`."""
    for name in ("channels", "modes", "partition", "picture", "anywhere"):
        if getattr(args, name):
            raise ValueError(f"--{name} applies to operators, not to --model")
    if args.workers < 1 or len(args.shape) < 3:
        raise ValueError(
            f"--model needs 1 worker or more, and --shape with batch, channels and space; got "
            f"{args.workers} and {args.shape}"
        )
    shape = (args.shape[0] * args.batch, *args.shape[1:])
    calls, held = layers_of(load_model(args.model), shape, getattr(torch, args.dtype))
    found = best_grids(calls, held, shape, args.workers, machine)
    if args.json:
        said = {"workers": args.workers, "machine": machine.origin}
        print(json.dumps({**said, "candidates": [asdict(each) for each in found]}, indent=2))
        return 0
    wide = wide_console()
    wide.print(
        f"[bold]{args.workers} workers[/], a training step of {args.model} on an input of "
        f"{'×'.join(map(str, shape))}: {len(found)} grids, {len(calls)} calls of layers"
    )
    wide.print(*shown(found), sep="\n")
    wide.print(f"machine: {machine.origin}")
    return 0


def load_model(name: str) -> Callable[[], Any]:
    """The function that makes a model, from `package:function` with optional arguments.

    >>> load_model("torch.nn:Conv1d(1, 2, kernel_size=3)")()
    Conv1d(1, 2, kernel_size=(3,), stride=(1,))
    """
    module, _, call = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        parsed = ast.parse(call, mode="eval").body
        function, args, kwargs = call, [], {}
        if isinstance(parsed, ast.Call):
            function = ast.unparse(parsed.func)
            args = [ast.literal_eval(each) for each in parsed.args]
            kwargs = {str(each.arg): ast.literal_eval(each.value) for each in parsed.keywords}
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"--model needs PACKAGE:FUNCTION, such as torchvision.models:resnet18 or "
            f"'models:UNet(3, 16)', with numbers and strings as arguments; got {name!r} ({error})"
        ) from error
    return partial(found, *args, **kwargs)


def layers_of(
    make: Callable[[], Any], shape: Shape, dtype: torch.dtype
) -> tuple[list[LayerCall], int]:
    """The calls of a model's layers for an input of this shape, and the bytes of its parameters.

    >>> calls, _ = layers_of(lambda: nn.Conv1d(2, 4, 3), (1, 2, 10), torch.float32)
    >>> calls[0].target, calls[0].window
    ((1, 4, 8), (3,))
    """
    if not dtype.is_floating_point:
        raise ValueError(f"--model needs --dtype float32 or float64, got {dtype}")
    calls: list[LayerCall] = []
    usual = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        torch.set_default_dtype(dtype)
        try:
            model = make()
        except TypeError as error:
            raise ValueError(f"--model: {error}; write arguments as 'UNet(3, 16)'") from error
        finally:
            torch.set_default_dtype(usual)
        if not isinstance(model, nn.Module):
            raise ValueError(f"--model must make a torch.nn.Module, got {type(model).__name__}")
        names = {id(module): name for name, module in model.named_modules()}

        def note(module: nn.Module, args: Any, result: Any) -> None:
            if args and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor):
                calls.append(call_of(names[id(module)], module, args[0], result))

        for module in model.modules():
            if not [*module.children()]:
                module.register_forward_hook(note)
        held = sum(each.numel() * each.itemsize for each in model.parameters())
        try:
            model(torch.empty(shape, dtype=dtype))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            line = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"the model does not accept an input of shape {shape}: {line}"
            ) from error
    return calls, held


def call_of(name: str, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> LayerCall:
    """Describe the call of a layer that maps x to y."""
    source, target = tuple(x.shape), tuple(y.shape)
    ndim = len(source) - 2
    flops = 0.0
    window: Shape = ()
    stride: Shape = ()
    weight = getattr(module, "weight", None)
    if hasattr(module, "kernel_size") and ndim > 0:
        sizes, dilation = (_each(getattr(module, n, 1), ndim) for n in ("kernel_size", "dilation"))
        window = tuple(d * (k - 1) + 1 for k, d in zip(sizes, dilation, strict=True))
        stride = _each(getattr(module, "stride", None) or sizes, ndim)
        if isinstance(module, nn.modules.conv._ConvTransposeNd):
            flops = 2.0 * prod(source) * prod(weight.shape[1:])  # type: ignore[union-attr]
            # as seen from the output: an input contributes to as many outputs as the kernel is wide
            window = tuple(ceil(w / s) for w, s in zip(window, stride, strict=True))
            stride = (1,) * ndim
        elif weight is not None:
            flops = 2.0 * prod(target) * prod(weight.shape[1:])
    elif isinstance(module, nn.Linear):
        flops = 2.0 * prod(target) * source[-1]
    sums = isinstance(module, _NORMS)
    return LayerCall(name, source, target, flops, window, stride, sums, x.itemsize)


def _each(value: Any, ndim: int) -> Shape:
    return tuple(value) if isinstance(value, tuple | list) else (int(value),) * ndim


def best_grids(
    calls: Sequence[LayerCall], parameters: int, shape: Shape, workers: int, machine: Machine
) -> list[ModelCandidate]:
    """The grids for a model, fastest first; batch and space are split, channels are whole."""
    most = (shape[0], 1, *shape[2:])
    grids = factorings(workers, most)
    if not grids:
        raise ValueError(f"an input of shape {shape} cannot be split over {workers} workers")
    found = [predicted(calls, parameters, grid, workers, machine) for grid in grids]
    # Among grids with equal predictions, prefer those that split leading dimensions, whose halos
    # are contiguous: the last digits depend only on the order in which layers are added.
    return sorted(
        found,
        key=lambda each: (
            float(f"{each.time:.9g}"),
            each.bytes,
            *(-parts for parts in each.partition),
        ),
    )


def predicted(
    calls: Sequence[LayerCall], parameters: int, grid: Shape, workers: int, machine: Machine
) -> ModelCandidate:
    rates = machine.rates_for(workers)
    computing = exchanging = 0.0
    received = messages = 0
    for call in calls:
        share = _largest(call.target, grid) / max(1, prod(call.target))
        given = _largest(call.source, grid)
        passed = given + _largest(call.target, grid)
        nothing = 0, 0, 0.0, 0
        halo = halo_of(call, grid, rates, machine) if call.window else nothing
        num_bytes, neighbours, seconds, dims = halo
        # Thin parts compute in the time of their output (`tensor/small_volumes.py`). If several
        # dimensions have a halo, the part is concatenated with the halos of all but one.
        passed += _COPY * max(0, dims - 1) * given
        once = call.flops * share / rates.matrix + passed * call.itemsize / rates.memory
        computing += (1 + _BACKWARD) * (once + rates.step)
        if call.sums and workers > 1:
            messages += 2 * (workers - 1)
            exchanging += 2 * rates.latency * (workers - 1)
            exchanging += 2 * between_hosts(0, workers, machine)
        received += 2 * num_bytes
        messages += 2 * neighbours
        exchanging += 2 * seconds
    if workers > 1:  # gradients: each worker sums its share, and sends it to the others
        exchanging += 2 * parameters / rates.bandwidth
        exchanging += 2 * between_hosts(parameters, workers, machine)
    return ModelCandidate(grid, computing + exchanging, computing, received, messages)


def between_hosts(num_bytes: int, workers: int, machine: Machine) -> float:
    """The seconds between hosts of half an all-reduce, in which each host adds a part of it.

    The other half, in which each host sends its part to the others, takes as long.
    """
    network = machine.network
    if network is None or workers <= network.workers_per_host:
        return 0.0
    hosts = ceil(workers / network.workers_per_host)
    sent = (hosts - 1) / hosts * num_bytes  # by each host
    seconds = (hosts - 1) * network.latency + sent / network.bandwidth
    if network.bisection:
        seconds += sent * hosts / network.bisection
    return seconds


def _largest(shape: Shape, grid: Shape) -> int:
    """The number of values of the largest part; dimensions after those of the grid are whole."""
    sizes = [*grid, *[1] * len(shape)][: len(shape)]
    return prod(ceil(length / parts) for length, parts in zip(shape, sizes, strict=True))


def halo_of(
    call: LayerCall, grid: Shape, rates: Rates, machine: Machine
) -> tuple[int, int, float, int]:
    """The halo exchange of an inner worker of the grid.

    Returns:
        The bytes that it receives, the number of its neighbours, the seconds, and the number of
        dimensions along which it has neighbours.
    """
    own, wide, reached, dims, outside = 1, 1, 1, 0, 0.0
    stride_in_grid = 1
    for length, parts, out, window, stride in reversed(
        list(zip(call.source[2:], grid[2:], call.target[2:], call.window, call.stride, strict=True))
    ):
        part = ceil(length / parts)
        # If parts end at a multiple of the stride, windows overlap by less.
        overlap = window - (stride if length % (parts * stride) == 0 else 1)
        halo = min(max(0, overlap), length - part) if parts > 1 and out else 0
        own, wide = own * part, wide * (part + halo)
        neighbours = 2 * ceil(ceil(halo / 2) / part) if halo else 0
        reached, dims = reached * (1 + neighbours), dims + (neighbours > 0)
        if neighbours and machine.network is not None:
            per_host = machine.network.workers_per_host
            outside = max(outside, min(1.0, stride_in_grid / per_host))
        stride_in_grid *= parts
    others = ceil(call.source[0] / grid[0]) * call.source[1]
    num_bytes, messages = (wide - own) * others * call.itemsize, reached - 1
    seconds = rates.latency * messages + num_bytes / rates.bandwidth + 2 * num_bytes / rates.memory
    network = machine.network
    if network is not None and prod(grid) > network.workers_per_host:
        shared = min(prod(grid), network.workers_per_host) / network.bandwidth
        seconds += outside * (network.latency * messages + num_bytes * shared)
        if network.bisection:
            seconds += outside * num_bytes * prod(grid) / network.bisection
    return num_bytes, messages, seconds, dims


def shown(found: Sequence[ModelCandidate]) -> Iterator[Any]:
    """The grids, for a terminal."""
    titles = "predicted step", "computing", "halos received", "messages"
    rows = [
        (
            "×".join(map(str, each.partition)),
            num_seconds(each.time),
            num_seconds(each.computing),
            num_bytes(each.bytes),
            str(each.messages),
        )
        for each in found
    ]
    yield ranking("partition", *titles, rows=rows)
    grid = list(found[0].partition)
    yield f"P = tessel.world().create_cartesian_topology_partition({grid})"
    yield "model = tessel.nn.distribute_module(model, P)"
