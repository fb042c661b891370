"""The answer of a check: what chips and rounds came to, as one finding. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.diagnose.cluster.chips import (
    ChipReading,
    SlowChip,
    all_alike,
    incomparable,
    slow_chips,
)
from tutti.diagnose.cluster.rounds import Verdicts
from tutti.diagnose.finding import Alternative, Component, Evidence, Finding, Where
from tutti.units import many

ROUND_0 = "round 0"
_CHIP = "look at its clocks, heat, power and ECC; reset or drain it"


def check_finding(
    readings: Sequence[ChipReading],
    verdicts: Verdicts | None,
    hosts: Sequence[str],
    notes: Sequence[str] = (),
) -> Finding:
    """Return one finding: a wrong product before a slow chip, that before NICs and links."""
    notes = [*notes, *_about(readings)]
    wrong = [own for own in readings if own.wrong]
    if wrong:
        return Finding(
            component=Component.CHIP, confidence=0.95, cause=f"a chip {wrong[0].wrong}",
            where=_where([own.name for own in wrong]), notes=tuple(notes),
            evidence=tuple(_evidence(ROUND_0, f"{own.name}: {own.wrong}") for own in wrong),
            remedy="drain the node; nothing that was computed on it can be trusted",
        )  # fmt: skip
    slow = slow_chips(readings)
    network = None if verdicts is None else _network(verdicts, hosts, notes)
    if slow:
        return _slow_chip(slow, network, notes)
    if network is not None:
        return network
    if alone := incomparable(readings):
        return Finding(
            component=Component.UNDETERMINED, confidence=0.0, notes=tuple(notes),
            where=_where(alone),
            cause=f"products are right, but nothing says how quick {many(len(alone), 'chip')} of "
            "this kind should be",
            next_steps=("tutti profile -o chip.json on a machine that is known to be good, then "
                        "tutti doctor --profile chip.json",),
        )  # fmt: skip
    cause = _healthy(len(readings), len(hosts) if verdicts is not None else 0)
    return Finding(component=Component.UNDETERMINED, healthy=True, confidence=0.9, cause=cause,
                   notes=tuple(notes))  # fmt: skip


def _healthy(chips: int, hosts: int) -> str:
    told = "is as quick as it should be" if chips == 1 else "are as quick as they should be"
    whats = [many(chips, "chip")] * (chips > 0 or not hosts) + [
        f"NICs and links of {hosts} hosts"
    ] * (hosts > 0)
    return f"{whats[0]} {told}" + (f", and so are the {whats[1]}" if len(whats) > 1 else "")


def _slow_chip(slow: Sequence[SlowChip], network: Finding | None, notes: list[str]) -> Finding:
    first = slow[0]
    more = [] if network is None else [
        Alternative(component=network.component, cause=network.cause, confidence=network.confidence)
    ]  # fmt: skip
    return Finding(
        component=Component.CHIP,
        cause=f"{first.name} takes {first.factor:.2f}× as long as {first.against} for {first.part}",
        confidence=0.9 if first.against == "its twins" else 0.8,
        where=_where([chip.name for chip in slow]),
        evidence=tuple(
            _evidence(ROUND_0, f"{c.name}: {c.part} {c.factor:.2f}× {c.against}") for c in slow
        ),
        remedy=_CHIP,
        alternatives=tuple(more),
        notes=tuple(notes),
    )


def _network(verdicts: Verdicts, hosts: Sequence[str], notes: Sequence[str]) -> Finding | None:
    evidence = [
        _evidence("rounds", f"NIC of {hosts[h]}: {share:.0%} of the expected rate with everybody")
        for h, share in verdicts.nics.items()
    ] + [
        _evidence("rounds", f"{hosts[a]} – {hosts[b]}: {share:.0%} of the expected rate, both "
                  "quick with others")
        for (a, b), share in verdicts.links.items()
    ]  # fmt: skip
    if verdicts.nics:
        names = [hosts[h] for h in verdicts.nics]
        cause = f"the NIC of {', '.join(names)} is slow"
    elif verdicts.links:
        names = [hosts[h] for pair in verdicts.links for h in pair]
        pairs = ", ".join(f"{hosts[a]} – {hosts[b]}" for a, b in verdicts.links)
        cause = f"the link {pairs} is slow; its ends are not"
    elif verdicts.either:
        names = [hosts[h] for h in verdicts.either[0]]
        return Finding(
            component=Component.NETWORK, confidence=0.6, where=Where(hosts=tuple(names)),
            cause=f"the network of {' or '.join(names)}, or what joins them, is slow; with so few "
            "hosts it cannot be told which",
            remedy="add a third host and check again", notes=tuple(notes),
        )  # fmt: skip
    else:
        return None
    return Finding(
        component=Component.NETWORK, cause=cause, confidence=0.9, evidence=tuple(evidence),
        where=Where(hosts=tuple(dict.fromkeys(names))), notes=tuple(notes),
        remedy="check cable, transceiver, switch port and PCIe width of what is named",
    )  # fmt: skip


def _about(readings: Sequence[ChipReading]) -> list[str]:
    remarks = [
        f"all chips '{kind}' take {factor:.2f}× what their Profile says: another driver, clock or "
        "power limit?"
        for kind, factor in all_alike(readings).items()
    ]
    lacking = sorted({own.kind for own in readings if not own.expected})
    if lacking:
        kinds = ", ".join(lacking)
        remarks.append(f"no Profile has {kinds}: chips of one kind were compared with each other")
    return remarks


def _where(names: Sequence[str]) -> Where:
    hosts = tuple(dict.fromkeys(name.partition("/")[0] for name in names))
    return Where(hosts=hosts, devices=tuple(name.partition("/")[2] or name for name in names))


def _evidence(file: str, text: str) -> Evidence:
    return Evidence(file=file, line=0, text=text)
