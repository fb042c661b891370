"""What is sent inside blocks: by tensor, context and expert groups, in the midst of computing.

Seconds of a block hold these collectives, so that no instruction stands for them. Who takes part
says the plan, how much is moved and what one call is priced at says the cost model; from a call
that takes longer on the fabric follows what the block takes, by the formula that priced it.
A row goes to each of its experts by itself; the way back from them is taken for the way there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tutti.collective import Operation, build
from tutti.cost.network.group_links import group_links
from tutti.cost.network.program_choice import choose_program
from tutti.cost.operators.exposed_communication import AS_PRICED, PerCollective
from tutti.cost.plan.class_prices import COMPUTING, ClassPricer
from tutti.cost.plan.equal_instructions import Kinds
from tutti.cost.plan.step_context import StepContext
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.plan.plan import ContextKind
from tutti.schedule.instruction import Instruction, Op
from tutti.simulate.traffic import Axis, Flight, Inside, Traffic, program_flights

_AXES: tuple[Axis, ...] = ("tensor", "context", "experts")
# Calls in a pass of a block, by axis: two halves, each reduced over its tensor group; keys and
# values, with their gradients on the way back; rows to experts and back.
_CALLS = {Op.FORWARD: (2, 1, 2), Op.RECOMPUTE: (2, 1, 2), Op.BACKWARD_INPUT: (2, 2, 2)}


class _Call(NamedTuple):
    axis: Axis
    num_bytes: float  # of a rank
    seconds: float  # priced


def inside_traffic(
    pricer: ClassPricer, kinds: Kinds, shared: StepContext, wiring: Wiring, offset: int, name: str
) -> Iterator[Traffic]:
    """Yield the traffic inside the blocks of a class, whose instructions begin at `offset`."""
    number = shared.schedule.classes.index(pricer.rank_class)
    for call, per_kind in _calls(pricer, kinds).items():
        calls = per_kind[kinds.codes]
        at = np.flatnonzero(calls)
        for traffic in _groups(call, pricer, shared, wiring):
            traffic.name = f"{traffic.name} {name}"
            traffic.instructions[number] = at + offset
            traffic.inside = Inside(
                axis=call.axis, calls=calls[at], priced_s=call.seconds, pricer=pricer, kinds=kinds
            )
            yield traffic


def _calls(pricer: ClassPricer, kinds: Kinds) -> dict[_Call, Integers]:
    """Return how often each kind of instruction makes each call."""
    replica, stage = pricer.replica, pricer.rank_state.stage
    used = (replica.tp > 1, replica.cp > 1, bool(stage.experts))
    calls: dict[_Call, Integers] = defaultdict(lambda: np.zeros(len(kinds.examples), np.int64))
    for place, entry in enumerate(kinds.examples):
        for unit in range(entry.start, entry.stop) if entry.op in _CALLS else ():
            priced = pricer.block_collectives(unit)
            for axis, part_of, count, size, seconds in zip(
                _AXES, used, _passes(pricer, entry, unit), priced.num_bytes, priced.seconds,
                strict=True,
            ):  # fmt: skip
                if part_of and count and size > 0:
                    calls[_Call(axis, size, seconds)][place] += count
    return calls


def _passes(pricer: ClassPricer, entry: Instruction, unit: int) -> tuple[int, int, int]:
    """Return the calls of a unit's pass; the first and the last unit reduce once each way."""
    last = pricer.shared.model.head_unit
    if unit in (0, last):
        return (int(entry.op is Op.FORWARD or (entry.op, unit) == (Op.BACKWARD_INPUT, last)), 0, 0)
    if entry.op is Op.RECOMPUTE:
        kind = pricer.rank_state.recompute_kind(unit)
        if not pricer.prices.kernels.recomputed[kind].collectives:
            return (0, 0, 0)
    return _CALLS[entry.op]


def _groups(
    call: _Call, pricer: ClassPricer, shared: StepContext, wiring: Wiring
) -> Iterator[Traffic]:
    replica = pricer.replica
    chips = np.array([wiring.chip(chip) for chip in replica.chips], dtype=np.int64)
    grid = chips.reshape(replica.count, replica.cp, replica.tp)
    if call.axis == "experts":
        yield _exchange(call, chips, pricer, shared, wiring)
    elif call.axis == "tensor":
        seats = grid.reshape(-1, replica.tp)
        yield from _programs(call, Operation.ALL_REDUCE, seats, call.num_bytes, pricer, wiring)
    else:
        seats = grid.transpose(0, 2, 1).reshape(-1, replica.cp)
        whole = call.num_bytes * replica.cp
        if replica.context_kind is ContextKind.ALL_GATHER:
            yield from _programs(call, Operation.ALL_GATHER, seats, whole, pricer, wiring)
        else:
            yield _ring(call, seats, whole, pricer)


