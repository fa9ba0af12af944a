"""Two hosts: the numbers of one process, and an end in a sentence when a host or the cable goes.

Tests `transport/exchange.py`, `transport/wire.py`, `cli/rendezvous.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import LIMIT, WORKERS, BadCable, Hosts, two_hosts, why_no_mpi, why_no_netem, why_not
from hosts import __file__ as hosts_program

pytestmark = pytest.mark.slow
SECONDS_TO_COMPARE = 100.0
SECONDS_TO_START = 60.0
SECONDS_TO_END = LIMIT + 25.0  # the limit, and time for processes to end on a busy machine


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why_not():
        pytest.skip(why_not())
    with two_hosts(tmp_path) as hosts:
        yield hosts


def test_two_hosts_compute_as_one_process(hosts: Hosts) -> None:
    hosts.start("compare")
    assert hosts.ends(SECONDS_TO_COMPARE) == [0, 0], hosts.outputs
    assert hosts.said() == dict.fromkeys(range(WORKERS), "right")


def test_two_hosts_compute_as_one_process_by_mpi(hosts: Hosts) -> None:
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    hosts.mpirun([sys.executable, hosts_program, "compare", "mpi", "", str(hosts.folder)], {})
    assert hosts.ends(SECONDS_TO_COMPARE) == [0], hosts.outputs
    assert hosts.said() == dict.fromkeys(range(WORKERS), "right")


@pytest.mark.limit(400)
@pytest.mark.parametrize("words", ["delay 5ms 2ms", "loss 1%", "delay 2ms reorder 20%"])
def test_a_bad_cable_changes_nothing_but_time(hosts: Hosts, words: str) -> None:
    if why_no_netem():
        pytest.skip(why_no_netem())
    hosts.shape_traffic(*words.split())
    hosts.start("compare")
    assert hosts.ends(3 * SECONDS_TO_COMPARE) == [0, 0], hosts.outputs
    assert hosts.said() == dict.fromkeys(range(WORKERS), "right")


@pytest.mark.limit(400)
@pytest.mark.parametrize(
    ("delays", "loss"),
    [((0.005, 0.005), 0.01), ((0.0, 0.004), 0.0)],
    ids=["late and lost", "out of order"],
)
def test_packets_that_are_late_or_lost_change_nothing_but_time(
    tmp_path: Path, delays: tuple[float, float], loss: float
) -> None:
    if why_not():
        pytest.skip(why_not())
    if not Path("/dev/net/tun").exists():
        pytest.skip("this system has no TUN devices")
    with two_hosts(tmp_path, lambda names: BadCable(names, delays, loss)) as hosts:
        hosts.start("compare")
        assert hosts.ends(3 * SECONDS_TO_COMPARE) == [0, 0], hosts.outputs
        assert hosts.said() == dict.fromkeys(range(WORKERS), "right")
        assert hosts.cable is not None and hosts.cable.carried > 100
        assert bool(hosts.cable.lost) is bool(loss)


def test_a_cut_cable_ends_all_workers_with_a_sentence(hosts: Hosts) -> None:
    hosts.start("work")
    hosts.wait_until_busy(SECONDS_TO_START)
    hosts.cut()
    assert hosts.ends(SECONDS_TO_END) == [1, 1], hosts.outputs
    said = hosts.said()
    assert all(text.startswith("WorkerLost: ") for text in said.values()), said
    assert {*said} == {*range(WORKERS)}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_host_ends_the_other_with_a_sentence(hosts: Hosts, killed: int) -> None:
    hosts.start("work")
    hosts.wait_until_busy(SECONDS_TO_START)
    hosts.kill(killed)
    assert hosts.ends(SECONDS_TO_END)[1 - killed] == 1, hosts.outputs
    said = hosts.said()
    assert {*said} == ({2, 3} if killed == 0 else {0, 1})
    assert all(text.startswith("WorkerLost: ") for text in said.values()), said
