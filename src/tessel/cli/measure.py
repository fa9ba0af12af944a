"""Measurements: the rates of movements between two workers, and the machine model for plans."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from functools import partial

import torch
from torch import Tensor

from tessel import nn, transport
from tessel.core.agreement import tell
from tessel.core.layout import Layout, zero_volume_tensor
from tessel.core.move import Move
from tessel.core.partition import Partition, world
from tessel.launch import launch
from tessel.machine import usable_cores
from tessel.operators.algebra import kron
from tessel.operators.dft import ParDFT
from tessel.operators.distributed import Distributed, ParRepartition, distribute
from tessel.operators.matrices import ParIdentity, ParMultilinear
from tessel.operators.rates import Machine, Network, Rates
from tessel.operators.restriction import ParRestriction
from tessel.testing import count_traffic
from tessel.transport.process import this_host

_SMALL, _LARGE = 2**8, 2**20  # elements of float32: 1 KiB and 4 MiB
_TIME_LIMIT = 60.0
_MOST_WORKERS = 16  # largest number of workers for which a machine model is measured
_TURNS = 7
_TURN = 0.03  # seconds: several times as long as a worker may keep a core
_IN_SECONDS = ("call", "step", "latency")  # rates in seconds; others are numbers per second
_CUBE = (64, 128, 128)  # of complex64: 8 MiB
_ROWS = 2**19  # of complex64 on each worker: 4 MiB
_SHORT = (128, 128)  # of complex64: some 0.2 ms of work


@dataclass(frozen=True)
class Rate:
    """The speed of a movement between two workers.

    Args:
        movement: its name.
        latency: its seconds with a small message.
        bandwidth: the bytes per second that each worker sends in it with a large message.
        num_bytes: the size of the large message.
    """

    movement: str
    latency: float
    bandwidth: float
    num_bytes: int


def measure_rates(device: str = "cpu", backend: str = "gloo") -> tuple[list[Rate], str]:
    """Start two workers and measure every movement; also return how tensors of a GPU are sent.

    Args:
        device: "cpu" or "cuda".
        backend: the backend of the job.

    >>> [rate.movement for rate in measure_rates()[0]]  # doctest: +SKIP
    ['all-sum-reduce', 'broadcast', 'repartition', 'halo exchange']
    """
    rates = []
    found = launch(times_of_movements, 2, device, timeout=_TIME_LIMIT, backend=backend)
    times, carriers = zip(*found, strict=True)
    for seen in zip(*times, strict=True):
        # The movement ends when the slower worker has finished.
        names, small, large, sent = zip(*seen, strict=True)
        rates.append(Rate(names[0], max(small), max(sent) / max(large), max(sent)))
    return rates, carriers[0]


def times_of_movements(device: str = "cpu") -> tuple[list[tuple[str, float, float, int]], str]:
    """This worker's seconds of a small and of a large message, and the bytes of the latter."""
    if device == "cuda":
        torch.cuda.set_device(transport.this_worker() % torch.cuda.device_count())
    with torch.device(device):
        cases = zip(_movements(_SMALL), _movements(_LARGE), strict=True)
        found = [
            (name, _median(module, x, 50)[0], *_median(same, large, 7))
            for (name, module, x), (_, same, large) in cases
        ]
    return found, transport.between_gpus() if device == "cuda" else ""


