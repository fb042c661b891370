"""What a tensor-parallel group of a pool's chips does per layer, for batches of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.batching.settings import PAGES_SHARE
from tutti.cost.serving.pages import unit_weight_bytes, usable_bytes
from tutti.cost.serving.stage_prices import STREAM_BYTES, Formats, StagePrices
from tutti.cost.serving.step_load import StepLoad, decode_load, prefill_load, windows_of
from tutti.models.cached import cached_bytes
from tutti.search.serving.question import ServeProblem

F64 = NDArray[np.float64]
STEP_TOKENS = np.array([1, 16, 32, 48, *range(64, 4097, 64)])
BATCHES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChipGroup:
    """A group of `tp` chips of one pool; figures of one layer, and of the two ends."""

    pool: str
    tp: int
    formats: Formats
    groups: int  # that the pool has
    decode_s: F64  # of a layer, by `BATCHES`
    mixed_s: F64  # of a layer, with the tokens of prompts that come beside so many decodes
    prefill_s: float  # of a layer, for a mean prompt
    step_s: F64  # of a layer's products, by `STEP_TOKENS`
    rows_s: F64  # the same of decodes alone, by `BATCHES`
    keys_s: F64  # of a layer's attention of decodes, by `BATCHES`
    pair_s: float  # of a layer, per pair of a prompt's token and one before it
    host_s: float  # between two steps of an engine of one stage
    head_s: F64  # of head and sampling, by `BATCHES`
    layer_bytes: float  # of a layer's weights, on one chip
    ends_bytes: float  # of embedding and head, on one chip
    token_bytes: float  # of keys and values of a token and a layer, on one chip
    room_bytes: float  # of one chip, for weights and pages
    price: float | None  # of the group, per hour

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.tp} × {self.pool}" if self.tp > 1 else self.pool


def mean_context(problem: ServeProblem) -> float:
    """Return the tokens that a running sequence has on average."""
    traffic = problem.service.traffic
    return traffic.prompt.expected + traffic.output.lasting / 2.0


def kinds_of(problem: ServeProblem) -> list[ChipGroup]:
    """Return every group of chips that engines may be made of."""
    groups = []
    for name in problem.pools:
        pool = problem.cluster.pool(name)
        island = max((len(i.slots) for i in pool.node.islands), default=1)
        tp = 1
        while tp <= min(island, problem.space.tp_max or island):
            if problem.model.tensor_parallel_problem(tp) is None:
                groups.append(_kind(problem, name, tp, island))
            tp *= 2
    return groups


def _kind(problem: ServeProblem, name: str, tp: int, island: int) -> ChipGroup:
    model, pool = problem.model, problem.cluster.pool(name)
    formats, windows = problem.formats(name), windows_of(problem.model)
    known = (problem.measured or {}).get(name)

    def stage(first: int, last: int) -> StagePrices:
        return StagePrices(
            model, (first, last), problem.cluster, pool, tp=tp, formats=formats, measured=known
        )

    layers = model.num_layers
    blocks, head = stage(1, layers + 1), stage(layers + 1, layers + 2)
    context = mean_context(problem)
    loads = [decode_load(int(batch), context, windows) for batch in BATCHES]
    weights = sum(unit_weight_bytes(model, u, tp, formats) for u in range(1, layers + 1))
    ends = [unit_weight_bytes(model, unit, tp, formats) for unit in (0, model.head_unit)]
    held = cached_bytes(
        model, range(1, layers + 1), tp=tp, stored=formats.cache_bytes, stream=STREAM_BYTES
    )
    per_hour = pool.price_per_chip_hour
    decode_s = np.array([blocks.seconds(load) for load in loads]) / layers
    bare = (0.0,) * len(windows)
    rows_s = np.array([blocks.seconds(load._replace(keys=bare)) for load in loads]) / layers
    return ChipGroup(
        pool=name,
        tp=tp,
        formats=formats,
        groups=pool.nodes * (pool.node.num_chips // island) * (island // tp),
        decode_s=decode_s,
        mixed_s=np.array([blocks.seconds(_mixed(problem, b)) for b in BATCHES.tolist()]) / layers,
        prefill_s=_prompt_seconds(problem, blocks, windows) / layers,
        step_s=np.array([blocks.seconds(_plain(count, windows)) for count in STEP_TOKENS.tolist()])
        / layers,
        rows_s=rows_s,
        keys_s=np.maximum(0.0, decode_s - rows_s),
        pair_s=_pair_seconds(problem, blocks, windows) / layers,
        host_s=blocks.own.step_s,
        head_s=np.array([head.seconds(load) for load in loads]),
        layer_bytes=weights / layers,
        ends_bytes=max(ends) if layers else 0.0,
        token_bytes=held / layers,
        room_bytes=usable_bytes(pool.chip),
        price=None if per_hour is None else per_hour * tp,
    )


def _plain(tokens: int, windows: tuple[int | None, ...]) -> StepLoad:
    """Return a step of so many tokens that look at nothing."""
    none = (0.0,) * len(windows)
    return StepLoad(tokens, 0, 0, none, none)


def _pair_seconds(
    problem: ServeProblem, blocks: StagePrices, windows: tuple[int | None, ...]
) -> float:
    """Return the blocks' seconds per pair of tokens, of a chunk in the middle of a prompt."""
    count, start = 128, round(problem.service.traffic.prompt.lasting / 2.0)
    load = prefill_load([(start, count)], windows)
    plain = blocks.seconds(load._replace(pairs=(0.0,) * len(windows), samples=0))
    return max(0.0, blocks.seconds(load) - plain) / (count * max(1, start))


