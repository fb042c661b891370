"""The step of plain strategies, vectorised: stages, bubble, transfers, gradients, optimizer.

`price` takes arrays of strategies and returns seconds with the parts they are the sum of. What a
unit takes depends on few columns (tp, cp, ep, micro-batch, recomputation), what a group of ranks
does on a few others; each is priced once per distinct combination and then gathered, which is what
makes a million strategies a second possible. Uneven plans are the simulator's business.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import Arrays, FloatArray, Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.network.closed_forms import all_reduce_seconds, ring_pass_seconds
from tutti.cost.operators.distinct import Distinct, distinct_rows
from tutti.cost.operators.operator_times import ELEMENT_BYTES, smooth_max
from tutti.cost.operators.sizes import (
    block_sizes,
    flops_per_token,
    rank_parameters,
    recomputed_flops_per_token,
    tokens_per_step,
)
from tutti.cost.operators.unit_times import (
    block_seconds,
    embedding_seconds,
    head_seconds,
    optimizer_seconds,
)

ROWS_AT_ONCE = 16384  # so that the arrays of one pass stay in the cache

# What the seconds of a unit, and those of a group, depend on.
_UNIT_COLUMNS = (
    "sequence_length",
    "sequences",
    "tp",
    "cp",
    "ep",
    "sequence_parallel",
    "recompute_gemm",
    "recompute_attention",
    "recompute_elementwise",
    "recompute_network",
    "flash",
    "fp8",
    "fp8_rowwise",
    "compiled",
    "async_tp",
    "overlap_chunks",
    "shared_beside",
    "context_gather",
    "once_per_node",
)
_GROUP_COLUMNS = (
    "tp",
    "cp",
    "ep",
    "pp",
    "dp",
    "num_chips",
    "shard",
    "grad_bytes",
    "param_comm_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Seconds per step; `parts` sum to `step_seconds`."""

    step_seconds: FloatArray
    parts: dict[str, FloatArray]

    def mfu(self, shape: Shape, strategy: Strategy, peak_flops: FloatArray) -> FloatArray:
        """Return model FLOPs per second over the chips' dense peak."""
        work = tokens_per_step(strategy) * flops_per_token(shape, strategy.sequence_length)
        return work / (self.step_seconds * strategy.num_chips * peak_flops)

    def hfu(self, shape: Shape, strategy: Strategy, peak_flops: FloatArray) -> FloatArray:
        """Return the same with recomputation counted."""
        again = tokens_per_step(strategy) * recomputed_flops_per_token(shape, strategy)
        more = again / (self.step_seconds * strategy.num_chips * peak_flops)
        return self.mfu(shape, strategy, peak_flops) + more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Columns that are gathered together."""

    def take(self, index: object) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: v if v.ndim == 0 else v[index] for n, v in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Units(_Rows):
    """Seconds of units for one micro-batch; `back` is recomputation and backward."""

    forward: FloatArray
    back: FloatArray
    backward: FloatArray
    routed_forward: FloatArray
    routed_back: FloatArray
    routed_backward: FloatArray
    head: FloatArray
    embedding: FloatArray
    boundary_bytes: FloatArray  # a rank's slice of what goes to the next stage

    @classmethod
    def of(cls, shape: Shape, strategy: Strategy, machine: Machine, constants: Constants) -> _Units:
        args = (shape, strategy, machine, constants)
        block = block_seconds(*args)
        routed = block_seconds(*args, expert=True) if np.any(shape.experts > 0) else block
        return cls(
            forward=block.forward,
            back=block.recompute + block.backward,
            backward=block.backward,
            routed_forward=routed.forward,
            routed_back=routed.recompute + routed.backward,
            routed_backward=routed.backward,
            head=head_seconds(*args).total,
            embedding=embedding_seconds(*args).total,
            boundary_bytes=strategy.tokens * shape.hidden * ELEMENT_BYTES / strategy.tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups(_Rows):
    """What depends on the groups of ranks: traffic of states, the optimizer, the stages' sizes."""

    pipelined: npt.NDArray[np.bool_]
    per_stage: FloatArray  # blocks of the longest stage
    last_routed: FloatArray  # of them with experts on the last stage
    first_dense: FloatArray
    sharded: npt.NDArray[np.bool_]
    gather: FloatArray  # of one block's parameters
    scatter: FloatArray
    tables: FloatArray  # exposed gathers and scatters of embedding and head
    reduce: FloatArray
    optimizer: FloatArray
    send_bandwidth: FloatArray
    send_latency: FloatArray
    jitter: FloatArray

    @classmethod
    def of(
        cls, shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
    ) -> _Groups:
        per_stage = np.ceil(shape.layers / strategy.pp)
        crosses = strategy.tp * strategy.cp * strategy.dp >= machine.chips_per_node
        nic = machine.nic * constants.nic_efficiency / machine.chips_per_node
        nic = nic / np.maximum(machine.leaf_over, machine.pod_over)
        nodes = np.maximum(strategy.num_chips / machine.chips_per_node, 1.0)
        return cls(
            pipelined=strategy.pp > 1,
            sharded=strategy.shard >= 3,
            per_stage=per_stage,
            last_routed=np.minimum(shape.moe_layers, per_stage),
            first_dense=np.minimum(shape.layers - shape.moe_layers, per_stage),
            send_bandwidth=np.where(crosses, nic, machine.link * constants.link_efficiency),
            send_latency=np.where(crosses, constants.nic_latency_s, constants.link_latency_s),
            jitter=constants.node_jitter * np.sqrt(2.0 * np.log(nodes)),
            **_fsdp(shape, strategy, machine, constants),
            **_states(shape, strategy, machine, constants),
        )


