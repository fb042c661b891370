"""What a step of a plan costs in money and in energy, where a cluster file says what its chips do.

Only chips that take part count: one that is left out may be switched off or given to others.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.plan.plan import Plan

MILLION = 1e6
_ENERGIES = ((1e12, "TJ"), (1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The money and the energy of one step; None where a pool's figure is not known."""

    tokens: int  # of a step
    currency: str
    cost: float | None
    joules: float | None

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Currency units that a million tokens cost."""
        return None if self.cost is None else self.cost / self.tokens * MILLION

    @property
    def tokens_per_joule(self) -> float | None:
        """Tokens that a joule trains on."""
        return self.tokens / self.joules if self.joules else None

    @property
    def words(self) -> str:
        """A sentence for people; empty where neither is known."""
        said = []
        if self.cost is not None and self.cost_per_million_tokens is not None:
            said.append(
                f"costs {self.cost_text(self.cost)} "
                f"({self.cost_text(self.cost_per_million_tokens)} per million tokens)"
            )
        if self.joules is not None and self.tokens_per_joule is not None:
            said.append(
                f"takes {energy_text(self.joules)} ({self.tokens_per_joule:.4g} tokens per joule)"
            )
        return f"A step {' and '.join(said)}." if said else ""

    def cost_text(self, cost: float) -> str:
        """Return an amount with its currency."""
        return f"{cost:,.4g} {self.currency}"

    def to_document(self) -> dict[str, object]:
        """Return the figures as plain values; their units are in the names."""
        return {
            "currency": self.currency,
            "cost_per_step": self.cost,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "joules_per_step": self.joules,
            "tokens_per_joule": self.tokens_per_joule,
        }


def spending_of(plan: Plan, step_seconds: float, cluster: Cluster) -> Spending:
    """Return what a step of a plan costs."""
    chips = chips_by_pool(plan)
    used = [pool for pool in cluster.pools if pool.name in chips]

    def total(rates: list[float | None]) -> float | None:
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(used):
            return None
        counts = (chips[pool.name] for pool in used)
        return step_seconds * sum(n * rate for n, rate in zip(counts, known, strict=True))

    return Spending(
        tokens=plan.job.tokens,
        currency=cluster.currency,
        cost=total([cost_per_second(pool) for pool in used]),
        joules=total([pool.chip_watts for pool in used]),
    )


def cost_per_second(pool: Pool) -> float | None:
    """Return what a chip of a pool costs per second, if that is known."""
    hour = pool.price_per_chip_hour
    return None if hour is None else hour / 3600.0


def chips_by_pool(plan: Plan) -> dict[str, int]:
    """Return how many chips of each pool take part in a plan."""
    chips: dict[str, int] = {}
    for _, _, stage in plan.stages():
        for replica in stage.replicas:
            pool = replica.chips.pools[0]
            chips[pool] = chips.get(pool, 0) + replica.num_chips
    return chips


def energy_text(joules: float) -> str:
    """Return an energy with its unit, such as "12.3 MJ"."""
    size, unit = next((pair for pair in _ENERGIES if joules >= pair[0]), _ENERGIES[-1])
    return f"{joules / size:.4g} {unit}"
