"""Peak memory of every class of ranks, predicted against a step of the engine on the CPU.

`python -m benchmarks.peak_memory_plans --after 100 --count 50`: plans that the slow test of the
suite (`test_the_peaks_of_drawn_plans`, the first 100) does not ask. Neighbours are often alike:
`--every 2` takes every second plan. A row of JSON per plan, then the mean and the worst.
"""

from __future__ import annotations

import argparse
import json
import time

from tests.support.features import drawn_plans
from tests.support.peak_memory import peak_errors
from tests.support.training import in_fp32


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--after", type=int, default=100)
    options.add_argument("--count", type=int, default=50)
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--minutes", type=float, default=4.0)
    asked = options.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    errors: list[float] = []
    num_plans = 0
    for number, plan in enumerate(drawn_plans(asked.after + asked.count, 8)):
        skipped = number < asked.after or (number - asked.after) % asked.every
        if skipped or time.monotonic() > until:
            continue
        found = peak_errors(in_fp32(plan, "adamw"), balanced=True)
        errors += found.values()
        num_plans += 1
        rounded = {index: round(error, 4) for index, error in sorted(found.items())}
        print(json.dumps({"plan": number, "ranks": plan.num_ranks, "errors": rounded}), flush=True)
    sizes = sorted(map(abs, errors))
    print(json.dumps({
        "plans": num_plans, "classes": len(errors), "mean": round(sum(sizes) / len(sizes), 5),
        "worst": round(sizes[-1], 5), "above 5 %": sum(size > 0.05 for size in sizes),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
