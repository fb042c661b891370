"""What a plan sends between chips, and by which instructions: all groups, boundaries, tied tables.

Every tensor position of a gradient's or parameter's group is there, not one for all; boundaries
with every piece that travels; tied tables; and what tensor, context and expert groups send inside
blocks. When it is sent says the simulated step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tutti.collective import Operation, build
from tutti.cost.plan.class_prices import ClassPricer, WantedCollective
from tutti.cost.plan.plan_costs import class_pricer, kinds_of, step_context
from tutti.cost.plan.sources import Sources
from tutti.cost.plan.step_context import StepContext
from tutti.fabric.wiring import Integers, Wiring
from tutti.hardware.topology import Position
from tutti.plan.check import embedded_model
from tutti.schedule.boundary import alike_copies
from tutti.schedule.instruction import Instruction, Op, What
from tutti.simulate.estimate import Estimate
from tutti.simulate.inside_traffic import inside_traffic
from tutti.simulate.traffic import Flight, Traffic, program_flights

_WISHING = (Op.GATHER_PARAMETERS, Op.REDUCE_GRADIENTS)


def plan_traffic(
    estimate: Estimate, wiring: Wiring, sources: Sources | None = None
) -> list[Traffic]:
    """Return all traffic of a plan; what stays in one chip is left out."""
    sources = sources or Sources()
    schedule, cluster = estimate.schedule, wiring.cluster
    shared = step_context(schedule, embedded_model(schedule.plan), cluster, sources)
    known: dict[object, Traffic | None] = {}
    program = estimate.result.program
    inside: list[Traffic] = []
    for index, rank_class in enumerate(schedule.classes):
        pricer = class_pricer(rank_class, shared, sources.kernels)
        kinds = kinds_of(rank_class, pricer, shared)
        for code, example in enumerate(kinds.examples):
            for key, traffic in _traffic(example, pricer, shared, wiring, known):
                known[key] = traffic
                if traffic is not None:
                    own = np.flatnonzero(kinds.codes == code) + int(program.offsets[index])
                    seen = traffic.instructions.get(index, np.zeros(0, dtype=np.int64))
                    traffic.instructions[index] = np.union1d(seen, own)
        name = _place(pricer, shared)
        inside += inside_traffic(pricer, kinds, shared, wiring, int(program.offsets[index]), name)
    return [traffic for traffic in known.values() if traffic is not None] + inside


def _traffic(
    entry: Instruction,
    pricer: ClassPricer,
    shared: StepContext,
    wiring: Wiring,
    known: dict[object, Traffic | None],
) -> Iterator[tuple[object, Traffic | None]]:
    key: object
    if entry.op in _WISHING:
        for wish in pricer.wishes(entry):
            key = (wish.use, wish.operation, wish.num_bytes, id(wish.links))
            yield key, known[key] if key in known else _collective(wish, pricer, shared, wiring)
    elif entry.op is Op.SEND:
        wire = shared.schedule.boundary(pricer.rank_class.pipeline, entry.start, entry.what)
        key = ("send", id(wire.sender), id(wire.receiver))
        yield key, known[key] if key in known else _boundary(entry, pricer, shared, wiring)
    elif entry.op is Op.SYNC_TIED:
        key = ("tied", pricer.rank_class.pipeline, entry.what)
        yield key, known[key] if key in known else _tied(entry, pricer, shared, wiring)


def _tied(
    entry: Instruction, pricer: ClassPricer, shared: StepContext, wiring: Wiring
) -> Traffic | None:
    """The tied table, position by position: gradients to the input's stage, parameters back."""
    first, last = (pricer.tied_ends()[i] for i in (0, -1))
    if first is last or not pricer.tied_bytes(entry):
        return None
    start, end = (last, first) if entry.what is What.GRADIENTS else (first, last)
    here, there = (_numbers(list(stage.chips), wiring) for stage in (start, end))
    count = max(len(here), len(there))
    at = np.arange(count)
    sources, targets = here[at % len(here)], there[at % len(there)]
    each = pricer.tied_bytes(entry) * min(len(here), len(there)) / count
    return Traffic(
        name=f"tied table, {entry.what.value}", program="send", operation=Operation.SEND_RECEIVE,
        ranks=len(here) + len(there), groups=1, num_bytes=each * count, chunks=1,
        flights=[Flight(
            sources=sources, targets=targets, num_bytes=np.full(count, each),
            teams=np.zeros(count, dtype=np.int64), rounds=1,
        )],
        efficiency=shared.efficiency((*start.chips.pools, *end.chips.pools)),
    )  # fmt: skip


def _collective(
    wish: WantedCollective, pricer: ClassPricer, shared: StepContext, wiring: Wiring
) -> Traffic | None:
    choice = shared.choose(wish.use, wish.operation, wish.num_bytes, wish.links)
    if choice.algorithm == "none":
        return None
    group = wish.links.group
    program = build(wish.operation, choice.algorithm, group)
    everyone = wish.every()
    seats = np.array(
        [[wiring.chip(chips[rank]) for rank in group.ranks] for chips in everyone], dtype=np.int64
    )
    flights = program_flights(program, seats, wish.num_bytes)
    return Traffic(
        name=f"{wish.use} {_place(pricer, shared)}", program=choice.algorithm,
        operation=wish.operation, ranks=group.size, groups=len(everyone),
        num_bytes=wish.num_bytes, chunks=choice.chunks, flights=flights, seats=seats,
        efficiency=shared.efficiency(wish.links.pools),
    )  # fmt: skip


def _place(pricer: ClassPricer, shared: StepContext) -> str:
    own = pricer.rank_class
    several = f" of pipeline {own.pipeline}" if len(shared.plan.pipelines) > 1 else ""
    return f"of stage {own.stage}{several}"


def _boundary(
    entry: Instruction, pricer: ClassPricer, shared: StepContext, wiring: Wiring
) -> Traffic | None:
    wire = shared.schedule.boundary(pricer.rank_class.pipeline, entry.start, entry.what)
    token = shared.model.hidden * shared.plan.job.precision.stream.num_bytes
    here, there = _numbers(list(wire.sender.chips), wiring), _numbers(
        list(wire.receiver.chips), wiring
    )  # fmt: skip
    rows: list[tuple[int, int, float]] = []
    copies, own, other = alike_copies(wire)
    for rank in range(wire.sender.num_chips // copies):
        for sender, receiver, batch, sequence in wire.from_rank(rank):
            moved = (batch[1] - batch[0]) * (sequence[1] - sequence[0]) * token
            rows += (
                (int(here[sender + copy * own]), int(there[receiver + copy * other]), moved)
                for copy in range(copies)
            )
    rows = [row for row in rows if row[0] != row[1] and row[2] > 0]
    if not rows:
        return None
    a, b, size = (np.array(column) for column in zip(*rows, strict=True))
    pools = (*wire.sender.chips.pools, *wire.receiver.chips.pools)
    return Traffic(
        name=f"boundary at unit {entry.start}, {entry.what.value}", program="send",
        operation=Operation.SEND_RECEIVE, ranks=wire.sender.num_chips + wire.receiver.num_chips,
        groups=1, num_bytes=float(size.sum()), chunks=1,
        flights=[Flight(
            sources=a.astype(np.int64), targets=b.astype(np.int64),
            num_bytes=size.astype(np.float64), teams=np.zeros(len(rows), dtype=np.int64), rounds=1,
        )],
        efficiency=shared.efficiency(pools),
    )  # fmt: skip


def _numbers(chips: list[Position], wiring: Wiring) -> Integers:
    return np.array([wiring.chip(chip) for chip in chips], dtype=np.int64)
