"""Tensor files: what was written, or an error that names the file; weights in them.

Tests `state/tensor_file.py`, `state/weights.py`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tessel
from tessel.state import TensorFile, TensorFileWriter, tensor_file

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "empty": torch.ones(0, 3, dtype=torch.bfloat16),
    "number": torch.tensor(3, dtype=torch.int64),
    "c": torch.arange(6).reshape(2, 3).to(torch.complex128),
    "flags": torch.tensor([True, False]),
}


def write(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
    kinds = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    with TensorFileWriter(path, kinds) as writer:
        for name, each in tensors.items():
            writer.put(name, each)


def check(path: Path) -> None:
    file = TensorFile(path)
    for name, want in TENSORS.items():
        found = file.read(name)
        assert found.dtype == want.dtype and torch.equal(found, want)


def test_tensors_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_BLOCK", 16)  # so that there are several
    path = tmp_path / "file.safetensors"
    write(path)
    check(path)
    file = TensorFile(path)
    assert "tessel.checksum" in file.notes
    assert [each.name for each in tmp_path.iterdir()] == ["file.safetensors"]
    for box in ([(1, 3), (2, 5)], [(0, 4), (0, 6)], [(3, 4), (5, 6)], [(2, 2), (0, 6)]):
        part = TENSORS["a"][tuple(slice(*each) for each in box)]
        assert torch.equal(file.read("a", box), part)
    with pytest.raises(ValueError, match=r"file\.safetensors .* it has no 'b', but a, c"):
        file.read("b")


def test_only_the_blocks_of_a_box_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit of another worker's rows is that worker's to find."""
    monkeypatch.setattr(tensor_file, "_BLOCK", 24)  # bytes of a row
    path = tmp_path / "file.safetensors"
    write(path)
    file, data = TensorFile(path), bytearray(path.read_bytes())
    data[file._begin + 30] ^= 1  # in the second row
    path.write_bytes(data)
    assert torch.equal(file.read("a", [(2, 4), (0, 6)]), TENSORS["a"][2:])
    with pytest.raises(ValueError, match="the bytes of 'a' are not those that were written"):
        file.read("a", [(1, 2), (0, 6)])


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bits_are_found(tmp_path: Path, data: st.DataObject) -> None:
    """An error with the file's name, or the right values; nothing else."""
    path = tmp_path / "file.safetensors"
    write(path)
    right = path.read_bytes()
    damaged, at = bytearray(right), data.draw(st.integers(0, 8 * len(right) - 1))
    damaged[at // 8] ^= 1 << at % 8
    path.write_bytes(damaged)
    try:
        check(path)
    except ValueError as error:
        assert str(path) in str(error)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.binary(max_size=60)
    | st.text(max_size=60).map(lambda t: len(t.encode()).to_bytes(8, "little") + t.encode())
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "__metadata__", "dtype", "shape", "data_offsets"]), inner
        ),
        max_leaves=8,
    ).map(lambda j: len(json.dumps(j)).to_bytes(8, "little") + json.dumps(j).encode())
)
def test_any_bytes_are_a_file_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    try:
        file = TensorFile(path)
        for name in file.entries:
            file.read(name)
    except ValueError as error:
        assert str(path) in str(error)


def test_every_length_but_the_right_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write(path)
    data = path.read_bytes()
    for length in (*range(0, len(data), 7), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="is damaged, or is not a tensor file"):
            TensorFile(path)
    path.write_bytes(data + b"x")
    with pytest.raises(ValueError, match="bytes of tensors, but its header lists"):
        TensorFile(path)


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    """Without checksums; the bytes are written out here as the format is described."""
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"pt"}}'
    numbers = torch.tensor([1.5, -2.0])
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + numbers.numpy().tobytes())
    file = TensorFile(path)
    assert file.notes == {"by": "pt"} and torch.equal(file.read("w"), numbers)


def test_other_programs_read_files(tmp_path: Path) -> None:
    load = pytest.importorskip("safetensors.torch").load_file
    tensors = {name: each for name, each in TENSORS.items() if each.dtype != torch.complex128}
    write(tmp_path / "f", tensors)
    found = load(tmp_path / "f")
    assert all(torch.equal(found[name], each) for name, each in tensors.items())


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save_file
    tensors = {name: each for name, each in TENSORS.items() if each.dtype != torch.complex128}
    save(tensors, tmp_path / "f", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "f")
    assert set(file.entries) == set(tensors) and file.notes == {"format": "pt"}
    for name, each in tensors.items():
        found = file.read(name)
        assert found.dtype == each.dtype and torch.equal(found, each)


