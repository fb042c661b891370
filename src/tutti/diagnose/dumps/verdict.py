"""Who stopped whom: from the records of all ranks to the ranks that the others wait for. Pure.

A rank waits at its first record that is not complete, for every member of the group that has not
come as far. Following who waits for whom to its end names the culprits: ranks that wait for nobody,
or left no dump. Where all came, but with another operation or size than most, those are it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.diagnose.dumps.records import Dump, Record
from tutti.diagnose.finding import Component, Evidence, Finding, Where, spans
from tutti.diagnose.waits import culprits

# of these every rank gives as much as every other
_EVEN = (
    "all_reduce",
    "allreduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "allgather",
    "reduce",
    "barrier",
)
_MOST_EVIDENCE = 6
_NO_MESSAGES = (
    "gloo's dumps record no messages between two ranks: all of these but one may only wait for a "
    "message of another, so none of them is named"
)


@dataclass(frozen=True, slots=True)
class _Scene:
    """All dumps, laid side by side."""

    dumps: Mapping[int, Dump]
    world: tuple[int, ...]
    members: Mapping[str, tuple[int, ...]]
    declared: frozenset[str]  # groups of which a dump says all members

    def at(self, rank: int, group: str, number: int) -> Record | None:
        """Return a rank's record of a collective, if it has one."""
        dump = self.dumps.get(rank)
        for record in dump.records if dump else ():
            if record.group == group and record.number == number and not record.message:
                return record
        return None

    def last(self, rank: int, like: Record) -> int:
        """Return how far a rank came in a record's group; -1 where it never was.

        Messages and collectives are counted apart.
        """
        dump = self.dumps.get(rank)
        numbers = [
            r.number for r in (dump.records if dump else ())
            if (r.group, r.message) == (like.group, like.message)
        ]  # fmt: skip
        return max(numbers, default=-1)

    def messages(self, rank: int, group: str, kind: str, peer: int) -> list[Record]:
        """Return what a rank sent ("send") to another or received ("recv") from it."""
        dump = self.dumps.get(rank)
        return [
            r for r in (dump.records if dump else ())
            if r.group == group and r.operation.startswith(kind) and r.peer is not None
            and self.global_rank(group, r.peer) == peer
        ]  # fmt: skip

    def global_rank(self, group: str, at: int) -> int:
        """Return who a group's rank is, where a dump says who is of the group."""
        members = self.members[group] if group in self.declared else ()
        return members[at] if at < len(members) else at

    def blocked(self, rank: int) -> Record | None:
        """Return what a rank waits in: its first record that is not complete."""
        dump = self.dumps.get(rank)
        return next((r for r in (dump.records if dump else ()) if r.state != "completed"), None)


def diagnose_dumps(dumps: Sequence[Dump], notes: Sequence[str] = ()) -> Finding:
    """Return which ranks the others wait for, and why."""
    scene = _scene(dumps)
    blocked = {rank: record for rank in scene.dumps if (record := scene.blocked(rank))}
    if not blocked:
        lost = tuple(rank for rank in scene.world if rank not in scene.dumps)
        if lost:
            return _found(scene, lost, {}, "left no dump, while nobody else waits", notes)
        return Finding(
            component=Component.UNDETERMINED, healthy=True, confidence=0.8,
            cause="every collective that was begun was finished", notes=tuple(notes),
        )  # fmt: skip
    if finding := _different(scene, blocked, notes):
        return finding
    waits = {rank: _waited_for(scene, rank, record) for rank, record in blocked.items()}
    _alone(scene, blocked, waits)
    ends = culprits(waits)
    if not ends:
        return _together(scene, blocked, notes)
    return _waiting(scene, ends, blocked, notes)


def _scene(dumps: Sequence[Dump]) -> _Scene:
    by_rank = {dump.rank: dump for dump in dumps}
    known = set(by_rank) | {r for d in dumps for ranks in d.members.values() for r in ranks}
    world = tuple(range(max(known) + 1)) if len(known) > max(known) // 2 else tuple(sorted(known))
    members: dict[str, tuple[int, ...]] = {}
    for dump in dumps:
        members |= dump.members
        for record in dump.records:
            if record.group not in members or record.group not in dump.members:
                seen = set(members.get(record.group, ())) | {dump.rank}
                members[record.group] = tuple(sorted(seen))
    if "0" in members:  # the first group that a job makes is of all its ranks
        members["0"] = world
    declared = frozenset(name for dump in dumps for name in dump.members) | {"0"}
    return _Scene(by_rank, world, members, declared)


def _different(
    scene: _Scene, blocked: Mapping[int, Record], notes: Sequence[str]
) -> Finding | None:
    """Return the finding of ranks that came with another operation or size than most."""
    for record in sorted(blocked.values(), key=lambda r: r.number):
        if record.message:
            continue
        came = {r: scene.at(r, record.group, record.number) for r in scene.members[record.group]}
        kinds = {rank: _kind(entry) for rank, entry in came.items() if entry}
        counts = Counter(kinds.values()).most_common()
        if len(counts) < 2:
            continue
        what = "operation" if len({kind[0] for kind in kinds.values()}) > 1 else "size or type"
        most = counts[0][0]
        tied = len(counts) > 1 and counts[1][1] == counts[0][1]
        odd = tuple(sorted(rank for rank, kind in kinds.items() if kind != most))
        said = "ranks disagree about a collective: another " + what
        return Finding(
            component=Component.SOFTWARE,
            cause=f"{said} in number {record.number} of group {record.group}",
            confidence=0.6 if tied else 0.88,
            where=Where() if tied else Where(ranks=odd),
            evidence=_evidence(scene, [(r, came[r]) for r in (*odd, *kinds)]),
            remedy="make every rank take the same path; compare the lines that called it",
            notes=(*notes, *(["as many ranks on either side: cannot tell which"] if tied else [])),
        )
    return None


