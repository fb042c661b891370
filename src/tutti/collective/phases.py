"""Phases: who sends how much to whom while a step runs, without listing its rounds.

In a ring every edge carries something in every round, so that all rounds together are one steady
phase; likewise an exchange in which everybody talks to everybody. Trees and doublings have other
edges in each round: a phase each. This is what a network sees of a program (`fabric` replays it).
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate, zip_longest

import numpy as np
import numpy.typing as npt

from tutti.collective.expand import in_chunk
from tutti.collective.layout import Layout
from tutti.collective.parts import Blocks, Owned, PartRule, Reshard
from tutti.collective.program import Action, CollectiveProgram, Pattern, Step, Team
from tutti.collective.schedules import SCHEDULES
from tutti.collective.slices import section

Integers = npt.NDArray[np.int64]
_GATHERED = (Action.ALL_GATHER, Action.ALL_REDUCE)
_SCATTERED = (Action.REDUCE_SCATTER, Action.ALL_REDUCE)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """Transfers that run side by side: seats, elements, and the team that each belongs to."""

    rounds: int
    sources: Integers
    targets: Integers
    elements: Integers
    teams: Integers


def phases(program: CollectiveProgram, index: int, layout: Layout, chunk: int = 0) -> list[Phase]:
    """Return the phases of one step for one chunk; the teams' phases of one number are one."""
    step = program.steps[index]
    if step.action is Action.EXCHANGE:
        return [
            _phase(1, [
                (t.source, t.target, layout.size(in_chunk(t.part, chunk, program.chunks)), 0)
                for t in one
            ])
            for one in step.rounds
        ]  # fmt: skip
    known: dict[tuple[int, int], list[int]] = {}
    each = [
        _team_phases(program, step, team, layout, (chunk, program.chunks), known)
        for team in step.teams
    ]
    return [_joined(together) for together in zip_longest(*each)]


def _phase(rounds: int, transfers: list[tuple[int, int, int, int]]) -> Phase:
    table = np.array(transfers, dtype=np.int64).reshape(-1, 4)
    table = table[table[:, 2] > 0]
    return Phase(rounds, table[:, 0], table[:, 1], table[:, 2], table[:, 3])


def _joined(together: tuple[Phase | None, ...]) -> Phase:
    present = [(number, one) for number, one in enumerate(together) if one is not None]
    return Phase(
        max(one.rounds for _, one in present),
        np.concatenate([one.sources for _, one in present]),
        np.concatenate([one.targets for _, one in present]),
        np.concatenate([one.elements for _, one in present]),
        np.concatenate([np.full(len(one.sources), number) for number, one in present]),
    )


def _of(rounds: int, sources: Integers, targets: Integers, elements: Integers) -> Phase:
    busy = (elements > 0) & (sources != targets)
    return Phase(
        rounds, sources[busy], targets[busy], elements[busy],
        np.zeros(int(busy.sum()), dtype=np.int64),
    )  # fmt: skip


def _team_phases(
    program: CollectiveProgram,
    step: Step,
    team: Team,
    layout: Layout,
    chunk: tuple[int, int],
    known: dict[tuple[int, int], list[int]],
) -> list[Phase]:
    members = np.array(team.members, dtype=np.int64)
    size = len(members)
    if size < 2:
        return []
    if isinstance(team.parts, (Blocks, Reshard)):
        return [_pairs(program, team, layout, chunk, members)]
    sizes = _sizes(team.parts, team.members, layout, chunk, known)
    own = np.array(sizes, dtype=np.int64)
    gathers, scatters = step.action in _GATHERED, step.action in _SCATTERED
    if (gathers or scatters) and step.pattern is Pattern.RING:
        following, total = np.roll(members, -1), int(own.sum())
        left = total - np.roll(own, -1)
        team_phases = [_of(size - 1, following, members, left)] if scatters else []
        return team_phases + ([_of(size - 1, members, following, left)] if gathers else [])
    if (gathers or scatters) and step.pattern in (Pattern.DIRECT, Pattern.NATIVE):
        a, b = np.repeat(members, size), np.tile(members, size)
        team_phases = [_of(size - 1, a, b, np.tile(own, size))] if scatters else []
        return team_phases + ([_of(size - 1, a, b, np.repeat(own, size))] if gathers else [])
    return _moves(step, team.members, sizes)


def _sizes(
    rule: PartRule,
    members: tuple[int, ...],
    layout: Layout,
    chunk: tuple[int, int],
    known: dict[tuple[int, int], list[int]],
) -> list[int]:
    key = (id(rule), len(members))
    if isinstance(rule, Owned) or key not in known:
        parts = (rule.part(members, i) for i in range(len(members)))
        known[key] = [layout.size(in_chunk(part, *chunk)) for part in parts]
    return known[key]


def _moves(step: Step, members: tuple[int, ...], sizes: list[int]) -> list[Phase]:
    schedule, size = SCHEDULES[step.action, step.pattern], len(members)
    reached = [0, *accumulate(sizes * 2)]
    return [
        _phase(1, [
            (members[m.source], members[m.target],
             reached[m.first + m.number] - reached[m.first], 0)
            for m in schedule.moves(size, at)
        ])
        for at in range(schedule.rounds(size))
    ]  # fmt: skip


def _pairs(
    program: CollectiveProgram,
    team: Team,
    layout: Layout,
    chunk: tuple[int, int],
    members: Integers,
) -> Phase:
    size, rule = len(members), team.parts
    a, b = np.repeat(members, size), np.tile(members, size)
    if isinstance(rule, Blocks) and isinstance(layout.counts, int):
        one = layout.size(in_chunk((section(0),), *chunk))
        gives = [len(rule.sources_of(team.members, i)) * one for i in range(size)]
        takes = [len(rule.targets_of(team.members, i)) for i in range(size)]
        elements = np.repeat(np.array(gives), size) * np.tile(np.array(takes), size)
    else:
        assert isinstance(rule, (Blocks, Reshard))
        whole = program.group.size
        elements = np.array([
            layout.size(in_chunk(rule.block(team.members, i, j, whole), *chunk)) if i != j else 0
            for i in range(size) for j in range(size)
        ], dtype=np.int64)  # fmt: skip
    return _of(size - 1, a, b, elements)
