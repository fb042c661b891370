"""Jobs that can never start: refused when they come, with what comes nearest."""

from __future__ import annotations

from tutti.errors import InputError, hint
from tutti.fleet.chips import Grounds
from tutti.fleet.policy import Policy
from tutti.fleet.request import JobRequest, Shape
from tutti.units import many


def check_request(grounds: Grounds, policy: Policy, request: JobRequest) -> None:
    """Refuse a job that could not run on an empty fleet in every one of its shapes."""
    for shape in request.shapes:
        reason = _why_not(grounds, policy, request, shape)
        if reason is not None:
            raise InputError(f"job '{request.job}': {reason}")


def _why_not(grounds: Grounds, policy: Policy, request: JobRequest, shape: Shape) -> str | None:
    chips = 0
    for name, count in shape.nodes:
        if name not in grounds.pool_names:
            return f"no pool '{name}'; {hint(name, grounds.pool_names)}"
        pool = grounds.pool_names.index(name)
        held, size = grounds.pool_masks[pool].bit_count(), grounds.sizes[pool]
        if count > held:
            return f"asks for {many(count, 'node')} of pool '{name}', which has {held}"
        wanted = shape.chips_per_node or size
        if wanted > size:
            return f"asks for {wanted} chips of a node, but those of pool '{name}' have {size}"
        if request.one_group and count > (largest := grounds.largest_group(pool)):
            return (
                f"asks for {many(count, 'node')} in one group, but the largest has {largest} of "
                f"pool '{name}'; ask for {largest}, or for no group"
            )
        chips += count * wanted
    most = policy.quotas.get(request.tenant)
    if most is not None and chips > most:
        return (
            f"needs {many(chips, 'chip')}, but the quota of '{request.tenant}' is {most}; "
            f"raise it to {chips}, or ask for less"
        )
    return None
