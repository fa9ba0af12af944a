"""Launchers: how `srun`, `mpirun` and others tell each task its number, and where tasks meet.

`torchrun` and `tessel run` set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Other launchers have
their own variables for the first two, and do not set a meeting point: it is derived, without a
message, from facts that all tasks know (the list of hosts, the name of the job). Variables that
show that there are several tasks, but not how they meet, raise instead of silently starting worlds
of one.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tessel.machine import interface_of, loopback
from tessel.settings import as_whole_number

CHOICE = "TESSEL_LAUNCHER"
FIRST_PORT, NUM_PORTS = 20000, 8192  # below the ports that systems give away by themselves
USUAL_SECONDS = 300.0  # time limit to meet, as for torch's store
_LOOPBACK = "127.0.0.1"
_SECONDS_BETWEEN_LOOKS, _SECONDS_TO_TELL = 0.05, 2.0
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # of SLURM: batch scripts, interactive shells and the like
_WAY_OUT = (
    f"set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each task, or {CHOICE}=none if each is "
    f"to be a world of its own"
)
Environ = Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """The variables by which a launcher tells a task its place; the first one that is set counts.

    Args:
        name: the name by which TESSEL_LAUNCHER chooses it.
        command: the command that its users start.
        rank: the number of the task.
        workers: the number of tasks.
        local_rank: the number of the task among those of its host.
        local_workers: the number of tasks of its host.
        job: a value that all tasks of one start share, and that differs between starts.
        server: variables of which it sets one for each process that it starts, and users set none:
            MPI finds the others by them.
        is_mpirun: whether tasks are processes of an MPI library.
        passes: the option by which its users pass on MASTER_ADDR.
    """

    name: str
    command: str
    rank: tuple[str, ...]
    workers: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_workers: tuple[str, ...]
    job: tuple[str, ...]
    server: tuple[str, ...]
    is_mpirun: bool = True
    passes: str = ""


OPEN_MPI = Launcher(
    "openmpi",
    "mpirun of Open MPI",
    rank=("OMPI_COMM_WORLD_RANK",),
    workers=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_workers=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    server=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    passes="-x MASTER_ADDR=…",
)
MVAPICH = Launcher(
    "mvapich",
    "mpirun of MVAPICH",
    rank=("MV2_COMM_WORLD_RANK",),
    workers=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_workers=("MV2_COMM_WORLD_LOCAL_SIZE",),
    job=("PMI_JOBID",),
    server=("PMI_FD", "PMI_PORT"),
)
MPICH = Launcher(  # Intel MPI and others have the same process manager, Hydra; Cray's has PALS
    "mpich",
    "mpirun of MPICH or Intel MPI",
    rank=("PMI_RANK", "PALS_RANKID"),
    workers=("PMI_SIZE", "PALS_SIZE"),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    local_workers=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    job=("PMI_JOBID", "PALS_APID"),
    server=("PMI_FD", "PMI_PORT", "PMIX_NAMESPACE", "PALS_APID"),
    passes="-genv MASTER_ADDR …",
)
JSRUN = Launcher(
    "jsrun",
    "jsrun",
    rank=("JSM_NAMESPACE_RANK",),
    workers=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_workers=("JSM_NAMESPACE_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "LSB_JOBID"),
    server=("PMIX_NAMESPACE",),
    passes="-E MASTER_ADDR=…",
)
FLUX = Launcher(
    "flux",
    "flux run",
    rank=("FLUX_TASK_RANK",),
    workers=("FLUX_JOB_SIZE",),
    local_rank=("FLUX_TASK_LOCAL_ID",),
    local_workers=(),  # all tasks if there is one host, see `_local`
    job=("FLUX_JOB_ID",),
    server=("PMIX_NAMESPACE", "PMI_FD"),
    is_mpirun=False,
    passes="--env=MASTER_ADDR=…",
)
SLURM = Launcher(
    "slurm",
    "srun",
    rank=("SLURM_PROCID",),
    workers=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    local_workers=(),  # given as a list, see `_local`
    job=("SLURM_JOB_ID", "SLURM_JOBID"),
    server=("PMIX_NAMESPACE", "PMI_FD", "PMI_JOBID"),
    is_mpirun=False,
)
# MPI first: in a job of SLURM, mpirun starts its daemons by srun, one for each host, and their
# variables are passed on to the tasks.
LAUNCHERS = (OPEN_MPI, MVAPICH, MPICH, JSRUN, FLUX, SLURM)
CHOICES = ("auto", "none", *(each.name for each in LAUNCHERS))
# Variables of launchers that tell neither how many tasks there are nor where they meet, or of users
# who forgot half of them: the number from which on a process is one of several. Scripts of PBS are
# task 1 on node 0, and tasks of pbsdsh are counted from there; blaunch counts from 1, and scripts
# of LSF are no task. Scripts of sbatch are task 0 of all, and belong to no step.
_ONE_OF_SEVERAL = {
    "WORLD_SIZE": (2, "RANK is not set"),
    "RANK": (1, "WORLD_SIZE is not set"),
    "LOCAL_WORLD_SIZE": (2, "RANK and WORLD_SIZE are not set"),
    "LOCAL_RANK": (1, "RANK and WORLD_SIZE are not set"),
    "SLURM_PROCID": (1, "SLURM_STEP_ID has no number of a step of srun"),
    "SLURM_STEP_NUM_TASKS": (2, "SLURM_STEP_ID has no number of a step of srun"),
    "MPI_NRANKS": (2, "Tessel does not know how tasks of Platform MPI meet"),
    "MPI_RANKID": (1, "Tessel does not know how tasks of Platform MPI meet"),
    "LSF_PM_TASKID": (1, "blaunch does not say of how many"),
    "PMIX_RANK": (1, "PMIx does not say of how many"),
    "ALPS_APP_PE": (1, "aprun does not say of how many"),
    "PBS_VNODENUM": (1, "pbsdsh gives no numbers from 0 on; start tasks with mpirun"),
    "PBS_NODENUM": (1, "pbsdsh gives no numbers from 0 on; start tasks with mpirun"),
    "PBS_TASKNUM": (2, "pbsdsh gives no numbers from 0 on; start tasks with mpirun"),
} | {
    name: (first, f"{launcher.rank[0]} and {launcher.workers[0]} are not set")
    for launcher in LAUNCHERS
    for names, first in ((launcher.local_rank, 1), (launcher.local_workers, 2))
    for name in names
}
# variables whose value 1 means a job of one task, in which such numbers mean nothing
_OF_ONE_TASK = {"PBS_": "PBS_NP", "LSF_": "LSB_DJOB_NUMPROC"}


@dataclass(frozen=True)
class LaunchedJob:
    """A job as seen by one of its tasks.

    Args:
        launcher: the launcher that has started it.
        rank: the number of this task.
        workers: the number of tasks.
        local_rank: the number of this task among those of its host; None if unknown.
        local_workers: the number of tasks of its host; None if unknown.
        address: the address at which worker 0 listens.
        port: the port at which worker 0 listens.
        name: the name of the job, different for each start if the launcher provides that.
    """

    launcher: Launcher
    rank: int
    workers: int
    local_rank: int | None
    local_workers: int | None
    address: str
    port: int
    name: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torchrun would have set."""
        given = {
            "RANK": self.rank,
            "WORLD_SIZE": self.workers,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_workers,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in given.items() if value is not None}

    @property
    def is_on_one_host(self) -> bool:
        return self.local_workers == self.workers

    def __str__(self) -> str:
        return (
            f"worker {self.rank} of {self.workers}, started by {self.launcher.command}; all meet "
            f"at {self.address}:{self.port}"
        )


