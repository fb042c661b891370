"""Sums of moments on a device named on the command line, from wherever the moments are, as JSON.

It names no device, as nothing above the accelerator layer does.
"""

from __future__ import annotations

import json
import sys

from tests.support.any_plan import FOUR, PLAIN, Draft
from tests.support.graph_training import on_device
from tests.support.threads import World
from tests.support.training import engine_of, in_fp32, settings
from tutti.accelerator import Accelerator, open_accelerator
from tutti.plan.plan import Offload, Plan
from tutti.train.engine.gradient_noise import moment_sums

STEPS = 2


def plan_of(optimizer: str, **words: object) -> Plan:
    draft = Draft().line((FOUR, [words]), micro_batches=2)
    return in_fp32(draft.plan(PLAIN), optimizer)


KINDS = {
    "on the chip": plan_of("adamw"),
    "codes, decoded on the host": plan_of("adamw8bit"),
    "on the host": plan_of("adamw", offload=Offload(optimizer=((1, 3),))),
}


def sums(accelerator: Accelerator, kind: str) -> list[tuple[float, float]]:
    """Return each step's sums, and check the device of a rank without states."""
    plan = KINDS[kind]

    def one(links: object) -> list[tuple[float, float]]:
        assert plan.model.spec is not None
        engine = engine_of(plan, plan.model.spec, links, accelerator=accelerator)
        engine.sums_moments = True
        found = []
        for step in range(STEPS):
            result = engine.step(on_device(accelerator, engine, step, packed=False), settings())
            found.append((result.means, result.squares))
        assert moment_sums([], 0, accelerator)["means"].device == accelerator.device
        return found

    return World(1).run(one)[0]


if __name__ == "__main__":
    opened = open_accelerator(sys.argv[1])
    print(json.dumps({kind: sums(opened, kind) for kind in KINDS}))
