"""Rings of runs of ours as dumps: does `tutti doctor dumps` name who holds the others up?

    python -m benchmarks.doctor_rings [--times 12] [--seed 0]

Every set is a run of four ranks, two stages of two replicas on emulated chips, in which a drawn
fault (kind, rank, step, instruction) stops one rank. Once nothing has moved for some seconds all
of its processes are killed by SIGKILL; what is left is the folder of rings. Right is exactly the
rank that was stopped.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from benchmarks.doctor_hangs import Drill, everything, started
from tests.support.launching import plan_of
from tests.support.train_job import write_job
from tutti.diagnose.dumps.folder import diagnose_dump_folder
from tutti.diagnose.finding import Finding
from tutti.elastic.journal import FOLDER
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.observe.folder import RINGS
from tutti.plan.chips import ChipSet
from tutti.plan.files import save_plan
from tutti.plan.plan import Replica

KINDS = ("stop", "spin", "sleep", "file", "operation")
RANKS, STEPS, INSTRUCTIONS = 4, range(3, 7), range(12)
STILL_S, LONGEST_S, START_S = 8.0, 60.0, 150.0


def four_ranks(folder: Path) -> str:
    """Write a plan of two stages of two replicas; return its name."""
    cluster, spec = Cluster.load("laptop"), load_model(str(folder / "model"))
    stages = [[Replica(chips=ChipSet.of(f"{pool}/0/0-1"), count=2)] for pool in ("fast", "slow")]
    save_plan(plan_of(cluster, stages, spec), folder / "four.json")
    return "four.json"


def told(drill: Drill) -> Finding | None:
    """Run until a fault has stopped everybody, kill all, and ask; None: it did not happen."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_job(Path(temporary))
        process = started(folder, "run", four_ranks(folder), drill)
        rings = folder / "run" / RINGS
        try:
            mark, until = folder / "run" / FOLDER / "drill-0", time.monotonic() + START_S
            while not mark.is_file():
                if time.monotonic() > until:
                    return None
                time.sleep(0.1)
            time.sleep(STILL_S)
            until = time.monotonic() + LONGEST_S
            while diagnose_dump_folder(rings).healthy and time.monotonic() < until:
                time.sleep(1.0)
        finally:
            everything(process)
        return diagnose_dump_folder(rings)


def main() -> None:
    """Draw faults, and print who was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    good = healthy_named = happened = 0
    for number in range(given.seed, given.seed + given.times):
        dice = random.Random(number)
        drill = Drill(dice.choice(KINDS), dice.randrange(RANKS), dice.choice(STEPS),
                      dice.choice(INSTRUCTIONS))  # fmt: skip
        fault = f"{drill.kind} at rank {drill.rank}, step {drill.step}, {drill.instruction}"
        finding = told(drill)
        if finding is None:
            print(f"{fault}: did not happen in time", flush=True)
            continue
        happened += 1
        fits = finding.where.ranks == (drill.rank,)
        good += fits
        healthy_named += bool(set(finding.where.ranks) - {drill.rank})
        print(f"{'right' if fits else 'WRONG'}  {fault}: {finding.cause}", flush=True)
    print(f"{good} of {happened} right; a healthy rank named in {healthy_named}")


if __name__ == "__main__":
    main()