def _programs(
    call: _Call, operation: Operation, seats: Integers, num_bytes: float, pricer: ClassPricer,
    wiring: Wiring,
) -> Iterator[Traffic]:  # fmt: skip
    """Yield a collective of groups: each form in which they lie on nodes has its own program."""
    efficiency = pricer.prices.efficiency
    node, first = wiring.chip_node[seats], seats[:, :1]
    form = np.concatenate([seats - first, node - node[:, :1], _slots(first, wiring)], axis=1)
    _, which = np.unique(form, axis=0, return_inverse=True)
    for number in range(int(which.max()) + 1):
        own = seats[which.ravel() == number]
        links = group_links(wiring.cluster, [wiring.position(int(chip)) for chip in own[0]])
        choice = choose_program(operation, num_bytes, links, efficiency)
        ordered = own[:, list(links.group.ranks)]
        yield Traffic(
            name=f"{call.axis} groups", program=choice.algorithm, operation=operation,
            ranks=own.shape[1], groups=len(own), num_bytes=num_bytes, chunks=choice.chunks,
            flights=program_flights(
                build(operation, choice.algorithm, links.group), ordered, num_bytes
            ),
            efficiency=efficiency, seats=ordered,
        )  # fmt: skip


def _slots(chips: Integers, wiring: Wiring) -> Integers:
    """Return the slots of chips in their nodes."""
    return chips - np.searchsorted(wiring.chip_node, wiring.chip_node[chips])


def _ring(call: _Call, seats: Integers, whole: float, pricer: ClassPricer) -> Traffic:
    """Return keys and values that go around, from neighbour to neighbour."""
    groups, size = seats.shape
    return Traffic(
        name="context groups", program="ring", operation=Operation.ALL_GATHER, ranks=size,
        groups=groups, num_bytes=whole, chunks=1,
        flights=[Flight(
            sources=seats.ravel(), targets=np.roll(seats, -1, axis=1).ravel(),
            num_bytes=np.full(seats.size, (size - 1) * call.num_bytes),
            teams=np.repeat(np.arange(groups), size), rounds=size - 1,
        )],
        efficiency=pricer.prices.efficiency,
    )  # fmt: skip


def _exchange(
    call: _Call, chips: Integers, pricer: ClassPricer, shared: StepContext, wiring: Wiring
) -> Traffic:
    """Return the rows that chips of a class send to their groups' experts, by how many each has."""
    stage = pricer.rank_state.stage
    everyone = np.array([wiring.chip(chip) for chip in stage.chips], dtype=np.int64)
    columns: list[list[Any]] = [[], [], [], []]
    widest, before, groups = 0, 0, 0
    for group in stage.experts:
        held = np.array(group.per_chip(shared.model.num_experts), dtype=np.float64)
        rows = everyone[before : before + group.count * group.chips].reshape(-1, group.chips)
        before += rows.size
        a, b = np.repeat(rows, group.chips, axis=1), np.tile(rows, (1, group.chips))
        size = np.tile(held / held.sum() * call.num_bytes, (len(rows), group.chips))
        team = np.repeat(groups + np.arange(len(rows))[:, None], a.shape[1], axis=1)
        sent = (a != b) & (size > 0) & np.isin(a, chips)
        for column, part in zip(columns, (a, b, size, team), strict=True):
            column.append(part[sent])
        widest, groups = max(widest, group.chips), groups + len(rows)
    sources, targets, sizes, teams = (np.concatenate(column) for column in columns)
    team_numbers, of_team = np.unique(teams, return_inverse=True)
    return Traffic(
        name="expert groups", program="direct", operation=Operation.ALL_TO_ALL, ranks=widest,
        groups=len(team_numbers), num_bytes=call.num_bytes, chunks=1,
        flights=[Flight(
            sources=sources, targets=targets, num_bytes=sizes, teams=of_team.ravel(), rounds=1,
        )],
        efficiency=pricer.prices.efficiency,
    )  # fmt: skip


def added_seconds(sent: Iterable[tuple[Traffic, float]]) -> dict[int, Floats]:
    """Return what instructions of each class take longer where a call takes the seconds given."""
    classes: dict[int, dict[str, float]] = {}
    inside: dict[int, Inside] = {}
    for traffic, seconds in sent:
        if traffic.inside is not None:
            (number,) = traffic.instructions
            inside[number] = traffic.inside
            longer = classes.setdefault(number, {})
            axis, ratio = traffic.inside.axis, seconds / traffic.inside.priced_s
            longer[axis] = max(longer.get(axis, 0.0), ratio)  # all wait for the slowest group
    return {
        number: inside[number].kinds.spread(
            partial(_added, inside[number].pricer, AS_PRICED._replace(**longer))
        )
        for number, longer in classes.items()
    }


def _added(pricer: ClassPricer, longer: PerCollective, entry: Instruction) -> float:
    if entry.op not in COMPUTING:
        return 0.0
    return pricer.computed(entry, longer) - pricer.computed(entry, AS_PRICED)
