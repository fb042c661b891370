"""The units of one rank's stage, several ranges of them when interleaved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from tutti.accelerator.operators import Operators
from tutti.models.spec import ModelSpec
from tutti.nn.build import Unit, build_unit
from tutti.nn.embedding import Embedding
from tutti.nn.head import Head
from tutti.nn.parallel.groups import ParallelContext
from tutti.nn.storage import Logical, logical_tensors
from tutti.plan.plan import ContextKind


class StageModel(nn.Module):
    """Units by number; `tied` where both ends of tied weights are one parameter here."""

    def __init__(
        self,
        spec: ModelSpec,
        units: Sequence[int],
        operators: Operators,
        *,
        parallel: ParallelContext,
        dtype: torch.dtype,
        device: torch.device,
        tied: bool,
        context_kind: ContextKind = ContextKind.ALL_GATHER,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.units = nn.ModuleDict(
            {
                str(unit): build_unit(
                    spec,
                    unit,
                    operators,
                    parallel=parallel,
                    dtype=dtype,
                    device=device,
                    context_kind=context_kind,
                )
                for unit in units
            }
        )
        head = str(spec.head_unit)
        if tied and "0" in self.units and head in self.units:
            embedding, last = cast(Embedding, self.units["0"]), cast(Head, self.units[head])
            if spec.head.tied:
                last.logits.weight = embedding.token.weight
            if last.token is not None:
                last.token.weight = embedding.token.weight

    def by_number(self) -> dict[int, Unit]:
        """Return the modules by their unit."""
        return {int(name): cast(Unit, module) for name, module in self.units.items()}

    def logical_tensors(self) -> Iterator[Logical]:
        """Yield every tensor by its logical name, as far as this rank holds it; tied ones once."""
        seen: set[int] = set()
        for name, module in self.units.items():
            own: set[int] = set()
            for logical in logical_tensors(module, int(name)):
                if id(logical.owner) not in seen:
                    own.add(id(logical.owner))
                    yield logical
            seen |= own
