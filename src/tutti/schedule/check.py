"""The static check: proof, before anything runs, that a Schedule is complete and cannot hang.

`check_schedule` looks at the lists alone, however they were made, and returns what is wrong:
each rank computes every unit of its stage once per micro-batch, forward before backward before
weights; every Send has its Receive and every rectangle of a boundary tensor arrives exactly once;
and the lists run to the end under the hardest rule there is: each class strictly in list order,
every Send, Receive and collective blocking until all its partners have reached it. Whatever runs
the lists with more freedom (lanes, buffers) cannot deadlock either.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from tutti.errors import InputError
from tutti.plan.plan import ChunkPlace, Stage, chunks, covers
from tutti.schedule.boundary import (
    Boundary,
    Holder,
    Transfer,
    holders,
    wanted,
)
from tutti.schedule.check_requirements import DutyRules, check_duties
from tutti.schedule.columns import Columns
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.listing import listing_of
from tutti.schedule.partners import Partners
from tutti.schedule.schedule import RankClass, Schedule, replica_of, stage_of

MOST = 20  # problems that one check reports


def check_schedule(schedule: Schedule) -> list[str]:
    """Return what is wrong with a schedule, in one line each; empty if nothing is."""
    problems: list[str] = []
    lists = _Lists(schedule)
    for step in (_dependencies, _passes, _neighbours, _duties, _rectangles, _progress):
        for problem in step(lists):
            problems.append(problem)
            if len(problems) >= MOST:
                return problems
        if problems:  # later steps rely on what earlier ones establish
            return problems
    return problems


def check_progress(schedule: Schedule) -> list[str]:
    """Return where lists of any kind wait for each other for ever; empty if nowhere."""
    return list(_progress(_Lists(schedule)))


def require_valid(schedule: Schedule) -> None:
    """Raise an InputError with the first problem, if there is one."""
    for problem in check_schedule(schedule):
        raise InputError(f"schedule: {problem}")


class _Lists:
    """The lists of a schedule that differ, with their columns."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.distinct = _distinct(schedule)
        self._columns: dict[int, Columns] = {}

    def columns(self, rank_class: RankClass) -> Columns:
        """Return the columns of a class's list, made once."""
        key = id(rank_class.instructions)
        if key not in self._columns:
            self._columns[key] = Columns.of(rank_class.instructions)
        return self._columns[key]


def _dependencies(lists: _Lists) -> Iterator[str]:
    for rank_class in lists.distinct:
        if lists.columns(rank_class).waits_for_earlier():
            continue
        for index, entry in enumerate(rank_class.instructions):
            if any(not 0 <= wanted < index for wanted in entry.after):
                yield (
                    f"{rank_class.name}: instruction {index} ({entry}) waits for "
                    f"{list(entry.after)}, which does not stand before it"
                )


def _distinct(schedule: Schedule) -> list[RankClass]:
    """Classes of one stage that share one list object and its duties need one look only."""
    seen: dict[object, RankClass] = {}
    for c in schedule.classes:
        replica = replica_of(schedule.plan, c)
        duties = (replica.recompute, replica.offload)
        seen.setdefault((c.pipeline, c.stage, duties, id(c.instructions)), c)
    return list(seen.values())


def _duties(lists: _Lists) -> Iterator[str]:
    """Check that each class does what the plan asks for besides passes and messages."""
    plan = lists.schedule.plan
    given = DutyRules.of(plan)
    for c in lists.distinct:
        many = plan.pipelines[c.pipeline].micro_batches
        stage, replica = stage_of(plan, c), replica_of(plan, c)
        columns = lists.columns(c)
        for problem in check_duties(given, stage, replica, many, c.instructions, columns):
            yield f"{c.name}: {problem}"


# --- every unit once per micro-batch, in order -----------------------------------------------


def _passes(lists: _Lists) -> Iterator[str]:
    plan = lists.schedule.plan
    for rank_class in lists.distinct:
        stage = stage_of(plan, rank_class)
        count = plan.pipelines[rank_class.pipeline].micro_batches
        if lists.columns(rank_class).passes_fit(stage.units, count):
            continue
        yield from _class_passes(rank_class, stage, count)


_STAGES_OF_A_UNIT = {Op.FORWARD: 1, Op.BACKWARD_INPUT: 2, Op.BACKWARD_WEIGHT: 3}


