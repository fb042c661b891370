"""How long the planner of deployments searches: clusters of three kinds of chips, CPU seconds.

Qwen3-32B on A100-80, L40S and H20 in the proportion of 2 : 1 : 1, prompts of 1,000 and answers of
200 tokens, without limits and with 5 s to the first token and 0.1 s per token.

    python benchmarks/serve_search.py [--chips 64 1024] [--limits no yes]
"""

from __future__ import annotations

import argparse
import time

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.serving import Lengths, Limits, Service, Traffic
from tutti.search.serving.planner import plan_serving
from tutti.search.serving.question import ServeProblem

NODE = 8  # chips
TRAFFIC = Traffic(
    prompt=Lengths(mean=1000, sigma=0.8, longest=4096),
    output=Lengths(mean=200, sigma=0.8, longest=1024),
)
LIMITS = {"no": Limits(), "yes": Limits(first_token_s=5.0, per_token_s=0.1)}


def problem_of(chips: int, limits: Limits) -> ServeProblem:
    """Return the question for so many chips."""
    nodes = chips // NODE
    pools = [
        {"name": chip.lower(), "chip": chip, "nodes": nodes * part // 4, "chips_per_node": NODE}
        for chip, part in (("A100-80", 2), ("L40S", 1), ("H20", 1))
    ]
    return ServeProblem(
        model=load_model("qwen3-32b"),
        cluster=Cluster.from_document({"name": f"mixed-{chips}", "pools": pools}, Place("mixed")),
        service=Service(traffic=TRAFFIC, limits=limits),
    )


def main() -> None:
    """Search each, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--limits", choices=sorted(LIMITS), nargs="+", default=["no", "yes"])
    given = parser.parse_args()
    for chips in given.chips:
        for limits in given.limits:
            began = time.process_time()
            answer = plan_serving(problem_of(chips, LIMITS[limits]))
            print(
                f"{chips} chips, limits {limits}: {time.process_time() - began:.1f} CPU s, "
                f"{answer.best.rate:.5g} requests/s by {answer.winner} (promised "
                f"{answer.best.promised:.5g}), gap {100 * answer.gap:.1f} %, "
                f"{answer.num_engines} kinds of engines",
                flush=True,
            )


if __name__ == "__main__":
    main()
