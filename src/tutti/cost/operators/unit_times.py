"""Seconds of one unit (embedding, block, head) for one micro-batch on one rank.

A unit is the sum of its operators and of the collectives inside it (tensor, context and expert
parallelism), bounded from below by the time the host needs to issue them: the launch floor. The
step's composition from units is `step`'s business, the plan's another module's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.cost.arrays import FloatArray, Machine, Number, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.measured.unit import MeasuredUnit
from tutti.cost.network.closed_forms import all_reduce_seconds
from tutti.cost.operators.block_products import Products, expert_products, shared_products
from tutti.cost.operators.exposed_communication import (
    ALIGNED_SPANS,
    Exposed,
    Spans,
    context_parallel,
    expert_once,
    expert_parallel,
    in_chunks,
    tensor_bytes,
    tensor_parallel,
)
from tutti.cost.operators.operator_times import (
    ELEMENT_BYTES,
    Passes,
    alignment_rate,
    attention_seconds,
    flag,
    gemm_seconds,
    memory_bound_seconds,
    smooth_max,
)

# An eager block dispatches about 14 operators around fused attention; buffer, two batched products,
# masked softmax, dropout and six transposes of the unfused one are 11 more (counted in Megatron-LM
# of 2021).
UNFUSED_LAUNCHES = 1.8
BACKWARD_LAUNCHES = 1.3  # the host issues that much more in backward than in forward
# Of the cross-entropy's traffic; forward writes and reads an fp32 copy, backward makes gradients.
_LOSS_FORWARD = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """The passes of a unit, and what all of them together are made of."""

    forward: FloatArray
    recompute: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    parts: dict[str, FloatArray]

    @property
    def backward(self) -> FloatArray:
        """Both parts of the backward pass, without recomputation."""
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> FloatArray:
        """All passes; the parts sum to it."""
        return self.forward + self.recompute + self.backward_input + self.backward_weight


def _elementwise(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    dense_share: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward of norms, residuals, activation: passes over tokens × hidden."""
    tp = strategy.tp
    replicated = np.where(strategy.sequence_parallel > 0, 1.0 / tp, 1.0)  # norms and residuals
    unit_bytes = strategy.tokens * shape.hidden * ELEMENT_BYTES
    compiled = np.where(strategy.compiled > 0, constants.compile_scale, 1.0)
    traffic = unit_bytes * (constants.elementwise_scale * compiled)
    ratio = shape.ffn / shape.hidden * dense_share
    forward = (10.0 + shape.dropout) * replicated + (2.0 + (2.0 + shape.gated) * ratio) / tp
    backward = (16.0 + shape.dropout) * replicated + (6.0 + (4.0 + shape.gated) * ratio) / tp
    return (
        memory_bound_seconds(traffic * forward, machine, constants, kernels=8.0),
        memory_bound_seconds(traffic * backward, machine, constants, kernels=14.0),
    )


def block_seconds(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    *,
    expert: bool = False,
    expert_stride: Number | None = None,
    spans: Spans = ALIGNED_SPANS,
    measured: MeasuredUnit | None = None,
) -> UnitSeconds:
    """Return one transformer block, with its dense layer or (expert) with its experts.

    `expert_stride` is how far the chips of an expert group lie apart: by default one of every
    replica, as in published runs; a Plan's groups are consecutive chips. Where its operators were
    `measured`, the formulas price only what is left: collectives, and what cutting a product into
    chunks adds to it.
    """
    args = (shape, strategy, machine, constants)
    routed = flag((shape.experts > 0) & expert)
    products = Products.of(*args)
    gemm = products.attention
    exchange = Exposed(np.zeros(()), np.zeros(()))
    if expert:
        halves = shared_products(*args)
        experts = expert_products(*args, halves)
        gemm = gemm.plus(products.feed_forward, 1.0 - routed).plus(experts, routed)
        stride = strategy.tp * strategy.cp if expert_stride is None else expert_stride
        once = expert_once(*args, spans, stride)
        exchange = expert_parallel(routed * once, shape, strategy, halves)
    else:
        gemm = gemm.plus(products.feed_forward)
    attention = attention_seconds(*args)
    elementwise = _elementwise(*args, 1.0 - routed)
    if measured is not None:
        gemm = measured.parts["gemm"]
        attention = measured.both("attention")
        elementwise = measured.both("elementwise")
    tensor = tensor_parallel(*args, spans)
    if np.any(strategy.overlap_chunks > 1):
        gemm, tensor = in_chunks(*args, spans, gemm, tensor, routed)
    device = _Device(
        gemm=gemm,
        attention=attention,
        elementwise=elementwise,
        tensor=tensor,
        context=context_parallel(*args, spans, attention[0]),
        exchange=exchange,
    )
    return device.launched(strategy, _issue_seconds(strategy, constants, routed, measured))


