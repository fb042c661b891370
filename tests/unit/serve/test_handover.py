"""Keys and values move between unlike engines, and the tokens are those of one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from tests.support.handovers import (  # noqa: E402
    Mail,
    Side,
    alone,
    decoded,
    prefilled,
    random_cut,
)
from tests.support.models import CONFIGS, spec_of  # noqa: E402
from tests.support.tiny_configs import TINY, tiny_config  # noqa: E402
from tutti.models import ModelSpec, read_config  # noqa: E402
from tutti.serve.handover.arrivals import Arrivals  # noqa: E402
from tutti.serve.handover.layout import EngineLayout, heads_of, parts_between  # noqa: E402

PROMPTS = [[5, 9, 2, 40, 11, 7, 3], [7, 8], [3] * 9 + [4, 6, 1], [5, 9, 2, 40, 11, 7, 60, 61, 62]]
COUNT = 6
# two layers: units 0 (embedding) to 3 (head)
CASES = {
    "other cut and pages": ("dense", Side(cut=(((0, 2), 1), ((2, 4), 1)), page_size=4),
                            Side(cut=(((0, 4), 1),), page_size=3)),
    "two ranks to one": ("dense", Side(cut=(((0, 4), 2),), page_size=4),
                         Side(cut=(((0, 1), 1), ((1, 4), 1)), page_size=2, lanes=2)),
    "one rank to two": ("dense", Side(cut=(((0, 4), 1),), page_size=2),
                        Side(cut=(((0, 2), 2), ((2, 4), 1)), page_size=5, lanes=2)),
    "a head on both ranks": ("one-kv-head", Side(cut=(((0, 4), 2),), page_size=4),
                             Side(cut=(((0, 4), 2),), page_size=4)),
    "latents": ("latent", Side(cut=(((0, 2), 1), ((2, 4), 1)), page_size=4, lanes=2),
                Side(cut=(((0, 3), 1), ((3, 4), 1)), page_size=3)),
    "windows": ("tied", Side(cut=(((0, 4), 1),), page_size=4),
                Side(cut=(((0, 2), 1), ((2, 4), 1)), page_size=2)),
}  # fmt: skip


def handed_over(spec: ModelSpec, source: Side, target: Side) -> None:
    expected = alone(spec, PROMPTS, COUNT, page_size=4, pages=60, most_tokens=8)
    firsts, mail = prefilled(spec, source, target, PROMPTS)
    found, cached = decoded(spec, target, PROMPTS, firsts, mail, COUNT)
    assert [[first, *rest] for first, rest in zip(firsts, found, strict=True)] == expected
    size = target.page_size
    assert cached == [len(prompt) // size * size for prompt in PROMPTS], "nothing computed twice"


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_engine(case: str) -> None:
    kind, source, target = CASES[case]
    handed_over(spec_of(kind), source, target)


def test_pages_behind_a_window_are_not_missed() -> None:
    """A prompt whose beginning is known is computed anew: part of it is no longer in pages."""
    config = {**CONFIGS["dense"], "model_type": "mistral", "sliding_window": 3}
    config.pop("attention_bias")
    spec = read_config(config, "windowed")
    source, target = Side(cut=(((0, 4), 1),), page_size=2), Side(cut=(((0, 4), 1),), page_size=2)
    prompts = [[9, 8, 7, 6, 5, 4, 3, 2, 1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12]]
    expected = alone(spec, prompts, COUNT, page_size=2, pages=60)
    firsts, mail = prefilled(spec, source, target, prompts)
    found, cached = decoded(spec, target, prompts, firsts, mail, COUNT)
    assert [[first, *rest] for first, rest in zip(firsts, found, strict=True)] == expected
    assert cached == [8, 10]


@pytest.mark.parametrize(("given", "taken"), [("int8", "int8"), ("int8", None), (None, "int8")])
def test_formats_may_differ(given: str | None, taken: str | None) -> None:
    """What is imported is what the format holds: the codes themselves, or what they stand for."""
    kind, source, target = CASES["two ranks to one"]
    spec = spec_of(kind)
    source, target = replace(source, page_dtype=given), replace(target, page_dtype=taken)
    firsts, mail = prefilled(spec, source, target, PROMPTS)
    found, cached = decoded(spec, target, PROMPTS, firsts, mail, COUNT)
    assert all(len(tokens) == COUNT - 1 for tokens in found)
    assert sum(cached) > 0
    if given == taken:
        expected = alone(spec, PROMPTS, COUNT, page_size=4, pages=60, page_dtype=given)
        assert [[f, *rest] for f, rest in zip(firsts, found, strict=True)] == expected


def test_what_does_not_come_is_computed() -> None:
    kind, source, target = CASES["other cut and pages"]
    spec = spec_of(kind)
    expected = alone(spec, PROMPTS, COUNT, page_size=4, pages=60, most_tokens=8)
    firsts, mail = prefilled(spec, source, target, PROMPTS)
    arrivals = Arrivals({1: 2, 2: 2})
    lost = mail.frames[0].pop()
    assert {arrivals.take(frames) for frames in mail.frames[0]} >= {"p0"}
    assert arrivals.pop(_key(lost)) is None, "a part is missing"
    found, cached = decoded(spec, target, PROMPTS[1:2], firsts[1:2], Mail(), COUNT)
    assert [firsts[1], *found[0]] == expected[1]
    assert cached == [0]


def _key(frames: list[bytes]) -> str:
    from tutti.serve.handover.wire import decoded as read

    return read(frames)[0].key


def test_a_message_that_is_none_is_refused() -> None:
    kind, source, target = CASES["one rank to two"]
    _, mail = prefilled(spec_of(kind), source, target, PROMPTS[:1])
    good = mail.frames[0][0]
    arrivals = Arrivals({1: 1})
    for bad in ([b"what"], good[:1], [good[0], good[1][:-1], *good[2:]], [good[0], b"", b""]):
        with pytest.raises(ValueError, match=r"header|tensors|bytes"):
            arrivals.take(bad)
    with pytest.raises(ValueError, match="not this rank's"):
        Arrivals({7: 1}).take(good)
    assert len(Arrivals({})) == 0


def test_what_is_old_goes_and_what_is_whole_stays() -> None:
    kind, source, target = CASES["two ranks to one"]
    _, mail = prefilled(spec_of(kind), source, target, PROMPTS)
    now = [0.0]
    arrivals = Arrivals({1: 2, 2: 2}, clock=lambda: now[0])
    frames = [f for f in mail.frames[1] if _key(f) != "p2"]
    parts = [f for f in mail.frames[1] if _key(f) == "p2"]
    arrivals.take(parts[0])
    now[0] = 100.0
    whole = {arrivals.take(f) for f in frames} - {None}
    assert len(arrivals) == len(whole)
    assert arrivals.pop("p2") is None
    assert arrivals.pop("p0") is not None
    small = Arrivals({1: 2, 2: 2}, most_bytes=1)
    assert {small.take(f) for f in mail.frames[1]} == {None}, "no room: it is computed again"


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_head_comes_once(kv_heads: int) -> None:
    spec = read_config({**tiny_config("llama/gqa"), "num_key_value_heads": kv_heads}, "model")
    layouts = [
        EngineLayout(stages, 16)
        for stages in ((((0, 6), 1),), (((0, 6), 4),), (((0, 2), 2), ((2, 6), 8)))
    ]
    for source in layouts:
        for target in layouts:
            parts = parts_between(spec, source, target)
            for unit in range(1, 5):
                for position, rank in enumerate(target.holders(unit)):
                    own = [p for p in parts if (p.unit, p.target) == (unit, rank)]
                    low, high = heads_of(kv_heads, len(target.holders(unit)), position)
                    assert [h for p in own for h in range(*p.taken)] == list(range(high - low))
                    for part in own:
                        place = source.holders(unit).index(part.source)
                        first, _ = heads_of(kv_heads, len(source.holders(unit)), place)
                        assert first + part.given[0] == low + part.taken[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TINY)
def test_every_model_type(name: str) -> None:
    spec = read_config(tiny_config(name), name.replace("/", "-"))
    draw = random.Random(name)
    for _ in range(2):
        source, target = (
            Side(
                cut=random_cut(spec, draw), page_size=draw.choice((2, 3, 4, 8)),
                lanes=draw.choice((1, 2)), most_tokens=draw.choice((5, 8, 32)),
            )
            for _ in range(2)
        )  # fmt: skip
        handed_over(spec, source, target)
