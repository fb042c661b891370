"""What is wrong with a checkpoint is one line: tensor, expected, found."""

from __future__ import annotations

import errno
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import (
    LLAMA,
    snapshot,
    stored_tensors,
    write_folder,
    write_tensors,
)
from tutti.errors import InputError, TuttiError
from tutti.huggingface import open_checkpoint, workspace
from tutti.huggingface.conversion import convert
from tutti.huggingface.weight_map import WeightMap, resolve
from tutti.models import read_config

QUERY = "model.layers.0.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf")


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def without(folder: Path) -> None:
    tensors = stored_tensors()
    del tensors[QUERY]
    write_tensors(folder / WEIGHTS, tensors)


def with_extra(folder: Path) -> None:
    extra = {"model.layers.0.extra": np.zeros((3, 2), "u4")}
    write_tensors(folder / WEIGHTS, stored_tensors() | extra)


def wrong_shape(folder: Path) -> None:
    write_tensors(folder / WEIGHTS, stored_tensors() | {QUERY: np.zeros((32, 31), "u4")})


def index_of_absent(folder: Path) -> None:
    mapped = dict.fromkeys(stored_tensors(), "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": mapped}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of_elsewhere(folder: Path) -> None:
    index = {"weight_map": {QUERY: "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def replace_header(folder: Path, old: bytes, new: bytes) -> None:
    path = folder / WEIGHTS
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def header_length(folder: Path, length: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


def only_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (without, f"tensor '{QUERY}' is missing; expected [32, 32]"),
    "extra": (with_extra, "tensor 'model.layers.0.extra' [3, 2] is no tensor of this model"),
    "shape": (wrong_shape, f"tensor '{QUERY}': expected [32, 32], found [32, 31]"),
    "truncated": (
        lambda f: cut(f / WEIGHTS, 5000),
        "is cut short: tensor 'model.embed_tokens.weight' ends at byte 8192",
    ),
    "truncated header": (lambda f: cut(f / WEIGHTS, 100), "is cut short: its header needs"),
    "empty": (lambda f: cut(f / WEIGHTS, 3), "is cut short: 3 bytes"),
    "header": (lambda f: replace_header(f, b'"dtype"', b'"dtype\x00'), "its header is damaged"),
    "header length": (lambda f: header_length(f, 2**60), "claims to be 1152921504606846976 bytes"),
    "dtype": (lambda f: replace_header(f, b"F32", b"F4X"), "'dtype' is 'F4X'"),
    "offsets": (
        lambda f: replace_header(f, b"[0,8192]", b"[8,8192]"),
        "needs 8192 bytes, its header gives it 8184",
    ),
    "trailing": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"x"),
        "bytes of data, the file has",
    ),
    "config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "holds no .safetensors file"),
    "pickle": (only_pickle, "it has pytorch_model.bin: save it with transformers' save_pretrained"),
    "index": (index_of_absent, "is said to be in 'model-00001-of-00002.safetensors', which is not"),
    "elsewhere": (index_of_elsewhere, "names '../other/model.safetensors', which is no file of"),
    "type": (lambda f: edit_config(f, model_type="llamma"), "the nearest architecture is 'llama'"),
    "option": (
        lambda f: edit_config(f, attention_chunk_size=128),
        "'attention_chunk_size' is 128; tutti does not model that option",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}),
        "'quantization_config' is set: the weights are quantised",
    ),
    "no folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint(what: str, source: Path, tmp_path: Path) -> None:
    damage, said = DAMAGE[what]
    damage(source)
    before = snapshot(source) if source.exists() else {}
    with pytest.raises(InputError) as raised:
        convert(source, tmp_path / "tutti")
    message = str(raised.value)
    assert said in message
    assert str(source) in message
    assert "\n" not in message
    assert not (tmp_path / "tutti").exists()
    assert not (tmp_path / "tutti.partial").exists()
    assert (snapshot(source) if source.exists() else {}) == before


def test_a_head_that_is_not_what_it_is_tied_to(tmp_path: Path) -> None:
    tensors = stored_tensors()  # of the untied model: the head is its own
    source = write_folder(tmp_path / "hf", {**LLAMA, "tie_word_embeddings": True}, tensors)
    with pytest.raises(InputError, match=r"'lm_head.weight' differs from 'model.embed_tokens.we"):
        convert(source, tmp_path / "tutti")
    assert not (tmp_path / "tutti.partial").exists()


def test_parts_of_one_tensor_have_one_format(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2}
    source = write_folder(tmp_path / "hf", config)
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    data = (source / WEIGHTS).read_bytes()
    old = f'"{key}":{{"dtype":"F32"'.encode()
    assert old in data
    (source / WEIGHTS).write_bytes(data.replace(old, old.replace(b"F32", b"I32")))
    with pytest.raises(InputError, match=r"is I32, .*w1.weight' F32; they are parts of '1.moe"):
        open_checkpoint(source)


def test_a_map_that_lacks_a_tensor() -> None:
    spec = read_config(LLAMA, "model")
    with pytest.raises(KeyError, match=r"0.token.weight"):
        resolve(WeightMap(embedding={}, block={}, head={}), spec)