def _issue_seconds(
    strategy: Strategy, constants: Constants, routed: FloatArray, measured: MeasuredUnit | None
) -> FloatArray:
    """Return how long the host takes to issue a block's forward pass."""
    launches = np.where(strategy.flash > 0, 1.0, UNFUSED_LAUNCHES)
    host = launches * constants.host_layer_s + routed * constants.moe_host_s
    if measured is not None:
        again = strategy.recompute_gemm + strategy.recompute_attention
        again = again + strategy.recompute_elementwise
        alone = (strategy.tp == 1) & (strategy.cp == 1) & ((routed == 0) | (strategy.ep == 1))
        graph = flag(alone & (again == 0))
        host = measured.issue_forward_s * (1.0 - graph * (1.0 - measured.graph_share))
    issued = np.where(strategy.tp > 1, 2.0 * strategy.overlap_chunks, 0.0)
    seconds: FloatArray = host + issued * constants.host_tp_s
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """What the device would need for a block if the host were never late."""

    gemm: Passes
    attention: tuple[FloatArray, FloatArray]
    elementwise: tuple[FloatArray, FloatArray]
    tensor: Exposed  # collectives of one pass
    context: FloatArray
    exchange: Exposed  # of the rows that experts get and give back

    def launched(self, strategy: Strategy, host: FloatArray) -> UnitSeconds:
        """Return the block under the launch floor: `host` seconds to issue a forward pass."""
        gemm, attention, elementwise = self.gemm, self.attention, self.elementwise
        network = self.tensor.forward + self.exchange.forward + self.context
        returning = self.tensor.backward + self.exchange.backward + self.context
        forward_gpu = gemm.forward + attention[0] + elementwise[0] + network
        backward_gpu = gemm.backward + attention[1] + elementwise[1] + returning + self.context
        again = (
            strategy.recompute_gemm * gemm.forward
            + strategy.recompute_attention * attention[0]
            + strategy.recompute_elementwise * elementwise[0]
            + strategy.recompute_network * network
        )
        issued = np.maximum(strategy.recompute_elementwise, 0.3 * strategy.recompute_attention)
        issued = np.maximum(strategy.recompute_gemm, issued)
        forward = smooth_max(forward_gpu, host)
        both = smooth_max(backward_gpu + again, host * (BACKWARD_LAUNCHES + issued))
        share = both / (backward_gpu + again)
        weight = gemm.backward_weight * share
        total = forward + both
        parts = {
            "gemm": gemm.forward + gemm.backward,
            "attention": attention[0] + attention[1],
            "elementwise": elementwise[0] + elementwise[1],
            "tensor parallel": self.tensor.forward + self.tensor.backward,
            "context parallel": 3.0 * self.context,
            "expert parallel": self.exchange.forward + self.exchange.backward,
            "recompute": again,
        }
        parts["launch"] = total - (forward_gpu + backward_gpu + again)
        return UnitSeconds(
            forward=forward,
            recompute=again * share,
            backward_input=backward_gpu * share - weight,
            backward_weight=weight,
            parts=parts,
        )


