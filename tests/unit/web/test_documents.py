"""What views are drawn from: growing files, matrices, maps, steps, logs, ports; and bad input."""

from __future__ import annotations

import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.support.finished_runs import finished_run
from tests.support.watched_runs import (
    HOSTILE,
    Feed,
    plan_of,
    with_decisions,
    with_logs,
    with_rings,
)
from tutti.errors import InputError
from tutti.observe.folder import METRICS, RUN_FILE, SERIES
from tutti.web.figures import packed
from tutti.web.lines import GrowingLines
from tutti.web.run_folder import RunFolder
from tutti.web.scraped import ScrapedRun, parse_metrics
from tutti.web.steps import MOST_POINTS, Steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = plan_of(16)
    feed = Feed(tmp_path_factory.mktemp("runs") / "run", plan, slow=3, seconds=30)
    feed.close()
    with_rings(feed.folder, plan)
    with_logs(feed.folder)
    with_decisions(feed.folder)
    return feed.folder


def unpacked(text: str) -> np.ndarray:
    import base64

    halves = np.frombuffer(base64.b64decode(text), "<u2").astype(np.uint32)
    return (halves << 16).view(np.float32)


def test_numbers_keep_three_digits() -> None:
    values = np.array([0.1234, -5e9, 0.0, np.nan, 1e-30], np.float32)
    found = unpacked(packed(values))
    assert np.isnan(found[3])
    np.testing.assert_allclose(found[[0, 1, 2, 4]], values[[0, 1, 2, 4]], rtol=4e-3)


def test_lines_that_grow_are_read_once_and_a_cut_file_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = GrowingLines(path)
    assert lines.more() == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert lines.more() == [{"a": 1}]
    with path.open("a") as file:
        file.write('}\nno json\n[1]\n{"a": 3}\n')
    assert lines.more() == [{"a": 2}, {"a": 3}]
    path.write_text('{"a": 9}\n')
    assert (lines.more(), lines.starts) == ([{"a": 9}], 2)


def test_steps_that_were_done_again_replace_the_first_ones() -> None:
    steps = Steps()
    for number, at in ((1, 10.0), (2, 11.0), (3, 12.0), (2, 20.0), (3, 21.0)):
        steps.add({"step": number, "loss": at, "seconds": 1.0, "at": at})
    assert steps.columns(("step", "loss")) == {"step": [1, 2, 3], "loss": [10.0, 20.0, 21.0]}
    assert steps.effective == pytest.approx(3 / 12)
    assert steps.repeated == 2


def test_many_steps_are_thinned_and_what_is_no_number_is_none() -> None:
    steps = Steps()
    for number in range(1, 5001):
        steps.add({"step": number, "loss": 1.0, "mfu": float("nan")})
    found = steps.columns()
    assert len(found["step"]) <= MOST_POINTS + 1
    assert found["step"][-1] == 5000
    assert set(found["mfu"]) == {None}
    json.dumps(found, allow_nan=False)


def test_the_list_of_runs(folder: Path) -> None:
    found = RunFolder(folder, "mine").summary()
    assert (found["name"], found["ranks"], found["steps"]) == ("mine", 16, 40)
    assert found["seconds"] / found["predicted_s"] == pytest.approx(1 / 0.9)


def test_what_differs_once_figures_were_written(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "run", plan_of(8), seconds=70)
    run = RunFolder(feed.folder)
    run.view("heat", {})
    before = run.stamp("heat")
    assert before == run.stamp("heat") == run.stamp("map")
    feed.tick()
    assert run.stamp("heat") != before
    assert run.stamp("run") is None  # only the view itself says so
    feed.close()


def test_a_heat_map_and_what_came_after(folder: Path) -> None:
    run = RunFolder(folder)
    whole = run.view("heat", {"figure": "tutti_rank_compute_seconds"})
    assert whole["rows"] == [f"rank {n}" for n in range(16)]
    values = unpacked(whole["values"]).reshape(16, -1)
    assert values.shape[1] == len(whole["seconds"]) == 30
    assert values.mean(axis=1).argmax() == 3
    more = run.view("heat", {"after": str(whole["seconds"][-3])})
    assert more["seconds"] == whole["seconds"][-2:]


def test_links_by_the_second(folder: Path) -> None:
    found = RunFolder(folder).view("heat", {"figure": "tutti_nic_received_bytes_total"})
    assert found["rate"]
    assert f"fast-0 {HOSTILE}" in found["rows"]
    assert "fast-1 eth0" in found["rows"]


@pytest.mark.parametrize(
    ("figure", "chip", "value"),
    [("tutti_rank_compute_seconds", 3, 0.6), ("tutti_chip_temperature_celsius", 8, 61.0),
     ("tutti_host_cpu_busy_ratio", 15, 0.4)],
)  # fmt: skip
def test_the_map_is_coloured_by_ranks_chips_and_nodes(
    folder: Path, figure: str, chip: int, value: float
) -> None:
    found = RunFolder(folder).view("map", {"figure": figure})
    assert unpacked(found["values"][0])[chip] == pytest.approx(value, rel=0.1)


