"""Workers that do not come to where others wait for them: all learn of it within seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tessel
from tessel import Layout, LinearOperator, Move, nn
from tessel.transport import watch

Run = Callable[..., list[Any]]
SECONDS = 40  # of a call to the pool
SOON = 12.0  # seconds, on a machine that does much else
LOST = 1
IS_GLOO = os.environ.get("TESSEL_TRANSPORT") == "gloo"


def hurry() -> None:
    """Ask others sooner than users want it."""
    watch.PATIENCE, watch.TICK = 0.5, 0.2


class Fails(LinearOperator):
    """An operator of a user's, that fails on one worker."""

    def __init__(self, layout: Layout) -> None:
        self.domain = self.codomain = layout

    def _apply(self, x: Tensor) -> Tensor:
        if tessel.world().rank == LOST:
            raise KeyError("my own mistake")
        return x

    _apply_adjoint = _apply


def fail(*args: Any) -> Any:
    if tessel.world().rank == LOST:
        raise KeyError("my own mistake")


def summed(x: Tensor) -> Tensor:
    return nn.AllSumReduce(tessel.world(), [0])(x)


def skip_a_backward() -> None:
    for step in range(3):
        y = summed(torch.ones(3, requires_grad=True))
        if step != 1 or tessel.world().rank != LOST:
            y.sum().backward()


def skip_the_last_backward() -> None:
    y = summed(torch.ones(3, requires_grad=True))
    if tessel.world().rank != LOST:
        y.sum().backward()


def repeat_a_backward() -> None:
    y = summed(torch.ones(3, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    if tessel.world().rank == LOST:
        y.backward()
    summed(torch.ones(3))


def exchange_the_order_of_backwards() -> None:
    x = torch.ones(3, requires_grad=True)
    first, second = summed(x).sum(), summed(x).sum()
    order = (first, second) if tessel.world().rank == LOST else (second, first)
    for each in order:
        each.backward()


def skip_a_call() -> None:
    if tessel.world().rank != LOST:
        summed(torch.ones(3))
    nn.Broadcast(tessel.world().create_partition_inclusive([0]), tessel.world())(torch.ones(3))


def catch_in_an_operator() -> None:
    whole = Layout.whole(tessel.world(), (4,))
    move = Move(whole, whole)
    product = move @ Fails(whole) @ move
    try:
        product(torch.ones(4))
    except KeyError:
        time.sleep(SOON)  # it goes on with something else


def catch_in_a_hook() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    convolutions = [torch.nn.Conv1d(1, 1, 3, padding=1) for _ in range(2)]
    model = nn.distribute_module(torch.nn.Sequential(*convolutions), P)
    convolutions[0].register_forward_hook(fail)
    try:
        model(torch.ones(1, 1, 4))
    except KeyError:
        time.sleep(SOON)


def catch_in_a_hook_and_go_on() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    convolutions = [torch.nn.Conv1d(1, 1, 3, padding=1) for _ in range(2)]
    model = nn.distribute_module(torch.nn.Sequential(*convolutions), P)
    handle = convolutions[0].register_forward_hook(fail)
    try:
        model(torch.ones(1, 1, 4))
    except KeyError:
        handle.remove()
        model(torch.ones(1, 1, 4))  # whose first exchange is like the one that others wait in
    else:
        model(torch.ones(1, 1, 4))


def catch_in_a_backward_hook() -> None:
    x = torch.ones(3, requires_grad=True)
    y = summed(x)
    z = y * 2
    z.register_hook(fail)
    with contextlib.suppress(KeyError):
        summed(z).sum().backward()
    summed(torch.ones(3))


def catch_in_a_checkpoint() -> None:
    calls = []

    def part(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            fail()
        return summed(x)

    x = torch.ones(3, requires_grad=True)
    with contextlib.suppress(KeyError):
        checkpoint(part, x, use_reentrant=False).sum().backward()
    summed(torch.ones(3))


def catch_in_a_saved_tensor_hook() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (fail(), t)[1]):
        y = summed(x * x).sum()
    with contextlib.suppress(KeyError):
        y.backward()
    summed(torch.ones(3))


def fail_in_a_thread() -> None:
    y = summed(torch.ones(3, requires_grad=True)).sum()

    def work() -> None:
        with contextlib.suppress(KeyError):
            fail()
            y.backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    summed(torch.ones(3))


def fail_alone() -> None:
    summed(torch.ones(3))
    fail()
    summed(torch.ones(3))


def end_alone() -> None:
    summed(torch.ones(3))
    if tessel.world().rank != LOST:
        summed(torch.ones(3))


def gather_for_the_first() -> None:
    """Only the first worker has the result, and derives it."""
    W = tessel.world()
    layout = Layout.balanced(W, (4,))
    gathering = Move(layout, Layout.whole(W.create_partition_inclusive([0]), (4,)))
    for _ in range(20):
        y = gathering(torch.ones(2, requires_grad=True))
        if W.rank != LOST:
            y.sum().backward()


FAULTS: dict[Callable[[], None], tuple[str, ...]] = {  # and what each text has
    skip_a_backward: ("worker 0 waits in the backward of Move", "worker 1 waits in AllSumReduce"),
    skip_the_last_backward: ("program has ended",),
    repeat_a_backward: ("worker 0 waits in AllSumReduce", "worker 1 waits in the backward of Move"),
    exchange_the_order_of_backwards: ("worker 0 waits in the backward", "worker 1 waits in the"),
    catch_in_an_operator: ("KeyError: 'my own mistake'",),
    catch_in_a_hook: ("KeyError: 'my own mistake'",),
    catch_in_a_hook_and_go_on: ("KeyError: 'my own mistake'",),
    catch_in_a_backward_hook: ("worker 0 waits in the backward", "worker 1 waits in AllSumReduce"),
    catch_in_a_checkpoint: ("",),
    catch_in_a_saved_tensor_hook: ("",),
    fail_in_a_thread: ("",),
    end_alone: ("program has ended",),
    gather_for_the_first: ("",),
}


def meet(fault: Callable[[], None]) -> tuple[str, str, float]:
    """Make a mistake; what this worker hears of it, and when, and what it hears then."""
    tessel.world()
    hurry()
    begin = time.monotonic()
    try:
        fault()
        first = ""
    except (RuntimeError, ValueError) as error:
        first = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    if fault in (end_alone, skip_the_last_backward) and tessel.world().rank == LOST:
        return first, "", seconds
    try:
        summed(torch.ones(3))
        second = ""
    except RuntimeError as error:
        second = str(error)
    return first, second, seconds


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_all_learn_that_workers_do_not_do_the_same(run: Run, fault: Callable[[], None]) -> None:
    found = run(meet, fault, nprocs=2, timeout=SECONDS)
    first, later, seconds = found[0]
    assert first.startswith("WorkerLost"), found
    for text in FAULTS[fault]:
        assert text in first, first
    for text, later, _ in found[: 1 if fault in (end_alone, skip_the_last_backward) else 2]:
        assert "this job is broken since" in later, found
    assert seconds < SOON
    assert run(total, nprocs=2) == [3.0] * 2  # the next program has a job of its own


def total() -> float:
    return float(summed(torch.tensor(1.0 + tessel.world().rank)))
