"""WorkerPool: the workers of a whole test run."""

from __future__ import annotations

from collections.abc import Iterable

from tessel.launch import Workers


class WorkerPool(Workers):
    """One set of local workers for all tests: a test costs a message, not a start of processes.

    Define the function that a test runs on the workers at the top level of the test file. A failed
    assertion there fails the test, with the traceback of the worker. After a failure, a timeout or
    a crash the pool is reset for the next test. Consecutive tests with the same `nprocs` share a
    process group; another number costs about ten milliseconds.

    Under pytest, make the pool a fixture of `conftest.py`:

        @pytest.fixture(scope="session")
        def pool():
            with tessel.testing.WorkerPool() as pool:
                yield pool

    Args:
        nprocs: the default number of workers of a call.
        timeout: the default time limit of a call, in seconds.
        threads: the number of torch threads of each worker; by default the cores are divided
            evenly.
        backend: the backend of the process group, as for `torch.distributed.init_process_group`.
        preload: names of modules that are imported once for all workers, before these are forked:
            slow imports that tests need, such as `torch._dynamo`.

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
