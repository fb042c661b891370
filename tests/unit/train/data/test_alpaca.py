"""Alpaca's fields, and JSON files that are arrays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.huggingface.test_chat import PLAIN, write_folder
from tutti.errors import InputError
from tutti.huggingface.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer
from tutti.train.data import DataConfig, SourceConfig, open_data
from tutti.train.data.config import Form, SourceKind
from tutti.train.data.encode import Encoded, encode, shape_of
from tutti.train.data.sources import array
from tutti.train.data.sources.find import find, reader_of

ALPACA = [
    {"instruction": "Translate.", "input": "tutti", "output": "All together."},
    {"instruction": "Name a chip.", "input": "", "output": "A800"},
    {"instruction": "Say nothing.", "input": None, "output": "…"},
]


def encoded(path: Path, tokenizer: Tokenizer, **options: str) -> list[Encoded]:
    source = SourceConfig(path=str(path), **options)  # type: ignore[arg-type]
    kind, files = find(source, Path())
    shape = shape_of(source, kind, files)
    pieces = reader_of(kind, blocks=False).pieces(files[0])
    return [encode(p, kind, shape, tokenizer, blocks=False, end=True) for p in pieces]


def texts(found: Encoded, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the prompt and what has a loss, of every example."""
    result, at = [], 0
    assert found.supervised is not None
    for length in found.lengths:
        own, mask = found.tokens[at : at + length], found.supervised[at : at + length]
        at += length
        result.append(tuple(tokenizer.decode(own[m].tolist()) for m in (~mask, mask)))
    return result


def write(path: Path, values: object) -> Path:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def test_a_tokenizer_with_a_template_makes_conversations(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", ALPACA)
    tokenizer = FolderTokenizer(write_folder(tmp_path / "model", PLAIN))
    (found,) = encoded(file, tokenizer)
    first, second, _ = texts(found, tokenizer)
    assert first == (
        "<|im_start|>user\nTranslate.\n\ntutti<|im_end|>\n<|im_start|>assistant\n\n",
        "All together.<|im_end|>",
    )
    assert second[0].startswith("<|im_start|>user\nName a chip.<|im_end|>")


def test_a_tokenizer_without_one_gets_alpacas_prompt(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", ALPACA)
    tokenizer = FolderTokenizer(write_folder(tmp_path / "model", None))
    (found,) = encoded(file, tokenizer)
    first, second, _ = texts(found, tokenizer)
    assert first[0].startswith("Below is an instruction that describes a task, paired with an")
    assert first[0].endswith("### Instruction:\nTranslate.\n\n### Input:\ntutti\n\n### Response:\n")
    assert first[1] == "All together.</s>"
    assert "### Input" not in second[0]


def test_a_system_field_comes_first(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", [{**ALPACA[0], "system": "Be brief."}])
    ((prompt, _),) = texts(encoded(file, ByteTokenizer())[0], ByteTokenizer())
    assert prompt.startswith("\x02system\nBe brief.\x03\x02user\n")


def test_fields_are_recognised_and_may_lack_the_input(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", [{"instruction": "Go.", "output": "Gone."}])
    kind, files = find(SourceConfig(path=str(file)), Path())
    assert kind is SourceKind.JSON
    shape = shape_of(SourceConfig(path=str(file)), kind, files)
    assert shape.form is Form.ALPACA
    assert shape.fields == ("instruction", "output")


def test_lines_and_arrays_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also cut into several pieces; and lines under the ending .json are lines."""
    tokenizer = ByteTokenizer()
    lines = "".join(json.dumps(record) + "\n" for record in ALPACA)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "lines.json").write_text(lines)
    write(tmp_path / "a.json", ALPACA)
    monkeypatch.setattr(array, "PIECE_RECORDS", 2)
    whole = [
        [text for part in encoded(tmp_path / name, tokenizer) for text in texts(part, tokenizer)]
        for name in ("a.jsonl", "lines.json", "a.json")
    ]
    assert whole[0] == whole[1] == whole[2]
    assert len(encoded(tmp_path / "a.json", tokenizer)) == 2


def test_an_array_of_conversations_and_of_texts(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    file = write(tmp_path / "chat.json", [{"conversations": talk}] * 3)
    data = open_data(
        DataConfig(train=(SourceConfig(path=str(file)),), tokenizer="bytes", cache="cache"),
        sequence_length=64,
        vocabulary=259,
        base=tmp_path,
    )
    assert str(data.reports[0]).startswith(f"{file} (train): 3 examples")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "a.json: item 1: expected an object with fields, found 1"),
        ('[{"text": "a"},\n{"text": ]', "a.json: line 2: not valid JSON (Expecting value"),
        ('{\n"data": [{"text": "a"}]}', "a.json: expected an array of objects, found {"),
        ('[{"instruction": "a"}]', "the records have no 'text'; known: instruction"),
        ('[{"instruction": "a", "output": 3}]', "a.json: item 1: 'output' is 3; expected text"),
        (
            '[{"instruction": "a", "output": "b"}, {"instruction": "a"}]',
            "item 2: no field 'output'",
        ),
        ("[]", "holds no text to train on"),
        ("", "a.json: line 1: not valid JSON"),
    ],
)
def test_mistakes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError) as error:
        open_data(
            DataConfig(train=(SourceConfig(path="a.json"),), tokenizer="bytes", cache="cache"),
            sequence_length=64,
            vocabulary=259,
            base=tmp_path,
        )
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_beside_other_files_a_json_is_no_data(tmp_path: Path) -> None:
    """Folders of data sets hold a .json that describes them."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    write(tmp_path / "dataset_info.json", {"features": {}})
    kind, files = find(SourceConfig(path=str(tmp_path)), Path())
    assert (kind, [file.name for file in files]) == (SourceKind.JSONL, ["a.jsonl"])
