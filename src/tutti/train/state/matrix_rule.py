"""Which tensors Muon moves, and which ranks put them together. Pure."""

from __future__ import annotations

from tutti.models.parameters import Parameter, ParameterKind
from tutti.models.tuning import layer_of
from tutti.ranks.rank_places import Seats

_OTHERS = ("logits", "project_in", "project_out", "moe.router", "moe.shared_gate")


def is_matrix(parameter: Parameter) -> bool:
    """Tell whether a tensor is one or several matrices that Muon moves."""
    return (
        parameter.kind is ParameterKind.LINEAR
        and len(parameter.shape) >= 2
        and layer_of(parameter) not in _OTHERS
        and not parameter.name.startswith("prediction.")
    )


def matrix_ranks(seats: Seats, unit: int) -> tuple[int, ...]:
    """Return the ranks that put the matrices of a unit together."""
    return tuple(rank for rank in range(seats.num_ranks) if unit in seats[rank].units)
