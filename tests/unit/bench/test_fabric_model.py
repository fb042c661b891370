"""The verbs that hold the network model against itself."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from tutti.bench.fabric.published import scattered
from tutti.cli.main import app


def test_grains_tell_every_ring() -> None:
    result = CliRunner().invoke(
        app, ["bench", "fabric", "grains", "2", "--nodes", "16", "--json"], catch_exceptions=False
    )
    draws = json.loads(result.stdout)["draws"]
    assert len(draws) == 2
    for draw in draws:
        assert len(draw["off"]) == len(draw["paces"]) >= 1
        assert min(draw["paces"]) == 1.0
        assert abs(draw["slowest"]) < 0.01


def test_scattered_rings_visit_every_chip_once_and_stay_on_their_rail() -> None:
    a, b = scattered(32)
    assert sorted(a) == sorted(b) == list(range(256))
    assert ((a % 8) == (b % 8)).all()
    assert ((a // 8) != (b // 8)).all()
