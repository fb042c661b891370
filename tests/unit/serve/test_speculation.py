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
from tutti.batching.prices import LinearPrices  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface.tokenizer import ByteTokenizer  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.nn import Model  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402
from tutti.serve.draft_model import DraftModel, check_draft  # noqa: E402
from tutti.serve.drafting import NgramDrafter, Pace, Wanted  # noqa: E402
from tutti.serve.speculation import AGAIN, TRIES, Speculation, Switch  # noqa: E402

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
    engine.speculation = Speculation(drafter, Pace(most), engine.counters)  # type: ignore[arg-type]
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
    assert pace.counts({1: 9}) == {1: 2}
    for _ in range(9):
        pace.note(1, 4, 4)
    assert pace.counts({1: 9}) == {1: 4}
    for _ in range(12):
        if pace.counts({1: 9}):
            pace.note(1, 1, 0)
    counts = [pace.counts({1: 9}) for _ in range(6)]
    assert {} in counts


def test_guesses_behind_a_wrong_one_say_nothing() -> None:
    pace = Pace(8)
    for _ in range(20):
        pace.note(1, 8, 4)  # four right, one wrong, three never judged: right in 4 of 5
    assert pace._records[1].rate == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("step_s", "token_s", "sequences", "expected"),
    [
        (1.0, 0.0, 1, 8),
        (1.0, 0.0, 64, 8),
        (1.0, 0.05, 64, 1),
        (1.0, 0.002, 64, 5),
        (0.0, 1.0, 3, 0),
    ],
)
def test_prices_say_how_many_tokens_are_tried(
    step_s: float, token_s: float, sequences: int, expected: int
) -> None:
    """A token that costs nothing is tried, one that costs a step is not; and what lies between."""
    pace = Pace(8, LinearPrices(step_s=step_s, token_s=token_s))
    for name in range(sequences):
        for _ in range(30):
            pace.note(name, 5, 4)
    counts = pace.counts(dict.fromkeys(range(sequences), 10))
    assert set(counts.values()) == ({expected} if expected else set())

    def speed(tried: int) -> float:
        gained = sum(0.8**i for i in range(tried + 1))
        return gained * sequences / (step_s + token_s * sequences * (1 + tried))

    assert max(range(9), key=speed) == expected


@pytest.mark.parametrize("pays", [True, False])
def test_guesses_that_do_not_pay_are_turned_off(pays: bool) -> None:
    """Two tokens a step with guesses, one without; a step with them takes 1.5 times or thrice."""
    switch = Switch()
    ways = []
    for _ in range(AGAIN + 2 * TRIES):
        on = switch.on(8)
        ways.append(on)
        switch.note(8, on, 16 if on else 8, (1.5 if pays else 3.0) if on else 1.0)
    assert ways[: 2 * TRIES] == [True] * TRIES + [False] * TRIES, "both are tried"
    assert set(ways[2 * TRIES : AGAIN]) == {pays}, "the better one runs"
    assert ways[AGAIN:].count(not pays) == TRIES - TRIES // 2, "the other is tried again"
    assert switch.on(64), "other sizes are tried by themselves"


def test_the_other_way_is_chosen_when_it_pays_now() -> None:
    switch = Switch()
    ways = []
    for count in range(3 * AGAIN):
        on = switch.on(8)
        ways.append(on)
        cheap = count >= AGAIN - TRIES
        switch.note(8, on, 16 if on else 8, (1.5 if cheap else 3.0) if on else 1.0)
    assert not any(ways[2 * TRIES : AGAIN - 1])
    assert all(ways[2 * AGAIN - TRIES : 2 * AGAIN]), "from its next try on"


@pytest.mark.parametrize("ahead", [1, 2])
def test_guesses_turned_on_and_off_change_nothing(model: Model, ahead: int) -> None:
    """A switch that turns at random: the same tokens, with one or two steps under way."""
    plain = answers_of(engine_of(model))

    class Coin(Switch):
        def __init__(self) -> None:
            super().__init__()
            self.random, self.ways = np.random.default_rng(5), set[bool]()

        def on(self, rows: int) -> bool:
            if self.random.random() < 0.3:
                self.ways.add(not getattr(self, "way", False))
                self.way = not getattr(self, "way", False)
            return getattr(self, "way", False)

    engine, coin = engine_of(model, ahead=ahead), Coin()
    engine.speculation = Speculation(NgramDrafter(1, 1), Pace(4), engine.counters, switch=coin)
    assert answers_of(engine) == plain
    assert coin.ways == {True, False}
    assert engine.counters.guessed_tokens


def test_a_draft_model_with_other_tokens_is_refused(model: Model) -> None:
    values = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}  # fmt: skip
    with pytest.raises(InputError) as refused:
        check_draft(model.spec, read_config(values, "small"))
    assert str(refused.value) == (
        "draft model small has a vocabulary of 99 tokens, dense one of 67; a draft model must have "
        "the same tokens"
    )
