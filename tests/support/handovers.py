"""Prompts computed by one engine and decoded by another, ranks as threads, parcels by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.engines import engine_of
from tests.support.models import fill, make
from tests.support.serving_plans import placement
from tests.support.threads import ThreadLinks, World
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.models import ModelSpec
from tutti.serve import Engine, SamplingParameters
from tutti.serve.handover.arrivals import Arrivals
from tutti.serve.handover.handed import Handover
from tutti.serve.handover.layout import EngineLayout, heads_of
from tutti.serve.handover.sender import KeySender, Parcel
from tutti.serve.handover.wire import encoded
from tutti.serve.laned_engine import LanedEngine
from tutti.serve.loading import Sizes
from tutti.serve.stages import StageWorker, stage_model, stage_place, stage_worker

Cut = tuple[tuple[tuple[int, int], int], ...]  # units and tensor ranks of each stage


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine."""

    cut: Cut
    page_size: int
    lanes: int = 1
    page_dtype: str | None = None
    most_tokens: int = 8

    @property
    def layout(self) -> EngineLayout:
        return EngineLayout(self.cut, self.page_size)

    def workers(self, spec: ModelSpec, links: ThreadLinks) -> list[StageWorker]:
        torch.set_num_threads(1)
        accelerator = CpuAccelerator()
        place = stage_place(placement(spec, *self.cut), spec, links.rank)
        model = fill(stage_model(spec, place, links, accelerator, torch.float32))
        sizes = Sizes(
            slots=3, page_size=self.page_size, pages=240 // self.page_size,
            most_tokens=self.most_tokens, page_dtype=self.page_dtype,
            max_length=min(64, spec.embedding.positions or 64),
        )  # fmt: skip
        return [stage_worker(model, place, links, accelerator, sizes) for _ in range(self.lanes)]


@dataclass
class Mail:
    """What was sent, by rank of the engine that gets it."""

    frames: dict[int, list[list[bytes]]] = field(default_factory=dict)

    def post(self, parcel: Parcel) -> None:
        arrays = [array.tobytes() for array in parcel.download.wait()]
        self.frames.setdefault(parcel.to.rank, []).append([encoded(parcel.header), *arrays])


def random_cut(spec: ModelSpec, draw: random.Random) -> Cut:
    """Cut a model somewhere, or nowhere, with one or two ranks per stage."""
    units = spec.num_units
    bounds = sorted(draw.sample(range(1, units), draw.choice((0, 1, 1, 2))))
    edges = [0, *bounds, units]
    return tuple(
        ((low, high), draw.choice((1, 2)) if spec.tensor_parallel_problem(2) is None else 1)
        for low, high in itertools.pairwise(edges)
    )


def alone(spec: ModelSpec, prompts: list[list[int]], count: int, **sizes: Any) -> list[list[int]]:
    """Return the tokens that one engine says."""
    longest = min(64, spec.embedding.positions or 64)
    engine = engine_of(make(spec, dtype=torch.float32), slots=3, max_length=longest, **sizes)
    wishes = SamplingParameters(max_tokens=count, ignore_end=True)
    return [list(done.tokens) for done in engine.generate(prompts, wishes)]


def prefilled(
    spec: ModelSpec, side: Side, other: Side, prompts: list[list[int]]
) -> tuple[list[int], Mail]:
    """Return the first token of each prompt, and what was sent to the other engine."""
    mail = Mail()

    def one(links: ThreadLinks) -> list[int]:
        workers = side.workers(spec, links)
        for worker in workers:
            worker.sender = KeySender(
                spec, side.layout, links.rank, {1: other.layout}, worker.cache,
                worker.accelerator, mail.post,
            )  # fmt: skip
        engine = LanedEngine([Engine(worker) for worker in workers])
        wishes = SamplingParameters(max_tokens=1, ignore_end=True)
        numbers = [
            engine.add(prompt, wishes, handover=Handover(f"p{index}", 1))
            for index, prompt in enumerate(prompts)
        ]
        done = finished(engine, len(prompts))
        return [done[number][0] for number in numbers]

    firsts = World(side.layout.num_ranks).run(one)
    assert all(first == firsts[0] for first in firsts)
    return firsts[0], mail


def decoded(
    spec: ModelSpec, side: Side, prompts: list[list[int]], firsts: list[int], mail: Mail, count: int
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens after each prompt's first, and how many of its tokens were imported."""

    def one(links: ThreadLinks) -> tuple[list[list[int]], list[int]]:
        workers = side.workers(spec, links)
        place = workers[0]._place
        heads = {}
        for unit in workers[0].cache.units:
            attention = spec.block(unit).attention
            low, high = heads_of(attention.kv_heads, place.seat.tensor.size, place.seat.tensor.rank)
            heads[unit] = 1 if attention.latent is not None else high - low
        arrivals = Arrivals(heads)
        whole = {arrivals.take(frames) for frames in mail.frames.get(links.rank, ())}
        engine = LanedEngine([Engine(worker) for worker in workers], arrivals)
        numbers, expected = [], side.page_size
        for index, (prompt, first) in enumerate(zip(prompts, firsts, strict=True)):
            wishes = SamplingParameters(max_tokens=count - 1, ignore_end=True, answered=1)
            sent = len(prompt) >= expected
            assert not heads or (f"p{index}" in whole) == sent
            numbers.append(
                engine.add([*prompt, first], wishes, imported=f"p{index}" if sent else "")
            )
        caches: dict[int, int] = {}
        done = finished(engine, len(prompts), caches)
        return [done[number] for number in numbers], [caches[number] for number in numbers]

    found = World(side.layout.num_ranks).run(one)
    assert all(own == found[0] for own in found)
    return found[0]


def finished(
    engine: LanedEngine, count: int, caches: dict[int, int] | None = None
) -> dict[int, list[int]]:
    """Take turns until all requests have ended; return their tokens by number."""
    done: dict[int, list[int]] = {}
    while len(done) < count:
        for piece in engine.step():
            completion = engine.take(piece.request)
            if completion is not None:
                done[piece.request] = list(completion.tokens)
                if caches is not None:
                    caches[piece.request] = completion.cached_tokens
    return done
