"""Encoding: values come back as they were, and bytes of strangers are values or errors.

Tests `encoding.py`, `transport/wire.py`.
"""

import contextlib
import math
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tessel
from tessel.core.agreement import NUM_SIGNED, Signature
from tessel.encoding import decode, encodable, encode
from tessel.transport import wire
from tessel.transport.process import PeerProcess

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn),
)

tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), ..., slice(1, None)])
    | tensors
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(keys, inner, max_size=3)
    | st.dictionaries(keys, inner, max_size=2).map(OrderedDict)
    | st.sets(keys, max_size=3)
    | st.frozensets(keys, max_size=3),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bytes = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b) if x.numel()]
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes or (a, b))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(x, y) for p, q in pairs for x, y in zip(p, q))  # noqa: B905
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or repr(a) == repr(b)  # NaN


@settings(max_examples=150, deadline=None)
@given(value=values)
def test_values_come_back(value: Any) -> None:
    assert same(decode(encode(value)), value)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_values_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


@settings(max_examples=150, deadline=None)
@given(value=values, data=st.data())
def test_damaged_bytes_are_values_or_refused(value: Any, data: st.DataObject) -> None:
    """A flipped bit, or an end that is missing: never another exception, nor much memory."""
    said = bytearray(encode(value))
    at = data.draw(st.integers(0, 8 * len(said) - 1))
    said[at // 8] ^= 1 << at % 8
    for each in (bytes(said), bytes(said[: at // 8])):
        with contextlib.suppress(ValueError):
            decode(each)


def test_what_has_no_form_is_refused() -> None:
    class Pair(NamedTuple):
        a: int

    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for value in (object(), lambda: None, Pair(1), deep, torch.ones(2).to_sparse(), print):
        with pytest.raises(TypeError, match="cannot be encoded"):
            encode(value)
    assert decode(encode(encodable(Pair)(3))) == Pair(3)
    with pytest.raises(ValueError, match="does not start a value"):
        decode(pickle.dumps([1]))


@pytest.mark.parametrize("count", [2**64 - 1, 2**40, 1000])
def test_lengths_are_not_believed(count: int) -> None:
    for tag in b"sbltdiSC":
        with pytest.raises(ValueError):
            decode(bytes([tag]) + count.to_bytes(8, "little") + b"xyz")


class Evil:
    """What a pickle can do to whoever reads it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def with_a_pickle(path: str) -> str:
    """The second worker sends a pickle in the place of its value."""
    P = tessel.world()
    if P.rank == 1:
        wire.encode = lambda item: pickle.dumps(Evil(path))
    try:
        P.prepare().share_objects("hello")
    except RuntimeError as error:
        return str(error)
    finally:
        wire.encode = encode
    return ""


def test_a_pickle_from_the_network_is_not_executed(run: Any, tmp_path: Any) -> None:
    texts = run(with_a_pickle, str(tmp_path / "executed"), nprocs=2)
    assert texts[0] == texts[1]
    assert "the data from worker 1 of the group is not a message" in texts[0]
    assert not (tmp_path / "executed").exists()


def with_something_else() -> tuple[str, list[Any]]:
    """The second worker has something that cannot be sent: all of them hear of it."""
    P, text = tessel.world(), ""
    try:
        P.prepare().share_objects(object() if P.rank == 1 else "hello")
    except TypeError as error:
        text = str(error)
    return text, P.prepare().share_objects((P.rank, torch.ones(P.rank), PeerProcess("h", P.rank)))


def test_a_value_that_cannot_be_sent_raises_on_all(run: Any) -> None:
    for text, shared in run(with_something_else, nprocs=2):
        assert "worker 1 of the group cannot send its value: a value of type" in text
        assert [len(each[1]) for each in shared] == [0, 1]
        assert shared[1][2] == PeerProcess("h", 1)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(
        st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20),
        min_size=NUM_SIGNED,
        max_size=NUM_SIGNED,
    )
)
def test_any_words_of_an_agreement_are_a_signature_or_refused(words: list[int]) -> None:
    try:
        signature = Signature.from_words(words)
    except ValueError as error:
        assert "which this version of Tessel cannot read" in str(error)
    else:
        assert all(n >= 0 for n in signature.shape)


@given(shape=st.lists(st.integers(0, 2**40), max_size=10), flags=st.integers(0, 15))
def test_signatures_come_back_from_their_words(shape: list[int], flags: int) -> None:
    said = [bool(flags >> bit & 1) for bit in range(4)]
    signature = Signature(tuple(shape), torch.bfloat16, "cuda", *said)
    assert Signature.from_words(signature.words()) == signature
