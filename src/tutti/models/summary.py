"""What `tutti model show` says about a model, as plain values: a header and its units.

Neighbouring units that are equal are one entry with their range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tutti.models.flops import flops_per_token, unit_operators
from tutti.models.memory import Recompute, activation_bytes, weight_bytes
from tutti.models.operators import Workload
from tutti.models.parts import AttentionSpec, BlockSpec
from tutti.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """One or several equal neighbouring units; the figures are those of one of them."""

    first: int
    last: int
    what: str
    parameters: int
    activated: int
    forward_flops_per_token: float
    weight_bytes: float
    activation_bytes: float  # per sequence

    @property
    def count(self) -> int:
        """How many units."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The figures of a model at one sequence length, in two-byte precision, on one chip."""

    name: str
    model_type: str
    parameters: int
    activated: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int
    sequence_length: int
    training_flops_per_token: float
    weight_bytes: float
    fingerprint: str
    units: tuple[UnitRow, ...]


def summarise(
    spec: ModelSpec, sequence_length: int | None = None, recompute: Recompute = "none"
) -> ModelSummary:
    """Return what there is to say about a model."""
    length = min(spec.max_length, 4096) if sequence_length is None else sequence_length
    work = Workload(sequence_length=length)
    attention = spec.block(1).attention
    return ModelSummary(
        name=spec.name,
        model_type=spec.model_type,
        parameters=spec.num_parameters,
        activated=spec.num_activated,
        layers=spec.num_layers,
        hidden=spec.hidden,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        vocab=spec.vocab,
        experts=spec.num_experts,
        sequence_length=length,
        training_flops_per_token=flops_per_token(spec, length),
        weight_bytes=work.element_bytes * spec.num_parameters,
        fingerprint=spec.fingerprint,
        units=tuple(_row(spec, first, last, work, recompute) for first, last in _runs(spec)),
    )


def _runs(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    first = 0
    for unit in range(1, spec.num_units + 1):
        if unit == spec.num_units or spec.unit_kind(unit) != spec.unit_kind(first):
            yield first, unit - 1
            first = unit


def _row(spec: ModelSpec, first: int, last: int, work: Workload, recompute: Recompute) -> UnitRow:
    parameters = [p for p in spec.parameters(first) if p.counted]
    operators = unit_operators(spec, first, work)
    return UnitRow(
        first=first,
        last=last,
        what=_describe(spec, first),
        parameters=sum(p.size for p in parameters),
        activated=sum(p.activated_size for p in parameters),
        forward_flops_per_token=sum(op.forward.flops for op in operators) / work.tokens,
        weight_bytes=weight_bytes(spec, first, work),
        activation_bytes=activation_bytes(spec, first, work, recompute),
    )


def _describe(spec: ModelSpec, unit: int) -> str:
    if unit == 0:
        learned = f", {spec.embedding.positions} positions" if spec.embedding.positions else ""
        return f"embedding of {spec.vocab}{learned}"
    if unit == spec.head_unit:
        extra = spec.prediction_heads
        tied = " (tied)" if spec.head.tied else ""
        if spec.head.scores:
            return "norm + score"
        return f"norm + head{tied}" + (f" + {extra} prediction heads" if extra else "")
    return describe_block(spec.block(unit))


def describe_block(block: BlockSpec) -> str:
    """Return a block in a few words: "GQA 32/8×128 window 4096, SwiGLU 14336"."""
    if block.mlp is not None:
        mlp = block.mlp
        return f"{_attention(block.attention)}, {'gated ' if mlp.gated else ''}mlp {mlp.hidden}"
    assert block.moe is not None
    moe = block.moe
    shared = f" + shared {moe.shared_hidden}" if moe.shared_hidden else ""
    experts = f"{moe.experts_per_token} of {moe.experts} experts {moe.hidden}{shared}"
    return f"{_attention(block.attention)}, {experts}"


def _attention(part: AttentionSpec) -> str:
    if part.latent is not None:
        kind = f"MLA {part.heads}×{part.head_dim}"
    elif part.kv_heads == part.heads:
        kind = f"MHA {part.heads}×{part.head_dim}"
    else:
        kind = f"GQA {part.heads}/{part.kv_heads}×{part.head_dim}"
    return kind + (f" window {part.window}" if part.window is not None else "")
