"""Tasks: formats, what is scored of them, figures, what is refused, when a run ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import InputError
from tutti.huggingface.tokenizer import ByteTokenizer
from tutti.train.evaluation.config import EvaluateConfig, TaskConfig
from tutti.train.evaluation.during import Evaluations, keep, recall
from tutti.train.evaluation.tasks import EvaluationTask, open_task


def task_of(tmp_path: Path, *records: Any, longest: int = 64, **words: Any) -> EvaluationTask:
    path = tmp_path / "task.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return open_task(TaskConfig(path=str(path), **words), ByteTokenizer(), longest=longest)


def test_a_choice_is_scored_and_its_context_is_not(tmp_path: Path) -> None:
    task = task_of(
        tmp_path,
        {"context": "2 + 2 =", "choices": ["4", "five"], "answer": 0},
        {"question": "Sky?", "choices": ["red", "blue"], "answer": "B"},
        {"context": "Ends with ", "choices": ["a", "b"], "answer": "b"},
    )
    scored = [bytes(item.tokens[item.first :]).decode() for item in task.items]
    assert scored == [" 4", " five", " red", " blue", " a", " b"]
    assert task.right == ((0, 2, 0), (2, 4, 1), (4, 6, 1))
    found = task.figures([-3.0, -4.0, -1.0, -2.0, -1.0, -0.5])
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["accuracy_by_byte"] == pytest.approx(1 / 3)  # −3/2 < −4/5; −1/4 > −2/5
    assert found["answer_loss"] == pytest.approx((3 + 2 + 0.5) / 3)


def test_a_text_longer_than_a_row_is_predicted_once(tmp_path: Path) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    task = task_of(tmp_path, {"text": text}, longest=8)
    said = b"".join(bytes(item.tokens[item.first :]) for item in task.items)
    assert said.decode() == text
    assert max(len(item.tokens) for item in task.items) <= 8
    found = task.figures([-float(len(item.tokens) - item.first) for item in task.items])
    assert found["loss"] == pytest.approx(1.0)
    assert found["perplexity"] == pytest.approx(math.e)
    assert found["bits_per_byte"] == pytest.approx(1 / math.log(2))


def test_a_long_context_loses_its_beginning(tmp_path: Path) -> None:
    task = task_of(
        tmp_path, {"context": "x" * 50, "choices": ["yes", "no"], "answer": 1}, longest=16
    )
    assert task.cut == 2
    assert [len(item.tokens) for item in task.items] == [16, 16]
    assert bytes(task.items[0].tokens[task.items[0].first :]).decode() == " yes"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"context": "a", "choices": ["b"], "answer": 0}, "line 1: 'choices' is .*two texts"),
        ({"context": "a", "choices": ["b", ""], "answer": 0}, "line 1: 'choices' is"),
        ({"context": "a", "choices": ["b", "c"], "answer": 2}, "line 1: 'answer' is 2; expected"),
        ({"context": "a", "choices": ["b", "c"]}, "line 1: 'answer' is "),
        ({"contex": "a", "choices": ["b", "c"], "answer": 0}, "no field 'context'; did you mean"),
        ({"text": 3}, "line 1: 'text' is 3"),
    ],
)
def test_a_bad_record_is_one_line(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        task_of(tmp_path, record)


def test_an_empty_or_missing_task(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no records"):
        task_of(tmp_path)
    with pytest.raises(InputError, match=r"no.jsonl: cannot be read \(No such file"):
        open_task(TaskConfig(path=str(tmp_path / "no.jsonl")), ByteTokenizer(), longest=8)


def test_the_best_is_known_a_run_ends_in_time_and_goes_on_as_it_was(tmp_path: Path) -> None:
    task = task_of(tmp_path, {"context": "a", "choices": ["b", "c"], "answer": 0})
    config = EvaluateConfig(tasks=(TaskConfig(path="task.jsonl"),), every=2, patience=2)
    run = Evaluations(config, [task])
    assert [step for step in range(1, 8) if run.due(step, 7)] == [2, 4, 6, 7]
    values = {2: 0.5, 4: 0.75, 6: 0.25, 8: 0.75}
    seen = []
    for step, value in values.items():
        found = run.take(step, lambda _task, value=value: {"accuracy": value})
        seen.append((run.improved, run.is_over, run.loss(found)))
    assert seen == [(True, False, -0.5), (True, False, -0.75), (False, False, -0.25),
                    (False, True, -0.75)]  # fmt: skip
    keep(run, tmp_path)
    again = Evaluations(config, [task])
    recall(again, tmp_path, 6, lambda text: text)
    assert (again.best, again.worse, again.last_step) == (0.75, 1, 6)
    with pytest.raises(InputError, match=r"evaluate\.best: 'task/acuracy' is no figure"):
        Evaluations(EvaluateConfig(tasks=config.tasks, best="task/acuracy"), [task])


def test_what_a_file_may_not_say() -> None:
    with pytest.raises(ValueError, match="'patience' counts evaluations"):
        EvaluateConfig(tasks=(TaskConfig(path="a"),), patience=1)
    with pytest.raises(ValueError, match="two tasks are called 'a'"):
        EvaluateConfig(tasks=(TaskConfig(path="a.jsonl"), TaskConfig(path="b/a.txt")))
