"""Two hosts on one machine, and what their workers do.

A host is a network, host name, process and memory namespace of its own; a veth pair is the cable
between the two. Their workers are told their places as Open MPI does it. As a program this is a
host: `python hosts.py TASK FIRST COUNT FOLDER` forks its workers, which do a task.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import importlib.util
import itertools
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

import tessel
from movements import MOVEMENTS, assert_close, case, me, mine

PER_HOST, WORKERS = 2, 4
LIMIT = 15.0  # seconds for which workers wait for each other
DEVICES = ("cable0", "cable1")
ADDRESSES = ("10.77.9.1", "10.77.9.2")
PORT = 29513
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_numbers = itertools.count()  # of pairs, whose names must differ


# --- the hosts


class Hosts:
    """Two namespaces with a cable, by their names."""

    def __init__(self, names: tuple[str, str], folder: Path) -> None:
        self.names, self.folder = names, folder
        self.cable: BadCable | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, task: str) -> None:
        """Let the workers of both hosts do a task."""
        for number, name in enumerate(self.names):
            first, count = str(number * PER_HOST), str(PER_HOST)
            program = [sys.executable, __file__, task, first, count, str(self.folder)]
            # with its first process a process namespace ends, and all that run in it
            apart = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
            named = [*apart, "sh", "-c", f'hostname {name}; exec "$@"', "-", *program]
            env = os.environ | {
                "OMP_NUM_THREADS": "1",
                "TESSEL_TIMEOUT": str(LIMIT),
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            with (self.folder / f"output{number}").open("wb") as output:
                self._started.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *named],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )

    def mpirun(self, program: list[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        """Let mpirun of Open MPI start a program on both hosts, over TCP.

        Its daemon of the second host is started by an agent that enters the namespace, in the place
        of ssh.
        """
        agent = self.folder / "agent"
        agent.write_text(
            "#!/bin/sh\nexport host=$1; shift\n" + _enter("$host", "hostname $host; $*")
        )
        agent.chmod(0o700)
        network = ADDRESSES[0].rpartition(".")[0] + ".0/24"
        settings = {
            "plm_rsh_agent": str(agent),
            "btl": "tcp,vader,self",
            "pml": "ob1",
            "btl_tcp_if_include": network,
            "oob_tcp_if_include": network,
        }
        words = [word for pair in settings.items() for word in ("--mca", *pair)]
        places = ",".join(f"{name}:{PER_HOST}" for name in self.names)
        env = {"OMP_NUM_THREADS": "1", "TESSEL_TIMEOUT": str(LIMIT), "MASTER_ADDR": ADDRESSES[0]}
        env |= {"MASTER_PORT": str(PORT), "PYTHONPATH": os.pathsep.join(sys.path)} | more
        passed = [word for name in env for word in ("-x", name)]
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--host", places, *words]
        entered = _enter(self.names[0], f'hostname {self.names[0]}; exec "$@"')
        with (self.folder / "output0").open("wb") as output:
            self._started.append(
                subprocess.Popen(
                    ["sh", "-c", entered, "-", *command, "--bind-to", "none", *passed, *program],
                    env=os.environ | env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
        return self._started[-1]

    def wait_until_busy(self, seconds: float) -> None:
        """Until all workers are in the middle of their task."""
        deadline = time.monotonic() + seconds
        while not all((self.folder / f"busy{worker}").exists() for worker in range(WORKERS)):
            assert time.monotonic() < deadline and self.are_running, self.outputs
            time.sleep(0.1)

    @property
    def are_running(self) -> bool:
        return all(each.poll() is None for each in self._started)

    def ends(self, seconds: float) -> list[int]:
        """The exit codes of both hosts; TimeoutExpired if they do not end in time."""
        deadline = time.monotonic() + seconds
        return [each.wait(max(0.1, deadline - time.monotonic())) for each in self._started]

    def kill(self, number: int) -> None:
        """End a host, with all that runs on it."""
        self._started[number].kill()

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names[0], "link", "set", DEVICES[0], "down")

    def shape_traffic(self, *words: str) -> None:
        """Let the cable be as bad as netem's words say, both ways."""
        for name, device in zip(self.names, DEVICES, strict=True):
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "netem", *words)

    @property
    def outputs(self) -> str:
        files = sorted(self.folder.glob("output*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files)

    def said(self) -> dict[int, str]:
        """The last words of each worker that had some."""
        files = {worker: self.folder / f"said{worker}" for worker in range(WORKERS)}
        return {worker: file.read_text() for worker, file in files.items() if file.exists()}

    def close(self) -> None:
        for each in self._started:
            each.kill()
            each.wait()
        if self.cable is not None:
            self.cable.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _enter(host: str, script: str) -> str:
    """A line of shell that runs a script, with the arguments of the line, on a host."""
    return f'exec ip netns exec "{host}" unshare --uts sh -c \'{script}\' - "$@"\n'


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class BadCable(threading.Thread):
    """A cable that delays packets and loses some, for kernels without netem.

    Its ends are TUN devices, whose packets this process carries from one to the other.

    Args:
        names: of the namespaces in which the ends are.
        delays: the least and the most seconds of a packet; those that differ change their order.
        loss: which share of the packets is lost.
    """

    def __init__(self, names: tuple[str, str], delays: tuple[float, float], loss: float) -> None:
        super().__init__(daemon=True)
        self._delays, self._loss, self._random = delays, loss, random.Random(0)
        self._ended = threading.Event()
        self.carried = self.lost = 0
        self._ends: list[int] = []
        for name, device in zip(names, DEVICES, strict=True):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._ends.append(end)
            flags = struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(end, _TUNSETIFF, flags)
            ip("link", "set", device, "netns", name)  # it stays connected with the descriptor
        self.start()

    def run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # when, and to which end
        for number in itertools.count():
            ready, _, _ = select.select(self._ends, [], [], 0.001)
            for end in ready:
                with contextlib.suppress(OSError):
                    packet = os.read(end, 65536)
                    other = self._ends[1 - self._ends.index(end)]
                    self.carried += 1
                    if self._random.random() < self._loss:
                        self.lost += 1
                        continue
                    due = time.monotonic() + self._random.uniform(*self._delays)
                    heapq.heappush(waiting, (due, number, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # a device that is down
                    os.write(end, packet)
            if self._ended.is_set():
                return

    def close(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()
        for end in self._ends:
            os.close(end)  # the devices go with their descriptors


@contextlib.contextmanager
def two_hosts(
    folder: Path, cable: Callable[[tuple[str, str]], BadCable] | None = None
) -> Iterator[Hosts]:
    """Two hosts that are gone afterwards, whatever happens.

    Args:
        folder: for their output.
        cable: makes a bad one between their namespaces; None for a good one.
    """
    name = f"tessel{os.getpid()}-{next(_numbers)}"
    names = (f"{name}a", f"{name}b")
    hosts = Hosts(names, folder)
    try:
        for name in names:
            ip("netns", "add", name)
        if cable is None:
            ends = (DEVICES[0], "netns", names[0]), (DEVICES[1], "netns", names[1])
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        else:
            hosts.cable = cable(names)
        for name, device, address in zip(names, DEVICES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        hosts.close()


@cache
def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid():
        return "only root can make network namespaces"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "iproute2 and unshare are needed"
    try:
        with two_hosts(Path()):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces can be made: {getattr(error, 'stderr', error)!r}"


@cache
def why_no_mpi() -> str:
    """Why there is no MPI here; empty if there is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is needed"
    if shutil.which("mpirun") is None:
        return "mpirun is needed, of Open MPI"
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return "" if "Open MPI" in said.stdout else "mpirun is not that of Open MPI"


@cache
def why_no_netem() -> str:
    """Why traffic cannot be shaped here; empty if it can."""
    if why_not():
        return why_not()
    if shutil.which("tc") is None:
        return "tc is needed, of iproute2"
    with two_hosts(Path()) as hosts:
        try:
            hosts.shape_traffic("delay", "1ms")
        except subprocess.CalledProcessError as error:
            return f"this kernel has no netem: {error.stderr.decode().strip()}"
    return ""


# --- the tasks of workers


def compare(folder: Path) -> None:
    """All movements, and a training, against one process."""
    world = tessel.world()
    hosts = world.prepare().share_objects(socket.gethostname())
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3], hosts
    assert tessel.transport.shares_memory()  # within a host
    for name in MOVEMENTS:
        for size in (5, 23):
            movement = case(name, size)
            everyones = movement.leaves()
            x = mine(everyones).requires_grad_()
            y = movement.layer(x)
            assert_close(y.detach(), mine(movement.reference(everyones)))
            y.square().sum().backward()
            expected = movement.gradients(everyones, lambda w, y: y.square().sum())
            assert_close(x.grad, mine(expected))
    way = "MPI" if "PMIX_NAMESPACE" in os.environ and not why_no_mpi() else "Gloo"
    assert tessel.transport.between_hosts().startswith(way), tessel.transport.between_hosts()
    assert bool(world.prepare()._membership.linked) is (way == "Gloo")  # agreements by links
    large = torch.full((300_000,), float(me() + 1), dtype=torch.float64)
    assert torch.equal(tessel.nn.AllSumReduce(world, [0])(large), torch.full_like(large, 10.0))
    for length, carriers in ((1000, (0, 2)), (300_000, range(WORKERS))):
        whole = tessel.Layout.whole(world, (length,))
        with tessel.testing.count_traffic() as traffic:
            tessel.Move(whole, whole)(torch.ones(length))
        # the sum of a host crosses once each way, by one worker or by all of them
        crosses = 4 * length // len(carriers) * 2 if me() in carriers else 0
        assert traffic.bytes_between_hosts == crosses, (length, traffic)
        assert traffic.messages_between_hosts == (me() in carriers), (length, traffic)
    spread, whole = train(spread=True), train(spread=False)
    for got, expected in zip(spread, whole, strict=True):
        assert_close(got, expected, 1e-11)  # sums in another order, over five steps


def train(spread: bool) -> list[torch.Tensor]:
    """Losses and parameters of some steps, on all workers or on this one alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 5, padding=2),
        torch.nn.BatchNorm2d(6),
        torch.nn.GELU(),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(6, 6, 3, padding=1, stride=2),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(96, 10),
    ).double()
    images, labels = torch.randn(4, 3, 30, 26, dtype=torch.float64), torch.arange(4)
    if spread:
        grid = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
        model = tessel.nn.distribute_module(model, grid)
        images = tessel.Layout.balanced(grid, images.shape).local_part(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def work(folder: Path) -> None:
    """Sums without an end."""
    world = tessel.world()
    reduce = tessel.nn.AllSumReduce(world, [0])
    for call in range(10**6):
        assert reduce(torch.ones(1000)).sum() == 1000 * world.size
        if call == 10:
            (folder / f"busy{world.rank}").touch()
        time.sleep(0.01)


TASKS = {"compare": compare, "work": work}


def _be_worker(task: str, rank: int, first: int | None, folder: Path) -> int:
    """Do a task, as the worker of a host, whose first is given, or as the one of mpirun."""
    if first is not None:
        os.environ |= {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(WORKERS),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank - first),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(PER_HOST),
        }
    torch.set_num_threads(1)
    try:
        TASKS[task](folder)
        text = "right"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    (folder / f"said{rank}").write_text(text)
    print(rank, text, flush=True)
    return int(text != "right")


def _be_host(task: str, first: int, count: int, folder: Path) -> int:
    workers = []
    for rank in range(first, first + count):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = _be_worker(task, rank, first, folder)
                tessel.transport.leave()
            finally:
                os._exit(code)
        workers.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) != 0 for each in workers)


if __name__ == "__main__":
    if sys.argv[2] == "mpi":  # mpirun has told this worker its place
        sys.exit(
            _be_worker(
                sys.argv[1], int(os.environ["OMPI_COMM_WORLD_RANK"]), None, Path(sys.argv[4])
            )
        )
    sys.exit(_be_host(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
