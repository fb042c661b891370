"""What Muon adds to a step: whole matrices put together, and made orthogonal on every rank.

As the engine runs it (`train.state.matrices`): a unit's ranks add each matrix up in float32, unless
each has all of it, and all of them do the same Newton–Schulz products; of experts only their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from tutti.models.parameters import Parameter
from tutti.models.spec import ModelSpec

STEPS = 5  # of Newton–Schulz
WIDE_BYTES = 4.0
RATE = 0.6  # of the float32 peak: what products of a few thousand rows and columns reach


def matrices(model: ModelSpec, unit: int) -> Iterator[Parameter]:
    """Yield the tensors of a unit that are moved as matrices."""
    return (p for p in model.parameters(unit) if p.is_matrix and p.trainable)


def orthogonal_flops(parameter: Parameter, ep: int) -> float:
    """Return the FLOPs of making a tensor's matrices orthogonal on a rank with 1/ep of them."""
    *outer, rows, columns = parameter.shape
    short, long = sorted((rows, columns))
    each = STEPS * (4.0 * short * short * long + 2.0 * short**3)
    return each * (-(-outer[0] // ep) if outer else 1)


def matrix_bytes(parameter: Parameter) -> float:
    """Return the bytes of a whole tensor as it is put together."""
    return parameter.size * WIDE_BYTES
