"""Many callers of one engine at a time."""

from __future__ import annotations

import asyncio

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.errors import InputError, TuttiError  # noqa: E402
from tutti.nn import Model  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402
from tutti.serve.asynchronous import AsyncEngine  # noqa: E402

PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9, [1], [2, 4, 6]]
TEN = SamplingParameters(max_tokens=10)


@pytest.fixture(scope="module")
def model() -> Model:
    return make(spec_of("dense"))


def test_callers_get_their_own_answers(model: Model) -> None:
    expected = [done.tokens for done in engine_of(model).generate(PROMPTS, TEN)]

    async def run() -> list[tuple[int, ...]]:
        async with AsyncEngine(engine_of(model, slots=2)) as served:
            found = await asyncio.gather(*(served.generate(prompt, TEN) for prompt in PROMPTS))
            pieces = [piece async for piece in served.stream(PROMPTS[0], TEN)]
        assert tuple(token for piece in pieces for token in piece.tokens) == expected[0]
        return [done.tokens for done in found]

    assert asyncio.run(run()) == expected


def test_who_leaves_cancels_and_bad_requests_are_told(model: Model) -> None:
    engine = engine_of(model)

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            stream = served.stream(PROMPTS[0], SamplingParameters(max_tokens=50))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            with pytest.raises(InputError, match="token 999"):
                await served.generate([999], TEN)
            waiting = asyncio.ensure_future(served.generate([1], SamplingParameters(max_tokens=60)))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await served.generate(PROMPTS[1], TEN)).tokens
        with pytest.raises(TuttiError, match="the engine is closed"):
            await served.generate([1], TEN)

    asyncio.run(run())
    assert engine.is_idle
    pool = engine.scheduler.pool
    assert pool.free + len(pool.idle) == engine.scheduler.settings.usable_pages