def test_a_type_without_a_map(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    from tutti.huggingface.maps import registry

    monkeypatch.delitem(registry._MAPS, "llama")
    with pytest.raises(InputError, match="no weight map for model type 'llama'; its package must"):
        open_checkpoint(source)


# --- targets ---------------------------------------------------------------------------------


def test_a_target_that_exists(source: Path, tmp_path: Path) -> None:
    (tmp_path / "tutti").mkdir()
    with pytest.raises(InputError, match="exists already"):
        convert(source, tmp_path / "tutti")


def test_a_target_inside_the_source(source: Path) -> None:
    with pytest.raises(InputError, match="is in the folder that is read"):
        convert(source, source / "tutti")


def test_a_target_without_a_parent(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: no such folder"):
        convert(source, tmp_path / "absent" / "tutti")


def test_a_half_written_target(source: Path, tmp_path: Path) -> None:
    (tmp_path / "tutti.partial").mkdir()
    with pytest.raises(InputError, match="stopped half-way; go on with --resume"):
        convert(source, tmp_path / "tutti")
    with pytest.raises(InputError, match="is no half-written conversion"):
        convert(source, tmp_path / "tutti", resume=True)
    with pytest.raises(InputError, match="is half-written; finish it with tutti convert --resume"):
        open_checkpoint(tmp_path / "tutti.partial")


def full_after(num_bytes: int, code: int) -> Callable[[Path, str], object]:
    """Return an `open` whose files take only so many bytes, as on a full disk."""

    class Full:
        left = num_bytes

        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()  # type: ignore[attr-defined]

        def write(self, block: bytes) -> int:
            Full.left -= len(block)
            if Full.left < 0:
                raise OSError(code, {errno.ENOSPC: "No space left on device"}.get(code, "no"))
            return self.stream.write(block)  # type: ignore[attr-defined,no-any-return]

    real = Path.open

    def opened(path: Path, mode: str = "r", *rest: object, **options: object) -> object:
        stream = real(path, mode, *rest, **options)  # type: ignore[call-overload]
        return Full(stream) if mode == "wb" else stream

    return opened


def test_a_full_disk_and_the_way_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full_after(20_000, errno.ENOSPC))
        with pytest.raises(TuttiError) as raised:
            convert(source, tmp_path / "tutti")
    assert "cannot be written (No space left on device); make room" in str(raised.value)
    assert not (tmp_path / "tutti").exists()
    assert not (tmp_path / "tutti.partial" / ".writing").exists(), "room is given back"
    done = convert(source, tmp_path / "tutti", resume=True)
    assert done.kept > 0
    convert(source, tmp_path / "at-once")
    assert snapshot(tmp_path / "tutti") == snapshot(tmp_path / "at-once")


def test_a_disk_that_is_too_small_from_the_start(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(workspace.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(TuttiError, match=r"needs .* more, the disk has 1000 B free"):
        convert(source, tmp_path / "tutti")


def test_a_folder_that_may_not_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=r"cannot write .*tutti\.partial.*: permission denied"):
        convert(source, tmp_path / "tutti")


def test_weights_that_may_not_be_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def refuse(path: Path, *rest: object, **options: object) -> object:
        if path.name == WEIGHTS:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *rest, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"model.safetensors: cannot be read \(Permission denied"):
        open_checkpoint(source)


# --- tutti folders ---------------------------------------------------------------------------


@pytest.fixture
def ours(source: Path, tmp_path: Path) -> Path:
    convert(source, tmp_path / "tutti")
    return tmp_path / "tutti"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_changed_byte(ours: Path, tmp_path: Path) -> None:
    flip(ours / "unit-1.safetensors")
    with pytest.raises(InputError, match=r"unit-1.safetensors: its bytes changed: expected sha256"):
        convert(ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: cut(f / "unit-1.safetensors", 999), r"expected \d+ bytes, found 999"),
        (lambda f: (f / "unit-1.safetensors").unlink(), "is missing; tutti.json lists it"),
        (lambda f: edit_config(f, intermediate_size=64), "it was edited afterwards"),
        (
            lambda f: (f / "tutti.json").write_text(
                (f / "tutti.json").read_text().replace('"unit-1.safetensors"', '"../x"')
            ),
            "names '../x', which is no file of this folder",
        ),
        (
            lambda f: (f / "tutti.json").write_text('{"format": "tutti-checkpoint/9"}'),
            "'format' is 'tutti-checkpoint/9'; this version of tutti reads",
        ),
        (lambda f: (f / "tutti.json").write_text("{"), "not valid JSON"),
    ],
    ids=["cut", "missing", "config", "elsewhere", "format", "json"],
)
def test_a_damaged_tutti_folder(
    damage: Callable[[Path], object], said: str, ours: Path, tmp_path: Path
) -> None:
    damage(ours)
    with pytest.raises(InputError, match=said):
        convert(ours, tmp_path / "back")


def test_questions_that_have_no_answer(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    with pytest.raises(InputError, match=r"no tensor '1.attention.querry.weight'; did you mean"):
        checkpoint.read("1.attention.querry.weight")
    with pytest.raises(InputError, match="a slice has the step 2"):
        checkpoint.read("0.token.weight", [slice(0, 8, 2)])
    with pytest.raises(InputError, match="has 2 dimensions; 3 slices given"):
        checkpoint.read("0.token.weight", [slice(0, 1)] * 3)
