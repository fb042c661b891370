"""The page of a search's answer: every chip has its place, every figure its reason."""

from __future__ import annotations

import base64
import io
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from tests.support.searches import Case, pipelines_case, small_case
from tests.unit.report.test_page import Balance
from tutti.plan.plan import RankMap
from tutti.report import planning
from tutti.report.binary import Pack
from tutti.report.lines import memory_section
from tutti.report.page import asset, escape
from tutti.report.palette import stage_color
from tutti.report.planning import planning_page, write_planning_page
from tutti.report.simulation import simulation_page
from tutti.report.tables import Column, Html, Row, meter_html, table_html
from tutti.search.answer.explanation import step_text
from tutti.simulate.result_document import result_document
from tutti.simulate.table import result_table
from tutti.units import bytes_text, count_text


@pytest.fixture(scope="module")
def small() -> Case:
    return small_case()


@pytest.fixture(scope="module")
def pipelines() -> Case:
    return pipelines_case()


def html(case: Case, **changes) -> str:
    return planning_page(replace(case.result, **changes), case.model, case.cluster).html()


class Data:
    """What a page hands to its scripts."""

    def __init__(self, page: str) -> None:
        (text,) = re.findall(r'id="values">(.*?)</script>', page, flags=re.DOTALL)
        (block,) = re.findall(r'id="arrays">(.*?)</script>', page, flags=re.DOTALL)
        values = json.loads(text)
        self.parts, self._directory = values["parts"], values["arrays"]
        self._bytes = zlib.decompress(base64.b64decode(block))

    def array(self, name: str) -> np.ndarray:
        kind, offset, count = self._directory[name]
        kinds = {"Uint8": "u1", "Uint16": "<u2", "Uint32": "<u4", "Float32": "<f4"}
        return np.frombuffer(self._bytes, kinds[kind], count, offset)


@pytest.mark.parametrize("make", [small_case, pipelines_case])
def test_the_page_is_well_formed_and_needs_nothing_else(make):
    page = html(make())
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert len(set(balance.ids)) == len(balance.ids)
    assert balance.addresses == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", page)
    assert "default-src 'none'" in page


def test_figures_at_the_head(small):
    page = html(small)
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)<small>", page))
    result, best = small.result, small.result.best
    assert tiles == {
        "Step": step_text(best.step_seconds),
        "Throughput": count_text(best.tokens_per_second),
        "MFU": f"{100 * best.estimate.mfu:.1f} %",
        "Mixed-chip efficiency": f"{result.mixed_efficiency_pct:.1f} %",
        "Against uniform": f"{result.speedup:.2f} ×",
        "Proven gap": "≤ 3.6 %",
        "Search": "0.74 s",
    }
    for part in ("map", "comparison", "throughput", "stages", "pools", "gantt", "peak", "search"):
        assert f'<section id="{part}">' in page
    assert "The runner-up (uniform tp=8 pp=2 sp=1 shard=1) takes " in page
    assert "18 orders of pools, by the compute bound" in page
    for pool, basis in best.estimate.priced.basis.items():
        label = '<em class="nominal">nominal</em> ' if "nominal" in basis else ""
        assert f">{pool} (" in page
        assert f">{label}{escape(basis)}</td>" in page
    for line in best.estimate.priced.extrapolations:
        assert escape(line) in page


def test_what_is_missing_is_said(pipelines):
    page = html(pipelines)
    assert "There is no uniform plan to compare with: no degree divides" in page
    assert "There is no figure for p800 alone: the search was asked to skip it." in page
    assert '<section id="throughput">' not in page
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)<small>", page))
    assert tiles["Mixed-chip efficiency"] == tiles["Against uniform"] == "–"
    assert tiles["Proven gap"] == "0 %"
    assert "Nothing was pruned." in page


@pytest.mark.parametrize("make", [small_case, pipelines_case])
def test_every_chip_is_where_the_plan_puts_it(make):
    case = make()
    data = Data(html(case))
    plan, part = case.result.best.plan, data.parts["map"]
    pools = {
        pool["name"]: (data.array(pool["owner"]), data.array(pool["place"]))
        for pool in part["pools"]
    }
    groups = {
        (p, s, r): i
        for i, (p, s, r) in enumerate(
            (p, s, r) for p, s, stage in plan.stages() for r in range(len(stage.replicas))
        )
    }
    ranks = RankMap(plan)
    for rank in range(ranks.num_ranks):
        at = ranks.place(rank)
        owner, place = pools[at.chip.pool]
        index = at.chip.node * case.cluster.pool(at.chip.pool).node.num_chips + at.chip.slot
        group = groups[at.pipeline, at.stage, at.replica]
        tp, cp = part["groups"][group][4:6]
        assert owner[index] == group + 2
        assert place[index] == (at.copy * cp + at.cp) * tp + at.tp
    idle = sum(int((owner == 0).sum()) for owner, _ in pools.values())
    spare = sum(int((owner == 1).sum()) for owner, _ in pools.values())
    assert (idle, spare) == (len(plan.idle), len(plan.spare))
    assert sum(len(owner) for owner, _ in pools.values()) == case.cluster.num_chips
    for pool in part["pools"]:
        slots = sorted(slot for _, members in pool["blocks"] for slot in members)
        assert slots == list(range(case.cluster.pool(pool["name"]).node.num_chips))