def test_weights_of_other_programs_go_to_workers(run: Any, tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save_file
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    save(plain.state_dict(), tmp_path / "model.safetensors")
    for state in run(loaded, str(tmp_path / "model.safetensors"), -1, nprocs=2):
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name


def test_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "FORMAT", "2")
        write(tmp_path / "f")
    with pytest.raises(ValueError, match="it has the format 2, and this version of Tessel reads 1"):
        TensorFile(tmp_path / "f")


def test_a_file_has_its_name_once_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the bytes reach the disk, then the name, then the folder that has the name."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{file}") else "file")
        fsync(file)

    def replaced(*names: Any) -> None:
        seen.append("name")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write(tmp_path / "f")
    assert seen == ["file", "name", "folder"]
    with pytest.raises(ZeroDivisionError), TensorFileWriter(tmp_path / "g", {}):
        raise ZeroDivisionError
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


# --- weights of models


def model(dim: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        tessel.nn.ParallelLinear(6, 5, dim=dim), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    )


def saved(path: str, dim: int) -> None:
    tessel.nn.save_weights(model(dim), path)


def loaded(path: str, dim: int) -> dict[str, torch.Tensor]:
    made = model(dim)
    with torch.no_grad():
        for each in made.parameters():
            each.zero_()
    tessel.nn.load_weights(made, path)
    return {n: v.clone() for n, v in tessel.nn.collect_state_dict(made).items()}


@pytest.mark.parametrize(("dim", "other"), [(-1, -1), (-1, 0), (0, -1)])
def test_weights_go_to_other_workers(run: Any, tmp_path: Path, dim: int, other: int) -> None:
    path = str(tmp_path / "model.safetensors")
    run(saved, path, dim, nprocs=2)
    file = TensorFile(path)
    assert set(file.entries) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert file.entries["0.weight"].shape == (5, 6)
    for nprocs in (1, 2, 3):
        for state in run(loaded, path, other, nprocs=nprocs):
            for name, value in state.items():
                assert torch.equal(value, file.read(name)), name
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    tessel.nn.load_weights(plain, path)
    assert torch.equal(plain[0].weight, file.read("0.weight"))


def load_text(path: str) -> str:
    made = model(-1)
    before = [each.clone() for each in made.parameters()]
    try:
        tessel.nn.load_weights(made, path)
    except ValueError as error:
        assert all(map(torch.equal, before, made.parameters()))
        return str(error)
    return ""


def test_weights_that_are_damaged_or_of_another_model(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    first, second = run(load_text, str(path), nprocs=2)
    assert first == second and str(path) in first and "No such file" in first
    saved(str(path), -1)
    path.write_bytes(path.read_bytes()[:-3])
    first, second = run(load_text, str(path), nprocs=2)
    assert first == second and f"on worker 0, {path} is damaged" in first
    tessel.nn.save_weights(torch.nn.Linear(2, 2), path)
    first, second = run(load_text, str(path), nprocs=2)
    assert first == second and "belongs to another model: only the model has 0.bias" in first


def unwritable(path: str) -> str:
    try:
        saved(path, -1)
    except ValueError as error:
        return str(error)
    return ""


def test_weights_that_cannot_be_written_raise_on_all(run: Any) -> None:
    first, second = run(unwritable, "/dev/null/model", nprocs=2)
    assert first == second and "/dev/null/model cannot be written: on worker 0, File" in first


def unnameable(path: str) -> str:
    """The first worker can write the file, and not give it its name."""

    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(13, "not allowed", str(target))

    replace, os.replace = os.replace, refuse
    try:
        return unwritable(path)
    finally:
        os.replace = replace


def test_weights_that_cannot_get_their_name_raise_on_all(run: Any, tmp_path: Path) -> None:
    first, second = run(unnameable, str(tmp_path / "model"), nprocs=2)
    assert first == second and "cannot be written: on worker 0, PermissionError" in first
    assert not list(tmp_path.iterdir())  # what was written is removed
