"""Which operators of servers to measure: a model's own first, then a grid, coarse before fine.

Steps have from one token to a few thousand; in between a product goes from reading its weights to
multiplying, so counts of tokens stand closer than in training's grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tutti.accelerator.profiling.cases import ProfileCase
from tutti.accelerator.profiling.grid import (
    EXPERT_WIDTHS,
    SHAPES,
    VOCABULARIES,
    aligned,
    take_turns,
    up_to,
)
from tutti.cost.arrays import Strategy
from tutti.cost.measured.calls import block_calls, embedding_calls
from tutti.models.anatomy import rank_kv_heads
from tutti.models.spec import ModelSpec

TOKENS = ((1, 16, 128, 1024), (4, 48, 256, 2048), (8, 32, 64, 512), (2, 96, 768, 4096))
ROWS = ((1, 16, 128), (4, 64), (8, 32, 256), (2,))  # of one token
KEYS = ((512, 4096), (128, 1024), (2048, 16384), (256, 32768))
CHUNKS = (  # tokens, and those that are stored before them
    ((512, 1), (64, 4096), (2048, 1)),
    ((256, 1024), (128, 1), (2048, 4096)),
    ((1024, 8192), (48, 16384), (512, 512)),
    ((64, 32768), (256, 8192), (1024, 1)),
)
HIDDEN = ((1024, 4096), (2048, 8192), (512, 3072), (1536, 6144))
HEADS = (  # heads, key-value heads, width of a head
    ((32, 8, 128), (16, 8, 64)),
    ((32, 4, 128), (8, 4, 256)),
    ((16, 16, 128), (8, 4, 64), (64, 8, 128)),
    ((32, 32, 128), (12, 12, 64)),
)
EXPERTS = (((128, 8),), ((8, 2),), ((64, 8),), ((32, 4),))  # (experts, chosen)
EXPERT_HIDDEN = ((2048,), (4096,), (1024, 2048), (4096,))
MOST_KEYS = 1 << 20  # of all rows of a case
LEVELS = 4
NARROW = ("fp8_linear", "int8_linear")


def served_cases(*, narrow: Sequence[str] = ()) -> list[ProfileCase]:
    """Return the grid; `narrow`: products of weights of 8 bits that the chip has kernels for."""
    cases: list[ProfileCase] = []
    for level in range(LEVELS):
        cases += take_turns(_level(level, narrow))
    return list(dict.fromkeys(cases))


def served_model_cases(spec: ModelSpec, degrees: Sequence[int] = (1, 2, 4, 8)) -> list[ProfileCase]:
    """Return the shapes of a model's steps, whole before sliced over `degrees` chips."""
    every: list[ProfileCase] = []
    for tp in degrees:
        if spec.tensor_parallel_problem(tp) is not None:
            continue
        families: dict[str, list[ProfileCase]] = {}
        for tokens in up_to(TOKENS, LEVELS - 1):
            strategy = Strategy.filled(sequence_length=1.0, sequences=float(tokens), tp=float(tp))
            calls = [c for b in spec.blocks for c in block_calls(spec, b, strategy, serves=True)]
            for call in [*calls, *embedding_calls(spec, strategy)]:
                if np.any(call.times):
                    shape = tuple(max(1, round(float(np.asarray(d)))) for d in call.dims)
                    families.setdefault(call.operator, []).append(_case(call.operator, shape))
        vocabulary = -(-spec.vocab // tp)
        for rows in up_to(ROWS, LEVELS - 1):
            families["linear"].append(_case("linear", (rows, vocabulary, spec.embedding.dim)))
            families.setdefault("sample", []).append(_case("sample", (rows, vocabulary)))
        for part in dict.fromkeys(block.attention for block in spec.blocks):
            kv_heads = round(float(np.asarray(rank_kv_heads(part.kv_heads, float(tp)))))
            heads = (part.heads // tp, max(1, kv_heads), part.head_dim, part.value_dim)
            if part.latent is None:
                for level in range(LEVELS):
                    for name, cases in _attentions(level, [heads]).items():
                        families.setdefault(name, []).extend(cases)
        every += take_turns(families.values())
    return list(dict.fromkeys(every))


def _case(operator: str, shape: tuple[int, ...]) -> ProfileCase:
    return ProfileCase(operator, shape, serves=True)


def _level(level: int, narrow: Sequence[str]) -> list[list[ProfileCase]]:
    tokens, hidden = up_to(TOKENS, level), up_to(HIDDEN, level)
    fresh = [
        (count, width)
        for count, width in itertools.product(tokens, hidden)
        if count in TOKENS[level] or width in HIDDEN[level]
    ]
    products = [
        (count, aligned(out * width), aligned(deep * width))
        for count, width in fresh
        for out, deep in SHAPES[0] + (SHAPES[2] if level >= 2 else ())
    ]
    heads = [(h, g, d, d) for step in HEADS[: level + 1] for h, g, d in step]
    stored = [(count, h, g, d) for count in TOKENS[level] for h, g, d, _ in heads]
    tables = [
        (rows, vocabulary, width)
        for rows in ROWS[level]
        for vocabulary in up_to(VOCABULARIES, level)
        for width in (1024, 4096)
    ]
    return [
        [_case("linear", shape) for shape in products],
        [_case("linear", shape) for shape in tables],
        *([_case(name, shape) for shape in products if shape[0] <= 1024] for name in narrow),
        *_attentions(level, heads).values(),
        [_case("sample", (rows, vocabulary)) for rows, vocabulary, _ in tables],
        [_case("store_heads", shape) for shape in stored],
        [_case("store_normed_heads", shape) for shape in stored],
        [_case("add_rms_norm", pair) for pair in fresh],
        [_case("gated_activation", (count, aligned(3.5 * width))) for count, width in fresh],
        [_case("embedding", (count, width, 32768)) for count, width in fresh if level < 2],
        *_experts(level),
    ]


def _attentions(
    level: int, heads: Sequence[tuple[int, int, int, int]]
) -> dict[str, list[ProfileCase]]:
    decodes = [
        (rows, keys, *shape)
        for rows, keys in itertools.product(up_to(ROWS, level), up_to(KEYS, level))
        if (rows in ROWS[level] or keys in KEYS[level]) and rows * keys <= MOST_KEYS
        for shape in heads
    ]
    chunks = [(tokens, before, *s) for tokens, before in CHUNKS[level] for s in heads]
    return {
        "decode_attention": [_case("decode_attention", shape) for shape in decodes],
        "chunk_attention": [_case("chunk_attention", shape) for shape in chunks],
    }


def _experts(level: int) -> list[list[ProfileCase]]:
    grouped, moved, routed = [], [], []
    pairs = [pair for step in EXPERTS[: level + 1] for pair in step]
    for (experts, top), tokens, hidden in itertools.product(
        pairs, up_to(TOKENS, level), up_to(EXPERT_HIDDEN, level)
    ):
        fresh = tokens in TOKENS[level] or (experts, top) in EXPERTS[level]
        if not fresh and hidden not in EXPERT_HIDDEN[level]:
            continue
        for width in EXPERT_WIDTHS[experts]:
            own = aligned(width * hidden)
            grouped += [
                _case("grouped_linear", (tokens * top, 2 * own, hidden, experts)),
                _case("grouped_linear", (tokens * top, hidden, own, experts)),
            ]
        moved += [_case(name, (tokens, hidden, top)) for name in ("permute", "unpermute")]
        routed.append(_case("route", (tokens, experts, top)))
    return [grouped, moved, routed]
