"""`tessel.save` and `load`: what is read is what was written, whole or not at all.

Tests `data/files.py`, `data/formats.py`, `data/zarr_format.py`, `data/checkpoint_format.py`.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr

import tessel
from tessel.core.layout import Cut, Layout
from tessel.data import files, zarr_format
from tessel.state import folders
from tessel.tensor import Tensor
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
PATHS = ["x.zarr", "x"]  # one for each format
both = pytest.mark.parametrize("name", PATHS)
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16),
)
SHAPES = [(7, 10), (1, 3), (0, 5), (9,), (), (2, 3, 4)]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    numbers = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    return (numbers - 1j * numbers).to(dtype) if dtype.is_complex else numbers.to(dtype)


def grid_of(*shape: int) -> tessel.Partition:
    return tessel.world().create_cartesian_topology_partition(shape)


def layouts(shape: tuple[int, ...], seed: int, count: int) -> list[Layout]:
    """Random ones on a grid of all workers: uneven and empty parts, copies, axes in any order."""
    random = np.random.default_rng(seed)
    size = tessel.world().size
    grids = [grid_of(size), *([grid_of(2, 2), grid_of(1, 4)] if size == 4 else [])]
    found = []
    for _ in range(count):
        grid = grids[int(random.integers(len(grids)))]
        free = random.permutation(grid.dim).tolist()
        cuts = []
        for n in shape:
            axis = free.pop() if free and random.random() < 0.7 else None
            if axis is None:
                cuts.append(Cut.whole(n))
                continue
            inner = sorted(random.integers(0, n + 1, grid.shape[axis] - 1).tolist())
            borders = [0, *inner, n]
            cuts.append(Cut((axis,), tuple(pairwise(borders))))
        found.append(Layout(grid, shape, tuple(cuts), tuple(sorted(free))))
    return found


def there_and_back(folder: str, name: str, nprocs: int) -> None:
    for number, shape in enumerate(SHAPES):
        x = values(shape)
        some = layouts(shape, number, 4)
        for source, target in pairwise(some):
            path = os.path.join(folder, f"{number}{name}")
            tessel.save(Tensor(source.local_part(x).clone(), source), path)
            found = tessel.load(path, target)
            assert found.layout == target and torch.equal(found.full(), x)
            plain = tessel.load(path)
            assert type(plain) is torch.Tensor and torch.equal(plain, x)


def on_some(path: str) -> None:
    """A tensor of two of three workers, read by another two."""
    P = tessel.world()
    x = tessel.spread(values((5,)), P.create_partition_inclusive([2, 0]))
    tessel.save({"x": x, "y": values((2,))}, path)
    found = tessel.load(path, {"x": P.create_partition_inclusive([1, 2])})
    assert torch.equal(found["x"].move_to(P).full(), values((5,)))
    assert found["x"].local.shape == ((0,), (3,), (2,))[P.rank or 0]
    assert torch.equal(found["y"], values((2,)))


@both
def test_tensors_of_some_workers(run: Run, tmp_path: Path, name: str) -> None:
    run(on_some, str(tmp_path / name), nprocs=3)


@both
@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_any_layout_to_any_other(run: Run, tmp_path: Path, name: str, nprocs: int) -> None:
    run(there_and_back, str(tmp_path), name, nprocs, nprocs=nprocs)
    assert len(os.listdir(tmp_path)) == len(SHAPES)  # and nothing is left beside


def written(path: str) -> None:
    P = tessel.world()
    rows = Layout.balanced(grid_of(P.size, 1), (7, 10))
    state = {
        "x": Tensor(rows.local_part(values((7, 10))), rows).requires_grad_(),
        "in": {"y": values((2,)), "n": torch.tensor(3)},
        **{str(d)[6:]: Tensor(rows.local_part(values((7, 10), d)), rows) for d in DTYPES},
    }
    tessel.save(state, path)


def expected(found: dict[str, Any], whole: Callable[[Any], torch.Tensor]) -> None:
    assert torch.equal(whole(found["x"]), values((7, 10)))
    assert torch.equal(found["in"]["y"], values((2,))) and int(found["in"]["n"]) == 3
    for dtype in DTYPES:
        each = whole(found[str(dtype)[6:]])
        assert each.dtype is dtype and torch.equal(each, values((7, 10), dtype)), dtype


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full() if isinstance(x, Tensor) else x.detach()


def loaded(path: str) -> None:
    P = tessel.world()
    for where in (grid_of(1, P.size), {"x": Layout.whole(P, (7, 10), shared=True)}):
        found = tessel.load(path, where)
        expected(found, whole)
        assert found["x"].requires_grad and found["x"].is_leaf
        assert not found["in"]["y"].requires_grad
        assert isinstance(found["x"], Tensor)
        assert isinstance(found["float32"], Tensor) == isinstance(where, tessel.Partition)
    found["x"].sum().backward()
    assert torch.equal(found["x"].grad.full(), torch.ones(7, 10))


@both
def test_other_numbers_of_workers(run: Run, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    run(written, path, nprocs=3)
    for nprocs in (1, 2):
        run(loaded, path, nprocs=nprocs)


def test_zarr_reads_it(run: Run, tmp_path: Path) -> None:
    run(written, str(tmp_path / "x.zarr"), nprocs=3)
    group = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert np.array_equal(group["x"][:], values((7, 10))) and group["x"].chunks == (3, 10)
    assert np.array_equal(group["in/y"][:], values((2,)))
    assert np.array_equal(group["complex64"][:], values((7, 10), torch.complex64))
    bits = torch.from_numpy(group["bfloat16"][:]).view(torch.bfloat16)
    assert torch.equal(bits, values((7, 10), torch.bfloat16))


def test_torch_reads_it(run: Run, tmp_path: Path) -> None:
    run(written, str(tmp_path / "x"), nprocs=3)
    state = {"x": torch.empty(7, 10, dtype=torch.float64), "in": {"y": torch.empty(2).double()}}
    dcp.load(state, checkpoint_id=tmp_path / "x")
    assert torch.equal(state["x"], values((7, 10))) and torch.equal(state["in"]["y"], values((2,)))


def test_what_others_wrote_is_read(tmp_path: Path) -> None:
    for number in (2, 3):
        path = tmp_path / f"{number}.zarr"
        array = zarr.create_array(path, shape=(5,), chunks=(2,), dtype=">f8", zarr_format=number)
        array[:] = np.arange(5)
        assert torch.equal(tessel.load(path, tessel.world()).full(), torch.arange(5).double())
    dcp.save({"a": {"b": torch.ones(3)}}, checkpoint_id=tmp_path / "c")
    assert torch.equal(tessel.load(tmp_path / "c")["a"]["b"], torch.ones(3))
    dcp.save({"a": 3}, checkpoint_id=tmp_path / "d")
    with pytest.raises(ValueError, match=r"'a' of .* is not a tensor"):
        tessel.load(tmp_path / "d")


def chunked(path: str) -> int:
    """Each chunk is written by one worker, and only the borders of parts have moved."""
    P = tessel.world()
    x = tessel.arange(10.0, where=P)
    touched: list[int] = []
    original = zarr.Array.__setitem__

    def note(array: Any, region: Any, part: Any) -> None:
        (rows,) = region
        touched.extend(range(rows.start // array.chunks[0], -(-rows.stop // array.chunks[0])))
        original(array, region, part)

    zarr.Array.__setitem__ = note
    try:
        for chunks in (None, (4,), (1,), (100,)):
            touched.clear()
            with count_traffic() as traffic:
                tessel.save(x, path, chunks=chunks)
            told = chain(*P.group.share_objects(touched))
            length = 3 if chunks is None else chunks[0]
            assert sorted(told) == list(range(-(-10 // length)))
            assert torch.equal(tessel.load(path), torch.arange(10.0))
            if chunks is None:  # 3, 3, 2, 2 to 3, 3, 3, 1
                assert traffic.bytes_sent == 4 * (P.rank == 3)
    finally:
        zarr.Array.__setitem__ = original
    return zarr.open_array(path, mode="r").chunks[0]


def test_no_chunk_is_written_twice(run: Run, tmp_path: Path) -> None:
    assert run(chunked, str(tmp_path / "x.zarr"), nprocs=4) == [100] * 4


def test_chunks_are_no_larger_than_the_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(zarr_format, "LIMIT", 100)
    x = torch.randn(9, 11)
    tessel.save(x, tmp_path / "x.zarr")
    assert np.prod(zarr.open_array(tmp_path / "x.zarr", mode="r").chunks) * 4 <= 100
    assert torch.equal(tessel.load(tmp_path / "x.zarr"), x)


def test_signs_of_zeros_and_strides(tmp_path: Path) -> None:
    """Zeros are zarr's fill value; views of other memory, and conjugates, are what they show."""
    tmp_path = tmp_path / "new" / "folder"  # which is made
    for x in (-torch.zeros(3), torch.randn(4, 5).T, torch.randn(3, dtype=torch.complex64).conj()):
        for name in PATHS:
            tessel.save(x, tmp_path / name)
            found = tessel.load(tmp_path / name)
            assert torch.equal(found, x)
            if not x.is_complex():
                assert torch.equal(found.signbit(), x.signbit())


