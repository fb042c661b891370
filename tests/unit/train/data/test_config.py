"""The `data:` part of a file, and what `open_data` makes of it as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.document import Place, build, plain
from tutti.errors import InputError
from tutti.files import parse_yaml
from tutti.train.data import DataConfig, SourceConfig, open_data
from tutti.train.data.config import Form, SourceKind
from tutti.train.data.open_data import DataState

WRITTEN = """
train:
  - {path: corpus/*.jsonl, weight: 3, text: body}
  - shipped:tales
  - {kind: synthetic, surprise: 0.3}
validation: [held.txt]
tokenizer: bytes
packing: {kind: fit, long: drop}
seed: 7
"""


def read(text: str) -> DataConfig:
    return build(DataConfig, parse_yaml(text, "train.yaml"), Place("train.yaml").key("data"))


def test_there_and_back() -> None:
    config = read(WRITTEN)
    assert config.train[0] == SourceConfig(path="corpus/*.jsonl", weight=3.0, text="body")
    assert config.train[1] == SourceConfig(path="shipped:tales")
    assert (config.train[2].kind, config.train[2].form) == (SourceKind.SYNTHETIC, Form.AUTO)
    assert plain(config)["train"][1] == "shipped:tales"
    assert build(DataConfig, plain(config), Place("again")) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [{pth: a}]", r"data: train\[0\]: unknown key 'pth'; did you mean 'path'"),
        ("train: [{path: a, kind: jsonn}]", "'kind' is 'jsonn'; did you mean 'json"),
        ("train: [{path: a, weight: 0}]", "'weight' is 0; must be more than 0"),
        ("train: [{kind: synthetic, path: a}]", "a synthetic source has no path; found 'a'"),
        ("train: [{weight: 1}]", "'path' is missing"),
        ("train: []", "'train' is empty"),
        ("train: a.txt", "'train' is 'a.txt'; expected a list"),
        ("{train: [a], holdout: 0.1, validation: [b]}", "both given; choose one"),
        ("{train: [a], holdout: 0.9}", "must be at most 0.5"),
        ("{train: [a], packing: {kind: best}}", "'kind' is 'best'"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text)


def test_plain_text_in_python() -> None:
    source = SourceConfig(kind="synthetic", form="text")  # type: ignore[arg-type]
    assert source.kind is SourceKind.SYNTHETIC
    assert source.form is Form.TEXT
    with pytest.raises(ValueError, match="'xml' is not a valid SourceKind"):
        SourceConfig(path="a", kind="xml")  # type: ignore[arg-type]


def open_here(folder: Path, text: str, **changes: object):
    given = {"sequence_length": 1000, "vocabulary": 300, "base": folder, **changes}
    return open_data(read(text), **given)  # type: ignore[arg-type]


def test_a_mix_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"body": "hello"}\n' * 40)
    (tmp_path / "held.txt").write_text("apart " * 30)
    text = WRITTEN + f"cache: {tmp_path}/cache"
    data = open_here(tmp_path, text)
    assert [report.use for report in data.reports] == ["train"] * 3 + ["validation"]
    assert str(data.reports[0]) == (
        "corpus/*.jsonl (train): 40 examples, 280 tokens, 1 row, 72.0% padding"
    )
    assert str(data.reports[1]).endswith("dropped")
    sources = [data.train.place(sample).source for sample in range(1000)]
    assert [sources.count(i) for i in range(3)] == [600, 200, 200]
    assert data.validation is not None
    assert data.validation.num_rows == 1
    assert data.fingerprint == open_here(tmp_path, text).fingerprint
    data.check(data.state(next_sample=12))
    for other in (
        text.replace("seed: 7", "seed: 8"),
        text.replace("weight: 3", "weight: 2"),
        text.replace("surprise: 0.3", "surprise: 0.4"),
        text.replace("long: drop", "long: truncate"),
    ):
        with pytest.raises(InputError, match="not what the checkpoint was trained on"):
            open_here(tmp_path, other).check(data.state(0))


def test_the_state_is_a_document() -> None:
    state = DataState(next_sample=96, seed=3, fingerprint="0123456789ab")
    assert build(DataState, plain(state), Place("state")) == state


def test_holding_out(tmp_path: Path) -> None:
    cache = f"cache: {tmp_path}/cache"
    text = "train: [shipped:tales]\n"
    data = open_here(tmp_path, f"{text}holdout: 0.05\ntokenizer: bytes\n{cache}")
    assert data.validation is not None
    (part,) = data.validation.parts
    held = {part.held(i) for i in range(part.count)}
    count = data.train.parts[0].count
    seen = {data.train.place(sample).row for sample in range(count)}
    assert len(held) == data.validation.num_rows == round(0.05 * (count + len(held)))
    assert not held & seen
    with pytest.raises(InputError, match="'holdout' needs a source with an end"):
        open_here(tmp_path, "{train: [{kind: synthetic}], holdout: 0.1}")


def test_synthetic_validation_needs_no_tokenizer(tmp_path: Path) -> None:
    data = open_here(tmp_path, "{train: [{kind: synthetic}], validation: [{kind: synthetic}]}")
    assert data.tokenizer is None
    assert data.validation is not None
    assert data.validation.num_rows == 64
    with pytest.raises(InputError, match="a vocabulary of 999, more than the model's 300"):
        open_here(tmp_path, "train: [{kind: synthetic, vocabulary: 999}]")


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'tokenizer' is missing"):
        open_here(tmp_path, "train: [shipped:tales]")
