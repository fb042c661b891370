"""What a unit computes when only parts of it, or adapters beside it, are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tutti.models.builder import Builder
from tutti.models.operators import NO_WORK, Operator, Workload
from tutti.models.parameters import Parameter
from tutti.models.spec import ModelSpec
from tutti.models.tuning import adapted_layers, layer_of, trained_share


class AdapterProduct(NamedTuple):
    """A product of an adapter, as one rank computes it: `rows` by `depth`, into `columns`."""

    name: str
    rows: float
    columns: float
    depth: float
    experts: int  # over which the rows are spread; 0: none


def adapter_products(
    spec: ModelSpec, unit: int, *, tokens: float, own: float, tp: float
) -> Iterator[AdapterProduct]:
    """Yield the products of a block's adapters on one rank; sizes may be arrays."""
    adapter = spec.tuning.adapter if spec.tuning is not None else None
    if adapter is None or not 0 < unit < spec.head_unit:
        return
    for group in adapted_layers(adapter, unit, spec.untuned.parameters(unit)):
        weight = group[0]
        *_, width = weight.shape
        rows = own if weight.slice_dim is None else tokens
        spread = 0
        if weight.experts:
            rows, spread = tokens / tp * weight.experts_per_token, weight.experts
        cut = _cut(weight, tp)
        depth = width / cut if weight.slice_dim == len(weight.shape) - 1 else width
        outputs: float = sum(
            member.shape[-2] / (_cut(member, tp) if _is_column(member) else 1) for member in group
        )
        yield AdapterProduct(f"{layer_of(weight)}.down", rows, adapter.rank, depth, spread)
        yield AdapterProduct(f"{layer_of(weight)}.up", rows, outputs, adapter.rank, spread)


def _is_column(weight: Parameter) -> bool:
    return weight.slice_dim == len(weight.shape) - 2


def _cut(weight: Parameter, tp: float) -> float:
    """Return how many ways a rank's weight is sliced; experts are spread, or their rows are."""
    return 1 if weight.slice_dim is None or weight.experts else tp


def tuned_operators(
    spec: ModelSpec, unit: int, work: Workload, whole: Sequence[Operator]
) -> tuple[Operator, ...]:
    """Return a unit's operators without the gradients of frozen weights, and its adapters' own."""
    share = trained_share(spec.parameters(unit))
    operators = [op if share == 1.0 else _shared(op, share) for op in whole]
    build = Builder(work)
    products = adapter_products(spec, unit, tokens=work.tokens, own=work.own_tokens, tp=work.tp)
    for product in products:
        rows, columns = int(product.rows), max(1, int(product.columns))
        kept = () if product.name.endswith(".down") else (
            build.keep(f"{product.name} input", rows * product.depth),
        )  # fmt: skip
        depth = max(1, int(product.depth))
        build.gemm(product.name, rows, columns, depth, kept=kept, count=max(1, product.experts))
    return (*operators, *build.operators)


def _shared(operator: Operator, share: float) -> Operator:
    weight = operator.backward_weight
    if weight == NO_WORK:
        return operator
    less = replace(weight, flops=weight.flops * share, traffic_bytes=weight.traffic_bytes * share)
    return replace(operator, backward_weight=less)
