from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.accelerator import Segments
from tutti.accelerator.choices import (
    OVERRIDE,
    Choice,
    Choices,
    Size,
    bucket,
    file_name,
    save,
    size_of,
)
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.operators import Operators
from tutti.errors import InputError

ROWS = (
    Choice(operator="attention", dtype="float32", size_class=4, implementation="reference"),
    Choice(operator="attention", dtype="float32", size_class=9, implementation="sdpa", speedup=1.5),
)


def chosen(elements: int, dtype: torch.dtype = torch.float32) -> str | None:
    return Choices.of(ROWS, "here").best("attention", (torch.empty(elements, dtype=dtype),))


def test_the_nearest_size_is_taken() -> None:
    assert chosen(1) == "reference"
    assert chosen(4**4) == "reference"
    assert chosen(4**6) == "reference"  # 2 classes from the one, 3 from the other
    assert chosen(4**7) == "sdpa"
    assert chosen(4**12) == "sdpa"


def test_another_dtype_or_operator_was_not_measured() -> None:
    assert chosen(1, torch.bfloat16) is None
    assert Choices.of(ROWS, "here").best("linear", (torch.empty(1),)) is None
    assert Choices().best("linear", (torch.empty(1),)) is None
    assert Choices.of(ROWS, "here").best("attention", ([],)) is None


@given(st.integers(1, 1 << 40))
def test_size_classes_are_powers_of_four(elements: int) -> None:
    assert 4 ** bucket(elements) <= elements < 4 ** (bucket(elements) + 1)


def test_the_size_of_a_call() -> None:
    assert size_of((torch.empty(3, 7, dtype=torch.bfloat16),)) == Size("bfloat16", 2)
    assert size_of(([torch.empty(5)], 1)) == Size("float32", 1)
    tokens, table = torch.zeros(64, dtype=torch.int64), torch.empty(5, 3, dtype=torch.float16)
    assert size_of((tokens, table)) == Size("float16", 3)  # numbers of tokens have no dtype to tell
    assert size_of((table, Segments.batch(2, 3))) == Size("float16", 1)
    assert size_of((table, Segments.of_lengths((2, 4)))) is None  # packed: not what was measured
    assert size_of(([], 1)) is None
    assert size_of((tokens,)) is None
    assert bucket(0) == 0


def test_written_and_read(tmp_path: Path) -> None:
    save(ROWS, "measured here", tmp_path / "table.json")
    table = Choices.load(tmp_path / "table.json")
    assert table == Choices.of(ROWS, "measured here")
    assert table.names("attention") == ("reference", "sdpa")
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_measured_choice_comes_before_rank() -> None:
    operators = Operators("cpu", choices=Choices.of(ROWS, "here"), forced={})
    q = torch.empty(8, 2, 16)
    assert operators.chosen("attention", q, q, q, [1], scale=1.0).name == "reference"
    assert operators.preferred("attention") == ("reference or sdpa", "measured")


def test_a_choice_that_is_not_here_is_passed_over() -> None:
    rows = [Choice(operator="attention", dtype="float32", size_class=1, implementation="magic")]
    operators = Operators("cpu", choices=Choices.of(rows, "elsewhere"), forced={})
    q = torch.empty(8, 2, 16)
    assert operators.chosen("attention", q, q, q, [1], scale=1.0).name == "sdpa"
    assert operators.preferred("attention") == ("sdpa", "ranked")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "table.json: line 1: not valid JSON"),
        ("[]", "table.json: expected a mapping of keys to values, found []"),
        ('{"origin": "x"}', "table.json: 'choices' is missing"),
        (
            '{"origin": "x", "choices": [{"operator": "attentoin", "dtype": "float32", '
            '"size_class": 1, "implementation": "sdpa"}]}',
            "table.json: choices[0]: 'operator' is 'attentoin'; did you mean 'attention'?",
        ),
        (
            '{"origin": "x", "choices": [{"operator": "attention", "dtype": "float32", '
            '"size_class": -1, "implementation": "sdpa"}]}',
            "table.json: choices[0]: 'size_class' is -1",
        ),
        ('{"origin": "x", "choises": []}', "did you mean 'choices'?"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        Choices.load(path)
    assert message in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_the_users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(ROWS, "mine", tmp_path / "mine.json")
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "mine.json"))
    assert CpuAccelerator().operators.choices.origin == "mine"
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"none\.json: no such file"):
        CpuAccelerator()
    monkeypatch.delenv(OVERRIDE)
    assert Choices.of_chip("no chip of this name") == Choices()


def test_names_of_files() -> None:
    assert file_name("A100-80") == "a100-80"
    assert file_name("Ascend 910B/X") == "ascend-910b-x"
