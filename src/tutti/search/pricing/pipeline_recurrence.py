"""The step of a chain whose stages are cut, by recurrence: much faster than the event simulator.

Stages run their passes in the order of 1F1B (or interleaved) on a grid of (stage, micro-batch);
units, buckets and collectives are not told apart. Good to a percent or two: it decides what is
simulated, never what is returned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.cost.network.group_links import link_of
from tutti.hardware.topology import Position
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Recompute
from tutti.plan.schedules import StagePlace, schedule_record
from tutti.search.cutting.build_draft import PipelineCopies
from tutti.search.cutting.cut_chain import StageCut
from tutti.search.pricing.unit_tables import FULL, NONE, SELECTIVE, Config, Tables
from tutti.search.strategy.coarse_chain import Chain
from tutti.search.strategy.draft import Draft, PipelineDraft
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def chain_seconds(tables: Tables, part: PipelineCopies, cut: StageCut) -> float:
    """Return the seconds of all passes of a part's micro-batches, and what closes the step."""
    chain = part.chain
    configs = [c for c, n in zip(chain.configs, chain.stages, strict=True) for _ in range(n)]
    depth, virtual, count = len(configs), chain.schedule.virtual, part.micro_batches
    passes = np.zeros((3, depth * virtual))
    for i, span in enumerate(cut.ranges):
        passes[:, i] = _pass_seconds(tables, configs[i % depth], span, cut.recompute[i])
        passes[0, i] += max(0.0, cut.seconds[i] - passes[:, i].sum())  # copies that do not hide
    if any(chain.traffic):
        _add_exposed_traffic(chain, cut, passes)
    sends = _send_seconds(tables, configs)
    record, place = chain.schedule.record, chain.schedule.place
    places = place(depth, np.arange(depth), count)
    ahead = np.full(depth, record.passes_ahead(places))  # the same everywhere in some kinds
    if record.sets_warm_up and depth > 1:
        ahead = np.minimum(count, depths_for_messages(ahead, passes.sum(axis=0), sends))
    seconds = float(
        compiled(_play)(passes, sends, ahead, virtual, count, *_turns(depth, virtual, count))
    )
    # Reductions that follow weight passes which were put off fill the gaps first.
    if record.delays_weights and chain.shard < 2:
        bare = count * float(passes.sum(axis=0).max())
        seconds -= THRESHOLDS.filled_gap * (seconds - bare) * 0.5
    closing = chain.closing + _tied_seconds(tables, chain, configs)
    return (seconds + closing) * slowdown(tables, chain)


def depths_for_messages(ahead: IntArray, stages: FloatArray, sends: FloatArray) -> IntArray:
    """Return how far stages should run ahead so that none waits for messages on their way.

    As many micro-batches as the slowest stage, or link, ends while one goes to the last stage and
    comes back. `ahead` is what suffices without messages. A stage is further ahead than the next
    one: at the same depth either would wait for the other's pass, micro-batch by micro-batch.
    """
    pace = max(float(stages.max()), float(sends[:-1].max(initial=0.0)))
    if pace <= 0.0:
        return ahead
    messages = np.append(2.0 * sends[:-1], 0.0)
    away = np.cumsum((stages + messages)[::-1])[::-1]
    wanted = np.ceil(away / pace - THRESHOLDS.message_slack).astype(np.int64)
    places = np.arange(len(ahead))
    behind: IntArray = np.maximum(ahead, wanted) + places
    return np.maximum.accumulate(behind[::-1])[::-1] - places


def deeper_draft(tables: Tables, draft: Draft) -> Draft | None:
    """Return a draft whose stages run ahead as far as messages ask for; None: as it is."""
    if not schedule_record(draft.schedule).sets_warm_up:
        return None
    pipelines = [_deeper_pipeline(tables, pipeline, draft.schedule) for pipeline in draft.pipelines]
    deeper = replace(draft, pipelines=tuple(pipelines))
    return None if deeper == draft else deeper


def _deeper_pipeline(tables: Tables, pipeline: PipelineDraft, kind: ScheduleKind) -> PipelineDraft:
    depth = len(pipeline.stages)
    if depth == 1:
        return pipeline
    configs = [stage.replicas[0].config for stage in pipeline.stages]
    stages = np.array(
        [
            sum(_pass_seconds(tables, config, stage.units[0], stage.replicas[0].recompute))
            for config, stage in zip(configs, pipeline.stages, strict=True)
        ]
    )
    places = StagePlace(depth, np.arange(depth), pipeline.micro_batches)
    usual = np.full(depth, schedule_record(kind).passes_ahead(places))
    wanted = depths_for_messages(usual, stages, _send_seconds(tables, configs))
    wanted = np.minimum(wanted, pipeline.micro_batches)
    if (wanted == usual).all():
        return pipeline
    deeper = tuple(
        replace(stage, order=replace(stage.order, warm_up=int(ahead)))
        for stage, ahead in zip(pipeline.stages, wanted, strict=True)
    )
    return replace(pipeline, stages=deeper)


