"""Flat algorithms: one team of all ranks, whatever the islands.

The members stand in the order of the wire, so a ring crosses between islands as rarely as it can
and the upper levels of a tree are the only ones that leave an island.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from tutti.collective.draft import WHOLE, Draft, Request
from tutti.collective.parts import Cut
from tutti.collective.program import Action, Pattern, Step, Team, Transfer
from tutti.collective.slices import ONE, ZERO, section

Algorithm = Callable[[Request], tuple[Step, ...]]


def flat(pattern: Pattern) -> Algorithm:
    """Return the algorithm that does the operation in one step by `pattern`."""

    def steps(request: Request) -> tuple[Step, ...]:
        draft = Draft()
        draft.add(request.action, pattern, [Team(request.root_first(), request.parts)])
        return draft.steps

    return steps


def double_tree(request: Request) -> tuple[Step, ...]:
    """All-reduce each half of the data by a binary tree of its own.

    The second tree has the reverse order, so that the leaves of one are the inner nodes of the
    other and nobody both sends and adds everything.
    """
    order = request.root_first()
    half = Fraction(1, 2)
    lower, upper = section(0).cut(ZERO, half), section(0).cut(half, ONE)
    draft = Draft()
    teams = [Team(order, Cut((lower,))), Team(order[::-1], Cut((upper,)))]
    draft.add(Action.ALL_REDUCE, Pattern.BINARY, teams)
    return draft.steps


def scatter_gather(request: Request) -> tuple[Step, ...]:
    """Broadcast by scattering and gathering again: every link carries a share, not the whole."""
    team = Team(request.root_first(), Cut(WHOLE))
    draft = Draft()
    ready = draft.add(Action.SCATTER, Pattern.TREE, [team])
    draft.add(Action.ALL_GATHER, request.between(Action.ALL_GATHER, Pattern.RING), [team], ready)
    return draft.steps


def messages(request: Request) -> tuple[Step, ...]:
    """Post all messages of a batch at once; what stays on its rank needs no transfer."""
    transfers = tuple(
        Transfer(source=source, target=target, part=(section(index),))
        for index, (source, target) in enumerate(request.messages)
        if source != target
    )
    return (Step(action=Action.EXCHANGE, rounds=(transfers,)),) if transfers else ()
