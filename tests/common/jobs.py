"""Jobs that the workers of a pool begin and leave."""

from __future__ import annotations

import torch.distributed as dist

from tessel import transport


def leave_job() -> None:
    """Let the next call have a new job, made as the environment then says.

    Torch lets a worker go on before others have connected to it: who leaves at once would cut them
    off.
    """
    if transport.num_workers() > 1:
        dist.barrier()
    transport.leave()
