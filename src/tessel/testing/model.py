"""The proof of a conversion, on the user's own model."""

from __future__ import annotations

import math
import random
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from tessel import transport
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.errors import WorkerLost
from tessel.nn.convert import Entrance, distribute_module
from tessel.nn.region import HaloRegion
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor import spread
from tessel.tensor.call_site import is_library
from tessel.tensor.comparing import compare, comparing
from tessel.tensor.gathering import Gather, check_choice, noted_gathers
from tessel.tensor.passes import in_backward
from tessel.tensor.shared_random import common_seed
from tessel.tensor.tensor import layout_on
from tessel.testing.drawing import drawing, plain
from tessel.testing.memory import Memory, count_memory
from tessel.testing.report import TOLERANCES, Difference, ModelReport, ModuleUse

# what is far smaller than the largest gradient, or than one, is rounded as parts of that are
FLOOR = 1e-2


def check_model(
    model: nn.Module,
    *inputs: Any,
    where: Partition | Layout,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: torch.dtype | None = None,
    fallback: str = "gather",
    calls: int = 2,
    seed: int = 0,
) -> ModelReport:
    """Prove that a model does over workers what it does in one process.

    Every worker runs the model in plain torch, on the whole inputs, and together they run it
    converted by `distribute_module`, on their parts. Compared are all outputs, the gradients of all
    parameters and of all floating inputs, and the buffers after the calls; and, module by module,
    the outputs, so that the first one that differs is known. All workers of the job call this with
    the same arguments. They get the same report, or raise the same AssertionError with its text;
    the error has it as `report`. A model that raises on one worker makes all of them raise.

    The model, its gradients, inputs and the state of random generators stay as they are. The model
    runs in the mode in which it is, training or evaluation. Where it draws random numbers, one
    process draws those that a converted model draws, so that dropout drops the same values.

    Args:
        model: a torch model that is not converted.
        inputs: whole, the same on all workers. Tensors with as many dimensions as the grid of
            `where` has axes are spread; others, as labels and time steps, stay whole. What is to
            lie otherwise is passed as a spread tensor.
        where: the partition of the conversion; or a layout, for inputs of its shape.
        kwargs: keyword arguments of the model, treated as the inputs are.
        loss: makes the loss of the output; by default it is a sum of all outputs with fixed random
            weights.
        rtol: which error is allowed, relative to the largest value of a tensor (to a hundredth of
            the largest of all gradients, and of one for other tensors, if that is more); by
            default what rounding in the tensor's dtype makes of a deep model.
        atol: the same, absolute; by default none.
        dtype: in which both run, as torch.float64, whose rounding hides nothing; by default that of
            the model.
        fallback: as of `distribute_module`.
        calls: how often both are called. Gradients travel in bundles from the second call on.
        seed: of random numbers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    >>> tessel.testing.check_model(model, torch.ones(2, 3, 8, 8), where=P).passed
    True
    """
    partition = where.partition if isinstance(where, Layout) else where
    if not isinstance(partition, Partition):
        raise TypeError(f"where: a tessel.Partition or a tessel.Layout is needed, got {where!r}")
    check_choice(fallback)
    if calls < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    everyone = transport.group_of(range(transport.num_workers()))
    with _untouched(seed):
        given = _Given(inputs, dict(kwargs or {}), where, dtype)
        copy, failure = _attempted(lambda: _copied(model, dtype))
        settings = (fallback, calls, seed, rtol, atol, str(dtype), loss is None)
        _agree(everyone, model, given, settings, failure)
        converted: Any = distribute_module(copy, partition, fallback)
        arguments = given.spread()
        # here, since workers outside of the partition agree on spread tensors, too
        entered = [arguments.entered() for _ in range(calls)]
        alone: Any = None
        if partition.active:
            seeds = [converted.forward.stream.seed + number for number in range(calls)]
            values = {name: value.detach().clone() for name, value in _values(converted).items()}
            fresh = partial(_fresh, model, dtype, values)
            alone, failure = _attempted(lambda: _alone(fresh, given, loss, seeds))
        _raise_together(everyone, failure, f"{type(model).__name__} raises in one process")
        check = partial(_checked, converted, arguments, entered, alone, loss)
        found, failure = _attempted_together(check, partition, everyone)
        _raise_together(everyone, failure, f"{type(model).__name__}, converted, raises")
        told = [each for each in everyone.share_objects(found) if each is not None]
    report = _merged(type(model).__name__, str(where), told, rtol, atol)
    if not report.passed:
        error = AssertionError(str(report))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


