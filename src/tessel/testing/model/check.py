"""The order of a check: agree, run alone, run converted, report.

An attempt is what may raise on one worker, after which all of them raise the same.
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
        calls: how often both are called. Gradients travel in buckets from the second call on.
        seed: of random numbers.

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
        # A model that cannot be copied on one worker is told to all in the agreement.
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
    """What each worker of the partition found: the model in one process, and a copy converted."""
    name, partition = type(model).__name__, given.partition
    converted: Any = distribute_module(copy, partition, fallback)
    layouts, arguments = given.layouts(), given.wholes()
    # here, since workers outside of the partition agree on spread tensors, too
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

    # Whatever raises in one process must not leave workers alone in the exchanges that follow.
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
    # Only what differs from the first worker is looked for: all come to the same text.
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
    """What something gave, or the exception that it raised."""

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
        # a worker that only heard of it has nothing new to say
        own = {w: text for w, text in failed.items() if transport.DIFFERENT not in text} or failed
        if own:
            listed = "; ".join(
                f"on workers {[w for w, each in own.items() if each == text]} {text}"
                for text in dict.fromkeys(own.values())
            )
            raise AssertionError(f"check_model: {what}, {listed}") from self.error


def attempt(act: Callable[[], Any]) -> Attempt:
    """Do something that moves nothing, and keep what it raises."""
    try:
        return Attempt(act())
    except Exception as error:  # of whatever kind the model's are
        return Attempt(error=error)


def attempt_together(
    act: Callable[[], Any], partition: Partition, everyone: transport.Group
) -> Attempt:
    """Do something that workers of a partition do together, and none of them alone.

    Meanwhile they compare their calls. A worker that raises says so in the place of its next one,
    and all others raise there, whatever they are about to do.
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
    except WorkerLost as error:  # there is nobody to tell
        return Attempt(error=error)
    except Exception as error:  # of whatever kind the model's are
        failed = Attempt(error=error)
        for group in groups:
            if group.workers != getattr(error, "workers", None):  # who know of it
                with suppress(ValueError):  # it is what the others raise
                    compare(group, f"nothing more: it raised {failed.text}")
        return failed
    return Attempt(result)