def test_colours_of_stages_differ_and_keep_their_order():
    for stages in (1, 2, 4, 12, 64, 128):
        found = [stage_color(s, stages, 0, 1) for s in range(stages)]
        assert len({(c.hue, c.lighter) for c in found}) == stages
        turned = [(255.0 - c.hue) % 360 for c in found]
        assert turned == sorted(turned), "the hue goes one way round"
        assert max(turned) <= 285, "the last does not look like the first"
    shades = [stage_color(3, 8, p, 4).lighter for p in range(4)]
    assert shades == sorted(shades)
    assert len(set(shades)) == 4
    css = asset("page.css")
    for name in ("stage-l", "stage-c"):
        assert len(re.findall(rf"--{name}: 0\.\d+;", css)) == 2, f"{name}, light and dark"
    for name in ("caution", "caution-ground"):
        assert len(re.findall(rf"--{name}: #[0-9a-f]{{6}};", css)) == 2, f"{name}, light and dark"


def test_a_timeline_that_is_too_long_shows_some_classes(small, monkeypatch):
    monkeypatch.setattr(planning, "MOST_INSTRUCTIONS", 9_000)
    page = html(small)
    data = Data(page)
    gantt = data.parts["gantt"]
    names = [name for name, _, _ in gantt["classes"]]
    assert "stage 0" in names, "the bottleneck is always there"
    assert len(names) < 4
    assert f"{len(names)} of 4 classes are drawn" in page
    start = data.array(gantt["start"])
    assert len(start) < small.result.best.estimate.result.program.size
    assert data.array(gantt["path"]).max() < len(start)
    assert {row[0] for row in gantt["rows"]} == set(range(len(names)))


def test_names_cannot_leave_their_place(small):
    evil = "</script><script>alert(1)</script>"
    page = html(small, why_runner_up_lost=evil, uniform=None, uniform_missing=evil)
    assert "<script>alert" not in page
    text = table_html([Column(evil, detail=evil)], [Row([evil]), Row([Html("<b>x</b>")])])
    assert "<script" not in text
    assert "<b>x</b>" in text
    assert "<script" not in meter_html(0.5, evil)


def test_tables_are_cut_and_meters_stay_in_their_box():
    text = table_html([Column("n", figures=True)], [Row([str(n)]) for n in range(300)])
    assert text.count("<tr>") == 257
    assert "256 of 300 rows are shown" in text
    assert 'style="width:100.0%;background:var(--alarm)"' in meter_html(1.7, "x", alarm=True)


def test_the_file_is_written_whole(small, tmp_path):
    path = tmp_path / "plan.html"
    write_planning_page(path, small.result, small.model, small.cluster)
    assert path.read_text().endswith("</html>\n")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]


def test_all_pages_and_tables_of_a_plan_say_the_same_peaks(pipelines):
    """Allocator slack included: the simulation by itself knows of none."""
    found = pipelines.result.best.estimate
    peaks = [bytes_text(memory.total) for memory in found.memory]
    assert peaks != [bytes_text(own.peak_bytes) for own in found.result.classes]
    plan = planning_page(pipelines.result, pipelines.model, pipelines.cluster).html()
    step = simulation_page(found.result, memory=found.memory).html()
    for html in (plan, step):
        section = html.partition('<section id="peak">')[2].partition("</section>")[0]
        assert re.findall(r'<span class="note">([^<]+)</span>', section) == peaks
    assert f"<dt>Peak memory</dt><dd>{bytes_text(found.tightest.total)}<" in step
    console = Console(width=200, file=io.StringIO())
    console.print(result_table(found.result, found.labels))
    assert all(peak in console.file.getvalue() for peak in peaks)
    document = result_document(found.result, found.labels)
    assert [own["peak_bytes"] for own in document["classes"]] == [m.total for m in found.memory]


def test_memory_over_time_reaches_the_peaks(pipelines):
    found, arrays = pipelines.result.best.estimate, Pack()
    memory_section(found.result, found.labels, arrays)
    raw = zlib.decompress(base64.b64decode(arrays.text()))
    values = np.frombuffer(raw, dtype="<f4").reshape(len(found.memory), -1)
    assert values.max(axis=1) == pytest.approx([m.total for m in found.memory], rel=1e-6)