def told(write: Any) -> Any:
    """An error of writing: it is raised at the end, as others wait to move what comes next."""

    def wrong(*args: Any) -> None:
        write(*args)
        raise OSError("no space left")

    return wrong


def some_fail(folder: str, name: str) -> None:
    """One worker cannot write, or the first cannot make or name the folder."""
    P = tessel.world()
    x = tessel.arange(8, where=P)
    path = os.path.join(folder, name)
    tessel.save(x, path)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no space left")

    form = files.ZarrFormat if name.endswith("zarr") else files.CheckpointFormat
    for rank, owner, method in ((1, form, "write"), (0, form, "prepare"), (0, folders, "commit")):
        right = getattr(owner, method)
        if P.rank == rank:
            setattr(owner, method, told(right) if method == "write" else fail)
        try:
            with pytest.raises(OSError, match=f"tessel.save: on worker {rank}, no space left"):
                tessel.save(2 * x, path)
        finally:
            setattr(owner, method, right)
        assert torch.equal(tessel.load(path), torch.arange(8))  # what was there is whole
        assert P.group.share_objects(os.listdir(folder))[0] == [name]
    with pytest.raises(ValueError, match="the data differs between workers"):
        tessel.save(torch.ones(4 + (P.rank or 0)), path)
    # plain tensors are written once: those of other workers would be lost
    shards = tessel.nn.ParallelLinear(4, 2 * P.size, dim=-1).state_dict()
    for state, key in (({"a": x, **shards}, "'weight'"), (torch.tensor(P.rank), "the tensor")):
        with pytest.raises(ValueError, match=f"{key} is a plain tensor whose values differ"):
            tessel.save(state, path)
    assert torch.equal(tessel.load(path), torch.arange(8))
    with pytest.raises(TypeError, match="on worker 1, expected dense tensors, or dicts"):
        tessel.save(3 if P.rank else x, path)
    with pytest.raises(TypeError, match=r"tessel\.save: on worker 1, "):
        tessel.save(x, path if P.rank == 0 else 7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tessel\.load: on worker 1, "):
        tessel.load(path if P.rank == 0 else 7)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="on worker 1, "):
        tessel.load(path if P.rank == 0 else path + "nothing")


