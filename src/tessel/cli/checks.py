"""Checks: what is wrong with a machine, judged by its facts alone, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessel.cli.facts import Facts
from tessel.cli.measure import Rate
from tessel.operators.units import num_bytes

_GIB = 2**30
_OLDEST_TORCH, _FIRST_TOO_NEW_TORCH = (2, 11), (3, 0)
_SLOW_SECONDS = 0.02  # of a small message, which takes far less on an idle machine


@dataclass(frozen=True)
class Finding:
    """Something to fix.

    Args:
        broken: whether Tessel cannot work before it is fixed; else it is advice.
        what: what was found.
        mend: how to fix it.
    """

    broken: bool
    what: str
    mend: str


def check_torch(facts: Facts) -> Finding | None:
    """Tessel supports a range of torch's versions."""
    # "2.13.0+cpu" and "2.14.0a0" count as 2.13 and 2.14.
    found = tuple(int(number) for number in re.findall(r"\d+", facts.torch)[:2])
    if _OLDEST_TORCH <= found < _FIRST_TOO_NEW_TORCH:
        return None
    return Finding(
        True,
        f"torch {facts.torch} is not supported by Tessel: 2.11 or later, below 3",
        "pip install 'torch>=2.11,<3'",
    )


def check_gloo(facts: Facts) -> Finding | None:
    """CPU tensors travel by Gloo."""
    if "gloo" in facts.backends:
        return None
    return Finding(
        True,
        "this torch has no Gloo, which moves CPU tensors between workers",
        "install a torch that is built with USE_DISTRIBUTED=1 and USE_GLOO=1, as the official "
        "packages for Linux and macOS are",
    )


def check_nccl(facts: Facts) -> Finding | None:
    """GPU tensors travel by NCCL."""
    if not facts.devices or "nccl" in facts.backends:
        return None
    return Finding(
        True,
        f"there are {len(facts.devices)} GPUs, but this torch has no NCCL to move their tensors",
        "install torch's official CUDA package, or hide the GPUs with CUDA_VISIBLE_DEVICES=",
    )


def check_gpu_is_used(facts: Facts) -> Finding | None:
    """A driver without a device that torch sees is mostly the wrong torch."""
    if facts.devices or not facts.nvidia_driver:
        return None
    return Finding(
        False,
        "there is an NVIDIA driver, but torch sees no GPU",
        "install torch's CUDA package, and see what CUDA_VISIBLE_DEVICES and nvidia-smi say",
    )


def check_loopback(facts: Facts) -> Finding | None:
    """Workers of one host talk over the loopback interface."""
    if facts.loopback:
        return None
    return Finding(
        True,
        "a process cannot reach itself as localhost",
        "bring the interface up (ip link set lo up) and have `127.0.0.1 localhost` in /etc/hosts",
    )


def check_hostname(facts: Facts) -> Finding | None:
    """Gloo and torchrun look up the host's own name."""
    if facts.host_address is not None:
        return None
    return Finding(
        False,
        f"this host's name, {facts.hostname}, does not resolve to an address",
        f"add `127.0.1.1 {facts.hostname}` to /etc/hosts, or set GLOO_SOCKET_IFNAME to the "
        f"interface to use ({', '.join(facts.interfaces)})",
    )


def check_interface(facts: Facts) -> Finding | None:
    """The interface that the user chose for Gloo exists."""
    if facts.gloo_interface is None:
        return None
    # Gloo takes several names, with commas between them.
    unknown = set(facts.gloo_interface.split(",")) - set(facts.interfaces)
    if not unknown:
        return None
    return Finding(
        True,
        f"GLOO_SOCKET_IFNAME={facts.gloo_interface}, but there is no such interface here",
        f"unset it, or choose from: {', '.join(facts.interfaces)}",
    )


def check_job_variables(facts: Facts) -> Finding | None:
    """A launcher's variables without a launcher make a script wait for workers."""
    if len(facts.job_variables) < 2:  # a job is joined only where both are set
        return None
    return Finding(
        False,
        "RANK and WORLD_SIZE are set here, so every script assumes that it is one of several "
        "workers and waits for the others",
        "unset RANK WORLD_SIZE; `tessel run` sets them for its workers",
    )