def test_a_live_step_over_the_simulated_one(folder: Path) -> None:
    found = RunFolder(folder).view("step", {})
    assert (found["step"], found["source"]) == (3, "rings")
    assert len(found["data"]["classes"]) == 32
    assert found["simulated_s"] > 0


def test_alerts_the_doctor_and_decisions(folder: Path) -> None:
    run = RunFolder(folder)
    assert "memory" in run.view("alerts", {})["alerts"][0]["words"]
    assert run.view("doctor", {})["finding"]["component"] in ("host", "chip")
    elastic = run.view("run", {})
    assert HOSTILE in elastic["decisions"][2]["why"]
    assert [one["back_s"] for one in elastic["generations"]] == [None, 2.5, 1.0]
    assert elastic["generations"][1]["lost"] == "fast/0/1"
    assert elastic["phases"][0]["phase"] == "entering"
    assert run.summary()["generations"] == 3


def test_logs_around_a_line_and_a_moment(folder: Path) -> None:
    run = RunFolder(folder)
    found = run.view("logs", {"line": "201"})
    assert dict(map(tuple, found["lines"]))[201].endswith(HOSTILE)
    late = run.view("logs", {"file": "logs/rank-0.log", "at": "1794967500"})  # 02:05 UTC
    assert late["line"] == 300
    untimed = run.view("logs", {"file": "logs/rank-1.log", "at": "1794967500"})
    assert "no times" in untimed["note"]
    assert untimed["lines"][-1] == [2, "$(reboot)"]


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", "logs/../run.json", "run.json"])
def test_no_address_leads_out_of_the_logs(folder: Path, name: str) -> None:
    found = RunFolder(folder).view("logs", {"file": name})
    assert found["file"] == "logs/rank-0.log"
    assert name in found["note"]


def test_a_link_among_the_logs_is_not_followed(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "secret.log").symlink_to("/etc/hostname")
    assert "no logs" in RunFolder(run).view("logs", {})["missing"]


@pytest.mark.parametrize(("asked", "state"), [(6, "over"), (7, "alive"), (None, "alive")])
def test_a_run_that_made_all_its_steps_is_over_at_once(
    tmp_path: Path, asked: int | None, state: str
) -> None:
    folder = finished_run(tmp_path / "run", steps=6)
    config = {"model": "m"} | ({} if asked is None else {"steps": asked})
    (folder / RUN_FILE).write_text(json.dumps(config))
    assert RunFolder(folder, "run").summary()["state"] == state
    (folder / RUN_FILE).write_text("{")  # while it is copied
    assert RunFolder(folder, "run").summary()["state"] == "alive"


def test_a_run_without_anything_says_so_in_each_view(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    run = RunFolder(tmp_path)
    assert run.summary()["state"] == "no step yet"
    for view in ("map", "heat", "step", "doctor", "logs"):
        assert run.view(view, {})["missing"]


def test_a_run_that_vanishes_while_it_is_watched(tmp_path: Path) -> None:
    run = RunFolder(finished_run(tmp_path / "run"))
    assert run.summary()["steps"] == 6
    shutil.rmtree(tmp_path / "run")
    assert run.summary()["state"] == "vanished"
    assert "is gone" in run.view("heat", {})["missing"]


def test_a_damaged_store_is_said_and_the_others_are_shown(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / SERIES / "fast-1.sqlite").write_bytes(b"no database" * 1000)
    found = RunFolder(copy).view("heat", {"figure": "tutti_host_cpu_busy_ratio"})
    assert found["rows"] == ["fast-0"]
    assert "damaged" in found["notes"][0]


def test_a_log_of_decisions_that_was_changed_is_said(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / "elastic" / "journal.jsonl").write_text("what\n{}\n")
    found = RunFolder(copy).view("run", {})
    assert found["generations"] == []
    assert "is no decision" in found["notes"][0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run's folder"):
        RunFolder(tmp_path)
    (tmp_path / METRICS).mkdir()
    assert RunFolder(tmp_path).view("heat", {"figure": "tutti_nonsense"})["missing"]


PORT = b"""# HELP tutti_step the last step
tutti_step 7.0
tutti_loss 1.5
tutti_step_duration_seconds 0.5
tutti_pool_compute_seconds{pool="a"} 0.4
tutti_pool_compute_seconds{pool="b"} 0.1
other_thing 3
"""


def test_a_run_by_its_port() -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PORT)

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        run = ScrapedRun("127.0.0.1", server.server_port)
        assert (run.summary()["steps"], run.summary()["loss"]) == (7, 1.5)
        heat = run.view("heat", {})
        assert heat["rows"] == ["a", "b"]
        assert "folder" in run.view("map", {})["missing"]
    finally:
        server.shutdown()
        server.server_close()
    run._fetched = time.time() - 5
    assert run.summary()["state"] == "does not answer"


def test_a_port_where_nobody_is() -> None:
    with pytest.raises(InputError, match="does not answer"):
        ScrapedRun("127.0.0.1", 9)
    assert parse_metrics('tutti_a{pool="x"} nan\ntutti_b what\nhello') != {}