# -- what is given --------------------------------------------------------------------------------


@contextmanager
def _untouched(seed: int) -> Iterator[None]:
    """Random generators are as they were, afterwards."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        _seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


class _Given:
    """The arguments of the model: whole, and spread.

    Args:
        args: of the call, whole tensors or spread ones in any nesting.
        kwargs: the same by their names.
        where: the layout of what is spread.
        dtype: of floating tensors.
    """

    def __init__(self, args: Any, kwargs: Any, where: Partition | Layout, dtype: Any) -> None:
        self.where, self.dtype = where, dtype
        self.partition = where.partition if isinstance(where, Layout) else where
        self.original = args, kwargs

    def named(self) -> list[tuple[str, Tensor]]:
        """The tensors and what they are called."""
        args, kwargs = self.original
        return [
            (f"input{keystr(path)}", value)
            for path, value in (*_leaves(args), *_leaves(kwargs))
            if isinstance(value, Tensor)
        ]

    def layout(self, value: Tensor) -> Layout | None:
        """How a tensor is spread; None for one that stays whole."""
        if isinstance(value, SpreadTensor):
            return value.layout
        if value.dim() != self.partition.dim:
            return None
        fits = isinstance(self.where, Layout) and self.where.shape == tuple(value.shape)
        return self.where if fits else layout_on(self.partition, value.shape)  # type: ignore[return-value]

    def wholes(self) -> _Arguments:
        """The arguments of one process."""
        args, kwargs = tree_map(self._whole, self.original)
        return _Arguments(args, kwargs, [])

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whole = value.full().detach() if isinstance(value, SpreadTensor) else value.detach()
        floating = whole.is_floating_point() or whole.is_complex()
        if self.dtype is not None and floating:
            whole = whole.to(self.dtype.to_complex() if whole.is_complex() else self.dtype)
        return whole.clone().requires_grad_(floating and torch.is_grad_enabled())

    def spread(self) -> _Arguments:
        """The arguments of the converted model: whole ones that every worker has, and layouts."""
        layouts: list[Layout | None] = []

        def enter(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            layouts.append(self.layout(value))
            return self._whole(value) if self.partition.active else torch.empty(0)

        args, kwargs = tree_map(enter, self.original)
        return _Arguments(args, kwargs, layouts)


@dataclass
class _Arguments:
    """Arguments that can be passed several times, and get gradients."""

    args: Any
    kwargs: Any
    layouts: list[Layout | None]

    def leaves(self) -> list[tuple[str, Tensor]]:
        """The tensors, which get gradients."""
        return [
            (f"input{keystr(path)}", value)
            for path, value in (*_leaves(self.args), *_leaves(self.kwargs))
            if isinstance(value, Tensor)
        ]

    def passed(self, change: Callable[[int, Tensor], Tensor]) -> tuple[Any, Any]:
        """The arguments for one call, with something else in the places of tensors."""
        numbers = iter(range(len(self.leaves())))
        return tree_map(
            lambda value: change(next(numbers), value) if isinstance(value, Tensor) else value,
            (self.args, self.kwargs),
        )

    def entered(self) -> tuple[Any, Any]:
        """The arguments of the converted model, each spread in its layout."""

        def enter(number: int, value: Tensor) -> Tensor:
            layout = self.layouts[number]
            copy = value.clone()  # the model may change it
            return copy if layout is None else spread(copy, layout)

        return self.passed(enter)


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    return list(tree_flatten_with_path(value)[0])


def _copied(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model without gradients, in which nothing is distributed."""
    for name, module in model.named_modules():
        ours = type(module).__module__.partition(".")[0] == "tessel"
        region = isinstance(module, HaloRegion) and module.P_x is None
        if isinstance(module.__dict__.get("forward"), Entrance) or (ours and not region):
            what = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise ValueError(
                f"check_model needs a model of plain torch, which it converts itself: {what} is "
                f"distributed already"
            )
    copy = deepcopy(model)
    copy.zero_grad()
    return copy if dtype is None else copy.to(dtype)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _fresh(model: nn.Module, dtype: torch.dtype | None, values: dict[str, Tensor]) -> nn.Module:
    """A copy of the model with the values that all workers have."""
    copy = _copied(model, dtype)
    with torch.no_grad():
        for name, value in _values(copy).items():
            value.copy_(values[name])
    return copy


