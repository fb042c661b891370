"""The engine's tokens are transformers', whatever the arrivals, chunks, pages, and evictions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.support.serving import Pair, engine_of, pair, reference, same  # noqa: E402
from tests.support.tiny_configs import TINY  # noqa: E402
from tutti.batching import Finish  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402

MOST_NEW, LONGEST, REQUESTS = 12, 24, 24
NAMES = sorted(TINY)
# the first of each kind of attention, norm placement, position and feed-forward layer
DOZEN = (
    "llama/gqa", "llama/dynamic", "mistral", "qwen3", "mixtral", "deepseek_v3/small",
    "gemma2", "phi3/long", "falcon/alibi", "bloom", "opt/350m", "gpt_oss",
)  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    new: int
    samples: int
    cancelled: int | None  # so many steps later


@dataclass(frozen=True)
class Scenario:
    slots: int
    page_size: int
    spare: int  # pages beside those that the longest request needs
    most_tokens: int
    prefix: bool
    guesses: int
    arrivals: tuple[Arrival, ...]


ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=st.integers(0, 7),
    new=st.integers(1, MOST_NEW),
    samples=st.sampled_from([1, 1, 1, 2]),
    cancelled=st.sampled_from([None, None, None, None, 3]),
)
SCENARIOS = st.builds(
    Scenario,
    slots=st.integers(1, 8),
    page_size=st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
    spare=st.integers(0, 12),
    most_tokens=st.integers(1, 48),
    prefix=st.sampled_from([True, True, True, False]),
    guesses=st.sampled_from([0, 0, 3]),
    arrivals=st.lists(ARRIVALS, min_size=REQUESTS, max_size=REQUESTS).map(tuple),
)
_known: dict[str, list[tuple[list[int], list[int], list[float]]]] = {}


def expected(found: Pair) -> list[tuple[list[int], list[int], list[float]]]:
    """Eight prompts, some of which begin alike, and what transformers goes on with."""
    if found.name not in _known:
        drawn = random.Random(3)
        common = [drawn.randrange(1, found.spec.vocab) for _ in range(LONGEST)]
        prompts = [[*common[:16], drawn.randrange(1, found.spec.vocab)] for _ in range(3)]
        prompts += [common[:9], common[:1]]
        prompts += [[drawn.randrange(1, found.spec.vocab) for _ in range(n)] for n in (19, 5, 12)]
        _known[found.name] = [(p, *reference(found, p, MOST_NEW)) for p in prompts]
    return _known[found.name]


def play(name: str, scenario: Scenario) -> None:
    found = pair(name)
    known = expected(found)
    longest = max(len(prompt) for prompt, _, _ in known) + MOST_NEW
    engine = engine_of(
        found.model,
        slots=scenario.slots,
        page_size=scenario.page_size,
        pages=-(-longest // scenario.page_size) + 1 + scenario.spare,
        max_length=longest,
        most_tokens=scenario.most_tokens,
        prefix=scenario.prefix,
        guesses=scenario.guesses,
    )
    waiting = sorted(scenario.arrivals, key=lambda arrival: arrival.step)
    running: dict[int, Arrival] = {}
    step = 0
    while waiting or not engine.is_idle:
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            own = SamplingParameters(max_tokens=arrival.new, n=arrival.samples, ignore_end=True)
            running[engine.add(known[arrival.prompt][0], own)] = arrival
        for number, arrival in running.items():
            if arrival.cancelled is not None and step == arrival.step + arrival.cancelled:
                engine.cancel(number)
        engine.step()
        step += 1
        assert step < 5000, "somebody never ends"
    pool = engine.scheduler.pool
    assert pool.free + len(pool.idle) == engine.scheduler.settings.usable_pages
    for number, arrival in running.items():
        done = engine.take(number)
        assert done is not None
        _, tokens, gaps = known[arrival.prompt]
        assert len(done.answers) == arrival.samples
        for answer in done.answers:
            count = len(answer.tokens)
            if arrival.cancelled is None:
                assert answer.finish is Finish.LENGTH
                assert count == arrival.new
            assert same(answer.tokens, tokens[:count], gaps), (arrival, answer.tokens, tokens)


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.mark.parametrize("name", DOZEN)
@settings(max_examples=1, deadline=None, suppress_health_check=CHECKS, database=None)
@given(scenario=SCENARIOS)
def test_tokens_are_transformers(name: str, scenario: Scenario) -> None:
    play(name, scenario)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS, database=None)
@given(name=st.sampled_from(NAMES), scenario=SCENARIOS)
def test_tokens_are_transformers_a_hundred_times(name: str, scenario: Scenario) -> None:
    play(name, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=1, deadline=None, suppress_health_check=CHECKS, database=None)
@given(scenario=SCENARIOS)
def test_tokens_of_every_type_are_transformers(name: str, scenario: Scenario) -> None:
    play(name, scenario)


def test_windows_and_scalings_are_crossed_while_generating() -> None:
    """Else they would be compared in vain."""
    for name in DOZEN:
        for block in pair(name).spec.blocks:
            window, rotary = block.attention.window, block.attention.rotary
            assert window is None or window < 16
            scaling = None if rotary is None else rotary.scaling
            if scaling is not None and scaling.kind in ("dynamic", "longrope"):
                assert (scaling.original_length or 0) < 19 + MOST_NEW
