"""WorkerPool: the workers of a whole test run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tessel.launch import Workers

T = TypeVar("T")


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
        super().__init__(nprocs, threads=threads, backend=backend, preload=preload)
        self.timeout = timeout

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        nprocs: int | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Run `fn(*args)` on `nprocs` workers and return their results, in the order of ranks.

        The first failure of a worker is raised, as the exception that it was.
        """
        seconds = self.timeout if timeout is None else timeout
        return super().run(fn, *args, nprocs=nprocs, timeout=seconds)