def timed(tables: Tables, part: PipelineCopies, cut: StageCut, seconds: float) -> Chain:
    """Return the chain with the pace of its cut, and what its passes take beside it.

    A single stage has its pace from one micro-batch more: that counts traffic that does not hide.
    """
    chain = part.chain
    depth = sum(chain.stages)
    if depth == chain.schedule.virtual == 1:
        longer = replace(part, micro_batches=part.micro_batches + 1)
        pace = chain_seconds(tables, longer, cut) - seconds
    else:
        slowest = max(sum(cut.seconds[s::depth]) for s in range(depth))
        pace = slowest * slowdown(tables, chain)
    return replace(chain, pace=pace, fill=seconds - part.micro_batches * pace)


def slowdown(tables: Tables, chain: Chain) -> float:
    """Return by how much the slowest of all nodes is slower than the others."""
    nodes = max(1, sum(pool.nodes for pool in tables.problem.pools))
    jitter = max(tables.prices[config.pool].node_jitter for config in chain.configs)
    return 1.0 + jitter * math.sqrt(2.0 * math.log(nodes)) if nodes > 1 else 1.0


def _pass_seconds(
    tables: Tables, config: Config, span: tuple[int, int], recompute: Recompute
) -> tuple[float, float, float]:
    """Return the seconds of a range's forward, input and weight passes."""
    sums = tables.sums(config)
    passes = sums[NONE, :, span[1]] - sums[NONE, :, span[0]]
    for kind, ranges in ((SELECTIVE, recompute.selective), (FULL, recompute.full)):
        for a, b in ranges:
            passes += sums[kind, :, b] - sums[kind, :, a] - sums[NONE, :, b] + sums[NONE, :, a]
    forward, backward, weight = passes.tolist()
    return forward, backward, weight


def _add_exposed_traffic(chain: Chain, cut: StageCut, passes: FloatArray) -> None:
    """Lengthen each range's weight passes by what its traffic shows behind its passes."""
    pools = [t for t, n in zip(chain.traffic, chain.stages, strict=True) for _ in range(n)]
    for i, (start, stop) in enumerate(cut.ranges):
        recompute, offload = cut.recompute[i], cut.offload[i]
        apart = sum(b - a for a, b in (*recompute.full, *recompute.selective, *offload.activations))
        each = passes[:, i].tolist()
        passes[2, i] += _exposed_traffic(chain, each, pools[i % len(pools)], stop - start, apart)


def _exposed_traffic(
    chain: Chain, passes: Sequence[float], traffic: float, units: int, apart: int
) -> float:
    """Return what a range's traffic of a micro-batch shows behind the passes that it runs beside.

    Reductions run beside weight passes, and beside input passes of those units that finish their
    backward before the next one begins its own (`apart`); the others' last ones run on behind
    them. Gathers run beside forward and input passes; at level 3 half of the bytes are gradients, a
    quarter each the parameters of the two other passes. What the first unit needs is not asked
    for earlier, and waits for the last reduction.
    """
    forward, backward, weight = (seconds / units for seconds in passes)
    if chain.shard < 3:
        in_turn = max(0, units - apart - THRESHOLDS.reduced_later)
        alone = min(apart, units) * max(0.0, traffic - weight - backward)
        return alone + in_turn * max(0.0, traffic - weight)
    gathered = 0.25 * traffic
    exposed = max(0.0, gathered - forward) + max(0.0, gathered - backward)
    return traffic + units * (exposed + max(0.0, 0.5 * traffic - weight))


def _tied_seconds(tables: Tables, chain: Chain, configs: Sequence[Config]) -> float:
    """Return what a table takes that two stages hold: its gradient one way, then itself back."""
    problem = tables.problem
    model, precision = problem.model, problem.job.precision
    if len(configs) == 1 or not model.ties_weights:
        return 0.0
    first, last = configs[0], configs[-1]
    far = (0, 0) if first.pool != last.pool else _far(tables, last)
    link = link_of(problem.cluster, Position(first.pool, 0, 0), Position(last.pool, *far))
    rate = link.contended_bandwidth * tables.prices[first.pool].efficiency.fabric
    moved: float = model.vocab * model.embedding.dim
    moved *= precision.gradients.num_bytes + precision.parameters.num_bytes
    sharing = min(end.tp * (_sharers(chain, end) if chain.shard else 1) for end in (first, last))
    return 2.0 * link.latency_s + moved / (rate * sharing)


