"""The gate between hosts: who knows the token gets through, and nobody else.

Tests `launch/gate.py`.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessel.launch import gate
from tessel.launch.gate import Endpoint, Gate, GateError, Tunnel, read_token
from tessel.machine import interface_of

TOKEN = b"0123456789abcdef"
SOON = 5.0  # seconds, for what takes milliseconds


class Echo:
    """A store in the place of torch's: it says what it hears, and counts who came."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.callers = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            self.callers += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.server.close()


@pytest.fixture
def opened(echo: Echo) -> Iterator[tuple[Endpoint, Echo]]:
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint(f"127.0.0.1:{listener.getsockname()[1]}")
    door = Gate(listener, echo.port, TOKEN, "job")
    yield endpoint, echo
    door.close()


def test_bytes_go_through_both_ways(opened: tuple[Endpoint, Echo]) -> None:
    endpoint, _ = opened
    tunnel = Tunnel(endpoint, TOKEN, "job", SOON)
    sent = os.urandom(1 << 20)
    with socket.create_connection(("127.0.0.1", tunnel.port), timeout=SOON) as connection:
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
        heard = b""
        while len(heard) < len(sent):
            heard += connection.recv(1 << 16)
        assert heard == sent
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # an end of one side is an end for the other
    tunnel.close()


@pytest.mark.parametrize(("token", "job"), [(b"another token, as long", "job"), (TOKEN, "other")])
def test_another_token_or_job_is_refused(
    opened: tuple[Endpoint, Echo], token: bytes, job: str
) -> None:
    endpoint, echo = opened
    with pytest.raises(GateError, match="has a different token or --rdzv-id"):
        Tunnel(endpoint, token, job, SOON)
    assert echo.callers == 0


@settings(max_examples=25, deadline=None)
@given(said=st.binary(max_size=200), greets=st.booleans())
def test_strangers_do_not_reach_the_store(said: bytes, greets: bool) -> None:
    """Whatever they say: they get a greeting with a random number, and then the end."""
    echo, listener = Echo(), socket.create_server(("127.0.0.1", 0))
    door = Gate(listener, echo.port, TOKEN, "job")
    try:
        with socket.create_connection(listener.getsockname(), timeout=SOON) as connection:
            connection.sendall(gate.GREETING + said if greets else said)
            connection.shutdown(socket.SHUT_WR)
            heard = b""
            try:
                while chunk := connection.recv(1 << 16):
                    heard += chunk
            except ConnectionResetError:
                pass
        assert len(heard) in (0, len(gate.GREETING) + 32)
        assert echo.callers == 0
    finally:
        door.close()
        echo.server.close()


def test_a_replayed_proof_is_worth_nothing(opened: tuple[Endpoint, Echo]) -> None:
    """Numbers are drawn anew: what a tunnel said once does not open the gate again."""
    endpoint, echo = opened
    where = endpoint.host, endpoint.port
    spy = socket.create_server(("127.0.0.1", 0))  # which carries what both say, and keeps it
    kept = []

    def carry() -> None:
        near, _ = spy.accept()
        with near, socket.create_connection(where) as far:
            near.sendall(far.recv(1000))
            kept.append(near.recv(1000))
            far.sendall(kept[0])
            near.sendall(far.recv(1000))

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    Tunnel(Endpoint(f"127.0.0.1:{spy.getsockname()[1]}"), TOKEN, "job", SOON).close()
    thread.join(SOON)
    deadline = time.monotonic() + SOON
    while echo.callers < 1 and time.monotonic() < deadline:  # the gate calls after it has answered
        time.sleep(0.01)
    assert echo.callers == 1
    with socket.create_connection(where, timeout=SOON) as again:
        again.recv(1000)
        again.sendall(kept[0])
        assert again.recv(1000) == b""
    assert echo.callers == 1


def test_what_is_no_gate_is_named(echo: Echo) -> None:
    foreign = socket.create_server(("127.0.0.1", 0))

    def speak() -> None:
        connection, _ = foreign.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(64))
            time.sleep(0.5)

    threading.Thread(target=speak, daemon=True).start()
    endpoint = Endpoint(f"127.0.0.1:{foreign.getsockname()[1]}")
    with pytest.raises(GateError, match="is not this version of `tessel run`"):
        Tunnel(endpoint, TOKEN, "job", SOON)
    foreign.close()
    began = time.monotonic()
    with pytest.raises(GateError, match=r"nobody answered at 127\.0\.0\.1:"):
        Tunnel(endpoint, TOKEN, "job", 0.1)
    assert time.monotonic() - began < SOON


def test_many_silent_strangers_do_not_keep_others_out(
    opened: tuple[Endpoint, Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_SECONDS_TO_PROVE", 0.5)
    endpoint, _ = opened
    silent = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(100)]
    time.sleep(1.0)  # after which they are put out
    Tunnel(endpoint, TOKEN, "job", SOON).close()
    for each in silent:
        each.close()


@given(text=st.text(max_size=40))
def test_endpoints_are_parsed_or_refused(text: str) -> None:
    try:
        endpoint = Endpoint(text)
    except ValueError as error:
        assert "expected HOST:PORT" in str(error)
    else:
        assert 0 < endpoint.port < 2**16 and endpoint.host


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:0", "h:65536", "h:-1", "h:1x", "h:¹", "a b:1"])
def test_these_are_no_endpoints(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT, such as host0:29400"):
        Endpoint(text)


def test_hosts_without_an_address_are_named() -> None:
    with pytest.raises(GateError, match=r"the address of 'no-such-host\.invalid' cannot be found"):
        Endpoint("no-such-host.invalid:1").listen()


def test_only_the_host_with_the_address_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Endpoint(f"127.0.0.1:{taken.getsockname()[1]}")
        assert endpoint.listen() is None
    assert Endpoint("192.0.2.77:29400").listen() is None  # of a network for documents
    listener = endpoint.listen()
    assert listener is not None and listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_interfaces_by_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") == "lo"
    assert interface_of("192.0.2.77") is None


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESSEL_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made, file = read_token(), tmp_path / "tessel" / "token"
    assert len(made) == 64 and read_token() == made == file.read_bytes().strip()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["token"]
    file.chmod(0o640)
    with pytest.raises(GateError, match=f"chmod 600 {file}"):
        read_token()
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(GateError, match="at least 16 characters, got 5"):
        read_token(file)
    with pytest.raises(GateError, match="cannot be read: No such file"):
        read_token(tmp_path / "absent")
    monkeypatch.setenv("TESSEL_TOKEN", "short")
    with pytest.raises(
        GateError, match="the token in TESSEL_TOKEN must have at least 16 characters"
    ):
        read_token()
    monkeypatch.setenv("TESSEL_TOKEN", TOKEN.decode())
    assert read_token() == TOKEN
