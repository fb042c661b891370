"""Pages that move to the host and back: the same tokens, and nothing computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support.engines import engine_of, engine_with_graphs  # noqa: E402
from tests.support.models import fill, make, spec_of  # noqa: E402
from tests.support.serving import pair  # noqa: E402
from tests.support.serving_plans import placement  # noqa: E402
from tests.support.threads import ThreadLinks, World  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.batching import Step  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.plan.plan import Plan  # noqa: E402
from tutti.ranks.single_rank import NoLinks  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402
from tutti.serve.handover.handed import Handover  # noqa: E402
from tutti.serve.loading import Sizes  # noqa: E402
from tutti.serve.stages import stage_model, stage_place, stage_worker  # noqa: E402
from tutti.serve.staging import HostPages  # noqa: E402
from tutti.serve.worker import Launched, Worker  # noqa: E402

WISHES = SamplingParameters(max_tokens=10, ignore_end=True)
PROMPTS = [[3 + i, 5, 7, 11, 2, 9, 4, 8, 6, 1][: 4 + i] for i in range(5)]
TIGHT: dict[str, Any] = {
    "slots": 4, "page_size": 2, "pages": 18, "most_tokens": 5, "max_length": 32,
    "host_pages": 40, "keep_on_host": "always",
}  # fmt: skip


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [done.tokens for done in engine.generate(PROMPTS, WISHES)]


@pytest.mark.parametrize(
    ("name", "page_dtype", "pages", "guesses", "prefix"),
    [
        ("llama/gqa", None, 18, 0, False),
        ("llama/gqa", None, 18, 2, True),
        ("gemma2", None, 18, 0, False),
        ("deepseek_v3", None, 18, 0, True),
        pytest.param("llama/gqa", "int8", 18, 0, False, marks=pytest.mark.slow),
        ("llama/gqa", "fp8", 18, 2, False),
        pytest.param("mistral", None, 10, 0, False, marks=pytest.mark.slow),
        ("mistral", None, 10, 0, True),
    ],
)
def test_the_same_tokens(
    name: str, page_dtype: str | None, pages: int, guesses: int, prefix: bool
) -> None:
    model = pair(name).model
    own = {**TIGHT, "page_dtype": page_dtype, "pages": pages, "prefix": prefix}
    expected = tokens(engine_of(model, slots=1, page_dtype=page_dtype, max_length=32))
    kept, anew = (
        engine_of(model, guesses=guesses, **own),
        engine_of(model, **own | {"host_pages": 0}),
    )
    assert tokens(kept) == expected
    assert tokens(anew) == expected
    count = kept.counters
    assert count.preemptions > 0
    assert count.stowed_pages > 0
    assert anew.counters.preemptions > 0
    assert anew.counters.stowed_pages == 0
    if not prefix:
        assert count.fetched_pages > 0
    if not prefix and not guesses:
        assert count.computed_tokens == sum(len(prompt) + 9 for prompt in PROMPTS)
        assert anew.counters.computed_tokens > count.computed_tokens
    assert kept.scheduler.on_host.pool.free == 40


def test_steps_that_come_late_and_run_as_graphs() -> None:
    model = pair("llama/gqa").model
    expected = tokens(engine_of(model, slots=1, max_length=32))
    engine = engine_with_graphs(model, ahead=2, prefix=False, **TIGHT)
    assert tokens(engine) == expected
    assert engine.counters.fetched_pages > 0


def test_samples_share_pages_and_are_kept_one_by_one() -> None:
    model = pair("llama/gqa").model
    wishes = SamplingParameters(max_tokens=10, n=3, temperature=1.0, seed=4, ignore_end=True)

    def answers(engine: Engine) -> list[list[tuple[int, ...]]]:
        return [[a.tokens for a in d.answers] for d in engine.generate(PROMPTS[:3], wishes)]

    engine = engine_of(model, **TIGHT)
    assert answers(engine) == answers(engine_of(model, slots=9, max_length=32))
    assert engine.counters.fetched_pages > 0
    assert engine.scheduler.on_host.pool.free == 40


def one_rank(plan: Plan, links: ThreadLinks) -> Any:
    torch.set_num_threads(1)
    accelerator, spec = CpuAccelerator(), plan.model.spec
    assert spec is not None
    place = stage_place(plan, spec, links.rank)
    model = fill(stage_model(spec, place, links, accelerator, torch.float64))
    worker = stage_worker(model, place, links, accelerator, Sizes(prefix=False, **TIGHT))
    engine = Engine(worker)
    return tokens(engine), engine.counters.fetched_pages, worker.host_pages.page_bytes


@pytest.mark.parametrize(("kind", "tensor"), [("dense", 2), ("latent", 1)])
def test_every_rank_moves_its_own_part(kind: str, tensor: int) -> None:
    spec = spec_of(kind)
    plan = placement(spec, ((0, 2), 1), ((2, 4), tensor))
    alone = engine_of(make(spec), slots=1, max_length=32)
    expected = tokens(alone)
    ranks = World(1 + tensor).run(lambda links: one_rank(plan, links))
    assert all(said == expected for said, _, _ in ranks)
    (moved,) = {moved for _, moved, _ in ranks}
    assert moved > 0
    page = sum(t[0].nbytes for unit in alone.worker.cache.units.values() for t in unit)
    parts = sum(part for _, _, part in ranks)
    assert parts == page * TIGHT["page_size"] // alone.worker.settings.page_size


class WatchingSender:
    """Notes the keys that a sequence has before a step that gives it a slot."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.seen = worker, 0
        self.noted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, step: Step, rows: list[tuple[int, Handover, int]]) -> None:
        fresh = {begin.slot for begin in step.begins}
        for row, slot in enumerate(step.slots.tolist()):
            if slot in fresh and step.starts[row]:
                at = torch.arange(int(step.starts[row]))
                size = self.worker.settings.page_size
                places = torch.from_numpy(step.tables[row]).long()[at // size] * size + at % size
                self.noted.append((places, self.keys(places)))

    def keys(self, places: torch.Tensor) -> torch.Tensor:
        keys = self.worker.cache.units[1][0]
        return keys.view(-1, *keys.shape[2:])[places].clone()


def test_keys_that_go_to_other_engines_are_back_before_they_are_read() -> None:
    spec = spec_of("dense")
    plan = placement(spec, ((0, 4), 1))
    accelerator, links = CpuAccelerator(), NoLinks()
    place = stage_place(plan, spec, 0)
    model = fill(stage_model(spec, place, links, accelerator, torch.float64))
    worker = stage_worker(model, place, links, accelerator, Sizes(prefix=False, **TIGHT))
    watching = WatchingSender(worker)
    worker.sender = watching  # type: ignore[assignment]
    original = worker.launch

    def launch(step: Step) -> Launched:
        watching.noted = []
        launched = original(step)
        for places, keys in watching.noted:
            assert torch.equal(keys, watching.keys(places))
            watching.seen += 1
        return launched

    worker.launch = launch  # type: ignore[method-assign]
    tokens(Engine(worker))
    assert watching.seen > 0


@pytest.mark.parametrize("page_dtype", [None, "int8"])
def test_what_comes_back_is_what_went(page_dtype: str | None) -> None:
    cache = engine_of(pair("llama/gqa").model, page_dtype=page_dtype, **TIGHT).worker.cache
    for number, tensor in enumerate(t for unit in cache.units.values() for t in unit):
        values = torch.arange(tensor.numel()).view(tensor.shape) % 100 + number
        tensor.copy_(values.to(tensor.dtype))
    before = [t.clone() for unit in cache.units.values() for t in unit]
    pages = HostPages(CpuAccelerator(), cache, 6)
    pages._most = 2  # several batches
    pages.stow(np.array([[3, 1], [9, 2], [4, 6]], np.int32))
    pages.fetch(np.array([[6, 4], [1, 12], [2, 3]], np.int32))
    after = [t for unit in cache.units.values() for t in unit]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[4], old[4])
        assert torch.equal(new[12], old[3])
        assert torch.equal(new[3], old[9])
        assert torch.equal(new[5], old[5])


def test_moves_are_timed_where_they_are_priced() -> None:
    model = pair("llama/gqa").model
    engine = engine_of(model, **TIGHT | {"keep_on_host": "priced"})
    prices = engine.worker.prices()
    assert prices is not None
    assert prices.stow_s > 0  # type: ignore[union-attr]
    assert prices.fetch_s > 0  # type: ignore[union-attr]
    assert tokens(engine) == tokens(engine_of(model, slots=1, max_length=32))


def test_memory_that_the_host_has_not_is_refused() -> None:
    class Small(CpuAccelerator):
        def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    cache = engine_of(pair("llama/gqa").model, **TIGHT).worker.cache
    with pytest.raises(InputError, match=r"gives no .* of memory for 1,000 pages"):
        HostPages(Small(), cache, 1000)


def test_bytes_become_pages() -> None:
    model = pair("llama/gqa").model
    page = engine_of(model, **TIGHT).worker.host_pages.page_bytes
    own = TIGHT | {"host_pages": None, "host_bytes": 5 * page + 1}
    assert engine_of(model, **own).worker.settings.host_pages == 5
