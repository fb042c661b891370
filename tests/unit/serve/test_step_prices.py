"""Prices of steps, measured before the first request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of, engine_with_graphs  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.batching import StepSize  # noqa: E402
from tutti.nn import Model, greedy  # noqa: E402
from tutti.serve import SamplingParameters, step_prices  # noqa: E402
from tutti.serve.inputs import Shape  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Model:
    return make(spec_of("dense"))


class Clock:
    """Steps take what a formula says."""

    def __init__(self, back_s: float) -> None:
        self.now, self.back_s = 0.0, back_s

    def rehearse(self, shape: Shape, keys: int) -> Callable[[], None]:
        self.now += 100.0  # writing a step down is no part of it
        return lambda: self._run(shape, keys)

    def _run(self, shape: Shape, keys: int) -> None:
        self.now += 1.0 + 0.01 * shape.tokens
        each = shape.tokens // shape.rows
        if each == 1:
            self.now += 2e-4 * shape.rows * keys
        elif keys:
            self.now += self.back_s + 3e-6 * (each * keys - each * (each - 1) // 2)


@pytest.mark.parametrize("back_s", [0.0, 0.25])
def test_prices_are_what_steps_take(monkeypatch: pytest.MonkeyPatch, back_s: float) -> None:
    clock = Clock(back_s)
    monkeypatch.setattr(step_prices.time, "perf_counter", lambda: clock.now)
    prices = step_prices.measured_prices(
        slots=48,
        most_tokens=2048,
        longest=8192,
        rehearse=clock.rehearse,
        synchronize=lambda: None,
    )
    assert [rows for rows, _ in prices.decode] == [1, 2, 4, 8, 16, 32, 48]
    assert prices.key_s == pytest.approx(2e-4)
    assert prices.pair_s == pytest.approx(3e-6)
    decodes = StepSize(decodes=20, prefill=0, keys=20 * 300)
    assert prices.seconds(decodes) == pytest.approx(1.0 + 0.2 + 2e-4 * 6000)
    mixed = StepSize(decodes=4, prefill=0, keys=0).with_chunk(start=0, count=700)
    expected = 1.0 + 0.01 * 704 + 3e-6 * (700 * 701 // 2)
    assert prices.seconds(mixed) == pytest.approx(expected)
    looks_back = StepSize(decodes=4, prefill=0, keys=0).with_chunk(start=5000, count=60)
    expected = 1.0 + 0.01 * 64 + back_s + 3e-6 * (60 * 5000 + 60 * 61 // 2)
    assert prices.seconds(looks_back) == pytest.approx(expected)


def test_steps_before_requests_have_tokens_of_many_kinds(model: Model) -> None:
    """One token again and again would meet the same experts in every row."""
    worker = engine_of(model, slots=8, page_size=4, max_length=64).worker
    worker.warm_steps.rehearse(Shape(8, 8, 8, 1, 32), 32)
    tokens = worker._inputs.seen(Shape(8, 8, 8, 1, 32)).tokens_t
    assert len(set(tokens.tolist())) == 8
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < model.spec.vocab


def test_kernels_are_compiled_before_anybody_waits(model: Model, monkeypatch) -> None:
    """A server's first answer is none of the kernels' first runs, and the same as without."""
    options = {"slots": 1, "page_size": 4, "max_length": 32}
    cold, warm = engine_of(model, **options), engine_of(model, **options)
    computed: list[int] = []
    plain = warm.worker.warm_steps._plain

    def counted(given, *, draws, adapted=False):
        computed.append(len(given.tokens_t))
        return plain(given, draws=draws, adapted=adapted)

    monkeypatch.setattr(warm.worker.warm_steps, "_plain", counted)
    warm.worker.warm_steps.usual()
    assert computed == [2, 1]
    wanted = SamplingParameters(max_tokens=6, ignore_end=True)
    prompts = [[5, 6, 7], [8, 9], [1]]
    assert [d.tokens for d in warm.generate(prompts, wanted)] == [
        d.tokens for d in cold.generate(prompts, wanted)
    ]


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_with_a_target_says_the_same(model: Model, *, graphs: bool) -> None:
    """The target is so tight that prompts come a page at a time beside decodes."""
    options = {"slots": 3, "page_size": 4, "max_length": 96, "target_s": 1e-9}
    engine = (engine_with_graphs if graphs else engine_of)(model, **options)
    long = [(7 * n) % 50 + 1 for n in range(40)]
    first = engine.add([3, 4, 5], SamplingParameters(max_tokens=30, ignore_end=True))
    while not any(piece.request == first for piece in engine.step()):
        pass
    second = engine.add(long, SamplingParameters(max_tokens=3, ignore_end=True))
    before = engine.counters.steps
    while engine.take(second) is None:
        engine.step()
    assert engine.counters.steps - before >= len(long) // 4, "the prompt came in pages"
    while (done := engine.take(first)) is None:
        engine.step()
    assert list(done.answers[0].tokens) == greedy(model, [[3, 4, 5]], 30)[0]


def test_thinned_sizes_double() -> None:
    assert step_prices.thinned([1, 2, 3, 4, 6, 8, 9]) == [1, 2, 4, 8, 9]
