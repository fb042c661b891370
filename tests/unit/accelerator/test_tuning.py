"""What is fastest, from measured times; the clock itself decides nothing here."""

from __future__ import annotations

import itertools

import pytest
import torch

from tutti.accelerator import open_accelerator, tuning
from tutti.accelerator.choices import Size
from tutti.accelerator.operators import Operators
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.accelerator.profiling.timer import timer_for
from tutti.accelerator.profiling.workspace import Workspace
from tutti.accelerator.registry import REFERENCES, Implementation, register, unregister
from tutti.accelerator.tuning import Measured, Question, fastest, measure, origin
from tutti.errors import InputError
from tutti.hardware.chip import Dtype


def row(size_class: int, operator: str = "attention", **seconds: float) -> Measured:
    return Measured(
        operator=operator, shape=(1,), size=Size("bfloat16", size_class), seconds=seconds
    )


def test_the_fastest_per_size_class() -> None:
    found = fastest([row(9, reference=4.0, sdpa=1.0), row(3, reference=1.0, sdpa=2.0)])
    assert [(c.size_class, c.implementation, c.speedup) for c in found] == [
        (3, "reference", 1.0),
        (9, "sdpa", 4.0),
    ]


def test_shapes_of_one_class_decide_together() -> None:
    """Neither a long nor a short call counts for more: ratios are compared."""
    rows = [row(5, a=1.0, b=2.0), row(5, a=1.0, b=2.0), row(5, a=150.0, b=100.0)]
    (choice,) = fastest(rows)
    assert choice.implementation == "a"
    assert choice.speedup is None  # the reference was not among them


def test_only_what_takes_all_shapes_is_chosen() -> None:
    (choice,) = fastest([row(5, a=1.0, b=2.0), row(5, b=2.0, reference=3.0)])
    assert choice.implementation == "b"


def test_of_equals_the_higher_rank() -> None:
    ranks = {("attention", "cudnn"): 30, ("attention", "sdpa"): 10}
    (choice,) = fastest([row(5, cudnn=1.01, sdpa=1.0)], ranks)
    assert choice.implementation == "cudnn"
    (choice,) = fastest([row(5, cudnn=1.2, sdpa=1.0)], ranks)
    assert choice.implementation == "sdpa"


def test_operators_are_kept_apart() -> None:
    found = fastest([row(5, a=1.0, b=2.0), row(5, "rms_norm", a=2.0, b=1.0)])
    assert {c.operator: c.implementation for c in found} == {"attention": "a", "rms_norm": "b"}


QUESTION = Question(model="smollm2-135m", tokens=(16,), dtypes=("fp32",))


@pytest.fixture(scope="module")
def told() -> tuple[list[Measured], list[str]]:
    """Return what was measured of the question, and what was said meanwhile."""
    seen: list[str] = []
    rows = measure(
        open_accelerator("cpu"),
        QUESTION,
        budget_s=60.0,
        progress=lambda what, done, total: seen.append(f"{what} {done < total}"),
    )
    return rows, seen


def test_measuring_small_shapes(told: tuple[list[Measured], list[str]]) -> None:
    rows, seen = told
    assert {r.operator for r in rows} == {"adamw", "attention", "embedding"}
    assert seen
    assert all(line.endswith("True") for line in seen)
    for one in rows:
        assert one.dtype == "float32"
        assert len(one.seconds) > 1
        assert one.ranked[0][1] == min(one.seconds.values())
        assert one.plain()["size_class"] == one.size.size_class
    found = origin(open_accelerator("cpu"), QUESTION)
    assert found.startswith("measured on CPU, smollm2-135m, torch ")


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        ("adamw", (64,)),
        ("grouped_linear", (8, 16, 16, 2)),
        ("linear_cross_entropy", (8, 32, 16)),
        ("add_rms_norm", (8, 16)),
        ("rotary", (8, 2, 16)),
        ("gated_activation", (8, 16)),
        ("permute", (8, 16, 2)),
    ],
)
def test_every_operator_can_be_measured(operator: str, shape: tuple[int, ...]) -> None:
    """The host has one implementation of most; a second one makes them a contest."""
    register(Implementation(operator=operator, name="same", function=REFERENCES[operator]))
    try:
        accelerator = open_accelerator("cpu")
        found = tuning._measured(
            accelerator,
            ProfileCase(operator, shape),
            Workspace(accelerator, Dtype.FP32),
            timer_for(accelerator),
        )
    finally:
        unregister(operator, "same")
    assert found is not None
    assert {"reference", "same"} <= set(found.seconds)
    assert min(found.seconds.values()) > 0


def test_time_that_is_up(
    monkeypatch: pytest.MonkeyPatch, told: tuple[list[Measured], list[str]]
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("tutti.accelerator.tuning._now", lambda: float(next(ticks)))
    rows = measure(open_accelerator("cpu"), QUESTION, budget_s=1.5)
    operators = [row.operator for row in rows]
    assert len(operators) == len(set(operators)), "one call of each, and no second one"
    assert len(operators) < len(QUESTION.cases())
    assert set(operators) == {row.operator for row in told[0]}


def test_the_sizes_are_those_that_the_choice_is_made_by(
    told: tuple[list[Measured], list[str]],
) -> None:
    rows, _ = told
    from tutti.accelerator.choices import Choices

    table = Choices.of(fastest(rows), "here")
    q = torch.zeros(16, 9, 64)
    attention = next(r for r in rows if r.operator == "attention")
    assert table.best("attention", (q, q, q)) == attention.ranked[0][0]
    assert Operators("cpu", choices=table, forced={}).preferred("attention")[1] == "measured"


def test_a_bad_question() -> None:
    with pytest.raises(InputError, match="--dtype: 'fp23'; did you mean 'fp32'"):
        Question(dtypes=("fp23",))
