"""Where the state of the next generation comes from: the newest step of which all of it is left.

Live processes come first, joined by copies of the same step in hosts' memory for those that were
lost (their own host's, else a partner's); then copies alone; then the newest checkpoint on disk;
then the beginning. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tutti.elastic.messages import Report, Source
from tutti.hardware.topology import Position
from tutti.launch.identity import used_chips
from tutti.models.spec import ModelSpec
from tutti.models.tuning import is_read_again
from tutti.plan.plan import Plan
from tutti.search.replan.state_layout import Holding, Kind, StateLayout, joined
from tutti.units import many

Kept = Mapping[str, Sequence[tuple[str, int, int]]]  # by chip: host, generation, step


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A generation that was: its plan, and the chip of each rank."""

    plan: Plan
    chips: tuple[str, ...]


def missing_state(plan: Plan, spec: ModelSpec, ranks: Iterable[int]) -> str:
    """Return a tensor of which these ranks together do not hold everything; empty if none."""
    there, of_chip = set(ranks), used_chips(plan)

    def numbers(held: Iterable[Position]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        ranks = [of_chip[chip] for chip in held]
        return np.asarray([rank if rank in there else -1 for rank in ranks], dtype=np.int64)

    layout = StateLayout(plan, spec, numbers)
    seen = set[tuple[object, ...]]()
    for unit in range(spec.num_units):
        key = (spec.unit_kind(unit), layout.signature(unit))
        if key in seen:
            continue
        seen.add(key)
        for parameter in spec.parameters(unit):
            if parameter.buffer or parameter.tied_to is not None:
                continue
            if is_read_again(spec.tuning, parameter):
                continue
            kind = Kind.OPTIMIZER if parameter.trainable else Kind.PARAMETERS
            held: Holding = layout.holding(unit, parameter, kind)
            name = f"{unit}.{parameter.name}"
            for copy in spec.parameters(spec.head_unit) if unit == 0 else ():
                if copy.tied_to == name:
                    other = layout.holding(spec.head_unit, copy, kind)
                    held = joined(held, other)
            if not held.surviving().is_whole:
                return name
    return ""


def find_source(
    left: Sequence[Report],
    reports: Mapping[str, Report],
    past: Mapping[int, Past],
    spec: ModelSpec,
    checkpoint: int | None,
    kept: Kept = MappingProxyType({}),
) -> Source:
    """Return the cheapest source of the newest step that is whole somewhere.

    `left` are the processes that were in the last generation, `reports` all chips that are there;
    `checkpoint` is the step of the newest one on disk, `kept` what hosts have of others' chips.
    """
    copies = _Copies(reports, kept)
    sources = [_live(left, copies, past, spec), *_copied(copies, past, spec)]
    whole = [source for source in sources if source is not None]
    best = max(whole, key=lambda source: source.step, default=None)
    if best is not None and (checkpoint is None or best.step >= checkpoint):
        return best
    if checkpoint is not None:
        text = f"from the checkpoint of step {checkpoint}"
        return Source(kind="disk", step=checkpoint, text=text)
    lost = f": {_missing(left, copies, past, spec)}, and there is no checkpoint" if past else ""
    return Source(kind="begin", text=f"from the beginning{lost}")


def _missing(
    left: Sequence[Report], copies: _Copies, past: Mapping[int, Past], spec: ModelSpec
) -> str:
    """Return a tensor that is lost, in words: of the newest step of which anything is there."""
    then, generations = _alike(past)[0]
    steps = copies.steps() | {report.step for report in left if report.step >= 0}
    if not steps:
        return "no state of it is left"
    step = max(steps)
    ranks = {*copies.of(then, generations, step)}
    ranks |= {r.held_rank for r in left if r.held in generations and r.step == step}
    name = missing_state(then.plan, spec, ranks)
    return f"nobody holds all of {name or 'any step'} at step {step}"


def _alike(past: Mapping[int, Past]) -> list[tuple[Past, tuple[int, ...]]]:
    """Return the plans that were, each with the generations that ran it on the same chips."""
    plans = list[tuple[Past, tuple[int, ...]]]()
    for generation in sorted(past, reverse=True):
        for index, (then, generations) in enumerate(plans):
            if then == past[generation]:
                plans[index] = (then, (*generations, generation))
                break
        else:
            plans.append((past[generation], (generation,)))
    return plans


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies in hosts' memory: on a chip's own host, and on its partners'."""

    reports: Mapping[str, Report]
    kept: Kept

    def steps(self) -> set[int]:
        """Return the steps of which there are any."""
        own = {step for report in self.reports.values() for _, step in report.copy_steps}
        return own | {step for copies in self.kept.values() for _, _, step in copies}

    def of(self, then: Past, generations: Sequence[int], step: int) -> dict[int, tuple[str, str]]:
        """Return chip and partner of each rank of which a copy is there; no partner: its own."""
        holders: dict[int, tuple[str, str]] = {}
        for rank, chip in enumerate(then.chips):
            report = self.reports.get(chip)
            if report is not None and any((g, step) in report.copy_steps for g in generations):
                holders[rank] = (chip, "")
                continue
            for host, generation, of_step in self.kept.get(chip, ()):
                if generation in generations and of_step == step:
                    holders[rank] = (chip, host)
                    break
        return holders


def _places(copies: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return copies as a source names them."""
    pairs = list(copies)
    return {
        "copies": tuple(chip for chip, host in pairs if not host),
        "elsewhere": tuple((chip, host) for chip, host in pairs if host),
    }


def _words(copies: Iterable[tuple[str, str]]) -> list[str]:
    """Return copies in words."""
    own, far = (sum(bool(h) is elsewhere for _, h in copies) for elsewhere in (False, True))
    parts = [f"{many(own, 'copy', 'copies')} in memory"] if own else []
    return parts + ([f"{many(far, 'copy', 'copies')} of a partner"] if far else [])


def _live(
    left: Sequence[Report],
    copies: _Copies,
    past: Mapping[int, Past],
    spec: ModelSpec,
) -> Source | None:
    """Return what the processes that are left hold, all of it of their newest step."""
    holding = [report for report in left if report.step >= 0 and report.held in past]
    if not holding:
        return None
    step = max(report.step for report in holding)
    sums = next((r.sums for r in holding if r.step == step and r.sums), ())
    able = [r for r in holding if r.step == step or (r.pending == step and sums)]
    for then, generations in _alike(past):
        live = {r.held_rank: r for r in able if r.held in generations}
        copied = copies.of(then, generations, step)
        if not live or missing_state(then.plan, spec, {*copied, *live}):
            continue
        finished = [r for r in live.values() if r.step < step]
        lost = [copied[rank] for rank in copied if rank not in live]
        parts = [f"step {step} from {many(len(live), 'process', 'processes')} that went on"]
        parts += _words(lost)
        if finished:
            parts.append(f"finished by {many(len(finished), 'rank')} with the others' sums")
        return Source(
            kind="memory",
            step=step,
            sums=tuple(sums) if finished else (),
            holders=tuple(report.chip for report in live.values()),
            generations=generations,
            text=", ".join(parts),
            **_places(lost),
        )
    return None


def _copied(copies: _Copies, past: Mapping[int, Past], spec: ModelSpec) -> Iterable[Source]:
    """Yield the newest step of which copies alone hold everything."""
    for step in sorted(copies.steps(), reverse=True):
        for then, generations in _alike(past):
            ranks = copies.of(then, generations, step)
            if ranks and not missing_state(then.plan, spec, ranks):
                far = any(host for _, host in ranks.values())
                yield Source(
                    kind="memory",
                    step=step,
                    generations=generations,
                    text=f"step {step} from copies in memory" + (", partners' too" if far else ""),
                    **_places(ranks.values()),
                )
                return
