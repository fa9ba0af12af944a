"""All-reduce on two hosts of two workers: Tessel over Gloo and over MPI, Gloo's own and MPI's own.

The hosts are network namespaces of this machine with a cable between them (a veth pair). It needs
root, Linux, iproute2, and Open MPI with mpi4py in the environment of this Python. Open MPI has TCP
there, as Gloo has. Tessel is `nn.AllSumReduce`, with its agreement, and `Move.apply`, without.

In each round all contenders take turns, in the same processes; a sample is the mean of some calls
of the slowest worker. Shown is the median over rounds; and the processor time of all workers, which
is what counts where all of them share two cores.

    python benchmarks/hosts.py [--rounds 9] [--most-kib 65536] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import tessel
from tessel import Layout, Move, transport

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / each) for each in ("common", "transport")]
KIB = (1, 16, 64, 256, 1024, 4096, 16384, 65536)
SECONDS = 0.04  # that a sample takes about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most-kib", type=int, default=KIB[-1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        be_worker(options)
        return
    import hosts

    if hosts.why_not() or hosts.why_no_mpi():
        sys.exit(hosts.why_not() or hosts.why_no_mpi())
    with tempfile.TemporaryDirectory() as folder, hosts.two_hosts(Path(folder)) as pair:
        found: dict[str, dict[str, float]] = {}
        for way in ("shared", "mpi"):
            file = Path(folder) / f"{way}.json"
            words = ["--rounds", str(options.rounds), "--most-kib", str(options.most_kib)]
            program = [sys.executable, __file__, *words, "--json", str(file)]
            pair.mpirun(program, {"TESSEL_TRANSPORT": way, "TESSEL_TIMEOUT": "60"}).wait()
            if not file.exists():
                sys.exit(pair.outputs)
            for size, times in json.loads(file.read_text()).items():
                for name, ms in times.items():
                    found.setdefault(size, {})[name] = ms
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def show(found: dict[str, dict[str, float]]) -> None:
    print("milliseconds".ljust(34), *(f"{size:>8}" for size in found), "KiB")
    for name in next(iter(found.values())):
        print(name.ljust(34), *(f"{times[name]:8.2f}" for times in found.values()))


def be_worker(options: argparse.Namespace) -> None:
    """Measure, as one worker of a job."""
    torch.set_num_threads(1)
    world = tessel.world()
    world.prepare()
    from mpi4py import MPI

    way = "MPI" if transport.between_hosts().startswith("MPI") else "Gloo"
    found = {}
    for kib in (kib for kib in KIB if kib <= options.most_kib):
        length = kib * 256
        x = torch.full((length,), world.rank + 1.0)
        layout = Layout.whole(world, (length,))
        module, move = tessel.nn.AllSumReduce(world, [0]), Move(layout, layout)
        given, taken, out = x.clone().numpy(), x.clone().numpy(), x.clone()

        def by_gloo(x: torch.Tensor = x, out: torch.Tensor = out) -> torch.Tensor:
            dist.all_reduce(out.copy_(x))
            return out

        def by_mpi(given=given, taken=taken) -> torch.Tensor:  # type: ignore[no-untyped-def]
            MPI.COMM_WORLD.Allreduce(given, taken)
            return torch.from_numpy(taken)

        contenders: dict[str, Callable[[], torch.Tensor]] = {
            f"Gloo's own (with {way})": by_gloo,
            f"MPI's own (with {way})": by_mpi,
            f"Tessel over {way}": lambda module=module, x=x: module(x),  # type: ignore[misc]
            f"its move over {way}": lambda move=move, x=x: move.apply(x),  # type: ignore[misc]
        }
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        counts = {}
        with torch.no_grad():
            for name, call in contenders.items():
                assert torch.equal(call(), torch.full((length,), 10.0)), name
                counts[name] = max(1, int(SECONDS / slowest(call, 2)[0]))
            for _ in range(options.rounds):
                for name, call in contenders.items():
                    samples[name].append(slowest(call, counts[name]))
        found[str(kib)] = {
            f"{name}{what}": 1e3 * statistics.median(each)
            for name, pairs in samples.items()
            for what, each in zip(("", ", processors"), zip(*pairs, strict=True), strict=True)
        }
    if world.rank == 0:
        options.json.write_text(json.dumps(found))


def slowest(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Seconds of a call, the mean of some, on the worker for which they take longest.

    And the seconds of processors that all workers need for it.
    """
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    took = torch.tensor([(time.perf_counter() - begin) / count])
    work = torch.tensor([(time.process_time() - busy) / count])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(work)
    return float(took), float(work)


if __name__ == "__main__":
    main()
