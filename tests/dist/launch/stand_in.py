"""A training command in miniature: finds its rank by its chip, meets the others, sums a tensor.

Called as a rank is: `stand_in.py --plan PLAN [--fail RANK]`, under torchrun's variables. Leaves
`rank-N.json` in its working folder, where a real run leaves its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import distributed

from tutti.launch.identity import rank_of_process
from tutti.plan.files import load_plan
from tutti.plan.plan import RankMap

NUM_ELEMENTS = 1 << 20  # 4 MiB: more than the rendezvous moves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--fail", type=int)
    options = parser.parse_args()
    plan = load_plan(options.plan)
    rank = rank_of_process(plan, os.environ)
    given = int(os.environ["RANK"])
    # torchrun's numbers stay its own; from here on a rank is the plan's.
    os.environ["RANK"] = str(rank)
    distributed.init_process_group("gloo")
    if rank == options.fail:
        raise SystemExit(3)
    tensor = torch.full((NUM_ELEMENTS,), float(2**rank))
    distributed.all_reduce(tensor)
    distributed.barrier()
    found = {
        "chip": list(RankMap(plan).place(rank).chip),
        "node": os.environ["TUTTI_NODE"],
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "torchrun_rank": given,
        "smallest": tensor.min().item(),
        "largest": tensor.max().item(),
    }
    Path(f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
