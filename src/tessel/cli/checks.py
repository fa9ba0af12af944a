"""Checks: problems of a machine, judged by its facts alone, and how to fix them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tessel.cli.facts import Facts
from tessel.cli.measure import Rate
from tessel.operators.units import num_bytes

_GIB = 2**30
_OLDEST_TORCH, _FIRST_TOO_NEW_TORCH = (2, 11), (3, 0)
_SLOW_SECONDS = 0.02  # for a small message, which takes far less on an idle machine


@dataclass(frozen=True)
class Finding:
    """Something to fix.

    Args:
        broken: whether Tessel cannot work until it is fixed; else it is advice.
        what: the problem.
        mend: how to fix it.
    """

    broken: bool
    what: str
    mend: str


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Check the version of torch and its communication backends."""
    # "2.13.0+cpu" and "2.14.0a0" count as 2.13 and 2.14.
    found = tuple(int(number) for number in re.findall(r"\d+", facts.torch)[:2])
    if not _OLDEST_TORCH <= found < _FIRST_TOO_NEW_TORCH:
        yield Finding(
            True,
            f"torch {facts.torch} is not supported by Tessel: 2.11 or later, below 3",
            "pip install 'torch>=2.11,<3'",
        )
    if "gloo" not in facts.backends:
        yield Finding(
            True,
            "this torch has no Gloo, which moves CPU tensors between workers",
            "install a torch that is built with USE_DISTRIBUTED=1 and USE_GLOO=1, as the official "
            "packages for Linux and macOS are",
        )
    if facts.devices and "nccl" not in facts.backends:
        num_gpus = len(facts.devices)
        yield Finding(
            True,
            f"there are {num_gpus} GPUs, but this torch has no NCCL to move their tensors",
            "install torch's official CUDA package, or hide the GPUs with CUDA_VISIBLE_DEVICES=",
        )


def check_network(facts: Facts) -> Iterator[Finding]:
    """Check how workers reach each other: on one host over the loopback interface."""
    interfaces = ", ".join(facts.interfaces)
    if not facts.loopback:
        yield Finding(
            True,
            "a process cannot reach itself as localhost",
            "bring the interface up (ip link set lo up) and have `127.0.0.1 localhost` in "
            "/etc/hosts",
        )
    # Gloo accepts several names, separated by commas.
    chosen = () if facts.gloo_interface is None else facts.gloo_interface.split(",")
    if not {*chosen} <= {*facts.interfaces}:
        yield Finding(
            True,
            f"GLOO_SOCKET_IFNAME={facts.gloo_interface}, but there is no such interface here",
            f"unset it, or choose from: {interfaces}",
        )
    if facts.host_address is None:  # Gloo and torchrun look up the host's own name
        yield Finding(
            False,
            f"this host's name, {facts.hostname}, does not resolve to an address",
            f"add `127.0.1.1 {facts.hostname}` to /etc/hosts, or set GLOO_SOCKET_IFNAME to the "
            f"interface to use ({interfaces})",
        )


def check_job(facts: Facts) -> Iterator[Finding]:
    """Check whether scripts started here would wait for workers, or not find them."""
    if len(facts.job_variables) == 2:  # a job is joined only if both are set
        yield Finding(
            False,
            "RANK and WORLD_SIZE are set here, so every script assumes that it is one of several "
            "workers and waits for the others",
            "unset RANK WORLD_SIZE; `tessel run` sets them for its workers",
        )
    if facts.launch_problem is not None:  # a task of srun or mpirun that is no world of one
        what, _, mend = facts.launch_problem.rpartition("; ")
        text = f"this is one of several tasks, and scripts cannot join their job: {what}"
        yield Finding(False, text, mend)


def check_processors(facts: Facts) -> Iterator[Finding]:
    """Check the processors, and whether workers will share them well."""
    cores, fitting = facts.usable_cores, max(1, facts.usable_cores // 2)
    if facts.nvidia_driver and not facts.devices:  # usually the wrong build of torch
        yield Finding(
            False,
            "there is an NVIDIA driver, but torch sees no GPU",
            "install torch's CUDA package, and see what CUDA_VISIBLE_DEVICES and nvidia-smi say",
        )
    asked = facts.omp_num_threads  # per worker; at least two workers share the cores
    if asked is not None and asked.isdigit() and int(asked) > fitting:
        yield Finding(
            False,
            f"OMP_NUM_THREADS={asked}: even 2 workers would run {2 * int(asked)} threads on "
            f"{cores} cores and slow each other down",
            f"unset OMP_NUM_THREADS (`tessel run` then divides the cores among the workers), or "
            f"set it to {fitting} or less",
        )
    if facts.torch_threads > cores:  # torch counts the machine's cores
        yield Finding(
            False,
            f"torch uses {facts.torch_threads} threads, but this process may use {cores} of the "
            f"{facts.cores} cores (affinity or control group)",
            f"set OMP_NUM_THREADS={cores}; `tessel run` does it for its workers",
        )


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Check memory, files and matplotlib."""
    shared, available = facts.shared_memory, facts.memory_available
    if shared is not None and shared < _GIB:  # containers get 64 MiB by default
        yield Finding(
            False,
            f"/dev/shm has only {num_bytes(shared)}; workers and data loaders that share tensors "
            f"end with a bus error when it is full",
            "start the container with --shm-size=8g or --ipc=host, or mount -o remount,size=8g "
            "/dev/shm",
        )
    if facts.open_files < 1024:
        yield Finding(
            False,
            f"a process may open only {facts.open_files} files; a group of workers takes two for "
            f"each other worker",
            "ulimit -n 65536",
        )
    if available is not None and available < _GIB:
        yield Finding(
            False,
            f"only {num_bytes(available)} of memory is available; a worker needs about 300 MiB "
            f"before it holds any tensor",
            "end other programs, or use fewer workers",
        )
    if facts.matplotlib is None:
        text = "matplotlib is not installed: `tessel demo` draws no picture"
        yield Finding(False, text, "pip install 'tessel[viz]'")


# Findings that are equally bad are shown in this order.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(check_torch, check_network, check_job, check_processors, check_limits),
)


def examine(facts: Facts) -> list[Finding]:
    """Every finding about these facts, the broken ones first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: not finding.broken)


def check_rates(rates: Sequence[Rate]) -> Finding | None:
    """Check latency: a small message usually takes well under a millisecond on one host."""
    slow = [rate for rate in rates if rate.latency > _SLOW_SECONDS]
    if not slow:
        return None
    worst = max(slow, key=lambda rate: rate.latency)
    return Finding(
        False,
        f"a small {worst.movement} takes {1e3 * worst.latency:.0f} ms; below 1 ms is usual",
        "see whether other programs keep the cores busy (top), and use no more workers than cores",
    )
