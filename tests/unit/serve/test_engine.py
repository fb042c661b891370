"""The engine's loop and every wish that a request may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scipy import stats  # noqa: E402

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.batching import Finish  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface.tokenizer import ByteTokenizer  # noqa: E402
from tutti.nn import Batch, Model, greedy  # noqa: E402
from tutti.serve import Completion, Engine, SamplingParameters  # noqa: E402

PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9]
TEN = SamplingParameters(max_tokens=10)
HOT = SamplingParameters(max_tokens=8, temperature=1.0, ignore_end=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return make(spec_of("dense"))


def logits_after(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        batch = Batch.of(model.spec, torch.tensor(list(tokens)), [len(tokens)])
        return model.logits(batch)


def only(found: list[Completion]) -> Completion:
    (one,) = found
    return one


def test_it_takes_the_likeliest_tokens(model: Model) -> None:
    found = engine_of(model).generate(PROMPTS, SamplingParameters(max_tokens=6))
    assert [list(done.tokens) for done in found] == greedy(model, PROMPTS, 6)
    assert [done.prompt for done in found] == [tuple(prompt) for prompt in PROMPTS]
    assert all(done.answers[0].finish is Finish.LENGTH for done in found)
    assert all(0 < (done.times.first_token_s or 0) <= done.times.whole_s for done in found)


# --- random numbers -------------------------------------------------------------------------


def test_neither_company_nor_chunks_nor_giving_way_change_a_draw(model: Model) -> None:
    own = replace(HOT, seed=7)
    alone = only(engine_of(model).generate([PROMPTS[0]], own)).tokens
    assert only(engine_of(model).generate([PROMPTS[0]], own)).tokens == alone
    engine = engine_of(model, slots=3, page_size=2, pages=14, most_tokens=3)
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 3], PROMPTS[0], [4] * 5, [4] * 5]
    found = engine.generate(prompts, [HOT, HOT, HOT, own, HOT, HOT])
    assert found[3].tokens == alone
    assert engine.counters.preemptions > 0, "pages were meant to be few"
    assert only(engine_of(model).generate([PROMPTS[0]], replace(HOT, seed=8))).tokens != alone


def test_samples_of_one_request_differ_and_share_the_prompt(model: Model) -> None:
    engine = engine_of(model, page_size=4)
    own = replace(HOT, n=5, seed=3)
    done = only(engine.generate([PROMPTS[0]], own))
    assert len({answer.tokens for answer in done.answers}) == 5
    assert engine.counters.computed_tokens == 5 + 5 * 7, "the prompt is computed once"
    again = only(engine_of(model, slots=2).generate([PROMPTS[0]], own))
    assert [a.tokens for a in again.answers] == [a.tokens for a in done.answers]


def test_draws_follow_the_distribution(model: Model) -> None:
    engine = engine_of(model, slots=128)
    own = SamplingParameters(max_tokens=1, temperature=0.8, n=100, ignore_end=True)
    wanted = [replace(own, seed=seed) for seed in range(40)]
    found = engine.generate([PROMPTS[1]] * 40, wanted)
    drawn = torch.tensor([answer.tokens[0] for done in found for answer in done.answers])
    likely = torch.softmax(logits_after(model, PROMPTS[1])[-1].double() / 0.8, 0)
    counts = torch.bincount(drawn, minlength=len(likely))
    large = likely * len(drawn) >= 5
    seen = torch.cat((counts[large], counts[~large].sum()[None]))
    expected = torch.cat((likely[large], likely[~large].sum()[None])) * len(drawn)
    assert stats.chisquare(seen, expected).pvalue > 0.01


# --- what may be said -----------------------------------------------------------------------


def test_biases_and_bad_words(model: Model) -> None:
    engine = engine_of(model)
    plain = only(engine.generate([PROMPTS[0]], TEN)).tokens
    pushed = SamplingParameters(max_tokens=3, logit_bias={17: 100.0})
    assert only(engine.generate([PROMPTS[0]], pushed)).tokens == (17, 17, 17)
    never = SamplingParameters(max_tokens=8, bad_words=((plain[0],),))
    assert plain[0] not in only(engine.generate([PROMPTS[0]], never)).tokens
    both = SamplingParameters(
        max_tokens=6, logit_bias={17: 100.0, 18: 50.0}, bad_words=((17, 17, 17),)
    )
    assert only(engine.generate([PROMPTS[0]], both)).tokens == (17, 17, 18, 17, 17, 18)


def test_penalties(model: Model) -> None:
    logits = logits_after(model, PROMPTS[0])[-1]
    engine = engine_of(model)
    first = int(logits.argmax())
    heavy = SamplingParameters(max_tokens=1, repetition_penalty=50.0)
    changed = logits.clone()
    own = torch.tensor(PROMPTS[0])
    changed[own] = torch.where(changed[own] > 0, changed[own] / 50, changed[own] * 50)
    assert only(engine.generate([PROMPTS[0]], heavy)).tokens == (int(changed.argmax()),)
    # of what was said, not of the prompt
    said = SamplingParameters(max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0)
    tokens = only(engine.generate([PROMPTS[0]], said)).tokens
    history: list[int] = []
    for token in tokens:
        logits = logits_after(model, [*PROMPTS[0], *history])[-1]
        counts = torch.bincount(torch.tensor(history, dtype=torch.long), minlength=len(logits))
        assert token == int((logits - 2.0 * counts - 2.0 * (counts > 0)).argmax())
        history.append(token)
    assert tokens[0] == first


def test_penalties_outlive_giving_way_and_forks(model: Model) -> None:
    own = replace(HOT, max_tokens=10, repetition_penalty=1.8, frequency_penalty=0.5, n=2, seed=5)
    wanted = [a.tokens for a in only(engine_of(model).generate([PROMPTS[0]], own)).answers]
    engine = engine_of(model, slots=3, page_size=2, pages=13, most_tokens=4)
    found = engine.generate([[1, 2, 3], PROMPTS[0], [9] * 6], [HOT, own, HOT])
    assert [a.tokens for a in found[1].answers] == wanted
    assert engine.counters.preemptions > 0


class Even:
    """Only even tokens, then only the one before the last."""

    def new(self) -> Even:
        return Even()

    def allowed(self, tokens: Sequence[int]) -> np.ndarray:
        allowed = np.zeros(67, np.bool_)
        allowed[::2] = True
        if len(tokens) == 3:
            allowed[:] = False
            allowed[tokens[-2]] = True
        return allowed


def test_a_mask_says_which_tokens_may_come(model: Model) -> None:
    own = replace(HOT, max_tokens=4, masks=Even())
    done = only(engine_of(model, slots=2).generate([PROMPTS[0]], replace(own, n=4)))
    for answer in done.answers:
        assert all(token % 2 == 0 for token in answer.tokens[:3])
        assert answer.tokens[3] == answer.tokens[1]


# --- ends -----------------------------------------------------------------------------------


def test_stop_tokens_end_an_answer_but_not_too_early(model: Model) -> None:
    plain = only(engine_of(model).generate([PROMPTS[0]], TEN)).tokens
    third = plain[2]
    before = plain.index(third)
    engine = engine_of(model, end=(third,))
    done = only(engine.generate([PROMPTS[0]], TEN))
    assert done.tokens == plain[: before + 1]
    assert done.answers[0].finish is Finish.STOP
    ignored = SamplingParameters(max_tokens=10, ignore_end=True)
    assert only(engine.generate([PROMPTS[0]], ignored)).tokens == plain[:10]
    later = SamplingParameters(max_tokens=10, min_tokens=6)
    tokens = only(engine.generate([PROMPTS[0]], later)).tokens
    assert third not in tokens[:6]
    assert len(tokens) >= 6
    own = SamplingParameters(max_tokens=10, stop_tokens=(plain[0],))
    assert only(engine_of(model).generate([PROMPTS[0]], own)).tokens == plain[:1]


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(model: Model) -> None:
    engine = engine_of(model, tokenizer=ByteTokenizer())
    spell = {ord("a"): 100.0} if model.spec.vocab > 97 else {50: 100.0}
    (token,) = spell
    own = SamplingParameters(max_tokens=9, logit_bias=spell, stop=(chr(token) * 3,))
    done = only(engine.generate([[1, 2]], own))
    assert done.text == ""
    assert done.tokens == (token,) * 3
    assert done.answers[0].finish is Finish.STOP
    half = replace(own, stop=(chr(token) * 2 + "?",), max_tokens=4)
    assert only(engine.generate([[1, 2]], half)).text == chr(token) * 4, "held back, then said"


def test_pieces_add_up_to_the_answer(model: Model) -> None:
    engine = engine_of(model, tokenizer=ByteTokenizer(), slots=2)
    whole = engine.generate(PROMPTS, TEN)
    texts, tokens = {}, {}
    for piece in engine_of(model, tokenizer=ByteTokenizer(), slots=2).stream(PROMPTS, TEN):
        texts[piece.request] = texts.get(piece.request, "") + (piece.text or "")
        tokens[piece.request] = (*tokens.get(piece.request, ()), *piece.tokens)
    assert [texts[n] for n in range(3)] == [done.text for done in whole]
    assert [tokens[n] for n in range(3)] == [done.tokens for done in whole]


def test_who_stops_reading_cancels(model: Model) -> None:
    engine = engine_of(model)
    pieces = engine.stream(PROMPTS, SamplingParameters(max_tokens=20))
    next(pieces)
    pieces.close()
    assert engine.is_idle
    pool = engine.scheduler.pool
    assert pool.free + len(pool.idle) == engine.scheduler.settings.usable_pages


# --- numbers beside tokens ------------------------------------------------------------------


def test_logprobs_of_what_was_said_and_of_the_prompt(model: Model) -> None:
    own = SamplingParameters(max_tokens=4, logprobs=3, prompt_logprobs=2)
    engine = engine_of(model, most_tokens=2, page_size=2)
    engine.generate([PROMPTS[0]], TEN)  # its pages are cached now
    done = only(engine.generate([PROMPTS[0]], own))
    whole = torch.log_softmax(logits_after(model, [*PROMPTS[0], *done.tokens]).float(), -1)
    said = done.answers[0].logprobs
    assert said is not None
    for place, one in enumerate(said):
        row = whole[len(PROMPTS[0]) - 1 + place]
        assert one.token == done.tokens[place]
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-5)
        assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
    prompt = done.prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert len(prompt) == len(PROMPTS[0])
    for place, found in enumerate(prompt[1:]):
        assert found is not None
        assert found.token == PROMPTS[0][place + 1]
        assert found.logprob == pytest.approx(float(whole[place, found.token]), abs=1e-5)
        assert len(found.top) == 2


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(model: Model, pooling: str) -> None:
    engine = engine_of(model, most_tokens=4, page_size=2)
    found = engine.embed(PROMPTS, pooling)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        batch = Batch.of(model.spec, torch.tensor(prompt), [len(prompt)])
        with torch.no_grad():
            assert model.head is not None
            states = model.head.hidden(model.stream(None, batch)[0]).float()
        expected = states[-1] if pooling == "last" else states.mean(0)
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="pooling is 'first'"):
        engine.embed(PROMPTS, "first")


# --- bad input ------------------------------------------------------------------------------


def test_a_request_with_bad_numbers_fails_alone(model: Model) -> None:
    broken = make(spec_of("dense"))
    with torch.no_grad():
        embedding = broken.embedding
        assert embedding is not None
        embedding.token.weight[60] = torch.nan
    engine = engine_of(broken)
    good, bad = engine.generate([PROMPTS[0], [1, 60, 2]], SamplingParameters(max_tokens=5))
    assert list(good.tokens) == greedy(broken, [PROMPTS[0]], 5)[0]
    answer = bad.answers[0]
    assert answer.finish is Finish.FAILED
    assert answer.tokens == ()
    assert answer.reason == (
        "request 1: its logits were no numbers in step 0; 0.token was the first that was not finite"
    )
    assert engine.generate([PROMPTS[1]], SamplingParameters(max_tokens=3))[0].tokens


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"temperature": -0.1}, "'temperature' is -0.1; it may be 0.0 to 100.0"),
        ({"top_p": 1.5}, "'top_p' is 1.5; it may be 0.0 to 1.0"),
        ({"min_p": -1.0}, "'min_p' is -1.0"),
        ({"top_k": -1}, "'top_k' is -1; it may be at least 0"),
        ({"repetition_penalty": 0.0}, "'repetition_penalty' is 0.0; it may be 0.01 to 100.0"),
        ({"presence_penalty": 3.0}, "'presence_penalty' is 3.0; it may be -2.0 to 2.0"),
        ({"frequency_penalty": float("nan")}, "'frequency_penalty' is nan"),
        ({"max_tokens": 0}, "'max_tokens' is 0; it may be at least 1"),
        ({"min_tokens": 99}, "'min_tokens' is 99; it may be 0 to 64"),
        ({"n": 1000}, "'n' is 1000; it may be 1 to 128"),
        ({"logprobs": 500}, "'logprobs' is 500; it may be 0 to 100"),
        ({"logit_bias": {67: 1.0}}, "'logit_bias': token 67; the vocabulary has 0 to 66"),
        ({"stop_tokens": (-1,)}, "'stop_tokens': token -1"),
        ({"stop": ("",)}, "an empty text in 'stop'"),
        ({"stop": ("x",)}, "'stop' needs a tokenizer, and the folder has none"),
    ],
)
def test_wishes_that_cannot_be_are_refused(model: Model, options: dict, line: str) -> None:
    engine = engine_of(model)
    with pytest.raises(InputError) as refused:
        engine.generate([[1], [2]], SamplingParameters(**options))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert engine.is_idle, "the first prompt was taken back"


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ([], "request 0: the prompt is empty; give at least one token"),
        ([1, 67], "request 0: token 67; the vocabulary has 0 to 66"),
        ([1] * 60, "a prompt of 60 tokens and 64 new ones are 124; the context holds 64"),
        ("text", "request 0: a prompt of text needs a tokenizer"),
    ],
)
def test_prompts_that_cannot_be_are_refused(model: Model, prompt: object, line: str) -> None:
    with pytest.raises(InputError) as refused:
        engine_of(model).add(prompt)  # type: ignore[arg-type]
    assert line in str(refused.value)


def test_memory_that_holds_no_request_is_said_with_numbers(model: Model) -> None:
    with pytest.raises(InputError) as refused:
        engine_of(model, memory_bytes=200_000, pages=None)
    assert str(refused.value) == (
        "weights take 156.2 KiB of 195.3 KiB; one request of 64 tokens needs 40.0 KiB of pages and "
        "39.1 KiB is left: give more memory, or a shorter max_length"
    )
    with pytest.raises(InputError, match="no option 'page_sise'; did you mean 'page_size'"):
        Engine.from_pretrained("nowhere", page_sise=3)
