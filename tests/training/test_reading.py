"""A checkpoint is data: what stands in it is not run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ring_la import ArgumentError, reading


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def saved(folder: Path, **more: object) -> Path:
    state = {
        "x": torch.arange(3.0, dtype=torch.bfloat16),
        "progress": {"step": 3, "seeds": [1, 2], "rate": 0.5},
        **more,
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def empty() -> dict:
    return {"x": torch.zeros(3, dtype=torch.bfloat16), "progress": {"step": 0, "seeds": [0, 0], "rate": 0.0}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_and_plain_values_are_read(tmp_path, empty):
    folder = saved(tmp_path / "c")
    assert "progress.step" in reading.contents(folder).state_dict_metadata
    reading.load(empty, folder, no_dist=True)
    assert empty["x"].tolist() == [0.0, 1.0, 2.0]
    assert empty["progress"] == {"step": 3, "seeds": [1, 2], "rate": 0.5}


def test_a_path_that_python_3_13_wrote_is_read():
    assert reading._Contents(io.BytesIO(b"cpathlib._local\nPosixPath\n(Vrun\ntR.")).load() == Path("run")
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib\.os is no part"):
        reading._Contents(io.BytesIO(b"cpathlib._local\nos\n.")).load()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_that_runs_code_is_refused(tmp_path, empty):
    folder = saved(tmp_path / "c", evil=Evil(tmp_path / "ran"))
    with pytest.raises(ArgumentError, match="folder: expected a checkpoint of tensors and plain values"):
        reading.load(empty | {"evil": 0}, folder, no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("file", ["*.distcp", reading.METADATA])
@pytest.mark.parametrize("left", [0.5, None])
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(tmp_path, empty, file, left):
    folder = saved(tmp_path / "c")
    (found,) = folder.glob(file)
    whole = found.read_bytes()
    found.unlink() if left is None else found.write_bytes(whole[: int(len(whole) * left)])
    with pytest.raises(ArgumentError, match=f"folder: expected a .*checkpoint.*{folder}"):
        reading.load(empty, folder, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_byte_that_was_changed_in_a_tensor_is_noticed(tmp_path):
    folder = saved(tmp_path / "c", weights=torch.ones(1000))
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    ones = torch.ones(1000).numpy().tobytes()
    assert whole.count(ones) == 1
    at = whole.index(ones) + 2000
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ArgumentError, match=r"folder: expected a whole checkpoint.*BadZipFile: .* other bytes"):
        reading.load({"weights": torch.zeros(1000)}, folder, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("content", ["an object", "a function of a module it knows"])
def test_a_table_of_contents_that_runs_code_is_refused(tmp_path, empty, content):
    folder = saved(tmp_path / "c")
    if content == "an object":
        written = pickle.dumps(Evil(tmp_path / "ran"))
    else:  # what that module imports: os.system would do
        written = b"ctorch.distributed.checkpoint.metadata\nos\n."
    (folder / reading.METADATA).write_bytes(written)
    for read in (lambda: reading.contents(folder), lambda: reading.load(empty, folder, no_dist=True)):
        with pytest.raises(ArgumentError, match="folder: expected a checkpoint"):
            read()
    assert not (tmp_path / "ran").exists()
