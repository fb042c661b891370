"""Makes the module of one unit of a model."""

from __future__ import annotations

import torch

from tutti.accelerator.operators import Operators
from tutti.errors import InputError
from tutti.models import ModelSpec
from tutti.nn.block import Block
from tutti.nn.embedding import Embedding
from tutti.nn.head import Head
from tutti.nn.parallel.groups import ALONE, ParallelContext
from tutti.nn.storage import Maker
from tutti.plan.plan import ContextKind

Unit = Embedding | Block | Head


def build_unit(
    spec: ModelSpec,
    unit: int,
    operators: Operators,
    *,
    parallel: ParallelContext = ALONE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    context_kind: ContextKind = ContextKind.ALL_GATHER,
) -> Unit:
    """Return a unit with empty parameters on a device ("meta" too): load or initialize them.

    `context_kind` says how context-parallel ranks come by each other's keys; attention with more
    than plain scores gathers them in any case.
    """
    if not 0 <= unit <= spec.head_unit:
        raise InputError(f"{spec.name}: there is no unit {unit}; units are 0 to {spec.head_unit}")
    problem = spec.tensor_parallel_problem(parallel.tensor.size)
    if problem is not None:
        raise InputError(f"{spec.name}: {problem}")
    make = Maker(
        parameters={parameter.name: parameter for parameter in spec.parameters(unit)},
        parallel=parallel,
        operators=operators,
        dtype=dtype,
        device=None if device is None else torch.device(device),
        context_kind=context_kind,
        adapter=None if spec.tuning is None else spec.tuning.adapter,
        narrow_base=spec.tuning is not None and spec.tuning.base != "wide",
    )
    if unit == 0:
        return Embedding(make, spec)
    if unit == spec.head_unit:
        return Head(make, spec)
    return Block(make, spec, spec.block(unit), unit)
