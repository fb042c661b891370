"""Prices of serving's steps, keys over links, memory into pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.deployments import CHAT, engine_pipeline, mixed_plan, separated_plan
from tutti.batching import Arrived, Request, Room, Scheduler, Settings, StepSize, Tokens
from tutti.batching.step import Step
from tutti.cost.serving.engine_prices import engine_prices, import_wire, request_bytes
from tutti.cost.serving.pages import stage_tokens, stage_weight_bytes
from tutti.cost.serving.stage_prices import Formats, StagePrices
from tutti.cost.serving.step_load import decode_load, load_of, prefill_load, windows_of
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models.cached import cached_bytes
from tutti.models.load import load_model

H200 = Cluster.from_document(
    {"name": "one", "pools": [{"name": "h200", "chip": "H200", "nodes": 1}]}, Place("one")
)
QWEN = load_model("qwen3-8b")
WINDOWS = windows_of(QWEN)


def _stage(formats: Formats | None = None, tp: int = 1) -> StagePrices:
    return StagePrices(
        QWEN, (0, QWEN.num_units), H200, H200.pools[0], tp=tp, formats=formats or Formats()
    )


# measured on an H200 with this shape, milliseconds by batch at a context of 330; nothing was fitted
# to them beyond the choice of round constants, hence the width of the band
MEASURED = {1: 4.59, 16: 5.30, 64: 6.31, 128: 7.53, 256: 11.85}
MEASURED_FP8 = {1: 3.22, 16: 3.65, 64: 4.95, 128: 6.45, 256: 9.39}


@pytest.mark.parametrize(
    ("formats", "measured"),
    [(Formats(), MEASURED), (Formats(weights=Dtype.FP8), MEASURED_FP8)],
    ids=["bf16", "fp8"],
)
def test_nominal_decodes_are_near_what_was_measured(formats, measured):
    stage = _stage(formats)
    for batch, milliseconds in measured.items():
        priced = 1e3 * stage.seconds(decode_load(batch, 330, WINDOWS))
        assert priced == pytest.approx(milliseconds, rel=0.15)


def test_nominal_prefill_is_near_what_was_measured():
    stage = _stage()
    for tokens, milliseconds in ((512, 11.8), (2048, 50.8)):
        priced = 1e3 * stage.seconds(prefill_load([(0, tokens)], WINDOWS))
        assert priced == pytest.approx(milliseconds, rel=0.25)


def test_more_work_takes_longer_and_more_chips_shorter():
    stage, split = _stage(), _stage(tp=2)
    times = [stage.seconds(decode_load(batch, 500, WINDOWS)) for batch in (1, 8, 64, 512)]
    assert times == sorted(times)
    assert stage.seconds(decode_load(8, 4000, WINDOWS)) > stage.seconds(decode_load(8, 40, WINDOWS))
    long = prefill_load([(0, 4096)], WINDOWS)
    assert split.seconds(long) < stage.seconds(long)
    huge = prefill_load([(0, 100_000)], WINDOWS)
    assert stage.seconds(huge) > 20 * stage.seconds(long)


def test_stages_make_up_the_whole():
    whole = _stage()
    cut = [
        StagePrices(QWEN, units, H200, H200.pools[0]) for units in ((0, 11), (11, QWEN.num_units))
    ]
    load = decode_load(32, 700, WINDOWS)
    assert sum(stage.seconds(load) for stage in cut) == pytest.approx(whole.seconds(load))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=5),
    st.sampled_from([None, 1, 7, 16, 1000]),
)
def test_pairs_of_chunks_are_counted_one_by_one(chunks, window):
    expected = sum(
        min(start + offset + 1, window or 10**9)
        for start, count in chunks
        for offset in range(count)
    )
    assert prefill_load(chunks, (window,)).pairs[0] == pytest.approx(expected)


def test_the_load_of_a_schedulers_step():
    scheduler = Scheduler(
        Settings(slots=4, pages=64, page_size=4, max_length=64, most_tokens=16, prefix=False)
    )
    scheduler.handle(Arrived(Request(id=0, prompt=tuple(range(1, 7)), most_new=4)))
    step = scheduler.handle(Room())
    assert isinstance(step, Step)
    load = load_of(step, (None,))
    assert (load.tokens, load.samples, load.rows, load.keys, load.pairs) == (
        6, 1, 0, (0.0,), (21.0,),
    )  # fmt: skip
    scheduler.handle(Tokens(step.number, np.zeros(1, np.int32), np.zeros(1, np.int8)))
    decode = scheduler.handle(Room())
    assert isinstance(decode, Step)
    load = load_of(decode, (None,))
    assert (load.tokens, load.rows, load.keys) == (1, 1, (7.0,))
    imported = load_of(step, (None,), imports=True)
    assert (imported.tokens, imported.rows, imported.keys) == (1, 1, (6.0,))


def test_memory_becomes_pages():
    whole = (0, QWEN.num_units)
    weights = stage_weight_bytes(QWEN, whole, 1, Formats())
    assert weights == pytest.approx(2 * QWEN.num_parameters, rel=1e-3)
    tokens = stage_tokens(QWEN, whole, H200.pools[0].chip, 1, Formats())
    assert 700_000 < tokens < 900_000  # 0.9 · (138 GiB − 16 GiB) at 144 KiB a token
    narrow = stage_tokens(QWEN, whole, H200.pools[0].chip, 1, Formats(weights=Dtype.FP8))
    assert narrow > tokens
    halved = stage_tokens(QWEN, whole, H200.pools[0].chip, 1, Formats(cache=Dtype.FP8))
    assert halved == pytest.approx(2 * tokens / (1 + 4 / 128), rel=0.01)


def test_latents_are_not_sliced():
    deepseek = load_model("deepseek-v3")
    assert cached_bytes(deepseek, [1]) == cached_bytes(deepseek, [1], tp=8) == 2 * (512 + 64)


def test_an_engine_of_a_plan():
    plan = mixed_plan()
    assert plan.model.spec is not None
    assert plan.cluster.cluster is not None
    fast, slow = (
        engine_prices(plan.model.spec, plan.cluster.cluster, pipeline, 2048)
        for pipeline in plan.pipelines
    )
    assert "nominal" in fast.basis
    assert slow.num_chips == 2
    assert fast.settings().pages == 4097
    prices = fast.prices()
    decodes = StepSize(decodes=64, prefill=0, keys=64 * 300)
    assert prices.seconds(decodes) < prices.seconds(decodes.with_chunk(start=0, count=2048))
    assert CHAT.longest <= 2048


def test_keys_travel_over_the_link():
    plan = separated_plan()
    assert plan.model.spec is not None
    assert plan.cluster.cluster is not None
    wire = import_wire(plan.cluster.cluster, *plan.pipelines)
    moved = 1000 * request_bytes(plan.model.spec, Formats())
    assert moved == 1000 * 36 * 2 * 8 * 128 * 2
    assert 1e-3 < wire.seconds(moved) < 0.1


def test_pages_that_do_not_fit_are_refused_with_numbers():
    plan = mixed_plan()
    assert plan.model.spec is not None
    assert plan.cluster.cluster is not None
    full = engine_pipeline(plan.model.spec, "h100/0/0", pages=10**6)
    with pytest.raises(InputError, match=r"has room for [\d,]+ tokens .* 1,000,000 pages of 16"):
        engine_prices(plan.model.spec, plan.cluster.cluster, full, 2048)
