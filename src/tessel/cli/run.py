"""Run a script on several workers.

It is torchrun with good defaults: as many threads per worker as it has cores, a rendezvous that
needs no free port, and, when a worker fails, the traceback of the first failure as the last thing
on the screen. The script sees the same environment as under torchrun, so `tessel.world()` and
`torch.distributed.init_process_group()` work in it.

  tessel run -n 4 train.py --epochs 3
  tessel run -n 4 -m package.train --epochs 3

On two hosts, the same line on each:

  tessel run -n 8 --nnodes 2 --rdzv-endpoint host0:29400 train.py

On one host, only the loopback interface is used. Several hosts meet at the endpoint, where they
prove to each other that they know the same token: that of TESSEL_TOKEN, of --token-file, or of
~/.config/tessel/token, which the first run creates. Copy it if hosts share no home directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tessel.cli import argument
from tessel.cli.forked_job import ForkedJob, can_fork, count_gpus, stops
from tessel.cli.rendezvous import BACKEND, SECONDS_TO_MEET, HostRendezvous
from tessel.cli.stragglers import Stragglers
from tessel.launch.gate import Endpoint, GateError, read_token
from tessel.machine import ALLOCATORS, interface_of, loopback, usable_cores
from tessel.operators.local_transform import LIBRARIES
from tessel.settings import chosen, time_limit
from tessel.tracing.block import VARIABLE as TRACE
from tessel.tracing.block import locked, why_not
from tessel.transport.copy_program import ENGINES
from tessel.transport.job import TRANSPORTS

SUMMARY = "run a script on several workers (torchrun with good defaults)"

# A death without a report has the time at which it was noticed, which is later than its own.
_NOTICED_LATE_SECONDS = 1.0
_SECONDS_TO_END = 5
_CHOICES = {
    "TESSEL_ALLOCATOR": ALLOCATORS,
    "TESSEL_ENGINE": ENGINES,
    "TESSEL_FFT": LIBRARIES,
    "TESSEL_TRANSPORT": TRANSPORTS,
    "TESSEL_CHECK": ("0", "1"),
    "TESSEL_DEBUG": ("0", "1"),
}
# Python would look for garbage among the objects of torch's import, of which none is.
_WORKER = (
    "import gc, sys; gc.disable(); from tessel.cli.worker import main; sys.exit(main(sys.argv[1:]))"
)
_REPORTS = "tessel-run-"  # prefix of the folders with workers' reports of their failures
_SECONDS_TO_LOCK = 10.0  # a folder younger than this may not be locked yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel run`."""
    parser.usage = "tessel run [-n N] [options] (script.py | -m module) [its arguments ...]"
    parser.add_argument(
        "-n",
        "--workers",
        type=positive,
        metavar="N",
        help="workers on this host (default: one per GPU, else one per core)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="T",
        help="threads per worker (default: OMP_NUM_THREADS if set, else cores // N)",
    )
    parser.add_argument(
        "--trace",
        type=trace_file,
        metavar="FILE",
        help="record what all workers do, for `tessel trace FILE` and ui.perfetto.dev",
    )
    hosts = parser.add_argument_group("several hosts")
    hosts.add_argument(
        "--nnodes", type=positive, default=1, metavar="H", help="number of hosts (default: 1)"
    )
    hosts.add_argument(
        "--rdzv-endpoint",
        type=argument(Endpoint),
        metavar="HOST:PORT",
        help="address of one of the hosts, at which all of them meet; not needed for a single host",
    )
    hosts.add_argument(
        "--rdzv-id", default="tessel", metavar="ID", help="name of this job, the same on every host"
    )
    hosts.add_argument(
        "--token-file",
        metavar="FILE",
        help="file of mode 0600 with the token that all hosts know (default: TESSEL_TOKEN if set, "
        "else ~/.config/tessel/token)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the script or module, and its arguments"
    )
    parser.set_defaults(parser=parser)


