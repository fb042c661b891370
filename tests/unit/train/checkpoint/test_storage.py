"""The format on disk: torch's own readers take it, and damage is one line."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import kept, run, whole
from tests.support.training import in_fp32
from tutti.errors import InputError, TuttiError
from tutti.ownership.rectangles import Rectangle
from tutti.train.checkpoint.archive import read_tensor, write_tensor
from tutti.train.checkpoint.manifest import SavedFile, saved_file
from tutti.train.checkpoint.storage import (
    StoredPart,
    Written,
    read_into,
    read_metadata,
    write_metadata,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (1, 2, 3)])
def test_torch_load_reads_what_is_written(dtype, shape, tmp_path):
    tensor = torch.randn(shape).to(dtype)
    stream = io.BytesIO()
    stream.write(b"something before")
    start, length = write_tensor(stream, tensor)
    assert write_tensor(stream, tensor)[0] == start + length
    found = torch.load(io.BytesIO(stream.getvalue()[start : start + length]), weights_only=True)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    again = torch.empty_like(tensor)
    read_tensor(stream, start, length, again, Path("file"))
    assert torch.equal(again, tensor)


def test_numbers_that_changed_on_the_disk_are_noticed():
    stream = io.BytesIO()
    tensor = torch.arange(100.0)
    start, length = write_tensor(stream, tensor)
    place = stream.getvalue().index(tensor.numpy().tobytes())
    stream.getbuffer()[place + 17] ^= 1
    with pytest.raises(InputError, match="do not match their checksum"):
        read_tensor(stream, start, length, torch.empty(100), Path("file"))
    with pytest.raises(InputError, match="holds 400 bytes at 0 where 396"):
        read_tensor(stream, start, length, torch.empty(99), Path("file"))
    with pytest.raises(InputError, match="damaged at byte"):
        read_tensor(stream, start, length - 30, torch.empty(100), Path("file"))


def test_the_stock_reader_of_torch_distributed_takes_the_folder(tmp_path):
    plan = in_fp32(Draft(tied=True).line((FOUR, [{"count": 3}])).plan(PLAIN, level(1)), "adamw")

    def work(one):
        one.begin()
        one.train(1)
        one.save()
        return kept(one.engine)

    expected = whole(plan.model.spec, run(plan, tmp_path, work))
    state = {key: torch.empty_like(value) for key, value in expected.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=tmp_path / "step-000001")
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def listed(folder: Path, *others: str) -> dict[str, SavedFile]:
    """Return what a manifest would say of a folder's metadata, and of ranks' files."""
    found = {name: SavedFile(num_bytes=0) for name in others}
    return {".metadata": saved_file(folder / ".metadata"), **found}


def chunk(start: int, stop: int) -> Written:
    return Written(
        key="weight/0.a",
        dtype=torch.float32,
        shape=(4,),
        rectangle=Rectangle((start,), (stop - start,)),
        start=0,
        length=10,
    )


def test_numbers_that_nobody_wrote_or_two_wrote_are_no_checkpoint(tmp_path):
    def parts(*chunks: Written) -> list[StoredPart]:
        return [StoredPart(file="a", num_bytes=10, chunks=chunks)]

    with pytest.raises(TuttiError, match="has 4 numbers, of which 3 were written"):
        write_metadata(tmp_path, parts(chunk(0, 2), chunk(3, 4)), {"weight/0.a": 4})
    with pytest.raises(TuttiError, match="has 4 numbers, of which 5 were written"):
        write_metadata(tmp_path, parts(chunk(0, 2), chunk(1, 4)), {"weight/0.a": 4})
    with pytest.raises(TuttiError, match=r"'weight/0\.b' has 2 numbers, of which 0"):
        write_metadata(tmp_path, parts(chunk(0, 4)), {"weight/0.a": 4, "weight/0.b": 2})
    assert list(tmp_path.iterdir()) == []
    write_metadata(tmp_path, parts(chunk(0, 4)), {"weight/0.a": 4})
    stored = read_metadata(tmp_path, listed(tmp_path, "a"))
    with pytest.raises(InputError, match=r"5 numbers are needed at \[0\], the folder has 4"):
        read_into(tmp_path, stored, {"weight/0.a": [(Rectangle((0,), (5,)), torch.empty(5))]})


def test_metadata_that_is_missing_or_damaged_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"\.metadata: has no checksum in tutti.json"):
        read_metadata(tmp_path, {})
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    files = listed(tmp_path)
    with pytest.raises(InputError, match=r"\.metadata: is damaged"):
        read_metadata(tmp_path, files)
    (tmp_path / ".metadata").write_bytes(b"nonsence")
    with pytest.raises(InputError, match=r"\.metadata: does not match its checksum"):
        read_metadata(tmp_path, files)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(InputError, match=r"\.metadata: is missing"):
        read_metadata(tmp_path, files)


class Tampered:
    def __reduce__(self):
        return Path.touch, (Path("here"),)


def test_metadata_that_was_tampered_with_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Tampered()))
    with pytest.raises(InputError, match=r"\.metadata: is damaged"):
        read_metadata(tmp_path, listed(tmp_path))
    assert not (tmp_path / "here").exists()


def test_checkpoints_are_imported_without_torchs_own(tmp_path):
    code = (
        "import sys, tutti.train.checkpoint; print('torch.distributed.checkpoint' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
