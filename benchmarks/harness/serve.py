"""The side of a peer that runs under MPI: it waits for commands, asleep, and gives samples.

A script of a peer ends with `serve(setup)`. The harness starts it under mpirun with a folder that
holds a pipe for each process; a process that waits for the next line of its pipe uses no core.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

Step = Callable[[], object]


def serve(setup: Callable[[dict[str, Any]], Step]) -> None:
    """Answer commands until an empty one comes, or the harness is gone.

    Args:
        setup: makes of the settings of a case what is done in it, and checks that it gives the
            right values. If that returns a dictionary of seconds, these are parts of its time.
    """
    comm = MPI.COMM_WORLD
    step: Step | None = None
    known: Any = None
    try:
        with (Path(sys.argv[1]) / str(comm.rank)).open() as commands:
            for line in commands:
                if not line.strip():
                    break
                asked = json.loads(line)
                if asked["settings"] != known:
                    step = None  # what it holds is let go first
                    step, known = setup(asked["settings"]), asked["settings"]
                assert step is not None
                answer = _samples(comm, step, asked["repeats"], asked["calls"])
                if comm.rank == 0:
                    print(json.dumps(answer), flush=True)
    except BaseException:  # the others would wait for this process for ever
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)


def _samples(comm: Any, step: Step, repeats: int, calls: int) -> dict[str, Any]:
    mine, parts = np.empty(repeats), dict[str, float]()
    for number in range(repeats):
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            said = step()
            if isinstance(said, dict):
                for name, seconds in said.items():
                    parts[name] = parts.get(name, 0.0) + seconds
        mine[number] = (time.perf_counter() - begin) / calls
    slowest = np.empty_like(mine)
    comm.Allreduce(mine, slowest, MPI.MAX)
    share = repeats * calls * comm.size
    means = {name: comm.allreduce(total) / share for name, total in parts.items()}
    return {"samples": slowest.tolist(), "parts": means}
