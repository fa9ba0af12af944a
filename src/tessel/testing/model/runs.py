"""Runs: the same calls of a model in one process, and converted, with a backward pass each.

They are also compared module by module: the output of each, and what it sends and keeps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from tessel import transport
from tessel.core.context import setting
from tessel.nn.convert import Entrance
from tessel.nn.region import HaloRegion
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.adoption import belongs_elsewhere
from tessel.tensor.gathering import noted_gathers
from tessel.tensor.rules.attention import noted_ways
from tessel.tensor.shared_random import common_seed
from tessel.tensor.table import in_backward, tensors
from tessel.testing.drawing import drawing, plain
from tessel.testing.memory import Memory, count_memory, uncounted
from tessel.testing.model.arguments import ModelArguments
from tessel.testing.model.report import Difference, ModelReport, ModuleUse, difference, worst

Loss = Callable[[Any], Tensor] | None
Outputs = list[tuple[str, Any]]  # and the loss, if any, with names
# The outputs of each module in one process, call by call; modules in the order in which they end.
Trace = dict[str, list[list[Any]]]


@dataclass
class OneProcess:
    """The results of one process: the model after its calls, arguments with gradients, outputs."""

    model: nn.Module
    arguments: ModelArguments
    trace: Trace
    outputs: list[Outputs]
    peak: int
    draws: bool


def run_alone(
    template: nn.Module,
    given: ModelArguments,
    is_spread: list[bool],
    loss: Loss,
    seeds: list[int],
    draws_as_spread: bool = False,
) -> OneProcess:
    """Run a copy of a model in plain torch.

    If it draws random numbers, it runs once more, with tensors that draw like spread ones: so a
    model that draws none only gets torch's own tensors.

    Args:
        template: the model, which is not changed.
        given: the arguments, whole.
        is_spread: whether each tensor among them is spread in the converted model.
        loss: the function from the output to the loss.
        seeds: the seeds of the random numbers, one for each call.
        draws_as_spread: whether tensors draw like spread ones.
    """
    model, arguments, outputs = deepcopy(template), given.wholes(), []

    def enter(number: int, value: Tensor) -> Tensor:
        copy = value.clone()  # the model may change it
        return drawing(copy) if draws_as_spread and is_spread[number] else copy

    def stays_plain(x: Tensor) -> bool:
        # tensors of the model or its arguments, regardless of writes; on one worker all
        return id(x) in held or given.partition.size == 1

    draws = False
    held: set[int] = set()
    for number, seed in enumerate(seeds):
        with ExitStack() as stack:
            if number == 0:
                trace = stack.enter_context(recorded(model))
            if number == len(seeds) - 1:
                stack.enter_context(new_gradients(*model.parameters(), *arguments.leaves()))
            memory = stack.enter_context(count_memory())
            args, kwargs = arguments.with_tensors(enter)
            held = {id(each) for each in tensors(args, kwargs, [*map(vars, model.modules())])}
            stack.enter_context(setting(belongs_elsewhere, stays_plain))
            seed_all(common_seed(seed))
            before = _random_state()
            result = model(*args, **kwargs)
            draws = draws or _random_state() != before
            outputs.append(_derived(result, loss))
    if draws and not draws_as_spread:
        return run_alone(template, given, is_spread, loss, seeds, draws_as_spread=True)
    # The peak is that of the last call, as for the converted model.
    return OneProcess(model, arguments, trace, outputs, memory.peak, draws)


def run_converted(
    model: nn.Module,
    arguments: ModelArguments,
    entered: ModelArguments,
    alone: OneProcess,
    loss: Loss,
    seeds: list[int],
) -> ModelReport:
    """Run the converted model, and compare it with one process on this worker.

    Args:
        model: the converted model.
        arguments: whole arguments, which get the gradients.
        entered: the same arguments, spread, with their own gradients.
        alone: the results of one process.
        loss: of the output.
        seeds: the seeds of the random numbers, one for each call.
    """
    values: list[Difference] = []
    for number, seed in enumerate(seeds):
        with ExitStack() as stack:
            if number == len(seeds) - 1:
                stack.enter_context(new_gradients(*model.parameters(), *entered.leaves()))
            noted = stack.enter_context(noted_gathers())
            ways = stack.enter_context(noted_ways())
            memory = stack.enter_context(count_memory())
            if number == 0:  # the trace has only the first call
                compared = stack.enter_context(compared_with(alone.trace, model))
                gathers = noted
            if number == len(seeds) - 1:  # gradients are sent in buckets from the second call on
                uses = stack.enter_context(measured(model, memory))
            args, kwargs = entered.copies()
            seed_all(common_seed(seed))
            start = transport.total_traffic().bytes_sent
            result = model(*args, **kwargs)
            attention = tuple(ways)  # without those of checkpoints, which recompute attention
            middle = transport.total_traffic().bytes_sent
            outputs = _derived(result, loss)
            sent = middle - start, transport.total_traffic().bytes_sent - middle
        values += of_outputs(outputs, alone.outputs[number])
    values = [
        worst(name, [each for each in values if each.name == name])
        for name in dict.fromkeys(each.name for each in values)
    ]
    for (_, whole), (_, ours) in zip(arguments.tensors(), entered.tensors(), strict=True):
        if isinstance(ours, SpreadTensor) and whole.requires_grad:
            # all workers have a gradient of it, or none has
            whole.grad = None if ours.grad is None else cast(SpreadTensor, ours.grad).full()
    values += of_state(model, arguments, alone)
    modules = dict(model.named_modules())
    used = []
    for name in dict.fromkeys((*alone.trace, *compared)):
        output = worst(name, compared.get(name, [Difference(name, math.nan)]))
        stored = sum(p.nbytes for p in (*modules[name].parameters(), *modules[name].buffers()))
        kind = type(modules[name]).__name__
        used.append(ModuleUse(output, kind, *uses.get(name, (0, 0)), stored))
    drew = "The model draws random numbers: one process drew those of the converted model."
    return ModelReport(
        type(model).__name__,
        str(arguments.where),
        tuple(values),
        tuple(used),
        tuple(dict.fromkeys(gathers)),
        *sent,
        memory.peak,
        alone.peak,
        (drew,) if alone.draws else (),
        attention,
    )


def of_outputs(outputs: Outputs, others: Outputs) -> Iterator[Difference]:
    """The differences of outputs, by their names."""
    ours, theirs = dict(outputs), dict(others)
    for name in {**theirs, **ours}:
        if name not in ours or name not in theirs:
            where = "in one process" if name in theirs else "in the converted model"
            yield Difference(name, math.inf, note=f"only {where}")
        else:
            yield difference(name, ours[name], theirs[name])


def of_state(
    model: nn.Module, arguments: ModelArguments, alone: OneProcess
) -> Iterator[Difference]:
    """The differences of all gradients, and of buffers, after the calls."""
    parameters, buffers = dict(alone.model.named_parameters()), dict(alone.model.named_buffers())
    for name, parameter in model.named_parameters():
        yield difference(f"gradient of {name}", parameter.grad, parameters[name].grad)
    pairs = zip(arguments.tensors(), alone.arguments.tensors(), strict=True)
    for (name, ours), (_, theirs) in pairs:
        if theirs.requires_grad:
            yield difference(f"gradient of {name}", ours.grad, theirs.grad)
    for name, buffer in model.named_buffers():
        yield difference(f"buffer {name}", buffer, buffers[name])


def plain_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model without gradients, in which nothing is distributed."""
    for name, module in model.named_modules():
        ours = type(module).__module__.partition(".")[0] == "tessel"
        region = isinstance(module, HaloRegion) and module.P_x is None
        if isinstance(module.__dict__.get("forward"), Entrance) or (ours and not region):
            what = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise ValueError(
                f"check_model needs a model of plain torch, which it converts itself: {what} is "
                f"already distributed"
            )
    copy = deepcopy(model)
    copy.zero_grad()
    return copy if dtype is None else copy.to(dtype)


