"""Look at this machine: what Tessel finds on it, how fast data moves, what is wrong.

Two local workers measure each movement: the time of a small message (latency) and the rate of a
large one (bandwidth). The list at the end says what to mend and how. The exit code is 1 when
something is broken, 0 otherwise, also when there is advice.

`--measure` also measures how fast workers compute and exchange data here, some seconds for each of
several numbers of workers, and keeps it in a file: by this model `tessel plan` and
`best_partition` predict times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessel import machine, transport
from tessel.cli.measure import Rate, measure_machine, measure_rates
from tessel.operators.rates import Machine, known_machine, model_path
from tessel.operators.units import num_bytes, num_flops, num_seconds
from tessel.version import __version__

SUMMARY = "show what this machine has, measure it, and say what to mend"

_GIB = 2**30
_OLDEST_TORCH, _FIRST_TOO_NEW_TORCH = (2, 11), (3, 0)
_SLOW_SECONDS = 0.02


@dataclass(frozen=True)
class Facts:
    """What a machine offers; the checks are functions of this alone."""

    tessel: str
    torch: str
    python: str
    system: str
    hostname: str
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    cores: int
    usable_cores: int
    memory: int
    memory_available: int | None
    shared_memory: int | None
    omp_num_threads: str | None
    torch_threads: int
    open_files: int
    host_address: str | None
    loopback: bool
    interfaces: tuple[str, ...]
    gloo_interface: str | None
    transport: str
    nvidia_driver: bool
    job_variables: tuple[str, ...]
    matplotlib: str | None


@dataclass(frozen=True)
class Finding:
    """Something to mend.

    Args:
        broken: whether Tessel cannot work before it is mended; else it is advice.
        what: what was found.
        mend: how to mend it.
    """

    broken: bool
    what: str
    mend: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tessel doctor`."""
    parser.add_argument(
        "--no-measure", action="store_true", help="don't start workers to measure movements"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the machine model of `tessel plan`, too, and keep it in a file",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(args: argparse.Namespace) -> int:
    """Look, measure, print, and return 1 when something is broken."""
    facts = gather_facts()
    findings = examine(facts)
    rates: list[Rate] = []
    if not args.no_measure and not any(finding.broken for finding in findings):
        rates, more = _measure(quiet=args.json)
        findings += more
    if args.measure and not any(finding.broken for finding in findings):
        _measure_model(quiet=args.json)
    model, more = _model()
    findings += more
    if args.json:
        print(json.dumps(_as_json(facts, rates, model, findings), indent=2))
    else:
        _show(Console(highlight=False), facts, rates, model, findings)
    return int(any(finding.broken for finding in findings))


def gather_facts() -> Facts:
    """Ask this machine."""
    shared = machine.shared_memory()
    return Facts(
        tessel=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(terse=True),
        hostname=socket.gethostname(),
        backends=_backends(),
        devices=_devices(),
        cores=os.cpu_count() or 1,
        usable_cores=machine.usable_cores(),
        memory=machine.memory_limit(),
        memory_available=machine.memory_available(),
        shared_memory=shared[0] if shared else None,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        torch_threads=torch.get_num_threads(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        host_address=_resolve(socket.gethostname()),
        loopback=_loopback_works(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        transport=_transport(),
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        job_variables=tuple(v for v in ("RANK", "WORLD_SIZE") if v in os.environ),
        matplotlib=_version_or_none("matplotlib"),
    )


def _transport() -> str:
    """How CPU tensors move between workers of this host."""
    if transport.chosen_transport() == "gloo":
        return "Gloo, as TESSEL_TRANSPORT says"
    if not transport.can_share_memory():
        return "Gloo: memory cannot be shared here"
    return f"shared memory, {'with' if transport.has_engine() else 'without'} the compiled engine"


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    present = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return tuple(name for name, is_present in present.items() if is_present)


def _devices() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(f"{gpu.name}, {num_bytes(gpu.total_memory)}" for gpu in properties)


def _resolve(hostname: str) -> str | None:
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return None


def _loopback_works() -> bool:
    """Whether a process can reach itself by the name localhost."""
    try:
        with (
            socket.create_server(("localhost", 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=2),
        ):
            return True
    except OSError:
        return False


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_torch(facts: Facts) -> Finding | None:
    """Tessel supports a range of torch's versions."""
    found = tuple(int(number) for number in re.findall(r"\d+", facts.torch)[:2])
    if _OLDEST_TORCH <= found < _FIRST_TOO_NEW_TORCH:
        return None
    return Finding(
        True,
        f"torch {facts.torch} is outside of what Tessel supports: 2.11 or later, below 3",
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
    if len(facts.job_variables) < 2:
        return None
    return Finding(
        False,
        "RANK and WORLD_SIZE are set here, so that every script believes to be one of several "
        "workers and waits for the others",
        "unset RANK WORLD_SIZE; `tessel run` sets them for its workers",
    )


def check_threads(facts: Facts) -> Finding | None:
    """Workers share the cores."""
    asked = facts.omp_num_threads
    if asked is None or not asked.isdigit() or int(asked) <= max(1, facts.usable_cores // 2):
        return None
    fitting = max(1, facts.usable_cores // 2)
    return Finding(
        False,
        f"OMP_NUM_THREADS={asked}: already 2 workers would run {2 * int(asked)} threads on "
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
        f"only {num_bytes(facts.memory_available)} of memory are available; a worker needs about "
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

CHECKS: tuple[Check, ...] = (
    check_torch,
    check_gloo,
    check_nccl,
    check_loopback,
    check_interface,
    check_hostname,
    check_job_variables,
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


def _measure(quiet: bool) -> tuple[list[Rate], list[Finding]]:
    console = Console(stderr=True, quiet=quiet)
    try:
        with console.status("measuring on 2 workers …"):
            rates = measure_rates()
    except (RuntimeError, OSError, TimeoutError) as error:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        return [], [
            Finding(
                True,
                f"two workers on this machine could not exchange data: {first_line}",
                "mend what is named above, then see the whole error with `tessel demo --workers 2`",
            )
        ]
    finding = check_rates(rates)
    return rates, [finding] if finding else []


def _measure_model(quiet: bool) -> None:
    console = Console(stderr=True, quiet=quiet)
    with console.status("measuring how fast workers compute and exchange data …"):
        path = measure_machine().save()
    console.print(f"the machine model is in {path}", highlight=False)


def _model() -> tuple[Machine | None, list[Finding]]:
    """The machine model that plans use, unless its file makes no sense."""
    try:
        return known_machine(), []
    except ValueError as error:
        mend = "tessel doctor --measure writes it anew"
        return None, [Finding(False, f"the machine model cannot be read: {error}", mend)]


def _as_json(
    facts: Facts, rates: Sequence[Rate], model: Machine | None, findings: Sequence[Finding]
) -> dict[str, object]:
    return {
        "facts": dataclasses.asdict(facts),
        "movements": [dataclasses.asdict(rate) for rate in rates],
        "machine": dataclasses.asdict(model) if model else None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _show(
    console: Console,
    facts: Facts,
    rates: Sequence[Rate],
    model: Machine | None,
    findings: Sequence[Finding],
) -> None:
    console.print("[bold]this machine[/]")
    console.print(_facts_table(facts))
    if rates:
        console.print("\n[bold]movements between 2 workers of this machine[/]")
        console.print(_rates_table(rates))
    if model is not None:
        console.print("\n[bold]the model by which plans predict times[/]")
        console.print(f"  {escape(model.origin)}\n  file: {escape(str(model_path()))}")
        console.print(_model_table(model))
    console.print("\n[bold]findings[/]")
    if not findings:
        console.print("  [green]nothing wrong found[/]")
    for finding in findings:
        kind = "[bold red]broken[/]" if finding.broken else "[yellow]advice[/]"
        console.print(f"  {kind}: {escape(finding.what)}\n    → {escape(finding.mend)}")


def _facts_table(facts: Facts) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in _lines(facts):
        table.add_row("  " + name, escape(value))
    return table


def _lines(facts: Facts) -> list[tuple[str, str]]:
    shared, free = facts.shared_memory, facts.memory_available
    threads = f"{facts.torch_threads} in torch; OMP_NUM_THREADS is "
    return [
        ("tessel", facts.tessel),
        ("torch", facts.torch),
        ("python", f"{facts.python} on {facts.system}"),
        ("backends", ", ".join(facts.backends) or "none"),
        ("GPUs", "; ".join(facts.devices) or "none, workers use the CPU"),
        ("cores", f"{facts.usable_cores} usable of {facts.cores}"),
        ("threads", threads + (facts.omp_num_threads or "not set")),
        ("memory", num_bytes(facts.memory) + (f", {num_bytes(free)} available" if free else "")),
        ("on one host", f"tensors move by {facts.transport}"),
        ("/dev/shm", num_bytes(shared) if shared is not None else "none"),
        ("open files", f"{facts.open_files} per process"),
        ("host", f"{facts.hostname} ({facts.host_address or 'does not resolve'})"),
        ("interfaces", ", ".join(facts.interfaces)),
    ]


def _rates_table(rates: Sequence[Rate]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("  movement", no_wrap=True)
    for title in ("latency", "bandwidth", "large message"):
        table.add_column(title, justify="right")
    for rate in rates:
        table.add_row(
            "  " + rate.movement,
            f"{1e6 * rate.latency:.0f} µs",
            f"{rate.bandwidth / _GIB:.2f} GiB/s",
            num_bytes(rate.num_bytes),
        )
    return table


def _model_table(model: Machine) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("  each of", no_wrap=True)
    for title in ("agreement", "message", "sends", "memory", "FFT", "matrices"):
        table.add_column(title, justify="right")
    for rates in model.rates:
        table.add_row(
            f"  {rates.workers} worker{'s' * (rates.workers > 1)}",
            num_seconds(rates.call),
            num_seconds(rates.latency),
            f"{rates.bandwidth / _GIB:.2f} GiB/s",
            f"{rates.memory / _GIB:.1f} GiB/s",
            f"{num_flops(rates.fft)}/s",
            f"{num_flops(rates.matrix)}/s",
        )
    return table
