"""The fourth demo: a step of a classifier whose classes are split over the workers."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from tessel.cli.demos.report import (
    Report,
    Say,
    TableColumns,
    as_share,
    largest,
    of_processes,
    worst_of,
)
from tessel.core.partition import world
from tessel.examples import classes
from tessel.nn import ParallelLinear
from tessel.operators.units import num_bytes
from tessel.testing import count_memory, count_traffic

TITLE = "a step of a classifier"
LIMIT = 1e-12  # of the loss, and of gradients relative to the largest
STEPS = (TITLE,)
FEATURES, SAMPLES = 64, 64

Holding = tuple[int, int, int]  # classes, bytes of the head, and peak bytes made by a step


def run(size: int, note: Say) -> list[Report]:
    """Run on every worker; return the report on the first."""
    P = world()
    settings = classes.Settings(
        classes=100 * size + 1,  # so that the head is the largest layer, and splits unevenly
        features=FEATURES,
        samples=SAMPLES,
        dtype=torch.float64,
    )
    x, target = classes.make_data(settings)
    alone = classes.make_model(x.shape[1], replace(settings, is_split=False))
    split = classes.make_model(x.shape[1], settings)
    # the first worker runs alone while the others wait, so that it measures the time of one process
    expected = measured(alone, x, target) if P.rank == 0 else None
    P.group.share_objects(None)
    loss, whole, _, before = expected or measured(alone, x, target)
    found, holding, bytes_sent, after = measured(split, x, target)
    assert isinstance(split.head, ParallelLinear)
    layouts = {f"head.{name}": layout for name, layout in split.head.layouts.items()}
    errors = [0.0]  # of this worker's gradients, relative to the largest value of each
    for (name, p), q in zip(split.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        part = layouts[name].local_part(q.grad) if name in layouts else q.grad
        errors.append(largest(p.grad - part) / largest(q.grad))
    mine = largest(found - loss) / largest(loss), worst_of(errors), holding, bytes_sent
    of_loss, of_gradients, holdings, sent = zip(*P.group.share_objects(mine), strict=True)
    note(TITLE)
    if P.rank != 0:
        return []
    columns: TableColumns = {
        "classes": str,
        "head": num_bytes,
        "share": as_share,
        "in a step": num_bytes,
    }
    rows = [(count, head, head / whole[1], peak) for count, head, peak in (whole, *holdings)]
    return [
        Report(
            TITLE,
            f"with {settings.classes} classes, of {SAMPLES} samples",
            {"loss": worst_of(of_loss), "gradients of all parameters": worst_of(of_gradients)},
            LIMIT,
            *of_processes(columns, rows[0], rows[1:], sent, (before, after)),
            legend="in a step: peak memory of logits, gradients and all other tensors that it "
            "creates\n",
            is_wrong=sum(head for _, head, _ in holdings) != whole[1],  # shards are the whole head
        )
    ]


def measured(
    model: classes.Classifier, x: Tensor, target: Tensor
) -> tuple[Tensor, Holding, int, float]:
    """Measure a step: its loss, memory, bytes sent, and time."""
    for _ in range(2):  # the first time, layouts are agreed on and cached
        model.zero_grad()
        begin = time.perf_counter()
        with count_traffic() as traffic:
            _, loss = classes.step(model, x, target)
        seconds = time.perf_counter() - begin
    # Separately, since counting takes time.
    model.zero_grad()
    with count_memory() as memory:
        classes.step(model, x, target)
    weight, bias = model.head.parameters()
    holding = len(weight), weight.nbytes + bias.nbytes, memory.peak
    return loss.detach(), holding, traffic.bytes_sent, seconds
