"""WorkerPool: the workers of a whole test run."""

from __future__ import annotations

from collections.abc import Iterable

from tessel.launch import Workers


class WorkerPool(Workers):
    """One set of local workers for all tests: a test costs a message to them, not their start.

    The function that a test runs on the workers stands at the top level of the test file. A failed
    assertion there fails the test, with the traceback of the worker. After a failure, a time limit
    or a crash the pool is as good as new for the next test. Tests that follow each other with the
    same `nprocs` share a process group; another number costs some ten milliseconds.

    Under pytest, put the pool into a fixture of `conftest.py`:

        @pytest.fixture(scope="session")
        def pool():
            with tessel.testing.WorkerPool() as pool:
                yield pool

    Args:
        nprocs: the number of workers of a call that does not say otherwise.
        timeout: seconds that a call may take if it does not say otherwise.
        threads: torch threads of each worker; by default the cores are shared out evenly.
        backend: of the process group, as for `torch.distributed.init_process_group`.
        preload: names of modules that are imported once for all workers, before these are forked:
            those which tests need and which take long, as `torch._dynamo`.

    Example:
        >>> import torch.distributed as dist
        >>> from tessel.testing.pool import WorkerPool
        >>> with WorkerPool() as pool:
        ...     pool.run(dist.get_rank, nprocs=2), pool.run(dist.get_world_size, nprocs=3)
        ([0, 1], [3, 3, 3])
    """

    def __init__(
        self,
        nprocs: int = 4,
        *,
        timeout: float | None = 60.0,
        threads: int | None = None,
        backend: str = "gloo",
        preload: Iterable[str] = (),
    ) -> None:
        super().__init__(nprocs, timeout=timeout, threads=threads, backend=backend, preload=preload)