def _class_passes(rank_class: RankClass, stage: Stage, micro_batches: int) -> Iterator[str]:
    progress: dict[tuple[int, int], int] = defaultdict(int)
    yield from _unit_order(rank_class, stage)
    for entry in rank_class.instructions:
        reaches = _STAGES_OF_A_UNIT.get(entry.op)
        if reaches is None:
            continue
        if entry.stop <= entry.start or not 0 <= entry.micro_batch < micro_batches:
            yield f"{rank_class.name}: {entry} names no unit or no micro-batch of this stage"
            continue
        for unit in range(entry.start, entry.stop):
            if not covers(stage.units, unit):
                yield f"{rank_class.name}: {entry}, but unit {unit} is not on this stage"
            elif progress[unit, entry.micro_batch] != reaches - 1:
                yield f"{rank_class.name}: {entry} comes twice or too early for unit {unit}"
            progress[unit, entry.micro_batch] = reaches
    for start, stop in stage.units:
        for unit in range(start, stop):
            for micro_batch in range(micro_batches):
                if progress[unit, micro_batch] != 3:
                    yield (
                        f"{rank_class.name}: unit {unit} never finishes micro-batch {micro_batch}"
                    )


def _unit_order(rank_class: RankClass, stage: Stage) -> Iterator[str]:
    """Check that forward goes up through each chunk's units, and the input gradient down."""
    reached: dict[tuple[Op, int, int], int] = {}
    for entry in rank_class.instructions:
        chunk = next((span for span in stage.units if span[0] <= entry.start < span[1]), None)
        if chunk is None or entry.op not in (Op.FORWARD, Op.BACKWARD_INPUT):
            continue
        key = (entry.op, chunk[0], entry.micro_batch)
        up = entry.op is Op.FORWARD
        here, there = (entry.start, entry.stop) if up else (entry.stop, entry.start)
        if reached.get(key, chunk[0] if up else chunk[1]) != here:
            yield f"{rank_class.name}: {entry} comes twice or too early: its units are not in order"
            return
        reached[key] = there


# --- sends and receives ----------------------------------------------------------------------


def _neighbours(lists: _Lists) -> Iterator[str]:
    """Check that each class has exactly the sends and receives that its place asks for."""
    pipelines = lists.schedule.plan.pipelines
    paths = [chunks(pipeline) for pipeline in pipelines]
    for rank_class in lists.distinct:
        path, many = paths[rank_class.pipeline], pipelines[rank_class.pipeline].micro_batches
        if lists.columns(rank_class).moves_fit(path, rank_class.stage, many):
            continue
        expected = _expected_moves(path, rank_class.stage, many)
        moves: Counter[tuple[Op, What, int, int]] = Counter(
            (entry.op, entry.what, entry.start, entry.micro_batch)
            for entry in rank_class.instructions
            if entry.op in (Op.SEND, Op.RECEIVE)
        )
        for move, times in moves.items():
            if move not in expected:
                yield f"{rank_class.name}: {_move_text(*move)} has no partner"
            elif times > 1:
                yield f"{rank_class.name}: {_move_text(*move)} stands {times} times"
        for move in sorted(expected - moves.keys()):
            yield f"{rank_class.name}: {_move_text(*move)} is missing"
        yield from _uses_what_it_received(rank_class)


def _move_text(op: Op, what: What, unit: int, micro_batch: int) -> str:
    return f"{op} of {what} at unit {unit} for micro-batch {micro_batch}"


def _expected_moves(
    path: list[ChunkPlace], stage: int, micro_batches: int
) -> set[tuple[Op, What, int, int]]:
    moves: set[tuple[Op, What, int, int]] = set()
    for lower, upper in itertools.pairwise(path):
        if lower.stage == upper.stage or stage not in (lower.stage, upper.stage):
            continue
        up, down = (Op.SEND, Op.RECEIVE) if stage == lower.stage else (Op.RECEIVE, Op.SEND)
        for micro_batch in range(micro_batches):
            moves.add((up, What.ACTIVATIONS, upper.start, micro_batch))
            moves.add((down, What.GRADIENTS, upper.start, micro_batch))
    return moves


def _uses_what_it_received(rank_class: RankClass) -> Iterator[str]:
    """Check that passes at a boundary wait for their Receive, and Sends for their pass."""
    entries = rank_class.instructions
    received = {
        (entry.what, entry.start, entry.micro_batch): index
        for index, entry in enumerate(entries)
        if entry.op is Op.RECEIVE
    }
    for entry in entries:
        if entry.op is Op.FORWARD:
            needed = received.get((What.ACTIVATIONS, entry.start, entry.micro_batch))
        elif entry.op is Op.BACKWARD_INPUT:
            needed = received.get((What.GRADIENTS, entry.stop, entry.micro_batch))
        elif entry.op is Op.SEND:
            if not any(_produces(entries[i], entry) for i in entry.after):
                yield f"{rank_class.name}: {entry} does not wait for the pass that makes it"
            continue
        else:
            continue
        if needed is not None and needed not in entry.after:
            yield f"{rank_class.name}: {entry} does not wait for what it receives"


def _produces(source: Instruction, send: Instruction) -> bool:
    if source.micro_batch != send.micro_batch:
        return False
    if send.what is What.ACTIVATIONS:
        return source.op is Op.FORWARD and source.stop == send.start
    return source.op is Op.BACKWARD_INPUT and source.start == send.start


