"""How soon, and how rightly, the doctor tells from a run's figures that steps became slow.

    python benchmarks/doctor_steps.py --seeds 0:5

Figures are drawn, not measured: eight ranks of two pools, one 2.5 times as quick as the other, wait
for the slowest; every part has 3 % noise, and one step in a hundred takes half as long again. From
step 60 on one chip, the wire, the data or the host makes steps 1.5 or 1.2 times as long. Twenty
healthy runs of 200 steps must raise no alarm; they are looked at after every step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict

from tutti.diagnose.runs.steps import Figure, diagnose_steps
from tutti.observe.record import RankTimes, by_pool

POOLS = ["fast"] * 4 + ["old"] * 4
PARTS = {"compute_s": 0.8, "communication_s": 0.1, "data_s": 0.02, "copy_s": 0.02, "other_s": 0.06}
FAULTS = {"chip": "compute_s", "network": "communication_s", "storage": "data_s", "host": "other_s"}
BEGINS, NOISE, HICCUP = 60, 0.03, 0.01
WITHIN = {1.5: 10, 1.2: 50}


def drawn(step: int, noise: random.Random, fault: str, factor: float) -> Figure:
    """Return the figures of a step; a fault makes steps `factor` times as long."""
    ranks = []
    for rank in range(len(POOLS)):
        parts = {name: share * max(0.5, noise.gauss(1, NOISE)) for name, share in PARTS.items()}
        # of one chip only its own rank is late; the wire, the data and the host are all ranks'
        if fault and step >= BEGINS and (fault != "chip" or rank == 5):
            parts[FAULTS[fault]] += factor - 1
        ranks.append(parts)
    slowest = max(sum(parts.values()) for parts in ranks)
    hiccup = 0.5 * slowest if noise.random() < HICCUP else 0.0
    times = [
        RankTimes(
            step_s=slowest + hiccup, bubble_s=slowest - sum(parts.values()), peak_bytes=0.0,
            **parts | {"other_s": parts["other_s"] + hiccup},
        )
        for parts in ranks
    ]  # fmt: skip
    pools = {name: asdict(one) for name, one in by_pool(times, POOLS).items()}
    return Figure(line=step + 1, step=step, seconds=slowest + hiccup, predicted_s=1.0, pools=pools)


def told(fault: str, factor: float, seed: int, steps: int) -> tuple[int | None, str]:
    """Return after how many steps something is said first, and which component at the end."""
    since: int | None = None
    component = ""
    noise = random.Random(f"{fault} {factor} {seed}")
    figures: list[Figure] = []
    for step in range(steps):
        figures.append(drawn(step, noise, fault, factor))
        if step < BEGINS and fault:
            continue
        found, _ = diagnose_steps(figures, [], "metrics.jsonl")
        component = "" if found is None else found.component.value
        since = step - BEGINS + 1 if since is None and found is not None else since
    return since, component


def main() -> None:
    """Draw runs, and print how they were told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0:20", help="FIRST:LAST, of twenty runs each")
    parser.add_argument("--only", choices=["faults", "healthy"])
    args = parser.parse_args()
    first, last = (int(x) for x in args.seeds.split(":"))
    began = time.process_time()
    for factor, within in WITHIN.items() if args.only != "healthy" else ():
        for fault in FAULTS:
            found = [told(fault, factor, seed, BEGINS + within) for seed in range(first, last)]
            waits = [wait for wait, _ in found if wait is not None]
            right = sum(component == fault for _, component in found)
            middle = f"{statistics.median(waits):.0f}" if waits else "–"
            print(
                f"{factor}× {fault:8} told {len(waits)}/{len(found)} within {within} steps "
                f"(median {middle}), rightly {right}/{len(found)}"
            )
    if args.only != "faults":
        alarms = [told("", 1.0, seed, 200)[0] is not None for seed in range(first, last)]
        print(f"healthy runs of 200 steps: {sum(alarms)} alarms in {len(alarms)}")
    print(f"{time.process_time() - began:.1f} CPU s")


if __name__ == "__main__":
    main()
