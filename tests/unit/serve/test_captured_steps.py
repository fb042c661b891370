"""Steps as graphs: filled up to sizes, one step late, and the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of, engine_with_graphs  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.batching import Finish  # noqa: E402
from tutti.batching.settings import Settings  # noqa: E402
from tutti.nn import Model, greedy  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402
from tutti.serve.captured_steps import CapturedSteps  # noqa: E402
from tutti.serve.inputs import Shape  # noqa: E402

PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9, [1], [6, 5, 4, 3, 2, 1, 9, 8, 7]]


@pytest.fixture(scope="module")
def model() -> Model:
    return make(spec_of("dense"))


@pytest.mark.parametrize(
    "kind", ["dense", "one-kv-head", "tied", "alibi", "positions", "latent", "experts"]
)
def test_graphs_give_the_same_tokens(kind: str) -> None:
    model = make(spec_of(kind))
    engine = engine_with_graphs(model, slots=3, page_size=4, max_length=64)
    found = engine.generate(PROMPTS, SamplingParameters(max_tokens=7, ignore_end=True))
    assert [list(done.tokens) for done in found] == greedy(model, PROMPTS, 7)
    assert engine.worker._graphs.count >= 2
    assert engine.worker.settings.ahead == 2


def test_few_pages_and_chunks_change_nothing(model: Model) -> None:
    options = {"slots": 3, "page_size": 2, "pages": 14, "most_tokens": 6, "max_length": 32}
    engine = engine_with_graphs(model, **options)
    found = engine.generate(PROMPTS, SamplingParameters(max_tokens=8, ignore_end=True))
    assert [list(done.tokens) for done in found] == greedy(model, PROMPTS, 8)
    assert engine.counters.preemptions > 0, "pages were meant to be few"


def test_all_wishes_go_together(model: Model) -> None:
    """Rows that a graph cannot hold take their step out of it, and others' tokens stay."""
    r = random.Random(3)
    plain = SamplingParameters(max_tokens=8, ignore_end=True)
    kinds = [
        plain,
        replace(plain, temperature=0.9, seed=5),
        replace(plain, temperature=1.2, top_k=5, seed=6),
        replace(plain, repetition_penalty=1.5),
        replace(plain, logit_bias={4: 3.0}, max_tokens=3),
        replace(plain, logprobs=2, max_tokens=4),
        replace(plain, min_tokens=3, stop_tokens=tuple(range(0, 60, 2)), max_tokens=12),
        replace(plain, temperature=0.7, n=2, seed=9),
    ]
    prompts = [[r.randrange(67) for _ in range(r.randint(1, 11))] for _ in range(24)]
    wishes = [r.choice(kinds) for _ in prompts]
    options = {"slots": 5, "page_size": 4, "max_length": 64}
    one = engine_of(model, **options).generate(prompts, wishes)
    other = engine_with_graphs(model, **options).generate(prompts, wishes)
    for own, captured in zip(one, other, strict=True):
        assert [a.tokens for a in own.answers] == [a.tokens for a in captured.answers]


def test_a_stop_token_ends_a_sequence_that_is_a_step_ahead(model: Model) -> None:
    first = engine_of(model).generate([PROMPTS[0]], SamplingParameters(max_tokens=6))[0].tokens
    wish = SamplingParameters(max_tokens=6, stop_tokens=(first[2],))
    engine = engine_with_graphs(model, slots=2)
    stopped, _ = engine.generate([PROMPTS[0], PROMPTS[2]], wish)
    assert stopped.answers[0].finish is Finish.STOP
    assert stopped.tokens == first[: len(stopped.tokens)]
    assert len(stopped.tokens) <= 3
    assert engine.scheduler.is_idle
    while engine._launched:
        engine.step()
    assert engine.scheduler.pool.available == engine.worker.settings.usable_pages


def test_bad_numbers_fail_alone_and_are_found(model: Model) -> None:
    broken = make(spec_of("dense"))
    with torch.no_grad():
        assert broken.embedding is not None
        broken.embedding.token.weight[60] = torch.nan
    engine = engine_with_graphs(broken, slots=4)
    good, bad = engine.generate(
        [PROMPTS[0], [1, 60, 2]], SamplingParameters(max_tokens=5, ignore_end=True)
    )
    assert list(good.tokens) == greedy(broken, [PROMPTS[0]], 5)[0]
    assert bad.answers[0].finish is Finish.FAILED
    assert "0.token was the first" in (bad.answers[0].reason or "")


def test_a_step_fits_the_size_it_is_filled_up_to() -> None:
    settings = Settings(slots=100, pages=9999, page_size=16, max_length=9000, most_tokens=3000)
    graphs = CapturedSteps.__new__(CapturedSteps)
    graphs._settings, graphs._pool = settings, object()
    r = random.Random(0)
    sizes = set()
    for _ in range(3000):
        rows = r.randint(1, 100)
        single = r.random() < 0.5
        tokens = rows if single else r.randint(rows + 1, 3000)
        samples = r.randint(0, tokens)
        most = 1 if single else r.randint(2, tokens - rows + 1)
        long_rows = 0 if single else r.randint(1, min(rows, tokens - rows))
        shape = Shape(tokens, rows, samples, most, r.randint(most, 9000), long_rows)
        wide = graphs.shape_for(shape)
        if wide is not None:
            assert graphs.captures(wide) == (wide.tokens <= 2048)
            assert all(a >= b for a, b in zip(wide, shape, strict=True)), (wide, shape)
            assert wide.rows <= settings.slots
            assert wide.tokens >= wide.rows
            assert wide.tokens <= settings.most_tokens
            assert wide.most_keys <= settings.table_width * settings.page_size
            if graphs.captures(wide):
                sizes.add(wide)
    assert len(sizes) < 240, "too many graphs"


def test_steps_are_captured_before_anybody_waits(model: Model) -> None:
    cold, warm = engine_with_graphs(model, slots=6), engine_with_graphs(model, slots=6)
    seen: list[tuple[int, int]] = []
    warm.warm_up(lambda done, of: seen.append((done, of)))
    sizes = warm.worker._graphs.count
    # of 1, 2, 4 and 6 rows; of prompts up to 2,048 tokens, few or many
    assert sizes == 4 + 2 * 7
    assert seen[-1][0] == seen[-1][1] >= sizes
    prompts = [[5, 6, 7], [8, 9], [1]]
    wanted = SamplingParameters(max_tokens=9, ignore_end=True)
    assert [d.tokens for d in warm.generate(prompts, wanted)] == [
        d.tokens for d in cold.generate(prompts, wanted)
    ]
    assert warm.worker._graphs.count == sizes, "all that came was captured before"
