"""Local workers: results, failures, and that nothing is left behind.

Tests `launch/workers.py`, `launch/worker.py`, `launch/process.py`, `launch/forkserver.py`,
`launch/fork.py`, `launch/task.py`, `launch/environment.py`.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

import tessel
from tessel.errors import WorkerLost
from tessel.launch import Workers, launch
from tessel.machine import HUGE_PAGES, keep_freed_memory

pytestmark = pytest.mark.ends_workers

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class PickyError(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, expected, got):
        super().__init__(f"expected {expected}, got {got}")


def rank():
    return int(os.environ.get("RANK", 0))


def rank_and(*args):
    return rank(), *args


def size_and_sum():
    total = torch.tensor(float(rank()))
    dist.all_reduce(total)
    return dist.get_world_size(), total.item()


def what_torchrun_says():
    return [os.environ.get(name) for name in TORCHRUN_VARIABLES]


def num_threads():
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def all_threads():
    numpy.ones((400, 400)) @ numpy.ones((400, 400))
    return len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS")


def fail_on(worker, error):
    if rank() == worker:
        raise error
    dist.barrier()


def fail_on_3_before_others():
    dist.barrier()
    if rank() != 3:
        time.sleep(0.4)
    raise ValueError(f"I am worker {rank()}")


def fail_picky():
    raise PickyError(1, 2)


def die_on(worker, how):
    if rank() == worker:
        how()
    dist.barrier()


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def hang_on(worker):
    if rank() == worker:
        time.sleep(100)
    dist.barrier()


def leave_a_transfer_unfinished():
    if rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError(f"left {work if rank() == 0 else None}")


def give_a_lock():
    return threading.Lock()


def shout(text):
    print(text)
    print(text, file=sys.stderr)


def compiled_sum():
    x = torch.arange(4.0, requires_grad=True)
    torch.compile(lambda t: (t.sin() ** 2 + t.cos() ** 2).sum())(x).backward()
    return x.grad.abs().max().item()


def see_environment():
    return os.environ.get("TESSEL_TEST_COLOUR"), os.getcwd()


def destroy_world():
    dist.destroy_process_group()


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def notes(info):
    return "\n".join(info.value.__notes__)


# Results


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(run, nprocs):
    x = torch.arange(3.0)
    results = run(rank_and, "text", x, nprocs=nprocs)
    assert [result[:2] for result in results] == [(k, "text") for k in range(nprocs)]
    assert all(torch.equal(result[2], x) for result in results)


def test_tensors_larger_than_a_socket_buffer(run):
    x = torch.arange(3_000_000)
    assert all(torch.equal(y, x) for _, y in run(rank_and, x, nprocs=2))


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_workers_share_a_world(run, nprocs):
    assert run(size_and_sum, nprocs=nprocs) == [(nprocs, sum(range(nprocs)))] * nprocs


def test_world_size_can_change_between_calls(run):
    assert run(dist.is_initialized, nprocs=1) == [False]
    for nprocs in (4, 2, 4):
        assert run(size_and_sum, nprocs=nprocs) == [(nprocs, sum(range(nprocs)))] * nprocs
    assert run(dist.is_initialized, nprocs=1) == [False]


def test_world_is_kept_between_calls(run):
    ports = [run(os.getenv, "MASTER_PORT", nprocs=2) for _ in range(2)]
    assert ports[0] == ports[1]


def test_world_that_a_function_destroyed_is_made_anew(run):
    run(destroy_world, nprocs=2)
    assert run(size_and_sum, nprocs=2) == [(2, 1.0)] * 2


def test_environment_is_that_of_torchrun(run):
    assert run(what_torchrun_says, nprocs=2) == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]


def test_single_worker_is_a_plain_process(run, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run(what_torchrun_says, nprocs=1) == [[None] * 4]


def test_a_call_sees_the_present_environment_and_directory(run, monkeypatch, tmp_path):
    run(see_environment, nprocs=1)
    monkeypatch.setenv("TESSEL_TEST_COLOUR", "green")
    monkeypatch.chdir(tmp_path)
    assert run(see_environment, nprocs=1) == [("green", str(tmp_path))]
    monkeypatch.undo()
    assert run(see_environment, nprocs=1) == [(None, os.getcwd())]


def test_cores_are_shared_out(run):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert run(num_threads, nprocs=2) == [(threads, str(threads))] * 2
    assert launch(num_threads, 2, threads=3) == [(3, "3")] * 2


@pytest.mark.parametrize(("chosen", "count"), [(None, 1), ("2", 2)])
def test_numpy_has_no_thread_more(monkeypatch, chosen, count):
    """As many as torch, or as the user wants, and none that waits for work."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", chosen)
    assert launch(all_threads, 1, threads=1) == [(count, chosen)]