def _rectangles(lists: _Lists) -> Iterator[str]:
    """Check that each rank receives its part of a boundary tensor exactly once."""
    schedule = lists.schedule
    known: dict[object, list[str]] = {}  # boundaries between stages of the same shapes are alike
    for p, pipeline in enumerate(schedule.plan.pipelines):
        checked: set[tuple[int, int]] = set()
        path = chunks(pipeline)
        for lower, upper in itertools.pairwise(path):
            pair = (lower.stage, upper.stage)
            if lower.stage == upper.stage or pair in checked:
                continue
            checked.add(pair)
            for what in (What.ACTIVATIONS, What.GRADIENTS):
                wire = schedule.boundary(p, upper.start, what)
                key = (_shapes(wire.sender), _shapes(wire.receiver), wire.sequence_length)
                if key not in known:
                    known[key] = list(itertools.islice(check_boundary(wire), MOST))
                yield from (f"pipeline {p}: {line}" for line in known[key])


def _shapes(stage: Stage) -> tuple[tuple[int, int, int, bool, int], ...]:
    """What of a stage decides who owns which part of a boundary tensor."""
    return tuple((r.count, r.tp, r.cp, r.sequence_parallel, r.sequences) for r in stage.replicas)


def check_boundary(wire: Boundary) -> Iterator[str]:
    """Yield what a boundary delivers wrongly."""
    sent: Counter[Transfer] = Counter()
    for source in holders(wire.sender):
        sent.update(wire.from_rank(source.rank))
    for target in holders(wire.receiver):
        arriving = wire.to_rank(target.rank)
        if not _tiles(arriving, target, wire.sequence_length):
            yield f"rank {target.rank} of the receiving stage does not get its part exactly once"
        for transfer in arriving:
            sent[transfer] -= 1
    for transfer, left in sent.items():
        if left:
            yield f"{transfer} is sent {left:+d} times more than it is received"


def _tiles(arriving: list[Transfer], target: Holder, sequence_length: int) -> bool:
    """Tell whether rectangles cover the wanted ones without overlap.

    Disjoint rectangles inside the wanted region that have its whole area cover it.
    """
    parts = wanted(target, sequence_length)
    area = 0
    for index, (_, _, batch, sequence) in enumerate(arriving):
        if not any(_inside(batch, p.batch) and _inside(sequence, p.sequence) for p in parts):
            return False
        area += (batch[1] - batch[0]) * (sequence[1] - sequence[0])
        for other in arriving[:index]:
            if _meet(batch, other.batch) and _meet(sequence, other.sequence):
                return False
    return area == sum(
        (batch[1] - batch[0]) * (sequence[1] - sequence[0]) for batch, sequence in parts
    )


def _inside(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return b[0] <= a[0] and a[1] <= b[1]


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


# --- no list waits for ever ------------------------------------------------------------------


def _progress(lists: _Lists) -> Iterator[str]:
    """Run all lists, each strictly in order, every communication a meeting of all partners."""
    schedule = lists.schedule
    points, series, members = _meeting_points(schedule)
    position = [0] * len(points)
    arrived: dict[tuple[int, int], set[int]] = defaultdict(set)
    runnable = list(range(len(points)))
    while runnable:
        index = runnable.pop()
        ahead = series[index]
        while position[index] < len(ahead):
            key = ahead[position[index]]
            here = arrived[key]
            here.add(index)
            if len(here) < len(members[key[0]]):
                break
            del arrived[key]
            for member in members[key[0]]:
                position[member] += 1
                if member != index:
                    runnable.append(member)
    stuck = [i for i, ahead in enumerate(series) if position[i] < len(ahead)]
    for index in stuck[:3]:
        entry = schedule.classes[index].instructions[points[index][position[index]]]
        yield f"deadlock: {schedule.classes[index].name} waits for ever at {entry}"


def _meeting_points(
    schedule: Schedule,
) -> tuple[list[list[int]], list[list[tuple[int, int]]], list[frozenset[int]]]:
    """Return where each class meets others, (series, micro-batch) there, and who meets in each."""
    partners = Partners(schedule)
    known: dict[object, int] = {}
    members: list[frozenset[int]] = []
    points: list[list[int]] = []
    series: list[list[tuple[int, int]]] = []
    for index, rank_class in enumerate(schedule.classes):
        listing = listing_of(rank_class.instructions)
        own = np.full(len(listing.examples), -1, dtype=np.int64)
        for code, example in enumerate(listing.examples):
            met = partners.series(index, example)
            if met is not None:
                own[code] = known.setdefault(met[0], len(known))
                if own[code] == len(members):
                    members.append(met[1])
        entries = own[listing.kinds[1]]
        at = np.flatnonzero(entries >= 0)
        points.append(at.tolist())
        series.append(
            list(zip(entries[at].tolist(), listing.micro_batch[at].tolist(), strict=True))
        )
    return points, series, members
