"""Bytes: weights that a rank holds, activations that wait for backward.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), to the byte for their GPT block (s sequence, b sequences, h hidden, a heads, t TP):

    none, no TP          s·b·h·(34 + 5·a·s/h)          attention not fused, dropout on
    tensor parallel      s·b·h·(10 + 24/t + 5·a·s/(h·t))
    + sequence parallel  s·b·h/t·(34 + 5·a·s/h)
    selective            the same without the 5·a·s/h   (scores are computed again)
    full                 2·s·b·h                        (÷ t with sequence parallelism)

Fused attention keeps, in place of 5·a·s/h, four bytes per row and head: 34·s·b·h + 4·a·s·b.
"""

from __future__ import annotations

from typing import Literal, get_args

from tutti.errors import InputError, hint
from tutti.models.flops import unit_operators
from tutti.models.operators import Kept, Workload
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec

Recompute = Literal["none", "selective", "full"]


def kept_activations(
    spec: ModelSpec, unit: int, work: Workload, recompute: Recompute = "none"
) -> tuple[Kept, ...]:
    """Return the tensors of one micro-batch that a unit keeps between forward and backward."""
    if recompute not in get_args(Recompute):
        known = hint(str(recompute), get_args(Recompute))
        raise InputError(f"recompute is '{recompute}'; {known}")
    operators = unit_operators(spec, unit, work)
    if recompute == "full":
        if unit == 0:  # its input are token ids, which belong to the batch
            return ()
        size = work.element_bytes * work.own_tokens * spec.hidden
        return (Kept(name="unit input", bytes=size),)
    kept = (tensor for operator in operators for tensor in operator.kept)
    return tuple(t for t in kept if recompute == "none" or not t.core_attention)


def activation_bytes(
    spec: ModelSpec, unit: int, work: Workload, recompute: Recompute = "none"
) -> float:
    """Return the bytes of one micro-batch that a unit keeps between forward and backward."""
    return sum(tensor.bytes for tensor in kept_activations(spec, unit, work, recompute))


def recompute_flops(
    spec: ModelSpec, unit: int, work: Workload, recompute: Recompute = "none"
) -> float:
    """Return the FLOPs that recomputation adds to the backward pass of a unit."""
    operators = unit_operators(spec, unit, work)
    if recompute == "full":
        return sum(op.forward.flops for op in operators)
    if recompute == "selective":
        return sum(op.forward.flops for op in operators if op.core_attention)
    return 0.0


def boundary_bytes(spec: ModelSpec, work: Workload) -> float:
    """Return the bytes of the residual stream that one rank hands to the next unit."""
    return work.element_bytes * work.own_tokens * spec.hidden


def local_parameters(
    spec: ModelSpec,
    unit: int,
    *,
    tp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    group: ParameterClass | None = None,
) -> int:
    """Return how many parameters of a unit one rank holds, of one class or of all."""
    if expert_tp is None:
        expert_tp = tp if ep == 1 else 1
    return sum(
        p.local_size(tp=tp, ep=ep, expert_tp=expert_tp)
        for p in spec.parameters(unit)
        if not p.buffer and group in (None, p.group)
    )


def weight_bytes(spec: ModelSpec, unit: int, work: Workload) -> float:
    """Return the bytes of a unit's weights on one rank, in the precision they compute in."""
    count = local_parameters(spec, unit, tp=work.tp, ep=work.ep, expert_tp=work.expert_tp)
    return work.element_bytes * count
