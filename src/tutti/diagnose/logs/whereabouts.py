"""Where a cause is: the ranks, hosts and devices that its lines name, or those that fell silent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tutti.diagnose.finding import Component, Where
from tutti.diagnose.logs.collect import Collected, Hit

_MOST_NAMED = 8
_ENDED = re.compile(r"\s*(?:exitcode|Exit code:)")  # of torchrun, of Open MPI
_NEAR = 3  # lines; what one process writes at once
_SEQUENCE = re.compile(r"WorkNCCL\(SeqNum=(\d+)")


def whereabouts(of: Sequence[Hit], hits: Sequence[Hit], seen: Collected) -> Where:
    """Return where a cause is; nothing where everybody says it."""
    ranks = sorted({hit.who.rank for hit in of if hit.who.rank is not None})
    hosts = list(dict.fromkeys(hit.who.host for hit in of if hit.who.host))
    first = _first_to_fail(hits)
    everyone = len(ranks) > 2 and len(ranks) >= 0.8 * len(seen.ranks)
    if not ranks or (not everyone and set(first) < set(ranks)):
        ranks = first or ranks or _beside(of, hits)
    if not hosts:
        hosts = _hosts_beside(of, hits)
    if of[0].signature.component is Component.NETWORK:
        hosts = _blamed(hits) or hosts
    if everyone:
        ranks = []
    if len(hosts) > 2 and len(hosts) >= 0.8 * len(seen.hosts):
        hosts = []
    devices = []
    if of[0].signature.component in {Component.CHIP, Component.NETWORK}:
        devices = list(dict.fromkeys(hit.who.device for hit in of if hit.who.device))
    return Where(
        ranks=tuple(ranks[:_MOST_NAMED]),
        hosts=tuple(hosts[:_MOST_NAMED]),
        devices=tuple(devices[:_MOST_NAMED]),
    )


def _first_to_fail(hits: Sequence[Hit]) -> list[int]:
    """Return the rank that the launcher saw fail first, if it says one."""
    ended = [h for h in hits if _ENDED.match(h.line.text) and h.who.rank is not None]
    return [ended[-1].who.rank] if ended and ended[-1].who.rank is not None else []


def _ended_first(hits: Sequence[Hit]) -> Where:
    """Return who ended before the others: as the launcher says, or who alone was ended at all."""
    ended = [
        hit.who for hit in hits
        if hit.signature.family == "killed" or hit.signature.name.startswith("killed ")
    ]  # fmt: skip
    hosts = {who.host for who in ended if who.host}
    alone = {who.rank for who in ended if who.rank is not None}
    ranks = _first_to_fail(hits) or (list(alone) if len(alone) == 1 else [])
    return Where(ranks=tuple(ranks), hosts=tuple(hosts) if len(hosts) == 1 else ())


def _beside(of: Sequence[Hit], hits: Sequence[Hit]) -> list[int]:
    """Return the one rank that speaks in the lines around, if it is one."""
    ranks = {other.who.rank for other in _around(of, hits) if other.who.rank is not None}
    return sorted(ranks) if len(ranks) == 1 else []


def _hosts_beside(of: Sequence[Hit], hits: Sequence[Hit]) -> list[str]:
    """Return the one host that speaks in the lines around, if it is one."""
    hosts = {other.who.host for other in _around(of, hits) if other.who.host}
    return sorted(hosts) if len(hosts) == 1 else []


def _around(of: Sequence[Hit], hits: Sequence[Hit]) -> list[Hit]:
    places: dict[str, set[int]] = {}
    for hit in of:
        places.setdefault(hit.line.file, set()).update(
            range(hit.line.number - _NEAR, hit.line.number + _NEAR + 1)
        )
    return [other for other in hits if other.line.number in places.get(other.line.file, ())]


def _blamed(hits: Sequence[Hit]) -> list[str]:
    """Return the peers that most others blame, if some are blamed more than the rest."""
    counts = Counter(hit.peer for hit in hits if hit.peer)
    if not counts:
        return []
    most = max(counts.values())
    worst = [peer for peer, count in counts.items() if count == most]
    return worst if len(worst) <= 2 else []


def silent_ranks(hits: Sequence[Hit], seen: Collected) -> Where:
    """Return the few ranks that did not time out where the others did, or that are behind.

    Otherwise the rank that the launcher saw fail first, if it says one.
    """
    blamed = {hit.who.rank for hit in hits if hit.signature.family == "blamed"} - {None}
    if len(blamed) == 1:
        return Where(ranks=tuple(rank for rank in blamed if rank is not None))
    waiting: dict[int, list[int]] = {}
    families = {hit.signature.family for hit in hits}
    # who waited in vain was there; without anybody who did, so was who lost a connection
    there = "timeout" if "timeout" in families else "peer-lost"
    for hit in hits:
        if hit.signature.family != there or hit.who.rank is None:
            continue
        numbers = waiting.setdefault(hit.who.rank, [])
        numbers += [int(n) for n in _SEQUENCE.findall(hit.line.text)]
    if len(waiting) < 2:
        return _ended_first(hits)
    everyone = set(range(max(max(seen.ranks, default=0), *waiting) + 1)) | seen.ranks
    missing = sorted(everyone - set(waiting))
    if missing and len(missing) <= max(1, len(everyone) // 4):
        return Where(ranks=tuple(missing))
    at = {rank: min(numbers) for rank, numbers in waiting.items() if numbers}
    if len(at) >= 2 and len(set(at.values())) > 1:
        usual = Counter(at.values()).most_common(1)[0][0]
        behind = sorted(rank for rank, number in at.items() if number < usual)
        if behind and len(behind) <= max(1, len(at) // 4):
            return Where(ranks=tuple(behind))
    return _ended_first(hits)
