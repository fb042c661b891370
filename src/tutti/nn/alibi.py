"""Linear position biases on attention scores, as a bias of each key.

A bias that grows with the distance from query to key differs from one that grows with the key's own
position by a constant per query, which softmax does not see.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tutti.accelerator.host_to_device import moved
from tutti.accelerator.reference.paged import linear_bias
from tutti.models import AlibiSpec, ModelSpec


def alibi_specs(spec: ModelSpec) -> tuple[tuple[AlibiSpec, int, float], ...]:
    """Return the distinct biases of a model, with the number of heads and the scores' scale."""
    specs = {
        (block.attention.alibi, block.attention.heads, block.attention.softmax_scale): None
        for block in spec.blocks
    }
    return tuple((alibi, heads, scale) for alibi, heads, scale in specs if alibi is not None)


def slopes(heads: int) -> Tensor:
    """Return each head's slope: a geometric row, filled up from the one twice as fine."""
    power = 2 ** math.floor(math.log2(heads))

    def row(count: int) -> Tensor:
        base = torch.tensor(2 ** (-(2 ** -(math.log2(count) - 3))), dtype=torch.float32)
        return torch.pow(base, torch.arange(1, 1 + count, dtype=torch.int32))

    slopes_h = row(power)
    if power < heads:
        slopes_h = torch.cat((slopes_h, row(2 * power)[::2][: heads - power]))
    return slopes_h


def key_bias(spec: AlibiSpec, heads: int, scale: float, positions_s: Tensor) -> Tensor:
    """Return (H, S): what is added to the scaled scores of a key at its position."""
    slopes_h = moved(slopes(heads), positions_s.device)
    factor = scale if spec.scaled else 1.0
    return linear_bias(slopes_h, positions_s, rounded=spec.bfloat16, factor=factor)
