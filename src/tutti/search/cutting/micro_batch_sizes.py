"""Micro-batches of other sizes, where whole ones of the usual sizes share the batch out badly.

A pipeline takes whole micro-batches. Where each takes few and large ones, a pool that should have
a twentieth less has all of them or a quarter less; where a node is gone, the copies that are left
may need a round more. Sizes between the powers of two mend that, and some suit the tiles of a
chip's products better. Every chain of a strategy is cut and timed for each size near its own. Then
all are chosen together: what a copy of each chain takes, and of one chain some copies less than the
others, so that it adds up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tutti.search.cutting.build_draft import Cuts, PipelineCopies, cuts_of
from tutti.search.pricing.pipeline_recurrence import chain_seconds, timed
from tutti.search.pricing.unit_tables import Tables
from tutti.search.strategy.coarse_chain import Chain
from tutti.search.thresholds import THRESHOLDS


class _Load(NamedTuple):
    """What a copy of a chain may take of a step."""

    sequences: int
    seconds: float  # in which it does
    chain: Chain
    micro_batches: int


def resized(
    tables: Tables, chains: Sequence[Chain], parts: Sequence[PipelineCopies], known: Cuts
) -> tuple[PipelineCopies, ...] | None:
    """Return the parts with sizes that share the batch out better; None: those that they have."""
    problem = tables.problem
    if not problem.has_other_sizes:
        return None
    options = [list(_variants(tables, chain, chains, parts, known)) for chain in chains]
    if not all(options):
        return None
    total = problem.job.global_batch
    fastest = [max(sizes, key=lambda chain: chain.rate) for sizes in options]
    fluid = fluid_end([(chain.rate, chain.fill) for chain in fastest], total)
    now = _end(tables, parts, known)
    if fluid > now * (1.0 - THRESHOLDS.worth_resizing):
        return None
    few = math.floor(THRESHOLDS.loads_together ** (1.0 / len(options)))
    loads = [_loads(sizes, fluid, few) for sizes in options]
    copies = [chain.copies for chain in chains]
    if not all(loads):
        return None
    return _first_even(
        loads, copies, total, now * (1.0 - THRESHOLDS.worth_resizing), idle=problem.space.idle
    )


def _variants(
    tables: Tables,
    chain: Chain,
    chains: Sequence[Chain],
    parts: Sequence[PipelineCopies],
    known: Cuts,
) -> Iterator[Chain]:
    """Yield a chain with every size near its own, timed."""
    part = next((part for part in parts if part.chain is chain), None)
    beside = [
        PipelineCopies(chain=c, copies=c.copies, micro_batches=1) for c in chains if c is not chain
    ]
    taken = part.micro_batches * chain.sequences if part is not None else chain.sequences
    for size in tables.problem.all_sequence_counts():
        scaled = _scaled(chain, size)
        if (
            scaled is None
            or not 1.0 / THRESHOLDS.near_size <= size / chain.sequences <= THRESHOLDS.near_size
        ):
            continue
        if any(tables.get(config) is None for config in scaled.configs):
            continue
        count = max(1, round(taken / size))
        trial = PipelineCopies(chain=scaled, copies=chain.copies, micro_batches=count)
        cuts = cuts_of(tables, [trial, *beside], known=known)
        if cuts is not None:
            yield timed(tables, trial, cuts[0], chain_seconds(tables, trial, cuts[0]))


def _scaled(chain: Chain, size: int) -> Chain | None:
    """Return the chain with so many sequences per copy; None where a stage cannot share them."""
    if any(config.sequences * size % chain.sequences for config in chain.configs):
        return None
    configs = tuple(
        config._replace(sequences=config.sequences * size // chain.sequences)
        for config in chain.configs
    )
    return replace(chain, configs=configs, sequences=size)


def _end(tables: Tables, parts: Sequence[PipelineCopies], known: Cuts) -> float:
    """Return when the last of the parts ends as they are; never where they do not add up."""
    taken = sum(part.copies * part.micro_batches * part.chain.sequences for part in parts)
    if taken != tables.problem.job.global_batch:
        return math.inf
    cuts = cuts_of(tables, parts, known=known)
    if cuts is None:
        return math.inf
    return max(chain_seconds(tables, part, cut) for part, cut in zip(parts, cuts, strict=True))


def fluid_end(chains: Sequence[tuple[float, float]], total: int) -> float:
    """Return when all would end if micro-batches could be split.

    Chains are given by their sequences per second and the seconds they take beside.
    """
    return (total + sum(rate * fill for rate, fill in chains)) / sum(rate for rate, _ in chains)


def coarse_fluid_end(chains: Sequence[Chain], total: int) -> float:
    """Return the same by what the coarse model says of the chains."""
    optimism = THRESHOLDS.optimism[chains[0].shard]
    figures = [(chain.rate / optimism, (chain.fill + chain.closing) * optimism) for chain in chains]
    return fluid_end(figures, total)


def _loads(variants: Sequence[Chain], fluid: float, most: int) -> list[_Load]:
    """Return what a copy may take in about so many seconds: the fastest way for each number.

    Of more than `most` those whose seconds come nearest.
    """
    best: dict[int, _Load] = {}
    for chain in variants:
        whole = (fluid - chain.fill) / chain.pace  # micro-batches
        fewest = max(1, math.floor(whole * (1.0 - THRESHOLDS.around_load)))
        for count in range(
            fewest, max(fewest, math.ceil(whole * (1.0 + THRESHOLDS.around_load))) + 1
        ):
            added = _Load(
                count * chain.sequences, chain.fill + count * chain.pace, chain, count
            )  # fmt: skip
            known = best.get(added.sequences)
            if known is None or added.seconds < known.seconds:
                best[added.sequences] = added
    nearest = sorted(best.values(), key=lambda load: (abs(load.seconds - fluid), load.sequences))
    return sorted(nearest[:most], key=lambda load: load.sequences)


def _first_even(
    loads: Sequence[Sequence[_Load]],
    copies: Sequence[int],
    total: int,
    limit: float,
    *,
    idle: bool = False,
) -> tuple[PipelineCopies, ...] | None:
    """Return the loads that add up and whose last one ends first; None: not before the limit.

    With `idle`, copies of one chain may also take nothing.
    """
    useful = [[load for load in own if load.seconds < limit] for own in loads]
    ranked = sorted(
        (
            (max(load.seconds for load in chosen), number, chosen)
            for number, chosen in enumerate(itertools.product(*useful))
            if sum(n * load.sequences for n, load in zip(copies, chosen, strict=True)) >= total
        ),
        key=lambda entry: entry[:2],
    )
    for end, _, chosen in ranked:
        evened = _evened(chosen, useful, copies, total, end, idle=idle)
        if evened is not None:
            return evened
    return None


def _evened(
    chosen: Sequence[_Load],
    loads: Sequence[Sequence[_Load]],
    copies: Sequence[int],
    total: int,
    end: float,
    *,
    idle: bool,
) -> tuple[PipelineCopies, ...] | None:
    """Return parts that take just so many sequences, some copies of one chain less than others."""
    excess = sum(n * load.sequences for n, load in zip(copies, chosen, strict=True)) - total
    if not excess:
        return tuple(itertools.starmap(_part, zip(chosen, copies, strict=True)))
    for place, load in enumerate(chosen):
        lesser: list[_Load | None] = [
            less
            for less in reversed(loads[place])
            if less.sequences < load.sequences and less.seconds <= end
        ]
        for less in [*lesser, None] if idle else lesser:
            saved = load.sequences - (less.sequences if less is not None else 0)
            few = excess // saved
            if excess % saved == 0 and few < copies[place]:
                pairs = enumerate(zip(chosen, copies, strict=True))
                others = [_part(other, n) for i, (other, n) in pairs if i != place]
                return (*_split(load, less, copies[place], few), *others)
    return None


def _part(load: _Load, copies: int) -> PipelineCopies:
    return PipelineCopies(chain=load.chain, copies=copies, micro_batches=load.micro_batches)


def _split(load: _Load, less: _Load | None, copies: int, few: int) -> tuple[PipelineCopies, ...]:
    """Return the copies that take more and those that take less; of one chain where they can be."""
    if less is not None and load.chain is less.chain:
        return _part(load, copies - few), _part(less, few)
    many = _part(load._replace(chain=replace(load.chain, copies=copies - few)), copies - few)
    if less is None:
        return (many,)
    return many, _part(less._replace(chain=replace(less.chain, copies=few)), few)
