"""Facts: what a machine offers to workers."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from tessel import machine, transport
from tessel.operators.units import num_bytes
from tessel.version import __version__


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
    between_hosts: str
    nvidia_driver: bool
    job_variables: tuple[str, ...]
    launched: str | None
    launch_problem: str | None
    matplotlib: str | None


def gather_facts() -> Facts:
    """Ask this machine."""
    # A torch that is built without distributed does not have the functions that are asked then.
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    properties = [torch.cuda.get_device_properties(number) for number in gpus]
    shared = machine.shared_memory()
    # Gloo and torchrun look up the host's own name.
    try:
        host_address = socket.gethostbyname(socket.gethostname())
    except OSError:
        host_address = None
    try:
        matplotlib = version("matplotlib")
    except PackageNotFoundError:
        matplotlib = None
    launched = launch_problem = None
    between_hosts = "Gloo"
    try:
        launched = transport.launched_as()
        between_hosts = transport.between_hosts()
    except ValueError as error:
        launch_problem = str(error)
    engine = f"{'with' if transport.has_engine() else 'without'} the compiled engine"
    moves_by = f"shared memory, {engine}"
    if transport.chosen_transport() == "gloo":
        moves_by = "Gloo, as TESSEL_TRANSPORT says"
    elif not transport.can_share_memory():
        moves_by = "Gloo: memory cannot be shared here"
    return Facts(
        tessel=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(terse=True),
        hostname=socket.gethostname(),
        backends=tuple(name for name, is_present in backends.items() if is_present),
        devices=tuple(f"{gpu.name}, {num_bytes(gpu.total_memory)}" for gpu in properties),
        cores=os.cpu_count() or 1,
        usable_cores=machine.usable_cores(),
        memory=machine.memory_limit(),
        memory_available=machine.memory_available(),
        shared_memory=shared[0] if shared else None,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        torch_threads=torch.get_num_threads(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],  # the soft limit, which holds
        host_address=host_address,
        loopback=loopback_works(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        transport=moves_by,
        between_hosts=between_hosts,
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        job_variables=tuple(v for v in ("RANK", "WORLD_SIZE") if v in os.environ),
        launched=launched,
        launch_problem=launch_problem,
        matplotlib=matplotlib,
    )


def loopback_works() -> bool:
    """Whether a process can reach itself by the name localhost."""
    try:
        # By a connection of its own: the name may resolve while the interface is down.
        with (
            socket.create_server(("localhost", 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=2),
        ):
            return True
    except OSError:
        return False