def test_output_passes_through(run, capfd):
    run(shout, "a word", nprocs=2)
    out, err = capfd.readouterr()
    assert (out, err) == ("a word\n" * 2, "a word\n" * 2)


def test_compiled_functions_run(run):
    assert run(compiled_sum, nprocs=1)[0] < 1e-6


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2"])
def test_number_of_workers_is_checked(bad):
    with pytest.raises(ValueError, match="nprocs must be an integer of at least 1, got"):
        launch(rank, bad)


# Functions that cannot be imported


def test_lambdas_and_closures():
    offset = torch.tensor(5)
    assert launch(lambda: int(offset) + rank(), 3) == [5, 6, 7]


def test_closure_after_parallel_work_and_backward_in_this_process():
    x = torch.randn(600, 600, requires_grad=True)

    def gradient():
        y = x.detach().clone().requires_grad_()
        (y @ y).sum().backward()
        return y.grad

    (x @ x).sum().backward()
    results = launch(gradient, 2, threads=2, timeout=30)
    for result in results:
        torch.testing.assert_close(result, x.grad)


def test_closure_may_fail():
    def fail():
        raise KeyError(rank())

    with pytest.raises(KeyError):
        launch(fail, 2)


def test_closures_cannot_be_sent_to_running_workers(run):
    with pytest.raises(TypeError, match=r"top level of a module, or use tessel\.launch"):
        run(lambda: None)


def test_unpicklable_result(run):
    with pytest.raises(TypeError, match="result of worker 0, of type lock, cannot be pickled"):
        run(give_a_lock, nprocs=1)


# Failures


def test_exception_keeps_its_type_and_shows_the_worker(run):
    with pytest.raises(ZeroDivisionError, match="on purpose") as info:
        run(fail_on, 2, ZeroDivisionError("on purpose"))
    assert "Worker 2 of 4" in notes(info)
    assert "in fail_on\n    raise error" in notes(info)
    assert run(size_and_sum) == [(4, 6.0)] * 4


def test_first_failure_in_time_wins(run):
    with pytest.raises(ValueError, match="I am worker 3") as info:
        run(fail_on_3_before_others)
    assert "worker 0 failed with ValueError: I am worker 0" in notes(info)


def test_exception_that_cannot_be_pickled_says_the_same(run):
    with pytest.raises(RuntimeError, match="PickyError: expected 1, got 2") as info:
        run(fail_picky, nprocs=2)
    assert "raise PickyError(1, 2)" in notes(info)


def test_unfinished_transfers_do_not_stop_the_pool(run):
    with pytest.raises(ValueError, match="left"):
        run(leave_a_transfer_unfinished, nprocs=2)
    assert run(size_and_sum, nprocs=2, timeout=20) == [(2, 1.0)] * 2


@pytest.mark.parametrize("nprocs", [1, 4])
@pytest.mark.parametrize(
    ("how", "what"),
    [
        (kill_myself, "was killed by SIGKILL"),
        (crash, "was killed by SIGSEGV"),
        (partial(os._exit, 3), "ended with exit code 3"),
        (sys.exit, "ended with exit code 0"),
    ],
)
def test_worker_that_dies_is_named(run, nprocs, how, what):
    last = nprocs - 1
    with pytest.raises(
        WorkerLost, match=f"worker {last} of {nprocs} {what}.* while it ran .*die_on"
    ):
        run(die_on, last, how, nprocs=nprocs, timeout=20)
    assert run(rank, nprocs=nprocs) == list(range(nprocs))


def test_crash_shows_the_stack(run):
    with pytest.raises(WorkerLost) as info:
        run(die_on, 0, crash, nprocs=1)
    assert "in crash" in notes(info)


def test_worker_that_dies_between_calls_is_replaced(run):
    pids = run(os.getpid, nprocs=2)
    os.kill(pids[1], signal.SIGKILL)
    while Path(f"/proc/{pids[1]}").exists():
        time.sleep(0.01)
    assert run(size_and_sum, nprocs=2) == [(2, 1.0)] * 2


def test_time_limit_shows_where_each_worker_is(run):
    run(rank, nprocs=3)
    with pytest.raises(TimeoutError, match="hang_on exceeded its time limit of 2 s") as info:
        run(hang_on, 1, nprocs=3, timeout=2)
    workers = re.split(r"Worker \d:", str(info.value))[1:]
    assert len(workers) == 3
    assert "time.sleep" not in workers[0] and "barrier" in workers[0]
    assert "in hang_on" in workers[1] and "barrier" not in workers[1]
    assert run(size_and_sum, nprocs=3) == [(3, 3.0)] * 3


# Nothing is left behind


def modules_there(*names):
    return os.getpid(), [name in sys.modules for name in names]


