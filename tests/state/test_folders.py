"""Folders are written whole or not at all, and what is read is what was written, or is named.

Tests `state/folders.py`, `state/raising.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tessel
from tessel import Layout
from tessel.interop import checkpoint_reader
from tessel.state import Part, read_parts, stored_in, whole_folder, write_parts

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def values(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape).double()


def in_folders(folder: str, shared: bool) -> tuple[list[str], list[str], str]:
    """Write rows and a whole tensor, into one folder or one for each worker; read what is here."""
    P = tessel.world()
    own = Path(folder) / ("all" if shared else f"{P.rank}") / "x"
    rows, whole = Layout.balanced(P, (7,)), Layout.whole(P, (3,), shared=True)
    parts = {
        ("a", "rows"): Part.of(rows.local_part(values(7)), rows),
        ("whole",): Part.of(values(3), whole),
        ("mine", f"{P.rank}"): Part(values(2), (2,), (0,)),
    }
    with whole_folder("test", own, P, is_shared=False) as (unfinished, seen):
        write_parts(unfinished, parts, P, seen)
    entries, keys = stored_in(own)
    assert keys["a.rows"] == ("a", "rows") and entries["whole"].size == (3,)
    room, copy = torch.empty(rows.local_shape).double(), torch.empty(3).double()
    read_parts(own, {"a.rows": Part.of(room, rows), "whole": Part.of(copy, whole)})
    assert torch.equal(room, rows.local_part(values(7))) and torch.equal(copy, values(3))
    problem, all_of_it = "", torch.empty(7).double()
    try:
        read_parts(own, {"a.rows": Part(all_of_it, (7,), (0,))})
        assert torch.equal(all_of_it, values(7))
    except ValueError as error:
        problem = str(error)
    P.group.share_objects(None)
    return sorted(os.listdir(own)), sorted(keys), problem


def test_workers_that_share_a_folder_write_one_checkpoint(run: Run, tmp_path: Path) -> None:
    for files, names, problem in run(in_folders, str(tmp_path), True, nprocs=3):
        assert files == [".metadata", *(f"__{k}_0.distcp" for k in range(3))]
        assert names == ["a.rows", "mine.0", "mine.1", "mine.2", "whole"] and problem == ""
    assert os.listdir(tmp_path / "all") == ["x"]


def test_workers_that_share_none_have_their_own_parts(run: Run, tmp_path: Path) -> None:
    for rank, (files, names, problem) in enumerate(run(in_folders, str(tmp_path), False, nprocs=3)):
        assert files == [".metadata", f"__{rank}_0.distcp"]
        assert names == ["a.rows", f"mine.{rank}", "whole"]
        assert problem == f"{tmp_path}/{rank}/x lacks pieces of 'a.rows', which other workers wrote"


def not_shared(folder: str) -> str:
    P = tessel.world()
    try:
        with whole_folder("test", Path(folder) / f"{P.rank}" / "x", P):
            raise AssertionError("the block is not entered")
    except FileNotFoundError as error:
        return str(error)


def test_a_folder_that_must_be_shared(run: Run, tmp_path: Path) -> None:
    first, second = run(not_shared, str(tmp_path), nprocs=2)
    assert first == second and "this worker sees only the files of workers [0] of 2" in first
    assert "all workers must share the file system" in first
    assert not list(tmp_path.rglob("*x*"))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("at", [20, -20])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, at: int) -> None:
    tessel.save({"x": values(100)}, tmp_path / "c")
    path = tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        tessel.load(tmp_path / "c")
    state = {"x": values(100)}
    with pytest.raises(BaseException, match=f"{name} is damaged"):
        dcp.load(state, storage_reader=checkpoint_reader(tmp_path / "c"))


def test_torch_may_write_over_it(tmp_path: Path) -> None:
    """Checksums go with the metadata: those of before are gone."""
    tessel.save({"x": values(100)}, tmp_path / "c")
    dcp.save({"x": 2 * values(100)}, checkpoint_id=tmp_path / "c")
    assert torch.equal(tessel.load(tmp_path / "c")["x"], 2 * values(100))
