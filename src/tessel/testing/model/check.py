"""The order of a check: agree, run alone, run converted, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tessel import transport
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.nn.convert import distribute_module
from tessel.tensor.gathering import check_choice
from tessel.testing.model.arguments import Arguments
from tessel.testing.model.attempt import attempt, attempt_together
from tessel.testing.model.difference import Difference, worst
from tessel.testing.model.report import TOLERANCES, ModelReport, ModuleUse
from tessel.testing.model.runs import (
    Findings,
    OneProcess,
    generators_restored,
    plain_copy,
    run_alone,
    run_converted,
)

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
        calls: how often both are called. Gradients travel in buckets from the second call on.
        seed: of random numbers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    >>> tessel.testing.check_model(model, torch.ones(2, 3, 8, 8), where=P).passed
    True
    """
    given = Arguments(inputs, dict(kwargs or {}), where, dtype)
    check_choice(fallback)
    if calls < 1:
        raise ValueError(f"calls must be at least 1, got {calls}")
    everyone = transport.group_of(range(transport.num_workers()))
    with generators_restored(seed):
        # A model that cannot be copied on one worker is told to all in the agreement.
        copied = attempt(lambda: plain_copy(model, dtype))
        settings = (fallback, calls, seed, rtol, atol, str(dtype), loss is None)
        _agree(everyone, model, given, settings, copied.text)
        told = _run_both(model, copied.result, given, loss, fallback, calls, everyone)
    report = _merged(type(model).__name__, str(where), told, rtol, atol)
    if not report.passed:
        error = AssertionError(str(report))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report


def _run_both(
    model: nn.Module,
    copy: nn.Module,
    given: Arguments,
    loss: Callable[[Any], Tensor] | None,
    fallback: str,
    calls: int,
    everyone: transport.Group,
) -> list[Findings]:
    """What each worker of the partition found: the model in one process, and a copy converted."""
    name, partition = type(model).__name__, given.partition
    converted: Any = distribute_module(copy, partition, fallback)
    layouts, arguments = given.layouts(), given.wholes()
    # here, since workers outside of the partition agree on spread tensors, too
    entered = [arguments.entered(layouts) for _ in range(calls)]
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
    everyone: transport.Group, model: nn.Module, given: Arguments, settings: Any, failure: str
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


def _merged(
    model: str, where: str, told: list[Findings], rtol: float | None, atol: float | None
) -> ModelReport:
    """The report of all workers: of each figure the largest."""
    # Workers have the same values and modules in the same order, since they ran the same calls.
    first = told[0]
    values = [worst(v.name, [each.values[k] for each in told]) for k, v in enumerate(first.values)]
    gradients = [each.scale for each in values if each.name.startswith("gradient")]
    largest = max(gradients, default=0.0)
    kinds = {str(dtype): value for dtype, value in TOLERANCES.items()}

    def allowed(each: Difference) -> Difference:
        usual = kinds.get(each.dtype, 0.0)
        is_exact = usual == 0.0  # whole numbers
        usual_scale = largest if each.name.startswith("gradient") else 1.0
        scale = max(each.scale, FLOOR * usual_scale)
        relative = 0.0 if is_exact else usual if rtol is None else rtol
        return replace(each, allowed=relative * scale + (0.0 if is_exact else atol or 0.0))

    modules = []
    for k, module in enumerate(first.modules):
        uses = [each.modules[k] for each in told]
        output = allowed(worst(module.name, [each.output for each in uses]))
        modules.append(ModuleUse.merged(output, uses))
    remarks = []
    wrong = any(each.differs for each in (*map(allowed, values), *(m.output for m in modules)))
    if wrong and all(each.dtype != "torch.float64" for each in values):
        remarks.append(
            "If this may be rounding, which norms of few values amplify, check with "
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
        tuple(first.attention),
    )
