"""Workers that do not come to where others wait for them: all learn of it within seconds.

Tests `transport/watch.py`, `transport/board.py`, `endings.py`, `limits.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tessel
from tessel import Layout, LinearOperator, Move, endings, nn
from tessel.transport import job, watch

Run = Callable[..., list[Any]]
SECONDS = 40  # of a call to the pool
SOON = 12.0  # seconds, on a machine that does much else
LOST = 1


def hurry() -> None:
    """Ask others sooner than users want it."""
    watch.SECONDS_BEFORE_ASKING, watch.TICK = 0.25, 0.1


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


def do_something_else() -> None:
    """Work without the others, who wait, until they have noticed."""
    end = time.monotonic() + SOON / 3
    while not job._job().membership.watch.alarm[0] and time.monotonic() < end:
        time.sleep(0.05)


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


def catch_in_an_operator() -> None:
    whole = Layout.whole(tessel.world(), (4,))
    move = Move(whole, whole)
    product = move @ Fails(whole) @ move
    try:
        product(torch.ones(4))
    except KeyError:
        do_something_else()


def convolutions() -> torch.nn.Sequential:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    layers = [torch.nn.Conv1d(1, 1, 3, padding=1) for _ in range(2)]
    return nn.distribute_module(torch.nn.Sequential(*layers), P)


def catch_in_a_hook() -> None:
    model = convolutions()
    model[0].register_forward_hook(fail)
    try:
        model(torch.ones(1, 1, 4))
    except KeyError:
        do_something_else()


def catch_in_a_hook_and_go_on() -> None:
    model = convolutions()
    handle = model[0].register_forward_hook(fail)
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


def load_instead_of_a_backward() -> None:
    """Workers agree at the end of a block of Tessel's, in which Python's own code is called."""
    y = summed(torch.ones(3, requires_grad=True))
    if tessel.world().rank == LOST:
        y.sum().backward()
    else:
        tessel.load("nowhere")


def gather_for_the_first() -> None:
    """Only the first worker has the result, and derives it."""
    W = tessel.world()
    layout = Layout.balanced(W, (4,))
    gathering = Move(layout, Layout.whole(W.create_partition_inclusive([0]), (4,)))
    for _ in range(20):
        y = gathering(torch.ones(2, requires_grad=True))
        if W.rank != LOST:
            y.sum().backward()


CRASH = "KeyError: 'my own mistake'"
WAITS = "worker 0 waits in the backward of Move", "worker 1 waits in AllSumReduce"
ENDED = ("its program has ended",)
FAULTS: dict[Callable[[], None], tuple[str, ...]] = {  # and what is said of each
    skip_a_backward: WAITS,
    skip_the_last_backward: ENDED,
    repeat_a_backward: ("worker 0 waits in AllSumReduce", "worker 1 waits in the backward of Move"),
    exchange_the_order_of_backwards: (WAITS[0], "worker 1 waits in the backward of Move"),
    catch_in_an_operator: (CRASH, "worker 0 waits in Move", "(call 2, test_waiting.py:"),
    catch_in_a_hook: (CRASH, "worker 0 waits in Conv1d"),
    catch_in_a_hook_and_go_on: (CRASH,),
    catch_in_a_backward_hook: WAITS,
    catch_in_a_checkpoint: WAITS,
    catch_in_a_saved_tensor_hook: WAITS,
    fail_in_a_thread: WAITS,
    end_alone: ENDED,
    load_instead_of_a_backward: ("worker 0 waits in tessel.load (call 2, test_waiting.py:",),
    gather_for_the_first: ("call 1",),
}
ALONE = (end_alone, skip_the_last_backward)  # where the lost worker makes no further call
CASES = [("shared", "compiled", each) for each in FAULTS]
CASES += [("shared", "python", each) for each in (skip_a_backward, catch_in_a_hook_and_go_on)]
CASES += [("shared", "python", gather_for_the_first)]
CASES += [("gloo", "compiled", each) for each in FAULTS if each not in (catch_in_a_checkpoint,)]


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
    if fault in ALONE and tessel.world().rank == LOST:
        return first, "", seconds
    try:
        summed(torch.ones(3))
        second = ""
    except RuntimeError as error:
        second = str(error)
    return first, second, seconds


@pytest.mark.parametrize(("way", "engine", "fault"), CASES)
def test_all_learn_that_workers_do_not_do_the_same(
    run: Run, in_new_job: Run, way: str, engine: str, fault: Callable[[], None]
) -> None:
    found = in_new_job(meet, fault, nprocs=2, timeout=SECONDS, transport=way, engine=engine)
    first, _, seconds = found[0]
    assert first.startswith("WorkerLost"), found
    for text in FAULTS[fault]:
        assert text in first, first
    for _, later, _ in found[: 1 if fault in ALONE else 2]:
        assert "this job is broken since" in later, found
    assert seconds < SOON
    assert run(total, nprocs=2) == [3.0] * 2  # the next program has a job of its own


def raise_in_a_worker(fault: Callable[[], None]) -> None:
    hurry()
    fault()


def test_the_first_exception_is_raised_and_told_to_the_others(in_new_job: Run) -> None:
    with pytest.raises(KeyError, match="my own mistake") as caught:
        in_new_job(raise_in_a_worker, fail_alone, nprocs=2, timeout=SECONDS, transport="shared")
    notes = "\n".join(caught.value.__notes__)
    assert "worker 0 failed with tessel.errors.WorkerLost" in notes, notes
    assert "its program ended by KeyError: 'my own mistake'" in notes, notes


def be_slow(seconds: float) -> tuple[float, list[str]]:
    """One worker computes; what the other says of it meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tessel")
    logger.addHandler(handler)
    P = tessel.world()
    first, second = P.create_partition_inclusive([0, 1]), P.create_partition_inclusive([1, 2])
    hurry()
    try:
        if P.rank == 2:
            time.sleep(seconds)
        # worker 0 waits for worker 1, which waits in another group, for one that computes
        if second.active:
            nn.AllSumReduce(second, [0])(torch.ones(1))
        if first.active:
            nn.AllSumReduce(first, [0])(torch.ones(1))
        y = summed(torch.ones(3, requires_grad=True)).sum()
        y.backward()
        return float(y), said
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_slow_is_not_wrong(in_new_job: Run, way: str) -> None:
    found = in_new_job(be_slow, 3.0, nprocs=3, timeout=SECONDS, transport=way, log="info")
    assert [value for value, _ in found] == [9.0] * 3
    assert any("worker 2 is still computing" in text for text in found[1][1]), found
    assert any("worker 1 has waited" in text for text in found[1][1]), found


