"""The figures of one training step, of a rank, of a pool and of the whole job. Pure.

A rank's step is compute, and waiting for one of: the network's own time (`communication_s`),
another rank that is late (`bubble_s`), copies between host and chip, the data. The parts add up to
the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Where one rank's step went."""

    step_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    copy_s: float
    data_s: float
    other_s: float  # the engine's own work between instructions
    peak_bytes: float
    overrun: float = 0.0  # of an emulated chip: how far the host fell behind, as a share

    def values(self) -> list[float]:
        """Return the figures as numbers, in the order of the fields."""
        return [float(getattr(self, name)) for name in _NAMES]

    @classmethod
    def of_values(cls, values: Sequence[float]) -> RankTimes:
        """Return what `values` were of."""
        return cls(**dict(zip(_NAMES, values, strict=True)))


_NAMES = tuple(f.name for f in fields(RankTimes))
NUM_TIMES = len(_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTimes:
    """The mean of a pool's ranks; memory and overrun are the largest."""

    ranks: int
    compute_s: float
    communication_s: float
    bubble_s: float
    copy_s: float
    data_s: float
    other_s: float
    peak_bytes: float
    overrun: float


def by_pool(times: Sequence[RankTimes], pools: Sequence[str]) -> dict[str, PoolTimes]:
    """Return the figures of each pool; `pools` names each rank's."""
    times_of_pool: dict[str, list[RankTimes]] = {}
    for own, pool in zip(times, pools, strict=True):
        times_of_pool.setdefault(pool, []).append(own)
    seconds = ("compute_s", "communication_s", "bubble_s", "copy_s", "data_s", "other_s")
    return {
        pool: PoolTimes(
            ranks=len(members),
            **{name: sum(getattr(m, name) for m in members) / len(members) for name in seconds},
            peak_bytes=max(m.peak_bytes for m in members),
            overrun=max(m.overrun for m in members),
        )
        for pool, members in times_of_pool.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the job."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_s: float
    mfu: float
    hfu: float
    predicted_s: float | None = None
    balance: float = 0.0
    skipped: bool = False
    margin: float | None = None  # of losses on answers: how far chosen ones are ahead
    right: float | None = None  # the share of examples in which they are
    sampled: Mapping[str, float] | None = None  # of answers that the model gave: rewards, times
    noise_scale: float | None = None  # of the gradient, in sequences
    pools: Mapping[str, PoolTimes] | None = None
    at: float | None = None  # when it ended, in seconds since 1970

    def to_document(self) -> dict[str, object]:
        """Return plain values, without what there is not."""
        written = asdict(self)
        return {name: value for name, value in written.items() if value is not None}

    def scalars(self) -> dict[str, float]:
        """Return the figures by name, those of pools as "pool/name"."""
        values = {
            name: float(value)
            for name, value in self.to_document().items()
            if isinstance(value, (int, float)) and name not in ("step", "at")
        }
        values |= {f"sampled/{name}": float(value) for name, value in (self.sampled or {}).items()}
        for pool, times in (self.pools or {}).items():
            values |= {f"{pool}/{name}": float(value) for name, value in asdict(times).items()}
        return values
