"""Policies by their words: in which order jobs go, where they are put, what else may be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tutti.errors import InputError, hint


class Order(StrEnum):
    """Who goes first."""

    FIFO = "fifo"
    PRIORITY = "priority"  # then first come
    SHORTEST = "shortest"  # by what its owner expects
    FAIR = "fair"  # the tenant that has had least, by chip-seconds that fade


class Placement(StrEnum):
    """Where a job is put."""

    RANDOM = "random"
    FIRST = "first"  # the nodes with the lowest numbers
    TIGHTEST = "tightest"  # the fullest group that holds it; else the fewest groups
    CONTENTION = "contention"  # of several tight ones, where the network is least in the way


_EXTRAS = {
    "strict": "no job overtakes another",
    "wait": "wait for a group where that pays back",
    "move": "move running jobs together where that pays back",
    "preempt": "stop jobs of lower priority at their checkpoints",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a fleet is run."""

    order: Order = Order.FIFO
    place: Placement = Placement.TIGHTEST
    backfill: bool = True
    wait: bool = False
    move: bool = False
    preempt: bool = False
    reservations: int = 1  # jobs that are promised a time when they cannot start
    depth: int = 64  # jobs behind them that may overtake, at most
    patience_s: float = 7 * 86400.0  # who has waited longer goes first, whatever the order
    half_life_s: float = 7 * 86400.0  # after which half of what a tenant had is forgotten
    quotas: Mapping[str, int] = field(default_factory=dict)  # chips at once, per tenant
    seed: int = 0  # of random placement

    def __post_init__(self) -> None:
        for tenant, chips in self.quotas.items():
            if chips < 1:
                raise InputError(f"quota of '{tenant}': {chips} chips; no job could ever start")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read "fifo/tightest/wait/move"."""
        chosen: dict[str, object] = {}
        known = [*map(str, Order), *map(str, Placement), *_EXTRAS]
        for word in filter(None, (part.strip() for part in text.split("/"))):
            key: str
            value: object
            if word in tuple(Order):
                key, value = "order", Order(word)
            elif word in tuple(Placement):
                key, value = "place", Placement(word)
            elif word in _EXTRAS:
                key, value = ("backfill", False) if word == "strict" else (word, True)
            else:
                raise InputError(f"policy '{text}': '{word}'; {hint(word, known, most=20)}")
            if key in chosen:
                raise InputError(f"policy '{text}': '{word}' is one too many; give one of a kind")
            chosen[key] = value
        if not chosen:
            raise InputError(f"a policy is empty; write it like 'fifo/tightest', of {_listed()}")
        return cls(**chosen)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The words that it is read from."""
        extras = (("strict", not self.backfill), ("wait", self.wait), ("move", self.move),
                  ("preempt", self.preempt))  # fmt: skip
        return "/".join([self.order, self.place, *(word for word, said in extras if said)])


def _listed() -> str:
    return "; ".join((", ".join(Order), ", ".join(Placement), ", ".join(_EXTRAS)))
