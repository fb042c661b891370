"""Conversions without torch: resumed ones, large ones, those for a plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import LLAMA, snapshot, stored_tensors, write_folder, write_tensors
from tutti.errors import InputError
from tutti.huggingface.conversion import convert
from tutti.huggingface.maps import key_table
from tutti.huggingface.tensor_file import header_bytes
from tutti.models import read_config

BOUND = 80 << 20  # bytes of resident memory beyond what the imports take


def test_there_and_back_without_torch(tmp_path: Path) -> None:
    """In a process of its own: nothing on the way imports torch."""
    source = write_folder(tmp_path / "hf")
    script = (
        "import sys; from pathlib import Path; from tutti.huggingface.conversion import convert\n"
        "convert(Path('hf'), Path('ours')); convert(Path('ours'), Path('back'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
    assert snapshot(tmp_path / "back") == snapshot(source)
    ours = snapshot(tmp_path / "ours")
    assert {"config.json", "tokenizer.json", "templates/chat.jinja", "tutti.json"} < set(ours)


def test_the_manifest_says_what_is_where(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    done = convert(source, tmp_path / "ours")
    manifest = json.loads((tmp_path / "ours" / "tutti.json").read_text())
    assert manifest["model_hash"] == read_config(LLAMA, "x").fingerprint
    assert manifest["tensors"]["1.attention.key.weight"] == {
        "dtype": "float32",
        "shape": [16, 32],
        "file": "unit-1.safetensors",
    }
    for name, file in manifest["files"].items():
        assert done.files[name].sha256 == file["sha256"]
        sums = subprocess.run(
            ["sha256sum", tmp_path / "ours" / name], capture_output=True, text=True, check=True
        )
        assert sums.stdout.split()[0] == file["sha256"]


# --- killed and started again ----------------------------------------------------------------


SLOW = """
import sys, time
from pathlib import Path
from tutti.huggingface import outputs
from tutti.huggingface.conversion import convert
outputs.BLOCK_BYTES = 2048
convert(Path('hf'), Path('ours'), progress=lambda *_: time.sleep(0.002))
"""


@pytest.mark.parametrize("files_before", [0, 1, 3])
def test_killed_at_any_moment_and_resumed(files_before: int, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    before = snapshot(source)
    process = subprocess.Popen([sys.executable, "-c", SLOW], cwd=tmp_path)
    log = tmp_path / "ours.partial" / ".done.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        finished = log.read_text().count("\n") if log.exists() else 0
        if finished >= files_before and (tmp_path / "ours.partial" / ".writing").exists():
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "ours").exists()
    with pytest.raises(InputError, match="--resume"):
        convert(source, tmp_path / "ours")
    done = convert(source, tmp_path / "ours", resume=True)
    assert done.kept >= files_before
    convert(source, tmp_path / "at-once")
    assert snapshot(tmp_path / "ours") == snapshot(tmp_path / "at-once")
    assert snapshot(source) == before


def stop_after(files: int, source: Path, target: Path) -> None:
    """Leave a conversion behind that stopped after so many files."""

    class StopError(Exception):
        pass

    def progress(*_: object) -> None:
        log = target.parent / f"{target.name}.partial" / ".done.jsonl"
        if log.exists() and log.read_text().count("\n") >= files:
            raise StopError

    with pytest.raises(StopError):
        convert(source, target, progress=progress)


def test_a_finished_file_that_changed_is_written_again(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    stop_after(2, source, tmp_path / "ours")
    first = tmp_path / "ours.partial" / "unit-0.safetensors"
    first.write_bytes(first.read_bytes()[:-1] + b"\xff")
    with (tmp_path / "ours.partial" / ".done.jsonl").open("a") as log:
        log.write('{"file": "unit-2.saf')  # a line that was never finished
    done = convert(source, tmp_path / "ours", resume=True)
    assert done.kept == 1
    convert(source, tmp_path / "at-once")
    assert snapshot(tmp_path / "ours") == snapshot(tmp_path / "at-once")


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")
    stop_after(1, source, tmp_path / "ours")
    write_tensors(source / "model.safetensors", {k: v + 1 for k, v in stored_tensors().items()})
    with pytest.raises(InputError, match="begun from another source or with other options"):
        convert(source, tmp_path / "ours", resume=True)


def test_two_conversions_into_one_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf")

    def progress(*_: object) -> None:
        with pytest.raises(InputError, match="another conversion is writing there now"):
            convert(source, tmp_path / "ours", resume=True)

    convert(source, tmp_path / "ours", progress=progress)


# --- memory ----------------------------------------------------------------------------------

LARGE = {
    **LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
}
PEAK = """
import sys
from pathlib import Path
import numpy, tutti.huggingface.conversion
from tutti.huggingface.conversion import convert

def resident(which):
    with open('/proc/self/status') as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(which))

before = resident('VmRSS')
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(resident('VmHWM') - before)
"""


def write_sparse(folder: Path, config: dict[str, object], code: str = "F32") -> int:
    """Write a checkpoint of zeros that takes no room on the disk; return its size."""
    from tutti.huggingface.dtypes import BY_CODE
    from tutti.huggingface.tensor_file import Entry

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    table = key_table(read_config(config, "large"))
    entries, at = {}, 0
    for key, parts in table.stored.items():
        shape = parts[0][1].shape
        stop = at + int(np.prod(shape)) * BY_CODE[code].num_bytes
        entries[key] = Entry(key=key, dtype=BY_CODE[code], shape=shape, start=at, stop=stop)
        at = stop
    path = folder / "model.safetensors"
    path.write_bytes(header_bytes(entries, {}))
    os.truncate(path, path.stat().st_size + at)
    return path.stat().st_size


@pytest.mark.slow  # files of many GB, sparse
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Peak resident memory, mapped pages of both files included, stays below a fixed bound."""
    size = write_sparse(tmp_path / "hf", LARGE)
    assert size > 7 * BOUND
    for source, target in (("hf", "ours"), ("ours", "back")):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, tmp_path / source, tmp_path / target],
            capture_output=True, text=True, check=True, timeout=280,
        )  # fmt: skip
        assert int(done.stdout) < BOUND, f"{source} → {target}"
    assert (tmp_path / "back" / "model.safetensors").stat().st_size == size
