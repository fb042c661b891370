"""Two jobs on a bed that share its spine: their periods predicted and measured, alone and together.

Each job has a rank under either leaf, computes (sleeps) for a while and reduces over both, again
and again; the one spine carries both jobs' bytes. What `fleet.rhythm` says of their periods, and of
the offset by which the second should begin later, is held against the clock: over a few steps from
a common start, several times. Every NIC serves hosts in turn, so that whoever shares a link gets
the equal share that the model assumes. In one queue for all TCP's shares are not equal: jobs that
began at once drift apart by themselves, and part of the gain comes without an offset.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from tutti.bench.beds.bed_flows import PAYLOAD
from tutti.bench.beds.clos_bed import MEGABIT, ClosBed, ClosSpec
from tutti.fabric.paths import route_transfers
from tutti.fabric.wiring import Floats
from tutti.fleet.send_offsets import Rhythm, periods, propose_offsets
from tutti.launch.secret import Secret, new_secret
from tutti.ranks.standing_processes import StandingRanks

SPEC = ClosSpec(leaves=2, hosts_per_leaf=2, spines=1, host_rate=40.0, up_rate=40.0)
HOSTS = ((0, 2), (1, 3))  # of each job
ALLOWED = 0.15
_STEPS, _WARM, _RUNS = 6, 1, 4
_SOON_S = 1.0  # until a run begins, on all ranks at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a job's step is: seconds of computing, then bytes to reduce."""

    compute_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsRun:
    """One pair of jobs, in one way of running them: periods, predicted and measured."""

    case: int
    way: str  # alone, together, offset
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each job, relative."""
        return tuple(abs(p / m - 1.0) for p, m in zip(self.predicted, self.measured, strict=True))


def draw_pair(seed: int) -> tuple[Pace, Pace]:
    """Return two jobs with equal periods, each sending for 30 to 45 % of its own."""
    dice = random.Random(seed)
    period = dice.uniform(0.4, 0.6)
    paces = []
    for _ in HOSTS:
        sending = dice.uniform(0.3, 0.45) * period
        num_bytes = int(sending * SPEC.up_rate * MEGABIT * PAYLOAD) // 8 * 8
        paces.append(Pace(compute_s=period - sending, num_bytes=num_bytes))
    return paces[0], paces[1]


def job_rhythm(bed: ClosBed, pace: Pace, hosts: tuple[int, int]) -> Rhythm:
    """Route a job's bytes: between two ranks an all-reduce sends its size once either way."""
    ends = np.array(hosts, dtype=np.int64)
    flows = route_transfers(bed.wiring, ends, ends[::-1].copy())
    used = flows.links[flows.links >= 0]
    times = np.bincount(used, minlength=bed.wiring.num_links).astype(np.float64)
    load: Floats = times * (pace.num_bytes / PAYLOAD)
    links = np.flatnonzero(load)
    send_s = float((load[links] / bed.wiring.rates[links]).max())
    return Rhythm(compute_s=pace.compute_s, send_s=send_s, links=links, demand=load[links] / send_s)


def run_pairs(number: int, *, first: int = 0, one_queue: bool = False) -> list[JobsRun]:
    """Run so many drawn pairs: each job alone, both at once, and the second later."""
    with contextlib.ExitStack() as stack:
        bed = ClosBed(SPEC)
        stack.callback(bed.close)
        if not one_queue:
            bed.share_by_sender()
        homes = [(bed.host(host), 0) for hosts in HOSTS for host in hosts]
        ranks = StandingRanks(len(homes), homes)
        stack.callback(ranks.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        secret = Secret(new_secret().encode())
        ranks.run(_join, range(len(homes)), folder, secret)
        runs: list[JobsRun] = []
        for case in range(first, first + number):
            runs += _pair(bed, ranks, case)
        ranks.run(_leave, range(len(homes)))
    return runs


def _pair(bed: ClosBed, ranks: StandingRanks, case: int) -> list[JobsRun]:
    paces = draw_pair(case)
    jobs = [job_rhythm(bed, pace, hosts) for pace, hosts in zip(paces, HOSTS, strict=True)]
    rates = bed.wiring.rates
    offsets = propose_offsets(jobs, rates)
    alone = tuple(
        _measure(ranks, {number: pace}, {number: 0.0})[number] for number, pace in enumerate(paces)
    )
    both = dict(enumerate(paces))
    at_once = _measure(ranks, both, {0: 0.0, 1: 0.0})
    later = _measure(ranks, both, dict(enumerate(offsets.seconds)))
    return [
        JobsRun(case=case, way="alone", measured=alone,
                predicted=tuple(job.period_s for job in jobs)),
        JobsRun(case=case, way="together", measured=(at_once[0], at_once[1]),
                predicted=tuple(periods(jobs, rates))),
        JobsRun(case=case, way="offset", measured=(later[0], later[1]), predicted=offsets.after),
    ]  # fmt: skip


def _measure(
    ranks: StandingRanks, paces: dict[int, Pace], offsets: dict[int, float]
) -> dict[int, float]:
    """Return the mean period of each job that runs."""
    seconds: dict[int, list[float]] = {number: [] for number in paces}
    for _ in range(_RUNS):
        begin = time.monotonic() + _SOON_S
        for number, pace in paces.items():
            ranks.start(_steps, (2 * number, 2 * number + 1), pace, begin + offsets[number])
        for number in paces:
            seconds[number].append(max(ranks.answer(2 * number), ranks.answer(2 * number + 1)))
    return {number: fmean(each) for number, each in seconds.items()}


_joined: dict[str, object] = {}  # of a rank's process: its job's communicator


def _join(rank: int, folder: str, secret: Secret) -> None:
    from torch._C._distributed_c10d import FileStore

    from tutti.comm import Settings, connect
    from tutti.comm.choice import Named
    from tutti.comm.places import Place

    job, own = divmod(rank, 2)
    host = HOSTS[job][own]
    comm = connect(
        FileStore(str(Path(folder, f"job{job}")), 2), own, 2,
        place=Place(host=f"host{host}", wire=(host,), addresses=(SPEC.address(host),),
                    bandwidth=SPEC.host_rate * MEGABIT),
        settings=Settings(congestion="reno"), timeout_s=60.0, secret=secret,
    )  # fmt: skip
    comm.chooser.obey("all_reduce", Named(algorithm="ring"))
    _joined["comm"] = comm


def _steps(rank: int, pace: Pace, begin: float) -> float:
    """Compute and reduce by turns from a moment on; return the mean period."""
    import torch

    del rank
    comm = _joined["comm"]
    tensor = torch.zeros(pace.num_bytes // 4)
    time.sleep(max(begin - time.monotonic(), 0.0))
    ends = []
    for _ in range(_STEPS):
        time.sleep(pace.compute_s)
        comm.all_reduce(tensor).wait()  # type: ignore[attr-defined]
        ends.append(time.monotonic())
    return (ends[-1] - ends[_WARM - 1]) / (_STEPS - _WARM)


def _leave(rank: int) -> None:
    del rank
    _joined.pop("comm").close()  # type: ignore[attr-defined]