def _kind(record: Record) -> tuple[str, int, tuple[str, ...]]:
    if not record.operation.lstrip("_").lower().startswith(_EVEN):
        return (record.operation, 0, ())
    return (record.operation, sum(math.prod(size) for size in record.sizes), record.types)


def _waited_for(scene: _Scene, rank: int, record: Record) -> set[int]:
    """Return the members of a record's group that have not come as far."""
    if record.peer is not None:
        return _peer_waited_for(scene, rank, record)
    behind = set()
    for other in scene.members[record.group]:
        if other == rank:
            continue
        if other not in scene.dumps or scene.last(other, record) < record.number:
            behind.add(other)
    return behind


def _peer_waited_for(scene: _Scene, rank: int, record: Record) -> set[int]:
    """Return the other rank of a message, unless it has begun its side of it."""
    peer = scene.global_rank(record.group, record.peer or 0)
    own, other = ("send", "recv") if record.operation.startswith("send") else ("recv", "send")
    theirs = scene.messages(peer, record.group, other, rank)
    if any(one.state != "completed" for one in theirs):
        return set()
    if scene.dumps[rank].whole and peer in scene.dumps and scene.dumps[peer].whole:
        mine = scene.messages(rank, record.group, own, peer)
        if len(theirs) > mine.index(record):
            return set()
    return {peer}


def _alone(scene: _Scene, blocked: Mapping[int, Record], waits: dict[int, set[int]]) -> None:
    """Let a rank that is alone in a collective of unknown members wait for those that may miss.

    gloo's dumps do not say who is of a group: one that a late rank never used looks as if it had
    fewer members. Whoever is not blocked may be the one; those that others wait for come first.
    """
    for rank, record in blocked.items():
        came = [r for r in scene.world if scene.at(r, record.group, record.number) is not None]
        if waits[rank] or record.message or record.group in scene.declared or came != [rank]:
            continue
        free = set(scene.world) - set(blocked)
        waits[rank] = free & set[int]().union(*waits.values()) or free


def _waiting(
    scene: _Scene,
    ranks: tuple[int, ...],
    blocked: Mapping[int, Record],
    notes: Sequence[str],
) -> Finding:
    silent = [rank for rank in ranks if rank not in scene.dumps]
    if silent:
        why = "left no dump: it died or hangs outside of Python"
    elif all(rank in blocked for rank in ranks):
        why = "is in another collective than the others, which wait for it: their order differs"
        return _found(scene, ranks, blocked, why, notes, component=Component.SOFTWARE)
    else:
        why = "never came to a collective that the others wait in"
        records = [record for dump in scene.dumps.values() for record in dump.records]
        if len(ranks) > 1 and all(r.library == "gloo" and not r.message for r in records):
            found = _found(scene, ranks, blocked, why, (*notes, _NO_MESSAGES))
            return replace(found, where=Where())
    return _found(scene, ranks, blocked, why, notes)


def _found(
    scene: _Scene,
    ranks: tuple[int, ...],
    blocked: Mapping[int, Record],
    why: str,
    notes: Sequence[str],
    component: Component = Component.UNDETERMINED,
) -> Finding:
    who = ("rank " if len(ranks) == 1 else "ranks ") + spans(ranks)
    shown = [(rank, blocked[rank]) for rank in sorted(blocked)]
    last = [
        (r, scene.dumps[r].records[-1])
        for r in ranks
        if r in scene.dumps and scene.dumps[r].records
    ]
    return Finding(
        component=component,
        cause=f"{who} {why}",
        confidence=0.75 if component is Component.SOFTWARE else 0.0,
        where=Where(ranks=ranks),
        evidence=_evidence(scene, [*last, *shown]),
        remedy="" if component is Component.UNDETERMINED else
        "call collectives of several groups in one order on every rank",
        next_steps=() if component is not Component.UNDETERMINED else (
            f"read the log of {who} and dmesg of its host (`tutti doctor logs`)",
            f"while it hangs: py-spy dump --pid of {who}",
        ),
        notes=tuple(notes),
    )  # fmt: skip


def _together(scene: _Scene, blocked: Mapping[int, Record], notes: Sequence[str]) -> Finding:
    """Return the finding of a collective that all came to and that does not end."""
    states = {record.state for record in blocked.values()}
    late = tuple(sorted(r for r, record in blocked.items() if record.state == "scheduled"))
    if states == {"scheduled", "started"} and len(late) < len(blocked) / 2:
        why = "came to the collective, but its chip has not begun it: earlier work holds it up"
        return _found(scene, late, blocked, why, notes)
    return Finding(
        component=Component.NETWORK,
        cause="all ranks are in the same collective, which does not end: the network between them",
        confidence=0.5,
        evidence=_evidence(scene, [(rank, blocked[rank]) for rank in sorted(blocked)]),
        remedy="test the links between these hosts; look for Xid and port errors in dmesg",
        notes=tuple(notes),
    )


def _evidence(scene: _Scene, records: Sequence[tuple[int, Record | None]]) -> tuple[Evidence, ...]:
    unique = dict.fromkeys((rank, record) for rank, record in records if record is not None)
    return tuple(
        Evidence(file=scene.dumps[rank].file, line=record.order + 1, rank=rank,
                 text=record.words() + (f", at {record.frames[0]}" if record.frames else ""))
        for rank, record in list(unique)[:_MOST_EVIDENCE]
    )  # fmt: skip
