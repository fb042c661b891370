"""From chains to drafts: the batch over copies, the units over stages, recomputation by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tutti.plan.plan import Offload, Order, Recompute
from tutti.plan.uniform import even_cuts
from tutti.search.cutting.cut_chain import Cutter, StageCut, best_cut
from tutti.search.cutting.memory_relief import Slot
from tutti.search.pricing.memory_budget import copy_bandwidth, forwards, host_bytes, usable_bytes
from tutti.search.pricing.unit_tables import NONE, Config, ConfigTable, FloatArray, Tables
from tutti.search.strategy.coarse_chain import Chain
from tutti.search.strategy.draft import Draft, PipelineDraft, Placement, ReplicaDraft, StageDraft
from tutti.simulate.kernel import compiled

_DIGITS = 3  # of the relative times that a plan carries for its schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCopies:
    """Copies of a chain that take equally many micro-batches."""

    chain: Chain
    copies: int
    micro_batches: int


def split_batch(chains: Sequence[Chain], total: int) -> tuple[PipelineCopies, ...] | None:
    """Share `total` sequences out over all copies of all chains so that the last ends soonest.

    Every copy takes whole micro-batches. At the smallest time in which the copies together can
    take the batch they may be able to take more; what is too much is taken off again, from the
    copies that would end last, whole expert groups at a time. None where micro-batches cannot be
    made to add up.
    """
    if len(chains) == 1:
        (only,) = chains
        return _parts(chains, [-(-total // (only.copies * only.sequences))], total)
    figures = np.array([(c.copies * c.sequences, c.pace, c.fill) for c in chains])
    return _parts(chains, compiled(_rounds)(figures, float(total)).tolist(), total)


def _rounds(figures: Any, total: float) -> Any:  # pragma: no cover - compiled
    """Return the rounds of each chain in the smallest time in which they take the batch.

    Rows: sequences per round, seconds per round, seconds before the first.
    """
    count = len(figures)
    counts = np.zeros(count, dtype=np.int64)
    low, high = 0.0, (figures[:, 1].max() + figures[:, 2].max()) * 2.0
    for turn in range(200):
        middle = high if turn == 0 or low == 0.0 else 0.5 * (low + high)
        taken = 0.0
        for j in range(count):
            rounds = np.floor((middle - figures[j, 2]) / figures[j, 1] * (1.0 + 1e-12))
            taken += max(0.0, rounds) * figures[j, 0]
        if taken >= total:
            if low == 0.0:
                low = 1e-300
            high = middle
        elif low == 0.0:
            high *= 2.0
        else:
            low = middle
        if low > 0.0 and high - low <= 1e-13 * high:
            break
    for j in range(count):
        rounds = np.floor((high - figures[j, 2]) / figures[j, 1] * (1.0 + 1e-12))
        counts[j] = int(max(0.0, rounds))
    return counts


def _parts(
    chains: Sequence[Chain], counts: Sequence[int], total: int
) -> tuple[PipelineCopies, ...] | None:
    """Take off what the chains' copies can do too much in so many rounds."""
    excess = sum(c.copies * c.sequences * n for c, n in zip(chains, counts, strict=True)) - total
    fewer = [0] * len(chains)  # copies that take one micro-batch less
    order = sorted(
        range(len(chains)),
        key=lambda j: (-(chains[j].fill + counts[j] * chains[j].pace), -chains[j].sequences, j),
    )
    for j in sorted(order, key=lambda j: -chains[j].sequences):
        taken = min(chains[j].copies if counts[j] else 0, excess // chains[j].sequences)
        taken -= taken % chains[j].quantum
        fewer[j] = taken
        excess -= taken * chains[j].sequences
    if excess:
        return None
    parts: list[PipelineCopies] = []
    for chain, count, less in zip(chains, counts, fewer, strict=True):
        for copies, micro_batches in ((chain.copies - less, count), (less, count - 1)):
            if copies and micro_batches > 0:
                parts.append(
                    PipelineCopies(chain=chain, copies=copies, micro_batches=micro_batches)
                )
    return tuple(parts) if parts else None


Cuts = dict[tuple[object, ...], StageCut | None]  # that are known, by what they depend on


# Bytes per chip that stay free, because a first attempt took too much: of a pool, or of a stage
# of the parts' first, second… chain. Fewer than none where the attempt left some over.
Spared = Mapping[str | tuple[int, int], float]


def cuts_of(
    tables: Tables,
    parts: Sequence[PipelineCopies],
    spared: Spared | None = None,
    known: Cuts | None = None,
) -> list[StageCut] | None:
    """Return the best cut of every part's chain; None where one does not fit.

    `known` remembers cuts from call to call, as long as nothing is spared.
    """
    known = {} if known is None else known
    cuts: list[StageCut] = []
    for part in parts:
        place = _place_of(parts, part)
        key = (*part.chain.form, place.micro_batches, place.sharing, place.beside)
        if key not in known:
            slots = _slots(tables, part.chain, place, spared or {})
            known[key] = best_cut(slots, _given_cut(tables, len(slots)))
        cut = known[key]
        if cut is None:
            return None
        cuts.append(cut)
    return cuts


def cutter_of(
    tables: Tables, parts: Sequence[PipelineCopies], part: PipelineCopies, spared: Spared
) -> Cutter:
    """Return what cuts the chain of one of the parts."""
    return Cutter(_slots(tables, part.chain, _place_of(parts, part), spared))


def distinct_chains(parts: Sequence[PipelineCopies]) -> list[Chain]:
    """Return the chains of some parts, each once, in their order."""
    return list({id(part.chain): part.chain for part in parts}.values())


class _Place(NamedTuple):
    """What a chain's cut depends on beside itself."""

    number: int  # among the chains
    micro_batches: tuple[int, ...]  # of its parts
    sharing: int  # copies of the chain that share states, at least
    beside: _Beside


class _Beside(NamedTuple):
    """Who holds a unit in other pipelines, at least: chips, and groups of them with all experts."""

    chips: int
    groups: float


def _place_of(parts: Sequence[PipelineCopies], part: PipelineCopies) -> _Place:
    chain, chains = part.chain, distinct_chains(parts)
    alike = [p for p in parts if p.chain is chain]
    # Levels 2 and 3 shard inside a pipeline only, level 1 among all that hold a unit.
    inside = chain.shard >= 2
    holding = [] if inside else [c for c in chains if c is not chain]
    return _Place(
        number=next(n for n, c in enumerate(chains) if c is chain),
        micro_batches=tuple(p.micro_batches for p in alike),
        sharing=min(p.copies for p in alike) if inside else chain.copies,
        beside=_Beside(
            chips=sum(min(_chips(c, k, c.copies) for k in c.configs) for c in holding),
            groups=sum(min(_chips(c, k, c.copies) / k.ep for k in c.configs) for c in holding),
        ),
    )


def _given_cut(tables: Tables, num_ranges: int) -> list[tuple[int, int]] | None:
    """Return the even cut where the space knows no other."""
    problem = tables.problem
    if problem.space.uneven_units or num_ranges > problem.model.num_layers:
        return None
    return even_cuts(problem.model.num_layers, num_ranges)


def draft_of(
    tables: Tables,
    parts: Sequence[PipelineCopies],
    *,
    placement: Placement = "stage",
    spared: Spared | None = None,
    cuts: Sequence[StageCut] | None = None,
) -> Draft | None:
    """Cut the model for every chain, unless it is cut; None where one does not fit."""
    cuts = cuts_of(tables, parts, spared) if cuts is None else cuts
    if cuts is None:
        return None
    first = parts[0].chain
    draft = Draft(
        pipelines=tuple(
            _pipeline(tables, part, cut) for part, cut in zip(parts, cuts, strict=True)
        ),
        schedule=first.schedule.kind,
        shard=first.shard,
        placement=placement,
    )
    return with_orders(draft, tables)


def _slots(tables: Tables, chain: Chain, place: _Place, spared: Spared) -> list[Slot]:
    virtual, depth = chain.schedule.virtual, sum(chain.stages)
    record, problem, slots = chain.schedule.record, tables.problem, []
    delayed = record.delays_weights
    position = 0
    names = [c.pool for c, n in zip(chain.configs, chain.stages, strict=True) for _ in range(n)]
    for config, stages in zip(chain.configs, chain.stages, strict=True):
        table, pool = tables.get(config), tables.pool(config.pool)
        assert table is not None, f"{config} has no measured profile"
        chips = _chips(chain, config, place.sharing)
        usable = usable_bytes(pool.chip.memory_bytes, tables.sources.overheads)
        usable -= spared.get(config.pool, 0.0)
        if problem.unlimited_memory:
            usable = float("inf")
        for s in range(position, position + stages):
            counts = place.micro_batches
            places = [chain.schedule.place(depth, s, n) for n in counts]
            met = _neighbours(names, s, around=virtual > 1)
            lanes = 2 if forwards(problem.cluster, config.pool, met) else 1
            slots.append(
                Slot(
                    table=table,
                    in_flight=max(map(record.in_flight, places)),
                    relieved=max(map(record.passes_ahead, places)) if delayed else None,
                    sharers=(chips + place.beside.chips) / config.tp,
                    expert_sharers=max(1.0, chips / config.ep + place.beside.groups),
                    shard=chain.shard,
                    usable_bytes=usable - spared.get((place.number, s), 0.0),
                    ranges=virtual,
                    micro_batches=max(counts),
                    copy_bandwidth=copy_bandwidth(pool, lanes),
                    host_bytes=host_bytes(pool),
                    recompute=problem.space.recompute,
                    offload=problem.space.offload,
                )
            )
        position += stages
    return slots * virtual


def _neighbours(names: Sequence[str], stage: int, *, around: bool) -> Iterator[str]:
    """Yield the pools before and behind a stage; `around` leads from the last to the first."""
    for other in (stage - 1, stage + 1):
        if around or 0 <= other < len(names):
            yield names[other % len(names)]


def _chips(chain: Chain, config: Config, copies: int) -> int:
    """Return the chips of a chain's stages of one configuration, if it has so many copies."""
    return copies * (chain.sequences // config.sequences) * config.width


def _pipeline(tables: Tables, part: PipelineCopies, cut: StageCut) -> PipelineDraft:
    chain = part.chain
    configs = [c for c, n in zip(chain.configs, chain.stages, strict=True) for _ in range(n)]
    depth = len(configs)
    stages = []
    for s, config in enumerate(configs):
        own = range(s, len(cut.ranges), depth)
        table = tables.get(config)
        assert table is not None
        replica = ReplicaDraft(
            config=config,
            copies=part.copies * (chain.sequences // config.sequences),
            overlap_chunks=table.overlap_chunks,
            recompute=_all_recompute([cut.recompute[i] for i in own]),
            offload=Offload(
                optimizer=tuple(r for i in own for r in cut.offload[i].optimizer),
                activations=tuple(r for i in own for r in cut.offload[i].activations),
            ),
        )
        units = tuple(cut.ranges[i] for i in own)
        stages.append(StageDraft(units=units, replicas=(replica,)))
    return PipelineDraft(micro_batches=part.micro_batches, stages=tuple(stages))


def _all_recompute(parts: list[Recompute]) -> Recompute:
    return Recompute(
        full=tuple(r for one in parts for r in one.full),
        selective=tuple(r for one in parts for r in one.selective),
    )


def with_orders(draft: Draft, tables: Tables) -> Draft:
    """Write the stages' relative times into a draft: what its schedule wants to know of them."""
    pipelines = tuple(
        replace(p, stages=_relative([_timed(tables, stage) for stage in p.stages]))
        for p in draft.pipelines
    )
    return replace(draft, pipelines=pipelines)


def _timed(tables: Tables, stage: StageDraft) -> StageDraft:
    """Return the stage with the seconds of its slowest replicas' passes."""
    orders = []
    for replica in stage.replicas:
        table = tables.get(replica.config)
        assert table is not None, f"{replica.config} has no measured profile"
        orders.append(order_of(table, stage.units))
    slowest = Order(
        forward=max(order.forward for order in orders),
        backward_input=max(order.backward_input for order in orders),
        backward_weight=max(order.backward_weight for order in orders),
    )
    return replace(stage, order=slowest)


def order_of(table: ConfigTable, units: Sequence[tuple[int, int]]) -> Order:
    """Return the seconds of a stage's passes."""

    def total(values: FloatArray) -> float:
        return float(sum(values[NONE, a:b].sum() for a, b in units))

    forward = total(table.forward)
    return Order(
        forward=forward,
        backward_input=max(total(table.backward_input), 1e-3 * forward),
        backward_weight=max(total(table.backward_weight), 1e-3 * forward),
    )


def _relative(stages: list[StageDraft]) -> tuple[StageDraft, ...]:
    """Scale the times to the longest forward, with few digits."""
    longest = max(stage.order.forward for stage in stages)

    def scaled(order: Order) -> Order:
        return Order(
            forward=_rounded(order.forward / longest),
            backward_input=_rounded(order.backward_input / longest),
            backward_weight=_rounded(order.backward_weight / longest),
        )

    return tuple(replace(stage, order=scaled(stage.order)) for stage in stages)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


Grouping = tuple[tuple[str, ...], ...]


def groupings(
    orders: Sequence[tuple[str, ...]], *, mixed: bool, most: int | None = None
) -> list[Grouping]:
    """Return the ways to arrange pools into chains: which pools together, and in which order.

    `orders` are the orders worth a look along a chain, each of all pools; `most` is how many chains
    there may be.
    """
    names = orders[0]
    if len(names) == 1:
        return [(names,)]
    all_groupings: list[Grouping] = []
    if most is None or most >= len(names):
        all_groupings.append(tuple((name,) for name in names))
    if not mixed:
        return all_groupings or [((name,),) for name in names]
    all_groupings += [(order,) for order in orders]
    if len(names) == 3 and most != 1:
        for alone in names:
            pairs = dict.fromkeys(tuple(n for n in order if n != alone) for order in orders)
            all_groupings += [(pair, (alone,)) for pair in pairs]
    return all_groupings
