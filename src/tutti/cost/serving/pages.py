"""Memory into pages: what weights leave of a chip, and how many sequences that holds."""

from __future__ import annotations

import functools

from tutti.batching.settings import PAGES_SHARE
from tutti.cost.memory.instruction_memory import Overheads
from tutti.cost.serving.stage_prices import STREAM_BYTES, Formats
from tutti.hardware.chip import Chip
from tutti.models.cached import cached_bytes
from tutti.models.memory import local_parameters
from tutti.models.spec import ModelSpec


@functools.lru_cache(maxsize=4096)
def unit_weight_bytes(model: ModelSpec, unit: int, tp: int, formats: Formats) -> float:
    """Return the bytes of a unit's weights on one rank; tables and heads are never narrow."""
    count = local_parameters(model, unit, tp=tp)
    narrow = 1 <= unit <= model.num_layers
    return count * (formats.weight_bytes if narrow else STREAM_BYTES)


def stage_weight_bytes(
    model: ModelSpec, units: tuple[int, int], tp: int, formats: Formats
) -> float:
    """Return the bytes of a stage's weights on one rank; a tied head is the embedding's table."""
    total = sum(unit_weight_bytes(model, unit, tp, formats) for unit in range(*units))
    if model.ties_weights and units[0] > 0 and units[1] > model.head_unit:
        total += unit_weight_bytes(model, 0, tp, formats)
    return total


def usable_bytes(chip: Chip) -> float:
    """Return what of a chip's memory weights and pages may take."""
    overheads = Overheads()
    return chip.memory_bytes - overheads.context_bytes - overheads.workspace_bytes


def left_for_pages(
    model: ModelSpec, units: tuple[int, int], chip: Chip, tp: int, formats: Formats
) -> float:
    """Return the bytes that pages may take on each chip of a stage; below 0: weights do not fit."""
    left = usable_bytes(chip) - stage_weight_bytes(model, units, tp, formats)
    return PAGES_SHARE * left if left > 0 else left


def stage_tokens(
    model: ModelSpec, units: tuple[int, int], chip: Chip, tp: int, formats: Formats
) -> float:
    """Return how many tokens' keys and values a stage holds; below 0: weights do not fit."""
    left = left_for_pages(model, units, chip, tp, formats)
    each = cached_bytes(
        model, range(*units), tp=tp, stored=formats.cache_bytes, stream=STREAM_BYTES
    )
    return left / each if each > 0 else (float("inf") if left >= 0 else left)