def find_job(environ: Environ) -> LaunchedJob | None:
    """The job of several tasks for which srun, mpirun or the like started this process, if any.

    The caller checks torchrun's variables first: they take precedence over all others.

    >>> from tessel.transport.launchers import find_job
    >>> find_job({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})
    >>> job = find_job({
    ...     "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    ...     "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    ... })
    >>> job.rank, job.workers, job.address
    (1, 2, '127.0.0.1')

    Raises:
        ValueError: if there are several tasks, and it is unknown how they meet.
    """
    launcher = find_launcher(environ)
    if launcher is None:
        _check_alone(environ)
        return None
    rank, workers = task_of(environ, launcher)
    if rank is None or workers is None:
        has, lacks = (
            (launcher.workers, launcher.rank) if rank is None else (launcher.rank, launcher.workers)
        )
        raise ValueError(
            f"{_said(environ, has)} says that {launcher.command} has started this task, but "
            f"{lacks[0]} is not set; {_WAY_OUT}"
        )
    if launcher is SLURM and rank >= workers:
        # tasks are numbered over all components, but each component gives only its own count
        raise ValueError(
            f"{_said(environ, SLURM.rank)} is not below {_said(environ, SLURM.workers)}, as in the "
            "steps of heterogeneous jobs, which are not supported: start all tasks in one "
            f"component (srun --het-group=0), or {_WAY_OUT}"
        )
    _check(environ, rank < workers, launcher, launcher.rank, launcher.workers)
    for name, value in (("RANK", rank), ("WORLD_SIZE", workers)):
        if environ.get(name) and environ[name] != str(value):
            raise ValueError(
                f"{name} is {environ[name]}, but {launcher.command} says {value}; unset it, or "
                f"{_WAY_OUT}"
            )
    if workers == 1:
        return None
    local_rank, local_workers = _number(environ, launcher.local_rank), _local(environ, launcher)
    if local_workers is not None:
        names = launcher.local_workers or (
            launcher.workers if launcher is FLUX else _LISTS_OF_TASKS
        )
        _check(environ, 0 < local_workers <= workers, launcher, names, launcher.workers)
        if local_rank is not None:
            _check(environ, local_rank < local_workers, launcher, launcher.local_rank, names)
    name = _name(environ, launcher, local_workers == workers)
    address = _address(environ, launcher, workers, local_workers == workers)
    port = _number(environ, ("MASTER_PORT",))
    if port is None:
        port = FIRST_PORT + zlib.crc32(name.encode("utf-8", "surrogateescape")) % NUM_PORTS
    elif not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT must be from 1 to 65535, got {port}")
    return LaunchedJob(
        launcher,
        rank,
        workers,
        local_rank,
        local_workers,
        address,
        port,
        name,
    )