def prompt_tokens(problem: ServeProblem, batch: float) -> float:
    """Return the tokens of prompts that come while so many sequences get a token each."""
    traffic = problem.service.traffic
    own = max(1.0, traffic.prompt.expected - traffic.shared_prefix)
    return batch * own / traffic.output.expected


def _mixed(problem: ServeProblem, batch: int) -> StepLoad:
    """Return the step of an engine that does both, in the long run: decodes, and chunks beside."""
    traffic, windows = problem.service.traffic, windows_of(problem.model)
    chunk = prompt_tokens(problem, batch)
    decodes = decode_load(batch, mean_context(problem), windows)
    before = (traffic.prompt.expected + traffic.shared_prefix) / 2.0
    pairs = tuple(chunk * (before if w is None else min(before, w)) for w in windows)
    return decodes._replace(tokens=batch + max(1, round(chunk)), pairs=pairs)


def _prompt_seconds(
    problem: ServeProblem, blocks: StagePrices, windows: tuple[int | None, ...]
) -> float:
    """Return the blocks' seconds for a mean prompt, computed in chunks beside others'.

    A short prompt shares its step: it costs its part of a full one.
    """
    chunk, prompt = problem.space.chunk, round(problem.service.traffic.prompt.expected)
    prompt = max(1, prompt - problem.service.traffic.shared_prefix)
    if prompt >= chunk:
        total, start = 0.0, 0
        while start < prompt:
            count = min(chunk, prompt - start)
            # the last chunk's step is filled by others
            share = count / chunk
            load = prefill_load([(max(0, start), chunk)], windows)
            total += share * blocks.seconds(load)
            start += count
        return total
    beside = max(1, min(4, chunk // prompt))  # few prompts wait at a time
    return blocks.seconds(prefill_load([(0, prompt)] * beside, windows)) / beside


def pages_room(kind: ChipGroup, layers: float, ends: float) -> float:
    """Return the bytes that pages may take on a chip that holds so many layers."""
    left = kind.room_bytes - layers * kind.layer_bytes - ends * kind.ends_bytes
    return PAGES_SHARE * left if left > 0 else left