@contextmanager
def generators_restored(seed: int) -> Iterator[None]:
    """Random generators begin with this seed, and are as they were afterwards."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def seed_all(number: int) -> None:
    """Seed the generators from which models draw."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def _random_state() -> tuple[Any, ...]:
    devices = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
    return torch.get_rng_state().tolist(), devices


def _derived(result: Any, loss: Loss) -> Outputs:
    """The outputs by name, after the backward pass of their loss."""
    found = opened(result)
    try:
        named = [(keystr(path), value) for path, value in tree_flatten_with_path(found)[0]]
    except ValueError:  # a class that registers no names, such as those of diffusers: use numbers
        named = [(f"[{k}]", value) for k, value in enumerate(tree_flatten(found)[0])]
    outputs: Outputs = [(f"output{name}", value) for name, value in named]
    if loss is None and not any(isinstance(value, Tensor) for _, value in outputs):
        raise ValueError(f"the output, a {type(result).__name__}, contains no tensors")
    roots = [value for _, value in outputs if isinstance(value, Tensor) and value.requires_grad]
    if loss is not None:
        seed_all(0)  # a loss may draw, and the numbers drawn before it differ
        value = loss(result)
        if value.requires_grad:
            value.backward()
        outputs.append(("loss", value))
    elif roots:
        # no function of the table is used here: the gradient that starts the pass is always right
        with uncounted():  # whole on every worker, unlike those of a user's loss
            weights = [_weights(each, k) for k, each in enumerate(roots)]
        torch.autograd.backward(roots, weights)
    return [(n, value.detach() if isinstance(value, Tensor) else value) for n, value in outputs]