def _agree(
    everyone: transport.Group, model: nn.Module, given: _Given, settings: Any, failure: str
) -> None:
    """Raise on all workers unless they check the same model with the same inputs."""
    where = given.where
    mine = {
        "where": where.identity if isinstance(where, Layout) else str((where.ranks, where.shape)),
        "the settings": str(settings),
        "the model": str([(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()])
        + str([(name, type(each).__qualname__) for name, each in model.named_modules()])
        + str([each.training for each in model.modules()]),
    }
    mine |= {name: _described(value) for name, value in given.named()}
    said = everyone.share_objects((str(failure), mine))
    for worker, (text, _) in zip(everyone.workers, said, strict=True):
        if text:
            raise ValueError(f"check_model on worker {worker}: {text}")
    first = said[0][1]
    for worker, (_, theirs) in zip(everyone.workers, said, strict=True):
        for what in {**first, **theirs}:
            if first.get(what) != theirs.get(what):
                raise ValueError(
                    f"check_model needs the same on all workers: {what} differs between worker "
                    f"{everyone.workers[0]} and worker {worker}; inputs are whole, and made with "
                    f"one seed"
                )
    if all(given.layout(value) is None for _, value in given.named()):
        dims = [value.dim() for _, value in given.named()]
        raise ValueError(
            f"check_model: an input with {given.partition.dim} dimensions, as many as the grid has "
            f"axes, is needed to be spread, got tensors of {dims} dimensions; pass "
            f"tessel.spread(x, layout) for another one"
        )
    shapes = [tuple(value.shape) for _, value in given.named()]
    if isinstance(where, Layout) and where.shape not in shapes:
        raise ValueError(f"check_model: no input has the shape of {where}, got {shapes}")


def _described(x: Tensor) -> str:
    """A tensor in words, its values by a checksum."""
    if isinstance(x, SpreadTensor):
        return f"{x.layout.identity} {x.dtype}"
    values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(x.shape)} {x.dtype} {zlib.crc32(values.numpy().tobytes())}"


# -- what raises ----------------------------------------------------------------------------------


class _Failure(str):
    """The text of an exception, and the exception."""

    error: BaseException

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            if not is_library(frame):
                place = f" at {frame.f_code.co_filename}:{line}"
        failure = cls(f"{type(error).__name__}: {error}{place}")
        failure.error = error
        return failure


def _attempted(act: Callable[[], Any]) -> tuple[Any, str]:
    """What something gives, or the text of what it raises."""
    try:
        return act(), ""
    except Exception as error:  # of whatever kind the model's are
        return None, _Failure.of(error)


def _attempted_together(
    act: Callable[[], Any], partition: Partition, everyone: transport.Group
) -> tuple[Any, str]:
    """The same of something that workers of a partition do together, and none of them alone.

    Meanwhile they compare their calls. A worker that raises says so in the place of its next one,
    and all others raise there, whatever they are about to do.
    """
    result = None
    groups = [partition.group, everyone] if partition.active else [everyone]
    groups = list(dict.fromkeys(groups))  # which are one, if all workers take part
    try:
        with comparing():
            if partition.active:
                result = act()
            for group in groups:
                compare(group, "the end of check_model")
    except WorkerLost as error:  # there is nobody to tell
        return None, _Failure.of(error)
    except Exception as error:  # of whatever kind the model's are
        text = _Failure.of(error)
        for group in groups:
            if group.workers != getattr(error, "workers", None):  # who know of it
                with suppress(ValueError):  # it is what the others raise
                    compare(group, f"nothing more: it raised {text}")
        return None, text
    return result, ""


def _raise_together(everyone: transport.Group, failure: str, what: str) -> None:
    """Raise the same on all workers if something failed on one."""
    said = dict(zip(everyone.workers, everyone.share_objects(str(failure)), strict=True))
    failed = {worker: text for worker, text in said.items() if text}
    # a worker that only heard of it has nothing new to say
    own = {w: text for w, text in failed.items() if transport.DIFFERENT not in text} or failed
    if own:
        texts = dict.fromkeys(own.values())
        listed = "; ".join(
            f"on workers {[w for w, each in own.items() if each == text]} {text}" for text in texts
        )
        raise AssertionError(f"check_model: {what}, {listed}") from getattr(failure, "error", None)


# -- one process ----------------------------------------------------------------------------------


@dataclass
class _Alone:
    """What one process has: the model after its calls, arguments with gradients, and outputs."""

    model: nn.Module
    given: _Arguments
    trace: _Trace
    outputs: list[list[tuple[str, Any]]]
    seeds: list[int]
    peak: int
    draws: bool