def execute(args: argparse.Namespace) -> int:
    """Run the workers; return 0, or the exit code of the worker that failed first."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    check_command(args, command)
    if args.is_program and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else nobody learns how workers ended
    try:  # here, and not on each worker
        time_limit()
        for variable, options in _CHOICES.items():
            chosen(variable, options)
    except ValueError as error:
        args.parser.error(str(error))
    n = args.workers or count_gpus() or usable_cores()
    # Workers inherit this. Torchrun would set one thread, regardless of the number of cores.
    if args.threads is None and not os.environ.get("OMP_NUM_THREADS"):
        args.threads = max(1, usable_cores() // n)
    if args.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.trace is not None:
        os.environ[TRACE] = args.trace
    target = ["-m", *command] if args.module else command
    # forks of a program that only calls the command would call its exit hooks
    forks = args.nnodes == 1 and args.is_program and can_fork()
    on_hosts = _on_this_host if forks else _by_elastic
    try:
        with reports_folder() as reports:
            return on_hosts(args, n, target, reports)
    except GateError as error:
        _stderr().print(f"tessel run: {error}", markup=False)
        return 1
    except SignalException as error:
        _stderr().print(f"tessel run: stopped by {error.sigval.name}")
        return 128 + int(error.sigval)


def _on_this_host(args: argparse.Namespace, n: int, target: Sequence[str], reports: str) -> int:
    """Run workers that are forked."""
    _use_interface(loopback())
    _forget_token()
    job = ForkedJob(target, n, args.threads, Path(reports), str(uuid.uuid4()))
    failures = [WorkerFailure.of(*each, job.killed) for each in job.run().items()]
    return report(failures, world_size=n) if failures else 0


def _by_elastic(args: argparse.Namespace, n: int, target: Sequence[str], reports: str) -> int:
    """Run workers by torch's elastic launcher, perhaps together with those of other hosts."""
    if "LOGLEVEL" not in os.environ:  # elastic's log of a failure would hide its traceback
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    rendezvous = _rendezvous(args)
    launch = elastic_launch(_config(args, n, reports, rendezvous), sys.executable)
    stragglers = Stragglers()
    try:
        with stragglers:
            launch("-c", _WORKER, *target)
    except ChildFailedError as error:
        failures = [WorkerFailure.of(*each, stragglers.killed) for each in error.failures.items()]
        return report(failures, world_size=n * args.nnodes)
    except RendezvousError as error:
        _stderr().print(f"tessel run: the hosts did not meet: {error}", markup=False)
        return 1
    finally:
        rendezvous.shutdown()
    return 0


def _rendezvous(args: argparse.Namespace) -> HostRendezvous:
    """Make the rendezvous of this host with others, and set the interface for its workers."""
    if args.nnodes == 1:
        made = HostRendezvous(str(uuid.uuid4()), 1, None, b"", SECONDS_TO_MEET)
        _use_interface(loopback())
    else:
        token = read_token(args.token_file)
        made = HostRendezvous(args.rdzv_id, args.nnodes, args.rdzv_endpoint, token, SECONDS_TO_MEET)
        _use_interface(interface_of(made.address))
    _forget_token()
    return made


def _forget_token() -> None:
    """Hide the token from workers: it is for launchers, and programs log their environment."""
    os.environ.pop("TESSEL_TOKEN", None)


def _use_interface(interface: str | None) -> None:
    """Set the interface for workers: Gloo and NCCL would use the address of the host's name."""
    if interface is not None:  # workers inherit this
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


