"""What a training step asks of a GPU: launches, copies, waits and NCCL calls, beside torch's own.

Workers with NCCL train a ResNet-18 and a 3-D U-Net in slabs. One step is recorded by torch's
profiler: kernel launches, copies and fills, waits of the host for the device, NCCL kernels, and the
host's time until the step is queued, with what NCCL's calls and waits for others take of it, and
its time where the model is compiled, where its passes are CUDA graphs by
`torch.cuda.make_graphed_callables`, and where the whole step was captured in one. If
there are fewer GPUs than workers, each worker counts as a host of its own and they share GPUs: the
counts are real, the times are not, unless CUDA's Multi-Process Service lets kernels of several
processes run at once (`nvidia-cuda-mps-control -d`).

Where there is no GPU, what Python does is measured on the CPU, with images that are divided and
narrow models, so that it is most of a step: processor time, also of waits for others,
calls of functions in Python and in C, and steps of Python's interpreter.

With --mixed models and images have their channels last in memory, and compute in bfloat16 by
autocast, as is usual on GPUs.

    python benchmarks/launches.py [--workers 2] [--names] [--host] [--divide 8] [--mixed]
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import tessel
from tessel.transport import Group

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "common"))
import models  # (the same models as in the tests)

MODELS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "ResNet-18 8×3×512×512": ("ResNet18", (64, 1000), (8, 3, 512, 512)),
    "3-D U-Net 128×128×128": ("UNet", (3, 16), (1, 1, 128, 128, 128)),
}
KINDS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies, fills": ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaMemcpy", "cudaMemset"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
COLUMNS = (*KINDS, "NCCL", "host ms", "of it others", "compiled ms", "graphed ms", "captured ms")
LIMIT = 300.0  # seconds for one job
NARROW: dict[str, tuple[int, ...]] = {"ResNet18": (4, 10), "UNet": (3, 2)}  # for a CPU


def step_of(
    name: str,
    alone: bool,
    divisor: int = 1,
    way: str = "eager",
    device: str = "cuda",
    mixed: bool = False,
) -> Callable[[], None]:
    """A training step of torch's own model, or of this worker's part."""
    kind, arguments, shape = MODELS[name]
    if device == "cpu":
        arguments = NARROW[kind]
        # a part alone is as large as that of a worker among two
        shape = (*shape[:2], shape[2] // 2, *shape[3:]) if alone else shape
    shape = (*shape[:2], *(length // divisor for length in shape[2:]))
    torch.manual_seed(0)
    model, x = getattr(models, kind)(*arguments), torch.randn(shape)
    if not alone:
        P = tessel.world().create_cartesian_topology_partition(
            [1, 1, tessel.world().size, *[1] * (len(shape) - 3)]
        )
        model = tessel.nn.distribute_module(model, P)
        x = tessel.Layout.balanced(P, shape).local_part(x).clone()
    model, x = model.to(device), x.to(device)
    if mixed:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=last), x.contiguous(memory_format=last)
    if way == "compiled":
        model.compile()
    elif way == "graphed":
        model = torch.cuda.make_graphed_callables(model, (x.clone(),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()

    return step


def captured(step: Callable[[], None]) -> float:
    """The host's seconds for a step that was captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # as torch asks for it
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def queued(step: Callable[[], None]) -> float:
    """The host's seconds until a step is queued."""
    for _ in range(4):
        step()
    seconds = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def on_host(step: Callable[[], None]) -> str:
    """Where Python spends the time of a step."""
    seen = cProfile.Profile()
    torch.cuda.synchronize()
    with seen:
        for _ in range(5):
            step()
    text = io.StringIO()
    pstats.Stats(seen, stream=text).sort_stats("tottime").print_stats(45)
    return text.getvalue()


def waited(step: Callable[[], None]) -> float:
    """Seconds of a step that the host spends in NCCL's calls and in waits for other workers."""
    seconds = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)

        return call

    places = [(dist, "all_to_all_single"), (dist, "all_reduce"), (Group, "share")]
    kept = [getattr(place, name) for place, name in places]
    for (place, name), function in zip(places, kept, strict=True):
        setattr(place, name, timed(function))
    try:
        torch.cuda.synchronize()
        step()
    finally:
        for (place, name), function in zip(places, kept, strict=True):
            setattr(place, name, function)
    return sum(seconds)


