"""What others read: Prometheus' own checker, rules and dashboards, sinks of packages, Parquet."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.unit.observe.test_record import rank, record
from tutti.errors import InputError
from tutti.observe import sinks
from tutti.observe.figures import FIGURES
from tutti.observe.folder import SERIES
from tutti.observe.parquet import export_series
from tutti.observe.prometheus import Prometheus
from tutti.observe.rank_series import FILE, RankSeries
from tutti.observe.record import by_pool
from tutti.observe.step_figures import JUDGED_FIGURES, POOL_FIGURES, STEP_FIGURES
from tutti.observe.store import SeriesStore

FOLDER = Path(__file__).parents[3]
EXAMPLES = FOLDER / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool")
NAMES = {*FIGURES, *(f.name for f in (*STEP_FIGURES, *POOL_FIGURES))}
UNITS = ("_seconds", "_bytes", "_ratio", "_celsius", "_watts", "_hertz", "_total")


def served() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sink = Prometheus(port, places=[("fast", 0), ('sl"ow', 3)])
    try:
        times = [rank(compute_s=0.2), rank(compute_s=0.7)]
        for _ in range(2):
            sink.write(record(pools=by_pool(times, ["fast", 'sl"ow'])))
        sink.ranks(times)
        sink.validation(3, 2.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())
    finally:
        sink.close()


def test_names_follow_the_rules() -> None:
    pytest.importorskip("prometheus_client", reason="needs tutti-ml[observe]")
    text = served()
    assert 'tutti_rank_compute_seconds{node="3",pool="sl\\"ow",rank="1"} 0.7' in text
    assert f"tutti_tokens_total {2 * record().tokens:.1f}" in text
    told = set(re.findall(r"^(tutti_\w+)[ {]", text, re.MULTILINE))
    assert {name for name in told if not name.endswith("_created")} <= NAMES
    assert not [name for name in NAMES if re.search(r"_(s|ms|percent|kb|mb)$", name)]
    kept_by_units = [n for n in FIGURES if not n.endswith(("_reasons", "_code"))]
    assert all(name.endswith(UNITS) for name in kept_by_units)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the PATH (Debian: prometheus)")
def test_promtool_finds_nothing() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=served(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    rules = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(EXAMPLES / "rules.yaml")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert rules.returncode == 0, rules.stdout + rules.stderr


def test_rules_and_dashboards_name_metrics_that_exist() -> None:
    for name in ("rules.yaml", "grafana.json"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert set(re.findall(r"\btutti_[a-z_]+", text)) <= NAMES
    board = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 16
    for panel in board["panels"]:
        assert panel["targets"]
        assert all(target["expr"] for target in panel["targets"])


def test_the_dashboard_keeps_to_grafana_s_documented_model() -> None:
    # grafana.com/docs: "Dashboard JSON model"; Grafana itself is not at hand
    board = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
    assert board["title"]
    assert len(board["uid"]) <= 40
    assert board["schemaVersion"] >= 36
    assert {"from", "to"} <= set(board["time"])
    variables = {one["name"] for one in board["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"]
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + i, place["y"] + j)
                 for i in range(place["w"]) for j in range(place["h"])}  # fmt: skip
        assert not cells & taken
        taken |= cells
        assert {target["refId"] for target in panel["targets"]}
        for source in re.findall(r"\$\{?(\w+)", json.dumps(panel)):
            assert source in variables or source.startswith("__")


def test_the_page_of_metrics_has_every_figure_of_steps() -> None:
    page = (FOLDER / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for f in (*STEP_FIGURES, *POOL_FIGURES):
        assert f"| `{f.name}` | {f.kind} | {f.label} | `{f.field}` | {f.means} |" in page
    for name, means in JUDGED_FIGURES.items():
        assert f"| `{name}` | {means} |" in page


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tutti-ml[observe]")
    code = (
        "import sys, pathlib; sys.modules['torch'] = None\n"
        "from tutti.observe.sinks import TensorBoard\n"
        "sink = TensorBoard(pathlib.Path(sys.argv[1])); sink.validation(1, 2.0); sink.close()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)
    assert any(p.name.startswith("events.out.tfevents") for p in tmp_path.iterdir())


class Mine:
    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        if facts.get("fails"):
            raise RuntimeError("no\nnetwork")
        self.folder = folder


def test_a_sink_of_another_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = EntryPoint("mine", f"{__name__}:Mine", sinks.GROUP)
    monkeypatch.setattr(sinks, "entry_points", lambda group: [entry])
    made = sinks.sink_of_others("mine", tmp_path, {})
    assert made.folder == tmp_path
    with pytest.raises(InputError, match="mine"):
        sinks.sink_of_others("mina", tmp_path, {})
    with pytest.raises(InputError, match=r"cannot be opened \(no\)"):
        sinks.sink_of_others("mine", tmp_path, {"fails": True})


def test_ranks_by_the_second_and_as_parquet(tmp_path: Path) -> None:
    series = RankSeries(tmp_path / SERIES / FILE, 2)
    for step in range(3):
        series.write([rank(compute_s=0.5), rank(compute_s=1.0 + step)], at=1000.0 + step)
    series.close()
    store = SeriesStore(tmp_path / SERIES / FILE, read_only=True)
    found = store.read("tutti_rank_compute_seconds", 0, 2000)
    assert [one.mean.tolist() for one in found] == [[0.5] * 3, [1.0, 2.0, 3.0]]
    store.close_reading()
    arrow = pytest.importorskip("pyarrow.parquet", reason="needs tutti-ml[data]")
    assert export_series(tmp_path, tmp_path / "all.parquet") == 8 * 2 * 3
    table = arrow.read_table(tmp_path / "all.parquet").to_pylist()
    assert {
        "second": 1002, "node": "", "figure": "tutti_rank_compute_seconds", "label": "1",
        "mean": 3.0, "least": 3.0, "most": 3.0,
    } in table  # fmt: skip
    with pytest.raises(InputError, match="not by 7 s"):
        export_series(tmp_path, tmp_path / "x.parquet", level=7)
    with pytest.raises(InputError, match="to export"):
        export_series(tmp_path / "nowhere", tmp_path / "x.parquet")


def test_a_store_that_fails_ends_the_series_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    series = RankSeries(tmp_path / "ranks.sqlite", 1, say=said.append)
    series._store.close_reading()
    for minute in range(3):
        series.write([rank()], at=60.0 * minute)
    series.close()
    assert len(said) == 1
