"""Comparing dumps: what diverges, which first, and which dumps cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import LLAMA
from tutti.errors import InputError
from tutti.huggingface import alignment_sides, dumps
from tutti.huggingface.comparison import compare
from tutti.huggingface.dtypes import BY_NAME
from tutti.huggingface.dumps import Batch, Dump, DumpFacts, DumpWriter
from tutti.models import read_config

SPEC = read_config(LLAMA, "tiny")
BATCH = Batch.seeded(SPEC, sequences=2, length=8, seed=0)
FACTS = DumpFacts(
    side="hf",
    model="tiny",
    model_type="llama",
    model_hash=SPEC.fingerprint,
    dtype="float32",
    device="cpu",
    sequences=2,
    length=8,
    seed=0,
    batch_sha256=BATCH.sha256,
)
KEYS = ("forward/0", "forward/1.attention", "forward/1", "gradient/1.a", "gradient/1.key.bias")


def numbers(key: str) -> np.ndarray:
    generator = np.random.default_rng(KEYS.index(key))
    scale = 1e-9 if key.endswith("key.bias") else 1.0  # zero, but for rounding
    return (scale * generator.normal(size=(4, 6))).astype(np.float32)


def write(
    target: Path, facts: DumpFacts = FACTS, changed: dict[str, np.ndarray] | None = None
) -> Path:
    values = {key: numbers(key) for key in KEYS} | (changed or {})
    with DumpWriter(target, facts, BATCH) as writer:
        for key, value in values.items():
            writer.record_raw(key, value.view(np.uint32), BY_NAME["float32"])
    return target


def test_equal_dumps_agree(tmp_path: Path) -> None:
    result = compare(write(tmp_path / "a"), write(tmp_path / "b"))
    assert result.first_divergence is None
    assert [module.key for module in result.modules] == list(KEYS)
    assert all(m.relative_l2 == 0 and m.cosine == pytest.approx(1) for m in result.modules)


def test_the_first_in_the_order_of_execution_is_named(tmp_path: Path) -> None:
    """Not the worst: what comes later is a consequence."""
    changed = {
        "forward/1": numbers("forward/1") * 2,
        "forward/1.attention": numbers("forward/1.attention") * np.float32(1 + 3e-5),
    }
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", changed=changed))
    first = result.first_divergence
    assert first is not None
    assert first.key == "forward/1.attention"
    assert first.relative_l2 == pytest.approx(3e-5, rel=0.02)
    assert result.worst.key == "forward/1"
    assert result.worst.relative_l2 == pytest.approx(0.5)
    assert result.worst.max_abs == pytest.approx(np.abs(numbers("forward/1")).max())


def test_rounding_of_a_zero_gradient_is_no_divergence(tmp_path: Path) -> None:
    noise = {"gradient/1.key.bias": -numbers("gradient/1.key.bias")}
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", changed=noise))
    assert result.first_divergence is None
    wrong = {"gradient/1.key.bias": np.full((4, 6), 1e-5, np.float32)}
    result = compare(tmp_path / "a", write(tmp_path / "c", changed=wrong))
    assert result.first_divergence is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_diverges(bad: float, tmp_path: Path) -> None:
    broken = numbers("forward/0")
    broken[0, 0] = bad
    result = compare(write(tmp_path / "a"), write(tmp_path / "b", changed={"forward/0": broken}))
    assert result.first_divergence is not None
    assert result.first_divergence.key == "forward/0"


def test_tolerances_follow_the_coarser_format(tmp_path: Path) -> None:
    coarse = {"forward/1": numbers("forward/1") * np.float32(1.01)}
    a, b = write(tmp_path / "a"), write(tmp_path / "b", changed=coarse)
    assert compare(a, b).first_divergence is not None
    assert compare(a, b, tolerance=0.02).first_divergence is None
    c = write(tmp_path / "c", replace(FACTS, dtype="bfloat16"), coarse)
    assert compare(a, c).first_divergence is None


def test_formats_are_read_as_numbers(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "a", FACTS, BATCH) as writer:
        writer.record_raw("forward/0", np.array([0x3FC0, 0xC000], "u2"), BY_NAME["bfloat16"])
        half = np.array([1.5, -2], np.float16).view(np.uint16)
        writer.record_raw("forward/1", half, BY_NAME["float16"])
    dump = Dump(tmp_path / "a")
    assert dump.numbers("forward/0").tolist() == [1.5, -2.0]
    assert dump.numbers("forward/1").tolist() == [1.5, -2.0]
    assert dump.numbers("input/tokens").tolist() == BATCH.tokens.reshape(-1).tolist()


def test_large_dumps_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "FLUSH_BYTES", 100)
    write(tmp_path / "a")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    monkeypatch.undo()
    assert compare(tmp_path / "a", write(tmp_path / "b")).first_divergence is None


# --- dumps that cannot be compared -----------------------------------------------------------


def test_other_models_batches_and_shapes(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    other = write(tmp_path / "model", replace(FACTS, model="big", model_hash="123456"))
    with pytest.raises(InputError, match=r"is of another model: .*'tiny' .*, it 'big'"):
        compare(a, other)
    other = write(tmp_path / "batch", replace(FACTS, batch_sha256="0", seed=7))
    with pytest.raises(InputError, match=r"is of another batch: .*seed 0, it 2 × 8 of seed 7"):
        compare(a, other)
    other = write(tmp_path / "shape", changed={"forward/1": np.zeros((4, 5), np.float32)})
    with pytest.raises(InputError, match=r"'forward/1': expected \[4, 6\] as in .*found \[4, 5\]"):
        compare(a, other)


def test_dumps_without_a_common_module(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "empty", FACTS, BATCH):
        pass
    with pytest.raises(InputError, match="have no module in common"):
        compare(write(tmp_path / "a"), tmp_path / "empty")


def test_modules_of_one_side_only_are_listed(tmp_path: Path) -> None:
    more = write(tmp_path / "more", changed={"forward/2": numbers("forward/1")})
    result = compare(more, write(tmp_path / "a"))
    assert (result.only_a, result.only_b) == (("forward/2",), ())


def test_damaged_dumps(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    with pytest.raises(InputError, match=r"holds no dump.json; write one with 'tutti align dump'"):
        compare(a, tmp_path)
    (write(tmp_path / "b") / "dump.json").write_text('{"format": "x"}')
    with pytest.raises(InputError, match="not a dump"):
        compare(a, tmp_path / "b")
    value = json.loads((write(tmp_path / "c") / "dump.json").read_text())
    value["tensors"][1]["dtype"] = "float16"
    (tmp_path / "c" / "dump.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"expected float16 \[4, 6\], found float32 \[4, 6\]"):
        compare(a, tmp_path / "c")


def test_a_side_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), DumpWriter(tmp_path / "a", FACTS, BATCH):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a")
    with pytest.raises(InputError, match="exists already"):
        write(tmp_path / "a")


# --- sides -----------------------------------------------------------------------------------


def test_sides_are_found_by_name_and_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment_sides, "_SIDES", dict(alignment_sides._SIDES))
    with pytest.raises(InputError, match=r"--side is 'hff'; did you mean 'hf'?"):
        alignment_sides.load_side("hff")
    alignment_sides.register_side("mine", "tutti.absent_package:run")
    assert {"hf", "mine"} <= set(alignment_sides.side_names())
    with pytest.raises(InputError, match=r"--side mine: needs the Python package 'tutti.absent"):
        alignment_sides.load_side("mine")


def test_a_batch_is_the_same_everywhere() -> None:
    again = Batch.seeded(SPEC, sequences=2, length=8, seed=0)
    assert again.sha256 == BATCH.sha256
    assert Batch.seeded(SPEC, sequences=2, length=8, seed=1).sha256 != BATCH.sha256
    assert BATCH.tokens[0].tolist() == [54, 40, 32, 17, 19, 2, 4, 1]
    with pytest.raises(InputError, match="--length is 4096; tiny is made for 2048"):
        Batch.seeded(SPEC, sequences=1, length=4096, seed=0)