def test_modules_are_imported_before_workers_are_forked():
    """Once, and not in the process that asks for it; one that is absent is for its user to miss."""
    names = "wave", "absent.module"
    with Workers(2, preload=names) as workers:
        before = workers.run(modules_there, *names)
        os.kill(before[0][0], signal.SIGKILL)
        while Path(f"/proc/{before[0][0]}").exists():
            time.sleep(0.01)
        after = workers.run(modules_there, *names)
    assert [found for _, found in before + after] == [[True, False]] * 4
    assert before[0][0] != after[0][0]
    with Workers(2) as workers:
        assert [found for _, found in workers.run(modules_there, *names)] == [[False, False]] * 2
    assert "wave" not in sys.modules


@pytest.mark.parametrize("names", ["", "two names", ["-c"], [3]])
def test_names_of_modules_are_checked(names):
    with pytest.raises(ValueError, match="preload must contain names of modules"):
        Workers(2, preload=names)


def test_close_ends_the_workers():
    with Workers(3) as workers:
        pids = workers.run(os.getpid)
        assert all(map(is_running, pids))
    assert not wait_until_gone(pids, seconds=0)


def test_launch_ends_the_workers_of_a_closure():
    pids = launch(lambda: (os.getpid(), os.getppid()), 2)
    assert not wait_until_gone([pid for pair in pids for pid in pair], seconds=0)


