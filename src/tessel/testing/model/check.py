"""The steps of a check: agree, run in one process, run converted, report.

An attempt may raise on one worker, and then all of them raise the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tessel import transport
from tessel.core.context import setting
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.errors import WorkerLost, check_choice
from tessel.nn.convert import distribute_module
from tessel.tensor.call_site import is_library
from tessel.tensor.comparing import compare, comparing
from tessel.tensor.gathering import FALLBACKS
from tessel.testing.model.arguments import ModelArguments
from tessel.testing.model.report import ModelReport, merged
from tessel.testing.model.runs import (
    OneProcess,
    generators_restored,
    plain_copy,
    run_alone,
    run_converted,
)


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
    """Check that a model computes over workers what it computes in one process.

    Every worker runs the model in plain torch, on the whole inputs, and together they run it
    converted by `distribute_module`, on their parts. It compares all outputs, the gradients of all
    parameters and of all floating-point inputs, and the buffers after the calls; and the outputs of
    each module, to find the first one that differs. All workers of the job call this with the same
    arguments. They get the same report, or raise the same AssertionError with its text; the error
    has it as `report`. If the model raises on one worker, all of them raise.

    The model, its gradients, inputs and the state of random generators do not change. The model
    runs in its current mode, training or evaluation. If it draws random numbers, one process draws
    those of a converted model, so that dropout drops the same values.

    Args:
        model: a torch model that is not converted.
        inputs: the inputs, whole and the same on all workers. Tensors with as many dimensions as
            the grid of `where` has axes are spread; others, such as labels and time steps, stay
            whole. For another layout pass a spread tensor.
        where: the partition of the conversion; or a layout, for inputs of its shape.
        kwargs: keyword arguments of the model, treated like the inputs.
        loss: the function from the output to the loss; by default a sum of all outputs with fixed
            random weights.
        rtol: the allowed error, relative to the largest value of a tensor (or, if that is more, to
            a hundredth of the largest of all gradients, and of one for other tensors); by default
            typical rounding of a deep model in the tensor's dtype.
        atol: the allowed absolute error; by default none.
        dtype: the dtype in which both run, such as torch.float64, whose rounding hides no errors;
            by default that of the model.
        fallback: see `distribute_module`.
        calls: how often both are called. Gradients are sent in buckets from the second call on.
        seed: the seed of random numbers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    >>> tessel.testing.check_model(model, torch.ones(2, 3, 8, 8), where=P).passed
    True
    """
    given = ModelArguments(inputs, dict(kwargs or {}), where, dtype)
    check_choice("fallback", fallback, FALLBACKS)
    if calls < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    everyone = transport.group_of(range(transport.num_workers()))
    with generators_restored(seed):
        # If one worker cannot copy the model, all learn it in the agreement.
        copied = attempt(lambda: plain_copy(model, dtype))
        settings = (fallback, calls, seed, rtol, atol, str(dtype), loss is None)
        _agree(everyone, model, given, settings, copied.text)
        told = _run_both(model, copied.result, given, loss, fallback, calls, everyone)
    report = merged(told, rtol, atol)
    if not report.passed:
        error = AssertionError(str(report))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


def _run_both(
    model: nn.Module,
    copy: nn.Module,
    given: ModelArguments,
    loss: Callable[[Any], Tensor] | None,
    fallback: str,
    calls: int,
    everyone: transport.Group,
) -> list[ModelReport]:
    """The findings of each worker of the partition: one process against a converted copy."""
    name, partition = type(model).__name__, given.partition
    converted: Any = distribute_module(copy, partition, fallback)
    layouts, arguments = given.layouts(), given.wholes()
    # here, since workers outside of the partition also agree on spread tensors
    entered = arguments.entered(layouts)
    first = converted.forward.conversion.stream.seed if partition.active else 0
    seeds = [first + number for number in range(calls)]

    def in_one_process() -> OneProcess | None:
        if not partition.active:
            return None
        template = plain_copy(model, given.dtype)
        # Conversion gave all workers the values of the first: one process starts from these.
        values = dict((*converted.named_parameters(), *converted.named_buffers()))
        with torch.no_grad():
            for key, value in (*template.named_parameters(), *template.named_buffers()):
                value.copy_(values[key])
        is_spread = [layout is not None for layout in layouts]
        return run_alone(template, arguments, is_spread, loss, seeds)

    # An exception in one process must not leave workers alone in the following exchanges.
    alone = attempt(in_one_process)
    alone.raise_together(everyone, f"{name} raises in one process")
    found = attempt_together(
        lambda: run_converted(converted, arguments, entered, alone.result, loss, seeds),
        partition,
        everyone,
    )
    found.raise_together(everyone, f"{name}, converted, raises")
    return [each for each in everyone.share_objects(found.result) if each is not None]


def _agree(
    everyone: transport.Group, model: nn.Module, given: ModelArguments, settings: Any, failure: str
) -> None:
    """Raise on all workers unless they check the same model with the same inputs."""
    mine = {
        "the settings": str(settings),
        "the model": str([(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()])
        + str([(name, type(each).__qualname__) for name, each in model.named_modules()])
        + str([each.training for each in model.modules()]),
        **given.described(),
    }
    said = everyone.share_objects((failure, mine))
    for worker, (text, _) in zip(everyone.workers, said, strict=True):
        if text:
            raise ValueError(f"check_model on worker {worker}: {text}")
    # Only differences to the first worker are reported: all raise the same text.
    first = said[0][1]
    for worker, (_, theirs) in zip(everyone.workers, said, strict=True):
        for what in {**first, **theirs}:
            if first.get(what) != theirs.get(what):
                raise ValueError(
                    f"check_model needs the same on all workers: {what} differs between worker "
                    f"{everyone.workers[0]} and worker {worker}; inputs must be whole, and drawn "
                    f"with one seed"
                )
    given.check()


@dataclass
class Attempt:
    """The result of a function, or the exception that it raised."""

    result: Any = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        """The exception in a line, with the place in the user's code; empty if there is none."""
        if self.error is None:
            return ""
        place = ""
        for frame, line in traceback.walk_tb(self.error.__traceback__):
            if not is_library(frame):
                place = f" at {frame.f_code.co_filename}:{line}"
        return f"{type(self.error).__name__}: {self.error}{place}"

    def raise_together(self, everyone: transport.Group, what: str) -> None:
        """Raise the same AssertionError on all workers if the attempt failed on one."""
        said = dict(zip(everyone.workers, everyone.share_objects(self.text), strict=True))
        failed = {worker: text for worker, text in said.items() if text}
        # omit workers that only learned of it
        own = {w: text for w, text in failed.items() if transport.DIFFERENT not in text} or failed
        if own:
            listed = "; ".join(
                f"on workers {[w for w, each in own.items() if each == text]} {text}"
                for text in dict.fromkeys(own.values())
            )
            raise AssertionError(f"check_model: {what}, {listed}") from self.error


def attempt(act: Callable[[], Any]) -> Attempt:
    """Call a function that does not communicate, and keep its exception."""
    try:
        return Attempt(act())
    except Exception as error:  # any exception of the model
        return Attempt(error=error)


def attempt_together(
    act: Callable[[], Any], partition: Partition, everyone: transport.Group
) -> Attempt:
    """Call a function on all workers of a partition together.

    Meanwhile they compare their calls. A worker that raises reports it instead of its next call,
    and all others raise there.
    """
    result = None
    groups = [partition.prepare(), everyone] if partition.active else [everyone]
    groups = list(dict.fromkeys(groups))  # which are one, if all workers take part
    try:
        with comparing(), setting(transport.tells_errors, True):
            if partition.active:
                result = act()
            for group in groups:
                compare(group, "the end of check_model")
    except WorkerLost as error:  # there is no worker to report to
        return Attempt(error=error)
    except Exception as error:  # any exception of the model
        failed = Attempt(error=error)
        for group in groups:
            if group.workers != getattr(error, "workers", None):  # they know of it
                with suppress(ValueError):  # the others' error
                    compare(group, f"nothing more: it raised {failed.text}")
        return failed
    return Attempt(result)