def _alone(
    fresh: Callable[[], nn.Module], given: _Given, loss: Any, seeds: list[int], mark: bool = False
) -> _Alone:
    """Run a fresh copy of the model in plain torch.

    If it draws random numbers it runs once more, with tensors that draw as spread ones do: so a
    model that draws none sees torch's own tensors alone.
    """
    arguments, trace, outputs = given.wholes(), _Trace(), []
    spread_there = [given.layout(value) is not None for _, value in given.named()]
    model = fresh()

    def enter(number: int, value: Tensor) -> Tensor:
        copy = value.clone()  # the model may change it
        return drawing(copy) if mark and spread_there[number] else copy

    peak, draws = 0, False
    for number, seed in enumerate(seeds):
        with ExitStack() as stack:
            if number == 0:
                stack.enter_context(trace.recording(model))
            memory = stack.enter_context(count_memory())
            args, kwargs = arguments.passed(enter)
            _seed(common_seed(seed))
            before = _random_state()
            result = model(*args, **kwargs)
            draws = draws or _random_state() != before
            outputs.append(_finished(result, loss))
        peak = memory.peak
    if draws and not mark:
        return _alone(fresh, given, loss, seeds, mark=True)
    return _Alone(model, arguments, trace, outputs, seeds, peak, draws)


def _random_state() -> tuple[Any, ...]:
    devices = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
    return torch.get_rng_state().tolist(), devices


def _finished(result: Any, loss: Callable[[Any], Tensor] | None) -> list[tuple[str, Any]]:
    """The outputs by name, after the backward pass of their loss."""
    outputs = [(f"output{keystr(path)}", value) for path, value in _leaves(_opened(result))]
    if loss is None and not any(isinstance(value, Tensor) for _, value in outputs):
        raise ValueError(f"there are no tensors in the output, a {type(result).__name__}")
    found = [value for _, value in outputs if isinstance(value, Tensor) and value.requires_grad]
    if loss is not None:
        _seed(0)
        value = loss(result)
        if value.requires_grad:
            value.backward()
        outputs.append(("loss", value))
    elif found:
        # no function of the table takes part in this: what seeds the pass is right in any case
        torch.autograd.backward(found, [_weights(each, k) for k, each in enumerate(found)])
    return [(n, value.detach() if isinstance(value, Tensor) else value) for n, value in outputs]


def _weights(like: Tensor, number: int) -> Tensor:
    """Fixed random numbers for an output, the same on all workers."""
    generator = torch.Generator().manual_seed(number)
    kind = torch.complex128 if like.dtype.is_complex else torch.float64
    weights = torch.randn(tuple(like.shape), generator=generator, dtype=kind)
    return (weights / max(1, weights.numel()) ** 0.5).to(like.device, like.dtype)


def _opened(value: Any) -> Any:
    """Outputs with what is in objects whose parts torch does not know: those of data classes."""
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping):
        return {name: _opened(getattr(value, name)) for name in value.__dataclass_fields__}
    if type(value) in (list, tuple):
        return type(value)([_opened(each) for each in value])
    if type(value) is dict:
        return {key: _opened(each) for key, each in value.items()}
    return value


# -- module by module -----------------------------------------------------------------------------


