"""The logical tensors of any unit, with the tokens that their gradients see.

Which tokens those are is how the modules are written, so the modules are asked: a unit is built
without memory, once per kind of unit, with experts sliced and with experts spread over ranks.
"""

from __future__ import annotations

import functools

from tutti.accelerator.operators import Operators
from tutti.models.spec import ModelSpec
from tutti.nn.build import build_unit
from tutti.nn.parallel import Ranks
from tutti.nn.storage import Sees, logical_tensors
from tutti.train.layout import TensorRule


@functools.lru_cache(maxsize=64)
def _sees(spec: ModelSpec, unit: int, *, spread: bool) -> dict[str, Sees]:
    parallel = Ranks(expert_counts=(spec.num_experts,) if spread else ())
    operators = Operators("cpu", forced={})
    module = build_unit(spec, unit, operators, parallel=parallel, device="meta")
    prefix = f"{unit}."
    return {
        logical.name.removeprefix(prefix): logical.piece.sees
        for logical in logical_tensors(module, unit)
    }


def tensor_rules(spec: ModelSpec, unit: int) -> list[TensorRule]:
    """Return the tensors of a unit; tied ones too."""
    kind = spec.unit_kind(unit)
    alike = next(u for u in range(spec.num_units) if spec.unit_kind(u) == kind)
    sliced = _sees(spec, alike, spread=False)
    spread = _sees(spec, alike, spread=True) if spec.num_experts else sliced
    return [
        TensorRule(unit, p, sees=sliced[p.name], sees_spread=spread[p.name])
        for p in spec.parameters(unit)
    ]
