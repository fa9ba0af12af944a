"""Sources give what numpy's slices give, open files in each process, and say what is wrong.

Tests `data/sources.py`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from tessel.data import FromArray, FromArrays, FromFunction, Source

SHAPE = (5, 4, 7, 3)  # samples, and what one has


def values(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def npy(folder: Path) -> Any:
    np.save(folder / "a.npy", values())
    return folder / "a.npy"


def mapped(folder: Path) -> Any:
    return np.load(npy(folder), mmap_mode="r")


def raw(folder: Path) -> Any:
    """Column by column, after a header."""
    (folder / "raw").write_bytes(b"12345678" + values().tobytes("F"))
    return np.memmap(folder / "raw", np.float32, "r", 8, SHAPE, "F")


def zarr_array(folder: Path) -> Any:
    array = zarr.create_array(folder / "a.zarr", shape=SHAPE, chunks=(2, 3, 2, 2), dtype="f4")
    array[:] = values()
    return array


def zarr_folder(folder: Path) -> Any:
    zarr_array(folder)
    return folder / "a.zarr"


def old_zarr(folder: Path) -> Any:
    path = str(folder / "old.zarr")
    zarr.create_array(path, shape=SHAPE, chunks=SHAPE, dtype="f4", zarr_format=2)[:] = values()
    return path


def hdf5(folder: Path) -> Any:
    with h5py.File(folder / "a.h5", "w") as file:
        file["in/it"] = values()
    return h5py.File(folder / "a.h5", "r")["in/it"]


MAKERS: dict[str, Callable[[Path], Any]] = {
    **{each.__name__: each for each in (npy, mapped, raw, zarr_array, zarr_folder, old_zarr, hdf5)},
    "memory": lambda folder: values(),
    "big_endian": lambda folder: values().astype(">f4"),
    "backwards": lambda folder: values()[::-1, ::-1][::-1, ::-1],
    "tensor": lambda folder: torch.from_numpy(values()),
    "opener": lambda folder: lambda: values(),
}


@pytest.fixture(params=MAKERS)
def array(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MAKERS[request.param](tmp_path)


def random_boxes(shape: tuple[int, ...], count: int) -> list[tuple[tuple[int, int], ...]]:
    random = np.random.default_rng(0)
    return [
        tuple(tuple(sorted(random.integers(0, n + 1, 2).tolist())) for n in shape)
        for _ in range(count)
    ]


def check(source: Source, whole: Any) -> None:
    for number, box in enumerate(random_boxes(whole.shape[1:], 12)):
        index = number % len(whole)
        found = source.read(index, box)
        expected = whole[index][tuple(slice(*each) for each in box)]
        assert torch.equal(found, torch.from_numpy(expected.copy()))
        found.fill_(-1)  # memory of its own: what is read again is as before
        assert np.array_equal(source.read(index, box), expected)


def test_boxes_are_those_of_numpy(array: Any) -> None:
    source = FromArray(array)
    assert len(source) == 5 and source.shape_of(0) == SHAPE[1:] and source.dtype is torch.float32
    check(source, values())


def test_another_process_opens_files_again(array: Any) -> None:
    """A fork of a process that has read, and one that gets the source in a pickle."""
    source = FromArray(array)
    check(source, values())
    if not callable(array):
        check(pickle.loads(pickle.dumps(source)), values())
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            try:
                check(source, values())
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    check(source, values())


def test_a_dataset_stays_open_for_its_owner(tmp_path: Path) -> None:
    dataset = hdf5(tmp_path)
    check(FromArray(dataset), values())
    assert dataset[0, 0, 0, 0] == 0


def test_keys_and_samples_of_several_files(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = values((3 + number, 2))
        zarr.open_group(tmp_path / f"{number}.zarr", mode="w").create_array(
            "in/x", data=values((3 + number, 2))
        )
    for ending, key in (("h5", "x"), ("zarr", "in/x")):
        paths = [tmp_path / f"{number}.{ending}" for number in range(2)]
        source = FromArrays(paths, key)
        assert [source.shape_of(k) for k in range(2)] == [(3, 2), (4, 2)]
        assert torch.equal(source.read(1, ((2, 4), (0, 1))), torch.tensor([[4.0], [6.0]]))


def test_one_number_a_sample() -> None:
    assert FromArray(np.arange(4)).read(3, ()) == torch.tensor(3)


def test_dtypes_are_converted() -> None:
    assert FromArray(values(), dtype=torch.float64).read(0, ((0, 1),) * 3).dtype is torch.float64
    with pytest.raises(ValueError, match="complex"):
        FromArray(values().astype(complex), dtype=torch.float32).read(0, ((0, 1),) * 3)
    with pytest.raises(ValueError, match=r"float64, but the first one has torch\.float32"):
        FromArrays([values((2,)), values((2,), np.float64)]).read(1, ((0, 2),))
    with pytest.raises(TypeError, match="no dtype"):
        _ = FromArray(np.array(["text"])).dtype


def test_what_is_read_is_not_the_memory_of_a_source() -> None:
    """Also where a view is not known as one."""
    array, box = values(), ((0, 4), (0, 7), (0, 3))
    with torch.inference_mode():
        tensor = torch.from_numpy(values()) + 0
        FromArray(tensor).read(1, box).mul_(2)
        FromArrays([tensor[1]]).read(0, box).mul_(2)
        assert np.array_equal(tensor.numpy(), array)

    def read(index: int, box: Any) -> torch.Tensor:
        return torch.from_numpy(array[index])

    FromFunction(read, SHAPE[1:], torch.float32, length=5).read(1, box).mul_(2)
    assert np.array_equal(array, values())


def test_what_is_outside_raises() -> None:
    source = FromArray(values())
    for index in (-1, 5):
        with pytest.raises(IndexError, match=f"samples 0 to 4, got {index}"):
            source.read(index, ((0, 1),) * 3)
    for box in (((0, 5), (0, 1), (0, 1)), ((-1, 1), (0, 1), (0, 1)), ((2, 1),) * 3, ((0, 1),)):
        with pytest.raises(IndexError, match="is out of bounds for sample 0"):
            source.read(0, box)


def test_an_empty_box_reads_nothing() -> None:
    def read(index: int, box: Any) -> Any:
        raise AssertionError("it was read")

    found = FromFunction(read, (4, 3), torch.int16).read(0, ((2, 2), (0, 3)))
    assert found.shape == (0, 3) and found.dtype is torch.int16


def test_functions() -> None:
    def read(index: int, box: Any) -> Any:
        return values((4, 6))[tuple(slice(*each) for each in box)] + index

    whole = np.stack([values((4, 6)) + index for index in range(3)])
    check(FromFunction(read, (4, 6), torch.float32, 3), whole)
    ragged = FromFunction(lambda index, box: np.ones(box[0][1]), lambda k: (k,), torch.float64, 3)
    assert [ragged.shape_of(k) for k in range(3)] == [(0,), (1,), (2,)]
    wrong = FromFunction(lambda index, box: np.ones(2), (4,), torch.float64)
    with pytest.raises(ValueError, match=r"expected values of shape \(3,\), got \(2,\)"):
        wrong.read(0, ((0, 3),))


def test_what_is_no_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="an array with shape"):
        len(FromArray(lambda: 3))
    with pytest.raises(TypeError, match="key= selects an array in a file"):
        FromArray(values(), key="x")
    with pytest.raises(ValueError, match=r"FromArrays\(\[array\]\)"):
        len(FromArray(np.ones(())))
    with pytest.raises(FileNotFoundError):
        len(FromArray(tmp_path / "nothing.zarr"))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="pass a function that opens it"):
        len(FromArray(tmp_path / "a.txt"))
    hdf5(tmp_path)
    with pytest.raises(ValueError, match="pass key="):
        len(FromArray(tmp_path / "a.h5"))
    with pytest.raises(ValueError, match=r"a\.h5 has no dataset 'it': .* key= of one \(in\)"):
        len(FromArray(tmp_path / "a.h5", key="it"))
    zarr.open_group(tmp_path / "b.zarr", mode="w").create_array("in/x", data=values((3, 2)))
    with pytest.raises(ValueError, match=r"b\.zarr is a group: pass the key= .* \(in\)"):
        len(FromArray(tmp_path / "b.zarr"))
    with pytest.raises(ValueError, match=r"b\.zarr, in, is a group: .* \(x\)"):
        len(FromArray(tmp_path / "b.zarr", key="in"))
    with pytest.raises(FileNotFoundError):
        len(FromArray(tmp_path / "b.zarr", key="it"))
    with pytest.raises(ValueError, match="holds one array"):
        len(FromArray(npy(tmp_path), key="x"))
    with pytest.raises(TypeError, match="a view of a memmap"):
        pickle.dumps(FromArray(mapped(tmp_path)[1:]))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'tessel\[data\]'"):
        len(FromArray(tmp_path / "a.h5", key="in/it"))
