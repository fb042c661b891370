"""The parts of a page: nothing from outside gets in, and the data that go in come out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.support.lines import uniform
from tests.unit.simulate.reference import random_costs
from tutti.plan.job import ScheduleKind
from tutti.report.bars import Bar, Category, bars_html
from tutti.report.binary import Pack, ticks
from tutti.report.gantt import COLORS
from tutti.report.page import Page, Section, asset
from tutti.report.simulation import simulation_page
from tutti.report.tiles import Tile, notes_html, tiles_html
from tutti.schedule.instruction import Op
from tutti.schedule.schedule import build_schedule
from tutti.simulate import labels_of, simulate


class Balance(HTMLParser):
    """Checks that elements are closed in order, and collects ids and addresses."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href"):
                self.addresses.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    schedule = build_schedule(uniform(3, 5, ScheduleKind.ONE_F_ONE_B, recompute="full"))
    return simulation_page(simulate(schedule, random_costs(schedule, 1)), title="a <b> & c").html()


def test_the_page_is_well_formed_and_needs_nothing_else(page):
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert len(set(balance.ids)) == len(balance.ids)
    assert balance.addresses == ["data:,"]
    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_the_policy_admits_this_script_and_no_request(page):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_arrays_come_back(page):
    (text,) = re.findall(r'id="values">(.*?)</script>', page, flags=re.DOTALL)
    (block,) = re.findall(r'id="arrays">(.*?)</script>', page, flags=re.DOTALL)
    values = json.loads(text)
    data = zlib.decompress(base64.b64decode(block))
    kinds = {"Uint8": "u1", "Uint16": "<u2", "Uint32": "<u4", "Float32": "<f4"}

    def array(name: str) -> np.ndarray:
        kind, offset, count = values["arrays"][name]
        assert offset % 8 == 0
        return np.frombuffer(data, kinds[kind], count, offset)

    gantt = values["parts"]["gantt"]
    start, length = array(gantt["start"]).astype(float), array(gantt["length"])
    assert max(start + length) == pytest.approx(2**32 - 1, rel=1e-8)
    for (_, _, first), following in zip(
        gantt["rows"], [*(row[2] for row in gantt["rows"][1:]), len(start)], strict=True
    ):
        assert (np.diff(start[first:following]) >= 0).all(), "rows are in order of time"
    path = array(gantt["path"])
    assert start[path[0]] == 0
    assert (np.diff(start[path]) >= 0).all()
    assert array(gantt["template"]).max() < len(gantt["templates"])
    assert array(gantt["micro"]).max() == 5
    assert len(array(values["parts"]["memory"]["values"])) == 3 * 480


def test_pack_takes_the_narrowest_kind_and_refuses_a_name_twice():
    pack = Pack()
    for name, most, kind in (("a", 255, "Uint8"), ("b", 256, "Uint16"), ("c", 65536, "Uint32")):
        pack.add(name, np.array([0, most]))
        assert pack.directory[name][0] == kind
    with pytest.raises(ValueError, match="two arrays are called 'a'"):
        pack.add("a", np.zeros(1))
    assert ticks(np.array([0.0, 1.0, 2.0]), 2.0).tolist() == [0, 2**31, 2**32 - 1]
    assert ticks(np.array([0.0]), 0.0).tolist() == [0]


def test_names_cannot_leave_their_place():
    evil = '</script><script>alert("x")</script>'
    bar = Bar(label=evil, detail=evil, parts={evil: 1.0}, note=evil)
    html = bars_html([bar], [Category(name=evil, color="step")], whole=1.0, text=str)
    html += tiles_html([Tile(evil, evil, evil)]) + notes_html([evil])
    assert "<script" not in html
    section = Section(id="x", heading=evil, body="", scripts=("gantt.js",), data={"name": evil})
    assert "alert(" not in re.sub(
        r'<script type="application/json".*?</script>|<h2>.*?</h2>|<title>.*?</title>',
        "",
        Page(title="t", sections=(section,)).html(),
        flags=re.DOTALL,
    )


def test_bars_show_only_categories_in_use_and_never_leave_their_box():
    categories = [Category(name="a", color="step"), Category(name="b", color="send")]
    html = bars_html([Bar(label="x", parts={"a": 3.0}, mark=9.0)], categories, whole=2.0, text=str)
    assert "width:100.000%" in html
    assert "left:100.000%" in html
    assert "--send" not in html


def test_every_colour_that_parts_name_is_defined():
    css = asset("page.css")
    used = set(COLORS.values()) | {"exposed", "copies", "bubble", "static", "dynamic", "critical"}
    for name in used | {f"series-{n}" for n in range(1, 9)}:
        assert len(re.findall(rf"--{name}: #[0-9a-f]{{6}};", css)) == 2, f"{name}, light and dark"
    assert set(COLORS) == set(Op)


def test_notes_are_cut():
    assert notes_html([]) == ""
    assert "… and 3 more" in notes_html([str(n) for n in range(15)])


def test_labels_say_what_a_class_is():
    label = labels_of(build_schedule(uniform(2, 2, ScheduleKind.GPIPE)))[1]
    assert (label.name, label.chip, label.pool) == ("stage 1", "A800", "fast")
    assert label.detail == "units 2–3 · 1 rank"
