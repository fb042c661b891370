"""What the kit found: one outcome per check, as values, as JSON and as JUnit XML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any
from xml.etree import ElementTree

DEVICE = "device"  # what the checks of the device itself stand under


class Verdict(StrEnum):
    """How a check came out."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"  # the chip or the implementation says that it does not do this


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One check of one call, or of the device."""

    subject: str  # an operator, or DEVICE
    check: str  # forward, backward, repeat; or what of the device
    verdict: Verdict
    implementation: str = ""
    dtype: str = ""
    case: str = ""
    detail: str = ""  # what failed, or why it is unsupported
    error: float = 0.0  # the largest, as a part of what is tolerated

    @property
    def name(self) -> str:
        """The outcome's name within its subject."""
        parts = (self.implementation, self.dtype, self.case, self.check)
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was checked on one device."""

    kind: str
    chip: str
    device: str
    software: str
    seconds: float
    outcomes: tuple[Outcome, ...]

    def of(self, verdict: Verdict) -> Iterator[Outcome]:
        """Yield the outcomes with a verdict."""
        return (outcome for outcome in self.outcomes if outcome.verdict is verdict)

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something was checked."""
        return any(self.of(Verdict.PASSED)) and not any(self.of(Verdict.FAILED))

    def count(self, verdict: Verdict) -> int:
        """Return how many outcomes have a verdict."""
        return sum(1 for _ in self.of(verdict))

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "kind": self.kind,
            "chip": self.chip,
            "device": self.device,
            "software": self.software,
            "seconds": round(self.seconds, 3),
            "ok": self.passed,
            "counts": {str(verdict): self.count(verdict) for verdict in Verdict},
            "outcomes": [
                {
                    key: _finite(value)
                    for key, value in asdict(outcome).items()
                    if value not in ("",)
                }
                for outcome in self.outcomes
            ],
        }

    def junit(self) -> str:
        """Return JUnit XML: a suite per operator and one for the device."""
        root = ElementTree.Element(
            "testsuites",
            name=f"tutti accelerator check {self.device}",
            tests=str(len(self.outcomes)),
            failures=str(self.count(Verdict.FAILED)),
            skipped=str(self.count(Verdict.UNSUPPORTED)),
            time=f"{self.seconds:.3f}",
        )
        for subject in dict.fromkeys(outcome.subject for outcome in self.outcomes):
            own = [outcome for outcome in self.outcomes if outcome.subject == subject]
            suite = ElementTree.SubElement(
                root,
                "testsuite",
                name=subject,
                tests=str(len(own)),
                failures=str(sum(o.verdict is Verdict.FAILED for o in own)),
                errors="0",
                skipped=str(sum(o.verdict is Verdict.UNSUPPORTED for o in own)),
            )
            for outcome in own:
                _test_case(suite, outcome)
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _finite(value: Any) -> Any:
    """Return a value that JSON has: an error beyond all numbers becomes null."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _test_case(suite: ElementTree.Element, outcome: Outcome) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=outcome.subject, name=outcome.name)
    if outcome.verdict is Verdict.FAILED:
        ElementTree.SubElement(case, "failure", message=outcome.detail)
    elif outcome.verdict is Verdict.UNSUPPORTED:
        ElementTree.SubElement(case, "skipped", message=outcome.detail)
