"""Links that wait in a circle: none by up and down, found where planted, tables with faults."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fabric.support import clos
from tutti.cli import main
from tutti.errors import InputError
from tutti.fabric.deadlock import Tables, check_tables, check_wiring

RING = {
    "hosts": {"a": "s1", "b": "s2", "c": "s3"},
    "routes": {
        "s1": {"b": ["s2"], "c": ["s2"]},
        "s2": {"c": ["s3"], "a": ["s3"]},
        "s3": {"a": ["s1"], "b": ["s1"]},
    },
}


@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("fabric", [{}, {"rail_only": True}, {"planes": 2}])
def test_up_and_down_never_waits_in_a_circle(tiers: int, fabric: dict[str, Any]) -> None:
    found = check_wiring(clos(16, tiers=tiers, **fabric))
    assert found.cycle == ()
    assert found.dependencies > 0


def test_two_leaves_that_bounce_close_a_circle_and_one_does_not() -> None:
    wiring = clos(16)
    assert check_wiring(wiring, [3]).cycle == ()
    cycle = check_wiring(wiring, [3, 11]).cycle
    assert len(cycle) >= 4
    joined = [*cycle, cycle[0]]
    for link, follows in itertools.pairwise(joined):
        assert link.split(" → ")[1] == follows.split(" → ")[0]
    assert any(link.startswith("leaf 3 →") for link in cycle)
    with pytest.raises(InputError, match="leaf 999 is not among"):
        check_wiring(wiring, [999])


def test_three_switches_in_a_ring_deadlock_and_tables_with_faults_are_refused() -> None:
    found = check_tables(Tables.read(RING, "ring"))
    assert set(found.cycle) == {"s1 → s2", "s2 → s3", "s3 → s1"}
    straight = {**RING, "routes": {
        "s1": {"b": ["s2"], "c": ["s3"]}, "s2": {"a": ["s1"], "c": ["s3"]},
        "s3": {"a": ["s1"], "b": ["s2"]},
    }}  # fmt: skip
    assert check_tables(Tables.read(straight, "mesh")).cycle == ()
    for routes, said in (
        ({**RING["routes"], "s2": {"c": ["s3"]}}, "s2 has no route to a"),
        ({**RING["routes"], "s2": {"c": ["s1"], "a": ["s3"]}}, "what is for c goes in a circle"),
        ({"s1": {"z": ["s2"]}}, "unknown host 'z'"),
        ({"s1": {"b": ["s9"]}}, "unknown 's9'"),
    ):
        with pytest.raises(InputError, match=said):
            check_tables(Tables.read({**RING, "routes": routes}, "faulty"))


def test_the_command_line_shows_the_cycle_and_ends_with_1(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(RING))
    assert main.app(["fabric", "check", "--tables", str(path)], standalone_mode=False) == 1
    assert "s1 → s2 waits for" in capfd.readouterr().out
    main.app(["fabric", "check", "E100", "--json"], standalone_mode=False)
    assert json.loads(capfd.readouterr().out)["cycle"] == []
    holes = tmp_path / "holes.json"
    holes.write_text(json.dumps({"hosts": {"a": "s1", "b": "s2"}, "routes": {"s2": {"a": ["s1"]}}}))
    with pytest.raises(InputError, match=r"holes.json: s1 has no route to b"):
        main.app(["fabric", "check", "--tables", str(holes)], standalone_mode=False)
    for words in ([], ["E100", "--tables", str(path)], ["--tables", str(path), "--bounce", "1"]):
        with pytest.raises(InputError):
            main.app(["fabric", "check", *words], standalone_mode=False)