@dataclass
class _Trace:
    """The outputs of all modules of a model in one process, call by call, in order."""

    outputs: dict[str, list[list[Any]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Note what the modules give."""

        def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # a checkpoint computes again
                return
            if name not in self.outputs:
                self.order.append(name)
            values = [value for _, value in _leaves(_opened(output))]
            copies = [plain(v).detach().clone() if isinstance(v, Tensor) else v for v in values]
            self.outputs.setdefault(name, []).append(copies)

        with _hooked(model, after=note):
            yield


@contextmanager
def _hooked(model: nn.Module, after: Any, before: Any = None) -> Iterator[None]:
    """Hooks at all modules, but for those in a region, which see more than their part."""
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


class _Comparison:
    """The outputs of the modules of a converted model against those of one process."""

    def __init__(self, trace: _Trace) -> None:
        self.trace = trace
        self.differences: dict[str, Difference] = {}
        self.num_calls: dict[str, int] = {}

    def note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Compare what a module gives, the first time that it is called so often."""
        if in_backward():
            return
        number = self.num_calls.get(name, 0)
        self.num_calls[name] = number + 1
        expected = self.trace.outputs.get(name, [])
        values = [value for _, value in _leaves(_opened(output))]
        if number >= len(expected):
            found = Difference(name, math.nan)  # torch has taken a short cut in one process
        elif len(expected[number]) != len(values):
            note = f"{len(values)} outputs are not {len(expected[number])}"
            found = Difference(name, math.inf, note=note)
        else:
            pairs = zip(values, expected[number], strict=True)
            found = _worst(name, [_difference(name, got, exp) for got, exp in pairs])
        before = self.differences.get(name)
        self.differences[name] = found if before is None else _worst(name, [before, found])


class _Uses:
    """What the modules of a converted model send and keep."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.sent: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self._open: list[tuple[int, int]] = []

    def begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._open.append((transport.traffic().bytes_sent, self.memory.current))

    def end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        sent, kept = self._open.pop()
        if not in_backward():
            self.sent[name] = self.sent.get(name, 0) + transport.traffic().bytes_sent - sent
            self.kept[name] = self.kept.get(name, 0) + max(0, self.memory.current - kept)


# -- the converted model --------------------------------------------------------------------------


@dataclass
class _Found:
    """What one worker has to say: it is put together with what the others say."""

    values: list[Difference]
    modules: list[ModuleUse]
    gathers: list[Gather]
    sent: tuple[int, int]
    peak: int
    peak_alone: int
    draws: bool


def _checked(
    model: nn.Module, given: _Arguments, entered: list[Any], alone: _Alone, loss: Any
) -> _Found:
    """Run the converted model, and compare it with one process."""
    comparison = _Comparison(alone.trace)
    values: list[Difference] = []
    for number, (args, kwargs) in enumerate(entered):
        with ExitStack() as stack:
            noted = stack.enter_context(noted_gathers())
            memory = stack.enter_context(count_memory())
            uses = _Uses(memory)
            if number == 0:
                stack.enter_context(_hooked(model, after=comparison.note))
                gathers = noted
            if number == len(entered) - 1:
                stack.enter_context(_hooked(model, after=uses.end, before=uses.begin))
            _seed(common_seed(alone.seeds[number]))
            start = transport.traffic().bytes_sent
            result = model(*args, **kwargs)
            middle = transport.traffic().bytes_sent
            outputs = _finished(result, loss)
            sent = middle - start, transport.traffic().bytes_sent - middle
        values += _paired(outputs, alone.outputs[number])
    values = list(_worst_by_name(values))
    values += _gradients(model, alone.model)
    values += [
        _difference(f"gradient of {name}", ours.grad, theirs.grad)
        for (name, ours), (_, theirs) in zip(given.leaves(), alone.given.leaves(), strict=True)
        if theirs.requires_grad
    ]
    buffers = dict(alone.model.named_buffers())
    values += [
        _difference(f"buffer {name}", value, buffers[name]) for name, value in model.named_buffers()
    ]
    modules = dict(model.named_modules())
    only_here = [name for name in comparison.num_calls if name not in alone.trace.outputs]
    used = [
        ModuleUse(
            comparison.differences.get(name, Difference(name, math.nan)),
            type(modules[name]).__name__,
            uses.sent.get(name, 0),
            uses.kept.get(name, 0),
            sum(p.nbytes for p in (*modules[name].parameters(), *modules[name].buffers())),
        )
        for name in (*alone.trace.order, *only_here)
    ]
    return _Found(values, used, gathers, sent, memory.peak, alone.peak, alone.draws)


def _gradients(model: nn.Module, other: nn.Module) -> list[Difference]:
    theirs = dict(other.named_parameters())
    return [
        _difference(f"gradient of {name}", parameter.grad, theirs[name].grad)
        for name, parameter in model.named_parameters()
    ]


def _paired(outputs: list[tuple[str, Any]], others: list[tuple[str, Any]]) -> Iterator[Difference]:
    """The differences of outputs, by their names."""
    ours, theirs = dict(outputs), dict(others)
    for name in {**theirs, **ours}:
        if name not in ours or name not in theirs:
            where = "in one process" if name in theirs else "in the converted model"
            yield Difference(name, math.inf, note=f"only {where}")
        else:
            yield _difference(name, ours[name], theirs[name])


def _difference(name: str, got: Any, expected: Any) -> Difference:
    """By how much what a worker has differs from its part of what one process has."""
    got, expected = _numbers(got), _numbers(expected)
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        if type(got) is type(expected) and not isinstance(got, _EXACT):
            return Difference(f"{name}, a {type(got).__name__}, is not compared", math.nan)
        if type(got) is type(expected) and got == expected:
            return Difference(name, 0.0)
        return Difference(name, math.inf, note=f"{_short(got)} is not {_short(expected)}")
    expected = plain(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"{_short(got)} is not {_short(expected)}"
        return Difference(name, math.inf, note=note)
    got, expected = _dense(got), _dense(expected)
    scale = _largest(expected)
    if isinstance(got, SpreadTensor):
        layout = got.layout.summed
        part, expected = got.move_to(layout).local, layout.local_part(expected)
    else:
        part = got
    wide = torch.complex128 if expected.is_complex() else torch.float64
    part, expected = part.detach().to(wide), expected.detach().to(wide)
    same = (part == expected) | (torch.isnan(part) & torch.isnan(expected))
    apart = torch.where(same, 0, (part - expected).abs()).nan_to_num(nan=math.inf)
    error = float(apart.max()) if apart.numel() else 0.0
    return Difference(name, error, scale, str(got.dtype))


_EXACT = (int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _numbers(value: Any) -> Any:
    """Numbers that are rounded, as tensors are; anything else as it is."""
    if isinstance(value, float | complex | np.ndarray | np.number):
        return torch.as_tensor(value, dtype=None if isinstance(value, np.ndarray) else _kind(value))
    return value


def _kind(value: Any) -> torch.dtype:
    return torch.complex128 if isinstance(value, complex) else torch.float64


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if not isinstance(x, SpreadTensor) and x.layout != torch.strided else x


def _largest(x: Tensor) -> float:
    finite = x.detach().abs().double().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value!r:.40}" if isinstance(value, int | float | str | None) else type(value).__name__


# -- together -------------------------------------------------------------------------------------


def _worst(name: str, differences: list[Difference]) -> Difference:
    """One for several: the largest error, and the first note."""
    if not differences:
        return Difference(name, 0.0)
    worst = max(differences, key=lambda each: -1.0 if math.isnan(each.error) else each.error)
    scale = max(each.scale for each in differences)
    note = next((each.note for each in differences if each.note), "")
    return replace(worst, scale=scale, note=note)


def _worst_by_name(differences: list[Difference]) -> Iterator[Difference]:
    for name in dict.fromkeys(each.name for each in differences):
        yield _worst(name, [each for each in differences if each.name == name])


def _merged(
    model: str, where: str, told: list[_Found], rtol: float | None, atol: float | None
) -> ModelReport:
    """The report of all workers: of each figure the largest."""
    first = told[0]
    values = [_worst(v.name, [each.values[k] for each in told]) for k, v in enumerate(first.values)]
    gradients = [each.scale for each in values if each.name.startswith("gradient")]
    largest = max(gradients, default=0.0)

    def allowed(each: Difference) -> Difference:
        kinds = {str(dtype): value for dtype, value in TOLERANCES.items()}
        usual = kinds.get(each.dtype, 0.0)
        is_exact = usual == 0.0  # whole numbers
        usual_scale = largest if each.name.startswith("gradient") else 1.0
        scale = max(each.scale, FLOOR * usual_scale)
        relative = 0.0 if is_exact else usual if rtol is None else rtol
        return replace(each, allowed=relative * scale + (0.0 if is_exact else atol or 0.0))

    modules = []
    for k, module in enumerate(first.modules):
        several = [each.modules[k] for each in told]
        modules.append(
            ModuleUse(
                allowed(_worst(module.name, [each.output for each in several])),
                module.kind,
                max(each.bytes_sent for each in several),
                max(each.bytes_kept for each in several),
                max(each.bytes_stored for each in several),
            )
        )
    remarks = []
    wrong = any(each.differs for each in (*map(allowed, values), *(m.output for m in modules)))
    if wrong and all(each.dtype != "torch.float64" for each in values):
        remarks.append(
            "If that may be rounding, which norms of few values enlarge, check with "
            "dtype=torch.float64."
        )
    if first.draws:
        remarks.append(
            "The model draws random numbers: one process drew those of the converted model."
        )
    return ModelReport(
        model,
        where,
        tuple(map(allowed, values)),
        tuple(modules),
        tuple(dict.fromkeys(first.gathers)),
        max(each.sent[0] for each in told),
        max(each.sent[1] for each in told),
        max(each.peak for each in told),
        max(each.peak_alone for each in told),
        tuple(remarks),
    )
