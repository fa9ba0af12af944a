"""One pool of workers for the whole run, and a time limit for every test."""

from __future__ import annotations

import faulthandler
import gc
import linecache
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from tessel.testing.pool import WorkerPool

pytest_plugins = ["no_skips"]
# inductor would compile programs to see which vector instructions run, for half of a minute
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
gc.disable()  # until all is collected: of what imports make nothing is garbage

# what many tests import on each worker, and takes seconds: torch's compiler also comes with meta
# tensors of some functions, and with forward mode, and its graphs of autograd with inductor
PRELOAD = (
    *("torch._dynamo", "torch._dynamo.backends.common", "torch._inductor.pattern_matcher"),
    *("torch._decomp.decompositions_for_jvp", "torch.distributed.fsdp", "torch.distributed.optim"),
    *("deepinv", "matplotlib.pyplot", "hypothesis", "pytest", "garbage", "compilers"),
)
ALONE = ("launch", "transport")  # folders whose tests share the machine with two others at most,
# but for these, of values alone
BESIDE = (
    *("test_launchers", "test_message", "test_protocol", "test_sanitizers"),
    "test_unequal_workers",
)
# of the files that `make test` shares out as a whole, in this order
LONGEST = ("test_hosts", "test_waiting", "test_faults", "test_launch")
# torch keeps groups of meshes after their world; threads of theirs wake a hundred times a second
LINGER = ("test_dtensors", "test_parallel_training", "test_partition", "test_wrapped")
ZOO = ("timm", "segmentation_models_pytorch", "monai", "diffusers", "transformers", "neuralop")
LIMIT = 120.0  # seconds for a test; a call to the pool has its own, shorter limit


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """The workers of this run."""
    from tessel.testing.pool import WorkerPool

    zoo = is_zoo(request.config)
    # Tests of a few files, which do not import deepinv, do not wait for all of this.
    preload = [name for name in PRELOAD if name in sys.modules or "deepinv" in sys.modules]
    with WorkerPool(timeout=60.0, threads=1, preload=(*preload, *ZOO * zoo)) as pool:
        if zoo:  # what these import takes minutes on a busy machine, which no test is to pay
            pool.run(os.getpid, nprocs=4, timeout=900)
        yield pool


@pytest.fixture
def run(pool: WorkerPool) -> Callable[..., list[Any]]:
    """`run(fn, *args, nprocs=4, timeout=60)`: the results of `fn(*args)` on the workers."""
    return pool.run


@pytest.fixture
def in_new_job(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`in_new_job(fn, *args, nprocs=2, timeout=60, engine="python")`: with TESSEL_ENGINE and such.

    A job reads these variables when it begins: so the workers leave the one that they are in.
    """
    import jobs

    def run(
        fn: Callable[..., Any], *args: Any, nprocs: int, timeout: float, **settings: str
    ) -> list[Any]:
        for name, value in settings.items():
            monkeypatch.setenv(f"TESSEL_{name.upper()}", value)
        pool.run(jobs.leave_job, nprocs=nprocs)
        return pool.run(fn, *args, nprocs=nprocs, timeout=timeout)

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "one case of each test, on two or three workers where there is a choice; no slow ones"
    parser.addoption("--quick", action="store_true", help=text)


def share_out_cores() -> None:
    """Keep the processes of this lane off the cores of the others.

    Workers of two lanes would take all cores for theirs, and look again and again for what the
    other lane keeps from them: nearly a third of the time of tests on two workers.
    """
    number, count = (
        os.environ.get(f"PYTEST_XDIST_{name}", "") for name in ("WORKER", "WORKER_COUNT")
    )
    if number and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[int(number.removeprefix("gw")) :: int(count)]
        os.sched_setaffinity(0, own or cores)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "alone":
        share_out_cores()
    config.addinivalue_line("markers", f"limit(seconds): time limit of a test, else {LIMIT:g} s")
    config.addinivalue_line("markers", "slow: takes seconds, of processor time; not for --quick")
    config.addinivalue_line(
        "markers", "alone: watches processes, memory or time; at most two others run beside it"
    )
    config.addinivalue_line(
        "markers", "ends_workers: of the pool, whose imports are lost; runs last"
    )
    config.addinivalue_line("markers", "zoo: models of other packages; runs by `-m zoo` alone")


def pytest_sessionstart(session: pytest.Session) -> None:
    # The process that shares tests out to lanes runs none: the lanes start without its imports.
    if session.config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import torch

    import garbage  # noqa: F401

    torch.set_num_threads(1)  # tensors are small here, and more threads only wait


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of tests and modules, which live until the end
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what has nothing to run: for `-m alone`, which takes ten seconds otherwise.

    The zoo, whose packages are not installed for tests, is only there for those who ask for it.
    """
    zoo = Path(__file__).parent / "zoo"
    if zoo in (collection_path, *collection_path.parents) and not is_zoo(config):
        return True
    if config.getoption("markexpr") != "alone" or collection_path.suffix != ".py":
        return None
    if is_alone(collection_path) or "mark.alone" in collection_path.read_text():
        return None
    return True


def is_zoo(config: pytest.Config) -> bool:
    """Whether this run is one of `make zoo`."""
    return config.getoption("markexpr") == "zoo"


def is_alone(path: Path) -> bool:
    """Whether all tests of a file must have the machine for themselves."""
    return path.parent.name in ALONE and path.stem not in BESIDE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests of each number of workers together, so that worlds are rarely made anew.

    Those that end workers come last: new workers import anew what the others have imported. Those
    that leave threads behind come before them. The files that take longest come first: the lane
    that has one of them last would keep the others waiting.
    """
    for item in items:
        if is_alone(item.path):
            item.add_marker("alone")
    if config.getoption("quick"):
        chosen = set(_quick(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST),
            item.get_closest_marker("ends_workers") is not None,
            item.path.stem in LINGER,
            _num_workers(item),
        )
    )


def _quick(items: list[pytest.Item]) -> Iterable[pytest.Item]:
    """Of the cases of each test that are not slow one on two workers, else on three, else any."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.path, name), []).append(item)
    wanted = {2: 0, 3: 1}
    return (
        min(some, key=lambda item: wanted.get(_num_workers(item), 2)) for some in cases.values()
    )


def _num_workers(item: pytest.Item) -> int:
    """Those that its parameters or its source say, four for another test of the pool, else none."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "nprocs" in params:
        return params["nprocs"]
    if not {"run", "pool"} & {*getattr(item, "fixturenames", ())}:
        return 0
    code = item.function.__code__
    last = max(line for _, _, line in code.co_lines() if line)
    source = "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last])
    said = re.search(r"nprocs=(\d+)", source)
    return int(said[1]) if said else 4


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that takes too long; end the run, with all stacks, if it cannot even fail."""
    marker = request.node.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else LIMIT

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"the test ran longer than its limit of {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 30.0, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, previous)
