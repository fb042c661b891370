"""`build` and `algorithms`: the catalog of programs.

The only place that knows which algorithm exists for which operation and when it applies. Which one
to *use* is decided by the cost model, never here.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.collective import flat, hierarchical, leader, rail
from tutti.collective.draft import Request
from tutti.collective.flat import Algorithm
from tutti.collective.group import Group
from tutti.collective.program import CollectiveProgram, Operation, Pattern
from tutti.errors import InputError, hint

_GATHER_LIKE: dict[str, Algorithm] = {
    "native": flat.flat(Pattern.NATIVE),
    "ring": flat.flat(Pattern.RING),
    "doubling": flat.flat(Pattern.DOUBLING),
    "direct": flat.flat(Pattern.DIRECT),
}
_BROADCAST_LIKE: dict[str, Algorithm] = {
    "native": flat.flat(Pattern.NATIVE),
    "tree": flat.flat(Pattern.TREE),
    "binary": flat.flat(Pattern.BINARY),
    "ring": flat.flat(Pattern.RING),
    "direct": flat.flat(Pattern.DIRECT),
}
_SCATTER_LIKE: dict[str, Algorithm] = {
    "native": flat.flat(Pattern.NATIVE),
    "tree": flat.flat(Pattern.TREE),
    "direct": flat.flat(Pattern.DIRECT),
}

CATALOG: dict[Operation, dict[str, Algorithm]] = {
    Operation.ALL_REDUCE: {
        **_GATHER_LIKE,
        "tree": flat.flat(Pattern.TREE),
        "double_tree": flat.double_tree,
        "hierarchical": hierarchical.all_reduce,
        "proportional": hierarchical.proportional,
        "leader": leader.all_reduce,
    },
    Operation.REDUCE_SCATTER: {
        **_GATHER_LIKE,
        "hierarchical": hierarchical.reduce_scatter,
        "leader": leader.reduce_scatter,
    },
    Operation.ALL_GATHER: {
        **_GATHER_LIKE,
        "hierarchical": hierarchical.all_gather,
        "leader": leader.all_gather,
    },
    Operation.BROADCAST: {
        **_BROADCAST_LIKE,
        "scatter_gather": flat.scatter_gather,
        "hierarchical": hierarchical.broadcast,
        "leader": leader.broadcast,
    },
    Operation.REDUCE: {
        **_BROADCAST_LIKE,
        "hierarchical": hierarchical.reduce,
        "leader": leader.reduce,
    },
    Operation.GATHER: {**_SCATTER_LIKE, "leader": leader.gather},
    Operation.SCATTER: {**_SCATTER_LIKE, "leader": leader.scatter},
    Operation.ALL_TO_ALL: {
        "native": flat.flat(Pattern.NATIVE),
        "direct": flat.flat(Pattern.DIRECT),
        "rail": rail.all_to_all,
    },
    Operation.BARRIER: {
        "native": leader.all_reduce,  # of one island: its own reduce and broadcast
        "tree": flat.flat(Pattern.TREE),
        "leader": leader.all_reduce,
    },
    Operation.SEND_RECEIVE: {"direct": flat.messages},
}

_NESTED = frozenset({"hierarchical", "leader", "rail"})  # worth it only where islands have insides


def algorithms(operation: Operation | str, group: Group) -> tuple[str, ...]:
    """Return the algorithms that make sense for an operation on a group."""
    return tuple(name for name in CATALOG[_operation(operation)] if _applies(name, group))


def _applies(name: str, group: Group) -> bool:
    return not unmet_need(name, group)


def unmet_need(algorithm: str, group: Group) -> str:
    """Return what an algorithm needs of a group and this one does not have; empty: it can run."""
    several = len(group.islands) > 1
    if algorithm == "native":
        return "needs one island" if several else ""
    if algorithm in _NESTED:
        inside = several and group.size > len(group.islands)
        return "" if inside else "needs several islands, one of them with several ranks"
    return "needs several islands" if algorithm == "proportional" and not several else ""


def build(
    operation: Operation | str,
    algorithm: str,
    group: Group,
    *,
    root: int | None = None,
    messages: Sequence[tuple[int, int]] = (),
    across: Pattern | str | None = None,
    order: Sequence[int] | None = None,
    chunks: int = 1,
    connections: int = 1,
) -> CollectiveProgram:
    """Return the program of an algorithm; `root`, `messages` and `order` name ranks.

    `across` is the pattern between islands where the algorithm leaves a choice; `order` the order
    of all ranks in a flat algorithm, if not the group's; `chunks` and `connections` as in
    `CollectiveProgram`.
    """
    wanted = _operation(operation)
    known = CATALOG[wanted]
    if algorithm not in known:
        raise InputError(f"no algorithm '{algorithm}' for {wanted}; {hint(algorithm, known)}")
    if algorithm == "native" and len(group.islands) > 1:
        raise InputError(f"'native' needs one island; the group has {len(group.islands)}")
    if wanted.has_root != (root is not None):
        raise InputError(f"{wanted} {'needs a' if wanted.has_root else 'has no'} root")
    if chunks < 1 or connections < 1:
        raise InputError(f"chunks ({chunks}) and connections ({connections}) must be at least 1")
    request = Request(
        operation=wanted,
        group=group,
        root=None if root is None else group.seat(root),
        order=None if order is None else _order(order, group),
        across=None if across is None else _pattern(across),
        messages=tuple((group.seat(source), group.seat(target)) for source, target in messages),
    )
    return CollectiveProgram(
        operation=wanted,
        algorithm=algorithm,
        group=group,
        steps=known[algorithm](request),
        root=request.root,
        messages=request.messages,
        chunks=1 if wanted is Operation.BARRIER else chunks,
        connections=connections,
    )


def _operation(name: Operation | str) -> Operation:
    try:
        return Operation(name)
    except ValueError:
        raise InputError(f"no operation '{name}'; {hint(name, list(Operation))}") from None


def _pattern(name: Pattern | str) -> Pattern:
    try:
        return Pattern(name)
    except ValueError:
        raise InputError(f"no pattern '{name}'; {hint(name, list(Pattern))}") from None


def _order(ranks: Sequence[int], group: Group) -> tuple[int, ...]:
    if sorted(ranks) != sorted(group.ranks):
        raise InputError(f"'order' must name each of the group's {group.size} ranks once")
    return tuple(group.seat(rank) for rank in ranks)