def counts(
    name: str, alone: bool, divisor: int = 1, mixed: bool = False
) -> tuple[dict[str, float], Counter[str], str]:
    """What one step asks for, and the names of kernels and operators, by how often they occur."""
    step = step_of(name, alone, divisor, mixed=mixed)
    host = queued(step)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    names: Counter[str] = Counter()
    for event in recorded.events():
        names[event.name] += 1
    found: dict[str, float] = {kind: sum(names[each] for each in of) for kind, of in KINDS.items()}
    # the profiler itself waits for the device at its end
    found["waits"] = max(0, found["waits"] - _ends(recorded))
    found["NCCL"] = sum(number for each, number in names.items() if each.startswith("ncclDev"))
    found["host ms"] = 1e3 * host
    found["of it others"] = 1e3 * waited(step)
    where = on_host(step)
    for way in ("compiled", "graphed"):
        found[f"{way} ms"] = 1e3 * queued(step_of(name, alone, divisor, way, mixed=mixed))
    found["captured ms"] = 1e3 * captured(step)
    return found, names, where


def _ends(recorded: Any) -> int:
    """How often the host waited after the step: by the profiler's own end."""
    last = max(e.time_range.start for e in recorded.events() if e.name in KINDS["launches"])
    waits = KINDS["waits"]
    return sum(e.name in waits and e.time_range.start > last for e in recorded.events())


def on_processor(name: str, alone: bool, divisor: int) -> dict[str, float]:
    """What Python does in one step on a CPU."""
    torch.set_num_threads(1)
    step = step_of(name, alone, divisor, device="cpu")
    for _ in range(6):
        step()
    counted: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: counted.update([event]))
    step()
    sys.setprofile(None)

    def note(frame: Any, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted[event] += event == "opcode"
        return note

    sys.settrace(note)
    step()
    sys.settrace(None)
    seconds = []
    for _ in range(60):
        begin = time.thread_time()
        step()
        seconds.append(time.thread_time() - begin)
    return {
        "processor ms": 1e3 * min(seconds),
        "Python calls": counted["call"],
        "C calls": counted["c_call"],
        "interpreter steps": counted["opcode"],
    }


def on_worker(
    name: str, alone: bool, divisor: int = 1, mixed: bool = False
) -> tuple[dict[str, float], Counter[str], str]:
    rank = os.environ.get("RANK", "0")  # one worker is no job
    os.environ.update(NCCL_HOSTID=f"worker-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    return counts(name, alone, divisor, mixed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="how many, each with its slab")
    parser.add_argument("--names", action="store_true", help="also what is called more often")
    parser.add_argument("--host", action="store_true", help="also where Python spends its time")
    parser.add_argument(
        "--divide", type=int, default=1, help="lengths by this: then the host waits for no GPU"
    )
    parser.add_argument(
        "--mixed", action="store_true", help="bfloat16, and channels last in memory"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        for name in (each for each in MODELS if given.only in each):
            for text, alone in (("torch", True), ("Tessel", False)):
                divisor = given.divide if given.divide > 1 else 8
                found = tessel.launch(on_processor, 2, name, alone, divisor, timeout=LIMIT)[0]
                numbers = ", ".join(f"{value:.6g} {kind}" for kind, value in found.items())
                print(f"{name}, {text} on a CPU: {numbers}")
        return 0
    backend = "cpu:gloo,cuda:nccl"
    for name in (each for each in MODELS if given.only in each):
        print(f"\n{name:32}", *(f"{kind:>14}" for kind in COLUMNS))
        rows = {}
        # torch on as many processes, none of which knows of the others: how far a GPU that is
        # shared slows down hosts
        cases = ("torch", 1, True), ("torch, each", given.workers, True)
        for text, workers, alone in (*cases, ("Tessel", given.workers, False)):
            arguments: Any = dict(timeout=LIMIT, backend=backend)
            rows[text] = tessel.launch(
                on_worker, workers, name, alone, given.divide, given.mixed, **arguments
            )[0]
            label = f"{text}, {workers} worker{'s' * (workers > 1)}"
            print(f"{label:32}", *(f"{value:14.6g}" for value in rows[text][0].values()))
        ratio = rows["Tessel"][0]["launches"] / rows["torch"][0]["launches"]
        # all of it: what others took of it is of another step, in which they may have taken longer
        ours = rows["Tessel"][0]["host ms"]
        host = [ours / rows[text][0]["host ms"] for text in ("torch", "torch, each")]
        print(
            f"launches {ratio:.2f} times (aim 1.6), host time {host[0]:.2f} times (aim "
            f"1.5), {host[1]:.2f} of torch's on as many processes"
        )
        for way in ("compiled ms", "graphed ms", "captured ms"):
            took, beside = (rows[text][0][way] for text in ("Tessel", "torch, each"))
            eager = took / rows["torch, each"][0]["host ms"]
            print(f"{way[:-3]}: {eager:.2f} of torch's eager step, {took / beside:.2f} of its own")
        if given.names:
            more = rows["Tessel"][1] - rows["torch"][1]
            for each, number in more.most_common(70):
                print(f"{number:6} more  {each[:150]}")
        if given.host:
            print(rows["Tessel"][2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