def _sharers(chain: Chain, config: Config) -> int:
    """Return how many chips of a stage share out one state, beside those that split matrices."""
    return chain.copies * (chain.sequences // config.sequences) * config.cp


def _send_seconds(tables: Tables, configs: list[Config]) -> FloatArray:
    """Return the transfer behind each stage (the last one's leads back to the first)."""
    problem = tables.problem
    cluster = problem.cluster
    token_bytes = problem.model.hidden * problem.job.precision.stream.num_bytes
    sends = np.zeros(len(configs))
    known: dict[tuple[Config, Config], float] = {}
    for s, config in enumerate(configs):
        other = configs[(s + 1) % len(configs)]
        if len(configs) == 1:
            break
        if (config, other) not in known:
            far = (0, 0) if other.pool != config.pool else _far(tables, other)
            link = link_of(cluster, Position(config.pool, 0, 0), Position(other.pool, *far))
            efficiency = tables.prices[config.pool].efficiency.fabric
            sequences = max(config.sequences / config.width, other.sequences / other.width)
            moved = sequences * problem.job.sequence_length * token_bytes
            rate = link.contended_bandwidth * efficiency
            known[config, other] = link.latency_s + moved / rate
        sends[s] = known[config, other]
    return sends


def _far(tables: Tables, config: Config) -> tuple[int, int]:
    """A chip of the pool in another node, of the same node where there is only one."""
    pool = tables.pool(config.pool)
    return (1, 0) if pool.nodes > 1 else (0, pool.node.num_chips - 1)


@functools.lru_cache(maxsize=512)
def _turns(depth: int, virtual: int, count: int) -> tuple[IntArray, IntArray]:
    """Return of a stage's passes, by number, the unit range that runs and the micro-batch.

    Micro-batches come in groups of about as many as there are stages; a group passes all ranges
    before the next begins.
    """
    groups = max(1, count // depth) if virtual > 1 else 1
    bounds = count * np.arange(groups + 1) // groups
    index = np.arange(count * virtual)
    group = np.searchsorted(bounds * virtual, index, side="right") - 1
    size, rest = np.diff(bounds)[group], index - bounds[group] * virtual
    return rest // size, bounds[group] + rest % size


def _play(  # pragma: no cover - compiled
    passes: Any, sends: Any, ahead: Any, virtual: int, count: int, turns: Any, micros: Any
) -> float:
    """Run every stage's passes in its order; return when the last one ends.

    Every boundary carries one tensor of a kind after the other. A stage's pass of a number is that
    of the range `turns` says and of the micro-batch `micros` says.
    """
    depth = len(ahead)
    chunks = depth * virtual
    total = count * virtual
    forward = np.full((chunks, count), -1.0)  # when a chunk has what its passes wait for
    backward = np.full((chunks, count), -1.0)
    forward[0] = 0.0
    sent_forward = np.zeros(chunks)  # when the boundary behind a chunk is free
    sent_backward = np.zeros(chunks)  # and that before it
    free = np.zeros(depth)
    done_f = np.zeros(depth, dtype=np.int64)
    done_b = np.zeros(depth, dtype=np.int64)
    finished = 0
    while finished < depth:
        finished = 0
        moved = False
        for s in range(depth):
            while True:
                if done_b[s] == total:
                    finished += 1
                    break
                wants_f = done_f[s] < total and done_f[s] - done_b[s] < ahead[s]
                index = done_f[s] if wants_f else done_b[s]
                micro, turn = micros[index], turns[index]
                chunk = (turn if wants_f else virtual - 1 - turn) * depth + s
                ready = forward[chunk, micro] if wants_f else backward[chunk, micro]
                if ready < 0.0:
                    break
                start = max(free[s], ready)
                if wants_f:
                    free[s] = start + passes[0, chunk]
                    if chunk == chunks - 1:
                        backward[chunk, micro] = free[s]
                    else:
                        sent_forward[chunk] = max(sent_forward[chunk], free[s]) + sends[s]
                        forward[chunk + 1, micro] = sent_forward[chunk]
                    done_f[s] += 1
                else:
                    end = start + passes[1, chunk]
                    if chunk > 0:
                        behind = sends[(s - 1) % depth]
                        sent_backward[chunk] = max(sent_backward[chunk], end) + behind
                        backward[chunk - 1, micro] = sent_backward[chunk]
                    free[s] = end + passes[2, chunk]
                    done_b[s] += 1
                moved = True
        if not moved and finished < depth:
            return np.inf
    last: float = free.max()
    return last
