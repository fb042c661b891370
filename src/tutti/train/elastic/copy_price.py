"""What copies in hosts' memory cost: bytes, and seconds beside the steps between two of them."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.errors import InputError
from tutti.search.replan.state_movement import state_by_node
from tutti.train.elastic.host_copies import TURNS, TURNS_WITH_PARTNERS
from tutti.train.run.planning import Job
from tutti.units import bytes_text, many, seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPrice:
    """Of the host that it is dearest for."""

    place: str  # "pool/node"
    copied_bytes: float  # of its chips' state, once
    memory_bytes: float  # for all copies that it keeps, its partners' too
    host_bytes: float  # memory that it has
    to_host_s: float
    to_partners_s: float
    between_s: float  # of the steps between two copies, as predicted

    @property
    def pause_s(self) -> float:
        """What steps wait for, where a copy takes longer than the steps between two."""
        return max(0.0, self.to_host_s + self.to_partners_s - self.between_s)

    def words(self, every: int) -> str:
        """Say it."""
        parts = [f"{seconds_text(self.to_host_s)} to the host's memory"]
        if self.to_partners_s:
            parts.append(f"{seconds_text(self.to_partners_s)} to partners")
        beside = f"beside {many(every, 'step')} of {seconds_text(self.between_s)} together"
        waits = f"; steps wait {seconds_text(self.pause_s)} for each" if self.pause_s else ""
        return (
            f"copies of {bytes_text(self.copied_bytes)} on {self.place}: {' and '.join(parts)}, "
            f"{beside}{waits}; {bytes_text(self.memory_bytes)} of its memory"
        )


def copy_price(job: Job) -> CopyPrice:
    """Return what the copies of a job cost."""
    elastic = job.config.elastic
    assert elastic is not None
    turns = TURNS_WITH_PARTNERS if elastic.partners else TURNS
    state_bytes = state_by_node(job.plan, job.spec, job.cluster)
    largest = max(state_bytes.values())
    place, copied = max(state_bytes.items(), key=lambda entry: entry[1])
    node = job.cluster.pool(place[0]).node
    # each host keeps its own, and as much for others: at most the largest of them
    memory = turns * (copied + elastic.partners * largest)
    rate = sum(node.nic_rate(slot) for slot in range(node.num_chips))
    to_host = copied / (node.host.device_bandwidth * node.num_chips)
    to_partners = elastic.partners * copied / rate if rate else 0.0
    step_s = job.predicted().step_seconds
    return CopyPrice(
        place=f"{place[0]}/{place[1]}", copied_bytes=copied, memory_bytes=memory,
        host_bytes=node.host.memory_bytes, to_host_s=to_host, to_partners_s=to_partners,
        between_s=elastic.copies * step_s,
    )  # fmt: skip


def check_memory(price: CopyPrice) -> None:
    """Refuse copies for which a host has no memory."""
    if price.memory_bytes > price.host_bytes:
        raise InputError(
            f"elastic.copies: host {price.place} would keep {bytes_text(price.memory_bytes)} of "
            f"copies, but has {bytes_text(price.host_bytes)} of memory; leave elastic.partners or "
            "elastic.copies out, or use more hosts"
        )
