"""Checkpoints of torch.distributed.checkpoint are read, and run nothing; others are refused.

Tests `state/checkpoint_reader.py`.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

import tessel
from tessel.interop import ModelState, checkpoint_reader
from tessel.state import checkpoint

Run = Callable[..., list[Any]]
alone_is_meant = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
pytestmark = alone_is_meant


class Attack:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def state_of(fill: float) -> dict[str, Any]:
    model = tessel.nn.ParallelLinear(6, 4, dim=-1)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(fill)
    return {"model": ModelState(model), "step": int(fill), "names": ["a", (1.5, None)]}


def saved(folder: str) -> None:
    dcp.save(state_of(3), checkpoint_id=folder)


def loaded(folder: str, safely: bool = True) -> tuple[str, float]:
    """What a load raises, and the weights after it."""
    state, said = state_of(0), ""
    try:
        if safely:
            dcp.load(state, storage_reader=checkpoint_reader(folder))
            assert state["step"] == 3 and state["names"] == ["a", (1.5, None)]
        else:
            dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        said = str(error)
    return said, float(state["model"].module.weight.detach().mean())


def test_a_checkpoint_is_read(run: Run, tmp_path: Path) -> None:
    run(saved, str(tmp_path), nprocs=2)
    for nprocs in (1, 2, 3):
        assert run(loaded, str(tmp_path), nprocs=nprocs) == [("", 3.0)] * nprocs


def test_foreign_metadata_run_nothing(run: Run, tmp_path: Path) -> None:
    folder, made = tmp_path / "checkpoint", tmp_path / "made"
    run(saved, str(folder), nprocs=2)
    right = pickle.loads((folder / ".metadata").read_bytes())
    right.planner_data = {**right.planner_data, "more": Attack(made)}
    (folder / ".metadata").write_bytes(pickle.dumps(right))
    for said, weight in run(loaded, str(folder), nprocs=2):
        assert "names posix.mkdir, which no checkpoint needs: it was not read" in said
        assert str(folder / ".metadata") in said and weight == 0
    assert not made.exists()
    run(loaded, str(folder), False, nprocs=1)
    assert made.exists()  # so does torch itself


def test_foreign_values_run_nothing(run: Run, tmp_path: Path) -> None:
    """Values that are no tensors are pickles of their own, in the other files."""
    folder, made = tmp_path / "checkpoint", tmp_path / "made"
    dcp.save({**state_of(3), "step": Attack(made)}, checkpoint_id=folder, no_dist=True)
    for said, _ in run(loaded, str(folder), nprocs=2):
        assert "the value 'step' of the checkpoint in" in said and "it was not read" in said
    assert not made.exists()


def poison(data: bytes) -> bytes:
    """Metadata after a class was given the attribute `version`, by the opcodes of a state."""
    begin = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return begin + b"N}X\x07\0\0\0versionX\x03\0\0\0badsX\x05\0\0\0extraK\x01s\x86b0" + data[2:]


def test_classes_stay_as_they_are(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    right, before = path.read_bytes(), dict(vars(Metadata))
    path.write_bytes(poison(right))
    try:
        pickle.loads(path.read_bytes())
        assert Metadata.version == "bad" and Metadata.extra == 1  # as it would be
    finally:
        Metadata.version = None
        del Metadata.extra
    assert isinstance(checkpoint_reader(tmp_path).read_metadata(), Metadata)
    assert dict(vars(Metadata)) == before


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        checkpoint_reader(path.parent).read_metadata()
    return str(caught.value)


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    found = pickle.loads(path.read_bytes())
    for info in found.storage_data.values():
        info.relative_path = "../elsewhere"
    path.write_bytes(pickle.dumps(found))
    assert "is damaged, or holds no metadata" in refused(path)
    for other in (StorageMeta(), {"x": 1}, Metadata({})):
        path.write_bytes(pickle.dumps(other))
        assert f"{path} is damaged, or holds no metadata" in refused(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_refused_or_of_no_consequence(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / ".metadata"
    if not path.exists():
        dcp.save({"x": torch.ones(2), "n": 3}, checkpoint_id=tmp_path, no_dist=True)
        (tmp_path / "kept").write_bytes(path.read_bytes())
    damaged = bytearray((tmp_path / "kept").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    try:
        assert isinstance(checkpoint_reader(tmp_path).read_metadata(), Metadata)
    except ValueError as error:
        assert str(path) in str(error)


def test_a_load_by_torch_itself_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_has_warned", False)
    dcp.save(state_of(3), checkpoint_id=tmp_path, no_dist=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for safely in (True, False, True, False):
            loaded(str(tmp_path), safely)
    said = [
        str(each.message) for each in caught if "checkpoint_reader(folder)" in str(each.message)
    ]
    assert len(said) == 1 and "can run code" in said[0]