def find_launcher(environ: Environ) -> Launcher | None:
    """The launcher that has started this task, by its variables or by TESSEL_LAUNCHER."""
    choice = environ.get(CHOICE) or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{CHOICE} must be one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "none":
        return None
    present = [each for each in LAUNCHERS if _is_present(environ, each)]
    if choice != "auto":
        chosen = next(each for each in LAUNCHERS if each.name == choice)
        if chosen not in present:
            raise ValueError(
                f"{CHOICE} is {choice}, but the variables of {chosen.command} are not set; unset it"
            )
        return chosen
    if present[:1] == [MPICH]:
        # srun --mpi=pmi2 and flux run set PMI's variables alike, and their own contain more
        alike = [each for each in present if task_of(environ, each) == task_of(environ, MPICH)]
        return alike[-1]
    return present[0] if present else None


def _check_alone(environ: Environ) -> None:
    """Raise if a process without a known launcher is one of several tasks nevertheless."""
    if environ.get(CHOICE) == "none":
        return
    said = environ.get("WORLD_SIZE", "").strip()
    if said and not (said.isascii() and said.isdigit()):
        raise ValueError(
            f"WORLD_SIZE must be a whole number, got {environ['WORLD_SIZE']!r}, and RANK is not "
            f"set; unset it, {_WAY_OUT}"
        )
    has_step = _step(environ).isdigit()  # an interactive shell is a step without tasks
    for name, (first, lacks) in _ONE_OF_SEVERAL.items():
        said = environ.get(name, "").strip()
        is_numbered = said.isascii() and said.isdigit() and int(said) >= first
        counts = (_OF_ONE_TASK[each] for each in _OF_ONE_TASK if name.startswith(each))
        is_alone = any(environ.get(count) == "1" for count in counts)
        if is_numbered and not is_alone and not (has_step and name.startswith("SLURM_")):
            raise ValueError(
                f"{name}={said} says that this is one of several tasks, but {lacks}; {_WAY_OUT}"
            )


