"""Which cases to measure, the most telling first.

A model's own shapes come first, then a grid that covers Llama-like blocks of many sizes, coarse
before fine. Within a level the operators take turns, so that whatever was measured when the time is
up says something of every operator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from tutti.accelerator.profiling.cases import ProfileCase
from tutti.cost.arrays import Strategy
from tutti.cost.measured.calls import operators_of, unit_calls
from tutti.models.spec import ModelSpec

# Out and in of the products of a block, over the hidden size: qkv, out, gate and up, down; first
# those of Llama, then what stands between.
SHAPES = (
    ((1.5, 1.0), (1.0, 1.0), (5.5, 1.0), (1.0, 2.75)),
    (),
    ((3.0, 1.0), (7.0, 1.0), (1.0, 3.5), (1.0, 4.0)),
    ((2.0, 1.0), (8.0, 1.0), (1.25, 1.0), (4.0, 1.0), (1.0, 2.0), (1.0, 5.5)),
)
HIDDEN = (
    (256, 1024, 4096),
    (512, 2048, 8192),
    (768, 1536, 3072, 6144),
    (384, 640, 896, 1280, 1792, 2560, 3584, 5120, 7168, 12288, 16384),
)
TOKENS = ((512, 2048), (256, 8192), (1024, 4096), (128, 16384))
LENGTHS = ((256, 1024, 4096), (512, 2048, 8192), (384, 768, 1536), (128, 16384, 32768))
HEADS = (  # heads, key-value heads, width of a head
    ((8, 4, 64), (32, 8, 128)),
    ((4, 4, 64), (16, 8, 64), (16, 16, 128), (40, 40, 64)),
    ((32, 8, 64), (12, 12, 64), (24, 8, 128)),
    ((64, 8, 128), (32, 32, 128), (32, 32, 96), (8, 4, 32), (8, 4, 256)),
)
SCORED_HEADS = {
    "scored_attention": ((32, 8, 64), (16, 8, 128), (8, 4, 256)),
    "sink_attention": ((32, 8, 64), (48, 8, 64), (16, 8, 128)),
    "biased_attention": ((24, 24, 64), (48, 48, 64), (16, 16, 128), (40, 40, 128)),
}
SEQUENCES = (1, 2, 2, 4)
VOCABULARIES = ((32768,), (8192, 131072), (65536,), (16384,))
EXPERTS = ((), ((8, 2),), ((64, 8), (32, 4)), ((128, 8),))  # (experts, chosen)
SIZES = ((1 << 18, 1 << 22, 1 << 26), (1 << 16, 1 << 24), (1 << 20, 1 << 28), (1 << 30,))
GROUPED = ("grouped_linear", "narrow_grouped_linear")
LEVELS = 4
ALIGNED = 64  # widths are multiples of it
LEAST_NARROW = 512  # tokens and widths of products in 8 bits
EXPERT_TOKENS = ((), (2048, 8192), (1024, 8192), (256, 4096))
# widths of experts over the hidden size: of many small ones, and of a few large ones
EXPERT_WIDTHS = {8: (0.75, 3.5), 32: (0.75, 1.0), 64: (0.5, 0.75), 128: (0.375, 0.75)}


def default_cases() -> list[ProfileCase]:
    """Return the grid, coarse before fine."""
    cases: list[ProfileCase] = []
    for level in range(LEVELS):
        cases += take_turns(_level(level))
    return list(dict.fromkeys(cases))


def model_cases(
    spec: ModelSpec,
    tokens: Sequence[int],
    sequence_length: int,
    degrees: Sequence[int] = (1, 2, 4, 8),
) -> list[ProfileCase]:
    """Return the shapes of a model's units, whole before sliced over `degrees` chips."""
    units = sorted({spec.unit_kind(u): u for u in range(spec.num_units)}.values())
    cases: list[ProfileCase] = []
    for tp in degrees:
        if spec.tensor_parallel_problem(tp) is not None:
            continue
        families: dict[str, list[ProfileCase]] = {}
        for count, unit in itertools.product(tokens, units):
            length = min(count, sequence_length)
            strategy = Strategy.filled(
                sequence_length=length, sequences=max(1, count // length), tp=tp
            )
            for call in unit_calls(spec, unit, strategy):
                shape = tuple(max(1, round(float(np.asarray(d)))) for d in call.dims)
                for operator in operators_of(call):
                    families.setdefault(operator, []).append(ProfileCase(operator, shape))
        families.setdefault("adamw", []).append(ProfileCase("adamw", (1 << 24,)))
        cases += take_turns(families.values())
    return list(dict.fromkeys(cases))


def take_turns(families: Iterable[Sequence[ProfileCase]]) -> list[ProfileCase]:
    """Return the cases of all families in turns, such that the families end together."""
    placed = [
        ((index + 0.5) / len(family), order, case)
        for order, family in enumerate(families)
        for index, case in enumerate(family)
    ]
    return [case for _, _, case in sorted(placed, key=lambda entry: entry[:2])]


def up_to(values: Sequence[Sequence[int]], level: int) -> list[int]:
    """Return what appears at a level and those before it."""
    return [value for step in values[: level + 1] for value in step]


def _new(
    wide: Sequence[Sequence[int]], tall: Sequence[Sequence[int]], level: int
) -> list[tuple[int, int]]:
    """Return the pairs that appear at a level: one of them is new there, or both are."""
    return [
        (a, b)
        for a in up_to(wide, level)
        for b in up_to(tall, level)
        if level == 0 or a in wide[level] or b in tall[level]
    ]


def _level(level: int) -> list[list[ProfileCase]]:
    rows = _new(TOKENS, HIDDEN, level)
    widths = [
        (tokens, width) for tokens, hidden in rows for width in (hidden, aligned(3.5 * hidden))
    ]
    experts = [pair for step in EXPERTS[: level + 1] for pair in step]
    heads = [(tokens, h + g, d) for tokens in TOKENS[level] for h, g, d in HEADS[level]]
    return [
        _linears(level),
        _narrow_linears(level),
        _attentions(level),
        *_scored_attentions(level),
        [ProfileCase("rms_norm", pair) for pair in rows],
        [ProfileCase("add_rms_norm", pair) for pair in rows],
        [ProfileCase("gated_activation", pair) for pair in widths],
        [ProfileCase("rotary", dims) for dims in heads],
        [ProfileCase("add", (size,)) for size in SIZES[level]],
        [ProfileCase("copy", (size,)) for size in SIZES[level]],
        [
            ProfileCase("linear_cross_entropy", (tokens, vocabulary, hidden))
            for tokens, hidden in itertools.product(TOKENS[level][:2], HIDDEN[level][:5])
            for vocabulary in VOCABULARIES[level]
        ],
        [
            ProfileCase("embedding", (tokens, hidden, vocabulary))
            for tokens, hidden in itertools.product(TOKENS[level][:2], HIDDEN[level][:3])
            for vocabulary in VOCABULARIES[level]
        ],
        [ProfileCase("adamw", (size,)) for size in SIZES[level]],
        [ProfileCase("layer_norm", pair) for pair in rows if level],
        [ProfileCase("add_layer_norm", pair) for pair in rows if level],
        [ProfileCase("activation", pair) for pair in widths if level],
        *_experts(level, experts if level else []),
    ]


def aligned(width: float) -> int:
    """Return the nearest width that kernels like."""
    return max(ALIGNED, round(width / ALIGNED) * ALIGNED)


def _linears(level: int) -> list[ProfileCase]:
    """Shapes of the blocks of all sizes up to the level, those of the coarser levels excepted."""
    coarser = set() if level == 0 else set(_products(level - 1))
    return [ProfileCase("linear", dims) for dims in _products(level) if dims not in coarser]


def _narrow_linears(level: int) -> list[ProfileCase]:
    """The same in 8 bits, as far as that pays: no small ones."""
    wide = (case.shape for case in _linears(level))
    return [ProfileCase("narrow_linear", shape) for shape in wide if min(shape) >= LEAST_NARROW]


def _products(level: int) -> list[tuple[int, int, int]]:
    ratios = [ratio for step in SHAPES[: level + 1] for ratio in step]
    return [
        (tokens, aligned(out * hidden), aligned(wide * hidden))
        for tokens in up_to(TOKENS, level)
        for hidden in up_to(HIDDEN, level)
        for out, wide in ratios
    ]


def _attentions(level: int) -> list[ProfileCase]:
    cases = []
    for length, (heads, kv_heads, dim) in itertools.product(
        up_to(LENGTHS, level), [shape for step in HEADS[: level + 1] for shape in step]
    ):
        if level and length not in LENGTHS[level] and (heads, kv_heads, dim) not in HEADS[level]:
            continue
        cases.append(
            ProfileCase("attention", (SEQUENCES[level], length, heads, kv_heads, dim, dim))
        )
    return cases


def _scored_attentions(level: int) -> list[list[ProfileCase]]:
    """Attention with scores that are capped, have sinks or slopes, which has kernels of its own."""
    lengths = ((), (4096,), (1024, 2048), (512, 8192))[level]
    return [
        [
            ProfileCase(name, (2, length, *shape, shape[-1]))
            for length, shape in itertools.product(lengths, heads)
        ]
        for name, heads in SCORED_HEADS.items()
    ]


def _experts(level: int, pairs: Sequence[tuple[int, int]]) -> list[list[ProfileCase]]:
    grouped, moved, routed = [], [], []
    for (experts, top), tokens, hidden in itertools.product(
        pairs, EXPERT_TOKENS[level], (1024, 2048, 4096)
    ):
        rows = tokens * top
        for width, name in itertools.product(EXPERT_WIDTHS[experts], GROUPED):
            own = aligned(width * hidden)
            grouped += [
                ProfileCase(name, (rows, 2 * own, hidden, experts)),
                ProfileCase(name, (rows, hidden, own, experts)),
            ]
        moved += [ProfileCase(name, (tokens, hidden, top)) for name in ("permute", "unpermute")]
        routed.append(ProfileCase("route", (tokens, experts, top)))
    return [grouped, moved, routed]
