"""Follower: an agent's side of a job whose store is etcd: it goes with whoever leads.

Where nobody leads any more, one of the hosts starts a process that does, from what the store and
the run's folder say.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.elastic.etcd import StoreAwayError, StoreRefusedError
from tutti.elastic.restore import is_over
from tutti.elastic.store import CANDIDATE_S, EtcdStore

LOOK_S = 0.5
LEAD_MODULE = "tutti.train.elastic.lead_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A host that may lead: what a process that does needs of it."""

    node: str
    folder: Path  # the run's
    address: str  # at which the other hosts reach this one
    environment: Mapping[str, str]


class Follower:
    """Looks who leads, now and then; its methods are called by the main thread."""

    def __init__(self, store: EtcdStore, host: Candidate, follow: Callable[[str], None]) -> None:
        self._store, self._host, self._follow = store, host, follow
        self._next, self._stands_at, self._address = 0.0, 0.0, ""
        self._process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Go with who leads; stand for it where nobody does."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        with contextlib.suppress(StoreAwayError, StoreRefusedError):
            leader = self._store.leader()
            if leader is None:
                self._stand()
            elif leader.address != self._address:
                self._address = leader.address
                self._follow(leader.address)

    def close(self) -> None:
        """End the process that leads, if it is this host's; it may finish what it says."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _stand(self) -> None:
        if time.monotonic() < self._stands_at:
            return
        if self._process is not None:  # it may have lost the lead, and notices soon
            return
        last = self._store.last()
        if last is None or is_over([last]) or not self._store.stand(self._host.node):
            return
        try:
            self._start()
        except OSError as error:  # no disk, no memory: others stand meanwhile, and it trains on
            self._stands_at = time.monotonic() + CANDIDATE_S
            sys.stderr.write(
                f"node {self._host.node} cannot lead: {error}; it stands again in {CANDIDATE_S} s\n"
            )
            self._store.stand_down()

    def _start(self) -> None:
        host = self._host
        log = host.folder / "logs" / f"lead-{host.node.replace('/', '-')}.log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", LEAD_MODULE, str(host.folder), self._store.url,
                 host.node, host.address],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=dict(host.environment),
            )  # fmt: skip