def _fsdp(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> dict[str, FloatArray]:
    """Return gathers and scatters of sharded parameters, one block at a time."""
    sharded = strategy.shard >= 3
    sizes, tp = block_sizes(shape), strategy.tp
    block = (sizes.attention + sizes.dense) / tp
    table = shape.vocab * shape.hidden / tp
    group = np.where(sharded, strategy.dp * strategy.cp, 1.0)

    def ring(num_bytes: FloatArray) -> FloatArray:
        return ring_pass_seconds(num_bytes, group, tp, machine, constants)

    ends = ring(table * (2.0 * strategy.param_comm_bytes + strategy.grad_bytes))
    return {
        "gather": ring(block * strategy.param_comm_bytes),
        "scatter": ring(block * strategy.grad_bytes),
        "tables": ends * (1.0 - constants.dp_overlap),
    }


def _states(
    shape: Shape, strategy: Strategy, machine: Machine, constants: Constants
) -> dict[str, FloatArray]:
    """Return the gradients' reduction and the optimizer step."""
    rank = rank_parameters(shape, strategy)
    group, tp, ep = strategy.dp * strategy.cp, strategy.tp, np.maximum(strategy.ep, 1.0)
    expert_group = np.maximum(group / ep, 1.0)
    grads = rank.dense * strategy.grad_bytes
    whole = all_reduce_seconds(grads, group, tp, machine, constants)
    halves = ring_pass_seconds(grads, group, tp, machine, constants)
    halves = halves + ring_pass_seconds(rank.dense * 2.0, group, tp, machine, constants)
    reduce = np.where(strategy.shard == 0, whole, halves)
    if np.any(rank.experts > 0):
        experts = all_reduce_seconds(
            rank.experts * strategy.grad_bytes, expert_group, tp * strategy.ep, machine, constants
        )
        reduce = reduce + np.where(rank.experts > 0, experts, 0.0)
    sharded = strategy.shard >= 3
    shared = rank.dense / np.maximum(group, 1.0) + rank.experts / expert_group
    updated = np.where(strategy.shard == 0, rank.dense + rank.experts, shared)
    sizes = block_sizes(shape)
    blocks = (sizes.attention + sizes.dense) / tp * shape.layers / strategy.pp
    updated = np.where(sharded, (blocks + 2.0 * rank.table) / group, updated)
    return {
        "reduce": np.where(sharded, 0.0, reduce),
        "optimizer": optimizer_seconds(updated, machine, constants),
    }


def price(shape: Shape, strategy: Strategy, machine: Machine, constants: Constants) -> Prices:
    """Return the seconds per step of every strategy, with the parts they are the sum of."""
    alike = _is_one(shape, machine, constants)
    by_unit = distinct_rows(strategy, _UNIT_COLUMNS) if alike else None
    by_group = distinct_rows(strategy, _GROUP_COLUMNS) if alike else None
    units = _Units.of(shape, _distinct(strategy, by_unit), machine, constants)
    groups = _Groups.of(shape, _distinct(strategy, by_group), machine, constants)
    if by_unit is None or by_group is None:
        return _total(_compose(shape, strategy, constants, units, groups))
    size, blocks = strategy.size, []
    for start in range(0, size, ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, size))
        here = (units.take(by_unit.inverse[rows]), groups.take(by_group.inverse[rows]))
        blocks.append(_compose(shape, strategy.take(rows), constants, *here))
    if len(blocks) == 1:
        return _total(blocks[0])
    return _total({name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]})


