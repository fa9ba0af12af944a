"""The connections between the first workers of hosts, by which agreements travel.

Tests `transport/links.py`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tessel.transport import links
from tessel.transport.links import Links
from tessel.transport.watch import Watch


def together(*calls: Callable[[], object]) -> list[object]:
    """What calls give that wait for each other."""
    found: dict[int, object] = {}

    def call(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:  # for the test to look at
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return [found[number] for number in range(len(calls))]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Links]]:
    """Links of workers 0, 2 and 4, the first of three hosts."""
    monkeypatch.setattr(links, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("TESSEL_TIMEOUT", "5")
    made = {worker: Links(worker) for worker in (0, 2, 4)}
    yield made
    for each in made.values():
        each.close()


def connect(three: dict[int, Links]) -> None:
    addresses = {worker: each.address for worker, each in three.items()}

    def one(worker: int) -> Callable[[], object]:
        others = {w: address for w, address in addresses.items() if w != worker}
        return lambda: three[worker].connect(others)

    assert together(*map(one, three)) == [None] * 3


def hear(link: Links, code: int, *others: int) -> list[bytes]:
    return link.hear((code, -1), others, Watch(), None)


def test_groups_hear_what_is_theirs_in_order(three: dict[int, Links]) -> None:
    connect(three)
    three[0].say(7, b"first", [2, 4])
    three[0].say(8, b"of another group", [2])
    three[0].say(7, b"", [2])
    three[4].say(7, b"from 4", [2])
    assert hear(three[2], 7, 0, 4) == [b"first", b"from 4"]
    assert hear(three[2], 7, 0) == [b""]
    assert hear(three[2], 8, 0) == [b"of another group"]
    assert hear(three[4], 7, 0) == [b"first"]


def test_long_messages_pass_each_other(three: dict[int, Links]) -> None:
    connect(three)
    words = {worker: bytes([worker]) * 30_000_000 for worker in three}

    def swap(worker: int) -> Callable[[], object]:
        others = [each for each in three if each != worker]

        def both() -> object:
            three[worker].say(7, words[worker], others)
            return hear(three[worker], 7, *others) == [words[each] for each in others]

        return both

    assert together(*map(swap, three)) == [True] * 3


def test_strangers_are_not_taken_for_workers(three: dict[int, Links]) -> None:
    name, port, token = three[0].address
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, links._TOKEN.pack(b"x" * 16, 2)):
        with socket.create_connection((name, port)) as stranger:
            stranger.sendall(said)
    with socket.create_connection((name, port)) as stranger:
        stranger.sendall(links._TOKEN.pack(token, 3))  # who is no worker of this exchange
    connect(three)
    three[2].say(7, b"right", [0])
    assert hear(three[0], 7, 2) == [b"right"]


def test_who_is_needed_and_has_left_is_named(three: dict[int, Links]) -> None:
    connect(three)
    three[2].say(7, b"last words", [0])
    three[2].close()
    assert hear(three[0], 7, 2) == [b"last words"]
    three[4].say(7, b"still here", [0])  # whom it does not matter to
    assert hear(three[0], 7, 4) == [b"still here"]
    with pytest.raises(RuntimeError, match=r"connection .*worker 2"):
        hear(three[0], 7, 2, 4)


def test_silence_has_an_end(three: dict[int, Links]) -> None:
    connect(three)
    three[0]._limit = 0.1
    with pytest.raises(RuntimeError, match=r"timed out, worker \[4\] is silent"):
        hear(three[0], 7, 4)


def test_a_host_that_others_know_by_a_loopback_address_has_no_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(OSError, match="loopback"):
        Links(0)
