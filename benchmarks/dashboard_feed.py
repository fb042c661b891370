"""The dashboard in headless Chromium over a simulated run of 1,024 ranks, for as long as asked.

    python -m benchmarks.dashboard_feed --minutes 30 [-o out.json]

A process of its own writes a second of all ranks' figures every second, as a run does; the server
is `tutti dashboard` as users start it. Measured: how long after its address was typed a view can be
used (first, and again), how old the newest column of the heat map is when it is on the screen,
since its second and since the run had written it (a busy machine holds up the run, too), and the
memory of the page (after a collection) and of the server, minute by minute. Needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.support.browser import Browser
from tests.support.watched_runs import Feed, plan_of

RANKS = 1024
WRITTEN = "written"  # beside the run: each second, and when it was in the store
VIEWS = ("runs", "run/0/run", "run/0/map", "run/0/heat", "run/0/alerts", "run/0/doctor")
_TIMEOUT_S = 60.0


def be_feed(folder: Path, ranks: int) -> None:
    """Write a run that grows by a second every second, until killed."""
    feed = Feed(folder, plan_of(ranks, 8), slow=300, seconds=300)
    while feed.second < int(time.time()):  # what went by while the first seconds were written
        feed.tick()
    print("ready", flush=True)
    with (folder.parent / WRITTEN).open("w", buffering=1) as written:
        while True:
            time.sleep(max(0.0, feed.second + 1 - time.time()))
            feed.tick()
            written.write(f"{feed.second} {time.time():.3f}\n")


def opened(browser: Browser, address: str) -> float:
    """Return the seconds from a view's address until it is drawn."""
    name = address.rpartition("/")[2]
    browser.call("Page.navigate", url="about:blank")
    began = time.monotonic()
    browser.call("Page.navigate", url=address)
    while browser.value("document.documentElement?.dataset.drawn ?? ''") != name:
        if time.monotonic() > began + _TIMEOUT_S:
            raise SystemExit(f"{address} has not drawn itself within {_TIMEOUT_S:g} s")
        time.sleep(0.01)
    return time.monotonic() - began


def listened(browser: Browser) -> None:
    """Let the page note when each column of the heat map came onto the screen."""
    browser.value(
        "(() => { window.came = []; const add = Matrix.prototype.add; "
        "Matrix.prototype.add = function (found, span) { add.call(this, found, span); "
        "requestAnimationFrame(() => came.push([Date.now() / 1000, this.seconds.at(-1)])); }; })()"
    )


def came(browser: Browser, seconds: float) -> list[tuple[float, float]]:
    """Return when columns came onto the screen, and the newest second of each."""
    browser.value("window.came = []; 0")
    time.sleep(seconds)
    return [(at, second) for at, second in browser.value("window.came")]


def since_written(columns: list[tuple[float, float]], file: Path) -> list[float]:
    """Return how long after the run had written a second its column was on the screen."""
    lines = (line.split() for line in file.read_text().splitlines())
    at_by_second = {float(second): float(at) for second, at in lines}
    return [at - at_by_second[second] for at, second in columns if second in at_by_second]


def heap(browser: Browser) -> float:
    """Return the bytes that the page's scripts hold after a collection."""
    browser.call("HeapProfiler.collectGarbage")
    return float(browser.call("Runtime.getHeapUsage")["usedSize"])


def watched(address: str, server: psutil.Process, minutes: int, written: Path) -> dict[str, object]:
    """Open every view twice, then watch the heat map."""
    with Browser() as browser:
        browser.call("Page.enable")
        browser.call("HeapProfiler.enable")
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=1280, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        first = {view: opened(browser, f"{address}#/{view}") for view in VIEWS}
        again = {view: opened(browser, f"{address}#/{view}") for view in VIEWS}
        for words, found in (("first", first), ("again", again)):
            said = ", ".join(f"{view} {seconds:.2f} s" for view, seconds in found.items())
            print(f"usable, {words}: {said}", flush=True)
        opened(browser, f"{address}#/run/0/heat")
        rows = browser.value("document.querySelector('.picture canvas').getAttribute('aria-label')")
        print(rows, flush=True)
        listened(browser)
        columns: list[tuple[float, float]] = []
        memory = []
        for minute in range(minutes + 1):
            memory.append((heap(browser), float(server.memory_info().rss)))
            print(f"minute {minute}: page {memory[-1][0] / 1e6:.2f} MB, "
                  f"server {memory[-1][1] / 1e6:.0f} MB", flush=True)  # fmt: skip
            if minute < minutes:
                columns += came(browser, 60.0)
    old = [at - second for at, second in columns]
    return {
        "first_s": first, "again_s": again, "age_s": old, "memory_bytes": memory,
        "since_written_s": since_written(columns, written),
    }  # fmt: skip


def main() -> None:
    """Start the feed, the server and the browser, and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--feed", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.feed is not None:
        be_feed(args.feed, args.ranks)
        return
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        own = [sys.executable, "-m", "benchmarks.dashboard_feed", "--ranks", str(args.ranks)]
        feed = subprocess.Popen([*own, "--feed", str(run)], stdout=subprocess.PIPE, text=True)
        server: subprocess.Popen[str] | None = None
        try:
            assert feed.stdout is not None
            feed.stdout.readline()
            server = subprocess.Popen(
                [sys.executable, "-m", "tutti.cli.main", "dashboard", str(run), "--port", "0"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            assert server.stdout is not None
            said = server.stdout.readline()
            found = re.search(r"http://\S+?/", said)
            if found is None:
                raise SystemExit(f"the dashboard did not start: {said}")
            written = run.parent / WRITTEN
            result = watched(found[0], psutil.Process(server.pid), args.minutes, written)
        finally:
            for process in filter(None, (server, feed)):
                process.kill()
                process.wait()
    for name, words in (("age_s", "its second"), ("since_written_s", "it was written")):
        old = sorted(result[name])  # type: ignore[call-overload]
        if old:
            high = old[int(0.99 * (len(old) - 1))]
            print(f"newest column on the screen, since {words}: median {statistics.median(old):.2f}"
                  f" s, 99 % {high:.2f} s, most {old[-1]:.2f} s of {len(old)}")  # fmt: skip
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
