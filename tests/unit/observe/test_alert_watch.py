"""Alerts while a run lives: what is told, once, and where it goes; what keeps nobody waiting."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import InputError
from tutti.observe.alert_outlets import Outlets
from tutti.observe.alert_watch import AlertWatch, alert_watch
from tutti.observe.alerts import AlertSettings, own_rules, rules_with
from tutti.observe.record import PoolTimes, StepRecord
from tutti.observe.step_alerts import JOB, step_series
from tutti.observe.store import SeriesStore

NOW = 2_000_000_000


def record(number: int, **changes: Any) -> StepRecord:
    return StepRecord(**{
        "step": number, "loss": 2.0, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens": 10,
        "seconds": 2.0, "tokens_per_s": 5.0, "mfu": 0.4, "hfu": 0.4, "predicted_s": 1.9,
        "at": float(NOW + 2 * number), "pools": waits(0.02), **changes,
    })  # fmt: skip


def waits(seconds: float) -> dict[str, PoolTimes]:
    return {"a": PoolTimes(
        ranks=1, compute_s=1.0, communication_s=0.0, bubble_s=0.0, copy_s=0.0, data_s=seconds,
        other_s=0.0, peak_bytes=1.0, overrun=0.0,
    )}  # fmt: skip


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def watch(tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch) -> AlertWatch:
    monkeypatch.setattr(time, "time", lambda: float(NOW))
    outlets = Outlets(events=tmp_path / "events.jsonl", say=heard.append)
    return AlertWatch(tmp_path, outlets, own_rules())


def told(watch: AlertWatch, at: float, **options: bool) -> list[tuple[str, str]]:
    return [(one.what, one.alert.rule.name) for one in watch.look(at, **options)]


def test_steps_as_they_are_say_nothing(watch: AlertWatch) -> None:
    for number in range(1, 100):
        watch.write(record(number, loss=2.0 + 0.1 * math.sin(number), seconds=2.0 + number % 3 / 9))
        assert told(watch, NOW + 2 * number) == []


@pytest.mark.parametrize(
    ("name", "sick", "steps"),
    [
        ("loss-undefined", {"loss": math.nan}, 1),
        ("loss-jump", {"loss": 4.0}, 1),
        ("slower-steps", {"seconds": 3.0, "predicted_s": 3.0}, 11),
        ("over-forecast", {"seconds": 2.9, "predicted_s": 1.9}, 31),
        ("data-starvation", {"pools": waits(0.8)}, 11),
    ],
)
def test_it_begins_once_and_ends_once(
    watch: AlertWatch, name: str, sick: dict[str, Any], steps: int
) -> None:
    number, heard = 0, []
    for count, changes in ((30, {}), (40, sick), (60, {})):
        for _ in range(count):
            number += 1
            watch.write(record(number, **changes))
            heard += [(n, number) for w, n in told(watch, NOW + 2 * number) if n == name]
            heard = [entry for entry in heard if entry[0] == name]
    begins = [at for _, at in heard]
    assert len(begins) == 2, heard  # began and ended
    assert begins[0] == 30 + steps
    assert begins[1] > 70 or name in ("slower-steps", "loss-jump")  # what lasts becomes usual


def test_losses_near_zero_do_not_jump() -> None:
    steps = [record(n, loss=1e-8 * (1 + n % 7)).to_document() for n in range(50)]
    (jumps,) = [s for s in step_series(steps) if s.name == "tutti_loss_over_usual_ratio"]
    assert jumps.most.max() < 1e-4
    assert jumps.host == JOB


def test_no_step_for_long(watch: AlertWatch) -> None:
    for number in range(1, 20):
        watch.write(record(number))
    last = NOW + 2 * 19
    assert told(watch, last + 10) == []
    assert told(watch, last + 21) == [("began", "no-step")]
    assert told(watch, last + 25) == []
    watch.write(record(20, at=float(last + 30), seconds=2.0))
    assert told(watch, last + 31) == [("ended", "no-step")]
    assert told(watch, last + 90, lives=False) == []  # the run is over: nobody waits for a step


def test_a_checkpoint_that_does_not_come(watch: AlertWatch, tmp_path: Path) -> None:
    import os

    for number, at in ((1, NOW + 100), (2, NOW + 200)):
        folder = tmp_path / "checkpoints" / f"step-{number}"
        folder.mkdir(parents=True)
        os.utime(folder, (at, at))
    assert told(watch, NOW + 450) == []
    assert told(watch, NOW + 510) == [("began", "old-checkpoint")]


def test_hosts_are_looked_at(watch: AlertWatch, tmp_path: Path) -> None:
    (tmp_path / "series").mkdir()
    store = SeriesStore(tmp_path / "series" / "a-0.sqlite")
    for second in range(30):
        store.append("node-a", NOW + second, {'tutti_chip_temperature_celsius{chip="0"}': 91.0})
    store.flush()
    (tmp_path / "series" / "broken.sqlite").write_text("no store")
    (notice,) = watch.look(NOW + 30)
    assert notice.alert.rule.name == "chip-heat"
    assert notice.alert.host == "node-a"
    assert watch.look(NOW + 31) == []
    for second in range(30, 60):
        store.append("node-a", NOW + second, {'tutti_chip_temperature_celsius{chip="0"}': 60.0})
    store.close()
    assert told(watch, NOW + 60) == [("ended", "chip-heat")]


def test_a_rule_that_waits_long_is_met(
    tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: float(NOW))
    (heat,) = (rule for rule in own_rules() if rule.name == "chip-heat")
    outlets = Outlets(events=tmp_path / "events.jsonl", say=heard.append)
    watch = AlertWatch(tmp_path, outlets, [replace(heat, for_s=400.0)])
    (tmp_path / "series").mkdir()
    store = SeriesStore(tmp_path / "series" / "a-0.sqlite")
    for second in range(420):
        store.append("node-a", NOW + second, {'tutti_chip_temperature_celsius{chip="0"}': 91.0})
    store.close()
    assert told(watch, NOW + 420) == [("began", "chip-heat")]


@contextmanager
def server(bodies: list[dict[str, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/alerts"
        http.shutdown()
        thread.join()


def test_where_alerts_go(tmp_path: Path, heard: list[str]) -> None:
    bodies: list[dict[str, Any]] = []
    command = (
        f'{sys.executable} -c \'import os, sys; open(sys.argv[1], "w").write('
        f'os.environ["TUTTI_ALERT"] + sys.stdin.read())\' {tmp_path / "said"}'
    )
    with server(bodies) as address:
        outlets = Outlets(
            events=tmp_path / "events.jsonl", say=heard.append, hook=address, command=command
        )
        watch = AlertWatch(tmp_path, outlets, own_rules())
        watch.write(record(1, loss=math.inf, at=time.time() + 1))
        watch.close()  # the last look
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["what"], event["name"], event["host"]) == ("began", "loss-undefined", JOB)
    assert bodies == [event]
    assert (tmp_path / "said").read_text() == f"loss-undefined{json.dumps(event)}\n"
    (line,) = heard
    assert line.startswith("alert loss-undefined: the loss is no number")


def test_outlets_that_fail_are_said_once(tmp_path: Path, heard: list[str]) -> None:
    outlets = Outlets(
        events=tmp_path / "no" / "events.jsonl", say=heard.append,
        hook="http://127.0.0.1:9/", command="false",
    )  # fmt: skip
    watch = AlertWatch(tmp_path, outlets, own_rules())
    watch.write(record(1, loss=math.nan, at=time.time() + 1))
    outlets.tell(watch.look(time.time() + 2))
    watch.write(record(2, at=time.time() + 3))
    outlets.tell(watch.look(time.time() + 4))
    troubles = [line for line in heard if line.startswith("alerts:")]
    assert len(troubles) == 3
    assert [line for line in heard if line.startswith("alert over: loss-undefined")]


def test_settings(tmp_path: Path) -> None:
    assert alert_watch(tmp_path, AlertSettings(every_s=0.0), print) is None
    with pytest.raises(InputError, match="no address"):
        alert_watch(tmp_path, AlertSettings(hook="example.org"), print)
    with pytest.raises(InputError, match="quotation"):
        alert_watch(tmp_path, AlertSettings(command="say 'it"), print)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- {name: no-step, figure: tutti_step_age_ratio, above: 3, until: 1, for_s: 1,\n"
        "   component: undetermined, says: waiting, remedy: look}\n"
    )
    changed = rules_with(rules)
    assert len(changed) == len(own_rules())
    assert next(rule for rule in changed if rule.name == "no-step").above == 3.0
    rules.write_text("- {name: x, figure: tutti_nothing}\n")
    with pytest.raises(InputError):
        rules_with(rules)


def test_the_thread_looks_by_itself(tmp_path: Path, heard: list[str]) -> None:
    watch = alert_watch(tmp_path, AlertSettings(every_s=0.05), heard.append)
    assert watch is not None
    watch.write(record(1, loss=math.nan, at=time.time() + 1))
    ends = time.monotonic() + 30.0
    while not heard and time.monotonic() < ends:
        time.sleep(0.02)
    watch.close()
    assert heard
    assert "loss-undefined" in heard[0]