def check_launcher(facts: Facts) -> Finding | None:
    """A task of srun or mpirun that cannot join its job is not a world of one."""
    if facts.launch_problem is None:
        return None
    what, _, mend = facts.launch_problem.rpartition("; ")
    return Finding(
        False,
        f"this is one of several tasks, and scripts cannot join their job: {what}",
        mend,
    )


def check_threads(facts: Facts) -> Finding | None:
    """Workers share the cores."""
    asked = facts.omp_num_threads  # of each worker: already two of them share the cores
    if asked is None or not asked.isdigit() or int(asked) <= max(1, facts.usable_cores // 2):
        return None
    fitting = max(1, facts.usable_cores // 2)
    return Finding(
        False,
        f"OMP_NUM_THREADS={asked}: even 2 workers would run {2 * int(asked)} threads on "
        f"{facts.usable_cores} cores and slow each other down",
        f"unset OMP_NUM_THREADS (`tessel run` then divides the cores among the workers), or set "
        f"it to {fitting} or less",
    )


def check_quota(facts: Facts) -> Finding | None:
    """Torch counts the machine's cores, not those that the process may use."""
    if facts.torch_threads <= facts.usable_cores:
        return None
    return Finding(
        False,
        f"torch uses {facts.torch_threads} threads, but this process may use "
        f"{facts.usable_cores} of the {facts.cores} cores (affinity or control group)",
        f"set OMP_NUM_THREADS={facts.usable_cores}; `tessel run` does it for its workers",
    )


def check_shared_memory(facts: Facts) -> Finding | None:
    """Containers get 64 MiB of /dev/shm by default, too little for data loaders."""
    if facts.shared_memory is None or facts.shared_memory >= _GIB:
        return None
    return Finding(
        False,
        f"/dev/shm has only {num_bytes(facts.shared_memory)}; workers and data loaders that share "
        f"tensors end with a bus error when it is full",
        "start the container with --shm-size=8g or --ipc=host, or mount -o remount,size=8g "
        "/dev/shm",
    )


def check_open_files(facts: Facts) -> Finding | None:
    """A group of workers costs each process a handful of descriptors."""
    if facts.open_files >= 1024:
        return None
    return Finding(
        False,
        f"a process may open only {facts.open_files} files; a group of workers takes two for "
        f"each other worker",
        "ulimit -n 65536",
    )


def check_memory(facts: Facts) -> Finding | None:
    """Each worker imports torch, a few hundred MiB."""
    if facts.memory_available is None or facts.memory_available >= _GIB:
        return None
    return Finding(
        False,
        f"only {num_bytes(facts.memory_available)} of memory is available; a worker needs about "
        f"300 MiB before it holds any tensor",
        "end other programs, or use fewer workers",
    )


def check_pictures(facts: Facts) -> Finding | None:
    """The demo's picture needs matplotlib."""
    if facts.matplotlib is not None:
        return None
    return Finding(
        False,
        "matplotlib is not installed: `tessel demo` draws no picture",
        "pip install 'tessel[viz]'",
    )


Check = Callable[[Facts], Finding | None]

# Findings that are equally bad are shown in this order.
CHECKS: tuple[Check, ...] = (
    check_torch,
    check_gloo,
    check_nccl,
    check_loopback,
    check_interface,
    check_hostname,
    check_job_variables,
    check_launcher,
    check_gpu_is_used,
    check_threads,
    check_quota,
    check_shared_memory,
    check_open_files,
    check_memory,
    check_pictures,
)


def examine(facts: Facts) -> list[Finding]:
    """Every finding about these facts, the broken ones first."""
    found = [finding for check in CHECKS if (finding := check(facts)) is not None]
    return sorted(found, key=lambda finding: not finding.broken)


def check_rates(rates: Sequence[Rate]) -> Finding | None:
    """A small message takes well under a millisecond between two processes of one host."""
    slow = [rate for rate in rates if rate.latency > _SLOW_SECONDS]
    if not slow:
        return None
    worst = max(slow, key=lambda rate: rate.latency)
    return Finding(
        False,
        f"a small {worst.movement} takes {1e3 * worst.latency:.0f} ms; below 1 ms is usual",
        "see whether other programs keep the cores busy (top), and use no more workers than cores",
    )
