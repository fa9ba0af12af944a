"""Gate: the only door between the hosts of a job, which opens only with the job's token.

Torch's store, through which workers find each other, does not authenticate anyone. So it listens
only on the loopback interface of one host. The launcher of that host has a gate on the address that
the hosts were given; the launchers of the others have a tunnel, a port of their own loopback
interface that leads through the gate. Before a single byte goes through, both sides prove that they
know the token, by an HMAC over numbers that the other has just drawn. The connection is not
encrypted.

    gate:    GREETING, 32 random bytes
    tunnel:  GREETING, 32 random bytes, HMAC("tunnel", job, both numbers)
    gate:    HMAC("gate", job, both numbers)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from tessel.settings import text

GREETING = b"tessel 1"
_NONCE, _PROOF = 32, 32
_SECONDS_TO_PROVE = 10.0
_SECONDS_BETWEEN_ATTEMPTS = 0.2
_MOST_STRANGERS = 64  # simultaneous connections that are not authenticated yet
_FEWEST_LETTERS = 16  # shortest token


class GateError(OSError):
    """A gate or a tunnel cannot be made; the text says why."""


class Endpoint:
    """An address that was given as HOST:PORT.

    >>> from tessel.launch.gate import Endpoint
    >>> Endpoint("[::1]:29400").host, Endpoint("host0:29400").port
    ('::1', 29400)
    """

    def __init__(self, text: str) -> None:
        host, _, port = text.rpartition(":")
        self.host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        if not self.host or not is_port or any(c in self.host for c in " /[]"):
            raise ValueError(f"expected HOST:PORT, such as host0:29400, got {text!r}")
        self.port = int(port)

    def addresses(self) -> list[tuple[Any, str]]:
        """Look up the families and addresses of the host; GateError if there are none."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise GateError(f"the address of {self.host!r} cannot be found: {error}") from error
        return [(family, str(address[0])) for family, _, _, _, address in found]

    def listen(self) -> socket.socket | None:
        """Listen if this is an address of this host, and nobody else listens there; else None.

        GateError if no other host can reach the address, unless it was given as a local one.
        """
        for family, address in self.addresses():
            try:
                listener = socket.create_server((address, self.port), family=family, backlog=128)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EAFNOSUPPORT):
                    continue
                raise GateError(f"cannot listen on {address}: {error}") from error
            is_hidden = address.startswith("127.") or address == "::1"
            if is_hidden and self.host not in ("localhost", address):
                listener.close()
                raise GateError(
                    f"{self.host!r} is {address} on this host, where no other host can reach it; "
                    f"give an address instead of the name"
                )
            return listener
        return None


