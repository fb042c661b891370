"""What people see of a run: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tutti.cli import train_live
from tutti.cli.train_live import LiveRun, curve
from tutti.ranks.local_processes import RankEvent

JOB: Any = SimpleNamespace(
    plan=SimpleNamespace(
        model=SimpleNamespace(name="small"), cluster=SimpleNamespace(name="laptop"), num_ranks=4
    ),
    config=SimpleNamespace(steps=20),
)
POOL = {"ranks": 2, "compute_s": 0.25, "communication_s": 0.05, "bubble_s": 0.15, "data_s": 0.05,
        "peak_bytes": 2**30}  # fmt: skip


def step(number: int, loss: float, **more: object) -> RankEvent:
    values = {"step": number, "loss": loss, "tokens_per_s": 1234.5, "mfu": 0.25, "seconds": 0.5}
    return RankEvent(0, "step", {**values, **more})


def test_the_curve_falls_from_a_full_block() -> None:
    assert curve([3.0]) == ""
    assert curve([8.0, 4.5, 1.0]) == "█▅▁"
    assert curve([2.0, 2.0]) == "▁▁"
    assert len(curve([float(i) for i in range(500)], width=60)) == 60


def drawn(live: LiveRun) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(live._draw())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_table_shows_where_time_goes() -> None:
    live = LiveRun(JOB, wanted=False)
    live.hear(RankEvent(0, "say", {"text": "opening the data"}))
    assert drawn(live).splitlines()[:2] == ["small on laptop, 4 chips", "opening the data"]
    live.hear(step(1, 3.0))
    live.hear(step(2, 2.0, predicted_s=0.4, pools={"fast": POOL}))
    live.hear(RankEvent(0, "validation", {"step": 2, "loss": 2.25}))
    live.hear(RankEvent(1, "say", {"text": "others are not heard"}))
    text = drawn(live)
    for part in ("step 2 of 20", "loss 2.0000", "1,234 tokens/s", "MFU 25.0%",
                 "0.500 s (predicted 0.400)", "loss █▁",
                 "validation loss 2.2500 at step 2"):  # fmt: skip
        assert part in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("fast")]
    assert row == ["fast", "2", "50%", "10%", "30%", "10%", "1.0", "GiB"]
    assert "others" not in text
    live.hear(RankEvent(1, "warning", {"text": "rank 1: other hardware"}))
    assert "rank 1: other hardware" in drawn(live)


def test_elsewhere_lines_come_at_most_every_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(train_live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with LiveRun(JOB) as live:
        for number in range(1, 21):
            now[0] += 0.125
            live.hear(step(number, 2.0))
        live.hear(RankEvent(0, "say", {"text": "saving"}))
        live.hear(RankEvent(0, "done", {"steps": 20}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "saving"
    shown = [line.split()[1] for line in lines if line.startswith("step ")]
    assert shown == ["1", "9", "17", "20"], "the last one comes in any case"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveRun(JOB, wanted=False) as live:
        live.hear(step(1, 2.0))
    assert capsys.readouterr() == ("", "")
