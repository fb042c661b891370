"""Seconds of one unit for many strategies, whatever of it is trained.

What is frozen has no weight gradients; what adapters add are small products of their own, priced
like any other: by the chip's measured ones, or by the formula.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray, Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.measured.calls import Call, unit_calls
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.unit import measured_unit
from tutti.cost.network.group_placement import Placement
from tutti.cost.operators.exposed_communication import (
    AS_PRICED,
    PerCollective,
    Spans,
    context_bytes,
    context_once,
    expert_bytes,
    expert_once,
    tensor_bytes,
    tensor_once,
)
from tutti.cost.operators.operator_times import Passes, gemm_seconds
from tutti.cost.operators.unit_times import (
    UnitSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
)
from tutti.models.spec import ModelSpec
from tutti.models.tuned_operators import AdapterProduct, adapter_products
from tutti.models.tuning import trained_share
from tutti.plan.plan import ContextKind

_EXPERT_STRIDE = 1.0  # expert groups of a Plan are consecutive chips


class Inside(NamedTuple):
    """How a replica computes a unit together, besides its degrees."""

    overlap_chunks: int
    context_kind: ContextKind
    placement: Placement
    made_once: bool = False  # weight gradients are added to nothing
    longer: PerCollective = AS_PRICED  # its collectives take, where others send beside them


class BlockCollectives(NamedTuple):
    """What collectives inside a block move per rank and take, each once and uncut."""

    num_bytes: PerCollective
    seconds: PerCollective


def block_collectives(
    model: ModelSpec,
    unit: int,
    strategy: Strategy,
    spans: Spans,
    machine: Machine,
    constants: Constants,
) -> BlockCollectives:
    """Return them for one workload; nothing of experts where the unit has none."""
    inner = 0 < unit < model.head_unit
    index = model.layer_blocks[unit - 1] if inner else 0
    shape = Shape.of(model, index)
    args = (strategy, machine, constants, spans)
    size = tensor_bytes(shape, strategy)
    routed = inner and model.blocks[index].moe is not None
    seconds = (
        tensor_once(size, *args),
        context_once(shape, *args) * inner,
        expert_once(shape, *args, _EXPERT_STRIDE) * routed,
    )
    moved = (size, context_bytes(shape, strategy) * inner, expert_bytes(shape, strategy) * routed)
    return BlockCollectives(PerCollective(*map(float, moved)), PerCollective(*map(float, seconds)))


def unit_seconds(
    model: ModelSpec,
    unit: int,
    strategy: Strategy,
    spans: Spans,
    machine: Machine,
    constants: Constants,
    measured_chip: MeasuredChip | None,
    *,
    made_once: bool = False,
) -> UnitSeconds:
    """Return the passes of a unit on one rank of a chip."""
    measured = None
    if measured_chip is not None:
        calls = unit_calls(model, unit, strategy)
        measured = measured_unit(measured_chip, calls, made_once=made_once)
    if unit in (0, model.head_unit):
        price = embedding_seconds if unit == 0 else head_seconds
        shape = Shape.of(model, 0)
        whole = price(shape, strategy, machine, constants, spans=spans, measured=measured)
    else:
        index = model.layer_blocks[unit - 1]
        whole = block_seconds(
            Shape.of(model, index),
            strategy,
            machine,
            constants,
            expert=model.blocks[index].moe is not None,
            expert_stride=_EXPERT_STRIDE,
            spans=spans,
            measured=measured,
        )
    if model.tuning is None:
        return whole
    return tuned_seconds(whole, model, unit, strategy, measured_chip, machine, constants)


def tuned_seconds(
    whole: UnitSeconds,
    model: ModelSpec,
    unit: int,
    strategy: Strategy,
    measured: MeasuredChip | None,
    machine: Machine,
    constants: Constants,
) -> UnitSeconds:
    """Return a unit's seconds from those that it would take if all of it were trained."""
    share = trained_share(model.parameters(unit))
    rows = np.where(strategy.sequence_parallel > 0, strategy.tokens / strategy.tp, strategy.tokens)
    products = list(
        adapter_products(model, unit, tokens=strategy.tokens, own=rows, tp=strategy.tp)  # type: ignore[arg-type]  # arrays of strategies
    )
    added = _passes(products, measured, machine, constants)
    again = strategy.recompute_gemm * added.forward
    left = whole.backward_weight * share
    parts = {
        **whole.parts,
        "gemm": whole.parts.get("gemm", np.zeros(())) - (whole.backward_weight - left),
        "adapters": added.forward + added.backward + again,
    }
    return replace(
        whole,
        forward=whole.forward + added.forward,
        recompute=whole.recompute + again,
        backward_input=whole.backward_input + added.backward_input,
        backward_weight=left + added.backward_weight,
        parts=parts,
    )


def _passes(
    products: list[AdapterProduct],
    measured: MeasuredChip | None,
    machine: Machine,
    constants: Constants,
) -> Passes:
    nothing: FloatArray = np.zeros(())
    if measured is not None:
        return measured_unit(measured, [_call(product) for product in products]).total
    total = Passes(nothing, nothing, nothing)
    for product in products:
        m, n, k = product.rows, product.columns, product.depth
        forward, by_input, by_weight = (
            gemm_seconds(*sizes, machine, constants) for sizes in ((m, n, k), (m, k, n), (k, n, m))
        )
        total = total.plus(Passes(forward, by_input, by_weight))
    return total


def _call(product: AdapterProduct) -> Call:
    dims = (product.rows, product.columns, product.depth)
    if product.experts:
        return Call(operator="grouped_linear", dims=(*dims, float(product.experts)))
    return Call(operator="linear", dims=dims)


def run_again(shares: Iterable[FloatArray]) -> dict[str, FloatArray]:
    """Return the shares of recomputation by their names in a Strategy."""
    names = ("recompute_gemm", "recompute_attention", "recompute_elementwise", "recompute_network")
    return {name: np.asarray(share) for name, share in zip(names, shares, strict=True)}


def passes_of(passes: UnitSeconds) -> tuple[FloatArray, ...]:
    """Return the seconds of the passes in the order of UnitTimes."""
    return passes.forward, passes.recompute, passes.backward_input, passes.backward_weight
