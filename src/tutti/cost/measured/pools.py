"""Which pools of a cluster are priced by which profile."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tutti.cost.measured.chip import MeasuredChip
from tutti.errors import InputError
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.profile import Profile

HOST = "CPU"  # what a profile of the host's processor is called


def measured_pools(
    profiles: Sequence[Profile], cluster: Cluster, used: Mapping[str, Dtype]
) -> dict[str, MeasuredChip]:
    """Return the measured chip of every used pool that a profile is of, by the pool's name.

    `used` says in which format each pool multiplies.

    A profile that none of them needs is refused: a price that silently rests on something else is
    what a profile was given against. A profile of the host's processor serves the chips that are
    emulated on it, slowed down as they are.
    """
    pools = [cluster.pool(name) for name in used]
    profiles = [profile for profile in profiles if not profile.is_of_storage_alone]
    for profile in profiles:
        if not profile.is_measured:
            raise InputError(f"profile of {profile.chip}: holds no measurements; run tutti profile")
        if not any(_is_of(profile, pool.chip) for pool in pools):
            chips = ", ".join(sorted({pool.chip.name for pool in pools}))
            raise InputError(
                f"profile of {profile.chip}: the plan runs on {chips}; measure it there with "
                "tutti profile, or leave --chip-profile out"
            )
    by_pool: dict[str, MeasuredChip] = {}
    for pool in pools:
        own = profile_of(profiles, pool.chip)
        if own is not None:
            by_pool[pool.name] = measured_chip(own, used[pool.name])
    return by_pool


def profile_of(profiles: Sequence[Profile], chip: Chip) -> Profile | None:
    """Return the profile that is of a chip, if any, slowed down where the chip is emulated."""
    suitable = [p for p in profiles if _is_of(p, chip) and not p.is_of_storage_alone]
    if len(suitable) > 1:
        raise InputError(f"two profiles of {chip.name}: give one of them")
    if not suitable:
        return None
    if suitable[0].chip != chip.name and chip.slowdown is not None:
        return suitable[0].slowed(chip.name, chip.slowdown)
    return suitable[0]


@functools.lru_cache(maxsize=16)
def measured_chip(profile: Profile, dtype: Dtype) -> MeasuredChip:
    """Return a profile's curves in a number format, fitted once."""
    return MeasuredChip(profile, dtype)


def _is_of(profile: Profile, chip: Chip) -> bool:
    names = {chip.name.casefold(), *(alias.casefold() for alias in chip.aliases)}
    if chip.slowdown is not None:
        names.add(HOST.casefold())
    return profile.chip.casefold() in names
