"""Messages between a worker and the process that calls it: whole, or not there yet, or refused.

Tests `launch/message.py`.
"""

import pickle
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessel.launch.message import NoMessageError, Reply, parse, receive, send


def framed(head: object, body: bytes) -> bytes:
    left, right = socket.socketpair()
    with left, right:
        send(left, head, body)
        left.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := right.recv(1 << 16):
            data += chunk
    return data


@settings(max_examples=50, deadline=None)
@given(body=st.binary(max_size=50), data=st.data())
def test_a_message_is_there_once_all_of_it_is(body: bytes, data: st.DataObject) -> None:
    said = framed(Reply(in_world=True), body)
    cut = data.draw(st.integers(0, len(said) - 1))
    assert parse(bytearray(said[:cut])) is None
    head, rest = parse(bytearray(said))  # type: ignore[misc]
    assert head == Reply(in_world=True) and bytes(rest) == body


@settings(max_examples=150, deadline=None)
@given(said=st.binary(max_size=60), marked=st.booleans())
def test_any_bytes_are_refused_or_waited_on(said: bytes, marked: bool) -> None:
    data = bytearray(framed(None, b"")[:8] + said if marked else said)
    try:
        parse(data)
    except NoMessageError as error:
        assert "is not a message of Tessel" in str(error)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 8 * 24 - 1))
def test_flipped_bits_of_a_frame(at: int) -> None:
    """The mark, or a length: it is refused, or more is waited for, or something is cut off."""
    data = bytearray(framed(Reply(), b"body"))
    data[at // 8] ^= 1 << at % 8
    try:
        parse(data)
    except NoMessageError:
        pass
    except (AttributeError, EOFError, pickle.UnpicklingError) as error:
        pytest.fail(f"a foreign exception: {error!r}")


def test_an_end_in_the_middle_is_an_end() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(framed(Reply(), b"body")[:-2])
        left.shutdown(socket.SHUT_WR)
        assert receive(right) is None
