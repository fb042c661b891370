"""A measured step as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

from tutti.observe.trace import RankTrace, write_measured_trace
from tutti.schedule.instruction import Instruction, Op, What


def test_ranks_are_laid_over_each_other(tmp_path: Path) -> None:
    first = RankTrace(
        name="rank 0",
        began=1000.0,
        instructions=(Instruction(Op.FORWARD, 0, 0, 2), Instruction(Op.STEP)),
        start=(0.0, 0.5),
        end=(0.25, 0.75),
    )
    second = RankTrace(
        name="rank 1",
        began=1000.125,
        instructions=(Instruction(Op.RECEIVE, 0, 2, 2, What.ACTIVATIONS),),
        start=(0.25,),
        end=(0.125,),  # never heard of its end
    )
    write_measured_trace(tmp_path / "trace.json", [first, second])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in slices] == [
        (0, "Forward 0", 0.0, 250_000.0),
        (0, "Step", 500_000.0, 250_000.0),
        (1, "Receive 0", 375_000.0, 0.0),
    ]
    assert slices[2]["args"] == {"units": "2-2", "what": "activations"}
