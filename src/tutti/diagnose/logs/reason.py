"""From known lines to one answer: causes before symptoms, who was first, who fell silent. Pure.

Every cause has the share of cases in which its line alone names the right component. That is its
score at first. It falls where the line was only a warning, where the job went on after it, where
another cause came before; agreeing lines raise it, contradicting ones lower it. The confidence is
how often answers of such a score were right on known failures. A log of symptoms alone is
undetermined: it says what to look at next.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from tutti.diagnose.finding import Alternative, Component, Evidence, Finding
from tutti.diagnose.logs.collect import Collected, Hit
from tutti.diagnose.logs.confidence import confidence_of
from tutti.diagnose.logs.whereabouts import silent_ranks, whereabouts
from tutti.units import many

MOST_EVIDENCE = 6
_LEAST = 0.4  # below it, no component is named
_WARNING = re.compile(r"(?<!NCCL )\bWARN(?:ING)?\b|\[W\b|\bWarning:|\bW\d{4} ")
_QUIET = re.compile(r"\b(?:INFO|DEBUG)\b|\[I\b|\bI\d{4} ")
_LOUD = re.compile(  # words of a failure, not of a setting that is about failures
    r"\b(?:ERROR|FATAL|CRITICAL|PANIC|[NRH]CCL WARN)\b|\w(?:Error|Exception)\b|"
    r"(?i:\berror:|\b(?:failed|failure|aborted|panic|crash(?:ed)?|core dumped|killed)\b)|"
    r"Traceback \(most recent|(?i:\btimed out\b|\berror\b.{0,60}\btime-?out\b)|"
    r"(?i:\bunable to (?:complete|reach|start|load|open|write|read)\b|\bincompatible\b)|"
    r"(?i:(?<!non-)\bfatal\b(?! ?= ?(?:false|0))|\berror(?: code)?[ =]+-?[1-9]|"
    r"\bexit(?:ed)?(?: with)? (?:status|code)[ =:]+[1-9])"
)
_SHOWN = 400  # characters of a line


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause that lines of one attempt speak of."""

    hits: tuple[Hit, ...]
    score: float

    @property
    def component(self) -> Component:
        """What it would have to be mended."""
        return self.hits[0].signature.component


def diagnose(seen: Collected) -> Finding:
    """Return why the job whose logs were read failed."""
    notes = list(dict.fromkeys(note for file in seen.files for note in file.notes))
    if not seen.lines:
        cause = "none of these files could be read as a log" if notes else "the logs are empty"
        return Finding(
            component=Component.UNDETERMINED, cause=cause, confidence=0.0,
            notes=tuple(notes), next_steps=("give the standard error of every rank, and dmesg",),
        )  # fmt: skip
    if not seen.hits:
        return _nothing_known(seen, notes)
    attempt = max(hit.attempt for hit in seen.hits)
    hits = [hit for hit in seen.hits if hit.attempt == attempt]
    if seen.attempts > 1:
        notes.append(f"{seen.attempts} attempts in these logs; this is about the last that failed")
    suspects = _suspects(hits, seen, attempt)
    if not suspects or suspects[0].score < _LEAST:
        return _symptoms_only(hits, suspects, seen, notes)
    return _found(suspects, hits, seen, notes)


def _suspects(hits: list[Hit], seen: Collected, attempt: int) -> list[Suspect]:
    """Return the causes of an attempt, the likeliest first."""
    groups: dict[str, list[Hit]] = defaultdict(list)
    for hit in hits:
        if hit.signature.kind == "cause":
            groups[hit.signature.name].append(hit)
    ends = {file.name: file.lines for file in seen.files}
    last = {name: max(h.line.number for h in hits if h.line.file == name) for name in _files(hits)}
    harmless = _said_before(seen, attempt)
    suspects = []
    for index, group in enumerate(sorted(groups.values(), key=lambda g: _moment(g[0]))):
        score = max(_weight(hit, ends, last) for hit in group)
        score *= 1 - 0.03 * min(index, 5)
        if group[0].signature.name in harmless:
            score *= 0.6
        suspects.append(Suspect(tuple(group), score))
    return sorted(suspects, key=lambda s: -s.score)


def _moment(hit: Hit) -> tuple[float, int]:
    # uptimes of kernels are no moments of a calendar
    time = hit.who.time if hit.who.time and hit.who.time > 1e8 else None
    return (time if time is not None else float("inf"), hit.order)


def _files(hits: list[Hit]) -> set[str]:
    return {hit.line.file for hit in hits}


def _weight(hit: Hit, ends: dict[str, int], last: dict[str, int]) -> float:
    score = hit.signature.specificity
    head = hit.line.text[:200]
    if _WARNING.search(head):
        score *= 0.75
    elif _QUIET.search(head):
        score *= 0.85
    after = ends[hit.line.file] - hit.line.number
    near_end = ends[hit.line.file] - last[hit.line.file]
    if (
        after > 2000
        and near_end < 500
        and hit.signature.layer in {"framework", "script", "runtime"}
    ):
        score *= 0.6  # the job went on for long
    return score


def _said_before(seen: Collected, attempt: int) -> set[str]:
    """Return signatures of attempts that ran long after them: they did not end those."""
    earlier = [hit for hit in seen.hits if hit.attempt < attempt]
    return {
        one.signature.name
        for one in earlier
        for other in earlier
        if other.attempt == one.attempt
        and other.line.file == one.line.file
        and other.line.number > one.line.number + 2000
    }