def raise_alike() -> list[float]:
    """All workers raise, inside of calls that they agreed on, and go on."""
    whole = Layout.whole(tessel.world(), (4,))
    found = []
    for _ in range(3):
        with contextlib.suppress(KeyError):
            (Move(whole, whole) @ FailsOnAll(whole))(torch.ones(4))
        with contextlib.suppress(ValueError):
            summed(torch.ones(3, dtype=[torch.float32, torch.int32][tessel.world().rank]))
        found.append(float(summed(torch.ones(1))))
    return found


class FailsOnAll(LinearOperator):
    """An operator that fails on all workers."""

    def __init__(self, layout: Layout) -> None:
        self.domain = self.codomain = layout

    def _apply(self, x: Tensor) -> Tensor:
        raise KeyError("our mistake")

    _apply_adjoint = _apply


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_what_all_workers_raise_breaks_nothing(in_new_job: Run, way: str) -> None:
    found = in_new_job(raise_alike, nprocs=2, timeout=SECONDS, transport=way)
    assert found == [[2.0] * 3] * 2


def total() -> float:
    return float(summed(torch.tensor(1.0 + tessel.world().rank)))


def do_nothing() -> None:
    tessel.world().prepare()


def begin_late() -> list[float]:
    """An exchange with a worker that has ended the program before, and begins this one late."""
    x = torch.ones(3)
    total = tessel.nn.AllSumReduce(tessel.world(), [0])
    found = [float(total(x)[0])]
    host = job._current.membership.host  # type: ignore[union-attr]
    assert host is not None
    if tessel.world().rank == 1:
        host.leave(after=endings.program - 1)
        time.sleep(3.0)  # longer than the others wait before they ask
        host.leave(after=0)
    return [*found, float(total(x)[0])]


def test_a_worker_that_begins_late_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_TRANSPORT", "shared")  # whose memory says who has left
    run(do_nothing, nprocs=3)  # a new job after it, with memory of its own
    run(do_nothing, nprocs=2)  # the program before
    assert run(begin_late, nprocs=2) == [[2.0, 2.0]] * 2
