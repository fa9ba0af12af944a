"""Encoding: values as bytes in a fixed form that can contain nothing but values.

Workers exchange values in this form, and checkpoints store theirs in it. Unlike a pickle it names
no functions to call: decoding untrusted bytes returns values, or raises `ValueError`.

A value is one byte for its kind, followed by its content: numbers have eight bytes, or a length and
digits; everything of variable length begins with the length. Named tuples and dataclasses can be
encoded if their class was registered with `encodable`: both sides know it by name.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

C = TypeVar("C", bound=type)
MAX_DEPTH = 64  # of nested containers, well below the limit of Python's stack
_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_CONSTANTS: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False, b"E": ...}
_CONTAINERS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"t": tuple,
    b"l": list,
    b"S": set,
    b"Z": frozenset,
    b"z": torch.Size,
}
_MAPPINGS: dict[bytes, type[dict[Any, Any]]] = {b"d": dict, b"O": OrderedDict}
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_DEVICES = ("cpu", "cuda", "meta", "xpu", "mps")
_classes: dict[str, type] = {}


def encodable(cls: C) -> C:
    """Let instances of a named tuple or a dataclass be encoded, by the name of the class.

    >>> from typing import NamedTuple
    >>> from tessel.encoding import decode, encodable, encode
    >>> @encodable
    ... class Point(NamedTuple):
    ...     x: int
    >>> decode(encode(Point(3)))
    Point(x=3)
    """
    _classes[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


def encode(value: Any) -> bytes:
    """Encode a value as bytes; TypeError if something in it cannot be encoded.

    >>> from tessel.encoding import decode, encode
    >>> decode(encode({"shape": (3, 4), "scale": 0.5}))
    {'shape': (3, 4), 'scale': 0.5}
    """
    pieces: list[bytes] = []
    _write(value, pieces, 0)
    return b"".join(pieces)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode a value; ValueError if these bytes are not an encoded value."""
    reader = _Decoder(memoryview(data).cast("B"))
    value = reader.value(0)
    if reader.place != len(reader.data):
        raise ValueError(f"{len(reader.data) - reader.place} bytes are left after the value")
    return value


def dtype_named(name: str) -> torch.dtype:
    """The dtype with this name; ValueError if there is none."""
    if name not in _DTYPES:
        raise ValueError(f"there is no dtype {name!r}")
    return _DTYPES[name]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The values of a dense tensor in row-major order, without a copy if possible."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a tensor of at most one element is contiguous with any stride, but cannot be viewed as bytes
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def tensor_of(data: bytes | bytearray | memoryview, dtype: torch.dtype, shape: Any) -> Tensor:
    """A new tensor of these bytes; ValueError if their number does not fit the shape."""
    shape = tuple(shape)
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(f"{shape} is not a shape")
    count = 1
    for n in shape:  # in Python's integers; a shape such as 0 × 2**80 is refused below
        count *= n
    if max(shape, default=0) >= 2**62 or count * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no tensor of shape {shape} and {dtype}")
    raw = np.frombuffer(data, np.uint8).copy()  # writable
    try:
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(raw).view(dtype).reshape(shape)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"there is no tensor of shape {shape} and {dtype}: {error}") from error


def _write(value: Any, pieces: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TypeError(f"a value with more than {MAX_DEPTH} nested containers cannot be encoded")
    kind = type(value)
    if value is None or value is ... or kind is bool:
        pieces.append(next(tag for tag, each in _CONSTANTS.items() if each is value))
    elif isinstance(value, Tensor):
        _write_tensor(value, pieces)
    elif f"{kind.__module__}.{kind.__qualname__}" in _classes:
        fields: Iterable[str] = getattr(kind, "_fields", ())
        if dataclasses.is_dataclass(kind):
            fields = [field.name for field in dataclasses.fields(kind)]
        _run(b"C", f"{kind.__module__}.{kind.__qualname__}".encode(), pieces)
        _write(tuple(getattr(value, name) for name in fields), pieces, depth + 1)
    elif isinstance(value, torch.dtype):
        _run(b"D", str(value).encode(), pieces)
    elif isinstance(value, torch.device):
        _run(b"V", str(value).encode(), pieces)
    elif isinstance(value, str):
        _run(b"s", value.encode("utf-8", "surrogatepass"), pieces)
    elif isinstance(value, bytes | bytearray | memoryview):
        _run(b"b", bytes(value), pieces)
    elif isinstance(value, np.generic) and value.dtype.kind in "biufc":
        _write(value.item(), pieces, depth)  # first, since some are also Python's numbers
    elif isinstance(value, int):
        number = int(value)  # drops a subclass, such as an enumeration
        _run(b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True), pieces)
    elif isinstance(value, float):
        pieces.append(b"f" + _FLOAT.pack(value))
    elif isinstance(value, complex):
        pieces.append(b"c" + _COMPLEX.pack(value.real, value.imag))
    elif isinstance(value, slice):
        pieces.append(b":")
        _write((value.start, value.stop, value.step), pieces, depth + 1)
    elif isinstance(value, dict):
        tag = b"O" if isinstance(value, OrderedDict) else b"d"
        pieces.append(tag + _LENGTH.pack(len(value)))
        for key, each in value.items():
            _write(key, pieces, depth + 1)
            _write(each, pieces, depth + 1)
    elif isinstance(value, tuple | list | set | frozenset) and not hasattr(kind, "_fields"):
        kinds = ((torch.Size, b"z"), (tuple, b"t"), (list, b"l"), (frozenset, b"Z"), (set, b"S"))
        tag = next(tag for each, tag in kinds if isinstance(value, each))
        pieces.append(tag + _LENGTH.pack(len(value)))
        for each in value:
            _write(each, pieces, depth + 1)
    else:
        raise TypeError(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be encoded; numbers, "
            "strings, bytes, dense tensors and containers of these can"
        )


