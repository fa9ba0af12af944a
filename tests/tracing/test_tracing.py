"""`tessel.trace`: what is recorded, that it is all of it, and that nothing stays behind.

Tests `tracing/recorder.py`, `tracing/block.py`, `tracing/merged.py`, `tracing/clocks.py`,
`cli/trace.py`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import tessel
from tessel.cli import main as command
from tessel.cli.trace import loaded, read
from tessel.tracing import clocks, recorder
from tessel.tracing.merged import kind_of
from tessel.transport import ReceiveBuffer, SendBuffer

Run = Callable[..., list[Any]]
ROWS = recorder.ROWS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pool(self.first(x)))


def converted() -> tuple[nn.Module, torch.Tensor]:
    """A model, split along its third dimension, and this worker's part of an input."""
    torch.manual_seed(0)
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    model = tessel.nn.distribute_module(Net(), P)
    assert P.index is not None
    return model, torch.randn(2, 2, 24, 8).tensor_split(P.shape[2], 2)[P.index[2]]


def train(path: str, steps: int = 3, sleeper: int = -1, form: str = "plain") -> tuple[int, int]:
    """Trace some steps; the bytes that `count_traffic` has counted."""
    model, x = converted()
    call = model
    if form == "checkpoint":

        def call(part: torch.Tensor) -> torch.Tensor:
            return checkpoint(model, part.requires_grad_(), use_reentrant=False)

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tessel.trace(path), tessel.testing.count_traffic() as traffic:
        for step in range(steps):
            if step == 1 and tessel.world().rank == sleeper:
                time.sleep(0.3)
            call(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return traffic.bytes_sent, traffic.bytes_received


def events_of(path: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]


def check_form(path: Path, workers: int) -> dict[str, Any]:
    """Chrome's format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    trace: dict[str, Any] = json.loads(path.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[int, int], str] = {}
    for each in trace["traceEvents"]:
        assert each["ph"] in ("X", "M")
        assert isinstance(each["name"], str) and isinstance(each["args"], dict)
        assert each["pid"] in range(workers) and isinstance(each["tid"], int)
        if each["name"] == "thread_name":
            names[each["pid"], each["tid"]] = each["args"]["name"]
    for each in trace["traceEvents"]:
        if each["ph"] == "X":
            assert each["ts"] >= 0 and each["dur"] >= 0
            assert names[each["pid"], each["tid"]].startswith(each["cat"])
            assert each["cat"] == ROWS[each["tid"] % 10]
    return trace


def check_exclusive(path: Path) -> None:
    """Each moment of a worker is in one row, and all of its time is in some row."""
    trace = check_form(path, 99)
    for worker in {each["pid"] for each in trace["traceEvents"]}:
        own = [e for e in events_of(path) if e["pid"] == worker and e["tid"] < len(ROWS)]
        own.sort(key=lambda e: e["ts"])
        spent = sum(e["dur"] for e in own)
        lasted = max(e["ts"] + e["dur"] for e in own) - own[0]["ts"]
        # computing of less than 0.1 µs is not shown, and times have three digits after the point
        assert spent <= lasted + 1 and spent >= lasted - 0.2 * len(own)
        for one, other in pairwise(own):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01, (one, other)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("form", ["plain", "checkpoint"])
def test_a_trace_has_all_that_moves(run: Run, tmp_path: Path, workers: int, form: str) -> None:
    path = tmp_path / "run.json"
    counted = run(train, str(path), 3, -1, form, nprocs=workers, timeout=120)
    trace = check_form(path, workers)
    assert trace["tessel"]["workers"] == workers and not trace["tessel"]["missing"]
    check_exclusive(path)
    events = events_of(path)
    for worker, (sent, received) in enumerate(counted):
        own = [e for e in events if e["pid"] == worker]
        assert sum(e["args"].get("bytes_sent", 0) for e in own) == sent
        assert sum(e["args"].get("bytes_received", 0) for e in own) == received
        assert sum(sum(e["args"].get("sent", {}).values()) for e in own) == sent
    if workers == 1:
        assert {e["cat"] for e in events} == {"computing"}
        return
    # what one sends to another, the other receives from it
    for one, other in ((0, 1), (1, 0)):
        gone = sum(e["args"].get("sent", {}).get(str(other), 0) for e in events if e["pid"] == one)
        came = (e["args"].get("received", {}).get(str(one), 0) for e in events if e["pid"] == other)
        assert gone == sum(came) > 0
    moves = [e for e in events if e["cat"] == "moving"]
    layers = {(e["args"]["layer"], e["args"]["pass"]) for e in moves}
    passes = {"forward", "backward"}
    assert {("first.0", each) for each in passes} <= layers
    assert {("last", each) for each in passes} <= layers
    assert {("first.1", each) for each in passes} <= layers
    halo = next(e["args"] for e in moves if e["args"]["layer"] == "last" and e["args"]["kind"])
    assert halo["kind"] == "halo exchange" and "Layout" in halo["from"] != halo["to"]
    assert halo["by"] and halo["exchange"]
    names = {e["name"] for e in events if e["cat"] == "computing"}
    assert {"first.0", "SGD.step"} <= names
    assert any(name.endswith("(backward)") for name in names)


@pytest.mark.parametrize(
    "settings",
    [{"transport": "gloo"}, {"engine": "python"}, {"check": "1"}, {"test_hosts": "a,b,b"}],
    ids=str,
)
def test_on_other_ways(in_new_job: Run, tmp_path: Path, settings: dict[str, str]) -> None:
    path = tmp_path / "run.json"
    counted = in_new_job(train, str(path), 2, 1, nprocs=3, timeout=120, **settings)
    check_exclusive(path)
    events = events_of(path)
    for worker, (sent, _) in enumerate(counted):
        own = (e["args"].get("bytes_sent", 0) for e in events if e["pid"] == worker)
        assert sum(own) == sent
    waits = read(loaded(path)).waits
    assert waits[0][1] > 0.25 and waits[2][1] > 0.25
    ways = {e["args"]["by"] for e in events if e["cat"] == "moving"}
    wanted = {"transport": "gloo", "engine": "shared memory", "check": "engine"}
    wanted["test_hosts"] = "messages of gloo"
    assert any(wanted[next(iter(settings))] in way for way in ways), ways


def test_a_sleeper_is_waited_for(run: Run, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.json"
    run(train, str(path), 3, 1, nprocs=3, timeout=120)
    found = read(loaded(path))
    for worker in (0, 2):
        assert found.waits[worker][1] > 0.25
        waits = [e for e in events_of(path) if e["pid"] == worker and e["cat"] == "waiting"]
        assert any(e["args"]["worker"] == 1 and e["dur"] > 2.5e5 for e in waits)  # in one piece
    # every wait is in the table, and in the rows
    for worker in found.workers:
        assert sum(found.waits[worker].values()) == pytest.approx(found.rows[worker]["waiting"])
    slept = [e for e in events_of(path) if e["pid"] == 1 and e["cat"] == "computing"]
    assert max(e["dur"] for e in slept) > 2.9e5
    picture = tmp_path / "run.png"
    assert command(["trace", str(path)]) == 0
    printed = capsys.readouterr()
    assert "who waits for whom" in printed.out and str(picture) in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert command(["trace", str(path), "--json", "--no-picture"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["waits"]["0"]["1"] == pytest.approx(found.waits[0][1])


def originals() -> list[Any]:
    """What a trace replaces, as it is now."""
    own = [kind.__dict__[name] for kind, name, _ in recorder._WRAPPED]
    modules = torch.nn.modules.module
    steps = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    hooks = modules._global_forward_hooks, modules._global_forward_pre_hooks, *steps
    return [*own, *map(len, hooks)]


def look(path: str) -> bool:
    before = originals()
    model, x = converted()
    with tessel.trace(path):
        during = originals()
        model(x)
    with pytest.raises(ZeroDivisionError), tessel.trace(path):
        1 / 0  # noqa: B018
    after = originals()
    functions = len(recorder._WRAPPED)
    pairs = zip(before[:functions], during[:functions], after[:functions], strict=True)
    is_put_back = all(a is c and a is not b for a, b, c in pairs)
    return is_put_back and before[functions:] == after[functions:] == [0] * 4


@pytest.mark.parametrize("workers", [1, 2])
def test_off_is_as_before(run: Run, tmp_path: Path, workers: int) -> None:
    assert all(run(look, str(tmp_path / "run.json"), nprocs=workers))


def profiled(path: str) -> set[str]:
    model, x = converted()
    with tessel.trace(path), torch.profiler.profile() as profile:
        model(x).sum().backward()
    return {each.key for each in profile.key_averages() if each.key.startswith("tessel")}


def test_profilers_see_it(run: Run, tmp_path: Path) -> None:
    for names in run(profiled, str(tmp_path / "run.json"), nprocs=2, timeout=120):
        assert {"tessel computing first.0", "tessel moving first.0", "tessel packing last"} <= names
        assert "tessel agreeing Net" in names


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the middle")


def ranges_of_nvtx(path: str) -> tuple[list[str], bool, bool]:
    """The ranges that Nsight would show, as if there were a GPU, and whether all of them end."""
    pushed: list[str] = []
    left: list[str] = []
    depths: list[int] = []

    def push(name: str) -> None:
        pushed.append(name)
        left.append(name)

    model, x = converted()
    failing = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Fails()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.nvtx, "range_push", push)
        patch.setattr(torch.cuda.nvtx, "range_pop", left.pop)
        with tessel.trace(path + ".without"):
            model(x).sum().backward()
        without = torch.cuda.is_available() or not pushed
        pushed.clear()
        real = recorder.switch_on

        def as_with_gpu(limit: int) -> Any:
            found = real(limit)
            found.has_nvtx = True
            return found

        patch.setattr(recorder, "switch_on", as_with_gpu)
        with tessel.trace(path):
            model(x).sum().backward()
            depths.append(len(left))
            for _ in range(2):
                with pytest.raises(ArithmeticError):
                    failing(torch.ones(2, 3))
                depths.append(len(left))
            with pytest.raises(ValueError, match="the shape differs"):
                tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(2 + tessel.world().rank))
            depths.append(len(left))
        with pytest.raises(ArithmeticError), tessel.trace(path + ".again"):
            failing(torch.ones(2, 3))
        depths.append(len(left))
    return pushed, without, depths == [0] * 5


def test_ranges_of_nvtx_are_balanced(run: Run, tmp_path: Path) -> None:
    for names, without, balanced in run(ranges_of_nvtx, str(tmp_path / "run.json"), nprocs=2):
        assert without and balanced
        shown = {"tessel computing first.0", "tessel moving first.0", "tessel packing last"}
        assert shown <= {*names}
        assert names.count("tessel computing 1.1") == 3


def on_devices(path: str) -> tuple[int, int]:
    """What movements of GPUs call, with tensors that Gloo takes as well."""
    group, rank = tessel.world().group, tessel.world().rank
    with tessel.trace(path), tessel.testing.count_traffic() as traffic:
        total = torch.full((6,), 1.0 + rank)
        group.all_reduce(total)()
        assert total.tolist() == [6.0] * 6
        totals = torch.full((3,), 1.0 + rank), torch.full((2, 2), 2.0 * rank)
        group.all_reduce(*totals)()  # in one launch of NCCL
        assert [each.unique().tolist() for each in totals] == [[6.0], [6.0]]
        rows = group.all_gather(torch.full((2,), float(rank)), torch.full((1,), -1.0 - rank))
        assert [each[:, 0].tolist() for each in rows] == [[0.0, 1.0, 2.0], [-1.0, -2.0, -3.0]]
        sends = [
            SendBuffer(other, torch.full((2,), float(rank))) for other in range(3) if other != rank
        ]
        places = [ReceiveBuffer(other, torch.empty(2)) for other in range(3) if other != rank]
        came = group.bring(sends, places, torch.device("cpu"))
        assert [each[0].item() for each in came] == [w for w in range(3) if w != rank]
    return traffic.bytes_sent, traffic.bytes_received


def test_ways_of_devices_are_traced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for worker, counted in enumerate(run(on_devices, str(path), nprocs=3)):
        own = [e["args"] for e in events_of(path) if e["pid"] == worker]
        for name, number in zip(("bytes_sent", "bytes_received"), counted, strict=True):
            assert sum(each.get(name, 0) for each in own) == number > 0
        assert "all-reduce of gloo" in {each.get("by", "") for each in own}


def into_tensors(path: str) -> None:
    world = tessel.world()
    P = world.create_cartesian_topology_partition([world.size])
    layout = tessel.Layout.balanced(P, (2 * world.size,))
    move, out = tessel.Move(layout, layout.grow([(1, 1)])), torch.empty(2 + 1)
    x = torch.full((2,), float(world.rank or 0))
    with tessel.trace(path):
        y = move(x)
        assert move(x, out=out) is out
    assert torch.equal(y, out)


def test_movements_into_tensors_are_traced(run: Run, tmp_path: Path) -> None:
    run(into_tensors, str(tmp_path / "run.json"), nprocs=2)
    own = [each for each in events_of(tmp_path / "run.json") if each["pid"] == 0]
    args = [each["args"] for each in own if each["cat"] == "moving"]
    (kind, sent), written = [(each["kind"], each["bytes_sent"]) for each in args]
    assert (kind, sent) == written == ("halo exchange", 4)
    check_exclusive(tmp_path / "run.json")


def nested(folder: str) -> None:
    model, x = converted()
    with tessel.trace(f"{folder}/outer.json"):
        model(x)
        with tessel.trace(f"{folder}/inner.json"):
            model(x)
        model(x)
    model(x)


def test_traces_lie_in_each_other(run: Run, tmp_path: Path) -> None:
    run(nested, str(tmp_path), nprocs=2)

    def num_halos(name: str) -> int:
        events = events_of(tmp_path / name)
        moves = (e["args"] for e in events if e["cat"] == "moving" and e["pid"] == 0)
        return sum(each["layer"] == "last" for each in moves)

    assert num_halos("outer.json") == 3 * num_halos("inner.json") > 0
    check_exclusive(tmp_path / "inner.json")


def raising(path: str, who: tuple[int, ...]) -> str:
    model, x = converted()
    try:
        with tessel.trace(path):
            model(x)
            if tessel.world().rank in who:
                raise KeyError("data")
            model(x)
            model(x)
    except (KeyError, tessel.WorkerLost) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_of_all_leaves_what_there_is(run: Run, tmp_path: Path, workers: int) -> None:
    path = tmp_path / "run.json"
    assert run(raising, str(path), tuple(range(workers)), nprocs=workers) == ["KeyError"] * workers
    trace = check_form(path, workers)
    assert not trace["tessel"]["missing"]
    assert {e["pid"] for e in events_of(path)} == {*range(workers)}
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    run(train, str(path), nprocs=workers)  # and the next one works


def one_leaves(path: str) -> str:
    """Worker 1 leaves the block by an exception, and goes on with another call."""
    P = tessel.world()
    with pytest.raises(ValueError) as error:
        if P.rank == 1:
            with pytest.raises(KeyError), tessel.trace(path):
                raise KeyError("data")
            tessel.spread(torch.ones(2), P)
        else:
            with tessel.trace(path):
                pass
    return str(error.value)


def test_a_worker_that_leaves_alone_is_named_on_all(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    begin = time.monotonic()
    one, other = run(one_leaves, str(path), nprocs=2)
    assert time.monotonic() - begin < 20.0  # nobody waits for a time limit
    assert one == other and "worker 0 calls the end of tessel.trace" in one
    assert "worker 1 calls tessel.spread" in one
    assert {*read(loaded(path)).workers} == {0, 1}  # each has written its part
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    run(train, str(path), nprocs=2)  # and the next one works


def dying(path: str) -> str:
    model, x = converted()
    model(x)
    tessel.world().group.share_objects(None)
    try:
        with tessel.trace(path):
            model(x)
            if tessel.world().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(x)
    except tessel.WorkerLost as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.ends_workers
def test_a_worker_that_dies_leaves_the_part_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(tessel.WorkerLost, match="worker 1"):
        tessel.launch(dying, 3, str(path), timeout=120)
    trace = check_form(path, 3)
    assert trace["tessel"]["missing"] == [1]
    found = read(loaded(path))
    assert found.workers == (0, 2)
    assert found.waits[0].get(1, 0.0) > 0  # in vain


def too_many(path: str) -> list[str]:
    model, x = converted()
    with pytest.warns(UserWarning) as seen, tessel.trace(path, limit=40):
        for _ in range(4):
            model(x)
    return [str(each.message) for each in seen]


def test_a_limit_is_said(run: Run, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.json"
    for texts in run(too_many, str(path), nprocs=2):
        assert any("left out" in text and "limit" in text for text in texts)
    trace = check_form(path, 2)
    assert all(number > 0 for number in trace["tessel"]["left_out"].values())
    assert command(["trace", str(path), "--no-picture"]) == 0
    assert "left out" in capsys.readouterr().out


def in_threads(path: str) -> None:
    model, x = converted()
    other, y = converted()
    with tessel.trace(path):
        model(x)
        thread = threading.Thread(target=lambda: other(y))
        thread.start()
        thread.join()
        model(x)


def test_threads_have_rows_of_their_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(in_threads, str(path), nprocs=2)
    trace = check_form(path, 2)
    rows = {each["tid"] // 10 for each in trace["traceEvents"] if each["ph"] == "X"}
    assert rows == {0, 1}
    check_exclusive(path)


def compiled(path: str) -> tuple[int, int]:
    P = tessel.world()
    move = tessel.nn.HaloExchange(P, [(1, 1)])
    function = torch.compile(lambda x: move(x).sin(), backend="aot_eager", fullgraph=True)
    x = torch.ones(6, requires_grad=True)
    function(x).sum().backward()  # compiled before the trace begins, and called in it
    with tessel.trace(path), tessel.testing.count_traffic() as traffic:
        function(x).sum().backward()
        again = torch.compile(lambda x: move(x).cos(), backend="aot_eager", fullgraph=True)
        again(x).sum().backward()  # compiled in it
    function(x)
    return traffic.bytes_sent, traffic.bytes_received


def test_compiled_modules_say_nothing_of_hooks(tmp_path: Path, recwarn: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    function = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = function(torch.ones(2, 3))
    before = list(warnings.filters)
    with tessel.trace(tmp_path / "run.json"):
        assert torch.equal(function(torch.ones(2, 3)), expected)
        function(torch.ones(4, 3)).sum().backward()
    assert warnings.filters == before
    assert not [each for each in recwarn if "hooks" in str(each.message)]
    names = {e["args"]["layer"] for e in events_of(tmp_path / "run.json")}
    assert "Sequential" in names


def test_compiled_code_is_traced(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    counted = run(compiled, str(path), nprocs=2, timeout=240)
    assert counted[0][0] > 0
    for worker, (sent, received) in enumerate(counted):
        own = [e["args"] for e in events_of(path) if e["pid"] == worker]
        assert sum(each.get("bytes_sent", 0) for each in own) == sent
        assert sum(each.get("bytes_received", 0) for each in own) == received


def refused(folder: str) -> list[str]:
    texts = []
    rank = tessel.world().rank
    for path, limit in ((f"{folder}/{rank}.json", 10), (f"{folder}/no/x", 10), (folder, 10)):
        with pytest.raises(ValueError) as error, tessel.trace(path, limit=limit):
            raise AssertionError
        texts.append(str(error.value))
    with pytest.raises(ValueError, match="limit must be 1 or more"):
        tessel.trace(f"{folder}/x", limit=0).__enter__()
    return texts


def test_nonsense_raises_on_all(run: Run, tmp_path: Path) -> None:
    one, other = run(refused, str(tmp_path), nprocs=2)
    assert one == other
    assert "same path" in one[0] and "no folder" in one[1] and "is a folder" in one[2]


def test_files_that_are_no_traces(tmp_path: Path, capsys: Any) -> None:
    wrong = tmp_path / "wrong.json"
    for content in ("{", "{}", "[1]"):
        wrong.write_text(content)
        assert command(["trace", str(wrong)]) == 2
        assert "is not a trace" in capsys.readouterr().err
    assert command(["trace", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("true", [0, -7_000_000, 3 * 10**12])
def test_offsets_of_clocks(true: int) -> None:
    """With delays of 1 µs to 1 ms each way, the offset is known to half of the shortest trip."""
    generator = torch.Generator().manual_seed(1)
    first, own, now = [], [], 10**9
    for _ in range(clocks.ROUNDS):
        delays = (torch.rand(4, generator=generator) * 1e6 + 1e3).long().tolist()
        came = now, now + delays[0]
        both = max(came)  # when the last has come
        gone = both + delays[1] // 10, both + delays[2] // 10
        first.append((came[0], gone[0]))
        own.append((came[1] - true, gone[1] - true))
        now = max(gone) + delays[3]
    narrowest = min(gone[1] - came[0] for came, gone in zip(first, first, strict=True))
    assert abs(clocks.offset(first, own) - true) <= narrowest


def on_two_hosts(path: str) -> int:
    """The second worker pretends to be on another host, whose clock shows something else."""
    rank, shift = tessel.world().rank, 5 * 10**9
    own, membership = time.monotonic_ns, tessel.world().group._membership
    processes = membership.processes
    hosts = [type(each)(f"host{w}", each.pid, each.born) for w, each in enumerate(processes)]
    try:
        membership.processes = hosts
        if rank == 1:
            time.monotonic_ns = recorder._now = lambda: own() + shift
        train(path, 2, 1)
    finally:
        time.monotonic_ns = recorder._now = own
        membership.processes = processes
    return shift


def test_clocks_of_two_hosts_are_compared(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    shift = run(on_two_hosts, str(path), nprocs=2, timeout=120)[0]
    offsets = json.loads(path.read_text())["tessel"]["clock_offsets_ns"]
    assert len(offsets["1"]) == 2  # at the beginning and at the end
    for _, offset in offsets["1"]:
        assert abs(offset + shift) < 5e7
    assert read(loaded(path)).waits[0][1] > 0.2
    waits = [e["dur"] for e in events_of(path) if e["cat"] == "waiting"]
    assert max(waits) < 4.5e6  # and not five seconds, by which the clocks differ


def test_kinds_of_movements() -> None:
    P = tessel.world()
    layout = tessel.Layout.balanced(P, (4,))
    assert kind_of(tessel.Move(layout, layout)) == "repartition"


SCRIPT = """
import os, signal, sys, tessel, time, torch
from tessel.tracing import block
x = tessel.spread(torch.arange(12.0), tessel.world())
print(float(x.sum()))
if {"fail", "asleep", "writing"} & {*sys.argv}:
    if tessel.world().rank == 1:
        raise KeyError("data")
    if "asleep" in sys.argv:  # until the launcher ends it
        time.sleep(100)
    if "writing" in sys.argv:  # when the launcher ends it
        write = block.write
        def write_late(path, content):
            os.kill(os.getpid(), signal.SIGTERM)
            write(path, content)
        block.write = write_late
x.sum()
if "leave" in sys.argv:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("ending", ["", "fail", "asleep", "writing", "leave"])
def test_run_traces_a_program(tmp_path: Path, ending: str) -> None:
    """When a worker fails the launcher ends the others, which still write what they have."""
    from scripts import python

    (tmp_path / "script.py").write_text(SCRIPT)
    path = tmp_path / "run.json"
    arguments = ("run", "-n", "2", "--trace", "run.json", "script.py", ending)
    ended = python("-m", "tessel", *arguments, cwd=tmp_path, timeout=120)
    assert (ended.returncode != 0) == (ending in ("fail", "asleep", "writing")), ended.stderr
    trace = check_form(path, 2)
    assert not trace["tessel"]["missing"]
    kinds = {(e["pid"], e["cat"]) for e in events_of(path)}
    assert {(0, "moving"), (1, "moving"), (0, "computing"), (0, "agreeing")} <= kinds
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.json", "script.py"]


def test_run_refuses_a_place_that_is_none(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command(["run", "--trace", str(tmp_path / "no" / "run.json"), "script.py"])
    assert "there is no folder" in capsys.readouterr().err