def _weights(like: Tensor, number: int) -> Tensor:
    """Fixed random numbers for an output, the same on all workers."""
    generator = torch.Generator().manual_seed(number)
    kind = torch.complex128 if like.dtype.is_complex else torch.float64
    weights = torch.randn(tuple(like.shape), generator=generator, dtype=kind)
    return (weights / max(1, weights.numel()) ** 0.5).to(like.device, like.dtype)


@contextmanager
def new_gradients(*tensors: Tensor) -> Iterator[None]:
    """Start with new gradients, as after `zero_grad()`; at the end add the old ones.

    So a step creates its gradients, in one process and converted, and they count in its memory.
    """
    before = [(each, each.grad) for each in tensors]
    for each, _ in before:
        each.grad = None
    yield
    with torch.no_grad():
        for each, grad in before:
            if grad is not None:
                each.grad = grad if each.grad is None else grad + each.grad


@contextmanager
def recorded(model: nn.Module) -> Iterator[Trace]:
    """Record the outputs of a model's modules in one process, inside the `with` block."""
    trace: Trace = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():  # where a checkpoint recomputes
            # Copies, since a later module may change an earlier output in place.
            with uncounted():
                copies = [
                    plain(value).detach().clone() if isinstance(value, Tensor) else value
                    for value in tree_leaves(opened(output))
                ]
            trace.setdefault(name, []).append(copies)

    with _hooked(model, after=note):
        yield trace


@contextmanager
def compared_with(trace: Trace, model: nn.Module) -> Iterator[dict[str, list[Difference]]]:
    """Record the differences of the outputs of a converted model's modules, call by call."""
    found: dict[str, list[Difference]] = {}

    @uncounted()
    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        # Immediately, since a later module may change this output in place.
        calls = found.setdefault(name, [])
        expected = trace.get(name, [])[len(calls) : len(calls) + 1]
        values = tree_leaves(opened(output))
        if not expected:
            calls.append(Difference(name, math.nan))  # torch has taken a short cut in one process
        elif len(expected[0]) != len(values):
            remark = f"{len(values)} outputs instead of {len(expected[0])}"
            calls.append(Difference(name, math.inf, note=remark))
        else:
            pairs = zip(values, expected[0], strict=True)
            calls.append(worst(name, [difference(name, got, exp) for got, exp in pairs]))

    with _hooked(model, after=note):
        yield found


@contextmanager
def measured(model: nn.Module, memory: Memory) -> Iterator[dict[str, tuple[int, int]]]:
    """The bytes that each module sends, and that it adds to the memory in use."""
    found: dict[str, tuple[int, int]] = {}
    running: list[tuple[int, int]] = []  # modules call modules: the counts when each began

    def begin(name: str, module: nn.Module, args: Any) -> None:
        running.append((transport.total_traffic().bytes_sent, memory.current))

    def end(name: str, module: nn.Module, args: Any, output: Any) -> None:
        sent, kept = running.pop()
        if not in_backward():
            before = found.get(name, (0, 0))
            sent = transport.total_traffic().bytes_sent - sent
            found[name] = before[0] + sent, before[1] + max(0, memory.current - kept)

    with _hooked(model, after=end, before=begin):
        yield found


def opened(value: Any) -> Any:
    """Outputs with the contents of objects that torch does not flatten: those of data classes."""
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping):
        return {name: opened(getattr(value, name)) for name in value.__dataclass_fields__}
    if type(value) in (list, tuple):
        return type(value)([opened(each) for each in value])
    if type(value) is dict:
        return {key: opened(each) for key, each in value.items()}
    return value


@contextmanager
def _hooked(model: nn.Module, after: Any, before: Any = None) -> Iterator[None]:
    """Hook all modules, except those in a region, which get more than their part."""
    handles = []
    regions = [name for name, each in model.named_modules() if isinstance(each, HaloRegion)]
    for name, module in model.named_modules():
        if not any(
            name != each and f".{name}".startswith(f".{each}".rstrip(".")) for each in regions
        ):
            if before is not None:
                handles.append(module.register_forward_pre_hook(partial(before, name)))
            handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