def _write_tensor(value: Tensor, pieces: list[bytes]) -> None:
    kind = type(value)
    if kind not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TypeError(
            f"a tensor of type {kind.__qualname__} cannot be encoded; only plain tensors can"
        )
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(
            f"a tensor with layout {value.layout} cannot be encoded; only dense tensors can"
        )
    pieces.append(b"x")
    described = (str(value.dtype), tuple(value.shape), value.device.type)
    _write(described, pieces, 0)
    if not value.is_meta:
        _run(b"b", tensor_bytes(value), pieces)


# kinds that consist of a length and as many bytes, and how the bytes are read
_RUNS: dict[bytes, Callable[[memoryview], Any]] = {
    b"i": lambda data: int.from_bytes(data, "little", signed=True),
    b"b": bytes,
    b"s": lambda data: str(data, "utf-8", "surrogatepass"),
    b"D": lambda data: dtype_named(str(data, "utf-8")),
    b"V": lambda data: torch.device(str(data, "utf-8")),
}


def _run(tag: bytes, data: bytes | memoryview, pieces: list[bytes]) -> None:
    pieces.append(tag + _LENGTH.pack(len(data)))
    pieces.append(data)  # type: ignore[arg-type]  # join takes any buffer


class _Decoder:
    """Reads values from bytes, from left to right; invalid bytes raise ValueError."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.place = data, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.place:
            raise ValueError(f"{count} bytes are missing after byte {self.place}")
        self.place += count
        return self.data[self.place - count : self.place]

    def length(self) -> int:
        (count,) = _LENGTH.unpack(self.take(_LENGTH.size))
        if count > len(self.data) - self.place:  # each item has at least one byte
            raise ValueError(f"{count} items cannot follow byte {self.place}")
        return int(count)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} nested containers")
        tag = bytes(self.take(1))
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _RUNS:
            try:
                return _RUNS[tag](self.take(self.length()))
            except RuntimeError as error:  # torch's, for an unknown device
                raise ValueError(f"{error}") from error
        if tag == b"f":
            return _FLOAT.unpack(self.take(_FLOAT.size))[0]
        if tag == b"c":
            return complex(*_COMPLEX.unpack(self.take(_COMPLEX.size)))
        if tag in _MAPPINGS:
            entries = _MAPPINGS[tag]()
            for _ in range(self.length()):
                key, each = self.value(depth + 1), self.value(depth + 1)
                try:
                    entries[key] = each
                except TypeError as error:
                    raise ValueError(f"a {type(key).__name__} cannot be a key: {error}") from error
            return entries
        if tag in _CONTAINERS:
            items = [self.value(depth + 1) for _ in range(self.length())]
            try:
                return _CONTAINERS[tag](items)
            except (TypeError, OverflowError) as error:  # unhashable items, or no valid lengths
                raise ValueError(f"these items do not form a container: {error}") from error
        if tag == b":":
            return slice(*self._three(depth))
        if tag == b"C":
            name = str(self.take(self.length()), "utf-8")
            cls, items = _classes.get(name), self.value(depth + 1)
            if cls is None or not isinstance(items, tuple):
                raise ValueError(f"{name!r} is not a class that can be sent")
            try:
                return cls(*items)
            except TypeError as error:
                raise ValueError(f"{items} are not valid values for {name}: {error}") from error
        if tag == b"x":
            return self._tensor(depth)
        raise ValueError(f"byte {self.place - 1} does not start a value: {tag!r}")

    def _three(self, depth: int) -> tuple[Any, ...]:
        items = self.value(depth + 1)
        if not isinstance(items, tuple) or len(items) != 3:
            raise ValueError(f"expected 3 values before byte {self.place}")
        return items

    def _tensor(self, depth: int) -> Tensor:
        name, shape, device = self._three(depth)
        dtype = dtype_named(name) if isinstance(name, str) else None
        if dtype is None or device not in _DEVICES or not isinstance(shape, tuple):
            raise ValueError(f"there is no tensor of {name}, shape {shape} on {device}")
        if device == "meta":
            try:
                return torch.empty(shape, dtype=dtype, device="meta")
            except (TypeError, RuntimeError) as error:
                raise ValueError(f"{shape} is not a shape: {error}") from error
        data = self.value(depth + 1)
        if not isinstance(data, bytes):
            raise ValueError("the numbers of a tensor are missing")
        tensor = tensor_of(data, dtype, shape)
        return tensor if device == "cpu" else tensor.to(device)
