"""Why no engine fits, and what would be the smallest change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tutti.plan.serving import Limits, Role
from tutti.search.serving.kinds import ChipGroup
from tutti.search.serving.options import EngineOption, engine_options
from tutti.search.serving.question import ServeProblem
from tutti.units import bytes_text, seconds_text


def why_nothing_fits(problem: ServeProblem, kinds: Sequence[ChipGroup]) -> str:
    """Return one line: memory that is short, or limits that no engine keeps, with numbers."""
    free = replace(problem, service=replace(problem.service, limits=Limits()))
    loose = [o for o in engine_options(free, kinds, (Role.BOTH,)) if o.role is Role.BOTH]
    if not loose:
        layers = problem.model.num_layers
        room = sum(kind.groups * kind.tp * kind.room_bytes for kind in kinds if kind.tp == 1)
        need = max((layers * kind.layer_bytes for kind in kinds if kind.tp == 1), default=0.0)
        return (
            f"{problem.model.name} fits nowhere: weights take {bytes_text(need)}, all chips have "
            f"{bytes_text(room)} for weights and pages of {problem.longest:,} tokens; "
            "use more chips, --weights fp8, or shorter requests"
        )
    limits = problem.service.limits
    first = min(_first_token(option) for option in loose)
    per_token = min(
        sum(n * float(kind.decode_s[0]) for n, kind in zip(o.layers, o.kinds, strict=True))
        for o in loose
    )
    said = []
    if limits.first_token_s is not None:
        asked = f"first token within {seconds_text(limits.first_token_s)}"
        said.append(f"{asked} (a mean prompt alone takes {seconds_text(first)})")
    if limits.per_token_s is not None:
        asked = f"{seconds_text(limits.per_token_s)} per token"
        said.append(f"{asked} (one decode alone takes {seconds_text(per_token)})")
    return f"no engine keeps the limits: {', '.join(said)}; loosen them, or use faster chips"


def _first_token(option: EngineOption) -> float:
    stages = zip(option.layers, option.kinds, strict=True)
    return sum(layers * kind.prefill_s for layers, kind in stages)
