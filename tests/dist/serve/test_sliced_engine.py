"""However a model is spread over two ranks, the engine's tokens are those of one process.

Every rank runs the same scheduler on the same requests; only the model is sliced.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.gloo import World, run_processes  # noqa: E402
from tests.support.models import make, spec_of  # noqa: E402
from tutti.nn import ALONE, ParallelContext, Ranks  # noqa: E402
from tutti.serve import SamplingParameters  # noqa: E402

CASES = [
    *(("tp", kind) for kind in ("dense", "one-kv-head", "alibi", "latent")),
    ("tp+sp", "experts"),
    ("tp+ep", "experts"),
]
OTHERS = [
    *(("tp", kind) for kind in ("qk-norm", "tied", "positions", "experts", "expert-bias")),
    *(("tp+sp", kind) for kind in ("dense", "latent")),
    ("tp+ep", "latent"),
]
PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9, [5, 9, 2, 40, 12, 13]]
WISHES = [
    SamplingParameters(max_tokens=9, ignore_end=True),
    SamplingParameters(max_tokens=7, temperature=0.8, seed=3, n=2, ignore_end=True),
    SamplingParameters(max_tokens=8, repetition_penalty=1.3, ignore_end=True),
    SamplingParameters(max_tokens=6, temperature=1.0, top_p=0.9, seed=5, ignore_end=True),
]


def context(how: str, experts: int) -> ParallelContext:
    parts, world = how.split("+"), World()
    options: dict[str, Any] = {"tensor": world, "sequence_parallel": "sp" in parts}
    if "ep" in parts:
        options.update(experts=world, expert_counts=(experts - 2, 2))
    return Ranks(**options)


def tokens_of(kind: str, parallel: ParallelContext) -> list[list[tuple[int, ...]]]:
    model = make(spec_of(kind), parallel=parallel)
    engine = engine_of(model, slots=3, page_size=4, pages=20, most_tokens=8, guesses=2)
    found = engine.generate(PROMPTS, WISHES)
    return [[answer.tokens for answer in done.answers] for done in found]


def serve(cases: list[tuple[str, str]], rank: int) -> dict[tuple[str, str], Any]:
    del rank
    return {
        (how, kind): tokens_of(kind, context(how, spec_of(kind).num_experts)) for how, kind in cases
    }


@pytest.mark.parametrize("cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_sliced_models_say_the_same(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    # kernels that are compiled here are found by the ranks
    expected = {kind: tokens_of(kind, ALONE) for kind in dict.fromkeys(kind for _, kind in cases)}
    both = run_processes(functools.partial(serve, cases), 2, tmp_path)
    for how, kind in cases:
        for rank in (0, 1):
            assert both[rank][how, kind] == expected[kind], (how, kind, rank)
