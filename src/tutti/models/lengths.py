"""How long a sequence may be: learned positions end, rotary ones only lose their meaning.

As transformers has it: a row of a table that is not there is an error, a rotation further than the
model was made for is computed. What a scaling says it stretches positions to counts as made for.
"""

from __future__ import annotations

from tutti.models.spec import ModelSpec


def length_refusal(spec: ModelSpec, length: int) -> str:
    """Return why a model cannot read sequences of a length; empty where it can."""
    embedding = spec.embedding
    rows = embedding.positions - embedding.position_offset
    if not embedding.positions or length <= rows:
        return ""
    return (
        f"a sequence of {length:,} tokens is longer than the {rows:,} learned positions of "
        f"'{spec.name}'; give {rows} or less"
    )


def length_warning(spec: ModelSpec, length: int) -> str:
    """Return what is doubtful about a length that a model can read; empty where nothing is."""
    reach = longest(spec)
    if length <= reach or spec.embedding.positions:
        return ""
    return (
        f"a sequence of {length:,} tokens is longer than the {reach:,} that '{spec.name}' was made "
        "for (max_position_embeddings, or what its rotary scaling reaches); expect poor quality "
        "beyond them"
    )


def longest(spec: ModelSpec) -> int:
    """Return the tokens that a model was made for, a stretch of its rotary positions included."""
    reach = spec.max_length
    for unit in range(1, spec.head_unit):
        rotary = spec.block(unit).attention.rotary
        scaling = rotary.scaling if rotary is not None else None
        if scaling is not None:
            first = scaling.original_length or spec.max_length
            reach = max(reach, int(first * scaling.factor))
    return reach
