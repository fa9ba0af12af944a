"""Facts: the resources that a machine offers to workers."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tessel import machine, transport
from tessel.operators.units import num_bytes
from tessel.version import __version__

T = TypeVar("T")


def answer(ask: Callable[[], T], error: type[Exception], otherwise: Any = None) -> T:
    """The result of a function, or another value if it raises this error."""
    try:
        return ask()
    except error:
        return otherwise


def backends() -> tuple[str, ...]:
    """The communication backends of this torch."""
    if not dist.is_available():  # then the functions below do not exist
        return ()
    kinds = "gloo", "nccl", "mpi"
    return tuple(kind for kind in kinds if getattr(dist, f"is_{kind}_available")())


def devices() -> tuple[str, ...]:
    """The GPUs that torch sees, with their memory."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    properties = map(torch.cuda.get_device_properties, gpus)
    return tuple(f"{gpu.name}, {num_bytes(gpu.total_memory)}" for gpu in properties)


def loopback_works() -> bool:
    """Whether a process can reach itself by the name localhost."""
    try:
        # By an actual connection: the name may resolve while the interface is down.
        with (
            socket.create_server(("localhost", 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=2),
        ):
            return True
    except OSError:
        return False


def moves_by() -> str:
    """How tensors are sent between workers of this host."""
    if transport.chosen_transport() == "gloo":
        return "Gloo, as TESSEL_TRANSPORT says"
    if not transport.can_share_memory():
        return "Gloo: memory cannot be shared here"
    return f"shared memory, {'with' if transport.has_engine() else 'without'} the compiled engine"


def launch_problem() -> str | None:
    """Why a script started here could not join its job; None if it could."""
    try:
        transport.launched_as()
        transport.between_hosts()
    except ValueError as error:
        return str(error)
    return None


def _asked(ask: Callable[[], T]) -> T:
    return field(default_factory=ask)


@dataclass(frozen=True)
class Facts:
    """The resources of a machine; the checks are functions of these facts alone.

    Fields that are not given are read from this machine.
    """

    # In lambdas, since some facts have the names of the modules that provide them.
    tessel: str = __version__
    torch: str = _asked(lambda: torch.__version__)
    python: str = _asked(platform.python_version)
    system: str = _asked(lambda: platform.platform(terse=True))
    hostname: str = _asked(socket.gethostname)
    backends: tuple[str, ...] = _asked(backends)
    devices: tuple[str, ...] = _asked(devices)
    cores: int = _asked(lambda: os.cpu_count() or 1)
    usable_cores: int = _asked(machine.usable_cores)
    memory: int = _asked(machine.memory_limit)
    memory_available: int | None = _asked(machine.memory_available)
    shared_memory: int | None = _asked(lambda: (machine.shared_memory() or (None, None))[0])
    omp_num_threads: str | None = _asked(lambda: os.environ.get("OMP_NUM_THREADS"))
    torch_threads: int = _asked(lambda: torch.get_num_threads())
    # the soft limit, which is the effective one
    open_files: int = _asked(lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    # Gloo and torchrun look up the host's own name
    host_address: str | None = _asked(
        lambda: answer(lambda: socket.gethostbyname(socket.gethostname()), OSError)
    )
    loopback: bool = _asked(loopback_works)
    interfaces: tuple[str, ...] = _asked(lambda: tuple(name for _, name in socket.if_nameindex()))
    gloo_interface: str | None = _asked(lambda: os.environ.get("GLOO_SOCKET_IFNAME"))
    transport: str = _asked(moves_by)
    between_hosts: str = _asked(lambda: answer(transport.between_hosts, ValueError, "Gloo"))
    nvidia_driver: bool = _asked(lambda: shutil.which("nvidia-smi") is not None)
    job_variables: tuple[str, ...] = _asked(
        lambda: tuple(v for v in ("RANK", "WORLD_SIZE") if v in os.environ)
    )
    launched: str | None = _asked(lambda: answer(transport.launched_as, ValueError))
    launch_problem: str | None = _asked(launch_problem)
    matplotlib: str | None = _asked(
        lambda: answer(lambda: version("matplotlib"), PackageNotFoundError)
    )
