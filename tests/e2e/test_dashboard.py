"""The dashboard in headless Chromium: every view, by link and keyboard, and saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_report_page import pytestmark as pytestmark
from tests.support.browser import Browser
from tests.support.finished_runs import finished_run
from tests.support.watched_runs import (
    HOSTILE,
    Feed,
    plan_of,
    with_decisions,
    with_logs,
    with_rings,
)
from tutti.web.app import listen, make_app, server_of
from tutti.web.run_folder import RunFolder
from tutti.web.saving import save_all

VIEWS = ("run", "map", "heat", "step", "alerts", "doctor", "logs")
WORDS = {
    "run": "state travels",
    "map": "node",
    "heat": "against the median",
    "step": "Real ÷ simulated",
    "alerts": "memory is nearly used up",
    "doctor": "Evidence",
    "logs": HOSTILE,
}


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feed]:
    plan = plan_of(16)
    made = Feed(tmp_path_factory.mktemp("runs") / "run", plan, seconds=40)
    with_rings(made.folder, plan)
    with_logs(made.folder)
    with_decisions(made.folder, time.time() - 70)
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(feed: Feed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    other = finished_run(tmp_path_factory.mktemp("other") / "alike", seconds=0.9, uniform=True)
    listening = listen("127.0.0.1", 0)
    runs = [RunFolder(feed.folder, HOSTILE), RunFolder(other)]
    server = server_of(make_app(runs, every_s=0.2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(20)
    listening.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        made.call("Page.enable")
        made.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.said = []; addEventListener('securitypolicyviolation', "
            "(e) => said.push('policy: ' + e.blockedURI)); addEventListener('error', "
            "(e) => said.push('error: ' + e.message));",
        )
        yield made


def until(browser: Browser, script: str, seconds: float = 30) -> Any:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := browser.value(script):
            return found
        time.sleep(0.05)
    raise AssertionError(
        f"never true: {script}; it shows {browser.value('document.body.innerText')}"
    )


@pytest.fixture
def show(browser: Browser, address: str) -> Callable[..., None]:
    def opened(view: str, base: str = address, *, dark: bool = False, width: int = 1280) -> None:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.call("Page.navigate", url="about:blank")
        browser.call("Page.navigate", url=f"{base}#/{view}")
        name = view.rpartition("/")[2].partition("?")[0]
        until(browser, f"document.documentElement?.dataset.drawn === '{name}'")

    return opened


def quiet(browser: Browser) -> None:
    """Nothing was refused, nothing failed, and no name became markup."""
    assert browser.value("window.said") == []
    assert browser.value("window.hacked") is None
    assert browser.value("document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_view_draws_quietly(browser: Browser, show: Callable[..., None], dark: bool) -> None:
    show("runs", dark=dark)
    assert browser.value("document.querySelectorAll('.u-wrap').length") == 3
    assert browser.value("document.querySelector('tbody a').textContent") == HOSTILE
    quiet(browser)
    for view in VIEWS:
        show(f"run/0/{view}" + ("?line=201" if view == "logs" else ""), dark=dark)
        text = until(browser, "document.querySelector('main').innerText")
        if view == "map":
            assert until(browser, "document.querySelector('.map').dataset.chips") == "16"
        else:
            assert WORDS[view] in text, view
        quiet(browser)


@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(browser: Browser, show: Callable[..., None]) -> None:
    for view in ("runs", *(f"run/0/{name}" for name in VIEWS)):
        show(view, width=390)
        assert browser.value("document.documentElement.scrollWidth") <= 390, view


def test_columns_arrive_while_it_is_watched(
    browser: Browser, show: Callable[..., None], feed: Feed
) -> None:
    show("run/0/heat")
    label = "document.querySelector('.picture canvas').getAttribute('aria-label')"
    before = browser.value(label)
    feed.tick()
    until(browser, f"{label} !== {before!r}", 10)
    quiet(browser)


def test_by_keyboard(browser: Browser, show: Callable[..., None]) -> None:
    def press(key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, text="")

    show("run/0/run")
    press("3")
    until(browser, "location.hash === '#/run/0/heat'")
    until(browser, "document.querySelector('.picture canvas')")
    browser.value("document.querySelector('.picture canvas').focus()")
    press("ArrowDown")
    press("ArrowDown")
    assert "rank 2" in browser.value("document.getElementById('tip').innerText")
    press("1")
    until(browser, "document.querySelector('.phases')")
    browser.value("document.querySelector('.phases').focus()")
    press("ArrowLeft")
    press("ArrowLeft")
    assert "generation 3 state travels" in browser.value("document.getElementById('tip').innerText")
    press("0")
    until(browser, "location.hash === '#/runs'")
    reached = browser.value(
        "[...document.querySelectorAll('header a, header select, tbody a')]"
        ".every((e) => (e.focus(), document.activeElement === e))"
    )
    assert reached


def test_a_choice_is_in_the_address(browser: Browser, show: Callable[..., None]) -> None:
    show("run/0/heat")
    browser.value(
        "(() => { const s = document.querySelector('main select'); "
        "s.value = 'tutti_nic_received_bytes_total'; "
        "s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    until(browser, "location.hash.includes('figure=tutti_nic_received_bytes_total')")
    until(browser, "document.querySelector('.picture canvas')")
    quiet(browser)


def test_a_saved_file_shows_every_view_without_a_server(
    browser: Browser, show: Callable[..., None], feed: Feed, tmp_path: Path
) -> None:
    page = tmp_path / "all.html"
    save_all([RunFolder(feed.folder, HOSTILE)], page)
    for view in VIEWS:
        show(f"run/0/{view}", page.as_uri())
        text = until(browser, "document.body.innerText")
        assert "saved" in text
        if view not in ("map", "logs"):
            assert WORDS[view] in text
        quiet(browser)


def test_a_run_that_is_no_more_and_a_view_that_is_none(
    browser: Browser, show: Callable[..., None], address: str
) -> None:
    show("run/1/heat")
    assert "no figures by the second" in browser.value("document.body.innerText")
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=f"{address}#/run/9/nonsense")
    until(browser, "document.body && document.body.innerText.includes('no such run')")


def test_what_was_drawn_for_another_width_is_drawn_again(
    browser: Browser, show: Callable[..., None]
) -> None:
    show("run/0/run")
    browser.value(
        "(() => { const box = document.createElement('div'); box.style.width = '600px'; "
        "document.body.append(box); window.calls = []; "
        "onWidth(box, (width) => calls.push(width), 300); "  # drawn while it had half of it
        "onWidth(box, (width) => calls.push(-width), 600); })()"
    )
    until(browser, "calls.length > 0")
    assert browser.value("calls") == [600]
    browser.value("(() => { document.body.lastElementChild.style.width = '500px'; })()")
    until(browser, "calls.length > 2")
    assert sorted(browser.value("calls")) == [-500, 500, 600]
    widths = (
        "[...document.querySelectorAll('.chart > div')].map((box) => "
        "[box.clientWidth, box.querySelector('.uplot').getBoundingClientRect().width])"
    )
    drawn = browser.value(widths)
    assert drawn
    assert all(box == chart for box, chart in drawn)
