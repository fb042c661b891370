"""`HostedGroup`: the processes of one engine on hosts that agents run.

It waits until all its hosts are there. A rank that ends, a host that is lost: the whole engine is
started anew, under another generation, as soon as its hosts are there again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tutti.server.engine_group import COMING_S, EngineGroup, how
from tutti.server.hosts.front import Hosts
from tutti.server.hosts.messages import RankStatus
from tutti.server.hosts.rank_hosts import Seat
from tutti.server.messages import ServerFolder


class HostedGroup(EngineGroup):
    """One engine whose ranks are elsewhere."""

    def __init__(
        self, number: int, folder: ServerFolder, hosts: Hosts, seats: Sequence[Seat], name: str
    ) -> None:
        super().__init__(number, folder, ranks=len(seats), module="rank_process", name=name)
        self._hosts, self._seats = hosts, list(seats)
        self._used = list(dict.fromkeys(seat.host for seat in seats))
        self._begun_on: dict[str, str] = {}  # incarnations; empty: it is not started

    def start(self) -> None:
        """Begin a generation, when its hosts are there."""
        self.state = msgspec.structs.replace(
            self.state, generation=self.state.generation + 1, address="", ready=False
        )
        self._begun_on = {}
        self._hosts.want(self.number, None)

    def look(self) -> str | None:
        """Return what has changed, as a user reads it; None: nothing."""
        if self.given_up:
            return None
        now = {host: self._hosts.incarnation(host) for host in self._used}
        if not self._begun_on:
            return self._begin(now) if all(now.values()) else None
        for host, incarnation in self._begun_on.items():
            if now[host] != incarnation:
                self.start()
                return f"{self.name} lost {host}, and waits for it"
        return self._look_at_ranks()

    def _begin(self, incarnations: dict[str, str]) -> str:
        self._begun, self._begun_on = time.monotonic(), incarnations
        self._hosts.want(self.number, self.state.generation)
        return f"{self.name} starts on {', '.join(self._used)}"

    def _look_at_ranks(self) -> str | None:
        statuses = [self._status(rank) for rank in range(len(self._seats))]
        for rank, status in enumerate(statuses):
            where = self._seats[rank].host
            who = self.name if len(self._seats) == 1 else f"rank {rank} of {self.name}"
            if status is None:
                if time.monotonic() - self._begun > COMING_S:
                    return self._again(f"{who} did not come on {where}")
                continue
            if status.code is not None:
                if status.failed:
                    self._hosts.want(self.number, None)
                    self.given_up = f"{who} cannot run on {where}: {status.failed}"
                    return self.given_up
                return self._again(f"{who} ended on {where} ({how(status.code)})")
            if status.silent_s > self._patience_s:
                return self._again(
                    f"{who} was silent for {status.silent_s:.0f} s on {where} and was ended"
                )
        first = statuses[0]
        if not self.state.ready and first is not None and first.ready is not None:
            self.state = first.ready
            return f"{self.name} is ready after {time.monotonic() - self._begun:.1f} s"
        return None

    def _status(self, rank: int) -> RankStatus | None:
        generation = self.state.generation
        return self._hosts.status(self._seats[rank].host, self.number, generation, rank)

    def _end(self) -> None:
        self._hosts.want(self.number, None)
