"""Folders as `tutti train` leaves them, without a training."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.any_plan import PLANS
from tutti.observe.folder import METRICS, PLAN_FILE, RUN_FILE
from tutti.observe.record import PoolTimes, StepRecord
from tutti.observe.sinks import JsonLines
from tutti.plan.files import save_plan
from tutti.plan.plan import Plan

PLAN = PLANS["unequal shares on unlike chips"]


def finished_run(
    folder: Path,
    *,
    seconds: float = 0.5,
    uniform: bool = False,
    overrun: float = 0.0,
    steps: int = 6,
    plan: Plan = PLAN,
) -> Path:
    """Write a run of so many steps, each of so many seconds but the first."""
    folder.mkdir(parents=True)
    save_plan(plan, folder / PLAN_FILE)
    (folder / RUN_FILE).write_text(json.dumps({"model": "m", "job": {"uniform": uniform}}))
    sink = JsonLines(folder / METRICS)
    for step in range(1, steps + 1):
        whole = seconds * (4.0 if step == 1 else 1.0)
        sink.write(
            StepRecord(
                step=step,
                loss=4.0 / step,
                gradient_norm=1.0,
                learning_rate=1e-3,
                tokens=1000,
                seconds=whole,
                tokens_per_s=1000 / whole,
                mfu=0.2 / whole,
                hfu=0.2 / whole,
                predicted_s=seconds * 0.9,
                pools={name: _pool(whole, share, overrun) for name, share in SHARES.items()},
            )
        )
        if step % 3 == 0:
            sink.validation(step, 4.5 / step)
    sink.close()
    return folder


SHARES = {"fast": 0.5, "slow": 0.9}


def _pool(whole: float, busy: float, overrun: float) -> PoolTimes:
    return PoolTimes(
        ranks=2,
        compute_s=whole * busy,
        communication_s=whole * (0.95 - busy) / 2,
        bubble_s=whole * (0.95 - busy) / 2,
        copy_s=whole * 0.02,
        data_s=whole * 0.01,
        other_s=whole * 0.02,
        peak_bytes=2e9,
        overrun=overrun,
    )
