"""Every page on a phone and on a small laptop: nothing is cut off, squeezed, hidden or blown up."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.browser import BROWSER, Browser
from tests.support.finished_runs import finished_run
from tests.support.real_steps import as_measured
from tests.support.searches import crowded_case, large_case, pipelines_case, small_case
from tests.unit.simulate.test_compare import result as result
from tutti.hardware.profile import Profile
from tutti.observe.history import read_run
from tutti.report.alignment import AlignmentPart, AlignmentRow, write_alignment_page
from tutti.report.overlay import write_overlay_page
from tutti.report.planning import write_planning_page
from tutti.report.profile import write_profile_page
from tutti.report.simulation import write_simulation_page
from tutti.report.training import write_training_page

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)

PHONE, LAPTOP = (390, 844), (1280, 900)
PLANS = {
    "small": small_case,
    "pipelines": pipelines_case,
    "crowded": crowded_case,
    "large": large_case,
}
NAMES = (*PLANS, "step", "overlay", "alignment", "runs", "profile")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory, result) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in NAMES}
    for name, make in PLANS.items():
        case = make()
        write_planning_page(found[name], case.result, case.model, case.cluster)
    estimate = pipelines_case().result.best.estimate
    write_simulation_page(found["step"], estimate.result, memory=estimate.memory)
    write_overlay_page(found["overlay"], result, as_measured(result, 1.3))
    runs = [finished_run(folder / "planned"), finished_run(folder / "alike", uniform=True, steps=4)]
    emulated = [replace(read_run(run, run.name), emulated=True, overrun=0.017) for run in runs]
    write_training_page(found["runs"], emulated)
    write_profile_page(found["profile"], Profile.find("h200"))
    write_alignment_page(
        found["alignment"],
        model="tiny",
        sides=("plan:pipeline-of-two.json float32 on 2 ranks", "plan:dp2.json float32 on 2 ranks"),
        batch="2 sequences of 32 tokens, seed 0",
        parts=[
            AlignmentPart(
                heading=heading,
                rows=[
                    AlignmentRow(
                        name=f"step-{step}/gradient/{n}.attention.output.weight",
                        cosine=0.999, max_abs=2e-4, relative_l2=n * 1e-7, tolerance=1e-5,
                    )
                    for n in range(rows)
                ],
            )
            for step, (heading, rows) in enumerate((("Start", 30), ("Step 1", 120)))
        ],
        losses=[(1, 5.090198, 5.090198), (2, 5.096576, 5.096577), (3, 5.087029, 5.087028)],
    )  # fmt: skip
    return found


# What reaches over the right edge of what holds it, but for what scrolls by itself on purpose.
STICKS_OUT = """
[...document.querySelectorAll("main *, header *")].filter((e) => {
  const box = e.getBoundingClientRect();
  if (!box.width || e.closest("svg") || e.closest(".table:not(.cards) table")) return false;
  if (e.closest(".bar") || e.closest(".meter i")) return false;
  const holder = e.closest(".cards tr, .tile, .row, .table") ?? document.documentElement;
  return box.right > holder.getBoundingClientRect().right + 1;
}).map((e) => `${e.tagName}.${e.className} "${e.textContent.slice(0, 40)}"`).slice(0, 5)
"""


@pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_sticks_out(browser: Browser, pages: dict[str, Path], name: str, size) -> None:
    browser.open(pages[name], *size)
    assert browser.value("innerWidth") == size[0]
    assert browser.value("document.documentElement.scrollWidth") <= size[0]
    assert browser.value(STICKS_OUT) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_laptop_shows_every_column(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], *LAPTOP)
    wide = browser.value(
        "[...document.querySelectorAll('.table')].filter(t => t.scrollWidth > t.clientWidth)"
        ".map(t => t.closest('section').id)"
    )
    assert wide == []


@pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
@pytest.mark.parametrize("name", ["small", "pipelines", "crowded"])
def test_every_stage_shows_its_memory(
    browser: Browser, pages: dict[str, Path], name: str, size
) -> None:
    """No row is scrolled away, and the last cell of each lies on the screen."""
    browser.open(pages[name], *size)
    stages = sum(len(stage.replicas) for _, _, stage in PLANS[name]().result.best.plan.stages())
    cells = browser.value(
        "(table => [table.scrollHeight - table.clientHeight, ...[...table.querySelectorAll("
        "'tbody tr')].map(r => r.lastElementChild.getBoundingClientRect().right)])"
        "(document.querySelector('#stages .table'))"
    )
    assert cells[0] <= 1
    assert len(cells) - 1 == stages
    assert max(cells[1:]) <= size[0]
    assert " GiB" in browser.value(
        "document.querySelector('#stages tbody tr').lastElementChild.textContent"
    )


def test_a_long_table_says_that_it_scrolls(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["alignment"], *LAPTOP)
    assert "120 rows; the table scrolls." in browser.value("document.body.textContent")
    assert "30 rows" not in browser.value("document.body.textContent")


@pytest.mark.parametrize("size", [PHONE, LAPTOP, (1920, 1080)], ids=["phone", "laptop", "desktop"])
@pytest.mark.parametrize("name", ["alignment", "runs"])
def test_ticks_are_readable_and_distinct(
    browser: Browser, pages: dict[str, Path], name: str, size
) -> None:
    browser.open(pages[name], *size)
    axes = browser.value(
        "[...document.querySelectorAll('.curve svg')].map(s => ["
        "12 * s.getBoundingClientRect().width / s.viewBox.baseVal.width,"
        "[...s.querySelectorAll('text.tick')].map(t => t.textContent)])"
    )
    assert axes
    for pixels, texts in axes:
        assert 9 <= pixels <= 16
        assert len(texts) >= 3
        assert len(set(texts)) == len(texts)
        values = [float(text.split()[0]) * (1e3 if text.endswith("K") else 1) for text in texts]
        gaps = {round(b - a, 6) for a, b in itertools.pairwise(values)}
        assert len(gaps) == 1, f"unequal steps between {texts}"


@pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
def test_the_timeline_names_every_class_unsqueezed(
    browser: Browser, pages: dict[str, Path], size
) -> None:
    """The names are drawn, not elements: what is written to the canvas is listened to."""
    page = pages["large"].with_name("heard.html")
    text = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", pages["large"].read_text()
    )
    listen = (
        "<script>window.heard = []; const own = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {"
        "window.heard.push([text, most === undefined ? 0 : this.measureText(text).width - most]);"
        "return own.call(this, text, x, y, most); };</script>"
    )
    page.write_text(text.replace("<head>", "<head>" + listen))
    browser.open(page, *size)
    heard = browser.value("window.heard")
    stages = {text for text, _ in heard if re.match(r"(pipeline \d+ · )?stage ", text)}
    assert len(stages) == 64
    assert max(over for _, over in heard) <= 0, "a name is pressed together"
