"""The page of a search's answer in headless Chromium: it draws every chip, quietly and offline."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.e2e.test_report_page import BROWSER, browse, console
from tests.support.searches import Case, large_case, pipelines_case, small_case
from tutti.report.planning import write_planning_page

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)

DARK = "--blink-settings=preferredColorScheme=0"


def written(case: Case, folder: Path) -> Path:
    path = folder / "plan.html"
    write_planning_page(path, case.result, case.model, case.cluster)
    return path


def require_drawn(dom: str, log: str, num_chips: int) -> None:
    assert console(log) == []  # a request would be refused by the policy, and said here
    root = re.search(r"<html[^>]*>", dom)[0]
    assert "data-failed" not in root
    assert 'data-drawn="map gantt memory"' in root
    assert f'data-chips="{num_chips}"' in dom, "every chip is a cell"


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (small_case, ()),
        (small_case, (DARK, "--window-size=500,900")),
        (pipelines_case, (DARK, "--force-device-scale-factor=2")),
    ],
    ids=["light", "dark, narrow", "pipelines, dense screen"],
)
def test_the_page_draws_without_errors_or_requests(make, flags, tmp_path):
    case = make()
    dom, log = browse(written(case, tmp_path), tmp_path, *flags)
    require_drawn(dom, log, case.cluster.num_chips)
    legend = re.search(r'<section id="map"[^>]*>.*?</ul>', dom, flags=re.DOTALL)[0]
    stages = sum(1 for _ in case.result.best.plan.stages())
    assert legend.count("<button") == stages
    assert ("no work" in legend, "spare" in legend) == (make is pipelines_case,) * 2
    assert re.search(r'aria-label="Map of the \d+ chips of \w+: \d+ take part', dom)


POINT = """<script>
addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement;
  root.dataset.overflow = root.scrollWidth - innerWidth;
  const canvas = document.querySelectorAll("#map canvas")[%d];
  canvas.scrollIntoView();
  const box = canvas.getBoundingClientRect();
  const at = { clientX: box.left + %d, clientY: box.top + %d, pointerType: "mouse" };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  document.querySelector("#map .legend button").click();
  canvas.focus();
}, 3000));
</script>"""


@pytest.mark.parametrize(
    ("make", "at", "says"),
    [
        (small_case, (0, 20, 32), ("a800/0/0", "A800", "stage 0: embedding, 1-16",
                                   "replica 0 of 1, 1 sequence per micro-batch", "tensor 0 of 4")),
        (pipelines_case, (2, 20, 32), ("p800/0/0", "Kunlun-P800", "pipeline 1, stage 1: 9-16, head",
                                       "replica 0 of 2, 1 sequence per micro-batch",
                                       "tensor 0 of 2, context 0 of 2")),
        (pipelines_case, (1, 20, 80), ("a100/0/4", "A100-80", "no work in this plan")),
    ],
    ids=["small", "pipelines", "idle"],
)  # fmt: skip
def test_pointing_at_a_chip_says_what_it_does(make, at, says, tmp_path):
    path = written(make(), tmp_path)
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text())
    path.write_text(page.replace("</body>", POINT % at + "</body>"))
    dom, log = browse(path, tmp_path, "--window-size=500,1200")
    assert console(log) == []
    tip = re.search(r'<div id="tip"[^>]*>(.*?)</div><script|<div id="tip"[^>]*>(.*)', dom)[0]
    for line in says:
        assert f">{line}<" in tip
    assert int(re.search(r'data-overflow="(-?\d+)"', dom)[1]) <= 0, "nothing sticks out sideways"
    legend = re.search(r'<section id="map"[^>]*>.*?</ul>', dom, flags=re.DOTALL)[0]
    assert legend.count('aria-pressed="true"') == 1, "one stage is singled out"


def test_16384_chips_open_quickly_from_a_small_file(tmp_path):
    case = large_case()
    began = time.process_time()
    path = written(case, tmp_path)
    assert time.process_time() - began < 10
    assert path.stat().st_size < 5e6
    dom, log = browse(path, tmp_path)
    require_drawn(dom, log, 16_384)