def _is_one(shape: Shape, machine: Machine, constants: Constants) -> bool:
    """Tell whether model, machine and constants are the same for all strategies."""
    arrays: tuple[Arrays, ...] = (shape, machine)
    given = [getattr(a, f.name) for a in arrays for f in fields(a)]
    given += [getattr(constants, f.name) for f in fields(constants)]
    return all(np.ndim(value) == 0 for value in given)


def _distinct(strategy: Strategy, rows: Distinct | None) -> Strategy:
    return strategy if rows is None else strategy.take(rows.first)


def _total(parts: dict[str, FloatArray]) -> Prices:
    total = np.zeros(())
    for seconds in parts.values():
        total = total + seconds
    return Prices(step_seconds=total, parts=parts)


def _compose(
    shape: Shape, strategy: Strategy, constants: Constants, units: _Units, groups: _Groups
) -> dict[str, FloatArray]:
    """Return the parts of a step: m micro-batches through the slowest stage, the others once."""
    many, per_stage, last = strategy.micro_batches, groups.per_stage, groups.last_routed
    block, routed = units.forward + units.back, units.routed_forward + units.routed_back
    plain = (per_stage - last) * block + last * routed
    extra = np.zeros(())
    ends = np.zeros(())
    if np.any(groups.sharded):
        # With a pipeline, units stay gathered for the whole step.
        passes = np.where(groups.pipelined, many, 1.0)
        fsdp = _beside(units.forward, units.back, groups, constants, passes) - block
        fsdp_routed = fsdp
        if np.any(shape.experts > 0):
            beside = _beside(units.routed_forward, units.routed_back, groups, constants, passes)
            fsdp_routed = beside - routed
        block, routed = block + fsdp, routed + fsdp_routed
        extra = (per_stage - last) * fsdp + last * fsdp_routed
        ends = np.where(groups.sharded, (groups.tables + groups.gather) / passes, 0.0)
    blocks = plain + extra
    first = groups.first_dense * block + (per_stage - groups.first_dense) * routed
    slowest = np.maximum(blocks + units.head, first + units.embedding)
    alone = blocks + units.head + units.embedding
    stage = np.where(groups.pipelined, slowest, alone)
    whole = (shape.layers - shape.moe_layers) * block + shape.moe_layers * routed
    whole = whole + units.head + units.embedding
    send = units.boundary_bytes / groups.send_bandwidth + groups.send_latency
    sends = many * strategy.vpp + (strategy.pp - 1.0)
    backward = (per_stage - last) * units.backward + last * units.routed_backward
    parts = {
        "blocks": many * plain,
        "embedding and head": many * (stage - blocks),
        "parameter gathers": many * (extra + ends),
        "bubble": (whole - stage) / strategy.vpp,
        "stage transfers": np.where(
            groups.pipelined, 2.0 * send * constants.p2p_exposure * sends, 0.0
        ),
        "gradients": groups.reduce - constants.dp_overlap * np.minimum(groups.reduce, backward),
        "optimizer": groups.optimizer,
    }
    step = np.zeros(())
    for seconds in parts.values():
        step = step + seconds
    parts["slowest node"] = step * groups.jitter
    return parts


def _beside(
    forward: FloatArray,
    back: FloatArray,
    groups: _Groups,
    constants: Constants,
    passes: FloatArray,
) -> FloatArray:
    """Return a block with its gathers and scatters running beside it; as it is if not sharded."""
    gather = groups.gather / passes
    both = gather + groups.scatter / passes
    beside = smooth_max(forward, gather) + smooth_max(back, both)
    slowed = constants.overlap_slowdown * (np.minimum(gather, forward) + np.minimum(both, back))
    result: FloatArray = np.where(groups.sharded, beside + slowed, forward + back)
    return result
