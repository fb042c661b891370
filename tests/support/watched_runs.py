"""Runs as a dashboard watches them: folders that are written second by second."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from tests.support.finished_runs import finished_run
from tests.support.lines import uniform
from tutti.elastic.journal import Entry, Journal
from tutti.observe.figures import key
from tutti.observe.folder import RINGS, SERIES
from tutti.observe.rank_series import FILE, JOB, rank_names
from tutti.observe.ring import Kind, Listed, Ring, ring_path
from tutti.observe.store import SeriesStore
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Plan
from tutti.schedule.schedule import build_schedule

HOSTILE = '<img src=x onerror="window.hacked=1">'


def plan_of(stages: int, micro_batches: int = 4) -> Plan:
    """Return a pipeline of so many chips in nodes of eight."""
    return uniform(stages, micro_batches, ScheduleKind.ONE_F_ONE_B)


class Feed:
    """A run of many ranks, one of them slow, whose series grow by a second at a time."""

    def __init__(
        self, folder: Path, plan: Plan, *, slow: int = 3, seconds: int = 120, hosts: bool = True
    ) -> None:
        self.folder = finished_run(folder, plan=plan, steps=40)
        self.ranks, self._slow = plan.num_ranks, slow
        self._names = rank_names(self.ranks)
        self._random = np.random.default_rng(1)
        (self.folder / SERIES).mkdir()
        self._store = SeriesStore(self.folder / SERIES / FILE)
        self._hosts = [SeriesStore(self.folder / SERIES / f"fast-{n}.sqlite")
                       for n in range(min(2, -(-self.ranks // 8)) if hosts else 0)]  # fmt: skip
        self.second = int(time.time()) - seconds
        for _ in range(seconds):
            self.tick(flush=False)
        self.flush()

    def tick(self, *, flush: bool = True) -> None:
        """Let a second go by."""
        self.second += 1
        compute = 0.4 * self._random.normal(1, 0.02, self.ranks)
        if self._slow < self.ranks:
            compute[self._slow] *= 1.5
        whole = np.full(self.ranks, compute.max() + 0.1)
        rest = np.full(self.ranks, 0.02)
        parts = [
            whole,
            compute,
            rest,
            whole - compute - 0.08,
            rest / 2,
            rest / 2,
            rest,
            rest * 1e11,
        ]
        row = np.concatenate(parts).astype(np.float32)
        self._store.append_row(JOB, self.second, self._names, row)
        for number, store in enumerate(self._hosts):
            store.append("here", self.second, {
                "tutti_host_cpu_busy_ratio": 0.3 + 0.1 * number,
                "tutti_host_memory_used_ratio": 0.99 if number else 0.4,
                'tutti_nic_received_bytes_total{nic="eth0"}': 1e9 * (1 + number),
                key("nic_received_bytes_total", HOSTILE): 2e9,
                'tutti_chip_temperature_celsius{chip="0"}': 60.0 + number,
            })  # fmt: skip
        if flush:
            self.flush()

    def flush(self) -> None:
        """Let readers see what was written."""
        for store in (self._store, *self._hosts):
            store.flush(summaries=False)

    def close(self) -> None:
        """Let go of the files."""
        for store in (self._store, *self._hosts):
            store.close()


def with_rings(folder: Path, plan: Plan, steps: int = 3) -> None:
    """Write every rank's ring, of steps that took next to no time."""
    rank = 0
    for own in build_schedule(plan).classes:
        for _ in range(own.num_ranks):
            listed = [Listed(words=str(i), lane=i.lane.value) for i in own.instructions]
            ring = Ring(ring_path(folder / RINGS, rank), rank=rank, world=plan.num_ranks,
                        instructions=listed, events=1 << 12)  # fmt: skip
            for step in range(1, steps + 1):
                ring.begin_step(step)
                for index in range(len(listed)):
                    ring.note(Kind.START, index)
                    ring.note(Kind.ISSUED, index)
                ring.note(Kind.STEP_END)
            ring.close()
            rank += 1


def with_logs(folder: Path) -> None:
    """Write two logs, with markup and terminal codes in them."""
    (folder / "logs").mkdir(exist_ok=True)
    lines = [f"2026-11-18 02:{n // 60:02d}:{n % 60:02d} step {n}" for n in range(300)]
    lines[200] = f"2026-11-18 02:03:20 \x1b[31m{HOSTILE}\x1b[0m"
    (folder / "logs" / "rank-0.log").write_text("\n".join(lines) + "\n")
    (folder / "logs" / "rank-1.log").write_text("no times here\n$(reboot)\n")


def decisions(begin: float = 1.8e9) -> list[Entry]:
    """Return the log of a run that lost a host, went on without it, and got it back."""
    hosts = ("fast/0/0", "fast/0/1")
    told = (
        (0.0, 1, "entering", "from the beginning", 0, hosts),
        (2.0, 1, "running", "from the beginning", None, ()),
        (30.0, 1, "leaving", f"rank 1 (fast/0/1): host {HOSTILE} is silent", None, ()),
        (31.0, 1, "settling", f"rank 1 (fast/0/1): host {HOSTILE} is silent", None, ()),
        (31.5, 2, "entering", "step 12 from 1 copy in memory", 12, hosts[:1]),
        (32.5, 2, "running", "step 12 from 1 copy in memory", None, ()),
        (60.0, 2, "leaving", "fast/0/1 is there again", None, ()),
        (60.5, 3, "entering", "step 25 from 1 process that went on", 25, hosts),
        (61.0, 3, "running", "step 25 from 1 process that went on", None, ()),
    )
    return [
        Entry(at=begin + after, generation=generation, phase=phase, why=why, step=step,
              ranks=ranks, plan="elastic/plan-0.json" if ranks else "")
        for after, generation, phase, why, step, ranks in told
    ]  # fmt: skip


def with_decisions(folder: Path, begin: float = 1.8e9) -> None:
    """Write the log of an elastic run."""
    journal = Journal(folder)
    for entry in decisions(begin):
        journal.write(entry)
    journal.close()