def check_world_of_one(environ: Environ) -> None:
    """Raise if WORLD_SIZE is 1, as left over from another program, in one of several tasks.

    torchrun and tessel run, which set WORLD_SIZE themselves, may start a worker in each task.
    """
    if environ["WORLD_SIZE"].strip() != "1" or "TORCHELASTIC_RUN_ID" in environ:
        return
    launcher = find_launcher(environ)
    workers = None if launcher is None else task_of(environ, launcher)[1]
    if launcher is not None and workers is not None and workers > 1:
        raise ValueError(
            f"WORLD_SIZE is 1, but {launcher.command} says {workers}; unset RANK and WORLD_SIZE, "
            f"or {_WAY_OUT}"
        )


def other_place(environ: Environ) -> str:
    """What the launcher says if RANK and WORLD_SIZE are not those of this task; else nothing.

    They may be meant so: a task may start several workers. Or a batch script exports its own
    RANK=$SLURM_PROCID for all tasks, which then all are worker 0, and never meet.
    """
    launcher = None if "TORCHELASTIC_RUN_ID" in environ else find_launcher(environ)
    if launcher is None:
        return ""
    place = task_of(environ, launcher)
    if None in place or place == (_number(environ, ("RANK",)), _number(environ, ("WORLD_SIZE",))):
        return ""
    return (
        f"RANK is {environ['RANK']} and WORLD_SIZE is {environ['WORLD_SIZE']}, but this is task "
        f"{place[0]} of {place[1]} of {launcher.command}: unset both if all tasks have the same "
        f"ones from the script that starts them"
    )


def task_of(environ: Environ, launcher: Launcher) -> tuple[int | None, int | None]:
    """The number of this task and the number of tasks, by the launcher's variables."""
    return _number(environ, launcher.rank), _number(environ, launcher.workers)


def _is_present(environ: Environ, launcher: Launcher) -> bool:
    """Whether this process is a task of the launcher."""
    if launcher is SLURM:
        # The shells of salloc and sbatch have numbers of tasks, too, but are no tasks.
        step = _step(environ)
        return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    return any(environ.get(name) for name in (*launcher.rank, *launcher.workers))


def _step(environ: Environ) -> str:
    """The SLURM step of this process."""
    return environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""


def _number(environ: Environ, names: tuple[str, ...]) -> int | None:
    """The number in the first of these variables that is set."""
    name = next((name for name in names if environ.get(name)), None)
    return None if name is None else as_whole_number(name, environ[name])


def _said(environ: Environ, names: tuple[str, ...]) -> str:
    name = next((name for name in names if environ.get(name)), names[0])
    return f"{name}={environ.get(name, '')}"


