"""Links: connections between the first workers of hosts, for the few words of agreements.

Gloo asks the receiver before it sends, by a thread at each end, and a thread that finds its
connection in use spins until the worker gets the core to go on. If threads outnumber cores, that
takes longer than all the rest of an agreement. Over a link a worker sends and waits itself. Tensors
are sent over Gloo, whose threads carry them while workers compute.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from tessel.limits import seconds_to_wait
from tessel.transport.host import Host
from tessel.transport.process import check_not_forked
from tessel.transport.request import Key
from tessel.transport.watch import Watch

MOST_HOSTS = 64  # each first worker has a connection to every other
SECONDS_TO_CONNECT = 5.0
NAP_MS = 50  # between two checks of the alarm and for dead workers
_HEAD = struct.Struct("<qq")  # the code of a group, and the length of its message in bytes
_TOKEN = struct.Struct("<16sq")  # the receiver's secret, and the rank of the worker that connects
_SIOCGIFADDR = 0x8915
LinkAddress = tuple[str, int, bytes]


class Links:
    """The connections of this worker, the first of its host, to those of all other hosts.

    Between `__init__` and `connect` the workers exchange their addresses.

    Args:
        worker: this worker.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._listener = socket.create_server((_own_address(), 0), backlog=MOST_HOSTS)
        self._token = secrets.token_bytes(16)
        self._ends: dict[int, socket.socket] = {}
        self._heard: dict[tuple[int, int], deque[bytes]] = {}  # by worker and code of the group
        self._come: dict[int, bytearray] = {}  # received from each worker, not yet a whole message
        self._left: dict[int, bytearray] = {}  # not yet sent to each worker
        self._lost: dict[int, str] = {}  # why the connection to a worker was lost
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._limit = seconds_to_wait()

    @property
    def address(self) -> LinkAddress:
        """The address of this worker, and the token with which others connect."""
        return (*self._listener.getsockname()[:2], self._token)

    def connect(self, addresses: Mapping[int, LinkAddress]) -> None:
        """Connect to all others, those of lower ranks first; OSError if one is not reached."""
        deadline = time.monotonic() + SECONDS_TO_CONNECT
        for other in sorted(w for w in addresses if w < self.worker):
            name, port, token = addresses[other]
            end = socket.create_connection((name, port), max(0.1, deadline - time.monotonic()))
            self._ends[other] = end
            end.sendall(_TOKEN.pack(token, self.worker))
        while any(w > self.worker and w not in self._ends for w in addresses):
            self._listener.settimeout(max(0.1, deadline - time.monotonic()))
            end, _ = self._listener.accept()
            end.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                said = end.recv(_TOKEN.size, socket.MSG_WAITALL)
            except OSError:
                said = b""
            token, other = _TOKEN.unpack(said) if len(said) == _TOKEN.size else (b"", -1)
            if secrets.compare_digest(token, self._token) and other in addresses:
                self._ends[other] = end
            else:  # a stranger
                end.close()
        self._listener.close()
        for other, end in self._ends.items():
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._come[other], self._left[other] = bytearray(), bytearray()

    def close(self) -> None:
        """Close all connections; the others notice when they wait for this worker."""
        for end in (self._listener, *self._ends.values()):
            end.close()

    def say(self, code: int, words: bytes, others: Iterable[int]) -> None:
        """Send words of a group to others; if there is no room, the rest is sent during `hear`."""
        check_not_forked(self._owner, self.worker)
        with self._lock:
            for other in others:
                self._left[other] += _HEAD.pack(code, len(words)) + words
                self._send(other)

    def hear(self, key: Key, others: Sequence[int], watch: Watch, host: Host | None) -> list[bytes]:
        """Receive the next words of others in a group, in order, independently of each other.

        Args:
            key: the key of the agreement; it begins with the code of the group.
            others: the workers from which words are received.
            watch: watches over waits.
            host: the workers with which this one shares memory, if any.
        """
        since, wait = time.monotonic(), None
        try:
            while True:
                with self._lock:
                    self._progress()
                    queues = [self._heard.get((other, key[0])) for other in others]
                    missing = [
                        other
                        for other, queue in zip(others, queues, strict=True)
                        if not queue or self._left[other]
                    ]
                    if not missing:
                        return [queue.popleft() for queue in queues if queue]
                    lost = next((self._lost[w] for w in missing if w in self._lost), "")
                if lost:
                    raise RuntimeError(lost)
                # sleep until something arrives, or can be sent, but not for long
                poll = select.poll()
                for other in self._ends.keys() - self._lost.keys():
                    events = select.POLLIN | (select.POLLOUT if self._left[other] else 0)
                    poll.register(self._ends[other], events)
                if poll.poll(NAP_MS):
                    continue
                watch.check()
                if host is not None:
                    host.check_alive((), host.workers, 0.0)
                if time.monotonic() - since > self._limit:
                    raise RuntimeError(f"timed out, worker {missing} is silent")
                wait = wait or watch.begin(key, missing)
                wait.beats += 1
        finally:
            if wait is not None:
                watch.finish(wait)

    def _send(self, other: int) -> None:
        left = self._left[other]
        try:
            while left and other not in self._lost:
                del left[: self._ends[other].send(left)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost[other] = f"connection to worker {other}: {error}"

    def _progress(self) -> None:
        """Send as far as there is room, and read everything that has arrived."""
        for other in self._ends.keys() - self._lost.keys():
            self._send(other)
            come = self._come[other]
            try:
                while more := self._ends[other].recv(2**16):
                    come += more
                self._lost[other] = f"connection closed by worker {other}"
            except BlockingIOError:
                pass
            except OSError as error:
                self._lost[other] = f"connection to worker {other}: {error}"
            while len(come) >= _HEAD.size:
                code, length = _HEAD.unpack_from(come)
                if len(come) < _HEAD.size + length:
                    break
                said = bytes(come[_HEAD.size : _HEAD.size + length])
                self._heard.setdefault((other, code), deque()).append(said)
                del come[: _HEAD.size + length]


def _own_address() -> str:
    """The address that Gloo uses, too; OSError if other hosts could not reach it."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names and sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            name = struct.pack("256s", names.partition(",")[0].encode()[:15])
            found = socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, name)[20:24])
    else:
        found = socket.gethostbyname(socket.gethostname())
    if found.startswith("127."):
        raise OSError("this host is known by a loopback address")
    return found
