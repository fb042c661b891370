"""Megatron's indexed dataset, against bytes written from the format's definition."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.train.data import DataConfig, SourceConfig, open_data
from tutti.train.data.megatron import open_megatron

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
SEQUENCES = ((5, 6, 7), (8,), (9, 10, 11, 12))
DOCUMENTS = (0, 2, 3)  # the first two sequences are one document


def write(
    stem: Path,
    code: int,
    *,
    sequences: tuple[tuple[int, ...], ...] = SEQUENCES,
    documents: tuple[int, ...] = DOCUMENTS,
    version: int = 1,
) -> Path:
    letter = CODES.get(code, "f")
    width = struct.calcsize(f"<{letter}")
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    at = 0
    for sequence in sequences:
        index += struct.pack("<q", at)
        at += width * len(sequence)
    index += b"".join(struct.pack("<q", boundary) for boundary in documents)
    Path(f"{stem}.idx").write_bytes(index)
    Path(f"{stem}.bin").write_bytes(
        b"".join(struct.pack(f"<{letter}", token) for s in sequences for token in s)
    )
    return stem


@pytest.mark.parametrize("code", CODES)
def test_every_dtype(code: int, tmp_path: Path) -> None:
    store = open_megatron(write(tmp_path / "corpus", code), "corpus")
    assert store.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert store.offsets.tolist() == [0, 4, 8]
    assert not store.is_supervised


@pytest.mark.parametrize("path", ["corpus", "corpus.bin", "corpus.idx"])
def test_rows(path: str, tmp_path: Path) -> None:
    write(tmp_path / "corpus", 8)
    config = DataConfig(train=(SourceConfig(path=path),))
    data = open_data(config, sequence_length=6, vocabulary=64, base=tmp_path)
    rows = data.train.parts[0].rows
    first, last = rows.row(0), rows.row(1)
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert first.targets.tolist() == [6, 7, 8, -100, 10, 11]
    assert first.lengths == (4, 2)
    assert last.tokens.tolist() == [11, 12, 0, 0, 0, 0]
    assert last.targets.tolist() == [12, -100, -100, -100, -100, -100]
    assert data.tokenizer is None


def test_large_tokens_are_found_when_read(tmp_path: Path) -> None:
    write(tmp_path / "corpus", 4, sequences=((1, 70_000),), documents=(0, 1))
    config = DataConfig(train=(SourceConfig(path="corpus"),))
    data = open_data(config, sequence_length=2, vocabulary=50_000, base=tmp_path)
    with pytest.raises(InputError, match="token 70000 is not in the model's vocabulary of 50000"):
        data.train.row(0)


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stem: _cut(Path(f"{stem}.idx"), 40), "cut short: 40 bytes of 94"),
        (lambda stem: _cut(Path(f"{stem}.idx"), 10), "not an index"),
        (lambda stem: _cut(Path(f"{stem}.bin"), 10), "cut short: 10 bytes of 16"),
        (lambda stem: Path(f"{stem}.bin").unlink(), r"corpus\.bin: no such file"),
        (lambda stem: Path(f"{stem}.idx").write_bytes(b""), "not an index"),
        (lambda stem: write(stem, 8, version=2), "version 2; only version 1"),
        (lambda stem: write(stem, 7), "holds float32 numbers, not tokens"),
        (lambda stem: write(stem, 99), r"an unknown dtype \(99\)"),
        (lambda stem: write(stem, 8, documents=(0, 2)), "do not cover all 3 sequences"),
        (lambda stem: write(stem, 8, documents=(0, 2, 1, 3)), "go backwards"),
        (lambda stem: write(stem, 8, sequences=(), documents=(0,)), "holds no tokens"),
    ],
)
def test_damaged_files(change, message: str, tmp_path: Path) -> None:
    stem = write(tmp_path / "corpus", 8)
    change(stem)
    with pytest.raises(InputError, match=message):
        open_megatron(stem, "corpus")


def test_sequences_elsewhere_in_the_file(tmp_path: Path) -> None:
    stem = write(tmp_path / "corpus", 8)
    raw = bytearray(Path(f"{stem}.idx").read_bytes())
    raw[34 + 12 : 34 + 20] = struct.pack("<q", 2)
    Path(f"{stem}.idx").write_bytes(bytes(raw))
    with pytest.raises(InputError, match="do not follow each other"):
        open_megatron(stem, "corpus")