def _check(
    environ: Environ, fits: bool, launcher: Launcher, one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    if not fits:
        raise ValueError(
            f"the variables of {launcher.command} contradict each other: {_said(environ, one)}, "
            f"{_said(environ, other)}; {_WAY_OUT}"
        )


_LISTS_OF_TASKS = ("SLURM_GTIDS", "SLURM_STEP_TASKS_PER_NODE")


def _local(environ: Environ, launcher: Launcher) -> int | None:
    """The number of tasks of this host, or None if unknown."""
    if launcher is FLUX:
        return _number(environ, FLUX.workers) if environ.get("FLUX_JOB_NNODES") == "1" else None
    if launcher is not SLURM:
        return _number(environ, launcher.local_workers)
    if environ.get("SLURM_GTIDS"):  # the numbers of the tasks of this host
        return len(environ["SLURM_GTIDS"].split(","))
    node, counts = _number(environ, ("SLURM_NODEID",)), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if node is None or not counts:
        return None
    for each in counts.split(","):  # such as 2(x3),1
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE must look like 2(x3),1, got {counts!r}")
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    return None


def _name(environ: Environ, launcher: Launcher, is_on_one_host: bool) -> str:
    """The name of this start of tasks, which all tasks know."""
    words = [launcher.name]
    words += [environ[name] for name in launcher.job if environ.get(name)][:1]
    if launcher is not OPEN_MPI:  # under Open MPI these may be those of a daemon, see LAUNCHERS
        words += [environ[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in environ]
    if len(words) == 1:
        words += [environ[name] for name in ("PBS_JOBID",) if name in environ]
    if launcher in (MVAPICH, MPICH) and is_on_one_host:  # no name, but a common parent
        words += _ancestor(
            *("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap_pro", "mpiexec.hydra", "mpispawn")
        )
    return " ".join(words)


def _ancestor(*commands: str) -> list[str]:
    """The ancestor of this process with one of these names, if the system tells."""
    process = os.getppid()
    while process > 1:
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            break
        # 17 (a name) S 16 …: a name may have spaces and brackets
        command, _, rest = status.partition("(")[2].rpartition(")")
        if command in (each[:15] for each in commands):
            return [f"{process} {rest.split()[19]}"]  # with its start time: ids are reused
        process = int(rest.split()[1])
    return []


def _address(environ: Environ, launcher: Launcher, workers: int, is_on_one_host: bool) -> str:
    """The address of worker 0, as all tasks know it: on the first host."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if is_on_one_host:
        return _LOOPBACK
    step = ("SLURM_STEP_NODELIST",) if launcher is SLURM else ()
    for name in (*step, "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            try:
                return next(hosts_of(environ[name]))
            except ValueError as error:
                raise ValueError(f"{name}: {error}; set MASTER_ADDR") from error
    if launcher is SLURM and environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return environ["SLURM_LAUNCH_NODE_IPADDR"]
    if environ.get("PBS_NODEFILE"):
        try:
            words = Path(environ["PBS_NODEFILE"]).read_text().split()
        except (OSError, UnicodeDecodeError):  # hosts other than the first may not have it
            words = []
        if words:
            return words[0]
    passed = f", or {launcher.passes}" if launcher.passes else ""
    raise ValueError(
        f"{launcher.command} has started {workers} tasks, on several hosts or on an unknown "
        "number of them, and their meeting point is unknown: set MASTER_ADDR to an address of "
        f"the host of task 0; export MASTER_ADDR=…{passed}, or "
        f"{CHOICE}=none if each task is to be a world of its own"
    )


def hosts_of(listing: str) -> Iterator[str]:
    """The hosts in a list of SLURM, as `scontrol show hostnames` prints them.

    >>> from tessel.transport.launchers import hosts_of
    >>> list(hosts_of("node[01-03,7],gpu-a"))
    ['node01', 'node02', 'node03', 'node7', 'gpu-a']
    """
    # commas within brackets separate ranges
    for entry in re.split(r",(?![^\[]*\])", listing.strip()):
        if not entry:
            raise ValueError(
                f"expected a list of hosts such as node[01-03,7],gpu-a, got {listing!r}"
            )
        yield from _expanded(entry, listing)


def _expanded(entry: str, listing: str) -> Iterator[str]:
    """The hosts of one entry, such as a[1-2]b[08-11]; lazily, since most callers need the first."""
    name, has_ranges, rest = entry.partition("[")
    ranges, is_closed, rest = rest.partition("]")
    if any(c in "[] \t" for c in name) or bool(has_ranges) != bool(is_closed):
        raise ValueError(f"expected a list of hosts such as node[01-03,7],gpu-a, got {listing!r}")
    if not has_ranges:
        yield name
        return
    spans = []
    for each in ranges.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", each)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(
                f"expected ranges such as 01-03,7 in brackets, got {ranges!r} in {listing!r}"
            )
        spans.append((int(found[1]), int(found[2] or found[1]), len(found[1])))
    for low, high, width in spans:
        for number in range(low, high + 1):
            for tail in _expanded(rest, listing):
                yield f"{name}{number:0{width}}{tail}"


def meet(job: LaunchedJob, limit: timedelta | None) -> Any:
    """Meet the other workers of the job, and return the store in which all have met.

    Worker 0 listens only at the address of the job, which is the loopback interface for one host.

    Raises:
        RuntimeError: if they do not meet within the time limit; the text says why.
    """
    seconds = USUAL_SECONDS if limit is None else limit.total_seconds()
    deadline = time.monotonic() + seconds
    listener = _listener(job) if job.rank == 0 else None
    while True:
        # longer than worker 0 waits for the last one, so that the others receive its verdict
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()) + _SECONDS_TO_TELL)
        settings: dict[str, Any] = {}
        if listener is not None:
            settings = {"is_master": True, "master_listen_fd": listener.detach()}
        try:
            store = dist.TCPStore(
                job.address, job.port, timeout=left, wait_for_workers=False, **settings
            )
            if _is_met(store, job, deadline):
                return store
        except (dist.DistError, OSError) as error:
            # or the store has just ended: that of the previous script, if a task runs several
            if job.rank == 0 or time.monotonic() > deadline:
                reason, *_ = (str(error).strip() or repr(error)).splitlines()
                raise RuntimeError(
                    f"{job}, which did not succeed within {seconds:.0f} s: {reason}. Check that "
                    "all tasks call tessel.world(), and that task 0 can be reached there; "
                    "MASTER_ADDR and MASTER_PORT choose another address"
                ) from error
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _is_met(store: Any, job: LaunchedJob, deadline: float) -> bool:
    """Wait until all workers are in a store; return False if it is that of an earlier meeting."""
    mine = f"{job.workers} tasks of {job.name}"
    if job.rank == 0:
        store.set("launched", mine)
    told = store.get("launched").decode()
    if told != mine:
        raise RuntimeError(
            f"{job}, but the program that listens there has {told}, and this task is one of "
            f"{mine}; set MASTER_PORT to another port for each job"
        )
    if store.add(f"came/{job.rank}", 1) > 1:
        if store.check(["met"]) and not store.get("met"):
            return False
        store.set("twice", f"two tasks say that they are worker {job.rank} of {job.workers}")
    store.add("came", 1)
    # worker 0 announces that all workers have come, or why they do not meet
    while job.rank == 0 and not store.check(["met"]):
        if store.check(["twice"]):
            store.set("met", store.get("twice"))
        elif store.add("came", 0) == job.workers and not store.check(["twice"]):
            store.set("met", "")
        elif time.monotonic() > deadline:
            missing = [str(w) for w in range(job.workers) if not store.check([f"came/{w}"])]
            store.set("met", f"workers {', '.join(missing[:10])} did not come")
        else:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    problem = store.get("met").decode()
    if not problem:
        return True
    heard = store.add("heard", 1)
    deadline = time.monotonic() + _SECONDS_TO_TELL
    # the store ends with worker 0, and the others would not learn of the problem
    while job.rank == 0 and heard < store.add("came", 0) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        heard = store.add("heard", 0)
    raise RuntimeError(f"{job}, which failed: {problem}")


def _listener(job: LaunchedJob) -> socket.socket:
    """The socket at which worker 0 listens."""
    here = socket.gethostname()
    try:
        found = socket.getaddrinfo(job.address, job.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RuntimeError(
            f"{job}, but {here} cannot look up {job.address!r} ({error}); set MASTER_ADDR"
        ) from error
    problem = ""
    for family, _, _, _, (address, *_) in found:
        if not job.is_on_one_host and (str(address).startswith("127.") or address == "::1"):
            problem = f"is {address} on {here}, where no other host can reach it"
            continue
        try:
            return socket.create_server((address, job.port), family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RuntimeError(
                    f"{job}, but that port is in use on {here}; set MASTER_PORT to a free one, the "
                    f"same for all tasks"
                ) from error
            problem = f"is no address of {here}, where worker 0 runs ({error.strerror})"
    raise RuntimeError(
        f"{job}, but {job.address} {problem}; set MASTER_ADDR to an address of the host of task 0"
    )


def own_interface(job: LaunchedJob) -> str | None:
    """The network interface of this host that leads to the others, if it is known."""
    if job.is_on_one_host and job.address == _LOOPBACK:
        return loopback()
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            job.address, job.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as way:
            way.connect(place)  # for datagrams this sends nothing, and only looks up the route
            address = str(way.getsockname()[0])
        return interface_of(address)
    except OSError:
        return None
