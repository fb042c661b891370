"""What watching costs: figures of work that was done, not how long it took."""

from __future__ import annotations

from pathlib import Path

from tutti.bench.watching.watching_cost import hour, ranks_series, records


def test_parts_are_measured_on_what_they_give_back(tmp_path: Path) -> None:
    series = ranks_series(tmp_path)
    assert series["points"] == 1000 * 8 * 600
    assert 0 < series["bytes_per_point"] < 4  # as float32 a value alone would take four
    assert hour(tmp_path)["read_hour_s"] > 0
    assert all(seconds > 0 for seconds in records(tmp_path).values())
