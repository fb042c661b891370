"""The doctor's answer: which component, why, where, how surely, and the lines that say so. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Component(enum.StrEnum):
    """What has to be mended."""

    CHIP = "chip"
    NETWORK = "network"
    HOST = "host"
    STORAGE = "storage"
    SOFTWARE = "software"  # a bug in code
    CONFIGURATION = "configuration"  # would run with other settings, versions or resources
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One place in a file, or one record of it, that speaks for a finding."""

    file: str
    line: int  # counted from 1; of files without lines the record, 0 where it is the whole file
    text: str
    says: str = ""  # what the line means
    rank: int | None = None
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The ranks, hosts and devices to look at, as far as the evidence names them."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def words(self) -> str:
        """Return it as a person would say it."""
        parts = []
        if self.ranks:
            parts.append(("rank " if len(self.ranks) == 1 else "ranks ") + spans(self.ranks))
        if self.hosts:
            parts.append(("host " if len(self.hosts) == 1 else "hosts ") + ", ".join(self.hosts))
        if self.devices:
            parts.append("device " + ", ".join(self.devices))
        return " · ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What else it may be."""

    component: Component
    cause: str
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer to "what is wrong?"; `healthy` where nothing is."""

    component: Component
    cause: str
    confidence: float
    where: Where = Where()
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    alternatives: tuple[Alternative, ...] = ()
    next_steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    healthy: bool = False

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 found, 2 undetermined."""
        if self.healthy:
            return 0
        return 2 if self.component is Component.UNDETERMINED else 1

    def to_document(self) -> dict[str, object]:
        """Return plain values, every field of them."""
        return {
            "component": None if self.healthy else self.component.value,
            "healthy": self.healthy,
            "cause": self.cause,
            "confidence": round(self.confidence, 3),
            "where": {
                "ranks": list(self.where.ranks),
                "hosts": list(self.where.hosts),
                "devices": list(self.where.devices),
            },
            "evidence": [
                {
                    "file": one.file,
                    "line": one.line,
                    "text": one.text,
                    "says": one.says,
                    "rank": one.rank,
                    "host": one.host,
                }
                for one in self.evidence
            ],
            "remedy": self.remedy,
            "alternatives": [
                {
                    "component": one.component.value,
                    "cause": one.cause,
                    "confidence": round(one.confidence, 3),
                }
                for one in self.alternatives
            ],
            "next_steps": list(self.next_steps),
            "notes": list(self.notes),
        }


def spans(numbers: tuple[int, ...]) -> str:
    """Return whole numbers as "0–6, 9"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs)
