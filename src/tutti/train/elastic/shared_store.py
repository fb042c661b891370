"""A job's store in etcd, as whoever leads uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tutti.elastic.etcd import StoreAwayError
from tutti.elastic.join import address_of, zmq_address
from tutti.elastic.journal import Entry
from tutti.elastic.store import EtcdJournal, EtcdStore, Lead, LeadingHost
from tutti.errors import InputError


class SharedStore:
    """The store, and this host's lead of the job."""

    def __init__(self, url: str, node: str, address: str) -> None:
        """Take where agents reach this host, "HOST:PORT"."""
        self.store = EtcdStore(url)
        host, port = address_of(address, "elastic.listen")
        self._leader = LeadingHost(address=zmq_address(host, port), node=node)
        self._lead: Lead | None = None
        self._count = 0

    def begin(self, job: str, *, again: bool, log: list[Entry]) -> list[Entry]:
        """Take the lead; return the decisions so far, if the job is to go on.

        `log` are those of the run's folder, for a store that lost its own.
        """
        try:
            self.store.begin(job, again=again)
            lead = self._lead = Lead(self.store, self._leader)
            entries = self.store.entries()
            if again and not entries:
                for number, entry in enumerate(log):
                    self.store.decide(number, entry, lead.made)
                entries = log
        except StoreAwayError as error:
            raise InputError(
                f"elastic.store is '{self.store.url}': {error}; start etcd, or correct the address"
            ) from None
        self._count = len(entries)
        return entries if again else []

    def journal(self, folder: Path) -> EtcdJournal:
        """Return where decisions are written from now on."""
        assert self._lead is not None
        return EtcdJournal(folder, self.store, self._lead, count=self._count)

    def hold(self) -> bool:
        """Wait until this host leads; tell whether it had to wait."""
        assert self._lead is not None
        return self._lead.wait()

    def while_waiting(self, turn: Callable[[], object]) -> None:
        """Let something be called while it is waited for the lead; it may raise."""
        assert self._lead is not None
        self._lead.turn = turn

    def close(self) -> None:
        """Lead no more."""
        if self._lead is not None:
            self._lead.close()