@contextlib.contextmanager
def reports_folder() -> Iterator[str]:
    """Make a folder for the reports of workers, and remove those that killed launchers left.

    A launcher holds a lock on its folder, which the system releases when the launcher ends in any
    way.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_REPORTS}*"):
        with contextlib.suppress(OSError), locked(left, waits=False):
            status = left.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _SECONDS_TO_LOCK:
                shutil.rmtree(left)
    folder, launcher = tempfile.mkdtemp(prefix=_REPORTS), os.getpid()
    try:
        with locked(Path(folder)):
            yield folder
    finally:
        if os.getpid() == launcher:  # and not one of its forks
            shutil.rmtree(folder, ignore_errors=True)


def check_command(args: argparse.Namespace, command: Sequence[str]) -> None:
    """End with a message and exit code 2 if the workers could not even start."""
    error = args.parser.error
    if not command:
        error("nothing to run: pass a script, or -m and a module")
    if args.module:
        path = sys.path[:]
        sys.path.insert(0, os.getcwd())
        try:  # the top-level package only: looking further would import it here
            exists = importlib.util.find_spec(command[0].partition(".")[0]) is not None
        except (ImportError, ValueError):
            exists = False
        finally:
            sys.path[:] = path
        if not exists:
            error(f"no module named {command[0]!r}; modules are looked up from {os.getcwd()}")
    if not args.module and not os.path.exists(command[0]):
        error(f"no such script: {command[0]!r} (looked in {os.getcwd()})")
    if args.nnodes > 1 and not args.rdzv_endpoint:
        error(f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, the same on every host")


def _config(
    args: argparse.Namespace, n: int, reports: str, rendezvous: HostRendezvous
) -> LaunchConfig:
    options: dict[str, Any] = {
        "min_nodes": args.nnodes,
        "max_nodes": args.nnodes,
        "nproc_per_node": n,
        "run_id": rendezvous.get_run_id(),
        "rdzv_backend": BACKEND,
        "rdzv_configs": {"rendezvous": rendezvous},
        "local_addr": rendezvous.address,
        "max_restarts": 0,
        "monitor_interval": 0.1,  # seconds between checks for the end of a worker
        "logs_specs": DefaultLogsSpecs(log_dir=reports),
    }
    # Not all supported versions of torch have these options.
    newer: dict[str, Any] = {
        "shutdown_timeout": _SECONDS_TO_END,
        "signals_to_handle": ",".join(number.name for number in stops()),
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**options, **{k: v for k, v in newer.items() if k in known})


@dataclass(frozen=True)
class WorkerFailure:
    """The end of a worker that failed.

    Args:
        rank: the worker.
        exitcode: its exit code, negative for a signal.
        pid: its process id.
        time: when it failed, in seconds since the epoch.
        error: the exception; empty if the worker wrote no report.
        traceback: the exception's traceback; empty if the worker wrote no report.
        consequence: whether it failed because another worker ended.
    """

    rank: int
    exitcode: int
    pid: int
    time: float
    error: str = ""
    traceback: str = ""
    consequence: bool = False

    @classmethod
    def of(cls, rank: int, failure: ProcessFailure, killed: Collection[int] = ()) -> WorkerFailure:
        """Combine elastic's record of a worker's end with the worker's own report, if any.

        `killed` are the processes that this launcher killed, since they did not end by themselves.
        """
        # Elastic ends the other workers by this signal when one has failed.
        ended_by_launcher = failure.exitcode == -signal.SIGTERM or failure.pid in killed
        message = failure.message
        if not isinstance(message, dict):
            time = failure.timestamp - _NOTICED_LATE_SECONDS
            return cls(rank, failure.exitcode, failure.pid, time, consequence=ended_by_launcher)
        info = message["extraInfo"]
        # A report of elastic's `record` has less.
        return cls(
            rank,
            info.get("exitcode", failure.exitcode),  # it may have been killed while it ended
            failure.pid,
            time=info.get("time", failure.timestamp),
            error=message["message"],
            traceback=info["py_callstack"],
            consequence=info.get("consequence", ended_by_launcher),
        )

    @property
    def end(self) -> str:
        """What happened, without the worker's name."""
        if self.error:
            return f"failed first: {self.error.splitlines()[0]}"
        if self.exitcode < 0:
            known = {each.value: each.name for each in signal.Signals}
            name = known.get(-self.exitcode, f"signal {-self.exitcode}")
            return f"was killed by {name} (pid {self.pid})"
        return f"ended with exit code {self.exitcode} (pid {self.pid})"


def first_failure(failures: Iterable[WorkerFailure]) -> WorkerFailure:
    """Return the first failure that was not the consequence of another.

    >>> from tessel.cli.run import WorkerFailure, first_failure
    >>> lost = WorkerFailure(0, 1, 100, time=5.0, error="WorkerLost: worker 1", consequence=True)
    >>> cause = WorkerFailure(1, 1, 101, time=5.1, error="ValueError: no data")
    >>> first_failure([lost, cause]).rank
    1
    """
    failures = list(failures)
    causes = [failure for failure in failures if not failure.consequence]
    # If none is a cause, as when a worker was stopped, the reports of workers that lost it explain
    # what happened, and workers that the launcher ended have none.
    told = [failure for failure in failures if failure.error]
    return min(causes or told or failures, key=lambda failure: failure.time)


def report(failures: Sequence[WorkerFailure], world_size: int) -> int:
    """Print the failures, the first one last with its traceback, and return its exit code."""
    first = first_failure(failures)
    console = _stderr()
    ranks: dict[str, list[int]] = {}  # one line for each error that followed the first one
    for failure in failures:
        if failure is not first and failure.error:
            lost = "they lost a worker" if failure.consequence else failure.error.splitlines()[0]
            ranks.setdefault(lost, []).append(failure.rank)
    for error, who in ranks.items():
        *head, last = map(str, sorted(who))
        names = f"workers {', '.join(head)} and {last}" if head else f"worker {last}"
        console.print(f"{names} failed later: {error}", style="dim", markup=False)
    console.print(
        f"worker {first.rank} of {world_size} {first.end}", style="bold red", markup=False
    )
    if first.traceback:
        console.print(first.traceback.rstrip("\n"), markup=False)
    # As in shells: 128 plus the number of the signal.
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


@argument
def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    # stricter than `int`, which accepts "1_0" and digits of all scripts
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise ValueError(f"expected 1 or more, got {text}")
    return int(text)


@argument
def trace_file(text: str) -> str:
    """Parse a path to which a trace can be written."""
    path = os.path.abspath(text)
    if wrong := why_not(Path(path)):
        raise ValueError(wrong)
    return path
