"""Preferences and judged answers: from records to rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import InputError
from tutti.huggingface.tokenizer import open_tokenizer
from tutti.models.objective import Objective
from tutti.train.data.config import DataConfig, PackingConfig, SourceConfig
from tutti.train.data.open_data import PackedData, open_data
from tutti.train.data.preview import look

DPO, KTO = Objective(kind="dpo"), Objective(kind="kto")


def write(folder: Path, *records: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def opened(
    path: str,
    objective: Objective | None = DPO,
    *,
    length: int = 64,
    long: Any = "truncate",
    **words: Any,
) -> PackedData:
    config = DataConfig(
        train=(SourceConfig(path=path, **words),), tokenizer="bytes",
        packing=PackingConfig(long=long), cache=str(Path(path).parent / "cache"),
    )  # fmt: skip
    return open_data(config, sequence_length=length, vocabulary=259, objective=objective)


def texts(data: PackedData, sample: int) -> list[tuple[str, str, float]]:
    """Every document of a row: its text, what of it has a loss, its weight."""
    row, tokenizer, at, found = data.train.row(sample), open_tokenizer("bytes"), 0, []
    for length, weight in zip(row.lengths, row.weights, strict=True):
        targets = [t for t in row.targets[at : at + length].tolist() if t >= 0]
        whole = tokenizer.decode(row.tokens[at : at + length].tolist())
        found.append((whole, tokenizer.decode(targets), weight))
        at += length
    return found


PAIR = {"prompt": "ask ", "chosen": "yes", "rejected": "nope"}


def test_a_pair_is_two_documents_of_one_row(tmp_path: Path) -> None:
    other = {"prompt": "b ", "chosen": "1", "rejected": "2", "sure": 0.5}
    path = write(tmp_path, PAIR | {"sure": 2}, other)
    data = opened(path, length=128, row_weight="sure")
    found = texts(data, 0)
    pairs = zip(found, ("yes", "nope", "1", "2", ""), strict=True)
    assert all(loss.startswith(text) for (_, loss, _), text in pairs)
    assert [weight for *_, weight in found] == [2.0, -2.0, 0.5, -0.5, 0.0]
    assert [("ask " in whole, "ask " in loss) for whole, loss, _ in found[:2]] == [
        (True, False)
    ] * 2


def test_conversations_have_a_loss_on_the_last_turn(tmp_path: Path) -> None:
    start = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "earlier"},
        {"role": "user", "content": "b"},
    ]
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "poor"))
    path = write(tmp_path, {"chosen": [*start, good], "rejected": [*start, bad]})
    for _, loss, weight in texts(opened(path, length=256), 0)[:2]:
        assert loss.startswith("good" if weight > 0 else "poor")
        assert "earlier" not in loss


def test_judged_answers_are_held_against_those_of_others(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{i} ", "completion": f"answer {i}", "label": i % 2 == 0} for i in range(3)
    ]
    data = opened(write(tmp_path, *rows), KTO, length=256)
    found = texts(data, 0)[:3]
    assert {loss[:8]: weight for _, loss, weight in found} == {
        "answer 0": 1.0, "answer 1": -1.0, "answer 2": 1.0,
    }  # fmt: skip
    other = data.train.parts[0].rows.other_row(0)  # type: ignore[attr-defined]
    text = open_tokenizer("bytes").decode(other.tokens.tolist())
    assert all(pair in text for pair in ("p0 answer 2", "p1 answer 0", "p2 answer 1"))
    assert other.weights == (1.0, 1.0, 1.0, 0.0)


def test_pairs_never_lie_in_different_rows(tmp_path: Path) -> None:
    rows = [PAIR | {"chosen": "x" * (3 + 5 * i), "rejected": "y" * (20 - i)} for i in range(12)]
    data = opened(write(tmp_path, *rows), length=96)
    part = data.train.parts[0].rows
    for index in range(part.num_rows):
        row = part.row(index)
        signs = [weight > 0 for weight in row.weights if weight]
        assert signs == [True, False] * (len(signs) // 2)
        assert sum(row.lengths) == 96


def test_long_pairs_keep_half_a_row_each(tmp_path: Path) -> None:
    path = write(tmp_path, PAIR | {"chosen": "x" * 90, "rejected": "y" * 10}, PAIR)
    data = opened(path, length=64)
    assert "1 truncated" in str(data.reports[0])
    rows = data.train.parts[0].rows
    lengths = [rows.row(i).lengths for i in range(rows.num_rows)]
    short = 1 + 4 + 10 + 1  # begin, prompt, answer, end
    assert (64 - short, short) in lengths  # the long answer has what the short one leaves
    assert "1 dropped" in str(opened(path, length=64, long="drop").reports[0])
    with pytest.raises(InputError, match="1 of 2 pairs are longer than a row of 64 tokens"):
        opened(path, length=64, long="error")
    with pytest.raises(InputError, match="pairs are not split"):
        opened(path, length=64, long="split")


BAD: dict[str, tuple[Any, Objective | None, str]] = {
    "equal answers": (
        [PAIR, PAIR | {"rejected": "yes"}], DPO,
        "line 2: 'chosen' and 'rejected' are the same answer, .*; .* broken: skip",
    ),
    "no pairs": ([{"prompt": "a", "completion": "b"}], DPO, "objective dpo needs pairs"),
    "no verdicts": ([PAIR], KTO, "objective kto needs judged answers"),
    "no objective": ([PAIR], None, "holds answers to compare; say how with an objective"),
    "a text and messages": (
        [PAIR | {"prompt": [{"role": "user", "content": "x"}]}], DPO, "both as text, or both",
    ),
    "a verdict that is none": (
        [{"prompt": "a", "completion": "b", "label": "good"}] * 2, KTO, "expected true or false",
    ),
    "one verdict": (
        [{"prompt": "a", "completion": "b", "label": True}], KTO, "the only judged answer",
    ),
    "empty answers": ([PAIR | {"chosen": ""}], DPO, "no text to train on .1 without text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_one_line(tmp_path: Path, name: str) -> None:
    rows, objective, said = BAD[name]
    with pytest.raises(InputError, match=said) as raised:
        opened(write(tmp_path, *rows), objective)
    assert "\n" not in str(raised.value)


def test_broken_rows_are_left_out_and_counted_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, PAIR, PAIR | {"rejected": "yes"}, {"prompt": "x", "chosen": "y"})
    data = opened(path, broken="skip")
    assert str(data.reports[0]).endswith("2 skipped")


def test_a_chat_without_an_assistants_turn_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "anybody there?"}]})
    with pytest.raises(InputError, match="none of 1 conversations has an assistant's turn"):
        opened(path, None)


def test_weights_of_rows_reach_the_tokens(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path, *({"messages": talk, "w": w} for w in (0.5, 0, 2)))
    data = opened(path, None, row_weight="w", length=128)
    assert sorted(data.train.row(0).weights) == [0.0, 0.5, 2.0]
    assert "1 skipped" in str(data.reports[0])
    with pytest.raises(InputError, match="'w' is -1; expected a weight of 0 or more"):
        opened(write(tmp_path, {"messages": talk, "w": -1}), None, row_weight="w")


def test_long_conversations_are_split_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "ask ", "completion": "z" * 100})
    data = opened(path, None, length=48, long="split")
    assert "3 rows" in str(data.reports[0])
    assert "1 split" in str(data.reports[0])
    rows = data.train.parts[0].rows
    trained = sum(int((rows.row(i).targets >= 0).sum()) for i in range(3))
    assert trained == 101 - 2  # each part's first token has nothing before it


def test_a_look_at_pairs_shows_both_answers(tmp_path: Path) -> None:
    found = look(SourceConfig(path=write(tmp_path, PAIR)), open_tokenizer("bytes"))
    assert found.form == "preferences"
    assert len(found.examples) == 2


def test_margins_are_what_chosen_answers_are_held_against(tmp_path: Path) -> None:
    rows = [PAIR | {"margin": 2}, {"prompt": "b ", "chosen": "1", "rejected": "2", "margin": 0.5}]
    data = opened(write(tmp_path, *rows), Objective(kind="reward"), length=128)
    row = data.train.row(0)
    assert row.references == (2.0, 0.0, 0.5, 0.0, 0.0)
    assert len(row.references) == len(row.lengths)
    other = opened(write(tmp_path, PAIR), Objective(kind="reward"), length=128)
    assert other.train.row(0).references == ()
    with pytest.raises(InputError, match="'margin' is 'much'; expected a number"):
        opened(write(tmp_path, PAIR | {"margin": "much"}), Objective(kind="reward"))
