"""Jobs that share links: what Crux and CASSINI published, and what tutti says of such jobs.

    python benchmarks/neighbour_jobs.py

Nothing is fitted. *Crux* (SIGCOMM 2024) saw a GPT go from 1.53 to 1.70 s per iteration beside a
BERT, on 96 GPUs. Ours: twelve hosts of eight A100 and four 200 Gb/s NICs, four hosts per leaf,
nothing oversubscribed, ECMP with one connection per pair; a GPT (megatron-22b, tensor 8 × data 8,
64 sequences of 2,048) on eight of them and BERT's stand-in (opt-350m: 24 blocks of 1,024 as
BERT-large, data 32, 8 sequences of 512 each) on four, every leaf shared. All of that was assumed by
us: the paper's models, placement and hashes are not known here. Each draw puts the two on other
hosts and lets them begin at another time. *CASSINI* (NSDI 2024) finishes jobs up to 1.6 times as
soon on average by offsets. Ours: equal jobs that send for a share of their period over one link.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import fmean, median

import numpy as np

from tutti.document import Place
from tutti.fleet.chips import Grounds
from tutti.fleet.network import SharedNetwork
from tutti.fleet.send_offsets import Rhythm, periods, propose_offsets
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import estimate
from tutti.simulate.step_traffic import StepTraffic, step_traffic

DRAWS = 40
HOSTS, PER_LEAF = 12, 4


def testbed() -> Cluster:
    """Return twelve hosts as assumed."""
    node = {"name": "host", "base": "HGX-A100-80", "nics": {"rate": "200 Gb/s", "per_chip": 0.5}}
    tiers = [{"name": "leaf", "nodes": PER_LEAF}, {"name": "spine"}]
    document = {
        "name": "twelve", "nodes": [node],
        "pools": [{"name": "a100", "node": "host", "nodes": HOSTS}],
        "fabric": {"rail_optimized": False, "tiers": tiers, "routing": "ecmp"},
    }  # fmt: skip
    return Cluster.from_document(document, Place("twelve"))


def habit(cluster: Cluster, model: str, nodes: int, job: Job, degrees: str) -> StepTraffic:
    """Return what a job of so many hosts sends in a step."""
    part = cluster.only({"a100": tuple(range(nodes))})
    plan = uniform_plan(load_model(model), part, job, Degrees.parse(degrees))
    return step_traffic(model, estimate(plan))


def crux() -> tuple[StepTraffic, StepTraffic, list[tuple[float, float]]]:
    """Return both jobs, and how much longer each one's step gets beside the other, by draw."""
    cluster = testbed()
    gpt = habit(cluster, "megatron-22b", 8, Job(sequence_length=2048, global_batch=64),
                "tp=8,pp=1,sp=1,mbs=1,shard=1")  # fmt: skip
    bert = habit(cluster, "opt-350m", 4, Job(sequence_length=512, global_batch=256), "tp=1,mbs=8")
    network = SharedNetwork(Grounds.of(cluster), {"gpt": gpt, "bert": bert})
    longer = []
    for seed in range(DRAWS):
        dice = random.Random(seed)
        leaves = [dice.sample(range(first, first + PER_LEAF), PER_LEAF)
                  for first in range(0, HOSTS, PER_LEAF)]  # fmt: skip
        places = [leaves[0][:3] + leaves[1][:3] + leaves[2][:2],
                  leaves[0][3:] + leaves[1][3:] + leaves[2][2:]]  # fmt: skip
        jobs = [
            network.rhythm(one, sum(1 << host for host in hosts))
            for one, hosts in zip((gpt, bert), places, strict=True)
        ]
        begin = [0.0, dice.random() * jobs[1].period_s]
        beside = periods(jobs, network.rates, begin)
        longer.append((beside[0] / jobs[0].period_s, beside[1] / jobs[1].period_s))
    return gpt, bert, longer


def cassini() -> Iterator[tuple[int, float, float]]:
    """Yield jobs on one link, each one's share of sending, and what offsets gain: a ratio."""
    for count in (2, 3, 4):
        for share in (0.5 / count, 1.0 / count, 1.25 / count):
            one = Rhythm(compute_s=1.0 - share, send_s=share, links=np.zeros(1, dtype=np.int64),
                         demand=np.ones(1))  # fmt: skip
            offsets = propose_offsets([one] * count, np.ones(1))
            yield count, share, fmean(offsets.before) / fmean(offsets.after)


def main() -> None:
    """Print both."""
    gpt, bert, longer = crux()
    for name, one, ratios in (
        ("gpt", gpt, [a for a, _ in longer]), ("bert", bert, [b for _, b in longer]),
    ):  # fmt: skip
        print(
            f"{name} ({one.name}): step {one.step_s:.3f} s alone, sends for "
            f"{one.sending_s / one.step_s:.0%} of it, feels {one.felt:.0%} of longer sending; "
            f"beside the other {median(ratios):.3f} times as long (least {min(ratios):.3f}, most "
            f"{max(ratios):.3f} of {len(ratios)} draws)"
        )
    print("published: gpt 1.11 times (1.53 to 1.70 s), bert 1.08 times")
    for count, share, gain in cassini():
        print(
            f"{count} jobs that send {share:.0%} of their period: offsets {gain:.2f} times as fast"
        )
    print("published: up to 1.6 times on average (13 models, 24 servers, whole jobs)")


if __name__ == "__main__":
    main()
