"""However a model is cut into stages, every rank says the tokens of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of  # noqa: E402
from tests.support.models import fill, make, spec_of  # noqa: E402
from tests.support.serving_plans import placement  # noqa: E402
from tests.support.threads import ThreadLinks, World  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.plan.plan import Plan  # noqa: E402
from tutti.serve import Completion, Engine, SamplingParameters  # noqa: E402
from tutti.serve.drafting import NgramDrafter  # noqa: E402
from tutti.serve.loading import Sizes  # noqa: E402
from tutti.serve.stages import stage_model, stage_place, stage_worker  # noqa: E402

SIZES: dict[str, Any] = {"slots": 3, "page_size": 4, "pages": 20, "most_tokens": 8}
PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9, [5, 9, 2, 40, 12, 13]]
WISHES = [
    SamplingParameters(max_tokens=9, ignore_end=True, logprobs=2, prompt_logprobs=1),
    SamplingParameters(max_tokens=7, temperature=0.8, seed=3, n=2, ignore_end=True),
    SamplingParameters(max_tokens=8, repetition_penalty=1.3, ignore_end=True),
    SamplingParameters(max_tokens=6, temperature=1.0, top_p=0.9, seed=5, ignore_end=True),
]
# two layers: units 0 (embedding) to 3 (head)
CUTS: dict[str, tuple[str, tuple[tuple[tuple[int, int], int], ...]]] = {
    "unequal": ("dense", (((0, 1), 1), ((1, 4), 1))),
    "head alone": ("tied", (((0, 3), 1), ((3, 4), 1))),
    "three": ("positions", (((0, 2), 1), ((2, 3), 1), ((3, 4), 1))),
    "one, then two tensor ranks": ("dense", (((0, 2), 1), ((2, 4), 2))),
    "two tensor ranks, then one": ("one-kv-head", (((0, 2), 2), ((2, 4), 1))),
    "latents": ("latent", (((0, 2), 1), ((2, 4), 1))),
    "one stage": ("dense", (((0, 4), 1),)),
}


def numbers(done: list[Completion]) -> list[Any]:
    return [
        [(a.tokens, a.finish, [round(x.logprob, 6) for x in a.logprobs or ()]) for a in d.answers]
        + [[round(x.logprob, 6) for x in d.prompt_logprobs or () if x is not None]]
        for d in done
    ]


def one_rank(plan: Plan, links: ThreadLinks, guesses: int) -> Any:
    torch.set_num_threads(1)
    accelerator, spec = CpuAccelerator(), plan.model.spec
    assert spec is not None
    place = stage_place(plan, spec, links.rank)
    model = fill(stage_model(spec, place, links, accelerator, torch.float64))
    worker = stage_worker(model, place, links, accelerator, Sizes(**SIZES))
    drafter = NgramDrafter(shortest=1) if guesses else None
    engine = Engine(worker, drafter=drafter, guesses=guesses)
    found = numbers(engine.generate(PROMPTS, WISHES))
    pooled = [vector.double() for vector in engine.embed(PROMPTS, "mean")]
    return found, pooled, len(list(model.blocks)), worker.cache.units.keys()


@pytest.mark.parametrize("cut", CUTS)
def test_every_rank_says_what_one_process_says(cut: str) -> None:
    kind, stages = CUTS[cut]
    spec = spec_of(kind)
    plan = placement(spec, *stages)
    guesses = 2 if cut in ("unequal", "latents") else 0
    alone = engine_of(make(spec), guesses=guesses, **SIZES)
    expected = numbers(alone.generate(PROMPTS, WISHES))
    pooled = alone.embed(PROMPTS, "mean")
    ranks = World(plan.num_ranks).run(lambda links: one_rank(plan, links, guesses))
    held = [tp * [sum(1 <= u <= 2 for u in range(*units))] for units, tp in stages]
    assert [blocks for _, _, blocks, _ in ranks] == [n for stage in held for n in stage]
    for found, vectors, blocks, pages in ranks:
        assert found == expected
        assert len(pages) == blocks, "pages of its own blocks alone"
        for ours, theirs in zip(vectors, pooled, strict=True):
            torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-6)


def test_all_ranks_have_as_many_pages() -> None:
    """The one with the least room says how many."""
    spec = spec_of("dense")
    plan = placement(spec, ((0, 2), 1), ((2, 4), 1))

    def pages(links: ThreadLinks) -> int:
        accelerator, place = CpuAccelerator(), stage_place(plan, spec, links.rank)
        model = fill(stage_model(spec, place, links, accelerator, torch.float32))
        memory = 200_000 if links.rank else 100_000
        sizes = Sizes(slots=64, page_size=4, memory_bytes=memory, max_length=64)
        return stage_worker(model, place, links, accelerator, sizes).settings.pages

    first, second = World(2).run(pages)
    assert first == second < 64 * 16 + 1


def test_a_plan_for_training_is_refused() -> None:
    spec = spec_of("dense")
    good = placement(spec, ((0, 2), 1), ((2, 4), 1))
    (pipeline,) = good.pipelines
    first, second = pipeline.stages
    (one,) = first.replicas

    def refused(plan: Plan, why: str) -> None:
        with pytest.raises(InputError, match=rf"{why}; a placement for serving has one pipeline"):
            stage_place(plan, spec, 0)

    def changed(**values: Any) -> Plan:
        stage = replace(first, replicas=(replace(one, **values),))
        return replace(good, pipelines=(replace(pipeline, stages=(stage, second)),))

    refused(replace(good, pipelines=(pipeline, pipeline)), "plan: 2 pipelines")
    refused(changed(count=2), "stage 0 has 2 replicas")
    refused(changed(cp=2), "stage 0 has context parallelism over 2 ranks")
    refused(changed(sequence_parallel=True), "stage 0 has sequence parallelism or .* products")
    stage = replace(first, units=((0, 1), (2, 3)))
    twice = replace(good, pipelines=(replace(pipeline, stages=(stage, second)),))
    refused(twice, r"stage 0 has 2 ranges of units \(interleaved\)")


def test_what_a_rank_compiles_at_its_start_is_what_its_steps_run() -> None:
    """Else the first request of a plan waits for it."""
    from tutti.accelerator.paged import compile_kernels
    from tutti.accelerator.paged_kernels import one_each

    torch.set_num_threads(1)
    compile_kernels(torch.float32, spec_of("dense").block(1).attention.head_dim)
    before = set(one_each[0].nopython_signatures)
    assert before
    engine = engine_of(make(spec_of("dense"), dtype=torch.float32), **SIZES)
    engine.generate(PROMPTS, SamplingParameters(max_tokens=3, ignore_end=True))
    assert set(one_each[0].nopython_signatures) == before