def _found(suspects: list[Suspect], hits: list[Hit], seen: Collected, notes: list[str]) -> Finding:
    best = suspects[0]
    same = [s for s in suspects[1:] if s.component is best.component]
    others = [s for s in suspects[1:] if s.component is not best.component]
    confidence = best.score
    if same:
        confidence += (1 - confidence) * 0.25 * same[0].score
    if others:
        confidence -= 0.3 * max(0.0, others[0].score - 0.35)
    signature = best.hits[0].signature
    where = whereabouts(best.hits, hits, seen)
    symptoms = _symptoms(hits)
    explained = [words for family, words in symptoms.items() if family in signature.explains]
    if explained:
        notes.append("follows from it: " + "; ".join(explained))
    return Finding(
        component=best.component,
        cause=signature.says,
        confidence=confidence_of(confidence),
        where=where,
        evidence=_evidence([h for s in (best, *same[:2]) for h in s.hits]),
        remedy=signature.remedy,
        alternatives=_alternatives(others),
        notes=tuple(notes),
    )


def _alternatives(others: list[Suspect]) -> tuple[Alternative, ...]:
    alternatives: dict[Component, Alternative] = {}
    for one in others:
        if one.component not in alternatives and one.component is not Component.UNDETERMINED:
            alternatives[one.component] = Alternative(
                component=one.component,
                cause=one.hits[0].signature.says,
                confidence=max(0.05, one.score * 0.4),
            )
    return tuple(alternatives.values())[:3]


def _symptoms(hits: list[Hit]) -> dict[str, str]:
    """Return the families of symptoms, and who shows them."""
    groups: dict[str, list[Hit]] = defaultdict(list)
    for hit in hits:
        if hit.signature.kind == "symptom":
            groups[hit.signature.family or hit.signature.name].append(hit)
    symptoms = {}
    for family, group in groups.items():
        ranks = {hit.who.rank for hit in group if hit.who.rank is not None}
        on = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
        symptoms[family] = group[0].signature.says + on
    return symptoms


def _symptoms_only(
    hits: list[Hit], suspects: list[Suspect], seen: Collected, notes: list[str]
) -> Finding:
    symptoms = _symptoms(hits)
    silent = silent_ranks(hits, seen)
    cause = "; ".join(symptoms.values()) or suspects[0].hits[0].signature.says
    steps = []
    if silent.ranks:
        steps.append(f"look first at {silent.words()}")
    if "timeout" in symptoms or "peer-lost" in symptoms:
        steps.append("read the log of the rank that stopped first, and dmesg of its host")
        steps.append(
            "run again with TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and give `doctor dumps` what it wrote"
        )
    if "killed" in symptoms or "killed" in {h.signature.layer for h in hits}:
        steps.append(
            "look above the first line of the launcher: the process says itself why it ended"
        )
    if not steps:
        steps.append("give the standard error of every rank, the scheduler's log and dmesg")
    return Finding(
        component=Component.UNDETERMINED,
        cause=cause + "; nothing here says why",
        confidence=0.0,
        where=silent,
        evidence=_evidence(hits),
        alternatives=_alternatives(suspects),
        next_steps=tuple(steps),
        notes=tuple(notes),
    )


def _nothing_known(seen: Collected, notes: list[str]) -> Finding:
    alone = seen.unknown.said_by_one()
    loud = [t for t in seen.unknown.templates() if _LOUD.search(t.example)]
    shown = [t for t in alone if t in loud][:MOST_EVIDENCE] or loud[:MOST_EVIDENCE]
    evidence = tuple(
        Evidence(file=t.first[0], line=t.first[1], text=t.example[:_SHOWN],
                 says="one host says it and no other" if t in alone else "no known line",
                 host=next(iter(t.hosts)) or None)
        for t in shown
    )  # fmt: skip
    if not shown and not any(file.orderly for file in seen.files):
        return Finding(
            component=Component.UNDETERMINED,
            cause=f"nothing is known of {many(seen.lines, 'line')}: no failure, and no progress",
            confidence=0.0, notes=tuple(notes),
            next_steps=("give the standard error of every rank, the scheduler's log and dmesg",),
        )  # fmt: skip
    if not shown:
        cause = f"nothing that speaks of a failure in {seen.lines:,} lines"
        return Finding(component=Component.UNDETERMINED, cause=cause, confidence=0.6,
                       healthy=True, notes=tuple(notes))  # fmt: skip
    return Finding(
        component=Component.UNDETERMINED,
        cause="these logs speak of trouble, but in no words that are known",
        confidence=0.0,
        evidence=evidence,
        next_steps=("read the lines below; `--signatures FILE` teaches the doctor what they mean",),
        notes=tuple(notes),
    )


def _evidence(hits: list[Hit]) -> tuple[Evidence, ...]:
    """Return the first line of each signature, then further ranks that said it."""
    firsts: dict[str, Hit] = {}
    for hit in sorted(hits, key=_moment):
        firsts.setdefault(hit.signature.name, hit)
    chosen = list(firsts.values())[:MOST_EVIDENCE]
    seen = {(h.signature.name, h.who.rank) for h in chosen}
    for hit in hits:
        if len(chosen) < MOST_EVIDENCE and (hit.signature.name, hit.who.rank) not in seen:
            chosen.append(hit)
            seen.add((hit.signature.name, hit.who.rank))
    return tuple(
        Evidence(file=h.line.file, line=h.line.number, text=h.line.text[:_SHOWN],
                 says=h.signature.says, rank=h.who.rank, host=h.who.host)
        for h in chosen
    )  # fmt: skip
