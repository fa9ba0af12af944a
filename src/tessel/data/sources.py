"""Sources: samples that are read box by box, from a function or from arrays in files."""

from __future__ import annotations

import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessel.core.boxes import Box, extent
from tessel.core.layout import Shape

HDF5 = (".h5", ".hdf5", ".hdf")


class Source(ABC):
    """Samples of which any box can be read without the rest.

    A subclass implements `__len__`, `dtype`, `shape_of` and `fetch`; `FromFunction` takes a
    function instead.
    """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def shape_of(self, index: int) -> Shape:
        """The shape of a whole sample."""

    @abstractmethod
    def fetch(self, index: int, box: Box) -> Any:
        """The values in a box, which is not empty, of a sample: an array or a tensor."""

    def read(self, index: int, box: Box) -> torch.Tensor:
        """The values in a box of a sample, in their own memory; an empty box is not read.

        Args:
            index: of the sample.
            box: an interval `(start, stop)` for each dimension of the sample.

        >>> import numpy, tessel
        >>> source = tessel.data.FromArray(numpy.arange(12).reshape(2, 6))
        >>> source.read(1, ((2, 5),))
        tensor([ 8,  9, 10])
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are samples 0 to {len(self) - 1}, got {index}")
        shape = self.shape_of(index)
        fits = len(box) == len(shape) and all(
            0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True)
        )
        if not fits:
            raise IndexError(f"the box {box} is out of bounds for sample {index} of shape {shape}")
        # A user's function need not handle empty boxes, which the last workers may have.
        if 0 in extent(box):
            return torch.empty(extent(box), dtype=self.dtype)
        found = as_tensor(self.fetch(index, box))
        if tuple(found.shape) != extent(box):
            raise ValueError(
                f"sample {index} in the box {box}: expected values of shape {extent(box)}, got "
                f"{tuple(found.shape)}"
            )
        if found.dtype.is_complex and not self.dtype.is_complex:
            raise ValueError(
                f"{found.dtype} values cannot be converted to {self.dtype}; read them as complex "
                "numbers"
            )
        return found.to(self.dtype)


class FromFunction(Source):
    """Samples that a function reads.

    Args:
        read: `read(index, box)` returns a new array or tensor of the values in a box, an interval
            `(start, stop)` for each dimension. It is not called for empty boxes.
        shape: the shape of each sample, or a function of the index that returns it.
        dtype: the dtype to which values are converted.
        length: the number of samples.

    >>> import tessel, torch
    >>> def read(index, box):
    ...     (start, stop), = box
    ...     return 10 * index + torch.arange(start, stop)
    >>> tessel.data.FromFunction(read, (6,), torch.int64, length=3).read(2, ((1, 4),))
    tensor([21, 22, 23])
    """

    def __init__(
        self,
        read: Callable[[int, Box], Any],
        shape: Iterable[int] | Callable[[int], Iterable[int]],
        dtype: torch.dtype,
        length: int = 1,
    ) -> None:
        self._function, self._dtype, self._length = read, dtype, length
        self._shape = shape if callable(shape) else tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def __len__(self) -> int:
        return self._length

    def shape_of(self, index: int) -> Shape:
        return tuple(self._shape(index)) if callable(self._shape) else self._shape

    def fetch(self, index: int, box: Box) -> Any:
        return self._function(index, box)


class FromArrays(Source):
    """Samples that are separate arrays, such as volumes in files; their sizes may differ.

    Args:
        arrays: for each sample an object with shape, dtype and slices (`np.memmap`, `zarr.Array`,
            `h5py.Dataset`), the path of one (`.npy`, `.zarr`, `.h5`), or a function that opens one.
            Each process opens a path when it first reads it.
        key: the key of the array in files that contain several.
        dtype: the dtype to which values are converted; None for that of the first array.

    >>> import numpy, tessel
    >>> source = tessel.data.FromArrays([numpy.ones((4, 3)), numpy.zeros((2, 3))])
    >>> source.shape_of(1), source.read(0, ((1, 2), (0, 3)))
    ((2, 3), tensor([[1., 1., 1.]], dtype=torch.float64))
    """

    def __init__(
        self, arrays: Iterable[Any], key: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._arrays = [LazyArray(each, key) for each in arrays]
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype or (self._arrays[0].dtype if self._arrays else torch.float32)

    def __len__(self) -> int:
        return len(self._arrays)

    def shape_of(self, index: int) -> Shape:
        return self._arrays[index].shape

    def fetch(self, index: int, box: Box) -> Any:
        array = self._arrays[index]
        if self._dtype is None and array.dtype != self.dtype:
            raise ValueError(
                f"sample {index}, {array}, has dtype {array.dtype}, but the first one has "
                f"{self.dtype}; pass dtype= to convert all of them"
            )
        return array[tuple(slice(*each) for each in box)]


class FromArray(FromArrays):
    """Samples that are one array, whose first dimension counts them.

    Args:
        array: an array like those of `FromArrays`.
        key: the key of the array in a file that contains several.
        dtype: the dtype to which values are converted; None for that of the array.

    >>> import numpy, tessel, torch
    >>> source = tessel.data.FromArray(numpy.arange(6).reshape(3, 2), dtype=torch.float32)
    >>> len(source), source.shape_of(0), source.read(2, ((0, 2),))
    (3, (2,), tensor([4., 5.]))
    """

    def __init__(
        self, array: Any, key: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__([array], key, dtype)

    def __len__(self) -> int:
        shape = self._arrays[0].shape
        if not shape:
            raise ValueError(
                f"{self._arrays[0]}: the first dimension counts samples, got an array of shape (); "
                f"FromArrays([array]) takes each array as a sample"
            )
        return shape[0]

    def shape_of(self, index: int) -> Shape:
        return self._arrays[0].shape[1:]

    def fetch(self, index: int, box: Box) -> Any:
        return self._arrays[0][(index, *(slice(*each) for each in box))]


class LazyArray:
    """An array that each process opens when it first reads it, so that forks share no open file.

    Args:
        array: the array, a path, or a function that opens one.
        key: the key of the array in the file.
    """

    def __init__(self, array: Any, key: str | None = None) -> None:
        self._open: Callable[[], Any] | None = None
        self._array, self._process = array, 0
        # Asked for once, before forks: shape and dtype need no open file later.
        self._facts: tuple[Shape, torch.dtype] | None = None
        h5py = sys.modules.get("h5py")  # imported if there is one of its arrays
        if isinstance(array, str | os.PathLike):
            self._open = partial(open_file, os.fspath(array), key)
        elif key is not None:
            raise TypeError(f"key= selects an array in a file, and cannot be used with {array!r}")
        elif h5py is not None and isinstance(array, h5py.Dataset):
            if Path(array.file.filename).exists():  # not one in memory only
                self._open = partial(_open_hdf5, array.file.filename, array.name)
        # A view of a memmap does not have its own offset in the file, and cannot be opened again.
        elif isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
            kind: dict[str, Any] = {"dtype": array.dtype, "shape": array.shape}
            kind["order"] = "C" if array.flags.c_contiguous else "F"
            self._open = partial(np.memmap, array.filename, mode="r", offset=array.offset, **kind)
        elif not hasattr(array, "__getitem__") and callable(array):
            self._open = array
        self._name = f"{array}" if isinstance(array, str | os.PathLike) else type(array).__name__

    @property
    def shape(self) -> Shape:
        return self._known()[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._known()[1]

    def __getitem__(self, region: Any) -> Any:
        if self._open is not None and self._process != os.getpid():
            self._array, self._process = self._open(), os.getpid()
        return self._array[region]

    def _known(self) -> tuple[Shape, torch.dtype]:
        if self._facts is None:
            array = self._array if self._open is None else self._open()
            if not all(hasattr(array, name) for name in ("shape", "dtype", "__getitem__")):
                raise TypeError(
                    f"{self}: expected an array with shape, dtype and slices, its path, or a "
                    f"function that opens it, got {array!r}"
                )
            self._facts = tuple(map(int, array.shape)), torch_dtype(array.dtype)
            # Not kept: HDF5 would share the open file with forked processes.
            if self._open is not None and hasattr(array, "file"):
                array.file.close()
        return self._facts

    def __getstate__(self) -> dict[str, Any]:
        if self._open is not None:
            self._known()
            return {**self.__dict__, "_array": None, "_process": 0}
        if isinstance(self._array, np.memmap):
            raise TypeError(
                "a view of a memmap would be copied as a whole to another process; pass a "
                "function that opens it, or the path of the file"
            )
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return self._name


def open_file(path: str, key: str | None) -> Any:
    """The array in a file, by the type of the file."""
    if path.endswith(".npy"):
        if key is not None:
            raise ValueError(f"{path} holds one array, got the key {key!r}")
        return np.load(path, mmap_mode="r")
    if path.endswith(HDF5):
        if key is None:
            raise ValueError(f"{path}: pass key= to select a dataset of the file")
        return _open_hdf5(path, key)
    if not Path(path).is_dir():
        kinds = ", ".join((".npy", ".zarr", *HDF5))
        missing = FileNotFoundError if not Path(path).exists() else ValueError
        raise missing(f"{path}: expected an array in a file {kinds}; pass a function that opens it")
    zarr: Any = needed("zarr", path)
    found = zarr.open(path, path=key or "", mode="r")
    if isinstance(found, zarr.Group):
        place = f"{path}, {key}," if key else path
        raise ValueError(f"{place} is a group: pass the key= of an array in it ({names_in(found)})")
    return found


def _open_hdf5(path: str, key: str) -> Any:
    h5py: Any = needed("h5py", path)
    file = h5py.File(path, "r")
    if key not in file:
        names = names_in(file)
        file.close()
        raise ValueError(f"{path} has no dataset {key!r}: pass the key= of one ({names})")
    return file[key]


def names_in(group: Iterable[str]) -> str:
    """The names in a group of a file, for errors; a few of many."""
    names = sorted(group)
    return ", ".join([*names[:8], *["…"] * (len(names) > 8)]) or "there is none"


def needed(package: str, path: object) -> Any:
    """An optional package, or an ImportError that says how to install it."""
    try:
        return __import__(package)
    except ImportError as error:
        raise ImportError(
            f"{path} needs the package {package}: pip install 'tessel[data]'"
        ) from error


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's dtype for one of numpy."""
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype
    except TypeError as error:
        raise TypeError(f"torch has no dtype for an array of {dtype}") from error


def as_tensor(found: Any) -> torch.Tensor:
    """A tensor of the values that were read, in its own memory."""
    if isinstance(found, torch.Tensor):
        # In inference mode a view may not be marked as one. Memory that torch has not allocated,
        # such as that of an array of numpy, cannot be resized.
        is_own = not found._is_view() and not found.is_inference()
        is_own = is_own and found.untyped_storage().resizable()
        return found.detach() if is_own else found.detach().clone()
    array = np.asarray(found)
    if not (array.flags.owndata and array.flags.c_contiguous and array.dtype.isnative):
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)
