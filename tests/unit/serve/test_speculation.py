"""Guesses change how many steps it takes, and no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.batching import Finish  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface.tokenizer import ByteTokenizer  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.nn import Model  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402
from tutti.serve.draft_model import DraftModel, check_draft  # noqa: E402
from tutti.serve.drafting import NgramDrafter, Pace, Wanted  # noqa: E402

PROMPTS = [[5, 9, 2, 5, 9, 2, 5], [7, 8], [3] * 9, [1, 2, 3, 4, 5, 6]]
WISHES = [
    SamplingParameters(max_tokens=20, ignore_end=True),
    SamplingParameters(max_tokens=17, temperature=0.5, seed=3, ignore_end=True),
    SamplingParameters(max_tokens=20, temperature=1.0, top_p=0.8, seed=4, n=2, ignore_end=True),
    SamplingParameters(max_tokens=12, temperature=0.9, seed=1, logprobs=1, ignore_end=True),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return make(spec_of("dense"))


def guessing(engine: Engine, drafter: object, most: int = 4) -> Engine:
    engine._drafter, engine._pace = drafter, Pace(most)  # type: ignore[assignment]
    return engine


class Oracle:
    """Right four times in five."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers  # by sequence: prompt and answer

    def guess(self, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        found = {}
        for one in wanted:
            coming = self.answers[one.sequence][len(one.tokens) : len(one.tokens) + one.count]
            wrong = [
                (t + 1) % 67 if (len(one.tokens) + i) % 5 == 0 else t for i, t in enumerate(coming)
            ]
            found[one.sequence] = tuple(wrong)
        return found


def answers_of(engine: Engine) -> list[list[tuple[int, ...]]]:
    return [[a.tokens for a in done.answers] for done in engine.generate(PROMPTS, WISHES)]


@pytest.mark.parametrize("pages", [None, 26])
def test_an_oracle_saves_steps_and_changes_no_token(model: Model, pages: int | None) -> None:
    plain = engine_of(model, page_size=2, pages=pages)
    expected = answers_of(plain)
    known = {}
    names = iter(range(100))
    for prompt, answers in zip(PROMPTS, expected, strict=True):
        for answer in answers:
            known[next(names)] = [*prompt, *answer]
    engine = guessing(engine_of(model, page_size=2, pages=pages), Oracle(known))
    assert answers_of(engine) == expected
    assert engine.counters.foreseen_tokens > 20
    if pages is None:
        assert engine.counters.steps < 0.6 * plain.counters.steps
    pool = engine.scheduler.pool
    assert pool.free + len(pool.idle) == engine.scheduler.settings.usable_pages


def test_what_the_text_repeats_is_foreseen(model: Model) -> None:
    expected = answers_of(engine_of(model))
    engine = guessing(engine_of(model), NgramDrafter())
    assert answers_of(engine) == expected
    assert engine.counters.guessed_tokens > 0


def test_a_draft_model_with_the_same_weights_is_always_right(model: Model) -> None:
    expected = answers_of(engine_of(model))
    engine = engine_of(model)
    worker = engine.worker
    drafter = DraftModel(
        model, worker.accelerator, worker.sampler, slots=worker.settings.slots,
        max_length=64, dtype=torch.float64,
    )  # fmt: skip
    assert answers_of(guessing(engine, drafter)) == expected
    assert engine.counters.foreseen_tokens == engine.counters.guessed_tokens > 30


def test_another_draft_model_changes_no_token(model: Model) -> None:
    other = make(spec_of("one-kv-head"))
    expected = answers_of(engine_of(model))
    engine = engine_of(model, page_size=4, pages=30, slots=3)
    worker = engine.worker
    drafter = DraftModel(
        other, worker.accelerator, worker.sampler, slots=3, max_length=64, dtype=torch.float64
    )
    assert answers_of(guessing(engine, drafter)) == expected
    assert engine.counters.guessed_tokens > engine.counters.foreseen_tokens


def test_who_looks_back_does_not_guess(model: Model) -> None:
    own = SamplingParameters(max_tokens=10, repetition_penalty=1.5)
    engine = guessing(engine_of(model), NgramDrafter())
    expected = engine_of(model).generate([PROMPTS[0]], own)[0].tokens
    assert engine.generate([PROMPTS[0]], own)[0].tokens == expected
    assert engine.counters.guessed_tokens == 0


def test_an_end_within_a_guess_ends_the_answer(model: Model) -> None:
    plain = engine_of(model, tokenizer=ByteTokenizer())
    spell = replace(WISHES[0], logit_bias={50: 100.0}, stop=("2222",))
    expected = plain.generate([[50, 50, 50, 50]], spell)[0]
    engine = guessing(engine_of(model, tokenizer=ByteTokenizer()), NgramDrafter())
    found = engine.generate([[50, 50, 50, 50]], spell)[0]
    assert (found.tokens, found.text) == (expected.tokens, expected.text)
    assert found.answers[0].finish is Finish.STOP
    stops = replace(WISHES[0], logit_bias={50: 100.0}, stop_tokens=(50,))
    assert engine.generate([[50, 50, 50, 50]], stops)[0].tokens == (50,)


def test_endings_that_were_there_before() -> None:
    def guess(tokens: list[int], count: int) -> tuple[int, ...]:
        found = NgramDrafter().guess([Wanted(0, 7, np.array(tokens, np.int32), count)])
        return found.get(7, ())

    assert guess([1, 2, 3, 4, 1, 2], 2) == (3, 4)
    assert guess([1, 2, 9, 1, 2, 8, 1, 2], 1) == (8,), "the latest time"
    assert guess([5, 1, 2, 7, 1, 2, 5, 1, 2], 1) == (7,), "the longest ending"
    assert guess([1, 2, 3], 4) == ()


def test_who_is_mostly_wrong_pauses() -> None:
    pace = Pace(4)
    assert pace.count(1) == 2
    for _ in range(9):
        pace.note(1, 4, 4)
    assert pace.count(1) == 4
    for _ in range(12):
        if pace.count(1):
            pace.note(1, 1, 0)
    counts = [pace.count(1) for _ in range(6)]
    assert 0 in counts


def test_a_draft_model_with_other_tokens_is_refused(model: Model) -> None:
    values = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}  # fmt: skip
    with pytest.raises(InputError) as refused:
        check_draft(model.spec, read_config(values, "small"))
    assert str(refused.value) == (
        "draft model small has a vocabulary of 99 tokens, dense one of 67; a draft model must have "
        "the same tokens"
    )
