"""Does the doctor name a wire of half rate between hosts that are network namespaces?

    python benchmarks/doctor_wires.py [--times 20] [--hosts 8]   # needs root, and Linux

Every host has one NIC of 100 Mbit/s to a switch, and a process of its own that meets the others in
rounds as `tutti doctor` under torchrun does, through gloo. In a third of the trials one host's wire
runs at half its rate, in a third what lies between two hosts that meet in some round (--all-pairs
of `tutti doctor` lets all meet), in a third nothing does. Which ones changes from trial to trial.
Right is exactly that host, exactly those two, or nobody.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter

from tutti.bench.emulated_network import Bed, BedSpec, address, bed_ranks
from tutti.diagnose.finding import Finding

RATE = 100  # Mbit/s
BYTES = 1 << 20  # of one exchange
_BURST, _QUEUE = 32768, 2 << 20


def joined(rank: int, world: int) -> None:
    """Let a host's process join the others."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": address(0, 0),
        "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "nic0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    from tutti.diagnose.active.hosts import join

    join()


def asked(rank: int, names: list[str]) -> Finding:
    """Meet the others in rounds, and return what they come to."""
    del rank
    from tutti.diagnose.active.hosts import check_hosts
    from tutti.diagnose.cluster.answer import check_finding

    verdicts, rounds = check_hosts(names, bytes_=BYTES)
    return check_finding([], verdicts, names, [f"{rounds} rounds"])


def tbf(device: str, rate: float) -> str:
    """Return the line for tc that limits a device."""
    return f"qdisc replace dev {device} root tbf rate {rate}mbit burst {_BURST} limit {_QUEUE}"


def whole(bed: Bed, host: int, rate: float) -> None:
    """Let a host's wire run at a rate, both ways."""
    bed.inside(bed.holders[1 + host], ["tc", "-batch", "-"], [tbf("nic0", rate)])
    bed.inside(bed.holders[0], ["tc", "-batch", "-"], [tbf(f"port{host}.0", rate)])


def between(bed: Bed, host: int, other: int) -> None:
    """Let what a host sends to one other have half the rate."""
    lines = ["qdisc replace dev nic0 root handle 1: htb default 1"]
    for number, rate in ((1, RATE), (2, RATE / 2)):
        lines += [
            f"class replace dev nic0 parent 1: classid 1:{number} htb rate {rate}mbit "
            f"burst {_BURST} cburst {_BURST}",
            f"qdisc replace dev nic0 parent 1:{number} bfifo limit {_QUEUE}",
        ]
    lines.append(
        f"filter replace dev nic0 parent 1: protocol ip prio 1 u32 match ip dst "
        f"{address(other, 0)}/32 flowid 1:2"
    )
    bed.inside(bed.holders[1 + host], ["tc", "-batch", "-"], lines)


def restored(bed: Bed, host: int) -> None:
    """Give a host its NIC back as it was."""
    bed.inside(bed.holders[1 + host], ["tc", "qdisc", "del", "dev", "nic0", "root"], [])
    whole(bed, host, RATE)


def main() -> None:
    """Run the trials, and print what was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=8)
    args = parser.parse_args()
    from tutti.diagnose.cluster.rounds import pairing_rounds

    names = [f"host{n}" for n in range(args.hosts)]
    met = [pair for pairs in pairing_rounds(args.hosts) for pair in pairs]
    spec = BedSpec(name="doctor", nics=((RATE,),) * args.hosts)
    drawn = random.Random(1)
    good: Counter[str] = Counter()
    began = time.monotonic()
    with bed_ranks(spec) as (bed, ranks):
        ranks.run(joined, range(args.hosts), args.hosts)
        for number in range(args.times):
            for kind in ("wire", "link", "healthy"):
                one, other = drawn.sample(drawn.choice(met), 2)
                faulty = {"wire": {one}, "link": {one, other}, "healthy": set()}[kind]
                if kind == "wire":
                    whole(bed, one, RATE / 2)
                elif kind == "link":
                    between(bed, one, other)
                found = ranks.run(asked, range(args.hosts), names)[0]
                if kind != "healthy":
                    restored(bed, one)
                fits = set(found.where.hosts) == {names[n] for n in faulty}
                good[kind] += fits
                wanted = ", ".join(names[n] for n in sorted(faulty)) or "nobody"
                print(f"{number} {kind:8} {wanted:14} {'right' if fits else 'WRONG'}  "
                      f"{found.cause}; {found.notes[0]}", flush=True)  # fmt: skip
    print(
        f"half rate of a host's wire {good['wire']}/{args.times}, between two hosts "
        f"{good['link']}/{args.times}, nobody accused {good['healthy']}/{args.times}; "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