@contextlib.contextmanager
def script(tmp_path, text):
    """A script that runs in an interpreter of its own, ended at the end."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def read_pids(process):
    """The numbers of two workers, and of their parents, as `busy` prints them."""
    lines = [process.stdout.readline().split() for _ in range(2)]
    return [[int(pid) for pid in column] for column in zip(*lines, strict=True)]


def test_workers_end_on_keyboard_interrupt_and_with_their_parent(tmp_path):
    text = """
        import contextlib, os, re, signal, threading
        import torch, torch.distributed as dist
        from tessel.launch import launch

        def busy(keep_gil=False):
            os.write(1, f"{os.getpid()} {os.getppid()}\\n".encode())
            if keep_gil and dist.get_rank() == 1:
                re.match(r"(a+)+b", "a" * 60)  # as good as forever
            dist.recv(torch.empty(1))  # forever

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it behind &
            for fn in (busy, lambda: busy()):
                with contextlib.suppress(KeyboardInterrupt):
                    launch(fn, 2)
            begun, begin = os.pipe()
            forked = lambda: (os.write(begin, b"!"), busy())
            threading.Thread(target=launch, args=(forked, 2)).start()
            os.read(begun, 1)
            launch(busy, 2, True)
    """
    with script(tmp_path, text) as process:
        pids = []
        for _ in ("imported", "forked"):
            workers, templates = read_pids(process)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert not wait_until_gone(workers)
            pids += workers + templates
        for _ in ("forked", "imported"):
            workers, templates = read_pids(process)
            pids += workers + templates
        assert sum(map(is_running, set(pids))) == 6
        process.kill()
        assert process.stderr.read() == ""
    assert not wait_until_gone(pids)


# Scripts


@pytest.mark.slow
def test_script_shares_its_classes_and_is_told_to_guard_its_calls(tmp_path):
    text = """
        import os
        from dataclasses import dataclass
        from tessel.launch import launch

        @dataclass
        class Point:
            x: int

        class Mine(Exception):
            pass

        def double(point):
            return Point(2 * point.x)

        def fail():
            raise Mine("mine")

        if __name__ == "__main__":
            print(launch(double, 2, Point(3)))
            try:
                launch(fail, 1)
            except Mine as error:
                print(error, flush=True)
            os.environ["TESSEL_TEST_UNGUARDED"] = "yes"

        if "TESSEL_TEST_UNGUARDED" in os.environ:
            print(launch(double, 2, Point(3)))
    """
    with script(tmp_path, text) as process:
        out, errors = process.communicate()
    assert out == "[Point(x=6), Point(x=6)]\nmine\n"
    assert process.returncode == 1 and errors.startswith("Traceback")
    assert 'if __name__ == "__main__":' in errors.split("Worker ")[0]


def test_function_typed_at_a_prompt(monkeypatch):
    prompt = types.ModuleType("__main__")  # has no file
    exec("def f(): return 'here'", vars(prompt))
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    assert launch(prompt.f, 2) == ["here", "here"]


# What the memory of new tensors depends on. A world of this process sets some of these, too, and
# the programs that it starts inherit them.
ALLOCATION = ("MALLOC_", "TESSEL_ALLOC", HUGE_PAGES)


def faults_of_new_tensors() -> int:
    """Pages that the system had to clear while large tensors came and went."""
    torch.set_num_threads(1)
    for _ in range(30):
        torch.empty(2**23).fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(30):
        torch.empty(2**23).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize(
    ("setting", "value", "keeps"),
    [
        ("TESSEL_ALLOCATOR", "keep", True),
        ("TESSEL_ALLOCATOR", "system", False),
        ("MALLOC_ARENA_MAX", "8", False),  # the user's own settings are left alone
    ],
)
def test_workers_keep_the_memory_of_freed_tensors(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str, keeps: bool
) -> None:
    for name in [name for name in os.environ if name.startswith(ALLOCATION)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(setting, value)
    pages = 30 * 2**25 // 4096
    for faults in tessel.launch(faults_of_new_tensors, 2, timeout=60):
        assert faults < 0.8 * pages if keeps else faults > 0.95 * pages


GROUP = "import torch.distributed as dist; dist.init_process_group('gloo')"
USES = {
    "a world": "tessel.world()",
    "a layer": "tessel.nn.ParallelLinear(4, 4, dim=-1)(torch.ones(2, 4))",
    "an operator": "tessel.distribute(tessel.ParDFT(torch.float32, 4), [1]) * torch.ones(4)",
    "a group of its own": f"{GROUP}; tessel.world()",
    "a partition": "tessel.Partition((0,), (1,)).prepare()",
}


def faults_of(program: str, folder: Path, **settings: str) -> int:
    """The pages that a plain process clears for new tensors after a program."""
    script = folder / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import torch, tessel; {program}\n"
        "from test_launch import faults_of_new_tensors; print(faults_of_new_tensors())"
    )
    taken = (*ALLOCATION, "RANK", "WORLD_SIZE", "MASTER")
    own = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**own, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(found.stdout)


@pytest.mark.parametrize(("use", "is_job"), [
    ("a world", False),
    ("a layer", False),
    ("an operator", False),
    ("a partition", False),
    ("a world", True),  # torchrun, srun and others start plain processes, which join a job
    ("a group of its own", True),
])  # fmt: skip
def test_processes_of_any_launcher_or_none_keep_it(tmp_path: Path, use: str, is_job: bool) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    settings = job if is_job else {}
    pages = 30 * 2**25 // 4096
    assert faults_of(USES[use], tmp_path, **settings) < 0.8 * pages
    assert faults_of(USES[use], tmp_path, TESSEL_ALLOCATOR="system", **settings) > 0.95 * pages


def test_what_a_user_sets_later_stays(tmp_path: Path) -> None:
    """`import tessel` changes nothing either."""
    give_back = "import ctypes; ctypes.CDLL(None).mallopt(-3, 2**20)"
    pages = 30 * 2**25 // 4096
    assert faults_of("tessel.Layout", tmp_path) > 0.95 * pages
    program = f"tessel.world(); {give_back}; tessel.world(); {USES['a layer']}"
    assert faults_of(program, tmp_path, **{HUGE_PAGES: "0"}) > 0.95 * pages


def huge_pages_of_a_tensor() -> int:
    """Bytes in huge pages while a tensor of 64 MiB is there."""
    x = torch.ones(2**24)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found = sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
    return 1024 * found if x.numel() else 0


def has_huge_pages() -> bool:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    said = enabled.read_text() if enabled.exists() else ""
    return "[always]" in said or "[madvise]" in said


@pytest.mark.skipif(not has_huge_pages(), reason="this system gives no huge pages")
@pytest.mark.parametrize(("setting", "value", "asks"), [
    ("TESSEL_ALLOCATOR", "keep", True),
    ("TESSEL_ALLOCATOR", "system", False),
    (HUGE_PAGES, "0", False),
])  # fmt: skip
def test_large_tensors_of_workers_lie_in_huge_pages(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str, asks: bool
) -> None:
    for name in [name for name in os.environ if name.startswith(ALLOCATION)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(setting, value)
    for found in tessel.launch(huge_pages_of_a_tensor, 2, timeout=60):
        assert found > 2**25 if asks else found < 2**25


@pytest.mark.skipif(not has_huge_pages(), reason="this system gives no huge pages")
@pytest.mark.parametrize(("program", "asks"), [
    ("tessel.world(); torch.ones(3)", True),
    ("torch.ones(3); tessel.world()", False),  # as documented: torch asks no more
])  # fmt: skip
def test_large_tensors_of_other_processes_do_if_the_world_is_first(
    program: str, asks: bool
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATION)}
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import torch, tessel; {program}\n"
        "from test_launch import huge_pages_of_a_tensor; print(huge_pages_of_a_tensor())"
    )
    found = subprocess.check_output([sys.executable, "-c", code], env=own, timeout=60)
    assert (int(found) > 2**25) == asks


def test_an_unknown_allocator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_ALLOCATOR", "hoard")
    with pytest.raises(ValueError, match="TESSEL_ALLOCATOR must be one of keep, system"):
        keep_freed_memory()
