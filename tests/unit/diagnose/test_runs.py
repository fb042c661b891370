"""Runs of ours: who hangs, since when steps are slow and why, and twins."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tutti.diagnose.finding import Component
from tutti.diagnose.runs.clocks import on_one_clock
from tutti.diagnose.runs.folder import diagnose_run, read_figures
from tutti.diagnose.runs.recorded_hang import diagnose_rings
from tutti.diagnose.runs.steps import Figure, change_point, diagnose_steps
from tutti.errors import InputError
from tutti.observe.folder import ELASTIC, JOURNAL, METRICS
from tutti.observe.ring import Event, Kind, Listed, RingReading
from tutti.observe.store import SeriesStore

S = 1_000_000_000
FORWARD = Listed(words="Forward units 0-1", lane="compute")
SEND = Listed(words="Send activations at unit 2", lane="network", meets="activations at unit 2")
RECEIVE = Listed(words="Receive activations at unit 2", lane="network", meets=SEND.meets)
CLIP = Listed(words="ClipNorm", lane="network", meets="ClipNorm")


def ring(
    rank: int, listed: list[Listed], events: list[tuple[float, int, int, Kind]], **changes: Any
) -> RingReading:
    return RingReading(**{
        "file": f"rank-{rank}.ring", "rank": rank, "world": 2, "host": f"node{rank}",
        "process": 1, "clock_ns": 0, "alive_ns": 200 * S, "instructions": tuple(listed),
        "events": tuple(Event(i + 1, int(t * S), step, index, kind)
                        for i, (t, step, index, kind) in enumerate(events)),
    } | changes)  # fmt: skip


def step(at: float, number: int, busy_s: float = 0.5) -> list[tuple[float, int, int, Kind]]:
    return [
        (at, number, -1, Kind.STEP), (at, number, 0, Kind.START),
        (at + busy_s, number, 0, Kind.ISSUED), (at + 0.9, number, -1, Kind.STEP_END),
    ]  # fmt: skip


WAITS = [(2.0, 2, -1, Kind.STEP), (2.0, 2, 0, Kind.START), (2.0, 2, 0, Kind.ISSUED),
         (2.1, 2, 0, Kind.WAIT)]  # fmt: skip


def test_who_receives_waits_for_who_has_not_sent() -> None:
    computes = [*step(1, 1), (2.0, 2, -1, Kind.STEP), (2.0, 2, 0, Kind.START)]
    found = diagnose_rings([ring(0, [FORWARD, SEND], computes), ring(1, [RECEIVE], WAITS)])
    assert found is not None
    assert found.where.ranks == (0,)
    assert found.where.hosts == ("node0",)
    assert "is in Forward units 0-1" in found.cause
    assert "198 s" in found.cause


def test_one_that_never_began_the_step() -> None:
    found = diagnose_rings([ring(0, [CLIP], step(1, 1)), ring(1, [CLIP], WAITS)])
    assert found is not None
    assert found.where.ranks == (0,)


def test_one_that_died() -> None:
    dead = ring(0, [CLIP], [*step(1, 1), *WAITS[:2]], alive_ns=3 * S)
    found = diagnose_rings([dead, ring(1, [CLIP], WAITS)])
    assert found is not None
    assert (found.component, found.where.ranks) == (Component.HOST, (0,))
    assert "died" in found.cause


def test_one_without_a_ring() -> None:
    found = diagnose_rings([ring(1, [CLIP], WAITS)])
    assert found is not None
    assert found.where.ranks == (0,)


def test_all_in_one_operation_is_the_network() -> None:
    found = diagnose_rings([ring(rank, [CLIP], WAITS) for rank in (0, 1)])
    assert found is not None
    assert (found.component, found.where.ranks) == (Component.NETWORK, ())


def test_a_run_that_goes_on_or_was_stopped_does_not_hang() -> None:
    rings = [ring(0, [FORWARD], [*step(1, 1), (2.0, 2, -1, Kind.STEP)]), ring(1, [CLIP], WAITS)]
    assert diagnose_rings(rings, now_ns=3 * S) is None
    done = [ring(rank, [FORWARD], [*step(1, 1), *step(2, 2)]) for rank in (0, 1)]
    assert diagnose_rings(done) is None


def test_a_first_step_that_warmed_up_hides_no_hang() -> None:
    warm = [(0.0, 1, -1, Kind.STEP), (20.0, 1, -1, Kind.STEP_END)]
    busy = [*warm, *step(20, 2), (21.0, 3, -1, Kind.STEP), (21.0, 3, 0, Kind.START)]
    waits = [*warm, *step(20, 2), (21.0, 3, -1, Kind.STEP), (21.0, 3, 0, Kind.START),
             (21.0, 3, 0, Kind.ISSUED), (21.1, 3, 0, Kind.WAIT)]  # fmt: skip
    rings = [ring(0, [FORWARD, SEND], busy, alive_ns=30 * S),
             ring(1, [RECEIVE], waits, alive_ns=30 * S)]  # fmt: skip
    found = diagnose_rings(rings)
    assert found is not None
    assert found.where.ranks == (0,)


@pytest.mark.parametrize("apart_s", [-3600, 3600, 30])
def test_hosts_whose_clocks_are_apart(apart_s: int) -> None:
    steps = [event for n in range(1, 6) for event in step(float(n), n)]
    busy = [*steps, (6.0, 6, -1, Kind.STEP), (6.0, 6, 0, Kind.START)]
    waits = [*steps, *((t + 4, 6, index, kind) for t, _, index, kind in WAITS)]
    rings = [ring(0, [FORWARD, SEND], busy, alive_ns=7 * S),
             ring(1, [RECEIVE], waits, alive_ns=7 * S, clock_ns=apart_s * S)]  # fmt: skip
    one, said = on_one_clock(rings, "")
    assert diagnose_rings(one, now_ns=7 * S) is None  # both live, and nothing is late
    assert f"the clock of node1 is {abs(apart_s):,} s" in said[0]
    hung = diagnose_rings(one, now_ns=60 * S)
    assert hung is not None
    assert hung.where.ranks == (0,)


def test_clocks_that_agree_are_left_alone() -> None:
    steps = [event for n in range(1, 6) for event in step(float(n), n)]
    rings = [ring(0, [FORWARD], steps), ring(1, [FORWARD], steps, clock_ns=S)]
    assert on_one_clock(rings, "") == (rings, [])
    alone = [ring(0, [FORWARD], steps, clock_ns=9 * S)]
    assert on_one_clock(alone, "node0") == (alone, [])
    strangers = [ring(0, [FORWARD], step(1, 1)), ring(1, [FORWARD], step(1, 7), clock_ns=99 * S)]
    assert on_one_clock(strangers, "")[0] == strangers  # no step that both know


def figures(seconds: list[float], part: str = "compute_s") -> list[Figure]:
    return [
        Figure(line=i + 1, step=i + 1, seconds=s, predicted_s=1.0,
               pools={"a": {"compute_s": 0.5, "data_s": 0.1, "communication_s": 0.2,
                            part: 0.5 + s - 1.0}})
        for i, s in enumerate(seconds)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "component"),
    [("compute_s", "chip"), ("communication_s", "network"), ("data_s", "storage")],
)
def test_the_part_that_grew_names_the_component(part: str, component: str) -> None:
    noise = random.Random(1)
    slow = [1 + noise.gauss(0, 0.02) for _ in range(30)] + [
        1.3 + noise.gauss(0, 0.02) for _ in range(20)
    ]
    found, notes = diagnose_steps(figures(slow, part), [], "metrics.jsonl")
    assert found is not None
    assert found.component.value == component
    assert abs(found.evidence[0].line - 31) <= 1
    assert "forecast" in notes[-1]


def test_one_slow_chip_of_a_pool_shows_little_in_its_mean() -> None:
    noise = random.Random(3)

    def drawn(number: int, slow: float) -> Figure:
        pools = {
            name: {"compute_s": 0.8 + noise.gauss(0, 0.01) + (slow / 4 if name == "b" else 0.0),
                   "communication_s": 0.1, "bubble_s": slow + noise.gauss(0, 0.01)}
            for name in ("a", "b")
        }  # fmt: skip
        return Figure(line=number, step=number, seconds=1 + slow + noise.gauss(0, 0.01),
                      predicted_s=1.0, pools=pools)  # fmt: skip

    slow = [drawn(n, 0.5 if n > 40 else 0.0) for n in range(50)]
    found, _ = diagnose_steps(slow, [], "metrics.jsonl")
    assert found is not None
    assert found.component is Component.CHIP
    assert "some of pool 'b'" in found.cause


def test_a_slow_rank_is_named_beside_since_when() -> None:
    listed, times = [FORWARD], {0: 0.3, 1: 0.3, 2: 0.3, 3: 0.45}
    rings = [
        ring(rank, listed, [e for n in range(12) for e in step(n, n, busy)], world=4)
        for rank, busy in times.items()
    ]
    slow = [1.0] * 20 + [1.4] * 20
    found, _ = diagnose_steps(figures(slow), rings, "metrics.jsonl")
    assert found is not None
    assert (found.component, found.where.ranks) == (Component.CHIP, (3,))
    assert "since step" in found.cause


def test_no_alarm_in_healthy_steps() -> None:
    alarms = 0
    for seed in range(20):
        noise = random.Random(seed)
        alarms += change_point([1 + abs(noise.gauss(0, 0.05)) for _ in range(200)]) is not None
    assert alarms == 0


def test_irregular_steps_are_counted() -> None:
    seconds = [1.0] * 40
    seconds[20] = 4.0
    found, notes = diagnose_steps(figures(seconds), [], "m")
    assert found is None
    assert "1 irregular steps (21)" in notes[0]


def test_a_twin_that_computes_longer() -> None:
    events = {
        r: [e for n in range(8) for e in step(n, n, 0.75 if r == 2 else 0.5)] for r in range(4)
    }
    rings = [ring(r, [FORWARD], events[r], world=4) for r in range(4)]
    found, _ = diagnose_steps([], rings, "m")
    assert found is not None
    assert (found.component, found.where.ranks) == (Component.CHIP, (2,))
    assert diagnose_steps([], rings[:2], "m")[0] is None  # of two, neither is known to be it
    even = [ring(r, [FORWARD], events[0], world=4) for r in range(4)]
    assert diagnose_steps([], even, "m")[0] is None


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        diagnose_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match="neither rings nor figures"):
        diagnose_run(tmp_path)
    lines = [json.dumps({"step": i, "seconds": 1.0}) for i in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "what", '{"step": 21, "sec']))
    assert diagnose_run(tmp_path).healthy
    notes: list[str] = []
    assert len(read_figures(tmp_path / "metrics.jsonl", notes)) == 20
    assert "1 lines" in notes[0]


def test_alerts_of_hosts_are_told(tmp_path: Path) -> None:
    (tmp_path / "series").mkdir()
    lines = [json.dumps({"step": i, "seconds": 1.0}) for i in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    store = SeriesStore(tmp_path / "series" / "a-0.sqlite")
    for second in range(40):
        errors = 25.0 if second > 20 else 0.0
        store.append("node7", 1_800_000_000 + second, {'tutti_nic_errors_total{nic="ib0"}': errors})
    store.close()
    found = diagnose_run(tmp_path)
    assert (found.component, found.where.hosts) == (Component.NETWORK, ("node7",))
    assert "ib0" in found.evidence[0].text
    (tmp_path / "series" / "b-0.sqlite").write_bytes(b"damaged" * 1000)
    assert any("damaged" in note for note in diagnose_run(tmp_path).notes)


def test_a_generation_that_ended_by_itself_is_told(tmp_path: Path) -> None:
    why = "rank 0: all_reduce gradients #12: 16 bytes came where 64 are due (told by rank 1)"
    log = tmp_path / ELASTIC / JOURNAL
    log.parent.mkdir()
    entries = [
        {"generation": 1, "why": "from the beginning"},
        {"generation": 1, "why": f"nobody is lost, but {why}"},
        {"generation": 2, "why": "step 2 from 2 processes that went on"},
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"gener')
    (tmp_path / METRICS).write_text(json.dumps({"step": 1, "seconds": 1.0}) + "\n")
    found = diagnose_run(tmp_path)
    assert (found.component, found.where.ranks) == (Component.SOFTWARE, (0, 1))
    assert why in found.cause
    assert found.evidence[0].line == 2
    log.write_text(json.dumps(entries[0]) + "\n[]\n")
    assert diagnose_run(tmp_path).healthy
