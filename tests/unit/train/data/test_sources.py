"""Every kind of file, and every way in which a file can be wrong."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.huggingface.tokenizer import ByteTokenizer
from tutti.optional_imports import library
from tutti.train.data import DataConfig, SourceConfig, open_data
from tutti.train.data.cache import CacheSettings, open_store
from tutti.train.data.sources import jsonl, plain_text
from tutti.train.data.store import TokenStore
from tutti.train.data.text.tales import NUM_TALES, tales

BYTES = ByteTokenizer()


def opened(folder: Path, **source: object) -> TokenStore:
    settings = CacheSettings(folder=folder / "cache")
    return open_store(SourceConfig(**source), BYTES, settings, base=folder)  # type: ignore[arg-type]


def documents(store: TokenStore) -> list[str]:
    ends = store.offsets.tolist()
    parts = [store.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
    assert all(part[0] == 256 and part[-1] == 257 for part in parts)
    return [BYTES.decode(part) for part in parts]


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


# --- what can be read ------------------------------------------------------------------------


def test_text_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("zwei\n\ndrei", encoding="utf-8")
    (tmp_path / "in" / "deep" / "a.md").write_text("\ufeffeins: é", encoding="utf-8")
    (tmp_path / "in" / "other.png").write_bytes(b"\xff")
    assert documents(opened(tmp_path, path="in")) == ["zwei\n\ndrei", "eins: é"]
    assert documents(opened(tmp_path, path="in/*.txt")) == ["zwei\n\ndrei"]
    assert documents(opened(tmp_path, path="in/b.txt", documents="block")) == ["zwei", "drei"]


def test_blocks_do_not_depend_on_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n \n\n".join(f"block {i}\nline" for i in range(50))
    (tmp_path / "a.txt").write_text(text)
    whole = documents(opened(tmp_path, path="a.txt", documents="block"))
    assert whole == [f"block {i}\nline" for i in range(50)]
    monkeypatch.setattr(plain_text, "PIECE_BYTES", 40)
    reader = plain_text.TextReader(blocks=True)
    pieces = reader.pieces(tmp_path / "a.txt")
    assert len(pieces) > 5
    assert [r.value for piece in pieces for r in reader.records(piece, ())] == whole


def test_json_lines_do_not_depend_on_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{"text": f"é{i}" * i, "id": i} for i in range(30)]
    (tmp_path / "a.jsonl").write_text(lines(*values[:10]) + "\n" + lines(*values[10:]))
    assert documents(opened(tmp_path, path="a.jsonl")) == [v["text"] for v in values[1:]]
    assert opened(tmp_path, path="a.jsonl").skipped == 1
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr(jsonl, "PIECE_BYTES", size)
        reader = jsonl.JsonLinesReader()
        pieces = reader.pieces(tmp_path / "a.jsonl")
        assert [r.value for piece in pieces for r in reader.records(piece, ())] == values


def test_other_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines({"content": "x"}, {"content": None}, {"content": "y"}))
    assert documents(opened(tmp_path, path="a.jsonl", text="content")) == ["x", "y"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i}" for i in range(10)]
    table = arrow.table({"text": texts, "n": list(range(10))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert documents(opened(tmp_path, path="a.parquet")) == texts
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(InputError, match=r"b\.parquet: cannot be read"):
        opened(tmp_path, path="b.parquet")
    with pytest.raises(InputError, match="the records have no 'txt'; did you mean 'text'"):
        opened(tmp_path, path="a.parquet", text="txt")


def save_dataset(folder: Path, columns: dict[str, list], *, splits: bool, **state: object) -> None:
    """What `Dataset.save_to_disk` writes."""
    arrow = pytest.importorskip("pyarrow")
    inner = folder / "train" if splits else folder
    inner.mkdir(parents=True)
    if splits:
        (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    table = arrow.table(columns)
    half = table.num_rows // 2
    files = []
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        name = f"data-{number:05d}-of-00002.arrow"
        with arrow.ipc.new_stream(str(inner / name), table.schema) as writer:
            writer.write_table(part, max_chunksize=2)
        files.append({"filename": name})
    (inner / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    (inner / "dataset_info.json").write_text("{}")


def test_dataset_folders(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(9)]
    save_dataset(tmp_path / "one", {"text": texts}, splits=False)
    save_dataset(tmp_path / "two", {"text": texts}, splits=True)
    save_dataset(tmp_path / "three", {"text": texts}, splits=False, _indices_files=[{}])
    assert documents(opened(tmp_path, path="one")) == texts
    assert documents(opened(tmp_path, path="two", split="train")) == texts
    with pytest.raises(InputError, match="has the splits train, test; choose 'split'"):
        opened(tmp_path, path="two")
    with pytest.raises(InputError, match="no split 'tran'; did you mean 'train'"):
        opened(tmp_path, path="two", split="tran")
    with pytest.raises(InputError, match="flatten_indices"):
        opened(tmp_path, path="three")


def test_nested_messages_in_arrow(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 3
    save_dataset(tmp_path / "chat", {"messages": turns}, splits=False)
    store = opened(tmp_path, path="chat")
    assert (store.is_supervised, store.num_documents) == (True, 3)


def test_pairs_have_a_loss_on_the_completion(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        lines({"prompt": "2+2=", "completion": "4"}, {"prompt": "x", "completion": ""})
    )
    store = opened(tmp_path, path="a.jsonl")
    assert store.tokens.tolist() == [256, *b"2+2=", *b"4", 257]
    assert store.supervised(0, 7).tolist() == [False] * 5 + [True] * 2
    assert store.skipped == 1


def test_the_shipped_text(tmp_path: Path) -> None:
    store = opened(tmp_path, path="shipped:tales")
    assert documents(store) == tales().strip().split("\n\n")
    assert store.num_documents == NUM_TALES
    with pytest.raises(InputError, match="did you mean 'tales'"):
        opened(tmp_path, path="shipped:tale")


# --- what cannot -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines({"text": "a"}) + '{"text": \n', r"line 2: not valid JSON \(.* column"),
        (lines({"text": "a"}, {"txt": "b"}), r"line 2: no field 'text'; did you mean 'txt'"),
        (lines({"text": "a"}, {"text": 3}), r"line 2: 'text' is 3; expected text"),
        (lines({"text": "a"}, [1]), r"line 2: expected an object with fields, found \[1\]"),
        (lines({"body": "a"}), r"the records have no 'text'; known: body"),
        (lines({"text": ""}), r"holds no text to train on \(1 without text or loss\)"),
        ("", "holds no text to train on"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: not valid UTF-8 \(byte 0xff at 10\)"),
        (lines({"messages": "hello"}), r"line 1: expected a list of messages, found 'hello'"),
        (lines({"messages": [{"content": "a"}]}), "line 1: message 0 has no 'role'"),
        (lines({"messages": [{"role": "user"}]}), "message 0: 'content' is null; expected text"),
        (lines({"messages": [3]}), "message 0 is 3, not an object"),
        (
            lines({"messages": [{"role": "user", "content": "a"}]}, {"text": "b"}),
            r"holds no text|line 2: no field 'messages'",
        ),
        (
            lines({"prompt": "a", "completion": "b"}, {"prompt": "a"}),
            r"line 2: no field 'completion'",
        ),
    ],
)
def test_bad_json_lines(content: str | bytes, message: str, tmp_path: Path) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(InputError, match=message) as raised:
        opened(tmp_path, path="a.jsonl")
    assert "a.jsonl" in str(raised.value)
    left = [path.name for path in (tmp_path / "cache").glob("*")] if data else []
    assert all(name.endswith(".lock") for name in left), left


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("corpus.jsnl", r"no such file or folder; did you mean 'corpus\.jsonl'"),
        ("*.parquet", r"\*\.parquet: no file matches"),
        ("empty", r"empty: the folder has no files to read \(\.bin"),
        ("mixed", r"mixed: has files of several kinds \(jsonl, text\)"),
        ("odd.xyz", r"odd\.xyz: of no known kind \(known endings: \.bin.*\); say 'kind'"),
        ("bad.txt", r"bad\.txt: not valid UTF-8"),
    ],
)
def test_bad_paths(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(lines({"text": "a"}))
    (tmp_path / "odd.xyz").write_text("a")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    (tmp_path / "mixed" / "a.jsonl").write_text("a")
    with pytest.raises(InputError, match=message):
        opened(tmp_path, path=path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines({"text": "a"}))
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be read \(Permission denied\)"):
        opened(tmp_path, path="a.jsonl")


def test_refused_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_no_permission`, where the test itself runs as root."""
    (tmp_path / "a.txt").write_text("a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.txt"))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        opened(tmp_path, path="a.txt")


def test_a_missing_library_is_named() -> None:
    with pytest.raises(InputError, match=r"x: needs pyarrow, .*pip install 'tutti-ml\[data\]'"):
        library("pyarrow.nothing_of_this_name", "x")


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    config = DataConfig(train=(SourceConfig(path="a.txt"),), tokenizer="bytes", cache="cache")
    with pytest.raises(InputError, match=r"a\.txt: token 257 is not in the model's vocabulary"):
        open_data(config, sequence_length=8, vocabulary=256, base=tmp_path)
