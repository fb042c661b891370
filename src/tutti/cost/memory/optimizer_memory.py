"""What optimizers that see whole tensors take on a chip, beside the states of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tutti.models.spec import ModelSpec
from tutti.plan.factored_means import MEAN_BYTES, num_means
from tutti.plan.job import Job

WIDE_BYTES = 4.0  # of an element of a step that is made of a gradient
MATRIX_COPIES = 5.0  # of one that is being made orthogonal
TENSOR_COPIES = 2.0  # of one whose step is measured


def means_bytes(job: Job, model: ModelSpec, unit: int, ep: int) -> float:
    """Return what stands of a unit's means over rows and columns, whole on each of its ranks."""
    if job.optimizer != "adafactor":
        return 0.0
    total = 0
    for parameter in model.parameters(unit):
        shape = parameter.shape
        if parameter.experts:
            shape = (-(-shape[0] // ep), *shape[1:])
        if parameter.trainable and parameter.tied_to is None:
            total += num_means(shape)
    return MEAN_BYTES * total


def bytes_of_a_step(
    job: Job, model: ModelSpec, held: Sequence[int], units: range, updated: Callable[[int], float]
) -> float:
    """Return what is made while the parameters of some units move, of all those that are held.

    `updated` are the parameters of a unit that a rank updates.
    """
    if job.optimizer == "muon":  # two vectors of all kept weights, and the matrix at hand
        sizes = [p.size for u in held for p in model.parameters(u) if p.is_matrix]
        copies = MATRIX_COPIES * max(sizes, default=0)
        return WIDE_BYTES * (2.0 * sum(map(updated, held)) + copies)
    if job.optimizer == "adafactor":  # a unit's step, and the tensor at hand
        return WIDE_BYTES * max(
            (updated(unit) + TENSOR_COPIES * _largest(model, unit, updated) for unit in units),
            default=0.0,
        )
    return max((updated(unit) * job.decoded_bytes for unit in units), default=0.0)


def _largest(model: ModelSpec, unit: int, updated: Callable[[int], float]) -> float:
    """Return how much of its largest tensor a rank updates, as of all others."""
    sizes = [parameter.size for parameter in model.parameters(unit) if parameter.trainable]
    return max(sizes) * updated(unit) / sum(sizes) if sizes else 0.0