def _median(module: torch.nn.Module, x: Tensor, repeats: int) -> tuple[float, int]:
    """The median time of an application, and the bytes that this worker sends in it."""
    times = []
    with torch.no_grad():
        with count_traffic() as traffic:
            module(x)  # the first time also makes plans and buffers
        for _ in range(repeats):
            begin = time.perf_counter()
            module(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    # The median, so that a worker losing its core for a moment does not count.
    return statistics.median(times), traffic.bytes_sent


def _movements(length: int) -> Iterator[tuple[str, torch.nn.Module, Tensor]]:
    """Each movement of two workers, with an input of which `length` elements are sent."""
    P = world()
    first = P.create_partition_inclusive([0])
    rows, columns = (P.create_cartesian_topology_partition(shape) for shape in ((2, 1), (1, 2)))
    side = math.isqrt(length)
    x = torch.zeros(length)
    yield "all-sum-reduce", nn.AllSumReduce(P, [0]), x
    yield "broadcast", nn.Broadcast(first, P), x if first.active else zero_volume_tensor()
    # A worker keeps half of its 2 · side² values: the other half, `length` of them, is sent.
    yield "repartition", nn.Repartition(rows, columns), torch.zeros(side, 2 * side)
    yield "halo exchange", nn.HaloExchange(P, [(length, length)]), x


def measure_machine(rounds: int = 2) -> Machine:
    """Measure the planner's machine model: rates of single-threaded workers, for several numbers.

    >>> measure_machine().cores  # doctest: +SKIP
    2
    """
    cores = usable_cores()
    # Alone, in a pair, on all cores, and two workers per core, which slows all down.
    counts = [n for n in sorted({1, 2, cores, 2 * cores}) if n <= _MOST_WORKERS]
    origin = f"measured on {platform.node()}, {date.today()}, {cores} cores"
    machines = []
    for _ in range(rounds):
        found = [
            _combined(launch(_worker_rates, n, timeout=_TIME_LIMIT, threads=1), max) for n in counts
        ]
        # A single worker sends nothing: the rates of two replace it, so that none is missing.
        found[0] = replace(found[0], latency=found[1].latency, bandwidth=found[1].bandwidth)
        machines.append(Machine(cores, tuple(found), origin))
    return best_of(machines)


def measure_job(hosts: Sequence[str] | None = None) -> Machine:
    """Measure the machine model of the job that a launcher has started, with its network.

    All workers call it. Each is measured while all others do the same; messages go from worker to
    worker within each host, and then from each host to the next, by all of its workers at once.

    Args:
        hosts: the host of each worker; by default the actual ones.

    >>> measure_job(["here"]).network is None  # doctest: +SKIP
    True
    """
    P = world()
    hosts = list(tell(P, this_host()).values()) if hosts is None else list(hosts)
    rooms: dict[str, list[int]] = {}
    for worker, host in enumerate(hosts):
        rooms.setdefault(host, []).append(worker)
    per_host, alike = min(map(len, rooms.values())), [*rooms.values()]
    said = tell(P, asdict(_worker_rates())).values()
    rates = _combined([Rates(**each) for each in said], max)
    inside = {w: room[(k + 1) % len(room)] for room in alike for k, w in enumerate(room)}
    if per_host > 1:
        latency, bandwidth = _pair_rates(inside)
        rates = replace(rates, latency=latency, bandwidth=bandwidth)
    network = None
    if len(alike) > 1:
        pairs = zip(alike, [*alike[1:], alike[0]], strict=True)
        onward = {room[k]: other[k] for room, other in pairs for k in range(per_host)}
        latency, bandwidth = _pair_rates(onward)
        network = Network(per_host, latency, per_host * bandwidth)
        if per_host == 1:  # no workers share a host: use the rates between hosts
            rates = replace(rates, latency=latency, bandwidth=bandwidth)
    where = f"{len(alike)} host{'s' * (len(alike) > 1)} of {per_host} workers"
    origin = f"measured on {where}, {hosts[0].partition(' ')[0]} first, {date.today()}"
    return Machine(
        max(per_host, usable_cores()), (replace(rates, workers=per_host),), origin, network
    )


def _pair_rates(receivers: dict[int, int]) -> tuple[float, float]:
    """The seconds of a message and the bytes per second of a worker, if each sends to another."""
    P = world()
    ranks = [receivers.get(worker, worker) for worker in range(P.size)]
    target = Partition(tuple(ranks), (P.size,))
    times = []
    for length in (1, _LARGE):
        before = Layout.balanced(P, (P.size * length,))
        move = Move(before, Layout.balanced(target, (P.size * length,)))
        x = torch.zeros(length)
        with torch.no_grad():
            times.append(max(P.group.share_objects(_seconds(partial(move.apply, x)))))
    small, large = times
    return small, 4 * _LARGE / max(large - small, 0.2 * large)


def best_of(machines: Sequence[Machine]) -> Machine:
    """The best rates of several rounds: other programs can only make a machine slower."""
    rates = zip(*(each.rates for each in machines), strict=True)
    return replace(machines[0], rates=tuple(_combined(each, min) for each in rates))


def _combined(rates: Sequence[Rates], choose: Callable[..., float]) -> Rates:
    """Combine each rate by its seconds: the largest, for which others wait, or the smallest."""
    values = {field.name: [getattr(each, field.name) for each in rates] for field in fields(Rates)}
    chosen = {
        name: choose(numbers) if name in _IN_SECONDS else 1 / choose(1 / n for n in numbers)
        for name, numbers in values.items()
    }
    chosen.pop("workers")
    return Rates(rates[0].workers, **chosen)


def _worker_rates() -> Rates:
    """The rates of this worker while all others measure the same."""
    P = world().size
    x = torch.randn(_CUBE, dtype=torch.complex64)
    spectrum = torch.fft.rfftn(x.real.contiguous())
    flops = 5.0 * x.numel() * math.log2(x.numel())
    with torch.no_grad():
        fft = _seconds(lambda: torch.fft.fftn(x))
        fft += _seconds(lambda: torch.fft.irfftn(spectrum, s=_CUBE))
        across = _seconds(lambda: torch.fft.fft(x, dim=0))
        across += _seconds(lambda: torch.fft.fft(x, dim=1))
        y = torch.fft.fft(x, dim=0)
        # A copy reads and writes: x once, and half of it twice, from rows that are apart.
        copies = _seconds(x.clone) + 2 * _seconds(lambda: y[:, :64].contiguous())
        matrix = torch.randn(64, 64, dtype=torch.complex64)
        product = _seconds(lambda: x.reshape(-1, 64) @ matrix)
        spectral = ParMultilinear(torch.complex64, 16, 16, [16, 16, 8])  # a matrix for each mode
        weights = torch.randn(spectral.parameter_shape, dtype=torch.complex64)
        modes = torch.randn(spectral.domain.shape, dtype=torch.complex64)
        weighing = _seconds(lambda: spectral.act(modes, 0, weights))
        memory = 4 * x.nbytes / copies
        call, latency, bandwidth = message_rates(memory)
        # Steps with hardly any work: alternating transforms and restrictions.
        F = ParDFT(torch.complex64, 4)
        R = ParRestriction(torch.complex64, 4, [range(0, 1), range(3, 4)])
        along = kron(ParIdentity(torch.complex64, P), F.H @ R.H @ R @ F)
        operator = distribute(along, [P, 1])
        assert isinstance(operator, Distributed)
        small = torch.zeros(operator.layout_in.local_shape, dtype=torch.complex64)
        step = _seconds(lambda: operator.run(small, {})) / len(operator.plan.steps)
    return Rates(
        P,
        call=call,
        step=step,
        latency=latency,
        bandwidth=bandwidth,
        memory=memory,
        fft=1.5 * flops / fft,  # a complex transform, and a real one, which takes half of it
        fft_across=5.0 * x.numel() * math.log2(_CUBE[0] * _CUBE[1]) / across,
        matrix=8.0 * 64 * x.numel() / product,  # four products and four sums of real numbers
        weights=weights.nbytes / weighing,
    )


def _exchange(rows: int) -> tuple[Distributed, Tensor]:
    """A repartition from rows to columns, with this many rows, and an input for it."""
    P = world().size
    operator = ParRepartition(torch.complex64, (rows, P), [P, 1], [1, P])
    assert isinstance(operator, Distributed)
    return operator, torch.zeros(operator.layout_in.local_shape, dtype=torch.complex64)


def message_rates(memory: float) -> tuple[float, float, float]:
    """The seconds of an agreement and of a message, and the bytes sent per second.

    Workers compute between messages, as in a plan. They then wait for each other, and if there are
    more workers than cores, a message waits until its receiver has a core.
    """
    messages = max(1, world().size - 1)
    (small, x), (large, many) = _exchange(world().size), _exchange(_ROWS)
    numbers = torch.randn(_SHORT, dtype=torch.complex64)

    def work() -> Tensor:
        return torch.fft.fft(torch.fft.fft(numbers), dim=0)

    def after_work(action: Callable[[], object]) -> Callable[[], object]:
        return lambda: (work(), action())

    alone = _seconds(work)
    # Positive, though it is the difference of two varying times.
    bare = max(_seconds(after_work(lambda: small.run(x, {}))) - alone, 1e-6)
    call = _seconds(after_work(lambda: small.apply(x))) - alone - bare
    with count_traffic() as traffic:
        large.run(many, {})
    total = _seconds(lambda: large.run(many, {}))
    packing = 2 * (traffic.bytes_sent + many.nbytes) / memory
    # Packing is estimated, possibly as longer than the total: sending takes some time.
    sending = max(total - bare - packing, 0.2 * total)
    agreeing = max(call, bare / 2)  # an agreement is itself a small exchange
    return agreeing, bare / messages, max(traffic.bytes_sent, 1) / sending


def _seconds(action: Callable[[], object]) -> float:
    """The seconds of an action, which all workers begin together and repeat equally often.

    A turn is long enough for workers to share the cores in it. The best turn counts, since other
    programs can only make it longer.
    """
    # The slowest worker decides, so that all repeat it equally often: it exchanges messages.
    first = max(world().group.share_objects(_timed(action, 3)))
    times = max(2, math.ceil(_TURN / first))
    turns = []
    for _ in range(_TURNS):  # each begins when all workers are ready
        world().group.share_objects(None)
        turns.append(_timed(action, times))
    return min(turns)


def _timed(action: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - start) / times