@both
def test_an_error_on_one_worker_raises_on_all(run: Run, tmp_path: Path, name: str) -> None:
    run(some_fail, str(tmp_path), name, nprocs=2)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    """zarr's older format can name the codec of pickle, which zarr refuses for numbers."""
    pickles = {"id": "pickle", "protocol": 5}
    for number, codecs in enumerate(({"compressor": pickles}, {"filters": [pickles]})):
        folder = tmp_path / f"{number}.zarr"
        zarr.create_array(folder, shape=(3,), chunks=(3,), dtype="f8", zarr_format=2)
        form = json.loads((folder / ".zarray").read_text())
        (folder / ".zarray").write_text(json.dumps({**form, **codecs}))
        (folder / "0").write_bytes(pickle.dumps(Path("a")))
        with pytest.raises(ValueError, match="pickle"):
            tessel.load(folder)


def test_bad_arguments(tmp_path: Path) -> None:
    x = torch.ones(3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(FileExistsError, match="it is not overwritten"):
            tessel.save(x, path)
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    with pytest.raises(ValueError, match=r"not a \.pt file"):
        tessel.save(x, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="checkpoints have no chunks"):
        tessel.save(x, tmp_path / "x", chunks=(1,))
    for chunks in ((1, 1), (0,)):
        with pytest.raises(ValueError, match="one length of at least 1"):
            tessel.save(x, tmp_path / "x.zarr", chunks=chunks)
    with pytest.raises(ValueError, match="chunks: there is no 'y', but x"):
        tessel.save({"x": x}, tmp_path / "x.zarr", chunks={"y": (1,)})
    with pytest.raises(ValueError, match="use another name"):
        tessel.save({"tensor": x}, tmp_path / "x")
    for key in ("a/b", "", ".a", "__a"):
        with pytest.raises(ValueError, match="cannot be a name in zarr"):
            tessel.save({key: x}, tmp_path / "x.zarr")
    with pytest.raises(TypeError, match="names of tensors must be strings"):
        tessel.save({3: x}, tmp_path / "x.zarr")
    with pytest.raises(TypeError, match=r"torch\.sparse_coo"):
        tessel.save(x.to_sparse(), tmp_path / "x.zarr")
    with pytest.raises(NotImplementedError, match=r"no dtype for torch\.complex32"):
        tessel.save(x.to(torch.complex32), tmp_path / "x.zarr")
    tessel.save({"x": x, "y": x}, tmp_path / "x.zarr")
    with pytest.raises(ValueError, match="where: there is no 'z'"):
        tessel.load(tmp_path / "x.zarr", {"z": tessel.world()})
    with pytest.raises(ValueError, match="is a tensor, got a dict"):
        tessel.load(tmp_path / "x.zarr", {"x": {}})
    with pytest.raises(ValueError, match="is neither a zarr folder"):
        tessel.load(tmp_path / "mine")
    assert sorted(os.listdir(tmp_path)) == ["mine", "x.zarr"]
