"""`tutti data show`: what is shown is what `open_data` trains on."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tutti.cli.main import run
from tutti.train.data import DataConfig, SourceConfig, open_data

TALK = [
    {"role": "user", "content": "What does tutti mean?"},
    {"role": "assistant", "content": "All together."},
    {"role": "user", "content": "Who says so?"},
    {"role": "assistant", "content": "The score."},
]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"messages": TALK[: 2 + 2 * (n % 2)]}) + "\n" for n in range(10)]
    (tmp_path / "chat.jsonl").write_text("".join(lines))
    (tmp_path / "data.yaml").write_text("train: [chat.jsonl]\ntokenizer: bytes\n")
    (tmp_path / "train.yaml").write_text(
        "model: gpt2\ndata: {train: [chat.jsonl, 'shipped:tales'], tokenizer: bytes}\n"
        "job: {sequence_length: 64}\n"
    )
    (tmp_path / "bare.yaml").write_text("model: gpt2\ndata: {train: [chat.jsonl]}\n")
    return tmp_path


def tutti(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run(["data", "show", *arguments])
    return int(stopped.value.code or 0)


def test_without_colour_the_mask_is_written(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tutti("chat.jsonl", "--most", "2") == 0
    out = capsys.readouterr().out
    assert "{+All together.\\x03+}" in out
    assert "{+The score.\\x03+}" in out
    assert "10 examples" in out
    assert "32-63" in out  # the lengths
    assert "█" in out
    assert "\x1b" not in out
    assert "\x02" not in out


def test_in_a_terminal_the_mask_is_colour(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    shown = {}
    for name, variable in (("colour", "TERM"), ("none", "NO_COLOR")):
        with monkeypatch.context() as patch:
            stream = Tty(io.BytesIO(), "utf-8")
            patch.setattr(sys, "stdout", stream)
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm-256color")
            patch.setenv(variable, "xterm-256color")
            assert tutti("chat.jsonl", "--most", "1") == 0
            stream.flush()
            shown[name] = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "\x1b[1;32mAll together.\\x03\x1b[0m" in shown["colour"]
    assert "{+" not in shown["colour"]
    assert "{+All together.\\x03+}" in shown["none"]
    assert "\x1b[1;32m" not in shown["none"]


def test_what_is_shown_is_what_is_trained(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tutti("data.yaml", "--most", "10", "--json") == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    config = DataConfig(train=(SourceConfig(path="chat.jsonl"),), tokenizer="bytes", cache="cache")
    data = open_data(config, sequence_length=256, vocabulary=259)
    part = data.train.parts[0]
    rows = [part.rows.row(number) for number in range(part.count)]
    targets = np.sort(np.concatenate([row.targets[row.targets >= 0] for row in rows]))
    shown = [
        t for e in source["first"] for t, m in zip(e["tokens"], e["trained"], strict=True) if m
    ]
    assert targets.tolist() == sorted(shown)
    assert source["trained_tokens"] == len(shown)
    assert source["tokens"] == sum(len(example["tokens"]) for example in source["first"])
    assert sum(bar["count"] for bar in source["lengths"]) == source["examples"] == 10


def test_a_training_file(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tutti("train.yaml", "--most", "1", "--tokens") == 0
    out = capsys.readouterr().out
    assert "5 of 10 are longer than a row of 64 tokens" in out
    assert "shipped:tales  text, text, tokenizer bytes" in out
    assert "'A'" in out  # a token of the list


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl"], "nothing.jsonl: no such file or folder"),
        (["bare.yaml"], "names no tokenizer, and its model has no folder with one"),
        (["chat.jsonl", "--tokenizer", "nowhere"], "no folder 'nowhere'"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tutti(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
