"""Tensors of workers that share a GPU: through mailboxes, staged in pinned memory, and by Gloo.

All ways take turns in the same processes; the milliseconds are medians, of the slower worker, until
the GPU is done. "Gloo" is its own all-to-all of CUDA tensors, and its own all-reduce.

    python benchmarks/shared_gpu.py [--workers 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import tessel
from tessel import nn
from tessel.transport import mailbox

SIZES = [2**k for k in (10, 16, 20, 24, 26)]
ROUNDS = 15


def by(ipc: str, action: Callable[[], object]) -> Callable[[], object]:
    def act() -> object:
        os.environ[mailbox.IPC] = ipc
        return action()

    return act


def measure() -> dict[tuple[str, int, str], float]:
    P, rank = tessel.world(), tessel.world().rank
    halves = [P.create_cartesian_topology_partition(shape) for shape in ((P.size, 1), (1, P.size))]
    found = {}
    for size in SIZES:
        x = torch.full((P.size, size // 4 // P.size), rank + 1.0, device="cuda")
        total, turn, flat = nn.AllSumReduce(P, [0]), nn.Repartition(*halves), x.flatten()
        out = torch.empty_like(flat)
        ways: dict[tuple[str, str], Callable[[], object]] = {
            ("all-sum-reduce", "mailboxes"): by("1", lambda: total(x)),  # noqa: B023
            ("all-sum-reduce", "staged"): by("0", lambda: total(x)),  # noqa: B023
            ("all-sum-reduce", "Gloo"): lambda: dist.all_reduce(flat.clone()),  # noqa: B023
            ("repartition", "mailboxes"): by("1", lambda: turn(x)),  # noqa: B023
            ("repartition", "staged"): by("0", lambda: turn(x)),  # noqa: B023
            ("repartition", "Gloo"): lambda: dist.all_to_all_single(out, flat),  # noqa: B023
        }
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for turn_number in range(ROUNDS + 2):
            for way, action in ways.items():
                torch.cuda.synchronize()
                P.group.share_objects(None)
                begin = time.perf_counter()
                action()
                torch.cuda.synchronize()
                if turn_number > 1:
                    times[way].append(time.perf_counter() - begin)
        for (movement, way), each in times.items():
            found[movement, size, way] = 1e3 * statistics.median(each)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    everyones = tessel.launch(measure, args.workers, timeout=300, backend="gloo")
    slowest = {case: max(each[case] for each in everyones) for case in everyones[0]}
    print(f"{args.workers} workers on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':16}{'KiB':>8}{'mailboxes':>12}{'staged':>10}{'Gloo':>10}  ratio")
    for movement in ("all-sum-reduce", "repartition"):
        for size in SIZES:
            ours, staged, gloo = (
                slowest[movement, size, way] for way in ("mailboxes", "staged", "Gloo")
            )
            numbers = f"{ours:12.3f}{staged:10.3f}{gloo:10.3f}{ours / gloo:7.2f}"
            print(f"{movement:16}{size // 1024:8}{numbers}")


if __name__ == "__main__":
    main()