def head_seconds(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    *,
    spans: Spans = ALIGNED_SPANS,
    measured: MeasuredUnit | None = None,
) -> UnitSeconds:
    """Return logits and cross-entropy; the vocabulary is split over tp."""
    tokens, hidden = strategy.tokens, shape.hidden
    if measured is not None:
        return _measured_end(shape, strategy, machine, constants, spans, measured)
    n = np.maximum(np.floor(shape.head_vocab / strategy.tp), 1.0)
    rate = alignment_rate(n, hidden, constants)

    def gemm(rows: Number, columns: Number, depth: Number) -> FloatArray:
        return gemm_seconds(rows, columns, depth, machine, constants, rate=rate)

    logits, by_input, by_weight = (
        gemm(tokens, n, hidden),
        gemm(tokens, hidden, n),
        gemm(hidden, n, tokens),
    )
    loss = memory_bound_seconds(
        tokens * n * constants.logit_bytes, machine, constants, kernels=12.0
    )
    network = _end_network(shape, strategy, machine, constants, spans)
    logits = logits * (1.0 + shape.answers)
    device = logits + by_input + by_weight + loss + 2.0 * network
    total = smooth_max(device, constants.host_head_s + 0.0 * device)
    share = total / device
    return UnitSeconds(
        forward=(logits + _LOSS_FORWARD * loss + network) * share,
        recompute=np.zeros_like(total),
        backward_input=(by_input + (1.0 - _LOSS_FORWARD) * loss + network) * share,
        backward_weight=by_weight * share,
        parts={
            "gemm": logits + by_input + by_weight,
            "loss": loss,
            "tensor parallel": 2.0 * network,
            "launch": total - device,
        },
    )


def embedding_seconds(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    *,
    spans: Spans = ALIGNED_SPANS,
    measured: MeasuredUnit | None = None,
) -> UnitSeconds:
    """Return the look-up, its all-reduce over tp, and the gradient of the table."""
    if measured is not None:
        return _measured_end(shape, strategy, machine, constants, spans, measured, first=True)
    unit_bytes = tensor_bytes(shape, strategy)
    table = shape.vocab / strategy.tp * shape.hidden * ELEMENT_BYTES
    # Eight passes over tokens × hidden, three over the table (clear, add, read), eight kernels.
    forward = memory_bound_seconds(3.0 * unit_bytes, machine, constants, kernels=3.0)
    backward = memory_bound_seconds(5.0 * unit_bytes + 3.0 * table, machine, constants, kernels=5.0)
    network = _end_network(shape, strategy, machine, constants, spans)
    return UnitSeconds(
        forward=forward + network,
        recompute=np.zeros_like(forward + network),
        backward_input=np.zeros_like(forward + network),
        backward_weight=backward + 0.0 * network,
        parts={"elementwise": forward + backward, "tensor parallel": network},
    )


def _end_network(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants, spans: Spans
) -> FloatArray:
    """Return the all-reduce of the first or the last unit."""
    num_bytes = tensor_bytes(shape, strategy)
    once = all_reduce_seconds(num_bytes, strategy.tp, 1.0, machine, constants, spans.tp)
    return once * spans.longer.tensor


def _measured_end(
    shape: Shape,
    strategy: Strategy,
    machine: Machine,
    constants: Constants,
    spans: Spans,
    measured: MeasuredUnit,
    *,
    first: bool = False,
) -> UnitSeconds:
    """Return the first or the last unit by its measured operators; tp's all-reduce by formula.

    The first unit has nobody to hand a gradient to: all of its backward is the table's.
    """
    network = _end_network(shape, strategy, machine, constants, spans)
    returning = 0.0 * network if first else network
    total = measured.total
    zero: FloatArray = np.zeros_like(total.forward + network)
    by_input = zero if first else total.backward_input + returning
    by_weight = total.backward if first else total.backward_weight + zero
    parts = {str(name): p.forward + p.backward for name, p in measured.parts.items()}
    device = total.forward + total.backward + network + returning
    floor = measured.issue_forward_s + measured.issue_backward_s
    whole = smooth_max(device, floor + 0.0 * device)
    share = whole / device
    return UnitSeconds(
        forward=(total.forward + network) * share,
        recompute=zero,
        backward_input=by_input * share,
        backward_weight=by_weight * share,
        parts={**parts, "tensor parallel": network + returning, "launch": whole - device},
    )


def optimizer_seconds(num_parameters: Number, machine: Machine, constants: Constants) -> FloatArray:
    """Return the seconds to update `num_parameters` on one rank, the host's part included."""
    num_bytes = num_parameters * constants.optimizer_bytes
    seconds = memory_bound_seconds(num_bytes, machine, constants, kernels=20.0)
    return seconds + constants.host_step_s
