"""A chip whose operators take a known time: what a profile of it holds, and what is true."""

from __future__ import annotations

import itertools

from tutti.cost.measured.forms import FORMS, Direction, row_flops, row_name
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import LinkFigure, OperatorTime, Profile

FLOOR_S = 2e-6
RATE, BANDWIDTH = 1e14, 1e12


def true_seconds(
    operator: str,
    shape: tuple[float, ...],
    size: float = 2.0,
    direction: Direction = "forward",
) -> float:
    """A roofline whose rate falls as any side of a product, or a sequence, becomes short."""
    flops = float(row_flops(row_name(operator, direction), shape))
    moved = float(FORMS[operator].elements(shape)) * size
    telling = shape[1:2] if operator == "attention" else shape[:3]
    slower = 1.0 + 64.0 * sum(1.0 / size for size in telling) if flops else 1.0
    return max(flops * slower / RATE, moved / BANDWIDTH) + FLOOR_S


def linear_shapes() -> list[tuple[int, ...]]:
    sides = (256, 1024, 4096, 16384)
    return list(itertools.product((512, 2048, 8192), sides, sides))


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "linear": linear_shapes(),
    "attention": [
        (sequences, length, heads, kv_heads, dim, dim)
        for sequences, length in itertools.product((1, 4), (256, 2048, 16384))
        for heads, kv_heads in ((8, 8), (32, 8))
        for dim in (64, 128)
    ],
    "rms_norm": list(itertools.product((256, 2048, 16384), (256, 2048, 16384))),
    "add_rms_norm": list(itertools.product((256, 2048, 16384), (256, 2048, 16384))),
    "gated_activation": list(itertools.product((256, 2048, 16384), (512, 4096, 32768))),
    "rotary": list(itertools.product((256, 16384), (8, 40), (64, 128))),
    "add": [(1 << n,) for n in range(16, 31, 2)],
    "adamw": [(1 << n,) for n in range(16, 31, 2)],
    "embedding": list(itertools.product((512, 8192), (512, 8192), (32000, 128256))),
    "linear_cross_entropy": list(
        itertools.product((512, 2048, 8192), (32000, 64000, 128256), (512, 2048, 8192))
    ),
}


def measured_profile(
    chip: str = "H200",
    dtype: Dtype = Dtype.BF16,
    operators: tuple[str, ...] = tuple(SHAPES),
    issue_s: float = 0.0,
) -> Profile:
    rows = [
        OperatorTime(
            operator=row_name(name, direction),
            dtype=dtype,
            shape=shape,
            seconds=true_seconds(name, shape, dtype.num_bytes, direction),
            repeats=7,
            issue_s=issue_s,
            kernel="known",
        )
        for name in operators
        for direction in FORMS[name].directions
        for shape in SHAPES[name]
    ]
    return Profile(
        chip=chip,
        stack="a known chip",
        date="2026-01-31",
        origin="a test",
        launch_floor_s=FLOOR_S,
        operators=tuple(rows),
        links=(LinkFigure(kind="memory", latency_s=FLOOR_S, bandwidth=BANDWIDTH),),
    )