def read_token(path: str | os.PathLike[str] | None = None) -> bytes:
    """The token of this user: TESSEL_TOKEN, else that in a file; the default file is made.

    Args:
        path: the file; None for `$XDG_CONFIG_HOME/tessel/token`.

    Raises:
        GateError: if there is no token, others can read it, or it is too short.
    """
    given = text("TESSEL_TOKEN")
    if given is not None and path is None:
        return _checked_token(given.strip().encode(), "TESSEL_TOKEN")
    config = text("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    file = Path(config, "tessel", "token") if path is None else Path(path)
    try:
        if path is None:
            make_token(file)
        with open(file, "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise GateError(
                    f"the token in {file} must belong to this user and be readable by nobody else; "
                    f"chmod 600 {file}"
                )
            return _checked_token(opened.read(4096).strip(), str(file))
    except GateError:
        raise
    except OSError as error:
        raise GateError(f"the token in {file} cannot be read: {error.strerror}") from error


def make_token(file: Path) -> None:
    """Make a token for this user if there is none; if several processes do, the first counts."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f"token.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as opened:
        opened.write(secrets.token_hex(32) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(fresh, file)  # whole, or not at all
    fresh.unlink()


def _checked_token(token: bytes, source: str) -> bytes:
    if len(token) < _FEWEST_LETTERS:
        raise GateError(
            f"the token in {source} must have at least {_FEWEST_LETTERS} characters, got "
            f"{len(token)}"
        )
    return token


def _proof(token: bytes, job: str, side: bytes, gates: bytes, tunnels: bytes) -> bytes:
    """The proof of one side that it knows the token, after both have drawn a number."""
    name = job.encode("utf-8", "surrogateescape")
    return hmac.digest(token, side + name + gates + tunnels, "sha256")


class _Forwarder:
    """Forwards bytes between pairs of connections, in a separate thread.

    A subclass handles a new connection in `_serve`.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = 0  # number of pairs
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._serve(reader, writer)
            except asyncio.CancelledError:  # from `close`; asyncio would report it as a failure
                pass
            finally:
                writer.close()

        async def start() -> None:
            await asyncio.start_server(served, sock=listener)

        self._run(start())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement `_serve`")

    def close(self, seconds: float = 0.0) -> None:
        """End, after giving open connections at most so many seconds to end by themselves."""
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)

        async def stop() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _join(
        self,
        one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Forward bytes both ways until both sides have ended."""
        self._open += 1
        try:
            await asyncio.gather(_carry(one[0], other[1]), _carry(other[0], one[1]))
        finally:
            self._open -= 1
            other[1].close()  # the caller closes the first


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # one side is gone, so the other is done, too
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class Gate(_Forwarder):
    """Connects clients that know the token to a port of this host's loopback interface.

    Args:
        listener: the socket to which hosts connect.
        port: the port to which they are connected.
        token: the secret of the job.
        job: its name; hosts of another job with the same token are refused.
    """

    def __init__(self, listener: socket.socket, port: int, token: bytes, job: str) -> None:
        self.address = listener.getsockname()[0]
        self._port, self._proof = port, partial(_proof, token, job)
        self._strangers = 0
        super().__init__(listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= _MOST_STRANGERS:
            return
        self._strangers += 1
        try:
            is_known = await asyncio.wait_for(
                self._authenticates(reader, writer), _SECONDS_TO_PROVE
            )
        except (OSError, EOFError):  # a timeout is also an OSError
            is_known = False
        finally:
            self._strangers -= 1
        if not is_known:
            return
        try:
            inside = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # the store is gone, and so is the job
            return
        await self._join((reader, writer), inside)

    async def _authenticates(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        mine = secrets.token_bytes(_NONCE)
        writer.write(GREETING + mine)
        await writer.drain()
        if await reader.readexactly(len(GREETING)) != GREETING:
            return False
        theirs, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
        if not hmac.compare_digest(proof, self._proof(b"tunnel", mine, theirs)):
            return False
        writer.write(self._proof(b"gate", mine, theirs))
        await writer.drain()
        return True


class Tunnel(_Forwarder):
    """A port of this host's loopback interface that leads through the gate of another host.

    Args:
        endpoint: the address of the gate.
        token: the secret of the job.
        job: its name.
        seconds: how long to retry until the gate answers.

    Raises:
        GateError: if nobody answers, or it is no gate, or the token or the job differs.
    """

    def __init__(self, endpoint: Endpoint, token: bytes, job: str, seconds: float) -> None:
        self._endpoint, self._proof = endpoint, partial(_proof, token, job)
        # Once before all else, so that a wrong token raises here and not in a worker.
        with self._knock(seconds) as probe:
            self.address = probe.getsockname()[0]
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = listener.getsockname()[1]
        super().__init__(listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            outside = await asyncio.get_running_loop().run_in_executor(None, self._knock, 5.0)
            there = await asyncio.open_connection(sock=outside)
        except OSError:  # the client finds its connection closed
            return
        await self._join((reader, writer), there)

    def _knock(self, seconds: float) -> socket.socket:
        """Connect through the gate."""
        where = f"{self._endpoint.host}:{self._endpoint.port}"
        deadline = time.monotonic() + seconds
        while True:
            try:
                host = self._endpoint.host, self._endpoint.port
                connection = socket.create_connection(host, timeout=_SECONDS_TO_PROVE)
                break
            except (OSError, UnicodeError) as error:
                if time.monotonic() > deadline:
                    raise GateError(
                        f"nobody answered at {where} for {seconds:.0f} s ({error}); it must be an "
                        f"address of one of the hosts, on which `tessel run` was started, too"
                    ) from error
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        try:
            self._prove(connection, where)
        except OSError as error:
            connection.close()
            if isinstance(error, GateError):
                raise
            raise GateError(f"the connection to {where} failed: {error}") from error
        connection.settimeout(None)
        return connection

    def _prove(self, connection: socket.socket, where: str) -> None:
        connection.settimeout(_SECONDS_TO_PROVE)
        if _exactly(connection, len(GREETING)) != GREETING:
            raise GateError(
                f"the program that listens at {where} is not this version of `tessel run`; use "
                "another port, and the same version on all hosts"
            )
        theirs, mine = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
        connection.sendall(GREETING + mine + self._proof(b"tunnel", theirs, mine))
        proof = _exactly(connection, _PROOF)
        if not hmac.compare_digest(proof, self._proof(b"gate", theirs, mine)):
            raise GateError(
                f"the host at {where} has another token or --rdzv-id than this one; both must be "
                f"the same on all hosts: set TESSEL_TOKEN, or copy the file with the token"
            )


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read this many bytes, with zeros for those that do not come: no proof is all zeros."""
    data = b""
    while len(data) < count and (chunk := connection.recv(count - len(data))):
        data += chunk
    return data.ljust(count, b"\0")
